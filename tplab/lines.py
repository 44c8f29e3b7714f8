"""Lines of the user's program, as a reader knows them."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import Any


def line_text(filename: str, line: int) -> str:
    """ "file.py:12"; in a notebook "cell 3, line 4", with the number that stands beside the cell: In [3].

    A cell that was run without being counted, as some tools run notebooks, has no number: "line 4 of the cell".
    """
    shell = _shell()
    if filename not in _numbers(shell):
        return f"{Path(filename).name}:{line}"
    number = _number(shell, filename)
    return f"line {line} of the cell" if number is None else f"cell {number}, line {line}"


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def _numbers(shell: Any) -> dict[str, int]:
    """Each cell is compiled as a file; IPython knows which file came from which cell, the latest of equal ones."""
    return getattr(getattr(shell, "compile", None), "_filename_map", {})


def _number(shell: Any, filename: str) -> int | None:
    """The number of a cell, if its text is what IPython keeps under that number. It gives one to every cell, but to
    those that it does not count the one that the next counted cell will have."""
    number = _numbers(shell)[filename]
    kept = shell.user_ns.get("In", ()) if hasattr(shell, "user_ns") else ()
    is_counted = number < len(kept) and kept[number].strip() == "".join(linecache.getlines(filename)).strip()
    return number if is_counted else None
