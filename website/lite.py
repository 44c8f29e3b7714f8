"""Labs as notebooks in the reader's browser: JupyterLite, in lite/ of the site, for the labs that need no framework.

JupyterLite and the packages that its Python imports are wheels, pinned with hashes in requirements/browser.lock. Python
itself is the Pyodide of the pipeline lab. A list of packages, in Pyodide's format, has the address of each: all are
files of the site, except for compiled ones, which browsers load from Pyodide's CDN when a cell imports them.
"""

from __future__ import annotations

import ast
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.message import Message
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jupyter_server
import nbformat
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labs.source import build
from website import pyodide
from website.compiled import downloaded
from website.making import needing

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements" / "browser.lock"
WHEELS = ROOT / "build" / "site-wheels"
WORK = ROOT / "build" / "site-lite"
FOLDER = "lite"  # of the site
LIST = "lite-lock.json"  # beside Pyodide
FRAMEWORKS = {"torch", "jax", "tplab.torch", "tplab.jax", "transformers", "tplab.exercises.three_dimensions"}
EXTENSIONS = ("jupyterlite_pyodide_kernel", "jupyterlab_widgets", "anywidget")  # of JupyterLab: the kernel, widgets
KERNEL = "@jupyterlite/pyodide-kernel-extension:kernel"
STARTS_WITH = ["micropip", "piplite", "ipykernel", "comm", "pyodide-kernel", "jedi", "ipython"]
COMPILED = ("numpy", "pillow")
KINDS_OF_FILES = (".py", ".js", ".css", ".csv", ".json")  # of tplab: code, and measurements
TPLAB = ["numpy", "pillow", "ipywidgets", "anywidget", "traitlets"]
"""Packages that tplab imports for the labs here. It works without matplotlib, whose fonts are nicer."""
NO_USE = {"jupyterlab-widgets", "widgetsnbextension"}  # ipywidgets requires them, and they have no Python code
MARKERS = {"sys_platform": "emscripten", "platform_system": "Emscripten", "python_version": "3.14", "extra": ""}


_NOTE = f"""\
*This notebook runs in your browser. When a cell first imports tplab, NumPy and Pillow come from \
{urlsplit(pyodide.numpy_from()).netloc}. If your network does not let you reach it, the cell says that \
there is no module named numpy.*"""


def labs(names: Iterable[str]) -> list[str]:
    """The labs that import no framework, neither directly nor through an exercise."""
    return [name for name in names if not _imports(name) & FRAMEWORKS]


def needs_framework(module: str) -> bool:
    """Whether a module cannot be imported without a framework, or is useless without one."""
    if module in FRAMEWORKS or module.startswith(("torch.", "tplab.torch.", "tplab.jax.", "jax.")):
        return True
    files = pyodide.needed(module) if module.startswith("tplab") else []
    return any(file.parts[:2] in (("tplab", "torch"), ("tplab", "jax")) for file in files)


def sources_of(name: str) -> list[str]:
    """The code cells of a lab."""
    book = nbformat.read(build.LABS / f"{name}.ipynb", as_version=4)
    return [cell.source for cell in book.cells if cell.cell_type == "code"]


def on_the_page(cells: Sequence[str]) -> list[bool]:
    """For each cell of a lab, whether it runs on the lab's page. If most of them cannot, none does."""
    needs = needing(cells, cache(needs_framework))
    return [2 * sum(needs) <= len(cells) and not one for one in needs]


def _imports(name: str) -> set[str]:
    found: set[str] = set()
    for source in sources_of(name):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    return found | {name.partition(".")[0] for name in found}


def write(site: Path, names: Iterable[str], address: str) -> None:
    """Write the notebooks of these labs and the app that runs them. Links to other pages lead to `address`."""
    books = {name: notebook(name, address) for name in names}
    mark, made_of = _mark(books) + str(pyodide.has_numpy(site)), site / FOLDER / "made_of"
    if made_of.is_file() and made_of.read_text() == mark:
        return
    shutil.rmtree(WORK, ignore_errors=True)
    contents = WORK / "contents"
    (contents / "images").mkdir(parents=True)
    for name, text in books.items():
        (contents / f"{name}.ipynb").write_text(text, encoding="utf8")
        shutil.copy(build.LABS / "images" / f"{name}.png", contents / "images")
    wheels = downloaded_wheels()
    for name in ("jupyterlite_core", "jupyterlite_pyodide_kernel", "doit", "pkginfo"):
        zipfile.ZipFile(_named(wheels, name)).extractall(WORK / "tools")
    kernel = WORK / "tools" / f"{_named(wheels, 'jupyterlite_pyodide_kernel').name.rsplit('-', 3)[0]}.data"
    own = sorted(path for path in kernel.rglob("*.whl") if not path.name.startswith("widgetsnbextension"))
    write_packages(site / pyodide.FOLDER, [*wheels, *own], STARTS_WITH)
    _build(site / FOLDER, [_named(wheels, name) for name in EXTENSIONS])
    made_of.write_text(mark)


def _mark(books: Mapping[str, str]) -> str:
    """A hash of everything that lite/ is made of."""
    files = [LOCK, Path(__file__), pyodide.HERE / "package.json", *_sources()]
    parts = [*(text.encode() for text in books.values()), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def page(name: str) -> str:
    """The link from a lab's page to its notebook in JupyterLite."""
    return f"../{FOLDER}/notebooks/index.html?path={name}.ipynb"


def notebook(name: str, address: str) -> str:
    """The notebook as it is in JupyterLite: without its badges, and with links to the pages of other labs."""
    book = nbformat.read(build.LABS / f"{name}.ipynb", as_version=4)
    book.cells = [cell for cell in book.cells if cell.source != build.closing_line()]
    for cell in book.cells:
        if cell.cell_type == "markdown":
            text = cell.source.replace(build.badges(name), _NOTE)
            cell.source = re.sub(r"\]\((\w+)\.ipynb(#[^)]*)?\)", rf"]({address}labs/\1.html\2)", text)
    return nbformat.writes(book)


# ------------------------------------------------------------------------------------------------------------- wheels


def downloaded_wheels() -> list[Path]:
    """The wheels that the lock file pins, downloaded again if it has changed."""
    stamp, mark = WHEELS / "lock", hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != mark:
        shutil.rmtree(WHEELS, ignore_errors=True)
        for_browsers = ["--python-version", "3.14", "--implementation", "py", "--abi", "none", "--platform", "any"]
        options = ["--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:", *for_browsers]
        command = [sys.executable, "-m", "pip", "download", *options, "-r", str(LOCK), "-d", str(WHEELS)]
        _run(command, "the wheels that requirements/browser.lock pins could not be downloaded")
        stamp.write_text(mark)
    return sorted(WHEELS.glob("*.whl"))


def _named(wheels: list[Path], name: str) -> Path:
    (wheel,) = (wheel for wheel in wheels if wheel.name.partition("-")[0] == name)
    return wheel


def write_packages(folder: Path, wheels: Iterable[Path], wanted: Sequence[str] = ()) -> None:
    """Write the wheels that Python needs for tplab and the wanted packages, and the list of them."""
    lock = json.loads((pyodide.installed() / "pyodide-lock.json").read_text(encoding="utf8"))
    found = {name: lock["packages"][name] for name in COMPILED}
    (folder / "wheels").mkdir(parents=True, exist_ok=True)
    for package in found.values():
        address = pyodide.numpy_from() + package["file_name"]
        wheel = downloaded(address, package["sha256"], pyodide.CACHE) if pyodide.has_numpy(folder.parent) else None
        if wheel:
            shutil.copy(wheel, folder / "wheels")
        package["file_name"] = f"wheels/{wheel.name}" if wheel else address
    WORK.mkdir(parents=True, exist_ok=True)
    tplab = WORK / "tplab-0-py3-none-any.whl"
    write_tplab(tplab)
    known = {str(entry["name"]): (wheel, entry) for wheel in [*wheels, tplab] for entry in [_entry(wheel)]}
    known["tplab"][1]["depends"] = TPLAB
    waiting = [*wanted, "tplab"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            wheel, found[name] = known[name]
            shutil.copy(wheel, folder / "wheels")
            waiting += found[name]["depends"]
    (folder / LIST).write_text(json.dumps({**lock, "packages": found}), encoding="utf8")


def _entry(wheel: Path) -> dict[str, Any]:
    """The entry of a package in Pyodide's list."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    modules = {name.partition("/")[0].removesuffix(".py") for name in names if name.endswith(".py")}
    return {
        "name": canonicalize_name(about["Name"]),
        "version": about["Version"],
        "file_name": f"wheels/{wheel.name}",
        "install_dir": "site",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "package_type": "package",
        "imports": sorted(name for name in modules if "." not in name),
        "depends": _needs(about),
        "unvendored_tests": False,
    }


def _needs(about: Message) -> list[str]:
    asked = map(Requirement, about.get_all("Requires-Dist") or [])
    names = {canonicalize_name(one.name) for one in asked if not one.marker or one.marker.evaluate(MARKERS)}
    return sorted(names - NO_USE)


def _sources() -> list[Path]:
    """tplab's files, without tplab.torch and tplab.jax, which need a framework."""
    files = (path for path in sorted((ROOT / "tplab").rglob("*.*")) if path.suffix in KINDS_OF_FILES)
    return [path for path in files if path.relative_to(ROOT).parts[1] not in ("torch", "jax")]


def write_tplab(wheel: Path) -> None:
    """Write tplab as a wheel, with its files unchanged."""
    about = "Metadata-Version: 2.1\nName: tplab\nVersion: 0\n"
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in _sources()}
    files |= {"tplab-0.dist-info/METADATA": about.encode(), "tplab-0.dist-info/RECORD": b""}
    files["tplab-0.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)


# ---------------------------------------------------------------------------------------------------------------- app


def _build(out: Path, extensions: list[Path]) -> None:
    """Let JupyterLite build its app."""
    options = {"lockFileURL": f"../{pyodide.FOLDER}/{LIST}", "packages": STARTS_WITH}
    kernel = {
        "pyodideUrl": f"../../{pyodide.FOLDER}/pyodide.mjs",
        "disablePyPIFallback": True,
        "loadPyodideOptions": options,
    }
    page = {"appName": "tplab", "exposeAppInBrowser": True, "litePluginSettings": {KERNEL: kernel}}
    how = {
        "apps": ["notebooks"],
        "no_sourcemaps": True,
        "contents": ["contents"],
        "output_dir": str(out),
        "ignore_sys_prefix": True,
        "federated_extensions": [str(path) for path in extensions],
    }
    for name, text in {
        "jupyter-lite.json": {"jupyter-lite-schema-version": 0, "jupyter-config-data": page},
        "jupyter_lite_config.json": {"LiteBuildConfig": how},
    }.items():
        (WORK / name).write_text(json.dumps(text), encoding="utf8")
    shutil.rmtree(out, ignore_errors=True)
    paths = os.pathsep.join([str(WORK / "tools"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-m", "jupyterlite_core", "build"]
    _run(command, "JupyterLite could not be put together", cwd=WORK, env={**os.environ, "PYTHONPATH": paths})
    favicons = (
        Path(jupyter_server.__file__).parent / "static" / "favicons"
    )  # which a page shows while its kernel is busy
    shutil.copytree(favicons, out / "static" / "favicons")


def _run(command: list[str], otherwise: str, **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{otherwise}:\n{done.stdout}{done.stderr}")
