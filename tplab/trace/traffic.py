"""Traffic: what one rank sends, how often and how many bytes by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tplab.trace.trace import Trace


class Sent(NamedTuple):
    """One kind of collective: how often it ran, and how many bytes the rank sent for it, with the ring algorithm."""

    count: int
    bytes: int


class Traffic(dict[str, Sent]):
    """Collective -> Sent, for one rank; prints as one line each. Two are equal if all counts and bytes are equal."""

    @classmethod
    def of(cls, collectives: Iterable[tuple[str, int, int]]) -> Traffic:
        """From (name, how often, bytes each time); entries of the same name are added up."""
        found = cls()
        for op, count, nbytes in collectives:
            before = found.get(op, Sent(0, 0))
            found[op] = Sent(before.count + count, before.bytes + count * nbytes)
        return found

    @classmethod
    def of_trace(cls, trace: Trace, rank: int = 0) -> Traffic:
        """The traffic of `rank` in collectives, according to the trace of a run."""
        events = trace.select(kind="collective", rank=rank).events
        return cls.of((event.op, 1, event.bytes) for event in events)

    @property
    def total(self) -> Sent:
        return Sent(sum(sent.count for sent in self.values()), sum(sent.bytes for sent in self.values()))

    def __repr__(self) -> str:
        lines = [f"{sent.count} x {op}, {sent.bytes:,} bytes" for op, sent in sorted(self.items())]
        return "\n".join(lines) or "nothing is sent"


def traffic_table(columns: Mapping[str, Traffic]) -> str:
    """One line per kind, one column per entry: count and bytes. The last line is the sum."""
    ops = sorted({op for traffic in columns.values() for op in traffic})
    lines = [["", *columns]]
    for op in ops:
        lines.append([op, *(_cell(traffic.get(op, Sent(0, 0))) for traffic in columns.values())])
    lines.append(["together", *(_cell(traffic.total) for traffic in columns.values())])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    texts = ("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def _cell(sent: Sent) -> str:
    return f"{sent.count} x, {sent.bytes:,} bytes" if sent.count else "-"
