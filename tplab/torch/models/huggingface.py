"""`parallelize`: a `transformers` model, sharded by a plan, inside a rank's program.

The linear layers, the embedding and the head are replaced by layers that hold this rank's piece of the same weights and
communicate where needed. The rest of the model is unchanged, including its forward, loss and generate. Nothing here
imports transformers: a model is recognised by its modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.errors import PlanError
from tplab.layout import Layout, ranges, take
from tplab.mesh import Axis
from tplab.sharding import P
from tplab.torch.comm.collectives import all_gather, all_reduce
from tplab.torch.comm.regions import copy_to, gather_from
from tplab.torch.layers.parameters import note_cuts
from tplab.torch.layers.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tplab.torch.models.chance import Chance
from tplab.torch.models.plans import Plan, Planned, bind, experts_in, features_of, heads_in, is_conv1d
from tplab.torch.ranks.rank import prepares, this_rank

Cut = Callable[[Tensor, Layout], nn.Parameter]

HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "split_size")
"""Attributes of attention modules that become this rank's share: numbers of heads, and of features of all heads."""


@prepares
def parallelize(
    model: nn.Module, plan: Plan, axis: Axis = "tp", *, gather_logits: bool = True, data_axis: Axis | None = None
) -> nn.Module:
    """Shard a model over `axis` (R ranks), in place, inside a rank's program; returns it.

    plan    module name -> "column", "row", "vocab", "experts", "replicate", "local" or a FusedColumn, as returned by
            gpt2_plan(model) and llama_plan(model). `*` matches anything between two dots
    memory  1/R of the parameters of columns, rows and vocabulary entries on each rank
    cost    per block: 2 all_reduces of [B, S, D] forward and 2 backward; with experts one more backward, of their
            weights; the embedding one forward, the head one backward

    gather_logits   True: logits [B, S, V] on every rank, and the model's own loss of them: an all_gather of all logits.
                    False: logits [B, S, n] of this rank's n entries, and `vocab_parallel_cross_entropy` as the loss: 3
                    numbers per token. `generate` gathers the logits in any case
    dropout         outside the parallel regions, modules and functions draw one mask on all ranks of `axis`, from the
                    seed of the run; between columns and rows ("local", and the attention's own), where activations are
                    sharded, each rank's generator draws its own
    data_axis       along which ranks have different data, and draw different masks

    The model is checked against the plan before it is changed. Raises PlanError for a plan that cannot be right.
    """
    place = this_rank().place(axis)
    planned = bind(model, plan, len(place.group), place.label)
    if not gather_logits:
        _check_one_loss(model, [one.name for one in planned if one.kind == "vocab" and features_of(one.module)])
    shards: dict[int, nn.Parameter] = {}

    def cut(whole: Tensor, layout: Layout) -> nn.Parameter:
        if id(whole) not in shards:  # a tied weight remains one parameter
            piece = take(whole.detach(), layout, this_rank().mesh, this_rank().rank)
            piece = piece.clone(memory_format=torch.contiguous_format)
            shards[id(whole)] = nn.Parameter(piece, whole.requires_grad)
        return shards[id(whole)]

    keep = [one.module for one in planned]  # keeps the tensors alive whose ids are in `shards`
    heads: list[VocabHead] = []
    chance = Chance(data_axis)
    for parent in dict.fromkeys(one.parent for one in planned):
        inside = [one for one in planned if one.parent == parent]
        _shard_children(model.get_submodule(parent), inside, axis, cut, gather_logits, heads, chance)
    for module in model.modules():
        layouts: Callable[[], dict[str, Layout]] | None = getattr(module, "layouts", None)
        for name, layout in layouts().items() if callable(layouts) else ():
            if axes := layout.spec.axis_names:
                note_cuts(module, axes, name)
    chance.watch(model, [one.parent for one in planned])
    if not gather_logits:
        for head in heads:
            _compute_loss_on_shards(model, head, axis)
    del keep
    return model


@torch.no_grad()
def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded state of a model that `parallelize` has sharded, on every rank, with the original names and, bit
    for bit, values. It is a snapshot: a later optimizer step does not change it. All ranks must call it; each receives
    (R-1)/R of every sharded parameter."""
    rank = this_rank()
    layouts = known_layouts(model)
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        layout, whole = layouts.get(name, Layout()), value.detach()
        for dim in layout.split_dims:
            group = rank.place(layout.spec[dim]).group
            pieces = all_gather(whole.movedim(dim, 0), layout.spec[dim]).movedim(0, dim)
            order = [row for other in group for rows in _rows(layout, dim, pieces.shape[dim], other) for row in rows]
            whole = torch.empty_like(pieces).index_copy_(dim, torch.tensor(order, device=pieces.device), pieces)
        state[name] = whole if layout.split_dims else whole.clone()
    return state


def known_layouts(model: nn.Module) -> dict[str, Layout]:
    """The layouts of a model's parameters on the mesh, by name, as far as its layers know them."""
    found: dict[str, Layout] = {}
    for name, module in model.named_modules():
        layouts: Callable[[], dict[str, Layout]] | None = getattr(module, "layouts", None)
        for parameter, layout in layouts().items() if callable(layouts) else ():
            found[f"{name}.{parameter}" if name else parameter] = layout
    return found


class Column(nn.Module):
    """A ColumnParallelLinear with a piece of a given weight, which may be [in, out] as in GPT-2, or have fused parts.

    x [..., D], the same on every rank   ->   y [..., F/R]: this rank's features, of each part
    """

    def __init__(self, given: nn.Module, name: str, axis: Axis, parts: tuple[int, ...], cut: Cut, entrance: Entrance):
        super().__init__()
        self.name = name
        self.in_features, self.out_features = features_of(given)  # type: ignore[misc]
        self.axis, self.parts, self.is_transposed, self.entrance = axis, parts, is_conv1d(given), entrance
        self.weight = cut(given.weight, self.layouts()["weight"])  # type: ignore[arg-type]
        self.bias = None if given.bias is None else cut(given.bias, self.layouts()["bias"])  # type: ignore[arg-type]

    def layouts(self) -> dict[str, Layout]:
        """The layouts of its parameters on the mesh."""
        spec = P(None, self.axis) if self.is_transposed else P(self.axis)
        return {"weight": Layout(spec, self.parts), "bias": Layout(P(self.axis), self.parts)}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise PlanError(
                f"{self.name} is planned as a column, which takes all {self.in_features} features, but was given "
                f"{x.shape[-1]}; plan the layer before it so that its output has them all"
            )
        return F.linear(self.entrance(x), self.weight.T if self.is_transposed else self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.axis!r}" + (
            f", parts={self.parts}" if self.parts else ""
        )


class Row(nn.Module):
    """A RowParallelLinear that holds a piece of a given weight, which may be [in, out] as in GPT-2.

    x [..., F/R], this rank's features   ->   y [..., D], the same on every rank; the bias is added once, after the sum
    """

    def __init__(self, given: nn.Module, name: str, axis: Axis, cut: Cut, chance: Chance):
        super().__init__()
        self.name, self.chance = name, chance
        self.in_features, self.out_features = features_of(given)  # type: ignore[misc]
        self.axis, self.is_transposed = axis, is_conv1d(given)
        self.weight = cut(given.weight, self.layouts()["weight"])  # type: ignore[arg-type]
        self.bias: nn.Parameter | None = given.bias  # type: ignore[assignment]

    def layouts(self) -> dict[str, Layout]:
        """The layouts of its parameters on the mesh."""
        return {"weight": Layout(P(self.axis) if self.is_transposed else P(None, self.axis)), "bias": Layout()}

    def forward(self, x: Tensor) -> Tensor:
        taken = self.weight.shape[0 if self.is_transposed else 1]
        if x.shape[-1] != taken:
            raise PlanError(
                f"{self.name} is planned as a row, which takes this rank's {taken} of {self.in_features} features, but "
                f"was given {x.shape[-1]}; a row takes what columns give: plan the layers before it as 'column'"
            )
        y = all_reduce(F.linear(x, self.weight.T if self.is_transposed else self.weight), self.axis)
        self.chance.is_inside = False
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.axis!r}"


class VocabEmbedding(VocabParallelEmbedding):
    """A VocabParallelEmbedding that holds a piece of a given weight."""

    def __init__(self, given: nn.Embedding, axis: Axis, cut: Cut):
        nn.Module.__init__(self)
        self.vocab_size, self.width, self.axis, self.sequence_dim = *given.weight.shape, axis, None
        self.padding_idx = given.padding_idx
        self.weight = cut(given.weight, self.layouts()["weight"])

    def layouts(self) -> dict[str, Layout]:
        """The layouts of its parameters on the mesh."""
        return {"weight": Layout(P(self.axis))}

    def forward(self, ids: Tensor) -> Tensor:
        y = super().forward(ids)
        if self.padding_idx is None:
            return y
        return torch.where((ids == self.padding_idx).unsqueeze(-1), y.detach(), y)  # no gradient, as in nn.Embedding


class VocabHead(nn.Module):
    """The head: x [..., D], the same on every rank -> logits [..., n] of this rank's entries; if gathered, [..., V]."""

    def __init__(self, given: nn.Linear, axis: Axis, cut: Cut, gather: bool):
        super().__init__()
        self.in_features, self.out_features, self.axis, self.gather = (
            given.in_features,
            given.out_features,
            axis,
            gather,
        )
        self.weight = cut(given.weight, self.layouts()["weight"])
        self.bias = None if given.bias is None else cut(given.bias, self.layouts()["bias"])

    def layouts(self) -> dict[str, Layout]:
        """The layouts of its parameters on the mesh."""
        return {"weight": Layout(P(self.axis)), "bias": Layout(P(self.axis))}

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(copy_to(x, self.axis), self.weight, self.bias)
        return gather_from(logits, self.axis) if self.gather else logits

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.axis!r}, gather={self.gather}"


class Entrance:
    """The shared entrance of columns with one input: x enters once, and its gradient is summed once for all of them.

    Query, key and value receive the same tensor; a separate copy_to for each would need three all_reduces.
    """

    def __init__(self, axis: Axis, num_columns: int, chance: Chance):
        self.axis, self.num_columns, self.chance = axis, num_columns, chance
        self._x: ref[Tensor] | None = None
        self._entered: Tensor | None = None
        self._num_left = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.chance.is_inside = True
        is_known = self._x is not None and self._x() is x and self._entered is not None
        if not is_known or self._entered.requires_grad != (x.requires_grad and torch.is_grad_enabled()):  # type: ignore
            self._x, self._entered, self._num_left = ref(x), copy_to(x, self.axis), self.num_columns
        entered, self._num_left = self._entered, self._num_left - 1
        if self._num_left <= 0:  # all columns have it: no graph is kept between two steps
            self._x = self._entered = None
        return entered  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> Entrance:
        memo[id(self)] = Entrance(self.axis, self.num_columns, copy.deepcopy(self.chance, memo))
        return memo[id(self)]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_x": None, "_entered": None, "_num_left": 0}


def _rows(layout: Layout, dim: int, size: int, rank: int) -> list[range]:
    """The indices of a whole dim that a rank holds."""
    mesh, entry = this_rank().mesh, layout.spec[dim]
    return ranges(size, layout.parts, mesh.index(rank, entry), mesh.axis_size(entry))


def _shard_children(
    parent: nn.Module,
    inside: list[Planned],
    axis: Axis,
    cut: Cut,
    gather: bool,
    heads: list[VocabHead],
    chance: Chance,
) -> None:
    """Replace the planned children of one module."""
    columns = [one for one in inside if one.kind == "column"]
    entrance = Entrance(axis, len(columns), chance)
    for one in inside:
        child = one.name.rpartition(".")[2]
        if one.kind == "column":
            _replace(parent, child, Column(one.module, one.name, axis, one.parts, cut, entrance))
        elif one.kind == "row":
            _replace(parent, child, Row(one.module, one.name, axis, cut, chance))
        elif one.kind == "vocab" and isinstance(one.module, nn.Embedding):
            _replace(parent, child, VocabEmbedding(one.module, axis, cut))
        elif one.kind == "vocab":
            heads.append(VocabHead(one.module, axis, cut, gather))  # type: ignore[arg-type]
            _replace(parent, child, heads[-1])
        elif one.kind == "experts":
            _share_experts(one.module, axis, cut)
        elif columns and one.kind == "replicate":  # a norm of single heads, used for this rank's heads
            for parameter in one.module.parameters():
                parameter.register_hook(lambda gradient: all_reduce(gradient, axis))
    if columns and heads_in(parent) is not None:
        num_ranks = len(this_rank().place(axis).group)
        for name in HEADS:
            if isinstance(getattr(parent, name, None), int):
                setattr(parent, name, getattr(parent, name) // num_ranks)


def _share_experts(experts: nn.Module, axis: Axis, cut: Cut) -> None:
    """Shard a module that is called with x [T, D], choices [T, K] and weights [T, K], the same on every rank: it keeps
    this rank's experts, is called with the rows of x that chose them, one choice each, and the outputs are added up."""
    place, layout = this_rank().place(axis), Layout(P(axis))
    here, compute = experts_in(experts) // len(place.group), experts.forward
    for name, whole in list(experts.named_parameters()):
        setattr(experts, name, cut(whole, layout))
    names = [name for name, _ in experts.named_parameters()]
    experts.num_experts = here  # type: ignore[assignment]

    def forward(x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        tokens, slots = (choices // here == place.index).nonzero(as_tuple=True)
        x, weights = copy_to(x, axis), copy_to(weights, axis)
        own = choices[tokens, slots] - here * place.index
        y = compute(x[tokens], own[:, None], weights[tokens, slots][:, None])
        return all_reduce(torch.zeros_like(x).index_add(0, tokens, y), axis)

    vars(experts).update(forward=forward, layouts=lambda: dict.fromkeys(names, layout))


def _replace(parent: nn.Module, child: str, module: nn.Module) -> None:
    """Replace a child by `module`, in the child's mode: new modules are in training mode, where dropout is active."""
    module.train(getattr(parent, child).training)
    setattr(parent, child, module)


def _check_one_loss(model: nn.Module, heads: list[str]) -> None:
    if len(heads) > 1:
        raise PlanError(
            f"gather_logits=False leaves the logits of one head sharded, but there are {len(heads)}: "
            f"{', '.join(heads)}; leave gather_logits=True"
        )
    if heads and not hasattr(model, "loss_function"):
        raise PlanError(
            f"gather_logits=False replaces the model's loss, but {type(model).__name__} has no loss_function; leave "
            "gather_logits=True"
        )


def _compute_loss_on_shards(model: nn.Module, head: VocabHead, axis: Axis) -> None:
    """Make the model compute its loss on sharded logits, and gather them in `generate`."""

    def loss_function(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The same as transformers' ForCausalLMLoss: each position predicts the next token."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = vocab_parallel_cross_entropy(
            logits, shift_labels.contiguous(), axis, vocab_size, reduction, ignore_index
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    model.loss_function = loss_function  # type: ignore[assignment]
    generate = model.generate

    def gathered_generate(*args: Any, **kwargs: Any) -> Any:
        head.gather = True
        try:
            return generate(*args, **kwargs)  # type: ignore[operator]
        finally:
            head.gather = False

    model.generate = gathered_generate  # type: ignore[assignment]
