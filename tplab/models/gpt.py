"""A GPT, in any framework: its sizes, how its parameters are sharded, and the layers that it is made of."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tplab.errors import ShapeError, one_of
from tplab.experts.routing import BALANCE, Routing
from tplab.mesh import Axis
from tplab.models.checks import ACTIVATIONS, LayoutName, SequenceScheme
from tplab.sharding import P

NORMS = ("layer", "rms")
IGNORED = -100
"""The target that losses ignore, as in torch."""
ROUTER_BIAS = "router.bias"
"""The ending of the names of biases that are updated by the sign of their gradient. Gradient norms exclude them."""


@dataclass(frozen=True)
class GPTExperts:
    """The mixture of experts that blocks of a GPT have instead of their MLP.

    routing   how many experts there are, how many of them a token goes through, and how they are chosen
    hidden    H, the features of each expert
    blocks    the numbers of the blocks that have experts; None: all of them
    balance   the factor of the balance loss of each of these blocks; 0: there is none
    over      the tokens over which it balances (`tplab.experts.routing`): "sequence", each sequence by itself, is the
              same loss on every mesh; "microbatch", those of a data-parallel rank, and "global", those of all of them,
              are the same if a rank's microbatches have the same sequences, since choices are counted in each
    shared    features of an MLP without biases that every token uses in addition to its experts; 0: there is none
    bias_rate   how far `train` moves the bias of an expert in a step: up if fewer choices than the mean fell on it, and
              down if more, as `balanced_bias` does. The bias selects and does not weight; 0: there is none

    With a capacity in the routing, the choices that a rank drops depend on its tokens, and so on the mesh.
    """

    routing: Routing
    hidden: int
    _: KW_ONLY
    blocks: tuple[int, ...] | None = None
    balance: float = 0.01
    over: str = "sequence"
    shared: int = 0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        one_of("over", self.over, BALANCE)
        for name in ("shared", "bias_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


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
    experts        of some or all blocks, instead of an MLP; None: every block has an MLP
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
    experts: GPTExperts | None = None

    def __post_init__(self) -> None:
        one_of("norm", self.norm, NORMS)
        one_of("activation", self.activation, ACTIVATIONS)
        blocks = () if self.experts is None or self.experts.blocks is None else self.experts.blocks
        if not set(blocks) <= set(range(self.num_layers)):
            raise ShapeError(f"blocks {blocks} have experts, and there are blocks 0 to {self.num_layers - 1}")

    @property
    def hidden_width(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def kv_width(self) -> int:
        """How many features all key heads have together."""
        return (self.num_heads if self.num_kv_heads is None else self.num_kv_heads) * (self.width // self.num_heads)

    def experts_in(self, block: int) -> GPTExperts | None:
        """The experts of a block; None if it has an MLP."""
        experts = self.experts
        return experts if experts is not None and (experts.blocks is None or block in experts.blocks) else None

    def first_like(self, block: int) -> int:
        """The first block of the same kind as this one: with experts, or with an MLP."""
        return next(i for i in range(self.num_layers) if self.experts_in(i) == self.experts_in(block))


class Parameter(NamedTuple):
    """One parameter: its whole shape, how it is sharded, and the mean and deviation of its initial values."""

    shape: tuple[int, ...]
    spec: P
    mean: float
    deviation: float


def gpt_parameters(config: GPTConfig, axis: Axis = "tp", expert_axis: Axis = "ep") -> dict[str, Parameter]:
    """Every parameter of a GPT, by its name in the state.

    Split over `axis`: the embedding's vocabulary; the output features, and the bias, of query, key, value, gate and up;
    the input features of output and down. Replicated: the bias of output and down, the norms, the positions.
    Experts [E, H, D] are split over `expert_axis` too, and have no biases; their router [E, D] is replicated. The
    gradient of its bias [E] is E times how many more choices than the mean fall on each expert.
    """
    deviation, plain = config.deviation, replace(config, bias=False)
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
        columns, experts = ("gate", "up") if config.activation == "swiglu" else ("up",), config.experts_in(number)
        if experts is None:
            for name in columns:
                found |= _column(f"{block}.mlp.{name}", config.hidden_width, config, axis)
            found |= _row(f"{block}.mlp.down", config.hidden_width, config, axis)
            continue
        count, hidden = experts.routing.experts, experts.hidden
        found[f"{block}.mlp.router.weight"] = Parameter((count, config.width), P(), 0, deviation)
        if experts.bias_rate:
            found[f"{block}.mlp.{ROUTER_BIAS}"] = Parameter((count,), P(), 0, 0)
        for name in columns:
            spec = P(expert_axis, axis)
            found[f"{block}.mlp.experts.{name}"] = Parameter((count, hidden, config.width), spec, 0, deviation)
        spec = P(expert_axis, None, axis)
        found[f"{block}.mlp.experts.down"] = Parameter((count, config.width, hidden), spec, 0, _into_stream(config))
        if experts.shared:
            for name in columns:
                found |= _column(f"{block}.mlp.shared.{name}", experts.shared, plain, axis)
            found |= _row(f"{block}.mlp.shared.down", experts.shared, plain, axis)
    return found | _norm("norm", config)


def gpt_specs(config: GPTConfig, axis: Axis = "tp", expert_axis: Axis = "ep") -> dict[str, P]:
    """How the parameters of a GPT are sharded: name in the state -> P."""
    return {name: parameter.spec for name, parameter in gpt_parameters(config, axis, expert_axis).items()}


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
    found = {f"{name}.weight": Parameter((config.width, columns), P(None, axis), 0, _into_stream(config))}
    return found | ({f"{name}.bias": Parameter((config.width,), P(), 0, 0)} if config.bias else {})


def _into_stream(config: GPTConfig) -> float:
    """The deviation of a layer that adds to the stream (Radford et al. 2019)."""
    return config.deviation / (2 * config.num_layers) ** 0.5


def _norm(name: str, config: GPTConfig) -> dict[str, Parameter]:
    found = {f"{name}.weight": Parameter((config.width,), P(), 1, 0)}
    return found | ({f"{name}.bias": Parameter((config.width,), P(), 0, 0)} if config.norm == "layer" else {})


# --- its layers -------------------------------------------------------------------------------------------------------


class Kinds(NamedTuple):
    """The layers of a framework that a GPT is made of."""

    embedding: Any
    layer_norm: Any
    rms_norm: Any
    attention: Any
    mlp: Any
    experts: Any


@dataclass(frozen=True)
class Parts:
    """A GPT, or one of its layers: its configuration, and the axes over which its layers are sharded.

    The arguments are those of GPT. A framework's own Parts have its `kinds`, of which the methods make layers.
    """

    config: GPTConfig
    axis: Axis = "tp"
    _: KW_ONLY
    sequence_parallel: bool = False
    data_axis: Axis | None = None
    context_axis: Axis | None = None
    layout: LayoutName = "zigzag"
    scheme: SequenceScheme = "ring"
    expert_axis: Axis = "ep"
    dispatch: str = "all_to_all"
    kinds: ClassVar[Kinds]

    @property
    def sequence_axis(self) -> Axis | None:
        """The axis whose ranks have parts of the sequence between the layers."""
        return self.axis if self.sequence_parallel else None

    @property
    def varies_along(self) -> Axis | None:
        """The axes along which ranks have different tokens, and so draw different dropout masks."""
        return _names(self.data_axis, self.context_axis, self.sequence_axis)

    def counted_over(self, over: str) -> dict[str, Axis | None]:
        """The axis argument of `balance_loss`: the ranks whose tokens it counts together."""
        found = self.context_axis, self.sequence_axis
        if over == "global":
            return {"axis": _names(self.data_axis, self.expert_axis, *found)}
        return {"sequence_axis": _names(*found)}

    def make_embedding(self) -> Any:
        config = self.config
        return self.kinds.embedding(config.vocab_size, config.width, self.axis, sequence_dim=self._sequence_dim)

    def make_norm(self) -> Any:
        kind = self.kinds.layer_norm if self.config.norm == "layer" else self.kinds.rms_norm
        return kind(self.config.width, sequence_axis=self.sequence_axis)

    def make_attention(self) -> Any:
        config = self.config
        return self.kinds.attention(
            config.width,
            config.num_heads,
            self.axis,
            num_kv_heads=config.num_kv_heads,
            bias=config.bias,
            sequence_dim=self._sequence_dim,
            context_axis=self.context_axis,
            layout=self.layout,
            scheme=self.scheme,
        )

    def make_mlp(self, shared: int = 0) -> Any:
        """The MLP of a block; or that of so many features which all tokens use beside their experts."""
        config, hidden = self.config, shared or self.config.hidden_width
        how = {"activation": config.activation, "bias": config.bias and not shared, "sequence_dim": self._sequence_dim}
        return self.kinds.mlp(config.width, hidden, self.axis, **how)

    def make_experts(self, about: GPTExperts) -> Any:
        return self.kinds.experts(
            self.config.width,
            about.hidden,
            about.routing,
            self.expert_axis,
            activation=self.config.activation,
            dispatch=self.dispatch,
            tensor_axis=self.axis,
            same_tokens=not self.sequence_parallel,
        )

    @property
    def _sequence_dim(self) -> int | None:
        return 1 if self.sequence_parallel else None


def beside(x: Any, *balance: Any) -> Any:
    """x, or a tuple of x and the balance losses if there are any."""
    return (x, *balance) if balance else x


def _names(*axes: Axis | None) -> Axis | None:
    """The names of all these axes, each once; None if there are none."""
    names = (name for axis in axes if axis for name in ((axis,) if isinstance(axis, str) else axis))
    return tuple(dict.fromkeys(names)) or None
