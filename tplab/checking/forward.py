"""The forward pass: the line at which it goes wrong, and what may be wrong there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.facts import Facts
from tplab.checking.gaps import gap
from tplab.checking.observed import largest
from tplab.checking.repairs import Hypothesis, Repair
from tplab.checking.sends import partitions
from tplab.checking.trail import Op, Trails
from tplab.units import plain, ranks_text


def of_forward(facts: Facts, line: str) -> Iterator[Hypothesis]:
    """What may be wrong at the line where the forward pass goes wrong."""
    for sent in facts.sent("forward"):
        if sent.where == line and sent.reduction in ("sum", "mean") and sent.size > 1:
            other = "mean" if sent.reduction == "sum" else "sum"
            cause = f"the {sent.reduction} over ranks is taken here, where the {other} is meant"
            repair = Repair(other, f"the {other} in place of the {sent.reduction} at {line}", line)
            yield Hypothesis(repair, cause, line)
            break
    yield from in_order(facts, forward=True)
    trails = facts.trails
    if trails is None or not line:
        return
    if (op := trails.first_wrong()) is not None and op.line == line:
        yield from _not_combined(facts, trails, op)
        yield from _of_another_rank(facts, trails, op)
    yield from _in_its_place(facts, trails, line)


def _not_combined(facts: Facts, trails: Trails, op: Op) -> Iterator[Hypothesis]:
    """Ranks have parts of the reference's value: it is their sum, or their mean, and nothing combines them."""
    held, want = trails.values_of(op.key)
    if len(held) < facts.num_ranks or any(x.dtype.kind != "f" or x.shape != want.shape for x in held.values()):
        return
    slack = 1e-5 * largest(want)
    if all(gap(x, held[0]) <= slack for x in held.values()):
        return
    for way in partitions(facts):
        totals = [np.sum([held[rank] for rank in group], axis=0) for group in way]
        for how, counts in ("mean", [len(group) for group in way]), ("sum", [1] * len(way)):
            if all(gap(total / count, want) <= slack for total, count in zip(totals, counts)):
                over = "ranks" if len(way) == 1 else " and over ".join(map(ranks_text, way))
                cause = (
                    f"each rank computes this from its own part alone: the {how} of it over {over} is the reference's, "
                    f"and nothing takes that {how}"
                )
                repair = Repair("cast", f"the {how} over {over} of what {op.line} computes", op.line, (op.key[1],), way,
                                how)  # fmt: skip
                yield Hypothesis(repair, cause, op.line)


def _of_another_rank(facts: Facts, trails: Trails, op: Op) -> Iterator[Hypothesis]:
    """One of the things that an operation takes is another part of the reference's than the rank should have."""
    for place, pieces in trails.wanted_by(op):
        made = trails.made_at(op, place)
        has = ", ".join(
            f"rank {rank} has that of rank {of}" for rank, of in trails.mistaken(op.key, place, pieces[op.key])
        )
        cause = f"what is made here is not the rank's part of the reference's: {has}"
        cause += f"; {op.line} takes it together with what is the rank's part"
        words = f"the rank's own part of what {made} makes, where {op.line} takes it"
        values = {(key, place): each for key, each in pieces.items()}
        yield Hypothesis(Repair("put", words, op.line, values=values, times=facts.number), cause, made)


def _in_its_place(facts: Facts, trails: Trails, line: str) -> Iterator[Hypothesis]:
    """The reference's values in the place of what a line computes: if all that follows is right then, the fault is
    there."""
    for words, values in trails.wanted_at(line):
        repair = Repair("put", f"the reference's values in place of what {line} computes", line, values=values,
                        times=facts.number)  # fmt: skip
        wrong = f"{words}{_too_much(facts, trails, values)}"
        cause = f"in the forward pass, the inputs of this line are right and its result is wrong: {wrong}"
        yield Hypothesis(repair, cause, line)


def _too_much(facts: Facts, trails: Trails, values: Mapping[Any, Mapping[int, np.ndarray]]) -> str:
    """The parameter that a value contains once too often, or more."""
    key, rank = next(iter(values)), facts.num_ranks - 1
    got = trails.value(rank, key)
    if got is None:
        return ""
    more = got.astype(np.float64) - values[key][rank]
    for name, x in facts.reference.parameters(facts.number - 1).items():
        if x.ndim != 1 or not more.ndim or x.shape != more.shape[-1:] or not x.any():
            continue
        times = float((more * x).sum() / (x.astype(np.float64) ** 2).sum() / (more.size / x.size))
        if abs(times) > 1e-3 and np.abs(more - times * x).max() <= 1e-4 * np.abs(got).max():
            many = "" if abs(times - 1) < 1e-3 else f"{plain(times)} times "
            return f"; it is the right value plus {many}{name}"
    return ""


def in_order(facts: Facts, *, forward: bool) -> list[Hypothesis]:
    """Collectives that were given tensors that are not contiguous, in the reference too. forward: of that alone"""
    found = []
    strided = {(at, *about) for seen in facts.ours for at, about in seen.strided.items()}
    for line, op in sorted((at, op) for at, op, is_backward in strided if not forward or not is_backward):
        words = f"{op} at {line} takes the elements of what it is given in the program's order"
        cause = (
            f"{op} at {line} is given a tensor that is not contiguous, and gloo takes its elements as they are in "
            "memory, in another order than the program's (nccl refuses it): pass x.contiguous(). In a backward "
            "pass it is a gradient that is not contiguous"
        )
        theirs = Repair("order", words, line, of_reference=True)
        also = (theirs,) if any(line in seen.strided for seen in facts.reference.seen) else ()
        found.append(Hypothesis(Repair("order", words, line), cause, thread=thread("strided"), also=also))
    return found
