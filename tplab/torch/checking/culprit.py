"""The culprit: the innermost module of a parallel model whose output is not that of the unsharded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tplab.checking.addend import of_addends
from tplab.checking.comparison import Comparison
from tplab.checking.report import Row
from tplab.checking.tried import Reduction, trials, words_of
from tplab.checking.verdict import axis_sets
from tplab.torch.checking.reductions import Reductions
from tplab.torch.checking.side import Side, floats_in, to_numpy


class Culprit(NamedTuple):
    """The first wrong module's row, if it is a module of the reference's, and what is at fault inside of it."""

    row: Row | None
    words: str


def first_wrong_module(ours: Side, theirs: Side, comparison: Comparison) -> Culprit:
    """From the outside in: among the modules inside a wrong one, the first that is wrong, and so on. No row where no
    module of the reference is called inside.

    So a partial sum that a module's parent adds up correctly is never taken for a mistake. If another result of an
    all_reduce inside makes the module's output right, the words name it and its line. A module that gets something
    wrong is not to blame: its row says so, and what was computed last before it.
    """
    (reference,) = theirs.ask(_look_inside)
    wanted, told = reference.outputs, ours.ask(_look_inside)
    names = [name for name in wanted if name]
    parent, row = "", None
    while True:
        inside = [name for name in names if name.startswith(f"{parent}." if parent else "") and name != parent]
        children = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
        judged = ((name, _judged(name, reference, told, comparison, parent)) for name in children)
        found = next(((name, one) for name, one in judged if one is not None), None)
        if found is None:
            break
        if (given := _given(found[0], reference, told, comparison)) is not None:
            row = given
            break
        parent, row = found
    return Culprit(row, _at_fault(parent, wanted, told, ours, comparison))


def _at_fault(
    name: str, wanted: Mapping[str, np.ndarray], told: Sequence[_Inside], ours: Side, comparison: Comparison
) -> str:
    """What to say about the all_reduces that a module calls, if one of them is why its output is wrong."""
    makes_right: dict[Reduction, str] = {}
    for one, how in trials(told[0].reductions.get(name, ())) if name in wanted else ():
        again = ours.ask(partial(_look_inside, change=(one, how)))
        pieces = [rank.outputs[name] for rank in again if name in rank.outputs]
        found = comparison.judge_output(wanted[name], pieces) if len(pieces) == len(told) else None
        if found is not None and found[1].ok:
            makes_right[one] = how
    return words_of(makes_right)


class _Inside(NamedTuple):
    """Of each module that is called: its first output, its first input, its bias, and the all_reduces it calls."""

    outputs: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    biases: dict[str, np.ndarray]
    reductions: dict[str, list[Reduction]]


@torch.no_grad()
def _look_inside(
    model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], change: tuple[Reduction, str] | None = None
) -> _Inside:
    outputs, taken, reductions = _tensors_inside(model, inputs, kwargs, change)
    biases = {name: getattr(module, "bias", None) for name, module in model.named_modules()}
    known = {name: to_numpy(bias) for name, bias in biases.items() if isinstance(bias, Tensor)}
    made, given = ({name: to_numpy(x) for name, x in found.items()} for found in (outputs, taken))
    return _Inside(made, given, known, reductions)


def _addends(name: str, reference: _Inside, told: Sequence[_Inside]) -> dict[str, np.ndarray]:
    """What a module may add to a sum: a bias that it holds, its input, or the input of a module inside."""
    found = {}
    for owner, bias in told[0].biases.items():
        if owner == name or owner.startswith(f"{name}."):
            found["its bias" if owner == name else f"{owner}.bias"] = bias
    for owner, x in reference.inputs.items():
        if owner == name or owner.startswith(f"{name}."):
            found["its input" if owner == name else f"the input of {owner}"] = x
    return found


def _judged(name: str, reference: _Inside, told: Sequence[_Inside], comparison: Comparison, parent: str) -> Row | None:
    """A row if a module's output is wrong, and its parent does not add up the ranks' parts."""
    wanted, whole = reference.outputs, reference.outputs[name]
    pieces = [rank.outputs[name] for rank in told if name in rank.outputs]
    found = comparison.judge_output(whole, pieces) if len(pieces) == len(told) else None
    if found is None or found[1].ok:
        return None
    layout, verdict = found
    verdict = of_addends(_addends(name, reference, told), pieces, whole, layout, verdict, comparison.mesh)
    if verdict.mistake != "bias" and parent in wanted and not layout.split_dims:
        around = [rank.outputs[parent] for rank in told if parent in rank.outputs]
        if len(around) == len(told) and _is_added_up(
            whole, pieces, wanted[parent], around, comparison, told[0].biases.get(name)
        ):
            return None
    verdict = verdict._replace(words=f"the first that is wrong: {verdict.words}")
    return Row.of("activation", name, whole.shape, layout, verdict)


def _given(name: str, reference: _Inside, told: Sequence[_Inside], comparison: Comparison) -> Row | None:
    """A row if what a module gets is wrong: then something is at fault that no module computes."""
    whole, pieces = reference.inputs.get(name), [rank.inputs[name] for rank in told if name in rank.inputs]
    found = comparison.judge_output(whole, pieces) if whole is not None and len(pieces) == len(told) else None
    if whole is None or found is None or found[1].ok or found[1].mistake == "shape":
        return None
    layout, verdict = found
    if told[0].reductions.get(name) and verdict.mistake in ("partial", "disagree"):  # it adds up parts itself
        return None
    before = [other for other in told[0].outputs if not other.startswith(f"{name}.")]
    before = before[: before.index(name)] if name in before else []
    addends: dict[str, np.ndarray] = {}
    for other, x in reference.outputs.items():
        if other not in told[0].outputs:  # what a function computes here
            bias = reference.biases.get(other)
            addends |= {} if bias is None else {f"{other}.bias": bias, f"{other}'s output without its bias": x - bias}
            addends[f"{other}'s output"] = x
    addends |= {f"the input of {other}": reference.inputs[other] for other in before[-3:] if other in reference.inputs}
    verdict = of_addends(addends, pieces, whole, layout, verdict, comparison.mesh)
    said = verdict.words.partition(", because")[0] if "'s output" in verdict.words else verdict.words
    where = f"; look at what is between {before[-1] if before else 'the input'} and {name}"
    words = f"the first that is wrong, since its input is: {said}{where}"
    return Row.of("activation", name, whole.shape, layout, verdict._replace(words=words))


def _is_added_up(
    whole: np.ndarray,
    pieces: Sequence[np.ndarray],
    whole_around: np.ndarray,
    around: Sequence[np.ndarray],
    comparison: Comparison,
    bias: np.ndarray | None,
) -> bool:
    """Whether the parent adds up what the ranks' modules return, before or after a bias: these are parts of a sum that
    is as wrong as what comes out of the parent, so that nothing is wrong with them but what they got."""
    if any(x.shape != whole_around.shape for x in around) or any(x.shape != whole.shape for x in pieces):
        return False
    size, size_around = (max(float(np.abs(x).max(initial=0)), 1e-300) for x in (whole, whole_around))
    slack = 10 * comparison.rounding.tolerance
    if max(np.abs(x - around[0]).max(initial=0) for x in around) > slack * size_around:
        return False  # the sum is missing
    if max(float(np.abs(x - pieces[0]).max(initial=0)) for x in pieces) <= slack * size:
        return False  # these are copies, and no parts
    error = max(float(np.abs(x - whole_around).max(initial=0)) for x in around) / size_around
    for names in axis_sets(comparison.mesh):
        sums = [sum(pieces[other] for other in group) for group in comparison.mesh.groups(names)]
        for more in (0.0, bias):
            if more is None or np.shape(more) not in ((), whole.shape[-1:]):
                continue
            if max(float(np.abs(total + more - whole).max(initial=0)) for total in sums) / size <= 3 * error + slack:
                return True
    return False


def _tensors_inside(
    model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], change: tuple[Reduction, str] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, list[Reduction]]]:
    """The output and the input of each module's first call, in the order in which they return, and the all_reduces of
    all its calls."""
    outputs: dict[str, Tensor] = {}
    taken: dict[str, Tensor] = {}
    reductions: dict[str, list[Reduction]] = {}
    began: dict[str, int] = {}

    def before(name: str, args: tuple[Any, ...]) -> None:
        began[name] = len(watch.found)
        for x in list(floats_in(args).values())[:1]:
            taken.setdefault(name, x.detach().clone())

    def after(name: str, output: Any) -> None:
        reductions.setdefault(name, []).extend(watch.found[began[name] :])
        for x in list(floats_in(output).values())[:1]:
            outputs.setdefault(name, x.detach())

    hooks = [
        hook
        for name, module in model.named_modules()
        for hook in (
            module.register_forward_pre_hook(lambda module, args, name=name: before(name, args)),
            module.register_forward_hook(lambda module, args, output, name=name: after(name, output)),
        )
    ]
    try:
        with Reductions(change) as watch:
            model(*inputs, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, taken, reductions
