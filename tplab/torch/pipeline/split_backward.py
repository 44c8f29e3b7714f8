"""A backward pass in two parts: I, the gradient of the input, and W, those of the weights, which can wait.

The gradient flows down a chain of nodes from the output to the input. Weights join the chain from the side:

    output <- addmm <- gelu <- layer_norm <- addmm <- input        the chain, run by I
                |                 |            |
                W2              gamma         W1                   the side branches, run by W

I runs the chain alone, and keeps the gradient that each node with a side branch receives. W passes that gradient to the
node again and asks only for the branch: for an addmm, dW = dy^T x. Nothing is computed twice: I and W together have the
FLOPs of B. Qi et al. 2024 split linear layers this way; torch.distributed.pipelining does it on graphs.

Hooks run once, as in B: hooks of tensors on the chain run in I. W calls the nodes of the chain directly, without their
hooks, because the kept gradients have already passed through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from tplab.torch.private import metadata_of

Gradients = dict[nn.Parameter, Tensor]
Place = tuple[Node, int]
"""Where a gradient arrives: a node of the graph, and the number of the output that the gradient belongs to."""


@dataclass
class Split:
    """The graph of one forward pass, cut into chain and side branches.

    branches   node of the chain -> where its side branches begin
    arrives    node of the chain with branches -> which of its outputs have a gradient
    early      the nodes of parameters whose gradients I computes. A branch to such a parameter begins at several nodes
               of the chain, so that asking one of them for it would run the chain again; or at a Python function or a
               node with hooks of its own, which run once and see all or nothing
    late       the nodes of parameters whose gradients W computes
    side       all nodes of the branches that W runs
    """

    branches: dict[Node, list[Place]] = field(default_factory=dict)
    arrives: dict[Node, list[int]] = field(default_factory=dict)
    early: dict[Node, nn.Parameter] = field(default_factory=dict)
    late: dict[Node, nn.Parameter] = field(default_factory=dict)
    side: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._kept: dict[Node, list[Tensor | None]] = {}
        self._gradients: Gradients = {}

    # --- the two passes ------------------------------------------------------------------------------------------

    def input_grads(
        self, roots: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[GradientEdge]
    ) -> list[Tensor | None]:
        """I: run the chain from `roots`, which have these gradients. Returns the gradient of each input."""
        places = [(node, number) for node, numbers in self.arrives.items() for number in numbers]
        early = list(self.early.values())
        wanted = [*inputs, *(GradientEdge(*place) for place in places), *early]
        if not wanted:
            return []
        # The prehooks see gradients after the hooks of tensors. A node that does not run in I has no such record, but
        # what arrives there has also passed through the hooks.
        ran: dict[Node, list[Tensor | None]] = {}
        handles = [node.register_prehook(partial(_keep, ran, node)) for node in self.branches]
        found = torch.autograd.grad(roots, wanted, grads, retain_graph=True, allow_unused=True)
        for handle in handles:
            handle.remove()
        first, after = len(inputs), len(inputs) + len(places)
        for (node, number), grad in zip(places, found[first:after]):
            if grad is not None and node not in ran:
                self._kept.setdefault(node, [None] * len(metadata_of(node)))[number] = grad
        self._kept |= ran
        self._gradients = {p: grad for p, grad in zip(early, found[after:]) if grad is not None}
        return list(found[:first])

    def weight_grads(self) -> Gradients:
        """W: run the side branches. Returns the gradients of the parameters."""
        gradients, self._gradients = self._gradients, {}
        begun = self._begin_branches() if self._kept else {}
        if begun:
            parameters, edges = list(self.late.values()), [GradientEdge(*place) for place in begun]
            found = torch.autograd.grad(edges, parameters, list(begun.values()), allow_unused=True)
            gradients |= {parameter: grad for parameter, grad in zip(parameters, found) if grad is not None}
        return gradients

    def _begin_branches(self) -> dict[Place, Tensor]:
        """The gradients with which the side branches begin.

        A node computes what the current backward pass wants of it. So it is called inside one that wants only the
        branches.
        """
        wanted = dict.fromkeys(place for branches in self.branches.values() for place in branches)
        begun: dict[Place, Tensor] = {}

        def call_nodes() -> None:
            for node in list(self._kept):
                made: Any = node(*self._kept.pop(node))  # type: ignore[operator]
                for (child, number), grad in zip(node.next_functions, made if isinstance(made, tuple) else (made,)):
                    if child is not None and grad is not None and (child, number) in wanted:
                        about = metadata_of(child)[number]
                        grad = grad.sum_to_size(about.shape).to(about.dtype)  # as the engine does to what nodes return
                        earlier = begun.get((child, number))
                        begun[child, number] = grad if earlier is None else earlier + grad

        token = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            root = _Within.apply(token, call_nodes)
        edges = [GradientEdge(*place) for place in wanted]
        torch.autograd.grad(root, [token, *edges], retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        return begun

    def tensors(self) -> list[Tensor]:
        """The gradients that are kept from I to W."""
        kept = (grad for grads in self._kept.values() for grad in grads if grad is not None)
        return [*kept, *self._gradients.values()]

    def nodes_for_weights(self) -> list[Node]:
        """The nodes that W runs."""
        return [*self.branches, *self.side]


def split(roots: Sequence[GradientEdge], inputs: Sequence[GradientEdge], parameters: Sequence[nn.Parameter]) -> Split:
    """Find the chain and the side branches of the graph above `inputs` and `parameters`.

    If a graph has an input, a branch is whatever leads to parameters and not to an input. If it has none, as in the
    first stage, whose tokens have no gradient, a branch is what leads to one parameter without computing anything.
    """
    above = _Above(roots, {edge.node for edge in inputs}, {id(parameter): parameter for parameter in parameters})
    made, ways = Split(), {}  # for each branch, how many nodes lead into it
    todo, seen, early = [], set(), []
    for edge in roots:
        if above.is_chain(edge.node):
            todo.append(edge.node)
            _arrives(made, (edge.node, edge.output_nr))
        else:
            early.append(edge.node)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for child, number in above.children(node):
            place = child, number
            if above.is_chain(child):
                _arrives(made, place)
                todo.append(child)
            elif above.leads_to_weights(child):
                made.branches.setdefault(node, []).append(place)
                ways[child] = ways.get(child, 0) + 1
    below = {child: above.below([child]) for child in ways}
    inside = {node for child, nodes in below.items() for node in nodes if node is not child}
    for node, branches in made.branches.items():
        onwards = [child for child, _ in above.children(node) if above.is_chain(child)]
        children = [child for child, _ in branches]
        if isinstance(node, BackwardCFunction) or _has_hooks(node):
            early += children
        early += [child for child in children if ways[child] > 1]
        if not inside.isdisjoint(children):  # also part of another branch: does the chain lead there?
            further = set(above.below(onwards))
            early += [child for child in children if child in further]
    made.early = {node: above.leaves[node] for node in above.below(early) if node in above.leaves}
    for node, branches in list(made.branches.items()):
        kept = [place for place in branches if any(n in above.leaves and n not in made.early for n in below[place[0]])]
        made.branches[node] = kept
        made.side += [n for place in kept for n in below[place[0]]]
    made.branches = {node: branches for node, branches in made.branches.items() if branches}
    made.arrives = {node: made.arrives[node] for node in made.branches}
    made.side = list(dict.fromkeys(made.side))
    made.late = {node: above.leaves[node] for node in made.side if node in above.leaves and node not in made.early}
    return made


class _Within(torch.autograd.Function):
    """Calls a function inside the backward pass."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.function()
        return grads[0], None


def _keep(ran: dict[Node, list[Tensor | None]], node: Node, grads: tuple[Tensor | None, ...]) -> None:
    ran[node] = list(grads)


def _has_hooks(node: Node) -> bool:
    """Whether register_hook or register_prehook has been called on the node itself."""
    handles = [register(lambda *_: None) for register in (node.register_hook, node.register_prehook)]
    num_hooks = sum(len(handle.hooks_dict_ref()) for handle in handles)  # type: ignore[attr-defined]
    for handle in handles:
        handle.remove()
    return num_hooks > len(handles)


def _arrives(made: Split, place: Place) -> None:
    numbers = made.arrives.setdefault(place[0], [])
    if place[1] not in numbers:
        numbers.append(place[1])


class _Above:
    """The nodes of a graph, and what each one leads to."""

    def __init__(self, roots: Sequence[GradientEdge], inputs: set[Node], parameters: dict[int, nn.Parameter]):
        self.leaves: dict[Node, nn.Parameter] = {}
        self._children: dict[Node, list[Place]] = {}
        self._input: dict[Node, bool] = {}
        self._weights: dict[Node, bool] = {}
        self._carries: dict[Node, bool] = {}  # leads to one parameter, and computes nothing on the way
        todo = [edge.node for edge in roots]
        while todo:  # depth first: a node is judged after its children
            node = todo[-1]
            if node in self._input:
                todo.pop()
                continue
            if node not in self._children:
                self._children[node] = [(child, number) for child, number in node.next_functions if child is not None]
                todo += [child for child, _ in self._children[node] if child not in self._input]
                continue
            todo.pop()
            self._judge(node, inputs, parameters)
        self._has_input = any(self._input[node] for node in inputs if node in self._input)

    def _judge(self, node: Node, inputs: set[Node], parameters: dict[int, nn.Parameter]) -> None:
        children = [child for child, _ in self._children[node]]
        parameter = parameters.get(id(getattr(node, "variable", None)))
        if parameter is not None:
            self.leaves[node] = parameter
        self._input[node] = node in inputs or any(self._input[child] for child in children)
        self._weights[node] = parameter is not None or any(self._weights[child] for child in children)
        is_carrier = len(children) == 1 and node.name().startswith(_CARRIERS) and self._carries[children[0]]
        self._carries[node] = parameter is not None or is_carrier

    def children(self, node: Node) -> list[Place]:
        return self._children[node]

    def leads_to_weights(self, node: Node) -> bool:
        return self._weights[node]

    def is_chain(self, node: Node) -> bool:
        """Whether `node` is on the chain."""
        return self._input[node] if self._has_input else self._weights[node] and not self._carries[node]

    def below(self, nodes: Sequence[Node]) -> list[Node]:
        """These nodes and all nodes below them."""
        found: dict[Node, None] = {}
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node not in found:
                found[node] = None
                todo += [child for child, _ in self._children[node]]
        return list(found)


_CARRIERS = (
    "TBackward",
    "Transpose",
    "Permute",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Expand",
    "Alias",
    "Squeeze",
    "Unsqueeze",
    "ToCopy",
    "Clone",
    "Select",
    "Slice",
)
