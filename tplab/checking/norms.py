"""The norm of the gradients, and clipping by it.

A script that clips by hand shows no norm, only the factor by which it scales its gradients: max_norm / norm, or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from tplab.checking.causes import thread
from tplab.checking.facts import Facts, Found
from tplab.checking.gaps import gap
from tplab.checking.recording import Piece
from tplab.checking.reference import TIMES
from tplab.checking.repairs import Hypothesis, Repair
from tplab.checking.same_model import named
from tplab.units import plain, ranks_text

_CLIPS = 1 - 1e-3
"""A factor below this means that gradients are clipped."""


def norm(facts: Facts) -> Found:
    wanted, has = facts.theirs[0].norms, {rank: step.norms for rank, step in enumerate(facts.mine) if step.norms}
    if not all(len(norms) == len(wanted) for norms in has.values()):
        wanted, has = wanted[-1:], {rank: norms[-1:] for rank, norms in has.items()}
    for turn, (want, _, names) in enumerate(wanted if has else ()):
        slack = facts.reference.slack_of_norm(facts.number, turn - len(wanted))
        wrong = {rank: norms[turn] for rank, norms in has.items() if gap(norms[turn][0], want) > slack}
        if wrong:
            line = next(iter(wrong.values()))[1]
            got = {rank: value for rank, (value, _, _) in wrong.items()}
            yield from _wrong(facts, got, want, line, list(has), _covered(facts, want, names))
            return
    if wanted and has:
        values = ", ".join(f"{value:.6g}" for value, _, _ in wanted)
        yield facts.row("norm", True, f"{values} on every rank, as in the reference")
    yield from _scaled(facts)


def _covered(facts: Facts, want: float, names: Sequence[str]) -> Sequence[str]:
    """Return the parameters of the reference's norm: those that are clipped by it, or all."""
    whole = facts.reference.gradients(facts.number)
    square = sum(float((whole[name].astype(np.float64) ** 2).sum()) for name in names if name in whole)
    return names if abs(square**0.5 - want) <= 1e-3 * want else list(whole)


def _scaled(facts: Facts) -> Found:
    """Compare the factors by which gradients were scaled after their norm was taken."""
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
        yield from _wrong(facts, norms, want, line, list(scales), list(facts.theirs[0].gradients))
        return
    listed = ", ".join(dict.fromkeys(plain(x) for x in wrong.values()))
    words = f"gradients are then scaled by {listed}, but by {plain(should)} in the reference"
    cause = "gradients are clipped by another number than in the reference"
    hypotheses = [Hypothesis(repair, cause, line, thread("norm")) for repair in _repairs(facts, line)]
    yield facts.fault("norm", words, line, ranks=wrong, hypotheses=hypotheses,
                      lines=[*facts.sums_of_numbers(), facts.line("scale"), facts.line("step")])  # fmt: skip


def _norms(facts: Facts, scales: Mapping[int, float], limit: float) -> dict[int, float]:
    """Return the norm that each rank must have computed if it clips gradients to the norm `limit`. A rank that has not
    clipped computed a smaller one: its own, or an unknown one."""
    found = {}
    for rank, scale in scales.items():
        own = norm_of(facts.mine[rank].gradients)
        if scale < _CLIPS:
            found[rank] = limit / scale
        elif own <= limit:
            found[rank] = own
    return found if len(found) == len(scales) else {}


def _wrong(
    facts: Facts, wrong: Mapping[int, float], want: float, line: str, having: Sequence[int], names: Sequence[str]
) -> Found:
    """Yield a finding for ranks whose norms are not the reference's. names: the parameters that the norm covers"""
    rank, got = next(iter(wrong.items()))
    cause, key = _counted(facts, wrong, names)
    factor = got / want if want else None
    values = f"{got:.6g} on rank {rank}", f"{want:.6g}"
    ranks = list(wrong) if len(wrong) < len(having) else []
    lines = [sent.where for sent in facts.sent("reduction") if sent.size == 1]
    lines += [facts.line("scale"), facts.line("scale in"), facts.line("step")]
    hypotheses = [Hypothesis(repair, cause, line, thread(key)) for repair in _repairs(facts, line)]
    yield facts.fault(
        "norm", facts.sizes.words(factor), line, factor=factor, values=values, ranks=ranks, lines=lines,
        hypotheses=hypotheses,
    )  # fmt: skip


_CAUSES = {
    "": ("", ""),
    "all": (
        "squares are added up over ranks that hold copies, which then count several times: count one copy of each",
        "copies in norm",
    ),
    "own": (
        "each rank takes the norm of only what it holds: add up the squares over ranks before you take the root",
        "norm",
    ),
}

_Ways = dict[str, Sequence[int] | None]
"""Ways to count the squares of some gradients, by what is wrong with them: of which ranks; None for the rank's own."""


def _counted(facts: Facts, got: Mapping[int, float], names: Sequence[str]) -> tuple[str, str]:
    """Return which squares the ranks counted how often, given their norms, and the key of a thread. Parameters whose
    parts are on the same ranks count alike. Only single mistakes are tried: two explain almost any norm."""
    alike: dict[Any, list[str]] = {}
    for name in names:
        alike.setdefault(tuple(map(tuple, facts.groups(name).values())), []).append(name)
    kinds = [(_squares(facts, some), _ways(facts, groups, some, len(alike) == 1))
             for groups, some in alike.items() if groups]  # fmt: skip
    causes = dict[str, str]()
    for wrong in {words for _, ways in kinds for words in ways}:
        likewise = [[(own, ways[one]) for one in ("", wrong) if one in ways] for own, ways in kinds]
        for chosen in product(*likewise) if len(kinds) <= _MOST_KINDS else [[several[-1] for several in likewise]]:
            if _is_norm(got, lambda rank, chosen=chosen: sum(_counts(own, ways, rank) for own, ways in chosen)):
                causes.update([_CAUSES.get(wrong, (wrong, "norm"))])
    own = _squares(facts, names)
    if not causes:
        for ranks in _every_nth(facts.num_ranks):
            if _is_norm(got, lambda _, ranks=ranks: sum(own[rank] for rank in ranks)):
                words = f"only the squares on {ranks_text(ranks)} are counted: count each part once, on one of the "
                causes[f"{words}ranks that hold it"] = "norm"
        roots = [square**0.5 for square in own.values()]
        for how, root in ("added up", sum(roots)), ("averaged", sum(roots) / len(roots)), ("compared", max(roots)):
            if _is_norm(got, lambda _, root=root: root**2):
                words = f"the norms of all ranks' own gradients are {how}: add up their squares, then take the root"
                causes[words] = "norm"
    if len(causes) == 1 and "" not in causes:
        return next(iter(causes.items()))
    right = sum(squares[rank] for squares, ways in kinds for rank in ways[""] or ())
    words = "this is not the norm of the whole gradient: parts are missing, or copies count several times"
    return words, "copies in norm" if sum(v * v for v in got.values()) > len(got) * right else "norm"


_MOST_KINDS = 6
"""Up to this many groups of parameters, by their ranks, any subset may be counted wrongly; of more, all at once."""


def _is_norm(got: Mapping[int, float], squares: Callable[[int], float]) -> bool:
    """Return whether the squares of each rank give its norm."""
    return all(abs(squares(rank) ** 0.5 - value) <= 1e-4 * value for rank, value in got.items())


def _counts(own: Mapping[int, float], ranks: Sequence[int] | None, rank: int) -> float:
    return sum(own[one] for one in ((rank,) if ranks is None else ranks))


def _ways(facts: Facts, groups: Sequence[Sequence[int]], names: Sequence[str], are_all: bool) -> _Ways:
    """Return ways to count the squares, the right one first. are_all: whether `names` are all parameters"""
    firsts, those = [group[0] for group in groups], "all gradients" if are_all else named(names)
    found: _Ways = {"": firsts}
    if any(len(group) > 1 for group in groups):
        found["all"] = range(facts.num_ranks)
    if len(groups) > 1 or len(groups[0]) < facts.num_ranks:
        found["own"] = None
    parts = f"add up the squares of {those} over the ranks that hold other parts"
    for one in firsts if len(groups) > 1 else ():
        found[f"of {those}, only the part of rank {one} is counted: {parts}"] = [one]
    if not are_all:
        found[f"the norm leaves out {those}"] = ()
    return found


def _squares(facts: Facts, names: Sequence[str]) -> dict[int, float]:
    """Return the sum of the squares of each rank's gradients of these parameters."""
    found = dict.fromkeys(range(facts.num_ranks), 0.0)
    for rank, mine, _ in (one for name in names for one in facts.holders(name)):
        if (piece := facts.mine[rank].gradients.get(mine)) is not None:
            found[rank] += float((piece.values.astype(np.float64) ** 2).sum())
    return found


def _every_nth(count: int) -> Iterator[range]:
    """Yield sets of ranks that may share an index along an axis."""
    for size in (size for size in range(2, count) if count % size == 0):
        yield from (range(first, count, size) for first in range(size))
        yield from (range(first, first + size) for first in range(0, count, size))


def _repairs(facts: Facts, line: str) -> Iterator[Repair]:
    """Yield repairs: clip by the reference's norm, and scale by the reference's factor."""
    steps = [facts.reference.steps(number)[0] for number in range(facts.reference.num_steps)]
    norms = {(number, turn): value for number, step in enumerate(steps) for turn, (value, *_) in enumerate(step.norms)}
    if norms:
        of = "norms in place of the numbers" if len(steps[facts.number].norms) > 1 else "norm in place of the number"
        yield Repair("norm", f"the reference's {of} that {line} clips by", line, values=norms)
    theirs = dict(reversed(steps[facts.number].scaled))
    differ = [at for at, by in facts.scaled if at in theirs and gap(by, theirs[at]) > 1e-3 * abs(by)]
    for at in dict.fromkeys(differ):
        numbers = {number: dict(step.scaled).get(at) for number, step in enumerate(steps)}
        words = f"the number by which the reference multiplies gradients at {at}"
        yield Repair("factor", words, at, values=numbers)


def _scales(facts: Facts) -> tuple[float | None, dict[int, float]]:
    """Return the factors by which the reference and each rank scale the gradients before the optimizer gets them; None
    and no rank if no norm was taken. Each rank is judged by its own parameters: experts may be clipped apart from the
    rest."""
    whole, final = facts.reference.gradients(facts.number), facts.reference.finals(facts.number)
    products: dict[int, list[float]] = {}
    for name, rank, _, got, want, place in facts.pieces("finals", {name: final[name] for name in whole}):
        terms = (want * got).sum(), (want * place.take(whole[name])).sum(), (want * want).sum()
        products[rank] = [float(a + b) for a, b in zip(products.get(rank, [0.0, 0.0, 0.0]), terms)]
    should = next((square / before for _, before, square in products.values() if before), None)
    scales = {rank: should * has / square for rank, (has, _, square) in products.items() if should and square}
    return should, scales


def norm_of(pieces: Mapping[str, Piece]) -> float:
    return float(sum((piece.values.astype(np.float64) ** 2).sum() for piece in pieces.values()) ** 0.5)
