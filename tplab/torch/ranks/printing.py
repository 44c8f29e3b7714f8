"""What ranks print appears in the order of ranks, and each line says which rank it is from."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO


class Output(ABC):
    """Replaces sys.stdout or sys.stderr of all ranks while they run. What others write goes through to `stream`.

    writer     the number of the rank that the calling thread runs; None: of no rank
    is_shown   whether the run is over, and all that ranks have written is shown
    """

    def __init__(self, stream: TextIO, writer: Callable[[], int | None]):
        self.stream, self._writer, self.is_shown = stream, writer, False

    @abstractmethod
    def put(self, rank: int, text: str) -> None:
        """A rank has written this."""

    def write(self, text: str) -> int:
        rank = self._writer()
        if rank is None:
            return self.stream.write(text)
        self.put(rank, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # everything else is the stream's
        return getattr(self.stream, name)


class Kept(Output):
    """Keeps what each rank writes until the run is over."""

    def __init__(self, stream: TextIO, writer: Callable[[], int | None], num_ranks: int):
        super().__init__(stream, writer)
        self._sheets: list[list[str]] = [[] for _ in range(num_ranks)]

    def put(self, rank: int, text: str) -> None:
        self._sheets[rank].append(text)

    def show(self) -> None:
        self.is_shown = True
        show(self._sheets, self.stream)


def beneath(stream: TextIO) -> TextIO:
    """The stream under those of finished runs, which another thread has put back."""
    while isinstance(stream, Output) and stream.is_shown:
        stream = stream.stream
    return stream


def show(sheets: Sequence[Sequence[str]], stream: TextIO | None = None) -> None:
    """Print what each rank has written, rank 0 first, a label before each line."""
    for rank, sheet in enumerate(sheets):
        text = "".join(sheet)
        for line in text.removesuffix("\n").split("\n") if text else []:
            print(f"[rank {rank}] {line}", file=stream or sys.stdout)
