"""A GPT of tplab's layers. On a mesh whose axes have one rank it is the whole model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tplab.mesh import Axis
from tplab.models import gpt as pure
from tplab.models.checks import SequenceScheme, check_ids
from tplab.models.gpt import IGNORED, GPTConfig, GPTExperts, beside, gpt_layer_name, gpt_parameters
from tplab.pipeline.partition import LayerSpec, TiedSpec
from tplab.sequence import LayoutName
from tplab.torch.comm.collectives import all_reduce, axis_size
from tplab.torch.comm.regions import copy_to, reduce_from, scatter_to
from tplab.torch.layers.attention import ParallelSelfAttention
from tplab.torch.layers.dropout import dropout
from tplab.torch.layers.experts import ParallelExperts
from tplab.torch.layers.linear import ParallelMLP
from tplab.torch.layers.norms import LayerNorm, RMSNorm
from tplab.torch.layers.parameters import drawn_normal
from tplab.torch.layers.router import Router, balance_loss, excess_load
from tplab.torch.layers.sequence_attention import token_positions
from tplab.torch.layers.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy


class GPT(nn.Module):
    """ids [B, S], the same on every rank of `axis` (R ranks)   ->   logits [B, S, n], of this rank's n entries

    cost                per block: 2 all_reduces of [B, S, D] forward and 2 backward (Shoeybi et al. 2019)
    sequence_parallel   between attention and MLP each rank holds S/R of the sequence: 2 all_gathers and 2
                        reduce_scatters per block each way, of the same bytes (Korthikanti et al. 2022). R must divide S
    data_axis           along which ranks have different ids, and draw different dropout masks
    context_axis        along which ranks share each sequence: ids are those of this rank's tokens, in this `layout`
                        (`tplab.sequence`), and attention sees other ranks' by this `scheme`: "ring", "gather" or "head"
    expert_axis         along which ranks hold different experts, if the config has any, and have different ids; their
                        tokens travel by this `dispatch` (`ParallelExperts`)

    `loss` is the mean cross-entropy, computed on the sharded logits. With experts, a call returns their balance losses
    with the logits, and `loss` includes these. `gpt_specs` says how the parameters are placed on a mesh.
    """

    def __init__(
        self,
        config: GPTConfig,
        axis: Axis = "tp",
        *,
        sequence_parallel: bool = False,
        data_axis: Axis | None = None,
        context_axis: Axis | None = None,
        layout: LayoutName = "zigzag",
        scheme: SequenceScheme = "ring",
        expert_axis: Axis = "ep",
        dispatch: str = "all_to_all",
    ):
        super().__init__()
        self.config, self.axis = config, axis
        self.parts = parts = Parts(
            config,
            axis,
            sequence_parallel=sequence_parallel,
            data_axis=data_axis,
            context_axis=context_axis,
            layout=layout,
            scheme=scheme,
            expert_axis=expert_axis,
            dispatch=dispatch,
        )
        self.embedding = parts.make_embedding()
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(parts, number) for number in range(config.num_layers))
        self.norm = parts.make_norm()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, deviation), the same whole model on any mesh."""
        draw_parameters(self, self.parts)

    def forward(self, ids: Tensor) -> Any:
        positions, p = self.parts.rows(self.positions.weight, ids), self.config.dropout if self.training else 0.0
        x: Any = (dropout(self.embedding(ids) + positions, p, axis=self.parts.varies_along),)
        for block in self.blocks:
            x = block(*x)
            x = x if isinstance(x, tuple) else (x,)
        return beside(self.embedding.logits(self.norm(x[0])), *x[1:])

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of targets [B, S], the same on every rank of `axis`; targets of -100 do not count.

        Along the context axis each rank has its share: the mean over ranks is the mean over all tokens. Average
        gradients along it, as along the data axis.
        """
        logits = self(ids)
        logits, balance = logits if isinstance(logits, tuple) else (logits, 0.0)
        loss = vocab_parallel_cross_entropy(logits, targets, self.axis, self.config.vocab_size, reduction="sum")
        tokens, axis = (targets != IGNORED).sum(), self.parts.context_axis
        if axis is not None:  # the mean number over the ranks
            tokens = all_reduce(tokens, axis).double() / axis_size(axis)
        return loss / tokens.to(loss.dtype) + balance


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); a block with experts uses these instead of the MLP.

    x [B, S, D]   ->   the same; from the first experts on, with the balance losses [] of all blocks so far
    """

    def __init__(self, parts: Parts, number: int = 0):
        super().__init__()
        self.p, self.varies_along = parts.config.dropout, parts.varies_along
        self.norm_1, self.attention = parts.make_norm(), parts.make_attention()
        self.norm_2 = parts.make_norm()
        experts = parts.config.experts_in(number)
        self.mlp = parts.make_mlp() if experts is None else BlockExperts(parts, experts)

    def forward(self, x: Tensor, *balance: Tensor) -> Any:
        p = self.p if self.training else 0.0
        x = x + dropout(self.attention(self.norm_1(x)), p, axis=self.varies_along)
        y = self.mlp(self.norm_2(x))
        if isinstance(self.mlp, BlockExperts):
            y, own = y
            balance = (own + sum(balance),)
        return beside(x + dropout(y, p, axis=self.varies_along), *balance)


class BlockExperts(nn.Module):
    """The experts of a block.

    x [B, S, D]   ->   y [B, S, D], and the balance loss [], times its factor

    The ranks of the tensor axis hold some features of every expert. They all have the same tokens; under sequence
    parallelism each has its own tokens, and they exchange them.
    """

    def __init__(self, parts: Parts, experts: GPTExperts):
        super().__init__()
        self.about, self.sequence_axis = experts, parts.sequence_axis
        self.counted_over = parts.counted_over(experts.over)
        self.router = Router(parts.config.width, experts.routing, sequence_axis=self.sequence_axis)
        if experts.bias_rate:
            self.router.bias = nn.Parameter(self.router.bias)
        else:
            self.router.register_buffer("bias", self.router.bias, persistent=False)
        self.shared = parts.make_mlp(experts.shared) if experts.shared else None
        self.experts = parts.make_experts(experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, about, axis = x.flatten(0, 1), self.about, self.sequence_axis
        routed = self.router(rows)
        y = self.experts(rows, routed).view(x.shape)
        if self.shared is not None:
            y = y + self.shared(x)
        loss = about.balance * balance_loss(routed, over=about.over, sequence=x.shape[1], **self.counted_over)
        if about.bias_rate:
            loss = loss + excess_load(routed, self.router.bias if axis is None else copy_to(self.router.bias, axis))
        return y, loss if axis is None else reduce_from(loss / axis_size(axis), axis)


# --- shared by the whole model and its layers ------------------------------------------------------------------------


class Parts(pure.Parts):
    """Makes the layers of a GPT in torch."""

    kinds = pure.Kinds(VocabParallelEmbedding, LayerNorm, RMSNorm, ParallelSelfAttention, ParallelMLP, ParallelExperts)

    def rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        """The row of `weight` for the position of each token of ids [B, S]: [S, D], or this rank's piece of them."""
        num_ranks = 1 if self.context_axis is None else axis_size(self.context_axis)
        check_ids(ids.shape, len(weight), num_ranks)
        rows = weight[: ids.shape[1]]
        if self.context_axis is not None:
            positions = token_positions(ids.shape[1] * num_ranks, self.context_axis, layout=self.layout)
            rows = weight[positions.to(weight.device)]
        return scatter_to(rows, self.axis, 0) if self.sequence_parallel else rows


def draw_parameters(module: nn.Module, parts: Parts, layer: int | None = None) -> None:
    """Draw the weights of a GPT, or of one of its layers, from N(0, deviation): the same on any mesh."""
    config = parts.config
    about = gpt_parameters(config, parts.axis, parts.expert_axis)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shape, spec, _, deviation = about[name if layer is None else gpt_layer_name(config, layer, name)]
            if deviation:
                parameter.copy_(drawn_normal(shape, spec, deviation))


# --- as a list of layers ----------------------------------------------------------------------------------------------


def gpt_layers(
    config: GPTConfig,
    axis: Axis = "tp",
    *,
    sequence_parallel: bool = False,
    data_axis: Axis | None = None,
    context_axis: Axis | None = None,
    layout: LayoutName = "zigzag",
    scheme: SequenceScheme = "ring",
    expert_axis: Axis = "ep",
    dispatch: str = "all_to_all",
) -> list[LayerSpec]:
    """The layers of GPT(config, axis): num_layers + 2 of them, each tensor-parallel along `axis`.

        layers = gpt_layers(config)
        stages = stages_of(layers, schedule)

    layer 0              ids [B, S] -> x [B, S, D]       embedding and positions
    layers 1 to L        x -> x                          blocks
    layer L + 1          x -> logits [B, S, n]           norm, and the head, whose weight is tied to the embedding

    Under sequence parallelism x is this rank's piece [B, S/R, D], also between stages. From the first block with
    experts on, the balance losses [] so far travel with x, and are returned with the logits. Arguments are those of
    GPT. The loss of the logits is vocab_parallel_cross_entropy(logits, targets, axis, config.vocab_size).
    """
    parts = Parts(
        config,
        axis,
        sequence_parallel=sequence_parallel,
        data_axis=data_axis,
        context_axis=context_axis,
        layout=layout,
        scheme=scheme,
        expert_axis=expert_axis,
        dispatch=dispatch,
    )
    return [
        TiedSpec("embedding", GPTEmbedding, parts, weight="embedding.weight"),
        *[LayerSpec(GPTBlock, parts, config.first_like(number)) for number in range(config.num_layers)],
        TiedSpec("embedding", GPTHead, parts, weight="embedding.weight"),
    ]


class GPTEmbedding(nn.Module):
    """ids [B, S]   ->   x [B, S, D]: the sum of token and position embeddings."""

    def __init__(self, parts: Parts):
        super().__init__()
        self.p, self.parts = parts.config.dropout, parts
        self.embedding = parts.make_embedding()
        self.positions = nn.Embedding(parts.config.context, parts.config.width)
        draw_parameters(self, parts, layer=0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.parts.rows(self.positions.weight, ids)
        return dropout(x, self.p if self.training else 0.0, axis=self.parts.varies_along)


class GPTBlock(Block):
    """A block, with the initial weights of a block in a GPT."""

    def __init__(self, parts: Parts, number: int):
        super().__init__(parts, number)
        draw_parameters(self, parts, layer=1 + number)


class GPTHead(nn.Module):
    """x [B, S, D]   ->   logits [B, S, n], of this rank's n entries."""

    def __init__(self, parts: Parts):
        super().__init__()
        self.embedding, self.norm = parts.make_embedding(), parts.make_norm()
        draw_parameters(self, parts, layer=parts.config.num_layers + 1)

    def forward(self, x: Tensor, *balance: Tensor) -> Any:
        return beside(self.embedding.logits(self.norm(x)), *balance)
