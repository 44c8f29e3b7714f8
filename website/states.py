"""The states of a lab's widgets. A committed notebook has only a picture and a sentence of each, so the lab is run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from labs.source import build

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "build" / "site-states"
OPENING = "opening"
WORKERS = 2  # labs that run at the same time; each may take 1 GB


@dataclass(frozen=True)
class State:
    """A widget after its cell has run.

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
    """An output of a cell: its data by MIME type, and the widget, if it is one."""

    data: dict[str, Any]
    metadata: dict[str, Any]
    state: State | None


def states(names: Sequence[str]) -> dict[str, dict[str, list[Output]]]:
    """The outputs of each cell of these labs, by lab and cell id. Labs that have not changed are not run again.

    OPENING is the name of the front page's programs, in addition to labs.
    """
    files = {name: file_of(name) for name in names}
    missing = [name for name in names if not files[name].is_file()]
    if missing:
        with ProcessPoolExecutor(min(WORKERS, len(missing)), get_context("spawn")) as pool:
            for name, found in zip(missing, pool.map(_run, missing)):
                keep(files[name], found)
    return {name: _read(file) for name, file in files.items()}


def _book(name: str) -> nbformat.NotebookNode:
    if name == OPENING:
        from website import opening  # it imports this module

        return opening.book()
    return nbformat.read(build.LABS / f"{name}.ipynb", as_version=4)


def _run(name: str) -> dict[str, list[Output]]:
    """Run the lab in its own kernel."""
    book = _book(name)
    found: dict[str, list[Output]] = {}

    def note(client: NotebookClient, cell: nbformat.NotebookNode) -> None:
        buffers = {
            model: {one["path"][0]: one["data"] for one in paths.values()}
            for model, paths in client.widget_buffers.items()
        }
        found[cell.id] = outputs_of(cell.get("outputs", []), client.widget_state, buffers)

    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    build.execute(book, name, note)
    return found


def outputs_of(
    shown: Iterable[Mapping[str, Any]], traits: Mapping[str, Mapping[str, Any]], packed: Mapping[str, Mapping[str, str]]
) -> list[Output]:
    """The outputs of a cell in a notebook, with widgets from the traits of their models in the kernel."""
    found = []
    for output in shown:
        if "data" not in output:
            continue
        data, metadata = dict(output["data"]), dict(output["metadata"])
        metadata.pop(build.WIDGET_VIEW, None)
        view = data.pop(build.WIDGET_VIEW, None)
        model = view["model_id"] if view else ""
        found.append(Output(data, metadata, _state(traits[model], packed.get(model, {})) if view else None))
    return found


def _state(traits: Mapping[str, Any], packed: Mapping[str, str]) -> State:
    spare = {"layout", "tabbable", "tooltip"}  # every widget of ipywidgets has these, and no card of tplab reads them
    return State(
        kind=traits["_anywidget_id"].rpartition(".")[2],
        module=traits["_esm"],
        values={key: value for key, value in traits.items() if not key.startswith("_") and key not in spare},
        packed=dict(packed),
    )


# ------------------------------------------------------------------------------------------------------------- cache


def file_of(name: str) -> Path:
    """The cache file for the current lab, tplab and versions of packages."""
    parts = [cell.source.encode() for cell in _book(name).cells if cell.cell_type == "code"]
    package = sorted(path for path in (ROOT / "tplab").rglob("*") if path.suffix in (".py", ".js", ".css"))
    parts += [path.read_bytes() for path in [*package, *(ROOT / "docs" / name for name in ("ring.py", "train.py"))]]
    parts += [f"{name} {version(name)}".encode() for name in ("torch", "jax", "numpy", "anywidget")]
    parts.append(repr([field.name for kind in (State, Output) for field in fields(kind)]).encode())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return CACHE / f"{name}-{digest.hexdigest()[:16]}.json"


def keep(file: Path, found: Mapping[str, list[Output]]) -> None:
    """Keep the outputs of a lab's cells for the next `make site`, and remove older ones."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for old in file.parent.glob(f"{file.stem.rpartition('-')[0]}-*.json"):
        old.unlink()
    text = json.dumps({cell: [asdict(output) for output in outputs] for cell, outputs in found.items()})
    file.write_text(text, encoding="utf8")


def _read(file: Path) -> dict[str, list[Output]]:
    found = json.loads(file.read_text(encoding="utf8"))
    return {cell: [_output_of(one) for one in outputs] for cell, outputs in found.items()}


def _output_of(kept: dict[str, Any]) -> Output:
    return Output(kept["data"], kept["metadata"], State(**kept["state"]) if kept["state"] else None)
