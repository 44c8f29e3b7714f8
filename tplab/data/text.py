"""Text to train on, as bytes, and its batches, which are the same for every number of data-parallel ranks."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from tplab.errors import ShapeError
from tplab.sharding import share

VOCABULARY = 256
"""A token is a byte."""

MODULES = (
    "argparse",
    "ast",
    "calendar",
    "collections/__init__",
    "configparser",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
    "email/message",
    "enum",
    "functools",
    "heapq",
    "http/client",
    "inspect",
    "json/decoder",
    "logging/__init__",
    "mailbox",
    "optparse",
    "pathlib",
    "pickle",
    "random",
    "shutil",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "textwrap",
    "threading",
    "tokenize",
    "typing",
    "zipfile",
)
"""Modules of Python's standard library: well-written code that every machine has. Missing ones are skipped."""


def python_source() -> bytes:
    """The source text of some modules of Python's standard library, 1 to 2 MB. It differs from version to version."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{name}.py" for name in MODULES]
    return b"\n".join(path.read_bytes() for path in paths if path.exists())


class Text:
    """Bytes to train on. The last tenth is held out: no training batch contains any of it.

    text = Text(python_source())
    ids, targets = text.batch(step=0, size=8, length=64)      # [8, 64] each; targets are the next bytes
    """

    def __init__(self, data: bytes, held_out: float = 0.1):
        self.tokens = np.frombuffer(data, np.uint8)
        if not 0 <= held_out < 1:
            raise ValueError(f"held_out is {held_out}; it is the share of the text to hold out, from 0 to less than 1")
        self.num_trained = len(data) - int(len(data) * held_out)

    def batch(
        self, step: int, size: int, length: int, seed: int = 0, *, rank: int = 0, num_ranks: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """The batch of a step: ids and the bytes that follow them, [size, length] of int64.

        rank, num_ranks   along the data axis: returns [size / num_ranks, length], starting at row
                          rank * size / num_ranks

        The start of each row is drawn from (seed, step) alone. So the ranks together have the same batch, however many
        there are, and a resumed run continues with the batches it would have had.
        Raises ShapeError if the ranks cannot share the batch equally, or the text is too short.
        """
        rows = share(size, num_ranks, "the batch has size", sharers="data-parallel ranks")
        begins = np.random.default_rng([seed, step]).integers(0, self._last(length, 0, self.num_trained), size)
        return self._rows(begins[rank * rows : (rank + 1) * rows], length)

    def held_out(self, size: int, length: int, *, rank: int = 0, num_ranks: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """A batch of the held-out text, always the same: `size` rows, spread evenly."""
        rows = share(size, num_ranks, "the batch has size", sharers="data-parallel ranks")
        end = self._last(length, self.num_trained, len(self.tokens))
        begins = np.linspace(self.num_trained, end - 1, size).astype(int)
        return self._rows(begins[rank * rows : (rank + 1) * rows], length)

    def _last(self, length: int, begin: int, end: int) -> int:
        """One past the last position at which a row can begin."""
        if end - begin <= length:
            raise ShapeError(
                f"rows of {length} bytes and the one that follows need a text of more than {length} bytes, and this "
                f"part of it has {end - begin}; take shorter rows or a longer text"
            )
        return end - length

    def _rows(self, begins: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.tokens[begins[:, None] + np.arange(length + 1)].astype(np.int64)
        return rows[:, :-1], rows[:, 1:]

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Text of {len(self)} bytes, of which the last {len(self) - self.num_trained} are held out"
