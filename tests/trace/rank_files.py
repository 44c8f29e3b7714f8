"""Files of ranks as a recording writes them, made of notes, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tplab.trace.recorded.rank_file import About, Writer

Note = tuple[Any, ...]


def begin(number: int, op: str, where: str, at: float = 1.0, peer: int | None = None, group: str = "0") -> Note:
    return "begin", number, op, group, at, 8, [1], "float64", where, "forward", "", peer, 0


def end(number: int, at: float = 2.0) -> Note:
    return "end", number, at


def write_ranks(folder: Path, *notes_of_ranks: Sequence[Note], killed: Sequence[int] = ()) -> None:
    """Write one file per rank, in which group "0" is that of all ranks. The files of `killed` ranks have no end."""
    world = len(notes_of_ranks)
    for rank, notes in enumerate(notes_of_ranks):
        path = folder / f"rank{rank}.jsonl"
        writer = Writer(path, About(rank, world, "a", "m", "host", "train", 0.0))
        for note in [("group", "0", "default_pg", list(range(world))), *notes]:
            writer.note(*note)
        writer.close(3.0)
        if rank in killed:
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
