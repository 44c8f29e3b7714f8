"""A GPT as a list of layers, for `stages_of` to cut into the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from tplab.jax.layers.parameters import Params, here, nested
from tplab.jax.models.gpt import Parts
from tplab.mesh import Axis
from tplab.models.checks import SequenceScheme
from tplab.models.gpt import GPTConfig, gpt_parameters
from tplab.pipeline.layer_spec import LayerSpec, TiedSpec
from tplab.sequence import LayoutName


def gpt_layers(
    config: GPTConfig,
    axis: Axis = "tp",
    *,
    sequence_parallel: bool = False,
    data_axis: Axis | None = None,
    context_axis: Axis | None = None,
    layout: LayoutName = "zigzag",
    scheme: SequenceScheme = "ring",
) -> list[LayerSpec]:
    """The layers of GPT(config, axis): num_layers + 2 of them, each of which is tensor-parallel along `axis`.

        layers = gpt_layers(config)
        stages = stages_of(layers, schedule)

    layer 0              ids [B, S] -> x [B, S, D]       embedding and positions
    layers 1 to L        x -> x                          blocks
    layer L + 1          x -> logits [B, S, n]           norm, and the head, whose weight is tied to the embedding

    Under sequence parallelism x is this rank's piece [B, S/R, D], also between stages. With a context axis, S is the
    number of tokens that each of its ranks has, in this layout. The loss of the logits is
    vocab_parallel_cross_entropy(logits, targets, axis, config.vocab_size).
    """
    how = {"axis": axis, "sequence_parallel": sequence_parallel, "data_axis": data_axis}
    how |= {"context_axis": context_axis, "layout": layout, "scheme": scheme}
    return [
        TiedSpec("embedding", GPTEmbedding, config, weight="embedding.weight", **how),
        *[LayerSpec(GPTBlock, config, **how)] * config.num_layers,
        TiedSpec("embedding", GPTHead, config, weight="embedding.weight", **how),
    ]


@dataclass(frozen=True)
class GPTEmbedding(Parts):
    """ids [B, S]   ->   x [B, S, D]: the rows of the tokens and of the positions."""

    def init(self, key: Any) -> Params:
        return _begin(self, ("embedding.weight", "positions.weight"), key)

    def __call__(self, params: Params, ids: Array, *, key: Any = None) -> Array:
        positions = self._positions(params["positions"]["weight"], ids)
        return self._drops(key)(self._embedding(params["embedding"], ids) + positions)


@dataclass(frozen=True)
class GPTBlock(Parts):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def init(self, key: Any) -> Params:
        names = [name for name in gpt_parameters(self.config) if name.startswith("blocks.0.")]
        return _begin(self, names, key)["blocks"]["0"]

    def __call__(self, params: Params, x: Array, *, key: Any = None) -> Array:
        drops = self._drops(key)
        x = x + drops(self._attention(params["attention"], self._norm(params["norm_1"], x)))
        return x + drops(self._mlp(params["mlp"], self._norm(params["norm_2"], x)))


@dataclass(frozen=True)
class GPTHead(Parts):
    """x [B, S, D]   ->   logits [B, S, n], of this rank's n entries."""

    def init(self, key: Any) -> Params:
        names = [name for name in gpt_parameters(self.config) if name.startswith("norm.")]
        return _begin(self, ("embedding.weight", *names), key)  # the embedding first: drawn as in the first layer

    def __call__(self, params: Params, x: Array) -> Array:
        return self._embedding.logits(params["embedding"], self._norm(params["norm"], x))


def _begin(layer: Parts, names: Any, key: Any) -> Params:
    """The parameters with these names, with the initial numbers of a GPT."""
    about, found = gpt_parameters(layer.config, layer.axis), {}
    for number, name in enumerate(names):
        shape, spec, mean, deviation = about[name]
        found[name] = here(mean + deviation * jax.random.normal(jax.random.fold_in(key, number), shape), spec)
    return nested(found)
