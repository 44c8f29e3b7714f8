"""A pipeline's run as a score: microbatches sent between ranks, actions, and what ranks hold for backward passes."""

from __future__ import annotations

import re

import numpy as np

from tplab.trace.trace import Trace
from tplab.widgets.paper.frame import rests
from tplab.widgets.score.holds import GONE, HELD

ACTIVATIONS, GRADIENTS = 1, 2  # what a message carries; 0: neither

_ACTIONS = re.compile(r"[FBIW]\d+(\+[FBIW]\d+)*")
_ACTION = re.compile(r"([FBIW])(\d+)")

Items = list[tuple[str, str, int, int, str]]


def kind_of(op: str) -> int:
    """The kind of an action, such as F3; -1 for other operations."""
    return "FBIW".find(op[0]) if _ACTIONS.fullmatch(op) else -1


def is_pipeline(trace: Trace) -> bool:
    """Whether a schedule ran: the trace has actions such as F3, with stages and microbatches."""
    if not trace.chunks:
        return False
    stages = any(where.startswith("stage ") for where in trace.codes("where")[0])
    return stages and any(map(_ACTIONS.fullmatch, trace.codes("op")[0]))


def microbatches(trace: Trace, columns: dict[str, np.ndarray]) -> tuple[np.ndarray, Items]:
    """The item of each event, and all items as (name, text, origin, piece, op): one per microbatch, in order."""
    chunk = np.where(columns["chunk"] < len(trace.chunks), columns["chunk"], -1)
    chunk = np.where(_is_apart(trace, columns), -1, chunk)
    used = sorted(np.unique(chunk[chunk >= 0]).tolist(), key=lambda number: (trace.chunks[number][1], number))
    index = np.full(len(trace.chunks) + 1, -1)
    index[used] = np.arange(len(used))
    items = [(str(trace.chunks[number][1]), f"microbatch {trace.chunks[number][1]}", *trace.chunks[number], "")
             for number in used]  # fmt: skip
    return index[chunk], items


def _is_apart(trace: Trace, columns: dict[str, np.ndarray]) -> np.ndarray:
    """Which messages belong to no microbatch: those of a shape that is sent only after a rank's last action. Ranks with
    copies of a parameter sum its gradients in this way."""
    kinds, codes = trace.codes("kind")
    rank, shape = columns["rank"].astype(int), trace.codes("shape")[1]
    actions, last = _rows(columns), np.full(trace.mesh.size, -np.inf)
    np.maximum.at(last, rank[actions], columns["end"][actions])
    is_send = np.isin(codes, [place for place, kind in enumerate(kinds) if kind == "send"])
    is_message = np.isin(codes, [place for place, kind in enumerate(kinds) if kind in ("send", "receive")])
    is_late = columns["start"] >= last[rank] * (1 - 1e-9)
    return is_message & ~np.isin(shape, shape[is_send & ~is_late])


def moments(columns: dict[str, np.ndarray]) -> np.ndarray:
    """When the steps begin: each distinct moment at which an action ends; the last one is the end of the run."""
    return rests(columns["end"][_rows(columns)], float(columns["end"].max()), float(columns["start"].min()))


def flows(columns: dict[str, np.ndarray], send: int) -> np.ndarray:
    """The contents of each message: the result of the last action that its rank had run for this microbatch."""
    found = np.zeros(len(columns["rank"]), np.int8)
    made: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for row in _rows(columns).tolist():
        rank, end = int(columns["rank"][row]), float(columns["end"][row])
        for letter, number in _ACTION.findall(str(columns["op_name"][row])):
            flow = ACTIVATIONS if letter == "F" else GRADIENTS
            made.setdefault((rank, int(number)), []).append((end, flow))
    for actions in made.values():
        actions.sort()
    piece = columns["piece"]
    for row in np.flatnonzero((columns["kind"] == send) & (columns["item"] >= 0)).tolist():
        own = _ACTION.fullmatch(str(columns["op_name"][row]))
        if own:
            found[row] = ACTIVATIONS if own[1] == "F" else GRADIENTS
            continue
        before = [flow for end, flow in made.get((int(columns["rank"][row]), int(piece[row])), [])
                  if end <= columns["start"][row] * (1 + 1e-9) + 1e-15]  # fmt: skip
        found[row] = before[-1] if before else 0
    return found


def held(
    columns: dict[str, np.ndarray], items: Items, num_ranks: int
) -> tuple[list[tuple[int, ...]], dict[str, np.ndarray]]:
    """(sets of contributors, the columns of holds): a rank holds a microbatch from its first forward pass there until
    its last backward pass is over."""
    of_rank: dict[tuple[int, int], int] = {}
    rows = _rows(columns).tolist()
    for row in rows:
        item = int(columns["item"][row])
        if item >= 0:
            of_rank[int(columns["rank"][row]), items[item][3]] = item
    by_piece = {item[3]: place for place, item in enumerate(items)}
    first: dict[tuple[int, int], float] = {}
    last: dict[tuple[int, int], float] = {}
    for row in rows:
        rank = int(columns["rank"][row])
        for letter, number in _ACTION.findall(str(columns["op_name"][row])):
            item = of_rank.get((rank, int(number)), by_piece.get(int(number), -1))
            if item < 0:
                continue
            if letter == "F":
                start = float(columns["start"][row])
                first[rank, item] = min(first.get((rank, item), start), start)
            else:
                last[rank, item] = max(last.get((rank, item), -np.inf), float(columns["end"][row]))
    table = [(time, *key, HELD) for key, time in first.items()] + [(time, *key, GONE) for key, time in last.items()]
    table.sort()
    sets = [(rank,) for rank in range(num_ranks)]
    numbers = np.array(table, float).reshape(-1, 4)
    rank, item, state = (numbers[:, place].astype(np.int32) for place in (1, 2, 3))
    return sets, {"time": numbers[:, 0], "rank": rank, "item": item, "set": rank, "state": state,
                  "value": np.full(len(table), -1, np.int32), "part": np.zeros(len(table), np.int32)}  # fmt: skip


def _rows(columns: dict[str, np.ndarray]) -> np.ndarray:
    """The events that are actions."""
    is_action = np.array([bool(_ACTIONS.fullmatch(op)) for op in columns["op_name"]], bool)
    return np.flatnonzero(is_action & (columns["kind"] == 0))
