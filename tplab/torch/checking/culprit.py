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
        judged = ((name, _judged(name, wanted[name], told, comparison)) for name in children)
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


def _judged(name: str, whole: np.ndarray, told: Sequence[_Inside], comparison: Comparison) -> Row | None:
    """A row if a module's output is wrong."""
    pieces = [rank.outputs[name] for rank in told if name in rank.outputs]
    found = comparison.judge_output(whole, pieces) if len(pieces) == len(told) else None
    if found is None or found[1].ok:
        return None
    layout, verdict = found
    bias = told[0].biases.get(name)
    if bias is not None:
        verdict = of_bias(bias, pieces, whole, layout, verdict, comparison.mesh)
    verdict = verdict._replace(words=f"the first that is wrong: {verdict.words}")
    return Row.of("activation", name, whole.shape, layout, verdict)


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
