"""What ranks print comes out in the order of ranks, each line saying whose it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _ByRank:
    """Stands in for sys.stdout: what a rank writes is kept for later, everybody else's goes through."""

    def __init__(self, stream: TextIO, sheet_of_writer: Callable[[], list[str] | None]):
        self._stream, self._sheet_of_writer = stream, sheet_of_writer

    def write(self, text: str) -> int:
        sheet = self._sheet_of_writer()
        if sheet is None:
            return self._stream.write(text)
        sheet.append(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # all else is that of the stream
        return getattr(self._stream, name)


@contextmanager
def print_by_rank(sheets: list[list[str]], sheet_of_writer: Callable[[], list[str] | None]) -> Iterator[None]:
    """While this is open, what a rank prints goes to its sheet; at the end, also after a failure, all are shown."""
    stream = sys.stdout
    stand_in = sys.stdout = _ByRank(stream, sheet_of_writer)  # type: ignore[assignment]
    try:
        yield
    finally:
        if sys.stdout is stand_in:  # and not what the program has put there
            sys.stdout = stream
        show(sheets, stream)


def show(sheets: list[list[str]], stream: TextIO | None = None) -> None:
    """Print the sheets of all ranks, rank 0 first, a label before each line."""
    for rank, sheet in enumerate(sheets):
        text = "".join(sheet)
        for line in text.removesuffix("\n").split("\n") if text else []:
            print(f"[rank {rank}] {line}", file=stream or sys.stdout)
