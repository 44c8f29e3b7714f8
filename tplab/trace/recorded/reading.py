"""Reading a rank's file, line by line. It may come from anywhere, so every field is checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tplab.errors import TraceError
from tplab.trace.recorded.rank_file import ANY, FORMAT, About, Operation, RankFile, Wait


def read(path: Path) -> RankFile:
    """Read a rank's file. The last line may be cut off. Raises TraceError if it is not such a file, or is damaged."""
    lines = path.read_text(encoding="utf8", errors="replace").split("\n")
    try:
        first = json.loads(lines[0])
        if first.pop("format") != FORMAT:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TraceError(f"{path} is not the file of a rank: its first line does not say {FORMAT!r}") from None
    number = 1
    try:
        reading = _Reading(About(**first))
        for line in lines[1:-1]:  # what follows the last newline was not completely written
            number += 1
            reading.take(json.loads(line))
    except RecursionError:
        raise TraceError(f"{path}, line {number} is damaged: brackets are nested too deeply") from None
    except (ValueError, TypeError, IndexError) as error:
        raise TraceError(f"{path}, line {number} is damaged: {type(error).__name__}: {_cut(str(error), 300)}") from None
    reading.found.operations = list(reading.begun.values())
    return reading.found


class _Reading:
    """What has been read of a file so far. Raises ValueError, TypeError or IndexError if a line is damaged."""

    def __init__(self, about: About):
        _rank(about.rank, _whole(about.world))
        _time(about.start)
        for text in (about.run, about.machine, about.host, about.title):
            _text(text)
        self.found = RankFile(about, stop=about.start)
        self.begun: dict[int, Operation] = {}
        self.dropped: set[int] = set()

    def take(self, note: Sequence[Any]) -> None:
        """Enter one line."""
        kind, *rest = note
        if kind == "group":
            self._group(*rest)
        elif kind == "begin":
            self._begin(*rest)
        elif kind == "stop":
            self.found.has_ended = True
            self._until(rest[0])
        elif kind not in ("drop", "from", "start", "end", "wait"):
            raise ValueError(f"there is no note {kind!r}")
        elif rest[0] not in self.dropped:
            if rest[0] not in self.begun:
                raise ValueError(f"there is no operation {rest[0]!r}")
            self._more(kind, *rest)

    def _group(self, group: str, description: str, ranks: Sequence[int]) -> None:
        if _text(group) in self.found.groups:
            raise ValueError(f"group {group!r} is there twice")
        members = tuple(_rank(rank, self.found.about.world) for rank in ranks)
        if not members or len(set(members)) < len(members):
            raise ValueError(f"group {group!r} has {'a rank twice' if members else 'no ranks'}")
        self.found.groups[group] = _text(description), members

    def _begin(
        self, number: int, op: str, group: str, begin: float, num_bytes: int, shape: Sequence[int], *others: Any
    ) -> None:
        if group not in self.found.groups:
            raise ValueError(f"there is no group {group!r}")
        *texts, peer, tag = others
        dtype, where, phase, reduction = map(_text, texts)
        if peer is not None and peer != ANY:
            _rank(peer, self.found.about.world)
        lengths = tuple(map(_whole, shape))
        self.begun[_whole(number)] = Operation(
            _text(op),
            group,
            _time(begin),
            _whole(num_bytes),
            lengths,
            dtype,
            where,
            phase,
            reduction,
            peer,
            _whole(tag),
        )
        self._until(begin)

    def _more(self, kind: str, number: int, *rest: Any) -> None:
        """A note about an operation that had begun."""
        operation = self.begun[number]
        if kind == "drop":
            del self.begun[number]
            self.dropped.add(number)
        elif kind == "from":
            operation.peer = _rank(rest[0], self.found.about.world)
        elif kind == "start":
            operation.begin = _time(rest[0])
        elif kind == "end":
            operation.end = _time(rest[0]) if operation.end is None else min(operation.end, _time(rest[0]))
            self._until(rest[0])
        else:
            start, end, where = rest
            self.found.waits.append(Wait(operation, _time(start), _time(end), _text(where)))
            if operation.taken is None:
                operation.taken = end
            self._until(end)

    def _until(self, time: float) -> None:
        self.found.stop = max(self.found.stop, _time(time))


_LARGEST = 1 << 62


def _shown(value: object) -> str:
    return _cut(repr(value), 100)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:  # also NaN is not
        raise ValueError(f"{_shown(value)} is not a time")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not -_LARGEST < value < _LARGEST:
        raise ValueError(f"{_shown(value)} is not a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is not a text")
    return value


def _rank(value: Any, world: int) -> int:
    if not 0 <= _whole(value) < world:
        raise ValueError(f"{value} is not one of the {world} ranks")
    return value
