"""The culprit: the innermost module of a parallel model whose output is not that of the unsharded one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tplab.checking.report import Row
from tplab.checking.verdict import Rounding, Verdict, axis_sets, judge
from tplab.layout import Layout, layout_of, take
from tplab.torch.checking.witness import as_numpy, floats_in, is_judge, pieces_of, shape_of, tell
from tplab.torch.ranks.rank import this_rank


@torch.no_grad()
def first_wrong_module(
    model: nn.Module, reference: nn.Module, local_inputs: Sequence[Any], inputs: Sequence[Any],
    named: Mapping[str, Any], rounding: Rounding,
) -> Row | None:  # fmt: skip
    """From the outside in: of the modules inside a wrong one, the first that is wrong, and so on. None where no module
    of the reference is called inside. Only the judge gets the row.

    A part of a sum, which a module's parent adds up rightly, is so never taken for a mistake.
    """
    wanted = _outputs_inside(reference, inputs, named) if is_judge() else {}
    with _RowSums() as sums:
        mine = _outputs_inside(model, local_inputs, named)
    names = [name for name in tell(list(wanted))[0] if name]
    shapes = tell({name: shape_of(mine.get(name)) for name in names})
    parent, row = "", None
    while True:
        inside = [name for name in names if name.startswith(f"{parent}." if parent else "") and name != parent]
        children = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
        found = next(
            (one for name in children if (one := _judged(name, mine, wanted, shapes, model, rounding)) is not None),
            None,
        )
        if found is None:
            break
        parent, row = found
    if row is None or not sums.found:
        return row
    words = (
        f"{row.words}; the rows of attention weights inside of the model add up to {sums.found}: softmax was taken of "
        "each rank's part of the scores, and the results added up; heads must be sharded whole"
    )
    return replace(row, words=words, mistake="softmax")


def _judged(
    name: str, mine: Mapping[str, Tensor], wanted: Mapping[str, Tensor], shapes: Sequence[Mapping[str, Any]],
    model: nn.Module, rounding: Rounding,
) -> tuple[str, Row | None] | None:  # fmt: skip
    """The name and, on the judge, its row, where a module's output is wrong."""
    mesh, sizes = this_rank().mesh, [told[name] for told in shapes]
    if any(size is None for size in sizes):
        return None
    pieces = pieces_of(mine[name], sizes)
    row = None
    if is_judge():
        whole = as_numpy(wanted[name])
        assert whole is not None
        layout = layout_of(whole, pieces, sizes, mesh, 100 * rounding.tolerance)
        if layout is not None:
            verdict = judge(pieces, whole, layout, mesh, rounding, what="output")
            if not verdict.ok:
                verdict = _of_bias(model.get_submodule(name), pieces, whole, layout, verdict)
                verdict = verdict._replace(words=f"the first that is wrong: {verdict.words}")
                row = Row.of("activation", name, whole.shape, layout, verdict)
    return (name, row) if tell(row is not None)[0] else None


def _of_bias(
    module: nn.Module, pieces: Sequence[np.ndarray | None], whole: np.ndarray, layout: Layout, verdict: Verdict
) -> Verdict:
    """Whether all that is wrong is a bias that is added more than once, or not at all."""
    bias = getattr(module, "bias", None)
    if layout.split_dims or not isinstance(bias, Tensor) or bias.shape != whole.shape[-1:]:
        return verdict
    values = as_numpy(bias)
    assert values is not None
    size, mesh = float(np.abs(whole).max(initial=0)), this_rank().mesh
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


def _outputs_inside(model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Tensor]:
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
        model(*inputs, **named)
    finally:
        for hook in hooks:
            hook.remove()
    return found
