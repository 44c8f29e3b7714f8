"""Without torch, or without JAX, the half of tplab that needs it says what to install; the other half works."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tplab
from tplab.__main__ import main

RECORD = "torchrun --nproc-per-node 8 -m tplab.record train.py"
COMMANDS = ("torchrun", "doctor", "record", "merge", "forecast", "measure")


def imported(module: str, *, without: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules['{without}'] = None\nimport {module}"
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["tplab.torch", "tplab.torch.layers.linear"])
def test_without_torch(module: str):
    last = imported(module, without="torch").stderr.splitlines()[-1]
    assert last == (
        "tplab.errors.MissingPackageError: tplab.torch needs torch, which is not installed; "
        "to install it: pip install 'tplab[torch] @ git+https://github.com/tplab/tplab'"
    )


@pytest.mark.parametrize("module", ["tplab.jax", "tplab.jax.layers.linear"])
def test_without_jax(module: str):
    last = imported(module, without="jax").stderr.splitlines()[-1]
    assert last == (
        "tplab.errors.MissingPackageError: tplab.jax needs jax, which is not installed; "
        "to install it: pip install 'tplab[jax] @ git+https://github.com/tplab/tplab'"
    )


@pytest.mark.parametrize("module, without", [("tplab.jax", "torch"), ("tplab.torch", "jax")])
def test_one_half_works_without_the_other(module: str, without: str):
    assert imported(module, without=without).stderr == ""


def test_run_says_where_it_is():
    with pytest.raises(ImportError, match=r"^run is in tplab.torch or tplab.jax: the import is the switch"):
        from tplab import run  # noqa: F401  # pyright: ignore
    import tplab

    assert not hasattr(tplab, "runs") and not hasattr(tplab, "run") and getattr(tplab, "launch", None) is None
    with pytest.raises(AttributeError, match=r"^train is in tplab.torch or tplab.jax"):
        tplab.train  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_as_a_command_lists_the_commands():
    done = subprocess.run([sys.executable, "-W", "error", "-m", "tplab"], capture_output=True, text=True)
    named = set(re.findall(r"-m (tplab\.\w+)", done.stdout))
    assert (done.returncode, done.stderr) == (0, "")
    assert named == {f"tplab.{command}" for command in COMMANDS}
    assert all(find_spec(name) for name in named)


def test_a_mistyped_command_is_an_error(capsys: pytest.CaptureFixture[str]):
    for arguments, said in [
        (["torchrn", "train.py"], "there is no command 'torchrn'; did you mean torchrun?"),
        (["xyz"], "there is no command 'xyz'; there are torchrun, doctor, record, merge, forecast, measure"),
        (["record", "train.py"], f"record runs on ranks that torchrun starts: {RECORD}"),
        (["--hlp"], "unrecognized argument: --hlp; did you mean --help? (--help lists the flags)"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert (ended.value.code, capsys.readouterr().err) == (2, f"tplab: {said}\n")


def ran(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


def test_tplab_runs_the_command_that_it_is_given(tmp_path: Path):
    done = ran("-m", "tplab", "merge", str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("tplab.merge: there is no folder")
    done = ran("-m", "tplab", "forecast", "--version")
    assert (done.returncode, done.stdout) == (0, f"tplab {tplab.__version__}\n")


def test_tplab_is_a_command():
    project = tomllib.loads((Path(tplab.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf8"))["project"]
    module, _, function = project["scripts"]["tplab"].partition(":")
    done = ran(
        "-c", f"import sys; sys.argv = ['tplab', 'xyz']; from {module} import {function} as run; sys.exit(run())"
    )
    assert done.returncode == 2 and done.stderr.startswith("tplab: there is no command 'xyz'")


def test_a_module_that_is_not_there_is_one_sentence(tmp_path: Path):
    for command in ("torchrun", "doctor"):
        done = ran("-m", f"tplab.{command}", "--nproc-per-node", "2", "-m", "nope.train", cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"tplab.{command}: ") and "nope" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["tplab"], ["tplab.forecast", "llama3-8b", "--cluster", "h100", "--gpus", "8", "--batch", "8"]]
)
def test_a_reader_that_leaves_is_no_mistake(arguments: list[str]):
    """As `| head` does: the pipe is closed before the report is written."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        done = subprocess.run([sys.executable, "-m", *arguments], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_says_its_version(command: str):
    name = f"tplab.{command}" if command else "tplab"
    done = subprocess.run([sys.executable, "-m", name, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tplab {tplab.__version__}\n", "")


@pytest.mark.parametrize("command", ["torchrun", "doctor", "record"])
def test_a_command_that_needs_torch_says_so_in_one_sentence(command: str, tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    flags = [] if command == "record" else ["--nproc-per-node", "2"]
    code = (
        f"import runpy, sys; sys.modules['torch'] = None; sys.argv[1:] = {[*flags, str(tmp_path / 'train.py')]}\n"
        f"runpy.run_module('tplab.{command}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"tplab.{command}: tplab.torch needs torch, which is not installed; to install it: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_framework(command: str):
    code = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['jax'] = None; sys.argv[1:] = ['--help']\n"
        f"runpy.run_module('tplab.{command}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "usage:" in done.stdout
