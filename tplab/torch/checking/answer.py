"""What the unsharded reference answers, on the rank that judges, and what rounding may change of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from tplab.checking.verdict import Rounding
from tplab.errors import SpecError
from tplab.layout import Layout, take
from tplab.sharding import P
from tplab.torch.checking.witness import floats_in
from tplab.torch.ranks.rank import this_rank

Loss = Callable[[Any], Tensor]
InSpecs = Sequence[P | None] | P | None


class Answer:
    """What the reference computes, on the judge alone: outputs at once, loss and gradients when it is finished."""

    def __init__(self, reference: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]):
        self.reference, self.inputs = reference, [leaf(x) for x in inputs]
        self.output = reference(*self.inputs, **named)
        self.outputs = floats_in(self.output)
        self.loss: Tensor | None = None
        self.gradients: dict[str, Tensor | None] = {}
        self.order: list[str] = []  # of parameters, as their gradients arrive

    def finish(self, loss: Loss | None) -> None:
        """The backward pass of the loss: of the given one, the output's own, or a weighted sum of the outputs."""
        loss = loss or own_loss(self.output)
        if loss is not None:
            value = self.loss = loss(self.output)
        else:
            value = total(y * weights_for(name, y.shape).to(y) for name, y in self.outputs.items())
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.order.append(name))
            for name, parameter in self.reference.named_parameters()
            if parameter.requires_grad
        ]
        value.backward()
        for hook in hooks:
            hook.remove()
        self.gradients = {n: p.grad for n, p in self.reference.named_parameters(remove_duplicate=False)}


def exactly(reference: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> Answer | None:
    """The reference's answer in float64, where it can be computed so."""

    def wide(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    try:
        return Answer(
            copy.deepcopy(reference).double(), [wide(x) for x in inputs], {n: wide(x) for n, x in named.items()}
        )
    except RuntimeError:  # it computes with tensors of a type of its own, which do not go with float64
        return None


def rounding_of(reference: nn.Module, inputs: Sequence[Any]) -> Rounding:
    """From what dtypes and sizes say: the longest sum is over features, words or tokens."""
    parameters = list(reference.parameters())
    tokens = [
        x.numel() // (x.shape[-1] if x.is_floating_point() else 1) for x in inputs if isinstance(x, Tensor) and x.dim()
    ]
    dtypes = [dtype_of(p) for p in parameters if p.is_floating_point()]
    coarsest = max(dtypes or ["float32"], key=["float64", "float32", "float16", "bfloat16"].index)
    return Rounding(
        coarsest, max([size for p in parameters for size in p.shape] + tokens, default=1),
        max(1, sum(p.dim() > 1 for p in parameters)),
    )  # fmt: skip


def own_loss(output: Any) -> Loss | None:
    """The loss that an output brings along, or is."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return lambda output: output.loss
    return (lambda output: output) if isinstance(output, Tensor) and output.dim() == 0 else None


def total(products: Iterable[Tensor]) -> Tensor:
    """The sum of all elements of some tensors."""
    return torch.stack([x.sum() for x in products]).sum()


def weights_for(name: str, shape: Sequence[int]) -> Tensor:
    """Numbers to weight an output with, the same on every rank."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def local_inputs(inputs: Sequence[Any], in_specs: InSpecs) -> list[Any]:
    """This rank's piece of each input."""
    if in_specs is not None and len(in_specs) != len(inputs):
        raise SpecError(f"in_specs has {len(in_specs)} entries, and there are {len(inputs)} inputs; give one for each")
    rank = this_rank()
    return [
        x if not spec else take(x, Layout(spec), rank.mesh, rank.rank)
        for x, spec in zip(inputs, in_specs or [None] * len(inputs))
    ]


def leaf(x: Any) -> Any:
    """A copy of an input whose gradient can be asked for; what is no floating-point tensor stays what it is."""
    return x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def dtype_of(x: Tensor) -> str:
    """float32"""
    return str(x.dtype).removeprefix("torch.")
