"""The collectives of a script that a fault may come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tplab.checking.facts import Facts
from tplab.checking.gaps import gap
from tplab.checking.recording import Sent
from tplab.units import ranks_text

_REDUCES = ("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "all_to_all")


def lines_of_reduction(facts: Facts, names: Sequence[str]) -> list[str]:
    """Return the lines of the collectives that reduce these gradients, the likeliest first: those that are given them;
    else the largest one between the backward pass and the step."""
    given = [sent.where for sent in given_to(facts, names)]
    if given:
        return list(dict.fromkeys(reversed(given)))
    later = [sent for sent in facts.sent("reduction") if sent.size > 1 and not sent.on]
    return [max(later, key=lambda sent: sent.size).where] if later else []


def line_of_buckets(facts: Facts, names: Sequence[str]) -> str:
    """Return the line of the largest reduction, if it is larger than any of these gradients alone. The reductions that
    functions make in their backward passes are of activations' gradients, except for FSDP's."""
    passed_on = facts.trails.sent_back if facts.trails and "FSDPModule" not in facts.ours[0].kinds else ()
    most = max((facts.reference.weights[name].size for name in names if name in facts.reference.weights), default=0)
    sums = [sent for sent in facts.sent("backward", "reduction")
            if sent.op in ("all_reduce", "reduce_scatter", "reduce") and sent.size > most > 0
            and sent.where not in passed_on]  # fmt: skip
    return max(sums, key=lambda sent: sent.size).where if sums else ""


def given_to(facts: Facts, names: Sequence[str], rank: int | None = None) -> list[Sent]:
    """Return the collectives that were given these gradients, on all ranks or on one."""
    mine = {name for (_, name), place in facts.places.items() if place.name in names}
    sent = facts.sent("reduction", "backward", rank=rank)
    return [one for one in sent if one.on == "gradient" and mine & set(one.names) and one.op in _REDUCES]


def mixing(facts: Facts, names: Sequence[str]) -> str:
    """Return the line of a collective that adds up gradients of different parts of a parameter, or ""."""
    for sent in facts.sent("reduction", "backward"):
        for name in sent.names if sent.on == "gradient" and sent.op == "all_reduce" else ():
            place = next((facts.places[rank, name] for rank in sent.ranks if (rank, name) in facts.places), None)
            if place is not None and place.name in names and facts.holds_differ(place.name, sent.ranks):
                return sent.where
    return ""


def line_of_loss(facts: Facts) -> str:
    """Return the line of the collective over losses on whose result `backward` is called."""
    losses = [step.losses[0][0] if step.losses else None for step in facts.mine]
    by_line: dict[str, list[float]] = {}
    for sent in facts.sent("between", "forward"):
        if sent.value is not None and sent.op == "all_reduce":
            by_line.setdefault(sent.where, []).append(sent.value)
    for line, values in by_line.items():
        if losses[0] is not None and len(values) == len(losses):
            total = sum(values)
            if any(abs(losses[0] - wanted) <= 1e-4 * abs(wanted) for wanted in (total, total / len(values))):
                return line
    return ""


def adds_up(facts: Facts, name: str, way: Sequence[Sequence[int]], combine: str, slack: float) -> bool:
    """Return whether a gradient of the step is the reference's once it is combined ("sum", "mean") over these groups of
    ranks, all of which hold the same part.

    slack   how far each rank's part may be off
    """
    if (whole := facts.reference.gradients(facts.number).get(name)) is None:
        return False
    held = {rank: (rank, mine, place) for rank, mine, place in facts.holders(name)}
    for rank, _, place in held.values():
        group = next((group for group in way if rank in group), (rank,))
        those = [held[other] for other in group if other in held]
        parts = [facts.mine[other].gradients.get(mine) for other, mine, _ in those]
        there, want = [part.values.astype(np.float64) for part in parts if part is not None], place.take(whole)
        if {x.shape for x in there} != {want.shape} or any(other.index != place.index for *_, other in those):
            return False
        count = len(group) if combine == "mean" else 1
        if gap(np.sum(there, axis=0) / count, want) > slack * len(group) / count:
            return False
    return True


def partitions(facts: Facts) -> list[tuple[tuple[int, ...], ...]]:
    """Return the ways in which the ranks form groups: all of them together; those of the script's process groups; those
    that saw the same samples, and one rank of each of these."""
    every = tuple(range(facts.num_ranks))
    ways: list[tuple[tuple[int, ...], ...]] = [(every,)]
    members = sorted({group for seen in facts.ours for group in seen.members if 1 < len(group) < facts.num_ranks})
    for size in dict.fromkeys(len(group) for group in members):
        same, free = list[tuple[int, ...]](), set(every)
        for group in (group for group in members if len(group) == size):
            if set(group) <= free:
                same.append(group)
                free -= set(group)
        ways.append(tuple(same))
        if crossing := [group for group in members if len(group) == size and group not in same]:
            ways.append(tuple(crossing))
    copies = [group for group in facts.copies if len(group) > 1]
    if copies and len({len(group) for group in facts.copies}) == 1:
        ways += [tuple(copies), tuple(zip(*copies))]
    return [way for way in dict.fromkeys(ways) if any(len(group) > 1 for group in way)]


def listed(way: Sequence[Sequence[int]]) -> str:
    """Return groups of ranks as words that follow "over"."""
    return " and over ".join(map(ranks_text, way))


def over(facts: Facts, way: Sequence[Sequence[int]]) -> str:
    """Return the same, or "ranks" if all ranks are one group."""
    return "ranks" if len(way) == 1 and len(way[0]) == facts.num_ranks else listed(way)
