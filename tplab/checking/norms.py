"""The norm of the gradients, and what they are clipped by.

A script that clips by hand shows no norm, but by how much it has scaled its gradients: max_norm / norm, or 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.facts import Facts, Found
from tplab.checking.gaps import gap
from tplab.checking.recording import Piece
from tplab.checking.reference import TIMES
from tplab.checking.repairs import Hypothesis, Repair
from tplab.units import plain

_CLIPS = 1 - 1e-3
"""Gradients that are scaled by less than this are clipped."""


def norm(facts: Facts) -> Found:
    wanted = [value for step in facts.theirs[:1] for value, _ in step.norms]
    has = {rank: step.norms[-1] for rank, step in enumerate(facts.mine) if step.norms}
    if wanted and has:
        want = wanted[-1]
        slack = facts.reference.slack_of_norm(facts.number)
        wrong = {rank: at for rank, at in has.items() if gap(at[0], want) > slack}
        if wrong:
            line = next(iter(wrong.values()))[1]
            yield from _wrong(facts, {rank: value for rank, (value, _) in wrong.items()}, want, line, list(has))
            return
        yield facts.row("norm", True, f"{want:.6g} on every rank, as in the reference")
    yield from _scaled(facts)


def _scaled(facts: Facts) -> Found:
    """By how much gradients were scaled after their norm was taken."""
    should, scales = _scales(facts)
    if should is None:
        return
    slack = max(8 * facts.reference.floor, TIMES * facts.reference.noise_of_gradients(facts.number)) * should
    wrong = {rank: x for rank, x in scales.items() if gap(x, should) > slack}
    if not wrong:
        if not any(step.norms for step in facts.mine):
            yield facts.row("norm", True, f"gradients are then scaled by {should:.6g}, as in the reference")
        return
    line = facts.line_of_norm() or facts.line("clip") or facts.line("scale") or facts.line("step")
    want = norm_of(facts.theirs[0].gradients) if len(facts.theirs) == 1 else 0.0
    if should < _CLIPS and want and (norms := _norms(facts, wrong, should * want)):
        yield from _wrong(facts, norms, want, line, list(scales))
        return
    listed = ", ".join(dict.fromkeys(plain(x) for x in wrong.values()))
    words = f"gradients are then scaled by {listed}, and by {plain(should)} in the reference"
    hypotheses = [Hypothesis(repair, "gradients are not clipped by the reference's number", line, thread("norm"))
                  for repair in _repairs(facts, line)]  # fmt: skip
    yield facts.fault("norm", "", words, None, line, "", ranks=list(wrong), hypotheses=hypotheses,
                      lines=[*facts.sums_of_numbers(), facts.line("scale"), facts.line("step")])  # fmt: skip


def _norms(facts: Facts, scales: Mapping[int, float], limit: float) -> dict[int, float]:
    """The norm that each rank must have taken, where gradients of a larger one than `limit` are clipped to it. A rank
    that has not clipped took a smaller one: its own, or nothing is known."""
    found = {}
    for rank, scale in scales.items():
        own = norm_of(facts.mine[rank].gradients)
        if scale < _CLIPS:
            found[rank] = limit / scale
        elif own <= limit:
            found[rank] = own
    return found if len(found) == len(scales) else {}


def _wrong(facts: Facts, wrong: Mapping[int, float], want: float, line: str, having: Sequence[int]) -> Found:
    """These ranks' norms are not the reference's."""
    rank, got = next(iter(wrong.items()))
    own = {rank: norm_of(facts.mine[rank].gradients) for rank in having}
    every = sum(value * value for value in own.values()) ** 0.5
    spread = max(own.values()) - min(own.values())  # where ranks hold a little that differs, as experts, theirs do too
    near = min(1e-3 * want, spread / 10) if spread > 1e-5 * want else 1e-3 * want
    is_own = all(abs(value - own[rank]) <= near for rank, value in wrong.items())
    is_whole = abs(every - want) <= 1e-3 * want
    if is_own and (is_whole or got < want or len({f"{value:.5g}" for value in own.values()}) > 1):
        cause = "each rank takes the norm of only what it holds: add up the squares over ranks before you take the root"
        key = "norm"
    elif abs(got - every) <= 1e-3 * every:
        cause = (
            "squares are added up over ranks that hold copies, which then count several times: count one copy of each"
        )
        key = "copies in norm"
    else:
        cause = "this is not the norm of the whole gradient: parts are missing, or copies count several times"
        key = "copies in norm" if got > want else "norm"
    factor = got / want if want else None
    words = facts.sizes.words(factor) if factor else "not the reference's"
    values = f"{got:.6g} on rank {rank}", f"{want:.6g}"
    ranks = list(wrong) if len(wrong) < len(having) else []
    lines = [sent.where for sent in facts.sent("reduction") if sent.size == 1]
    lines += [facts.line("scale"), facts.line("scale in"), facts.line("step")]
    hypotheses = [Hypothesis(repair, cause, line, thread(key)) for repair in _repairs(facts, line)]
    yield facts.fault(
        "norm", "", words, factor, line, "", values=values, ranks=ranks, lines=lines, hypotheses=hypotheses
    )


def _repairs(facts: Facts, line: str) -> Iterator[Repair]:
    """Gradients clipped by the reference's norm, and scaled by the number that the reference scales them by."""
    steps = [facts.reference.steps(number)[0] for number in range(facts.reference.num_steps)]
    if norms := {number: step.norms[-1][0] for number, step in enumerate(steps) if step.norms}:
        yield Repair("norm", f"the reference's norm in place of the number that {line} clips by", line, values=norms)
    theirs = dict(reversed(steps[facts.number].scaled))
    differ = [at for at, by in facts.scaled if at in theirs and gap(by, theirs[at]) > 1e-3 * abs(by)]
    for at in dict.fromkeys(differ):
        numbers = {number: dict(step.scaled).get(at) for number, step in enumerate(steps)}
        words = f"the number by which the reference multiplies gradients at {at}"
        yield Repair("numbers", words, at, values=numbers)


def _scales(facts: Facts) -> tuple[float | None, dict[int, float]]:
    """By how much the reference, and each rank, has multiplied the reference's gradients when the optimizer gets them;
    None, and no rank, where no norm of them was taken. A rank is compared by what it holds: experts, of which others
    hold other ones, may be clipped apart from the rest."""
    whole, final = facts.reference.gradients(facts.number), facts.reference.finals(facts.number)
    products: dict[int, list[float]] = {}
    for name, x in whole.items():
        for rank, mine, place in facts.holders(name):
            want, piece = place.take(final[name]).astype(np.float64), facts.mine[rank].finals.get(mine)
            if piece is not None and piece.values.shape == want.shape:
                found = products.setdefault(rank, [0.0, 0.0, 0.0])
                terms = (want * piece.values).sum(), (want * place.take(x)).sum(), (want * want).sum()
                products[rank] = [float(a + b) for a, b in zip(found, terms)]
    should = next((square / before for _, before, square in products.values() if before), None)
    scales = {rank: should * has / square for rank, (has, _, square) in products.items() if should and square}
    return should, scales


def norm_of(pieces: Mapping[str, Piece]) -> float:
    return float(sum((piece.values.astype(np.float64) ** 2).sum() for piece in pieces.values()) ** 0.5)
