"""Execute the labs from their text pairs and write the notebooks, with their outputs, into labs/.

    python labs/source/build.py [name ...]

A text pair is jupytext's "py:percent": `# %%` begins a code cell, `# %% [markdown]` a text cell,
`# %% tags=["nbval-ignore-output"]` one whose output is not compared. The notebook is made from it alone:
the same source gives the same cells, ids and metadata, and (as far as the code allows) the same outputs.
"""

import base64
import hashlib
import re
import sys
import time
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


SOURCE = Path(__file__).parent
LABS = SOURCE.parent
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELL_TIMEOUT_SECONDS = 120
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
OPENING_PICTURE = "opening-picture"


@cache
def repository() -> str:
    """The repository's address, from the one place that has it."""
    project = tomllib.loads((LABS.parent / "pyproject.toml").read_text(encoding="utf8"))["project"]
    return project["urls"]["Repository"]


def badges(name: str) -> str:
    """The line of Markdown that opens lab `name` on Colab and on Binder."""
    path = repository().removeprefix("https://github.com/")
    colab = f"https://colab.research.google.com/github/{path}/blob/main/labs/{name}.ipynb"
    binder = f"https://mybinder.org/v2/gh/{path}/main?urlpath=lab/tree/labs/{name}.ipynb"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open on Binder](https://mybinder.org/badge_logo.svg)]({binder})"
    )


def setup_cell() -> str:
    """The code cell that every lab begins with. tplab's core needs nothing newer than what Colab has."""
    return (
        "import subprocess\n"
        "import sys\n"
        "\n"
        "# On Colab, install tplab; torch, jax and ipywidgets are already there.\n"
        f'install = ["pip", "install", "-q", "git+{repository()}"]\n'
        'if "google.colab" in sys.modules and subprocess.run(install).returncode:\n'
        '    raise RuntimeError("tplab is missing: see above, restart the runtime and try again")'
    )


def closing_line() -> str:
    """The text cell that every lab ends with."""
    return (
        "Before you open another lab, shut down the kernel of this one (*Kernel > Shut Down Kernel*): on Binder, all open labs\n"
        "share 2 GB of memory."
    )


def names() -> list[str]:
    """The labs that have a source, in order."""
    return sorted(path.stem for path in SOURCE.glob("[0-9]*.py"))


def read_source(name: str) -> nbformat.NotebookNode:
    """The notebook that the text pair stands for, not yet executed."""
    text = jupytext.read(SOURCE / f"{name}.py", fmt="py:percent")
    book = nbformat.v4.new_notebook(metadata={"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    seen: dict[str, int] = {}
    for cell in text.cells:
        # An id that depends on what the cell says, so that a new cell elsewhere changes nothing here.
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, -1) + 1
        cell.id = digest if not seen[digest] else f"{digest}-{seen[digest]}"
        if cell.source == setup_cell():  # folded: nothing in it helps a reader
            cell.metadata |= {"jupyter": {"source_hidden": True}, "cellView": "form"}
        book.cells.append(cell)
    return book


def execute(
    book: nbformat.NotebookNode,
    name: str,
    after_cell: Callable[[NotebookClient, nbformat.NotebookNode], None] | None = None,
) -> int:
    """Run every cell, in order, in a fresh kernel; return the kernel's peak memory in bytes (0: not known here).

    after_cell   called after each cell with the client, which knows the widgets' state, and the cell
    """
    # Without the widgets' state nbclient stumbles over a captured Output; what it would write into the notebook's
    # metadata, which GitHub rejects, is never asked for: that comes only with `client.execute()`.
    client = NotebookClient(
        book,
        kernel_name="python3",
        timeout=CELL_TIMEOUT_SECONDS,
        record_timing=False,
        store_widget_state=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(LABS)}},
    )
    with client.setup_kernel():
        for index, cell in enumerate(book.cells):
            _progress(f"{name}: cell {index + 1} of {len(book.cells)}")
            client.execute_cell(cell, index, execution_count=client.code_cells_executed + 1)
            if after_cell:
                after_cell(client, cell)
        return _peak_memory(client)


def _peak_memory(client: NotebookClient) -> int:
    status = Path(f"/proc/{getattr(client.km.provisioner, 'pid', None)}/status") if client.km else Path()
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(found[1]) * 1024 if found else 0


def clean(book: nbformat.NotebookNode) -> None:
    """Leave what a reader sees without a kernel, and nothing that differs from run to run."""
    for index, cell in enumerate(book.cells):
        if cell.cell_type != "code":
            continue
        cell.outputs = _merged(cell.outputs)
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise RuntimeError(f"cell {index} writes to stderr:\n{output.text}")
            # A view names a model of a kernel that is gone. Without it the picture beside it is shown.
            output.get("data", {}).pop(WIDGET_VIEW, None)
            output.get("metadata", {}).pop(WIDGET_VIEW, None)
    nbformat.validate(book)


def _merged(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Outputs in which what was printed at one go is one text, also if a slow machine sent it in pieces."""
    merged: list[nbformat.NotebookNode] = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream" and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def opening_picture(book: nbformat.NotebookNode) -> bytes:
    """What the cell with the tag "opening-picture" shows: the lab begins with it, before any code."""
    cells = [cell for cell in book.cells if OPENING_PICTURE in cell.metadata.get("tags", [])]
    shown = [output.get("data", {}).get("image/png") for cell in cells for output in cell.outputs]
    pictures = [png for png in shown if png]
    if len(pictures) != 1:
        raise RuntimeError(
            f'one cell with the tag "{OPENING_PICTURE}" must show one picture; there are {len(pictures)}'
        )
    return base64.b64decode(pictures[0])


def build(name: str) -> None:
    start = time.monotonic()
    book = read_source(name)
    peak = execute(book, name)
    clean(book)
    (LABS / "images" / f"{name}.png").write_bytes(opening_picture(book))
    nbformat.write(book, LABS / f"{name}.ipynb")
    memory = f", {peak / 1e6:.0f} MB at most" if peak else ""
    _progress(f"{name}: {len(book.cells)} cells in {time.monotonic() - start:.1f} s{memory}\n")


def _progress(line: str) -> None:
    if sys.stdout.isatty():
        print(f"\r\033[K{line}", end="", flush=True)
    elif line.endswith("\n"):
        print(line, end="", flush=True)


def main(chosen: list[str]) -> int:
    if unknown := sorted(set(chosen) - set(names())):
        print(f"no source for {', '.join(unknown)}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    for name in chosen or names():
        try:
            build(name)
        except (CellExecutionError, RuntimeError) as error:
            print(f"\nlabs/{name}.ipynb is left as it was: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
