"""A GPT made of this package's layers. On a mesh whose axis has one rank it is the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from tplab.jax.comm.collectives import all_reduce, axis_size
from tplab.jax.comm.regions import scatter_to
from tplab.jax.layers.attention import ParallelSelfAttention
from tplab.jax.layers.dropout import dropout
from tplab.jax.layers.experts import ParallelExperts
from tplab.jax.layers.linear import ParallelMLP
from tplab.jax.layers.norms import LayerNorm, RMSNorm
from tplab.jax.layers.parameters import Params, here, nested
from tplab.jax.layers.router import Router, balance_loss, excess_load
from tplab.jax.layers.sequence_attention import token_positions
from tplab.jax.layers.vocabulary import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tplab.mesh import Axis
from tplab.models import gpt as pure
from tplab.models.checks import SequenceScheme, check_ids
from tplab.models.gpt import IGNORED, GPTConfig, GPTExperts, beside, gpt_parameters, gpt_specs
from tplab.pipeline.partition import LayerSpec, TiedSpec
from tplab.sequence import LayoutName


class Parts(pure.Parts):
    """A GPT in JAX, or one of its layers."""

    kinds = pure.Kinds(VocabParallelEmbedding, LayerNorm, RMSNorm, ParallelSelfAttention, ParallelMLP, ParallelExperts)

    def _drops(self, key: Any) -> Drops:
        return Drops(self.config.dropout, key, self.varies_along)

    def _positions(self, weight: Array, ids: Array) -> Array:
        """A row of `weight` for each token of ids [B, S]: [S, D], or this rank's piece of the sequence."""
        num_ranks = 1 if self.context_axis is None else axis_size(self.context_axis)
        check_ids(ids.shape, len(weight), num_ranks)
        length = ids.shape[1]
        rows = weight[:length]
        if self.context_axis is not None:
            rows = weight[token_positions(length * num_ranks, self.context_axis, layout=self.layout)]
        return scatter_to(rows, self.axis, 0) if self.sequence_parallel else rows

    def _norm(self, params: Params, x: Array) -> Array:
        return self.make_norm()(params, x)

    def _block(self, number: int, params: Params, x: Array, *balance: Array, drops: Drops) -> Any:
        """x + attention(norm(x)), then x + mlp(norm(x)), with the block's experts instead of the MLP if it has any.

        x [B, S, D]   ->   the same; from the first block with experts on, also the balance losses [] so far
        """
        x = x + drops(self.make_attention()(params["attention"], self._norm(params["norm_1"], x)))
        y, experts = self._norm(params["norm_2"], x), self.config.experts_in(number)
        if experts is None:
            return beside(x + drops(self.make_mlp()(params["mlp"], y)), *balance)
        y, own = self._experts(experts, params["mlp"], y)
        return beside(x + drops(y), own + sum(balance))

    def _experts(self, about: GPTExperts, params: Params, x: Array) -> tuple[Array, Array]:
        """x [B, S, D]   ->   y [B, S, D], and the balance loss [], times its factor.

        The ranks of the tensor axis hold features of every expert. They all have the same tokens or, under sequence
        parallelism, each has its own, which they exchange.
        """
        rows = x.reshape(-1, self.config.width)
        routed = Router(self.config.width, about.routing)(params["router"], rows)
        y = self.make_experts(about)(params["experts"], rows, routed).reshape(x.shape)
        if about.shared:
            y = y + self.make_mlp(about.shared)(params["shared"], x)
        counted = self.counted_over(about.over)
        loss = about.balance * balance_loss(routed, over=about.over, sequence=x.shape[1], **counted)
        if about.bias_rate:
            loss = loss + excess_load(routed, params["router"]["bias"])
        return y, all_reduce(loss, self.axis, "mean") if self.sequence_parallel else loss

    def _logits(self, params: Params, x: Array, *balance: Array) -> Any:
        logits = self.make_embedding().logits(params["embedding"], self._norm(params["norm"], x))
        return beside(logits, *balance)

    def _entered(self, params: Params, ids: Array, drops: Drops) -> Array:
        """The sum of token and position embeddings."""
        positions = self._positions(params["positions"]["weight"], ids)
        return drops(self.make_embedding()(params["embedding"], ids) + positions)


@dataclass(frozen=True)
class GPT(Parts):
    """ids [B, S], the same on every rank of `axis` (R ranks)   ->   logits [B, S, n], of this rank's n entries

    cost                per block: 2 all_reduces of [B, S, D] forward and 2 backward (Shoeybi et al. 2019)
    sequence_parallel   between attention and MLP each rank holds S/R of the sequence: 2 all_gathers and 2
                        reduce_scatters per block each way, of the same bytes (Korthikanti et al. 2022). R must divide S
    data_axis           the axis along which ranks have different ids, and draw different dropout masks
    context_axis        the axis along which ranks share each sequence: ids are those of this rank's tokens, in this
                        `layout` (`tplab.sequence`), and attention sees the others' by this `scheme`: "ring", "gather"
                        or "head"
    expert_axis         the axis along which ranks hold different experts, if the config has any, and have different
                        ids; their tokens are sent by this `dispatch` (`ParallelExperts`)

    `loss` is the mean cross-entropy, computed on the sharded logits. With experts, the balance losses are returned with
    the logits, and added in `loss`. There is dropout only with a key.
    If R does not divide the vocabulary, `pad_vocabulary` pads embedding.weight so that the ranks can share it.
    """

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return nested(gpt_specs(self.config, self.axis, self.expert_axis))

    def init(self, key: Any) -> Params:
        """Weights from N(0, deviation), norms one and biases zero. Whole; inside a rank's program, its piece."""
        about = gpt_parameters(self.config, self.axis, self.expert_axis)
        first = {
            name: here(mean + deviation * jax.random.normal(k, shape), spec)
            for k, (name, (shape, spec, mean, deviation)) in zip(jax.random.split(key, len(about)), about.items())
        }
        return nested(first)

    def __call__(self, params: Params, ids: Array, *, key: Any = None) -> Any:
        drops = self._drops(key)
        x: Any = (self._entered(params, ids, drops),)
        for number in range(self.config.num_layers):
            x = self._block(number, params["blocks"][str(number)], *x, drops=drops)
            x = x if isinstance(x, tuple) else (x,)
        return self._logits(params, *x)

    def loss(self, params: Params, ids: Array, targets: Array, *, key: Any = None) -> Array:
        """The mean cross-entropy of targets [B, S], the same on every rank; -100 is not counted. With a context axis,
        the mean is over the tokens of all its ranks."""
        outputs, size, axis = self(params, ids, key=key), self.config.vocab_size, self.context_axis
        logits, balance = outputs if isinstance(outputs, tuple) else (outputs, 0.0)
        if axis is None:
            return vocab_parallel_cross_entropy(logits, targets, self.axis, size) + balance
        total = vocab_parallel_cross_entropy(logits, targets, self.axis, size, reduction="sum")
        mean = all_reduce(total, axis) / all_reduce((targets != IGNORED).sum(), axis)
        return mean if self.config.experts is None else mean + all_reduce(balance, axis, "mean")


class Drops:
    """Dropout with a new key each time."""

    def __init__(self, p: float, key: Any, axis: Axis | None):
        self.p, self.key, self.axis = p, key, axis

    def __call__(self, x: Array) -> Array:
        if self.key is None or self.p == 0:
            return x
        self.key, key = jax.random.split(self.key)
        return dropout(x, self.p, key=key, axis=self.axis)


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
    """The layers of GPT(config, axis): num_layers + 2 of them, each of which is tensor-parallel along `axis`.

        layers = gpt_layers(config)
        stages = stages_of(layers, schedule)

    layer 0              ids [B, S] -> x [B, S, D]       embedding and positions
    layers 1 to L        x -> x                          blocks
    layer L + 1          x -> logits [B, S, n]           norm, and the head, whose weight is tied to the embedding

    Under sequence parallelism x is this rank's piece [B, S/R, D], also between stages. With a context axis, S is the
    number of tokens on each of its ranks, in this layout. From the first block with experts on, the balance losses []
    so far accompany x, and are returned with the logits. The loss of the logits is
    vocab_parallel_cross_entropy(logits, targets, axis, config.vocab_size).
    """
    how: dict[str, Any] = {"axis": axis, "sequence_parallel": sequence_parallel, "data_axis": data_axis}
    how |= {"context_axis": context_axis, "layout": layout, "scheme": scheme}
    how |= {"expert_axis": expert_axis, "dispatch": dispatch}
    return [
        TiedSpec("embedding", GPTEmbedding, config, weight="embedding.weight", **how),
        *[LayerSpec(GPTBlock, config, number=config.first_like(i), **how) for i in range(config.num_layers)],
        TiedSpec("embedding", GPTHead, config, weight="embedding.weight", **how),
    ]


@dataclass(frozen=True)
class GPTEmbedding(Parts):
    """ids [B, S]   ->   x [B, S, D]: the rows of the tokens and of the positions."""

    def init(self, key: Any) -> Params:
        return _begin(self, ("embedding.weight", "positions.weight"), key)

    def __call__(self, params: Params, ids: Array, *, key: Any = None) -> Array:
        return self._entered(params, ids, self._drops(key))


@dataclass(frozen=True)
class GPTBlock(Parts):
    """Block `number`, or one of the same kind: x [B, S, D]   ->   x, and the balance losses [] so far, if any."""

    number: int = 0

    def init(self, key: Any) -> Params:
        block = f"blocks.{self.number}."
        names = [name for name in gpt_parameters(self.config) if name.startswith(block)]
        return _begin(self, names, key)["blocks"][str(self.number)]

    def __call__(self, params: Params, x: Array, *balance: Array, key: Any = None) -> Any:
        return self._block(self.number, params, x, *balance, drops=self._drops(key))


@dataclass(frozen=True)
class GPTHead(Parts):
    """x [B, S, D]   ->   logits [B, S, n], of this rank's n entries."""

    def init(self, key: Any) -> Params:
        names = [name for name in gpt_parameters(self.config) if name.startswith("norm.")]
        return _begin(self, ("embedding.weight", *names), key)  # the embedding first, as in the first layer

    def __call__(self, params: Params, x: Array, *balance: Array) -> Any:
        return self._logits(params, x, *balance)


def _begin(layer: Parts, names: Any, key: Any) -> Params:
    """The parameters with these names, with the initial values of a GPT."""
    about, found = gpt_parameters(layer.config, layer.axis, layer.expert_axis), {}
    for number, name in enumerate(names):
        shape, spec, mean, deviation = about[name]
        found[name] = here(mean + deviation * jax.random.normal(jax.random.fold_in(key, number), shape), spec)
    return nested(found)
