"""What a GPT is, in any framework: its sizes, and how its parameters are sharded."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np

from tplab.errors import one_of
from tplab.mesh import Axis
from tplab.models.checks import ACTIVATIONS
from tplab.sharding import P

NORMS = ("layer", "rms")
IGNORED = -100
"""A target that no loss counts, as in torch."""


@dataclass(frozen=True)
class GPTConfig:
    """A decoder of transformer blocks with learned positions and a head tied to the embedding, like GPT-2.

    vocab_size     V, any number of entries           num_layers     number of blocks
    width          D, of the residual stream          num_heads      H, which divides D
    context        the longest sequence               num_kv_heads   K, which divides H; H if None
    hidden         of the MLP; 4 D if None            activation     "gelu", "gelu_tanh" or "swiglu"
    norm           "layer" or "rms"                   bias           whether linear layers have one
    dropout        of the embedding and of what each branch adds to the stream
    deviation      of the initial weights; for the layers that add to the stream, divided by sqrt(2 num_layers)
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    context: int
    _: KW_ONLY
    num_kv_heads: int | None = None
    hidden: int | None = None
    activation: str = "gelu_tanh"
    norm: str = "layer"
    bias: bool = True
    dropout: float = 0.0
    deviation: float = 0.02

    def __post_init__(self) -> None:
        one_of("norm", self.norm, NORMS)
        one_of("activation", self.activation, ACTIVATIONS)

    @property
    def hidden_width(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def kv_width(self) -> int:
        """How many features all key heads have together."""
        return (self.num_heads if self.num_kv_heads is None else self.num_kv_heads) * (self.width // self.num_heads)


class Parameter(NamedTuple):
    """One parameter: its whole shape, how it is sharded, and the mean and deviation of its initial values."""

    shape: tuple[int, ...]
    spec: P
    mean: float
    deviation: float


def gpt_parameters(config: GPTConfig, axis: Axis = "tp") -> dict[str, Parameter]:
    """Every parameter of a GPT, by its name in the state.

    Split over `axis`: the embedding's vocabulary; the output features, and the bias, of query, key, value, gate and up;
    the input features of output and down. Replicated: the bias of output and down, the norms, the positions.
    """
    deviation = config.deviation
    found = {
        "embedding.weight": Parameter((config.vocab_size, config.width), P(axis), 0, deviation),
        "positions.weight": Parameter((config.context, config.width), P(), 0, deviation),
    }
    for number in range(config.num_layers):
        block = f"blocks.{number}"
        found |= _norm(f"{block}.norm_1", config)
        for name, rows in (("query", config.width), ("key", config.kv_width), ("value", config.kv_width)):
            found |= _column(f"{block}.attention.{name}", rows, config, axis)
        found |= _row(f"{block}.attention.output", config.width, config, axis)
        found |= _norm(f"{block}.norm_2", config)
        for name in ("gate", "up") if config.activation == "swiglu" else ("up",):
            found |= _column(f"{block}.mlp.{name}", config.hidden_width, config, axis)
        found |= _row(f"{block}.mlp.down", config.hidden_width, config, axis)
    return found | _norm("norm", config)


def gpt_specs(config: GPTConfig, axis: Axis = "tp") -> dict[str, P]:
    """How the parameters of a GPT are sharded: name in the state -> P."""
    return {name: parameter.spec for name, parameter in gpt_parameters(config, axis).items()}


def gpt_state(config: GPTConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """The initial weights of a GPT, whole: name in the state -> array [...] of float64.

    They are drawn from the seed alone, as `gpt_parameters` says, so they are the same in both frameworks and on every
    mesh.
    """
    return {
        name: about.mean + about.deviation * np.random.default_rng([seed, number]).standard_normal(about.shape)
        for number, (name, about) in enumerate(gpt_parameters(config).items())
    }


def gpt_layer_name(config: GPTConfig, layer: int, name: str = "") -> str:
    """The name that a parameter of one of `gpt_layers` has in the whole GPT's state: (1, "norm_1.weight") is
    "blocks.0.norm_1.weight".

    The first layer has the embedding and the positions; the last one has the norm and the embedding again. The blocks
    are in between.
    """
    return f"blocks.{layer - 1}.{name}" if 1 <= layer <= config.num_layers else name


def _column(name: str, rows: int, config: GPTConfig, axis: Axis) -> dict[str, Parameter]:
    found = {f"{name}.weight": Parameter((rows, config.width), P(axis), 0, config.deviation)}
    return found | ({f"{name}.bias": Parameter((rows,), P(axis), 0, 0)} if config.bias else {})


def _row(name: str, columns: int, config: GPTConfig, axis: Axis) -> dict[str, Parameter]:
    deviation = config.deviation / (2 * config.num_layers) ** 0.5  # it adds to the stream (Radford et al. 2019)
    found = {f"{name}.weight": Parameter((config.width, columns), P(None, axis), 0, deviation)}
    return found | ({f"{name}.bias": Parameter((config.width,), P(), 0, 0)} if config.bias else {})


def _norm(name: str, config: GPTConfig) -> dict[str, Parameter]:
    found = {f"{name}.weight": Parameter((config.width,), P(), 1, 0)}
    return found | ({f"{name}.bias": Parameter((config.width,), P(), 0, 0)} if config.norm == "layer" else {})
