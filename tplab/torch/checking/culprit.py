"""The culprit: the innermost module of a parallel model whose output is not that of the unsharded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tplab.checking.comparison import Addend, Comparison
from tplab.checking.gaps import largest
from tplab.checking.observed import agree
from tplab.checking.proofs import Reduction
from tplab.checking.report import Row
from tplab.checking.verdict import NEITHER, Verdict
from tplab.layout import Layout
from tplab.torch.checking.side import floats_in, to_numpy
from tplab.torch.checking.trying import Tried


class Inside(NamedTuple):
    """For each module that is called: its first output, its first input, its bias, and the all_reduces it calls; the
    inputs of softmaxes, and the sum of rows of attention weights, if it is not 1. "" is the whole model."""

    outputs: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    biases: dict[str, np.ndarray]
    reductions: dict[str, list[Reduction]]
    scores: list[np.ndarray]
    row_sum: int


class Culprit(NamedTuple):
    """The module to blame, and its row if the reference has it, too. addend: what explains everything that is wrong
    with it; is_given: its input is wrong, and is computed in `inside`."""

    name: str
    row: Row | None = None
    addend: Addend | None = None
    is_given: bool = False
    inside: str = ""


@torch.no_grad()
def look_inside(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], tried: Tried) -> Inside:
    """Run the model, as a question of `Side.ask`."""
    outputs: dict[str, np.ndarray] = {}
    taken: dict[str, np.ndarray] = {}
    reductions: dict[str, list[Reduction]] = {}
    began: dict[str, int] = {}

    def before(name: str, args: tuple[Any, ...]) -> None:
        began[name] = len(tried.found)
        for x in list(floats_in(args).values())[:1]:
            taken.setdefault(name, to_numpy(x))

    def after(name: str, output: Any) -> None:
        reductions.setdefault(name, []).extend(tried.found[began[name] :])
        for x in list(floats_in(output).values())[:1]:
            outputs.setdefault(name, to_numpy(x))

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: before(name, args))
        module.register_forward_hook(lambda module, args, output, name=name: after(name, output))
    with tried.softmaxes as softmaxes:
        model(*inputs, **kwargs)
    biases = {name: getattr(module, "bias", None) for name, module in model.named_modules()}
    known = {name: to_numpy(bias) for name, bias in biases.items() if isinstance(bias, Tensor)}
    scores = [to_numpy(x) for x in softmaxes.scores]
    return Inside(outputs, taken, known, reductions, scores, softmaxes.row_sum)


class Search:
    """Looks for the culprit from the outside in: among the modules inside a wrong one, the first that is wrong.

    again   the reference with other rounding
    """

    def __init__(self, reference: Inside, told: Sequence[Inside], again: Sequence[Inside], comparison: Comparison):
        self._reference, self._told, self._comparison = reference, told, comparison
        self._again = again

    def culprit(self) -> Culprit:
        found = Culprit("")
        while True:
            start = f"{found.name}." if found.name else ""
            inside = [
                name for name in self._reference.outputs if name.startswith(start) and name not in ("", found.name)
            ]
            children = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
            wrong = next((one for name in children if (one := self._wrong(name, found.name))), None)
            if wrong is None:
                return found
            found = wrong
            if found.is_given:
                return found

    def judged(self, told: Sequence[Inside], kind: str, name: str) -> tuple[Layout, Verdict] | None:
        """Return the layout and the verdict of a module's "outputs" or "inputs"; None if they cannot be compared."""
        whole = getattr(self._reference, kind).get(name)
        pieces = [getattr(rank, kind)[name] for rank in told if name in getattr(rank, kind)]
        if whole is None or len(pieces) < len(told):
            return None
        again = [getattr(one, kind).get(name) for one in self._again]
        moved = [largest(one - whole) for one in again if one is not None and one.shape == whole.shape]
        return self._comparison.judge_output(whole, pieces, max(moved) if moved else None)

    def _wrong(self, name: str, parent: str) -> Culprit | None:
        """Return the culprit if a module's output is wrong; None if it is right, or parts that its parent adds up."""
        found = self.judged(self._told, "outputs", name)
        if found is None or found[1].ok:
            return None
        given = self.judged(self._told, "inputs", name)
        mistake = "" if given is None or given[1].ok else given[1].mistake
        adds_up = self._told[0].reductions.get(name) and mistake in ("partial", "disagree")  # its input is in parts
        if given is not None and mistake not in ("", "shape") and not adds_up:
            return self._given(name, parent, *given)
        layout, verdict = found
        whole, pieces = self._reference.outputs[name], [rank.outputs[name] for rank in self._told]
        biases, inputs = ([(o, x) for o, x in of.items() if f"{o}.".startswith(f"{name}.")]
                          for of in (self._told[0].biases, self._reference.inputs))  # fmt: skip
        added = {"its bias" if o == name else f"{o}.bias": x for o, x in biases}
        added |= {"its input" if o == name else f"the input of {o}": x for o, x in inputs}
        addend = self._comparison.addend_of(whole, pieces, added)
        verdict = addend.verdict if addend else verdict
        if verdict.mistake == "partial" and verdict.axes and self._is_copied(parent, verdict.axes):
            return None
        words = verdict._replace(words=f"the first that is wrong: {verdict.words}")
        return Culprit(name, Row.of("activation", name, whole.shape, layout, words), addend, inside=name)

    def _is_copied(self, name: str, axes: tuple[str, ...]) -> bool:
        """Return whether the output of a module is the same on the ranks of `axes`."""
        pieces = [rank.outputs[name] for rank in self._told if name in rank.outputs]
        slack = 100 * self._comparison.rounding.tolerance * max(map(largest, pieces), default=0.0)
        return len(pieces) == len(self._told) and agree(pieces, self._comparison.mesh.groups(axes), slack)

    def _given(self, name: str, parent: str, layout: Layout, verdict: Verdict) -> Culprit:
        """Return the culprit for a module with a wrong input, which is computed between modules."""
        reference, ours = self._reference, self._told[0]
        whole, pieces = reference.inputs[name], [rank.inputs[name] for rank in self._told]
        before = [other for other in ours.outputs if not other.startswith(f"{name}.")]
        before = before[: before.index(name)] if name in before else []
        addends = {f"{other}.bias": x for other, x in reference.biases.items() if other not in ours.outputs}
        addends |= {f"the input of {one}": reference.inputs[one] for one in before[-3:] if one in reference.inputs}
        addend = self._comparison.addend_of(whole, pieces, addends)
        said = addend.verdict if addend else verdict
        where = f"; look at what is between {before[-1] if before else 'the input'} and {name}"
        words = f"the first that is wrong, since its input is: {said.words.removesuffix(f'; {NEITHER}')}{where}"
        row = Row.of("activation", name, whole.shape, layout, said._replace(words=words))
        return Culprit(name, row, addend, True, parent)
