"""Lines of the user's program, named so that a reader can find them."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOT_COUNTED = 0
"""The number of a cell that was not counted."""


def line_text(filename: str, line: int) -> str:
    """ "file.py:12"; in a notebook "cell 3, line 4", with the number shown beside the cell: In [3].

    If a cell was run without being counted, as some tools do, it has no number: "line 4 of the cell".
    """
    number = _cell_of(filename)
    if number is None:
        return f"{Path(filename).name}:{line}"
    return f"line {line} of the cell" if number == NOT_COUNTED else f"cell {number}, line {line}"


def notebook_cells() -> Mapping[str, int]:
    """File -> number, for the cells of the notebook that runs in this process. Each cell is compiled as its own file.

    IPython knows which file came from which cell (the latest, if several are equal). Before IPython 8 it did not; there
    we look for the text of the file among the texts of the cells, which are kept without trailing empty lines.
    """
    shell = _shell()
    known = getattr(getattr(shell, "compile", None), "_filename_map", None)
    if known is not None:
        return known
    numbers = {name: _number_of(name, shell) for name in list(linecache.cache) if _is_of_kernel(name)}
    return {name: number for name, number in numbers.items() if number}


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _is_of_kernel(filename: str) -> bool:
    """Whether this is the file of a cell, as a kernel or terminal older than IPython 8 names it."""
    if filename.startswith("<ipython-input-"):
        return True
    compiler = sys.modules.get("ipykernel.compiler")
    return compiler is not None and str(Path(filename).parent) == compiler.get_tmp_directory()


def _number_of(filename: str, shell: Any) -> int:
    """The number of the latest cell whose text was compiled as this file, before IPython 8."""
    text = _text_of(filename)
    cells = enumerate(_texts_of_cells(shell))
    numbers = (number for number, kept in cells if text and _is_same(kept, text, shell))
    return max(numbers, default=NOT_COUNTED)


def _text_of(filename: str) -> str:
    """The text that was compiled as this file, with magics replaced and without trailing empty lines."""
    return "".join(linecache.getlines(filename)).rstrip("\n")


def _texts_of_cells(shell: Any) -> Sequence[str]:
    """The texts that were compiled as cells 0, 1, 2, ...; cell 0 does not exist."""
    return getattr(shell, "user_ns", {}).get("In", ())


def _cell_of(filename: str) -> int | None:
    """The number of the cell that is compiled as this file; None if it is not a cell."""
    shell = _shell()
    if shell is None:
        return None
    known: Mapping[str, int] | None = getattr(shell.compile, "_filename_map", None)
    if known is None:
        return _number_of(filename, shell) if _is_of_kernel(filename) else None
    number = known.get(filename)
    if number is None:
        return None
    # a cell that is not counted gets the number that the next counted cell will have
    kept = _texts_of_cells(shell)
    is_counted = number < len(kept) and _is_same(kept[number], _text_of(filename), shell)
    return number if is_counted else NOT_COUNTED


def _is_same(kept: str, text: str, shell: Any) -> bool:
    """Whether `kept` is what IPython stores for a cell with this text. For a cell that begins with a magic, such as
    `%%ranks`, it stores a call of the magic."""
    text = text.strip()
    return kept.strip() in (text, shell.transform_cell(text).strip() if text.startswith("%%") else text)
