"""A layer of experts, read from a trace: which rows were sent, for which experts, and what each rank computed.

A trace has collectives and computations, but no layers. A dispatch is recognised by its messages: before the experts'
products, ranks exchange rows of floats [N, D], and with them whole numbers, which are the numbers of rows (in torch) or
the experts of each row. Equally many exchanges of rows after the products are its combine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tplab.errors import ShapeError, TraceError
from tplab.experts.routing import table_of
from tplab.sharding import share
from tplab.trace.event import Event
from tplab.trace.trace import Trace
from tplab.widgets.paper.shown import check_shown
from tplab.widgets.score.names import kind_of

MOST_RANKS, MOST_EXPERTS = 16, 64
_EXCHANGES = ("all_to_all", "all_gather", "reduce_scatter")


class Level(NamedTuple):
    """One exchange of a dispatch, and its way back.

    axis     the axis along which ranks exchange rows, and for each rank the places of its partners
    pairs    [R, R] rows by source and target; those on the diagonal stay on their rank
    there, back   the rows' collective on each rank, and the one that returns the results
    beside   the counts, choices and weights that each rank sends with its rows
    """

    axis: str
    groups: list[list[int]]
    pairs: np.ndarray
    there: list[Event]
    back: list[Event]
    beside: list[list[Event]]

    @property
    def is_gather(self) -> bool:
        return self.there[0].op == "all_gather"

    @property
    def is_padded(self) -> bool:
        """Whether empty slots are sent too, because XLA needs the size of each message in advance."""
        return not self.is_gather and all(len(event.shape) > 1 for events in self.beside for event in events)

    def last(self, place: int) -> Event:
        """The last collective of a rank's dispatch at this level."""
        return max(self.there[place], *self.beside[place], key=lambda event: event.end)


class Spent(NamedTuple):
    """When one rank began a layer, had all rows, had computed, no longer waited for other ranks, and was done."""

    begin: float
    arrived: float
    computed: float
    met: float
    end: float

    @property
    def computing(self) -> float:
        return self.computed - self.arrived

    @property
    def waits(self) -> float:
        return self.met - self.computed


@dataclass(frozen=True)
class Layer:
    """The forward pass of one layer on R ranks with E experts, E/R neighbouring ones on each rank.

    ranks     the ranks' numbers in the trace
    loads     [R, E] choices, by the rank of the token and by expert: as many rows as the expert computes
    tokens    [R][E] the tokens of these choices, counted from 0 on each rank; () if only the trace is known
    dropped   [R] choices that were dropped; () if only the trace is known
    reach     [R, R] tokens by their rank and by a rank that has any of their experts
    flops     [R] of what each rank computes between dispatch and combine
    """

    ranks: tuple[int, ...]
    levels: tuple[Level, ...]
    loads: np.ndarray
    tokens: Sequence[Sequence[Sequence[int]]]
    dropped: Sequence[int]
    reach: np.ndarray
    spent: Sequence[Spent]
    flops: Sequence[int]

    @property
    def here(self) -> int:
        """The number of experts of each rank."""
        return self.loads.shape[1] // len(self.ranks)

    @cached_property
    def of_ranks(self) -> np.ndarray:
        """[R]: rows that each rank's experts compute."""
        return self.loads.sum(0).reshape(len(self.ranks), -1).sum(1)

    @property
    def num_steps(self) -> int:
        return 2 * len(self.levels) + 1

    @cached_property
    def nodes(self) -> list[int]:
        """[R]: the number, in order, of the set of ranks that exchange rows at the last of several levels."""
        groups = [min(group) for group in self.levels[-1].groups]
        return [sorted({*groups}).index(group) for group in groups]

    def origins(self, number: int, source: int, target: int) -> list[tuple[int, int]]:
        """The ranks whose tokens are in the rows from `source` to `target` at a level: (rank, rows). At a second level
        `source` passes on rows of its partners at the first; rank -1 if these are unknown."""
        rows = int(self.levels[number].pairs[source, target])
        if not number:
            return [(source, rows)]
        found = [(place, int(self.reach[place, target])) for place in self.levels[0].groups[source]]
        is_known = sum(passed for _, passed in found) == rows
        return [(place, passed) for place, passed in found if passed] if is_known else [(-1, rows)]


def layers_of(trace: Trace, choices: Any = None, experts: int | None = None) -> list[Layer]:
    """The layers of experts of rank 0, in order. Raises TraceError and ShapeError."""
    check_shown([trace], Trace)
    if not any(kind_of(event.op) == "product" for event in trace.select(kind="compute", rank=0).events):
        raise TraceError(
            "this trace does not say what ranks compute, and a layer of experts is found by its products of matrices; "
            'give the run a cluster, as run(..., cluster="h100")'
        )
    logs = _taking_part(trace)
    if len(logs) > MOST_RANKS:
        raise ShapeError(f"a picture has room for {MOST_RANKS} ranks, and {len(logs)} share these experts")
    found = [*_found(logs[0])]
    if not found:
        raise TraceError(
            "no tokens travel to experts in this trace: no rows are exchanged before and after products, or each "
            "expert is cut over ranks (tensor_axis)"
        )
    tables = [choices] * len(found) if choices is None or np.ndim(choices) == 2 else list(choices)
    if len(tables) != len(found):
        raise ShapeError(
            f"there are choices of {len(tables)} layers, and the trace has {len(found)}; give one for each"
        )
    return [_layer(trace, logs, *places, table, experts) for places, table in zip(found, tables)]


class _Log:
    """The forward pass of one rank: what it exchanged, and what it computed."""

    def __init__(self, trace: Trace, rank: int):
        forward = [event for event in trace.select(rank=rank).events if event.phase != "backward"]
        self.rank = rank
        self.sent = [event for event in forward if event.kind == "collective" and event.op in _EXCHANGES]
        self.computed = [event for event in forward if event.kind == "compute"]

    def between(self, first: Event, last: Event) -> list[Event]:
        return [event for event in self.computed if first.end <= event.start and event.end <= last.start]

    def has_products(self, first: int, last: int) -> bool:
        return any(kind_of(event.op) == "product" for event in self.between(self.sent[first], self.sent[last]))


def _taking_part(trace: Trace) -> list[_Log]:
    """Rank 0, and all ranks that its rows may reach."""
    found, new = dict[int, _Log](), [0]
    while new:
        rank = new.pop()
        found[rank] = log = _Log(trace, rank)
        sent = [log.sent[place] for levels, _ in _found(log) for level in levels for place in level]
        new += {other for event in sent for other in _group(trace, event)} - {*found, *new}
    return [found[rank] for rank in sorted(found)]


def _group(trace: Trace, event: Event) -> tuple[int, ...]:
    return event.group or trace.mesh.group(event.rank, tuple((event.axis or "").split(",")))


def _is_whole(event: Event) -> bool:
    return event.dtype.startswith(("int", "uint"))


def _found(log: _Log) -> Iterator[tuple[list[list[int]], list[int]]]:
    """Where the layers are among the exchanges of a rank: (the exchanges of each level, those on the way back)."""
    sent, at = log.sent, 0
    while at < len(sent):
        levels: list[list[int]] = []
        while at < len(sent) and not (levels and log.has_products(levels[-1][-1], at)):
            if not levels or (sent[at].axis, sent[at].op) != (sent[at - 1].axis, sent[at - 1].op):
                levels.append([])
            levels[-1].append(at)
            at += 1
        levels = [level for level in levels if any(_is_whole(sent[place]) for place in level)]
        if levels:
            columns = sent[_rows(sent, levels[0])].shape[1:]
            back = [place for place in range(at, len(sent)) if sent[place].shape[1:] == columns][: len(levels)]
            if len(back) == len(levels):
                at = back[-1] + 1
                yield levels, back[::-1]


def _rows(sent: Sequence[Event], level: Sequence[int]) -> int:
    """The exchange of rows among those of a level. Weights have as many columns as choices."""
    columns = {sent[place].shape[1:] for place in level if _is_whole(sent[place]) and len(sent[place].shape) == 2}
    floats = [place for place in level if not _is_whole(sent[place])]
    return next((place for place in floats if sent[place].shape[1:] not in columns), floats[0] if floats else level[0])


def _layer(
    trace: Trace, logs: Sequence[_Log], found: list[list[int]], back: list[int], choices: Any, experts: int | None
) -> Layer:
    ranks = tuple(log.rank for log in logs)
    levels = tuple(_level(trace, logs, level, way_back) for level, way_back in zip(found, back))
    if any(level.is_gather for level in levels[1:]):
        raise TraceError(
            f"each expert is cut over {levels[-1].axis!r}, whose ranks exchange their tokens inside of it "
            "(tensor_axis); this picture shows experts that are whole on one rank"
        )
    work = [log.between(levels[-1].last(place), levels[-1].back[place]) for place, log in enumerate(logs)]
    size = experts or len(ranks) * _here(work[0])
    if not size:
        raise TraceError("this trace does not say how many experts there are; give experts=, their number")
    if size > MOST_EXPERTS:
        raise ShapeError(f"a picture has room for {MOST_EXPERTS} experts, and there are {size}")
    share(size, len(ranks), "the number of experts is", axis=levels[0].axis)
    begin = min(log.sent[found[0][0]].start for log in logs)
    spent = []
    for place, events in enumerate(work):
        arrived = levels[-1].last(place).end
        computed = max((event.end for event in events), default=arrived)
        spent.append(Spent(begin, arrived, computed, levels[-1].back[place].start, levels[0].back[place].end))
    routed = _carried(levels[0], size) if choices is None else _chosen(levels[0], ranks, choices, size)
    return Layer(ranks, levels, *routed, spent, [sum(event.flops for event in events) for events in work])


def _level(trace: Trace, logs: Sequence[_Log], level: Sequence[int], back: int) -> Level:
    """The rows sent at one level. Their bytes must match those of the trace."""
    place_of = {log.rank: place for place, log in enumerate(logs)}
    row = _rows(logs[0].sent, level)
    there = [log.sent[row] for log in logs]
    groups = [[place_of[rank] for rank in _group(trace, event)] for event in there]
    pairs = np.zeros((len(logs), len(logs)), int)
    for place, (log, group) in enumerate(zip(logs, groups)):
        counts = next((log.sent[at] for at in level if len(log.sent[at].shape) == 1), None)
        if there[place].op == "all_gather":
            pairs[group, place] = [there[source].shape[0] for source in group]
        elif counts is None:
            pairs[group, place] = [there[source].shape[0] // len(group) for source in group]
        elif counts.values is None:
            raise TraceError(f"rank {log.rank} was told {counts.shape[0]} counts of rows, and a trace keeps at most 64")
        else:
            pairs[group, place] = np.asarray(counts.values).reshape(len(group), -1).sum(1)
    leave = pairs.sum(1) - pairs.diagonal()
    sent = np.array([event.bytes for event in there])
    if (sent * leave.sum() != leave * sent.sum()).any() and there[0].op == "all_to_all":
        raise TraceError(
            f"ranks sent {sent.tolist()} B in {there[0].op}, which are not the {leave.tolist()} rows they announced"
        )
    beside = [[log.sent[at] for at in level if at != row] for log in logs]
    return Level(there[0].axis or "", groups, pairs, there, [log.sent[back] for log in logs], beside)


def _here(work: Sequence[Event]) -> int:
    """The number of experts of a rank, from its computations: rows counted for each, or one product for all of them."""
    for event in work:
        if (event.op == "bincount" and len(event.shape) == 1) or (event.op == "dot_general" and len(event.shape) == 3):
            return event.shape[0]
    return 0


def _carried(level: Level, size: int) -> tuple[np.ndarray, tuple[()], tuple[()], np.ndarray]:
    """Loads from the choices that are sent with the rows of the first level."""
    num_ranks = len(level.pairs)
    loads, reach = np.zeros((num_ranks, size), int), np.zeros((num_ranks, num_ranks), int)
    for place, group in enumerate(level.groups):
        event = next((event for event in level.beside[place] if _is_whole(event) and len(event.shape) == 2), None)
        if event is None or event.values is None:
            raise TraceError(
                "this trace does not say which experts the rows are for, since it keeps no values of messages with "
                "more than 64 numbers; give choices=, what the router chose, [tokens of all ranks, k]"
            )
        mine, chosen = size // len(group), np.asarray(event.values)
        first = mine * group.index(place)
        if level.is_gather:  # all rows come to all ranks
            chosen = np.where((chosen >= first) & (chosen < first + mine), chosen, -1)
        else:
            chosen = np.where(chosen >= 0, chosen + first, -1)
        sources = np.repeat(group, level.pairs[group, place])
        row, slot = np.nonzero(chosen >= 0)
        np.add.at(loads, (sources[row], chosen[row, slot]), 1)
        _add_reach(reach, sources, chosen, size)
    return loads, (), (), reach


def _add_reach(reach: np.ndarray, sources: np.ndarray, chosen: np.ndarray, size: int) -> None:
    """Count each row [N, k] of choices once for each rank that has any of its experts."""
    goes = np.where(chosen >= 0, chosen // (size // len(reach)), -1)
    for target in range(len(reach)):
        np.add.at(reach[:, target], sources[(goes == target).any(1)], 1)


def _chosen(
    level: Level, ranks: Sequence[int], choices: Any, size: int
) -> tuple[np.ndarray, Any, list[int], np.ndarray]:
    """Loads from a table of choices, which must match the rows that were sent at the first level."""
    table = table_of(choices, size)
    each = share(len(table), len(ranks), "the number of tokens is", axis=level.axis)
    loads = np.zeros((len(ranks), size), int)
    tokens: list[list[list[int]]] = [[[] for _ in range(size)] for _ in ranks]
    for token, slot in np.argwhere(table >= 0).tolist():
        loads[token // each, table[token, slot]] += 1
        tokens[token // each][table[token, slot]].append(token % each)
    for place, group in enumerate(level.groups):
        mine = table[place * each : (place + 1) * each]
        goes = np.where(mine >= 0, mine // (size // len(group)), -1) == np.arange(len(group))[:, None, None]
        by_choice, once, went = goes.sum((1, 2)), goes.any(2).sum(1), level.pairs[place, group]
        fits = level.is_gather or (went == by_choice).all() or (went == once).all()
        if not fits and not (level.is_padded and (once <= went).all()):
            others = [ranks[other] for other in group]
            raise ShapeError(
                f"these choices make rank {ranks[place]} send {by_choice.tolist()} rows to ranks {others}, or "
                f"{once.tolist()} if a token goes to each once, and in the trace it sent {went.tolist()}; give the "
                "choices of this run, in the order of its ranks"
            )
    reach = np.zeros((len(ranks), len(ranks)), int)
    _add_reach(reach, np.arange(len(table)) // each, table, size)
    return loads, tokens, (table < 0).reshape(len(ranks), -1).sum(1).tolist(), reach
