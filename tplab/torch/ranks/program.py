"""Which files belong to the user's program, and which to installed packages, wherever those are."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import islice
from pathlib import Path
from types import FrameType

import torch

_HERE = Path(__file__)
_OURS = tuple(str(folder) + os.sep for folder in (_HERE.parents[2], _HERE.resolve().parents[2]))
OURS = (*_OURS, str(Path(torch.__file__).parent) + os.sep)
"""The folders of tplab and torch."""
_OTHERS = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED = (*OURS, *_OTHERS, "<frozen")
_SITES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def is_program(filename: str) -> bool:
    """Whether a file belongs to the program, not to an installed package.

    Packages are installed in folders named site-packages or dist-packages: this interpreter's, the user's, the
    system's, another environment's. Any folder on sys.path that pip has filled lists its packages in *.dist-info.
    """
    if filename.startswith(_INSTALLED) or any(site in filename for site in _SITES):
        return False
    for folder in sys.path:
        if folder and filename.startswith(folder) and (names := _filled_by_pip(folder)):
            rest = filename[len(folder) :].lstrip(os.sep)
            if rest.partition(os.sep)[0].removesuffix(".py") in names:
                return False
    return True


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have led to it, from the innermost outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def has_compiled_parts(filename: str, package: str) -> bool:
    """Whether the package of this name that contains a file has compiled parts. These exist once per process, so the
    package can be imported only once."""
    above, found, _ = filename.rpartition(f"{os.sep}{package}{os.sep}")
    return bool(found) and _is_compiled(above + found)


@cache
def _filled_by_pip(folder: str) -> frozenset[str]:
    """The names of the packages and modules that pip has installed there."""
    names = set[str]()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        lines = record.read_text(encoding="utf8", errors="replace").splitlines()
        names.update(line.partition(",")[0].partition("/")[0].removesuffix(".py") for line in lines)
    return frozenset(names)


@cache
def _is_compiled(folder: str) -> bool:
    files = (name for _, _, names in os.walk(folder) for name in names)
    return any(name.endswith(tuple(EXTENSION_SUFFIXES)) for name in islice(files, _MOST_FILES))


_MOST_FILES = 20_000
