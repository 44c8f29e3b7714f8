"""A GPT of this package's layers. On a mesh whose axis has one rank it is the whole model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tplab.errors import ShapeError
from tplab.mesh import Axis
from tplab.models.gpt import GPTConfig, gpt_layer_name, gpt_parameters
from tplab.torch.comm.regions import scatter_to
from tplab.torch.layers.attention import ParallelSelfAttention
from tplab.torch.layers.dropout import dropout
from tplab.torch.layers.linear import ParallelMLP
from tplab.torch.layers.norms import LayerNorm, RMSNorm
from tplab.torch.layers.parameters import drawn_normal
from tplab.torch.layers.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy


class GPT(nn.Module):
    """ids [B, S], the same on every rank of `axis` (R ranks)   ->   logits [B, S, n], of this rank's n words

    cost                per block: 2 all_reduces of [B, S, D] forward and 2 backward (Shoeybi et al. 2019)
    sequence_parallel   between attention and MLP each rank holds S/R of the sequence: 2 all_gathers and 2
                        reduce_scatters per block each way, of the same bytes (Korthikanti et al. 2022). R must divide S
    data_axis           along which ranks have different ids, and draw different dropout masks

    `loss` is the mean cross-entropy, computed on the sharded logits. `gpt_specs` says how the parameters lie on a mesh.
    """

    def __init__(
        self, config: GPTConfig, axis: Axis = "tp", *, sequence_parallel: bool = False, data_axis: Axis | None = None
    ):
        super().__init__()
        self.config, self.axis = config, axis
        self.sequence_dim = 1 if sequence_parallel else None
        self.varies_along = together(data_axis, axis if sequence_parallel else None)
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.width, axis, sequence_dim=self.sequence_dim)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(
            Block(config, axis, self.sequence_dim, self.varies_along) for _ in range(config.num_layers)
        )
        self.norm = norm_of(config, axis, self.sequence_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, deviation), the same whole model on any mesh."""
        draw_parameters(self, self.config, self.axis)

    def forward(self, ids: Tensor) -> Tensor:
        positions = positions_of(self.positions.weight, ids, self.axis, self.sequence_dim)
        x = dropout(self.embedding(ids) + positions, self._p, axis=self.varies_along)
        for block in self.blocks:
            x = block(x)
        return self.embedding.logits(self.norm(x))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of targets [B, S], the same on every rank; -100 is not counted."""
        return vocab_parallel_cross_entropy(self(ids), targets, self.axis, self.config.vocab_size)

    @property
    def _p(self) -> float:
        return self.config.dropout if self.training else 0.0


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, axis: Axis, sequence_dim: int | None, varies_along: Axis | None):
        super().__init__()
        self.p, self.varies_along = config.dropout, varies_along
        self.norm_1 = norm_of(config, axis, sequence_dim)
        self.attention = ParallelSelfAttention(
            config.width,
            config.num_heads,
            axis,
            num_kv_heads=config.num_kv_heads,
            bias=config.bias,
            sequence_dim=sequence_dim,
        )
        self.norm_2 = norm_of(config, axis, sequence_dim)
        self.mlp = ParallelMLP(
            config.width,
            config.hidden_width,
            axis,
            activation=config.activation,
            bias=config.bias,
            sequence_dim=sequence_dim,
        )

    def forward(self, x: Tensor) -> Tensor:
        p = self.p if self.training else 0.0
        x = x + dropout(self.attention(self.norm_1(x)), p, axis=self.varies_along)
        return x + dropout(self.mlp(self.norm_2(x)), p, axis=self.varies_along)


# --- what the whole model and its layers share -----------------------------------------------------------------------


def norm_of(config: GPTConfig, axis: Axis, sequence_dim: int | None) -> nn.Module:
    """The norm that the configuration asks for."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.width, sequence_axis=None if sequence_dim is None else axis)


def positions_of(weight: Tensor, ids: Tensor, axis: Axis, sequence_dim: int | None) -> Tensor:
    """A row of `weight` for each position of ids [B, S]: [S, D], or this rank's piece of the sequence.

    Raises ShapeError where there are more positions than rows.
    """
    context, length = len(weight), ids.shape[-1]
    if ids.dim() != 2 or length > context:
        raise ShapeError(
            f"a GPT takes ids [batch, sequence] of up to {context} tokens, but got {list(ids.shape)}; "
            "GPTConfig.context says how long a sequence may be"
        )
    return weight[:length] if sequence_dim is None else scatter_to(weight[:length], axis, 0)


def draw_parameters(module: nn.Module, config: GPTConfig, axis: Axis, layer: int | None = None) -> None:
    """Draw the weights of a GPT, or of one of its layers, from N(0, deviation): the same ones on any mesh."""
    about = gpt_parameters(config, axis)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shape, spec, _, deviation = about[name if layer is None else gpt_layer_name(config, layer, name)]
            if deviation:
                parameter.copy_(drawn_normal(shape, spec, deviation))


def together(*axes: Axis | None) -> Axis | None:
    """Several axes as one; None if there are none."""
    names = tuple(name for axis in axes if axis is not None for name in ((axis,) if isinstance(axis, str) else axis))
    return names or None
