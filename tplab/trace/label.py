"""A label: whose data a tensor holds, as far as one rank knows."""

from __future__ import annotations

from typing import NamedTuple


class Label(NamedTuple):
    """Where a tensor's data comes from: its chunk, by number, and the ranks whose data is in it."""

    chunk: int
    contributors: tuple[int, ...]


UNKNOWN = Label(-1, ())
