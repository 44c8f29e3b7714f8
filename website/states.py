"""What the widgets of a lab show. A committed notebook has a picture and a sentence of each, so the lab is run once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from labs.source import build

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "build" / "site-states"
OPENING = "opening"
_RING = """\
import runpy
from tplab import Mesh
from tplab.torch import run
from tplab.widgets import animate

program = runpy.run_path("../docs/ring.py")["all_reduce_around_a_ring"]
animate(run(program, Mesh(tp=8)).trace)"""
WORKERS = 2  # labs that run at the same time; each may take 1 GB


@dataclass(frozen=True)
class State:
    """A widget, as it was when its cell had run.

    kind      the name of its class: "Animation"
    module    the ES module that draws it
    values    its traits that are numbers, words, lists and tables of these
    packed    its traits that are bytes, in base64
    """

    kind: str
    module: str
    values: dict[str, Any]
    packed: dict[str, str]


@dataclass(frozen=True)
class Output:
    """What a cell showed: its data by MIME type, and the widget, if it is one."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    state: State | None


def states(names: Sequence[str]) -> dict[str, dict[str, list[Output]]]:
    """What each cell of these labs shows, by lab and by the cell's id; labs that have not changed are not run again.

    Besides labs, there is OPENING: one cell, which shows what the README begins with.
    """
    missing = [name for name in names if not _file(name).is_file()]
    if missing:
        with ProcessPoolExecutor(min(WORKERS, len(missing)), get_context("spawn")) as pool:
            for name, found in zip(missing, pool.map(_run, missing)):
                _keep(name, found)
    return {name: _read(name) for name in names}


def _book(name: str) -> nbformat.NotebookNode:
    if name == OPENING:
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(_RING, id=OPENING)])
    return nbformat.read(build.LABS / f"{name}.ipynb", as_version=4)


def _run(name: str) -> dict[str, list[Output]]:
    """Run the lab in a kernel of its own."""
    book = _book(name)
    found: dict[str, list[Output]] = {}

    def note(client: NotebookClient, cell: nbformat.NotebookNode) -> None:
        shown = [output for output in cell.get("outputs", []) if "data" in output]
        found[cell.id] = [_output(client, output) for output in shown]

    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    build.execute(book, name, note)
    return found


def _output(client: NotebookClient, output: nbformat.NotebookNode) -> Output:
    data, metadata = dict(output.data), dict(output.metadata)
    metadata.pop(build.WIDGET_VIEW, None)
    view = data.pop(build.WIDGET_VIEW, None)
    return Output(data, metadata, _state(client, view["model_id"]) if view else None)


def _state(client: NotebookClient, model: str) -> State:
    traits = client.widget_state[model]
    buffers = client.widget_buffers.get(model, {}).values()
    spare = {"layout", "tabbable", "tooltip"}  # every widget of ipywidgets has these, and no card of tplab reads them
    return State(
        kind=traits["_anywidget_id"].rpartition(".")[2],
        module=traits["_esm"],
        values={key: value for key, value in traits.items() if not key.startswith("_") and key not in spare},
        packed={buffer["path"][0]: buffer["data"] for buffer in buffers},
    )


# ------------------------------------------------------------------------------------------------------------- cache


def _file(name: str) -> Path:
    """The file for this lab and this tplab, each as it is now."""
    parts = [cell.source.encode() for cell in _book(name).cells if cell.cell_type == "code"]
    package = sorted(path for path in (ROOT / "tplab").rglob("*") if path.suffix in (".py", ".js", ".css"))
    parts += [path.read_bytes() for path in [*package, ROOT / "docs" / "ring.py", Path(__file__)]]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return CACHE / f"{name}-{digest.hexdigest()[:16]}.json"


def _keep(name: str, found: dict[str, list[Output]]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob(f"{name}-*.json"):
        old.unlink()
    text = json.dumps({cell: [asdict(output) for output in outputs] for cell, outputs in found.items()})
    _file(name).write_text(text, encoding="utf8")


def _read(name: str) -> dict[str, list[Output]]:
    found = json.loads(_file(name).read_text(encoding="utf8"))
    return {cell: [_output_of(one) for one in outputs] for cell, outputs in found.items()}


def _output_of(kept: dict[str, Any]) -> Output:
    return Output(kept["data"], kept["metadata"], State(**kept["state"]) if kept["state"] else None)
