"""Shows what ranks print, in the order of ranks or live, and labels each line with its rank."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO


class Output(ABC):
    """Replaces sys.stdout or sys.stderr of all ranks while they run. What other threads write goes through to `stream`.

    writer     returns the rank that the calling thread runs, or None
    is_shown   whether the run is over and everything that ranks have written is shown
    """

    def __init__(self, stream: TextIO, writer: Callable[[], int | None]):
        self.stream, self._writer, self.is_shown = stream, writer, False

    @abstractmethod
    def put(self, rank: int, text: str) -> None:
        """Take `text`, which a rank has written."""

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
    """The stream under the streams of finished runs that another thread has put back."""
    while isinstance(stream, Output) and stream.is_shown:
        stream = stream.stream
    return stream


def show(sheets: Sequence[Sequence[str]], stream: TextIO | None = None) -> None:
    """Print what each rank has written, rank 0 first, with a label before each line."""
    for rank, sheet in enumerate(sheets):
        text = "".join(sheet)
        for line in text.removesuffix("\n").split("\n") if text else []:
            print(f"[rank {rank}] {line}", file=stream or sys.stdout)


# --- live -------------------------------------------------------------------------------------------------------------


class LiveOutput(Output):
    """Shows each line when it ends. A flush shows the line so far; if another rank prints in between, the line is later
    shown again as a whole. A progress bar, which returns to the start of its line, stays on one line.

    screen   shows the lines, together with those of the other stream
    """

    def __init__(self, stream: TextIO, writer: Callable[[], int | None], screen: Screen):
        super().__init__(stream, writer)
        self._screen = screen
        self._lines: dict[int, str] = {}  # the line that each rank has begun

    def put(self, rank: int, text: str) -> None:
        *ended, rest = (self._lines.get(rank, "") + text).split("\n")
        for line in ended:
            self._screen.show(Line(rank, self.stream, *_visible(line)), is_ended=True)
        self._lines[rank] = rest

    def flush(self) -> None:
        rank = self._writer()
        if rank is not None and (begun := self._lines.get(rank)):
            self._screen.show(Line(rank, self.stream, *_visible(begun)), is_ended=False)
        self.stream.flush()

    def end(self) -> None:
        """Show the lines that have not ended."""
        self.is_shown = True
        for rank, begun in sorted(self._lines.items()):
            text, is_bar = _visible(begun)
            if text.strip():
                self._screen.show(Line(rank, self.stream, text, is_bar), is_ended=True)
        self._lines.clear()


@dataclass(frozen=True)
class Line:
    """A line of a rank, as far as it is written. `is_bar`: it has returned to its start, and may be replaced."""

    rank: int
    stream: TextIO
    text: str
    is_bar: bool

    @property
    def whole(self) -> str:
        return f"[rank {self.rank}] {self.text}"


class Screen:
    """Where the lines of all ranks are shown. At most one line on it has not ended."""

    def __init__(self) -> None:
        self._open: Line | None = None

    def show(self, line: Line, is_ended: bool) -> None:
        begun, text = self._open, line.whole
        if begun == line:
            text = ""
        elif begun is not None and begun.is_bar:
            text = "\r" + text.ljust(len(begun.whole))
        elif begun is not None:
            if (begun.rank, begun.stream) == (line.rank, line.stream) and text.startswith(begun.whole):
                text = text.removeprefix(begun.whole)
            else:
                self.end()
        line.stream.write(text + "\n" * is_ended)
        line.stream.flush()
        self._open = None if is_ended else line

    def end(self) -> None:
        """End the line that has not ended."""
        if self._open is not None:
            self._open.stream.write("\n")
            self._open.stream.flush()
            self._open = None


def _visible(line: str) -> tuple[str, bool]:
    """What a terminal shows of a line, and whether it has returned to its start."""
    _, returned, text = line.rstrip("\r").rpartition("\r")
    return text, bool(returned) or line.endswith("\r")


@contextmanager
def live_output(stdout: TextIO, writer: Callable[[], int | None]) -> Iterator[TextIO]:
    """A context in which sys.stderr is live; it yields the stream that is to replace sys.stdout.

    Loggers that the ranks set up may keep both. After the run they write to the streams beneath.
    """
    stderr, screen = sys.stderr, Screen()
    errors = LiveOutput(stderr, writer, screen if _is_same(stdout, stderr) else Screen())
    out = LiveOutput(stdout, writer, screen)
    sys.stderr = errors
    try:
        yield out  # type: ignore[misc]  # it has what TextIO has
    finally:
        sys.stderr = stderr
        for live in (out, errors):
            live.end()
            live._screen.end()


def _is_same(one: TextIO, other: TextIO) -> bool:
    """Whether two streams go to the same terminal or file."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError, AttributeError):
        return False
