"""The culprit: the innermost module of a parallel model whose output is not that of the unsharded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tplab.checking.bias import of_bias
from tplab.checking.comparison import Comparison
from tplab.checking.report import Row
from tplab.checking.verdict import axis_sets
from tplab.torch.checking.side import Side, floats_in, to_numpy


def first_wrong_module(ours: Side, theirs: Side, comparison: Comparison) -> Row | None:
    """From the outside in: among the modules inside a wrong one, the first that is wrong, and so on. None where no
    module of the reference is called inside.

    So a partial sum that a module's parent adds up correctly is never taken for a mistake.
    """
    wanted = theirs.ask(_look_inside)[0].outputs
    told = ours.ask(_look_inside)
    names = [name for name in wanted if name]
    parent, row = "", None
    while True:
        inside = [name for name in names if name.startswith(f"{parent}." if parent else "") and name != parent]
        children = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
        judged = ((name, _judged(name, wanted, told, comparison, parent)) for name in children)
        found = next(((name, one) for name, one in judged if one is not None), None)
        if found is None:
            break
        parent, row = found
    return row


class _Inside(NamedTuple):
    """The first output and the bias of each module that is called."""

    outputs: dict[str, np.ndarray]
    biases: dict[str, np.ndarray]


@torch.no_grad()
def _look_inside(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> _Inside:
    outputs = _outputs_inside(model, inputs, kwargs)
    biases = {name: getattr(module, "bias", None) for name, module in model.named_modules()}
    known = {name: to_numpy(bias) for name, bias in biases.items() if isinstance(bias, Tensor)}
    return _Inside({name: to_numpy(x) for name, x in outputs.items()}, known)


def _judged(
    name: str, wanted: Mapping[str, np.ndarray], told: Sequence[_Inside], comparison: Comparison, parent: str
) -> Row | None:
    """A row if a module's output is wrong, and its parent does not add up the ranks' parts."""
    whole = wanted[name]
    pieces = [rank.outputs[name] for rank in told if name in rank.outputs]
    found = comparison.judge_output(whole, pieces) if len(pieces) == len(told) else None
    if found is None or found[1].ok:
        return None
    layout, verdict = found
    for owner, bias in told[0].biases.items():
        if owner == name or owner.startswith(f"{name}."):
            what = "its bias" if owner == name else f"{owner}.bias"
            blamed = of_bias(bias, pieces, whole, layout, verdict, comparison.mesh, what)
            if blamed is not verdict:
                verdict = blamed
                break
    if verdict.mistake != "bias" and parent in wanted and not layout.split_dims:
        around = [rank.outputs[parent] for rank in told if parent in rank.outputs]
        if len(around) == len(told) and _is_added_up(
            whole, pieces, wanted[parent], around, comparison, told[0].biases.get(name)
        ):
            return None
    verdict = verdict._replace(words=f"the first that is wrong: {verdict.words}")
    return Row.of("activation", name, whole.shape, layout, verdict)


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


def _outputs_inside(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The output of each module's first call, in the order in which they return."""
    found: dict[str, Tensor] = {}

    def note(name: str, output: Any) -> None:
        tensors = list(floats_in(output).values())
        if tensors:
            found.setdefault(name, tensors[0].detach())

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    try:
        model(*inputs, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found
