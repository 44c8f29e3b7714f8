"""The culprit: the innermost module of a parallel model whose output is not that of the unsharded one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tplab.checking.comparison import Comparison
from tplab.checking.report import Row
from tplab.checking.verdict import Verdict, axis_sets
from tplab.layout import Layout, take
from tplab.mesh import Mesh
from tplab.torch.checking.side import Side, floats_in, to_numpy


def first_wrong_module(ours: Side, theirs: Side, comparison: Comparison) -> Row | None:
    """From the outside in: of the modules inside a wrong one, the first that is wrong, and so on. None where no module
    of the reference is called inside.

    A part of a sum, which a module's parent adds up rightly, is so never taken for a mistake.
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
    row_sum = next((rank.row_sum for rank in told if rank.row_sum), 0)
    if row is None or not row_sum:
        return row
    words = (
        f"{row.words}; the rows of attention weights inside of the model add up to {row_sum}: softmax was taken of "
        "each rank's part of the scores, and the results added up; heads must be sharded whole"
    )
    return replace(row, words=words, mistake="softmax")


class _Inside(NamedTuple):
    """Of each module that is called: its first output, and its bias. What rows of weights add up to, if not to 1."""

    outputs: dict[str, np.ndarray]
    biases: dict[str, np.ndarray]
    row_sum: int


@torch.no_grad()
def _look_inside(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> _Inside:
    with _RowSums() as sums:
        outputs = _outputs_inside(model, inputs, kwargs)
    biases = {name: getattr(module, "bias", None) for name, module in model.named_modules()}
    known = {name: to_numpy(bias) for name, bias in biases.items() if isinstance(bias, Tensor)}
    return _Inside({name: to_numpy(x) for name, x in outputs.items()}, known, sums.found)


def _judged(name: str, whole: np.ndarray, told: Sequence[_Inside], comparison: Comparison) -> Row | None:
    """A row where a module's output is wrong."""
    pieces = [rank.outputs.get(name) for rank in told]
    found = None if any(piece is None for piece in pieces) else comparison.judge_output(whole, pieces)
    if found is None or found[1].ok:
        return None
    layout, verdict = found
    verdict = _of_bias(told[0].biases.get(name), pieces, whole, layout, verdict, comparison.mesh)
    verdict = verdict._replace(words=f"the first that is wrong: {verdict.words}")
    return Row.of("activation", name, whole.shape, layout, verdict)


def _of_bias(
    values: np.ndarray | None, pieces: Sequence[np.ndarray | None], whole: np.ndarray, layout: Layout,
    verdict: Verdict, mesh: Mesh,
) -> Verdict:  # fmt: skip
    """Whether all that is wrong is a bias that is added more than once, or not at all."""
    if layout.split_dims or values is None or values.shape != whole.shape[-1:]:
        return verdict
    size = float(np.abs(whole).max(initial=0))
    excess = [np.asarray(piece) - take(whole, layout, mesh, rank) for rank, piece in enumerate(pieces)]
    times = [float((e * values).sum() / max((np.broadcast_to(values, e.shape) ** 2).sum(), 1e-300)) for e in excess]
    slack = 10 * verdict.tolerance * size
    for names in axis_sets(mesh):
        parts = [np.asarray(piece) - values for piece in pieces]
        sums = [sum(parts[other] for other in mesh.group(rank, names)) + values for rank in mesh.ranks]
        if all(
            np.abs(total - take(whole, layout, mesh, rank)).max(initial=0) <= slack for rank, total in enumerate(sums)
        ):
            label = " and ".join(map(repr, names))
            words = f"each rank's part, and its bias: an all_reduce over {label} is missing before it"
            return verdict._replace(words=words, mistake="partial")
    if any(np.abs(e - t * values).max(initial=0) > slack for e, t in zip(excess, times)):
        return verdict
    count = times[0] + 1
    words = f"its bias is added {count:.5g} times"
    if abs(count) < 1e-3:
        words = "its bias is not added"
    elif abs(count - round(count)) < 1e-3:
        words += ", before the sum over the ranks: it belongs behind it, once"
    return verdict._replace(words=words, mistake="bias")


class _RowSums(TorchFunctionMode):
    """Notes whether weights, as a softmax gives them, are multiplied by whose rows add up to 2, 3, .. in place of 1."""

    PRODUCTS = {torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for x in args if func in self.PRODUCTS and not self.found else ():
            if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.numel() and bool((x >= 0).all()):
                sums = x.sum(-1)
                count = round(float(sums.flatten()[0]))
                if count > 1 and bool(((sums - count).abs() < 1e-3 * count).all()) and x.shape[-1] > 1:
                    self.found = count
        return func(*args, **(kwargs or {}))


def _outputs_inside(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The output of each module that is called, the first time that it is, in the order in which they return."""
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
