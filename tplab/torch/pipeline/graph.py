"""One forward pass through some layers, with its graph: ready for B, or for I and then W."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tplab.torch.pipeline.saved import Saved
from tplab.torch.pipeline.split_backward import Gradients, Split, split

Tensors = tuple[Tensor, ...]


class Graph:
    """The graph of `function(*inputs)`, without the data of its outputs.

    Gradients are passed and returned for the floating-point tensors only, in their order.
    """

    @classmethod
    def of(
        cls, function: Callable[..., Tensors], parameters: list[nn.Parameter], wants_grads: bool, inputs: Tensors
    ) -> tuple[Graph, Tensors]:
        """The graph, and the outputs. `wants_grads`: whether the inputs' gradients will be asked for."""
        saved = Saved()
        with torch.enable_grad(), saved.hooks():
            entered = tuple(_enter(x) if wants_grads and has_gradient(x) else x.detach() for x in inputs)
            made = cls(saved, entered, parameters)
            outputs = function(*entered)
        made._end(outputs)
        return made, tuple(x.detach() for x in outputs)

    def __init__(self, saved: Saved, inputs: Tensors, parameters: list[nn.Parameter]):
        self._saved, self._parameters = saved, parameters
        self._split: Split | None = None
        self._roots: list[tuple[int, GradientEdge]] = []
        entered = [x for x in inputs if x.requires_grad]
        self._inputs = [get_gradient_edge(x) for x in entered]  # now: a layer may write to its input
        self._like = [(x.shape, x.dtype, x.device) for x in entered]  # for a gradient that is zero

    def _end(self, outputs: Tensors) -> None:
        with_gradient = [x for x in outputs if has_gradient(x)]
        self._roots = [(place, get_gradient_edge(x)) for place, x in enumerate(with_gradient) if x.requires_grad]

    def backward(self, grads: Tensors) -> tuple[Tensors, Gradients]:
        """B: the gradients of inputs and parameters, in one pass."""
        edges, given = self._start(grads)
        wanted: list[Any] = [*self._inputs, *self._parameters]
        found = torch.autograd.grad(edges, wanted, given, allow_unused=True) if edges and wanted else ()
        self._let_go()
        after = len(self._inputs)
        gradients = {p: g for p, g in zip(self._parameters, found[after:]) if g is not None}
        return self._filled(found[:after]), gradients

    def input_grads(self, grads: Tensors) -> Tensors:
        """I: the gradients of the inputs. It keeps what W needs: the inputs of the layers with weights, and the
        gradients that arrive at their outputs."""
        edges, given = self._start(grads)
        self._split = split(edges, self._inputs, self._parameters)
        found = self._split.input_grads(edges, given, self._inputs) if edges else ()
        self._saved.keep_only(self._split.nodes_for_weights())
        self._roots = []
        return self._filled(found)

    def weight_grads(self) -> Gradients:
        """W: the gradients of the parameters."""
        assert self._split is not None
        gradients = self._split.weight_grads()
        self._let_go()
        return gradients

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is kept."""
        yield from self._saved.tensors()
        if self._split is not None:
            yield from self._split.tensors()

    def _start(self, grads: Tensors) -> tuple[list[GradientEdge], list[Tensor]]:
        return [edge for _, edge in self._roots], [grads[place] for place, _ in self._roots]

    def _filled(self, found: Any) -> Tensors:
        """The gradients, with zeros for inputs that nothing depends on."""
        grads = [*found] + [None] * (len(self._like) - len(found))
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads, self._like)
        )

    def _let_go(self) -> None:
        self._saved.clear()
        self._split, self._roots = None, []


def has_gradient(x: Tensor) -> bool:
    """Whether a gradient can flow through such a tensor: token numbers and masks have none."""
    return x.is_floating_point() or x.is_complex()


def add_gradients(total: Gradients, more: Gradients) -> None:
    """Add gradients to the existing ones, never in place: something else may hold the tensors."""
    for parameter, grad in more.items():
        total[parameter] = total[parameter] + grad if parameter in total else grad


class _Enter(torch.autograd.Function):
    """x, where a graph begins. A graph would keep a leaf to the end, even where nothing has saved it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


def _enter(x: Tensor) -> Tensor:
    return _Enter.apply(torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True), x)  # type: ignore
