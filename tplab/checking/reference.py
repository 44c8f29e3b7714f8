"""The reference's run: whole tensors, and the error that rounding may cause in others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tplab.checking.gaps import gap, largest
from tplab.checking.places import whole_of
from tplab.checking.recording import Seen, Step
from tplab.checking.verdict import EPSILON, coarsest, slack_of_step

FLOOR = {"float64": 2.0**-48, "float32": 2.0**-19, "bfloat16": 2.0**-5, "float16": 2.0**-8}
"""Relative to the largest element of a tensor: smaller differences always count as rounding. It is 2^4 roundings of
float32 and 2^2 of bfloat16. Larger rounding errors are measured."""

TIMES = 8
"""Differences up to this many times the reference's own count as rounding. Its own are between two runs, one of which
adds up in another order from weights and samples that are off in their last digit."""


class Reference:
    """The reference's results of each step, as whole tensors by name.

    seen    the recording of its ranks
    again   the recording of a second run, which added up in another order, from weights that are off in their last
            digit; or None
    kinds   of the ranks: among them the dtypes that autocast computes in, or gradients are sent in
    dtype   the coarsest in which either side computes or sends; is_finer: the reference's own is finer
    """

    def __init__(self, seen: Sequence[Seen], again: Sequence[Seen] | None = None, kinds: Collection[str] = ()):
        self.seen, self.again = seen, again
        self.weights = _whole([one.weights for one in seen])
        self.order = list(dict.fromkeys([*seen[0].order, *reversed(self.weights)]))
        own = {kind for one in seen for kind in one.kinds} | {x.dtype for one in seen for x in one.weights.values()}
        own, every = (coarsest(names) for names in (own, own | set(kinds)))
        self.dtype, self.is_finer = every, own != every
        self.floor = FLOOR.get(self.dtype, FLOOR["float32"])
        self._wholes: dict[tuple[str, int], dict] = {}
        self._largest: dict[int, float] = {}
        self._doubt: dict[str, np.ndarray] = {}

    @property
    def num_steps(self) -> int:
        return min(one.num_steps for one in self.seen)

    def steps(self, number: int) -> list[Step]:
        return [one.steps[number] for one in self.seen]

    def gradients(self, number: int) -> dict[str, np.ndarray]:
        return self._whole_of("gradients", number)

    def finals(self, number: int) -> dict[str, np.ndarray]:
        """Return the gradients as the optimizer gets them."""
        return self.gradients(number) | self._whole_of("finals", number)

    def parameters(self, number: int) -> dict[str, np.ndarray]:
        """Return the parameters after a step; before the first one for -1."""
        return self.weights if number < 0 else self._whole_of("parameters", number)

    @property
    def start(self) -> dict[tuple[str, str], np.ndarray]:
        """The optimizer's states at the start of a run that goes on."""
        return _whole([one.states or {} for one in self.seen])

    def states(self, number: int) -> dict[tuple[str, str], np.ndarray]:
        return self._whole_of("states", number)

    def _whole_of(self, kind: str, number: int) -> dict:
        if (kind, number) not in self._wholes:
            self._wholes[kind, number] = _whole([getattr(step, kind) for step in self.steps(number)])
        return self._wholes[kind, number]

    def loss(self, number: int) -> float:
        losses = [sum(value for value, _ in step.losses) for step in self.steps(number) if step.losses]
        return sum(losses) / len(losses) if losses else 0.0

    @property
    def epsilon(self) -> float:
        return EPSILON.get(self.dtype, EPSILON["float32"])

    def slack_of_norm(self, number: int, turn: int = -1) -> float:
        """Return how far a norm of gradients may be off."""
        norms, again = (
            [step.norms[turn][0] for step in steps if step.norms]
            for steps in (self.steps(number), self._steps_again(number))
        )
        return max(8 * self.floor * abs(norms[0]), TIMES * gap(again[:1] or norms[:1], norms[:1])) if norms else 0.0

    def slack_of_loss(self, number: int) -> float:
        """Return how far a loss may be off."""
        want = self.loss(number)
        again = [sum(value for value, _ in step.losses) for step in self._steps_again(number) if step.losses]
        moved = abs(sum(again) / len(again) - want) if again else 0.0
        return max((8 if self.epsilon < 1e-4 else 2) * self.epsilon * abs(want), TIMES * moved)

    def slack_of_gradient(self, name: str, number: int) -> float:
        """Return how far any element of a gradient may be off. A gradient that is the difference of numbers as large as
        other gradients may consist of their rounding alone."""
        whole = self.gradients(number)
        if number not in self._largest:
            self._largest[number] = max((largest(x) for x in whole.values()), default=0.0)
        size = largest(whole[name])
        moved = TIMES * self.moved("gradients", name, number)
        moved *= TIMES if moved > size else 1  # it is 0 up to rounding
        of_others = 2 * self.epsilon if self.epsilon < 1e-4 or not self.again else self.epsilon / 4
        return max(self.floor * size, moved, of_others * self._largest[number])

    def noise_of_gradients(self, number: int) -> float:
        """Return the largest relative change of a gradient in the second run, apart from gradients that are tiny."""
        sizes = {name: largest(x) for name, x in self.gradients(number).items()}
        least = 1e-3 * max(sizes.values(), default=0.0)
        shares = [self.moved("gradients", name, number) / size for name, size in sizes.items() if size > least]
        return max(shares, default=0.0)

    def slack_of_parameter(self, name: str, number: int) -> np.ndarray:
        """Return how far each element may be off after a step: see `slack_of_step`."""
        key, after = f"{number} {name}", self.parameters(number)[name]
        if key in self._doubt:
            return self._doubt[key]
        before, gradient = {**self.weights, **self.parameters(number - 1)}[name], self.gradients(number).get(name)
        step = largest(after.astype(np.float64) - before)
        slack = 0.0 if gradient is None else self.slack_of_gradient(name, number)
        of_gradient = slack_of_step(before, after.astype(np.float64), gradient, slack)
        is_new = not number or name not in self.parameters(number - 1)
        earlier = np.zeros(after.shape) if is_new else self.slack_of_parameter(name, number - 1)
        moved = self.moved("parameters", name, number)
        size = largest(after)
        base = max(2 * self.epsilon * size, self.floor * step, TIMES * moved)
        found = self._doubt[key] = earlier + of_gradient + base
        return found

    def _steps_again(self, number: int) -> list[Step]:
        return [one.steps[number] for one in self.again or () if number < len(one.steps)]

    def moved(self, kind: str, name: Any, number: int) -> float:
        """Return how far a tensor of the reference is off in the second run."""
        pieces = [getattr(step, kind).get(name) for step in self._steps_again(number)]
        other, whole = whole_of(pieces), self._whole_of(kind, number).get(name)
        return 0.0 if other is None or whole is None or other.shape != whole.shape else gap(other, whole)


def _whole(pieces: Sequence[Mapping]) -> dict:
    """Return, by name, one tensor made of the pieces of all ranks."""
    names = dict.fromkeys(name for rank in pieces for name in rank)
    found = {name: whole_of([rank.get(name) for rank in pieces]) for name in names}
    return {name: x for name, x in found.items() if x is not None}
