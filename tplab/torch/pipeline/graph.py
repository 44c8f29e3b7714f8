"""One forward pass through some layers, and its graph: ready for B, or for I and then W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from tplab.torch.pipeline.split_backward import Gradients, Split, split
from tplab.torch.private import SAVED, storage_id, version_of
from tplab.torch.watching.memory import count_as, hold

Tensors = tuple[Tensor, ...]


class Graph:
    """The graph of `function(*inputs)`, without the data of its outputs.

    Gradients are passed and returned only for floating-point tensors, in order.
    """

    @classmethod
    def of(
        cls, function: Callable[..., Tensors], parameters: list[nn.Parameter], wants_grads: bool, inputs: Tensors
    ) -> tuple[Graph, Tensors]:
        """The graph, and the outputs. `wants_grads`: whether gradients of the inputs will be needed."""
        saved = Saved()
        with torch.enable_grad(), saved.hooks():
            entered = tuple(_enter(x) if wants_grads and has_gradient(x) else x.detach() for x in inputs)
            made = cls(saved, entered, parameters)
            outputs = function(*entered)
        with_gradient = [x for x in outputs if has_gradient(x)]
        made._roots = [(place, get_gradient_edge(x)) for place, x in enumerate(with_gradient) if x.requires_grad]
        return made, tuple(x.detach() for x in outputs)

    def __init__(self, saved: Saved, inputs: Tensors, parameters: list[nn.Parameter]):
        self._saved, self._parameters = saved, parameters
        self._split: Split | None = None
        self._roots: list[tuple[int, GradientEdge]] = []
        entered = [x for x in inputs if x.requires_grad]
        self._inputs = [get_gradient_edge(x) for x in entered]  # made now, because a layer may write to its input
        self._like = [(x.shape, x.dtype, x.device) for x in entered]  # for zero gradients

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
        """I: the gradients of the inputs. What W needs is kept: the inputs of the layers with weights, and the
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
        """All tensors that are kept."""
        yield from self._saved.tensors()
        if self._split is not None:
            yield from self._split.tensors()

    def _start(self, grads: Tensors) -> tuple[list[GradientEdge], list[Tensor]]:
        return [edge for _, edge in self._roots], [grads[place] for place, _ in self._roots]

    def _filled(self, found: Any) -> Tensors:
        """The gradients, with zeros for inputs that no output depends on."""
        grads = [*found] + [None] * (len(self._like) - len(found))
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads, self._like)
        )

    def _let_go(self) -> None:
        self._saved.clear()
        self._split, self._roots = None, []


def has_gradient(x: Tensor) -> bool:
    """Whether such a tensor can have a gradient: token ids and masks cannot."""
    return x.is_floating_point() or x.is_complex()


def add_gradients(total: Gradients, more: Gradients) -> None:
    """Add gradients to the existing ones, never in place: the tensors may be in use elsewhere."""
    for parameter, grad in more.items():
        total[parameter] = total[parameter] + grad if parameter in total else grad
    count_as("gradients", [total[parameter] for parameter in more])


class _Enter(torch.autograd.Function):
    """x, where a graph begins. The graph would keep a leaf to the end, even if nothing has saved it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


def _enter(x: Tensor) -> Tensor:
    return _Enter.apply(torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=True), x)  # type: ignore


# --- what is saved ----------------------------------------------------------------------------------------------------


_fields: dict[type, tuple[str, ...]] = {}


class Saved:
    """The tensors that the nodes of one graph have saved. The graph refers to them by numbers; they are kept here.

    Autograd frees what a node has saved once the node has run, or frees nothing (`retain_graph`). Between I and W only
    some is needed: `keep_only` frees the rest.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, int, object]] = {}  # with the version that each one had, and its token
        self._num_saved = 0
        self._read: set[int] | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Hooks under which the tensors that autograd saves are kept here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def tensors(self) -> list[Tensor]:
        return [x for x, *_ in self._tensors.values()]

    def keep_only(self, nodes: Iterable[Node]) -> None:
        """Free everything except what these nodes have saved."""
        self._read = set()
        for node in nodes:
            read_saved(node)
        self._tensors = {key: kept for key, kept in self._tensors.items() if key in self._read}
        self._read = None

    def clear(self) -> None:
        self._tensors.clear()

    def _pack(self, x: Tensor) -> int:
        key = self._num_saved
        self._num_saved = key + 1
        kept = x.detach()  # with its own output, the graph would keep itself alive
        self._tensors[key] = kept, version_of(x), hold(x)
        return key

    def _unpack(self, key: int) -> Tensor:
        if self._read is not None:
            self._read.add(key)
        x, version, _ = self._tensors[key]
        if version_of(x) != version:
            raise RuntimeError(
                f"a tensor {list(x.shape)} that the backward pass needs was written to since the forward pass: it is "
                f"at version {version_of(x)}, and was saved at version {version}; compute out of place"
            )
        return x


def read_saved(node: Node) -> None:
    """Read everything that a node has saved, which passes it through the hooks."""
    kind = type(node)
    fields = _fields.get(kind)
    if fields is None:
        names = tuple(name for name in dir(node) if name.startswith(SAVED))
        fields = _fields[kind] = names or (("saved_tensors",) if hasattr(node, "saved_tensors") else ())
    for name in fields:
        getattr(node, name)


def bytes_of(tensors: Iterable[Tensor], others: Iterable[Tensor] = ()) -> int:
    """The bytes of memory that these tensors occupy, each piece once, except the memory of `others`."""
    apart = {storage_id(x.untyped_storage()) for x in others}
    storages = {key: storage for x in tensors if (key := storage_id(storage := x.untyped_storage())) not in apart}
    return sum(storage.nbytes() for storage in storages.values())
