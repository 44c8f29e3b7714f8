"""What ranks print appears in the order of ranks, and each line says which rank it is from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from tplab.torch.ranks.live_output import LiveOutput


class Sheet:
    """Replaces sys.stdout while a rank has its turn: what the rank writes is kept for later, what others write goes
    through to `stream`.

    is_writer   whether the calling thread is the rank's
    """

    def __init__(self, stream: TextIO, is_writer: Callable[[], bool]):
        self.stream, self._is_writer = stream, is_writer
        self.pieces: list[str] = []
        self.is_shown = False

    def write(self, text: str) -> int:
        if not self._is_writer():
            return self.stream.write(text)
        self.pieces.append(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # everything else is the stream's
        return getattr(self.stream, name)


def beneath(stream: TextIO) -> TextIO:
    """The stream under those of finished runs, which another thread has put back."""
    while isinstance(stream, Sheet | LiveOutput) and stream.is_shown:
        stream = stream.stream
    return stream


def show_sheets(sheets: Sequence[Sheet]) -> None:
    """Print the sheets of all ranks to the sys.stdout that the run has found."""
    for sheet in sheets:
        sheet.is_shown = True
    if sheets:
        show([sheet.pieces for sheet in sheets], sheets[0].stream)


def show(sheets: Sequence[Sequence[str]], stream: TextIO | None = None) -> None:
    """Print the sheets of all ranks, rank 0 first, a label before each line."""
    for rank, sheet in enumerate(sheets):
        text = "".join(sheet)
        for line in text.removesuffix("\n").split("\n") if text else []:
            print(f"[rank {rank}] {line}", file=stream or sys.stdout)
