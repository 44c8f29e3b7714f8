"""The loss and its gradients: which of them is wrong, and the possible causes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tplab.checking.causes import times
from tplab.checking.facts import Facts, Found, same
from tplab.checking.forward import of_forward
from tplab.checking.gaps import gap
from tplab.checking.gradients import Holder, Wrong, grouped, judge_gradient
from tplab.checking.hypotheses import Hypotheses
from tplab.checking.same_model import Finding, named
from tplab.checking.seen_samples import shared
from tplab.checking.sends import adds_up, mixing, partitions


def loss_and_gradients(facts: Facts) -> Found:
    """Compare all gradients, and the loss where backward passes begin. A loss may be scaled on purpose, and whether it
    is right depends on what it is averaged over, so the gradients decide."""
    wrong, total, line = _wrong_gradients(facts)
    yield from _loss(facts, total, is_right=not wrong)
    if not wrong:
        of = f" of {all_of}" if (all_of := len(facts.reference.gradients(facts.number))) > total else ""
        noise = facts.reference.noise_of_gradients(facts.number) if facts.reference.again else 0.0
        rounding = f"; rounding changes them by {noise:.1g} of their largest element" * bool(noise)
        added = f", once the optimizer has added them up over ranks at {line}" if line else ""
        words = f"{total}{of} gradients are the reference's{added}{rounding}" if total else "no gradients were seen"
        yield facts.row("gradient", True if total else None, words, count=total)
        return
    groups = grouped(wrong)
    for group in groups:
        is_all = len(groups) == 1 and len(group) == len(wrong) and len(wrong) >= 0.9 * total
        yield _finding(Hypotheses(facts, group, is_all))
    told = {one.name for group in groups for one in group}
    if rest := [one.name for one in wrong if one.name not in told]:
        facts.suspects.update(rest)
        yield facts.row("gradient", None, f"those of {named(rest)} are wrong too, which may follow from this")


def _has_begun_so(facts: Facts, name: str) -> bool:
    """Return whether a buffer of rank 0 has its initial values after the step."""
    after = facts.mine[0].buffers.get(name)
    return after is not None and same(after.values, facts.ours[0].buffers[name].values)


def _finding(case: Hypotheses) -> Finding:
    """Return the observed fault with everything that may be its cause."""
    facts, first = case.facts, case.first
    kind, factor, where = first.kind, first.factor, case.where
    words, values = first.words, (f"{first.got:.6g}", f"{first.want:.6g}")
    ranks = first.ranks if kind in ("none", "shape", "other") else ()
    running = [name for name in facts.ours[0].buffers if "running" in name]
    is_frozen = running and all(_has_begun_so(facts, name) for name in running)
    if "BatchNorm" in facts.ours[0].kinds and not is_frozen and kind in ("other", "means", "weights"):
        name = next(iter(running), case.names[0])
        at = facts.ours[0].made.get("BatchNorm") or facts.line("forward")
        words, lines = "statistics of each rank's own samples", [facts.line("forward"), *case.lines]
        return facts.fault("buffers", words, at, names=[name], lines=lines, hypotheses=case.hypotheses)
    by, is_scaled = facts.times_loss(), kind == "scaled" and factor is not None
    factor = 1.0 if factor is None else factor
    is_loss = is_scaled and case.is_all and by is not None and abs(by - factor) < 5e-3 * abs(factor)
    if is_loss or (kind == "other" and facts.is_loss_off):
        mean, want = float(np.mean(facts.losses())), facts.reference.loss(facts.number)
        factor = factor if is_loss else mean / want
        words = facts.sizes.words(factor) if is_loss else f"{times(factor)} times the reference's"
        where = case.backward if is_loss else facts.line_of_value() or case.backward
        lines = case.lines if is_loss else [facts.line("forward"), *case.lines]
        if not is_loss:
            begun = where
        elif facts.sizes.named(factor):  # a number of the run explains it, not the forward pass
            begun = ""
        else:
            begun = facts.line_of_value()
        tried = [*(() if is_loss else shared(facts)), *(of_forward(facts, begun) if begun else ()), *case.hypotheses]
        values = f"{mean:.6g}", f"{want:.6g}"
        return facts.fault("loss", words, where, factor=factor, values=values, lines=lines, hypotheses=tried)
    if is_scaled:
        words = facts.sizes.words(factor)
    elif (kind == "own" and not case.is_all) or kind == "other":
        where = case.in_backward or where
    elif kind == "own":
        where = case.not_synchronised or where
    elif kind == "none":
        where = case.not_synchronised or case.backward
    if mixing(facts, case.names):
        what = "experts" if any("expert" in name for name in case.names) else "shards"
        words, where = f"mixed with the gradients of other {what}", mixing(facts, case.names)
    is_odd = kind == "other" or (is_scaled and not facts.sizes.named(factor))
    tried = [*of_forward(facts, facts.line_of_value())] if is_odd else []
    return facts.fault(
        "gradient", words, where, names=case.names, factor=first.factor, values=values, ranks=ranks, lines=case.lines,
        hypotheses=[*case.hypotheses, *tried],
    )  # fmt: skip


def _loss(facts: Facts, num_gradients: int, is_right: bool) -> Found:
    has, want = facts.losses(), facts.reference.loss(facts.number)
    if not has or not want:
        yield facts.row("loss", None, "no backward pass from a single number was seen")
        return
    mean, slack = float(np.mean(has)), facts.reference.slack_of_loss(facts.number)
    if gap(mean, want) <= slack:
        how = "the mean over ranks" if np.ptp(has) > min(slack, 1e-5 * abs(want)) else "the same on every rank"
        yield facts.row("loss", True, f"{mean:.6g}, {how}; the reference's is {want:.6g}")
    elif gap(sum(has), want) <= len(has) * slack and is_right:
        yield facts.row("loss", True, f"its parts on {len(has)} ranks add up to {want:.6g}, as in the reference")
    elif is_right:
        why = (
            "it is scaled, because the gradients are the same" if num_gradients else "no gradients were seen beside it"
        )
        yield facts.row("loss", None, f"{mean:.6g} on average, {want:.6g} in the reference; {why}")


def _wrong_gradients(facts: Facts) -> tuple[list[Wrong], int, str]:
    """Return the wrong gradients in backward order, how many were judged, and the line at which the optimizer itself
    adds up some of them, or "". A script may take a norm and only then divide its gradients, so no gradient counts as
    wrong if the optimizer receives the right ones."""
    wrong, count = _judged(facts, facts.reference.gradients(facts.number), is_final=False)
    is_measured = any(step.finals for step in facts.mine) and not any(step.norms for step in facts.mine)
    if wrong and is_measured and not _judged(facts, facts.reference.finals(facts.number), is_final=True)[0]:
        return [], count, ""
    added, line = _added_up_in_step(facts, [one.name for one in wrong])
    return [one for one in wrong if one.name not in added], count, line


def _added_up_in_step(facts: Facts, names: Sequence[str]) -> tuple[list[str], str]:
    """Return the gradients that the optimizer itself adds up over ranks, as an optimizer with sharded states does, and
    the line. It must reduce at least as many elements as they have. The parameters after the step show the result."""
    sums = [one for one in facts.sent("step") if one.reduction in ("sum", "mean")]
    line = next((one.where for one in sums if one.size > 1), "")  # a norm is one number
    whole, added = facts.reference.gradients(facts.number), list[str]()
    for name in names if line and _have_one_state(facts, names) else ():
        slack = facts.reference.slack_of_gradient(name, facts.number) if name in whole else 0.0
        ways = itertools.product(partitions(facts), ("mean", "sum"))
        added += [name] * any(adds_up(facts, name, way, how, slack) for way, how in ways)
    held = [facts.mine[rank].gradients.get(mine) for name in added for rank, mine, _ in facts.holders(name)]
    size = sum(piece.values.size for piece in held if piece is not None)
    return (added, line) if added and sum(one.size for one in sums) >= size else ([], "")


def _have_one_state(facts: Facts, names: Sequence[str]) -> bool:
    """Return whether ranks that hold copies of these parameters have equal optimizer states for them, if any. The
    states differ if each rank updates them with its own gradient."""
    held: dict[Any, list[np.ndarray]] = {}
    for name, key in facts.reference.states(facts.number):
        for rank, mine, place in facts.holders(name) if name in names else ():
            if (piece := facts.mine[rank].states.get((mine, key))) is not None and piece.values.any():
                held.setdefault((name, key, place.index), []).append(piece.values)
    return all(same(x, first) for first, *others in held.values() for x in others)


def _judged(facts: Facts, whole: Mapping[str, np.ndarray], is_final: bool) -> tuple[list[Wrong], int]:
    found, count = list[Wrong](), 0
    for name in facts.reference.order:
        holders = []
        for rank, mine, place in facts.holders(name):
            step = facts.mine[rank]
            if mine in step.settings:  # an optimizer has it
                pieces = step.gradients | step.finals if is_final else step.gradients
                piece, parts = pieces.get(mine), [batch.get(mine) for batch in step.parts]
                holders.append(Holder(rank, place, None if piece is None else piece.values, parts))
        if holders:
            count += 1
            slack = facts.reference.slack_of_gradient(name, facts.number) if name in whole else 0.0
            if is_final and slack:
                before = facts.reference.gradients(facts.number)[name]
                slack *= float(np.abs(whole[name]).max() / max(np.abs(before).max(), 1e-300))
            if wrong := judge_gradient(name, whole.get(name), holders, slack):
                found.append(wrong)
    return found, count
