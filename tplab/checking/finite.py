"""Numbers that are not finite. They are compared first, because NaN propagates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tplab.checking.facts import Facts, Found, NothingToTell
from tplab.checking.recording import Piece, Seen
from tplab.checking.same_model import NOT_FINITE, TITLES, What, titled
from tplab.units import ranks_text

_Number = tuple[What, str, np.ndarray, str]
"""The quantity, its name, its values and its line."""


def finite(facts: Facts) -> Found:
    """Yield quantities that are not finite on ranks only. Raises NothingToTell if the reference's are not finite."""
    ours = [list(_not_finite(seen, facts.number)) for seen in facts.ours]
    theirs = [one for seen in facts.reference.seen for one in _not_finite(seen, facts.number)]
    for what in TITLES:  # in the order of a step
        mine = {rank: [one for one in found if one[0] == what] for rank, found in enumerate(ours)}
        mine = {rank: found for rank, found in mine.items() if found}
        if here := next((one for one in theirs if one[0] == what), None):
            also = f" and on {ranks_text(tuple(mine))}" if mine else ""
            raise NothingToTell(
                f"{titled(what, here[1])} in step {facts.number} is not finite ({_listed([here, *theirs])}, at "
                f"{here[3]}) in the reference{also}: repair that first, because NaN does not equal anything"
            )
        if mine:
            rank, found = next(iter(mine.items()))
            line = found[0][3]
            words = f"{NOT_FINITE} ({_listed(ours[rank])}); it is finite in the reference"
            yield facts.fault(what, words, line, names=[name for _, name, _, _ in found], ranks=mine,
                              lines=[facts.line("forward"), facts.line("backward"), facts.line("step")])  # fmt: skip
            return


def _not_finite(seen: Seen, number: int) -> Iterator[_Number]:
    """Yield one rank's values that are not finite. Weights and buffers may begin so: masks hold -inf, say."""
    for what, name, values, line in _numbers(seen, number):
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            yield what, name, values, line


def _numbers(seen: Seen, number: int) -> Iterator[_Number]:
    step = seen.steps[number]
    backward, end = step.lines.get("backward", ""), step.lines.get("step", "")
    for value, line in step.losses:
        yield "loss", "", np.array(value), line
    for name, piece in step.gradients.items():
        yield "gradient", name, piece.values, backward
    for value, line, _ in step.norms:
        yield "norm", "", np.array(value), line
    for (name, key), piece in step.states.items():
        yield "optimizer", f"{key} of {name}", piece.values, end
    for name, piece in step.parameters.items():
        if _is_finite_at_start(seen.weights, name):
            yield "parameters", name, piece.values, end
    for name, piece in step.buffers.items():
        if _is_finite_at_start(seen.buffers, name):
            yield "buffers", name, piece.values, end


def _is_finite_at_start(begun: Mapping[str, Piece], name: str) -> bool:
    return name not in begun or bool(np.isfinite(begun[name].values).all())


def _listed(found: Sequence[_Number]) -> str:
    """Return the kind of the first value, NaN or infinite; for an infinity, also the first quantity that has NaN."""
    values = found[0][2]
    if np.isnan(values).any():
        return "NaN"
    later = next((TITLES[one[0]] for one in found if np.isnan(one[2]).any()), "")
    return "infinite" + (f", and then NaN in {later}" if later else "")
