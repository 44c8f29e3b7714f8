"""The score of a trace: everything to draw, and when.

    rounds   times[k] is when round k of communication begins; the last one is the trace's end. The playhead is a
             position in rounds: 1.5 is half-way between times[1] and times[2]
    bars     one row per thing that a rank did: kind, start, end, what it carried
    items    what is sent: the trace's chunks, then one item for each collective that ran as a single event
    holds    one row per change of what a rank holds of an item: since when, the ranks whose data is in it, its values,
             and which part of a tensor it is

Both the widget (static/score.js) and the still picture read only this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tplab.trace.event import VALUES_UP_TO
from tplab.trace.groups import kinds_apart
from tplab.trace.trace import Trace
from tplab.units import letter, number_text
from tplab.widgets.paper.palette import GRADIENT, KINDS, OPS, WORK, hue
from tplab.widgets.paper.shown import check_shown
from tplab.widgets.score import pipeline
from tplab.widgets.score.holds import JOINING, holdings, versions
from tplab.widgets.score.names import LOW, kind_of, name_of, names

COMPUTE, SEND, COLLECTIVE, WAIT = range(4)
_KIND = {"compute": COMPUTE, "send": SEND, "collective": COLLECTIVE, "wait": WAIT, "receive": -1}


@dataclass(frozen=True)
class Item:
    """Something that is sent: a column of the table.

    name     written beside every use of the colour: "x₃" for piece 3 of x, otherwise "a", "b", ...
    text     the same in a sentence: "x[3]", "piece a"
    origin   the rank that it came from; -1 if every rank has its own part, as in a collective, or its own version
    piece    how many items that rank had sent before it
    op       the collective, or ""
    how      how ranks combine their parts: "sum", "max", "min", "product"; "" if they do not, or if that is unknown
    pools    every rank whose data could be in it, one tuple per group that it runs on
    """

    name: str
    text: str
    origin: int
    piece: int
    op: str
    how: str
    pools: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Score:
    trace: Trace
    times: np.ndarray  # [rounds + 1]
    bars: dict[str, np.ndarray]
    items: list[Item]
    holds: dict[str, np.ndarray]
    sets: list[tuple[int, ...]]  # the distinct sets of contributors
    values: list[np.ndarray]  # the distinct contents that were kept
    is_pipeline: bool = False  # a schedule ran: items are microbatches, and rounds end where actions do

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1

    @cached_property
    def ops(self) -> list[str]:
        return self.trace.codes("op")[0]

    @cached_property
    def op_names(self) -> list[str]:
        """The operations, by their names in pictures and sentences."""
        return [name_of(op) for op in self.ops]

    @cached_property
    def actions(self) -> np.ndarray:
        """The kind, as F, of each bar that is an action of a schedule, or of a pair's first; -1 for other bars."""
        kinds = np.array([pipeline.kind_of(op) for op in self.ops] or [-1])[self.bars["op"]]
        is_action = self.is_pipeline & (self.bars["kind"] == COMPUTE) & (self.bars["item"] >= 0)
        return np.where(is_action, kinds, -1)

    @cached_property
    def action_kinds(self) -> set[int]:
        """The kinds that occur, including both of a pair."""
        there = np.unique(self.bars["op"][self.actions >= 0]).tolist()
        return {pipeline.kind_of(name) for op in there for name in self.ops[op].split("+")}

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        return self.trace.codes("group")[0]

    @cached_property
    def total_sent(self) -> np.ndarray:
        """Bytes that each rank sends in total."""
        return np.bincount(self.bars["rank"], weights=self.bars["bytes"], minlength=self.trace.mesh.size)

    @cached_property
    def _dtypes(self) -> dict[int, str]:
        """The dtype of each item that a collective makes, if they differ, as with quantised codes."""
        names, codes = self.trace.codes("dtype")
        rows = np.flatnonzero((self.bars["kind"] == COLLECTIVE) & (self.bars["item"] >= 0)).tolist()
        found = {int(self.bars["item"][row]): names[codes[self.bars["row"][row]]] for row in rows}
        return found if len(set(found.values())) > 1 else {}

    def heading(self, item: int) -> str:
        """The heading of an item's column: "a", "b int8"."""
        return f"{self.items[item].name} {self._dtypes.get(item, '')}".strip()

    def item_colour(self, item: int) -> str:
        """In a pipeline, activations have the colour of F; otherwise, each item has its own colour."""
        return KINDS["F"] if self.is_pipeline else hue(item)

    @cached_property
    def work_kinds(self) -> list[str]:
        """The kind of work that each bar does, for its colour: a product of a backward pass is "backward"; "" for bars
        that compute nothing."""
        kinds, phases = [kind_of(op) for op in self.ops], self.trace.codes("phase")[0]
        phase = self.trace.codes("phase")[1][self.bars["row"]].tolist()
        found = []
        for row, (kind, op) in enumerate(zip(self.bars["kind"].tolist(), self.bars["op"].tolist(), strict=True)):
            is_backward = kinds[op] == "product" and phases[phase[row]] == "backward"
            found.append("" if kind != COMPUTE else "backward" if is_backward else kinds[op])
        return found

    def colours(self, by_kind: bool = False) -> list[str]:
        """The colour of each bar: that of its computation, or of what it carries. by_kind: collectives are coloured by
        their effect. In a pipeline only actions, activations and gradients have one."""
        if self.is_pipeline:
            return [(WORK, KINDS["F"], GRADIENT)[flow] for flow in self.bars["flow"].tolist()]
        carried = map(hue, self.bars["item"].tolist())
        kinds = [work or talk * by_kind for work, talk in zip(self.work_kinds, self.talk_kinds, strict=True)]
        return [OPS[kind] if kind else colour for kind, colour in zip(kinds, carried, strict=True)]

    @cached_property
    def passes(self) -> tuple[list[str], np.ndarray]:
        """(names, for each bar the index of its pass). A bar after a rank's first backward pass that is not part of one
        may be an average of gradients or an update: it belongs to no named pass."""
        names, codes = self.trace.codes("phase")
        phases, start = codes[self.bars["row"]].copy(), self.bars["start"]
        if "backward" not in names or "forward" not in names:
            return list(names), phases
        backward, forward = names.index("backward"), names.index("forward")
        for rank in self.trace.mesh.ranks:
            mine = self.bars["rank"] == rank
            later = start[mine & (phases == backward)].min(initial=math.inf)
            phases[mine & (phases == forward) & (start >= later)] = len(names)
        return [*names, ""], phases

    @cached_property
    def work_legend(self) -> list[tuple[str, str]]:
        """The kinds of work that occur, and the name of each in the legend."""
        there = {kind for kind, drawn in zip(self.work_kinds, self.bars["end"] > self.bars["start"]) if kind and drawn}
        product = "matmul, forward" if "backward" in there else "matmul"
        says = {"product": product, "backward": "matmul, backward", "norm": "norm, softmax"}
        says |= {"elementwise": "elementwise", "copy": "copy", "computing": "computing"}
        return [(kind, text) for kind, text in says.items() if kind in there]

    @cached_property
    def talk_kinds(self) -> list[str]:
        """The effect of each collective's bar, for its colour on a timeline: it "combines" the ranks' inputs, as a sum,
        or only "moves" them; "" for other bars."""
        names, codes = self.trace.codes("reduction")
        does = ["combines" if name else "moves" for name in names]
        place = codes[self.bars["row"]].tolist()
        return [
            does[at] if kind == COLLECTIVE else "" for at, kind in zip(place, self.bars["kind"].tolist(), strict=True)
        ]

    @cached_property
    def talk_legend(self) -> list[tuple[str, str]]:
        """The effects that occur, and the names of the collectives of each."""
        found = {
            (kind, self.ops[op]) for kind, op in zip(self.talk_kinds, self.bars["op"].tolist(), strict=True) if kind
        }
        return [
            (kind, ", ".join(sorted(op for its, op in found if its == kind)))
            for kind in ("combines", "moves")
            if any(its == kind for its, _ in found)
        ]

    @cached_property
    def table_caption(self) -> str:
        """What the table shows, and what it cannot show."""
        if self.is_pipeline:
            return "activations held, by microbatch"
        names = {"max": "the maximum", "min": "the minimum", "product": "the product"}
        hows = {item.how for item in self.items} & names.keys()
        made = f": {names[next(iter(hows))]} of these ranks' parts" if len(hows) == 1 else ""
        if len(hows) == 1 and any(item.how not in hows for item in self.items):
            made += f" in {', '.join(item.name for item in self.items if item.how in hows)}"
        unknown = ", as far as it is known" if self._has_unknown else ""
        return f"{self.table_title}{made}{unknown}{self._values_kept}"

    @property
    def table_title(self) -> str:
        return "what has been on each rank" if self.tells_past else "what each rank holds"

    @cached_property
    def tells_past(self) -> bool:
        """Whether it is only known what has been on a rank: it sends whole pieces to which nothing is added, and a
        trace does not tell whether the program keeps them, as a gather does, or overwrites them, as in a loop."""
        return not self.is_pipeline and any(
            item.origin >= 0 and all(len(pool) == 1 for pool in item.pools) for item in self.items
        )

    @cached_property
    def _has_unknown(self) -> bool:
        """Whether there are messages with unknown contents."""
        rows = (self.bars["kind"] == SEND) & (self.bars["item"] < 0)
        return bool(rows.any()) and not self.is_pipeline

    @cached_property
    def _values_kept(self) -> str:
        """For how many messages the values were kept, if not for all that are small enough."""
        shapes, codes = self.trace.codes("shape")
        dtypes, types = self.trace.codes("dtype")
        is_small = np.array([math.prod(shape) <= VALUES_UP_TO for shape in shapes] or [False])
        has_type = np.array([bool(dtype) for dtype in dtypes] or [False])
        rows = self.bars["row"][np.isin(self.bars["kind"], (SEND, COLLECTIVE)) & (self.bars["op"] != self._barrier)]
        rows = rows[is_small[codes[rows]] & has_type[types[rows]]]
        kept = sum(row in self.trace.values for row in rows.tolist())
        if kept == len(rows):
            return ""
        return f"; values of {kept:,} of {len(rows):,} messages" if kept else "; no values were kept"

    @cached_property
    def _barrier(self) -> int:
        return self.ops.index("barrier") if "barrier" in self.ops else -1

    @cached_property
    def parts(self) -> list[tuple[int, ...]]:
        """The distinct parts of tensors that are held, as (index, count); holds have indices into this list."""
        return self.trace.codes("part")[0] or [()]

    @cached_property
    def computes(self) -> bool:
        """Whether computing takes any time on this clock."""
        bars = self.bars
        return bool(np.any((bars["kind"] == COMPUTE) & (bars["end"] > bars["start"])))

    def time(self, position: float) -> float:
        """The time at which the playhead is, given its position."""
        position = min(max(float(position), 0.0), float(self.num_steps))
        index = min(int(position), self.num_steps - 1)
        begin, end = float(self.times[index]), float(self.times[index + 1])
        return end if position == index + 1 else begin + (position - index) * (end - begin)

    @cached_property
    def shows_numbers(self) -> bool:
        """Whether each rank has one number, and nothing else is sent: then the number itself is written on the rank."""
        if len(self.items) != 1 or self.items[0].op or self.items[0].origin >= 0 or not len(self.holds["value"]):
            return False
        return all(place >= 0 and self.values[place].size == 1 for place in self.holds["value"].tolist())

    def number(self, hold: int) -> str:
        """The number of a rank, if `shows_numbers`."""
        return number_text(float(self.values[self.holds["value"][hold]].ravel()[0]))

    def members(self, hold: int) -> tuple[int, ...]:
        return self.sets[self.holds["set"][hold]]

    def part(self, hold: int) -> tuple[int, ...]:
        """(index, count) if it is one of `count` equal parts of a tensor, otherwise ()."""
        return self.parts[self.holds["part"][hold]] if self.holds["part"][hold] < len(self.parts) else ()

    def name(self, hold: int) -> str:
        """The name of a hold: that of its item, with the number of its part."""
        name, part = self.items[self.holds["item"][hold]].name, self.part(hold)
        return name + str(part[0]).translate(LOW) if part else name

    def pool(self, hold: int) -> tuple[int, ...]:
        """Every rank whose data could be in the item of this hold."""
        members = self.members(hold)
        pools = self.items[self.holds["item"][hold]].pools
        return next((pool for pool in pools if members and members[0] in pool), members)

    @cached_property
    def shares(self) -> np.ndarray:
        """How complete each hold is: the share of ranks in its pool whose data it has."""
        number = np.array([len(members) for members in self.sets] or [0])[self.holds["set"]]
        first = np.array([min(members, default=-1) for members in self.sets] or [0])[self.holds["set"]]
        pairs, alike = np.unique(np.stack([self.holds["item"], first]), axis=1, return_inverse=True)
        pools = [
            next((len(pool) for pool in self.items[item].pools if rank in pool), 0) for item, rank in pairs.T.tolist()
        ]
        every = np.array(pools or [0])[alike.reshape(-1)]
        return number / np.maximum(np.where(every, every, number), 1)


def score(trace: Trace) -> Score:
    """Read a trace once."""
    check_shown([trace], Trace)
    names = ("rank", "start", "end", "step", "chunk", "peer", "message", "bytes")
    columns = {name: trace.column(name) for name in names}
    kinds, kind_codes = trace.codes("kind")
    columns["kind"] = np.array([_KIND[kind] for kind in kinds] or [0], np.int32)[kind_codes]
    columns["op"] = trace.codes("op")[1]
    columns["op_name"] = trace.column("op")
    columns["group"] = trace.codes("group")[1]
    if pipeline.is_pipeline(trace):
        return _of_pipeline(trace, columns)
    if trace.clock == "measured":
        columns["end"] = _arrivals(trace, columns)
    columns["item"], items = _items(trace, columns)
    columns["flow"] = np.zeros(len(trace), np.int8)
    times = _times(trace, columns)
    own_versions = {index for index, (_, _, origin, _, op) in enumerate(items) if origin < 0 and not op}
    sets, holds, values = holdings(trace, columns, times, len(items), own_versions)
    seen = list(zip(holds["item"].tolist(), (sets[code] for code in holds["set"].tolist())))
    # A sum to which several ranks have added is expected to contain a part of every rank of its group.
    added = {item for item, members in seen if len(members) > 1}
    groups = trace.codes("group")[0]
    rows = np.flatnonzero((columns["item"] >= 0) & (columns["kind"] == SEND))
    travels = {(int(columns["item"][row]), groups[columns["group"][row]]) for row in rows}
    pools = _pools(len(items), [*seen, *((item, group) for item, group in travels if item in added and group)])
    pools = _wider(pools, items)
    hows = _hows(trace, columns, len(items))
    items = [Item(*item, how, pool) for item, how, pool in zip(items, hows, pools, strict=True)]
    # A receive is the other end of a send, so it has no bar of its own; a collective's bytes count as sent.
    rows = np.flatnonzero(columns["kind"] >= 0)
    bars = {name: column[rows] for name, column in columns.items() if name != "op_name"}
    bars["row"] = rows
    bars["bytes"] = np.where(np.isin(bars["kind"], (SEND, COLLECTIVE)), bars["bytes"], 0)
    made = Score(trace, times, bars, items, holds, sets, values)
    if made.shows_numbers and items[0].text != f"piece {items[0].name}":  # names need not fit into slots
        return replace(made, items=[replace(items[0], name=items[0].text)])
    return made


def _of_pipeline(trace: Trace, columns: dict[str, np.ndarray]) -> Score:
    """The score of a schedule that ran."""
    columns["item"], named = pipeline.microbatches(trace, columns)
    if trace.clock == "measured":
        columns["end"] = _arrivals(trace, columns)
    columns["piece"] = np.array([piece for *_, piece, _ in named] + [-1])[columns["item"]]
    columns["flow"] = pipeline.flows(columns, SEND)
    times = pipeline.moments(columns)
    begun = np.searchsorted(times, columns["start"] * (1 + 1e-12), side="right") - 1
    columns["step"] = np.clip(begun, 0, len(times) - 2)
    sets, holds = pipeline.held(columns, named, trace.mesh.size)
    bars = {name: column for name, column in columns.items() if name not in ("op_name", "piece")}
    rows = np.flatnonzero(bars["kind"] >= 0)
    bars = {name: column[rows] for name, column in bars.items()} | {"row": rows}
    bars["bytes"] = np.where(np.isin(bars["kind"], (SEND, COLLECTIVE)), bars["bytes"], 0)
    return Score(trace, times, bars, [Item(*item, "", ()) for item in named], holds, sets, [], True)


def _hows(trace: Trace, columns: dict[str, np.ndarray], num_items: int) -> list[str]:
    """How the parts of each item are combined, according to the operations that do it."""
    reductions, codes = trace.codes("reduction")
    found: list[set[str]] = [set() for _ in range(num_items)]
    for row in np.flatnonzero((columns["item"] >= 0) & (columns["kind"] == COMPUTE)).tolist():
        if columns["op_name"][row] in JOINING:
            found[columns["item"][row]].add(JOINING[columns["op_name"][row]])
    for row in np.flatnonzero((columns["item"] >= 0) & (columns["kind"] == COLLECTIVE)).tolist():
        reduction = reductions[codes[row]]
        found[columns["item"][row]].add("sum" if reduction == "mean" else reduction)
    return [hows.pop() if len(hows) == 1 else "" for hows in found]


def _items(trace: Trace, columns: dict[str, np.ndarray]) -> tuple[np.ndarray, list[tuple[str, str, int, int, str]]]:
    """The item of each event, and all items as (name, text, origin, piece, op)."""
    item = np.where(columns["chunk"] < len(trace.chunks), columns["chunk"], -1)
    item = np.where(columns["kind"] == COLLECTIVE, -1, item)
    merged = versions(trace, columns, item)
    item = np.array([merged.get(chunk, chunk) for chunk in range(-1, len(trace.chunks))], np.intp)[item + 1]
    # A chunk that no message carries would be an empty column. Pieces of one tensor keep their order.
    met: dict[int, set[int]] = {}
    for row in np.flatnonzero((item >= 0) & np.isin(columns["kind"], (SEND, -1))).tolist():
        met.setdefault(int(item[row]), set()).add(int(columns["rank"][row]))
    name_of = names(trace.chunks, trace.chunk_names, met)
    used = sorted(met, key=lambda chunk: (name_of[chunk].place, chunk))
    index = np.full(len(trace.chunks) + 1, -1)
    index[used] = np.arange(len(used))
    item = index[item]
    origin = [-1 if chunk in merged else trace.chunks[chunk][0] for chunk in used]
    items = [
        (name_of[chunk].short, name_of[chunk].text, home, trace.chunks[chunk][1], "")
        for chunk, home in zip(used, origin)
    ]
    taken = {name for name, *_ in items}
    free = (text for text in map(letter, range(len(items), 10**6)) if text not in taken)
    ops, (axes, axis_codes) = trace.codes("op")[0], trace.codes("axis")
    kind_of_axis = kinds_apart(trace)
    names_of = [kind_of_axis.get(axis or "", axis) for axis in axes]
    counts: dict[tuple, int] = {}
    found: dict[tuple, int] = {}
    for row in np.flatnonzero(columns["kind"] == COLLECTIVE).tolist():
        if ops[columns["op"][row]] == "barrier":
            continue
        # The k-th all_reduce over tp is one item, no matter on how many groups it runs, or on groups alike.
        rank_key = (int(columns["rank"][row]), int(columns["op"][row]), names_of[axis_codes[row]])
        counts[rank_key] = counts.get(rank_key, -1) + 1
        key = (*rank_key[1:], counts[rank_key])
        if key not in found:
            found[key] = len(items)
            name, op = next(free), ops[columns["op"][row]]
            items.append((name, f"{op} ({name})", -1, 0, op))
        item[row] = found[key]
    return item, items


def _pools(num_items: int, sets: Iterable[tuple[int, tuple[int, ...]]]) -> list[tuple[tuple[int, ...], ...]]:
    """For each item, the unions of the sets of contributors that share a rank."""
    pools: list[list[set[int]]] = [[] for _ in range(num_items)]
    for item, members in dict.fromkeys(sets):
        joined = set(members)
        for pool in [pool for pool in pools[item] if not pool.isdisjoint(joined)]:
            joined |= pool
            pools[item].remove(pool)
        pools[item].append(joined)
    return [tuple(sorted(tuple(sorted(pool)) for pool in of_item)) for of_item in pools]


def _wider(pools: list[tuple[tuple[int, ...], ...]], items: list[Any]) -> list[tuple[tuple[int, ...], ...]]:
    """The same, if a joint result of some ranks is expected to go on to a collective of more ranks."""
    joint = [index for index, (*_, op) in enumerate(items) if op]
    every = sorted({pool for index in joint for pool in pools[index]}, key=len)
    for index in joint:
        wider = {next((more for more in reversed(every) if set(pool) <= set(more)), pool) for pool in pools[index]}
        pools[index] = tuple(sorted(wider))
    return pools


def _arrivals(trace: Trace, columns: dict[str, np.ndarray]) -> np.ndarray:
    """When messages arrive. On the measured clock, a send ends when its call returns, but the message arrives only when
    its receive ends."""
    end = columns["end"].copy()
    received = np.flatnonzero((columns["kind"] == -1) & (columns["message"] >= 0))
    arrival = dict(zip(columns["message"][received].tolist(), end[received].tolist()))
    for row in np.flatnonzero(columns["kind"] == SEND).tolist():
        end[row] = max(end[row], arrival.get(int(columns["message"][row]), end[row]))
    return end


def _times(trace: Trace, columns: dict[str, np.ndarray]) -> np.ndarray:
    """When each round begins; a round ends with its last message, the last round with the trace."""
    start, end = trace.start, float(columns["end"].max()) if len(trace) else 0.0
    ends = np.full(max(trace.num_steps, 1), start)
    rows = columns["step"] >= 0
    np.maximum.at(ends, columns["step"][rows], columns["end"][rows])
    ends[-1] = end
    return np.concatenate([[start], np.maximum.accumulate(ends)])
