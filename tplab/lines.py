"""Lines of the user's program, as a reader knows them."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

NOT_COUNTED = 0
"""In place of the number of a cell that has none."""


def line_text(filename: str, line: int) -> str:
    """ "file.py:12"; in a notebook "cell 3, line 4", with the number that stands beside the cell: In [3].

    A cell that was run without being counted, as some tools run notebooks, has no number: "line 4 of the cell".
    """
    number = _cell_of(filename)
    if number is None:
        return f"{Path(filename).name}:{line}"
    return f"line {line} of the cell" if number == NOT_COUNTED else f"cell {number}, line {line}"


def notebook_cells() -> Mapping[str, int]:
    """File -> number, of the cells of the notebook that runs in this process: each is compiled as a file of its own.

    IPython knows which file came from which cell, the latest of equal ones. Before IPython 8 it did not; there a file's
    name is found again from the text of the cell.
    """
    shell = _shell()
    known = getattr(getattr(shell, "compile", None), "_filename_map", None)
    if known is not None:
        return known
    if _compiler() is None:
        return {}
    texts = getattr(getattr(shell, "history_manager", None), "input_hist_raw", ())
    return {_file_of(text): number for number, text in enumerate(texts) if text}


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _compiler() -> Any:
    return sys.modules.get("ipykernel.compiler")


@cache
def _file_of(text: str) -> str:
    return _compiler().get_file_name(text)


def _cell_of(filename: str) -> int | None:
    """The number of the cell that is compiled as this file; None for what is no cell."""
    shell = _shell()
    if shell is None:
        return None
    number = notebook_cells().get(filename)
    if not hasattr(shell.compile, "_filename_map"):
        is_of_kernel = _compiler() is not None and str(Path(filename).parent) == _compiler().get_tmp_directory()
        return NOT_COUNTED if number is None and is_of_kernel else number
    if number is None:
        return None
    # a cell that is not counted is given the number that the next counted one will have
    kept = shell.user_ns.get("In", ()) if hasattr(shell, "user_ns") else ()
    is_counted = number < len(kept) and kept[number].strip() == "".join(linecache.getlines(filename)).strip()
    return number if is_counted else NOT_COUNTED
