"""A model as forecasts use it: its sizes, its parameters by part, and its matmuls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from tplab.errors import ShapeError, one_of
from tplab.experts import Routing
from tplab.forecast.config import sizes_of
from tplab.forecast.known import SIZES
from tplab.models.gpt import NORMS
from tplab.sharding import cut


class Part(NamedTuple):
    """The parameter counts of a part of the model, by how tensor and expert parallelism divide them.

    split     divided over the tensor-parallel ranks     copied    replicated on them
    experts   divided over the ep x etp ranks that together hold one copy of all experts: see `Plan.etp`
    """

    split: int = 0
    copied: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def on_rank(self, tp: int = 1, ep: int = 1, etp: int | None = None) -> int:
        """The number of parameters on one rank."""
        return self.split // tp + self.copied + self.experts // (ep * expert_tp(tp, ep, etp))


def expert_tp(tp: int, ep: int, etp: int | None = None) -> int:
    """The number of ranks that divide each expert; by default 1 if ranks share the experts, otherwise tp."""
    return etp or (1 if ep > 1 else tp)


_AT_LEAST = {
    0: ("experts", "shared_ffn", "positions", "norms", "window", "dense_layers", "q_rank", "kv_rank", "rope_dim"),
    1: ("layers", "hidden", "heads", "vocab", "end_norms", "kv_heads", "ffn", "head_dim", "dense_ffn", "value_dim"),
}
"""Sizes by the least that they may be."""


@dataclass(frozen=True)
class Model:
    """A decoder of transformer blocks.

    layers, hidden        L blocks on a residual stream of h features
    heads, kv_heads       query heads; key and value heads (as many if None) of head_dim features (h / heads if None)
    ffn, gated            features inside the MLP (4 h if None); gated: three matrices (SwiGLU), else two
    vocab, tied           entries; tied: the head has the embedding's weight
    experts               MLPs per layer, of which a token uses experts_per_token; 0: one MLP and no router
    groups, top_groups    the number of groups of experts, and of groups that a token uses: see `tplab.experts.Routing`
    shared_ffn            features of an MLP that every token uses in addition to its experts
    dense_layers          the number of first layers that have an MLP of dense_ffn features instead of experts
    kv_rank               features of the latent from which keys and values are computed (DeepSeek-V2's attention); 0:
                          there is none. With it: q_rank, the same for queries; rope_dim, the rotated features of
                          head_dim, shared by all key heads; value_dim, features of a value head (head_dim if None)
    positions             learned positions; 0: rotary ones, which have no parameters
    norm, bias            "rms" or "layer", which has a bias; whether linear layers, other than experts, have one
    qkv_bias, output_bias, mlp_bias, head_bias      whether only these have a bias: query, key and value; attention's
                          output projection; the MLP; the head
    qk_norm               whether query and key have a norm per head
    norms, end_norms      norms per layer; norms outside the layers: the final one, and with 2 one after the embedding
    shared_gate           whether the shared MLP has a gate of h parameters
    window                tokens that a token attends to in some layers; 0: all. Longer sequences are refused
    dropout               whether it is trained with dropout, whose masks are kept

    A layer computes attention, then the MLP. Models that compute both in parallel are counted in the same way.
    Properties of a layer describe layers with experts; `dense` is the model as if all layers were like the first ones.
    """

    _: KW_ONLY
    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = True
    vocab: int
    tied: bool = False
    head_dim: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    groups: int = 1
    top_groups: int = 1
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int | None = None
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int | None = None
    positions: int = 0
    norm: str = "rms"
    bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    end_norms: int = 1
    shared_gate: bool = False
    window: int = 0
    dropout: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        one_of("norm", self.norm, NORMS)
        for least, names in _AT_LEAST.items():
            for name in names:
                if (size := getattr(self, name)) is not None and size < least:
                    raise ShapeError(f"a model with {name}={size} is impossible; it is {least} or more")
        if self.heads % self.num_kv_heads:
            raise ShapeError(
                f"{self.heads} query heads cannot share {self.kv_heads} key and value heads equally; kv_heads must "
                "divide heads"
            )
        if self.head_dim is None and self.hidden % self.heads:
            raise ShapeError(f"heads={self.heads} does not divide hidden={self.hidden}; give head_dim, or change one")
        if self.experts or self.experts_per_token:
            _ = self.routing
        if self.dense_layers and (not self.experts or self.dense_layers >= self.layers or self.dense_ffn is None):
            few = f"dense_layers={self.dense_layers} of {self.layers} layers come before those with experts"
            raise ShapeError(f"{few}; give experts, more layers, and dense_ffn")
        if not self.kv_rank and (self.q_rank or self.rope_dim or self.value_dim):
            raise ShapeError("q_rank, rope_dim and value_dim belong to an attention with latents; give kv_rank too")
        if self.kv_rank and (self.num_kv_heads < self.heads or self.rope_dim >= self.head_width):
            those = f"kv_heads={self.kv_heads} and rope_dim={self.rope_dim} of head_dim={self.head_width}"
            raise ShapeError(f"{those} are impossible: latents make a key for each query head, and rotate a part of it")

    # --- sizes -------------------------------------------------------------------------------------------------------

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        """Features of one head of values."""
        return self.head_width if self.value_dim is None else self.value_dim

    @property
    def attention_width(self) -> int:
        """Features of all query heads together: h, in most models. If value heads have another width, the mean of this
        and the features of as many value heads."""
        return self.heads * (self.head_width + self.value_width) // 2

    @property
    def kv_width(self) -> int:
        """Features of all key heads together, or the mean of those and of the value heads."""
        return self.num_kv_heads * (self.head_width + self.value_width) // 2

    @cached_property
    def projections(self) -> Mapping[str, tuple[int, int, bool]]:
        """Attention's matrices: features in, features out, and whether tensor parallelism divides them. As in Megatron,
        it does not divide those that compute latents: their output is gathered instead of their input."""
        h, wide, key = self.hidden, self.heads * self.head_width, self.head_width - self.rope_dim
        output = {"output projection": (self.heads * self.value_width, h, True)}
        if not self.kv_rank:
            return {"query, key, value": (h, wide + 2 * self.kv_width, True)} | output
        found = {"query latent": (h, self.q_rank, False)} if self.q_rank else {}
        found |= {
            "query": (self.q_rank or h, wide, True),
            "key, value latent": (h, self.kv_rank + self.rope_dim, False),
        }
        return found | {"key, value": (self.kv_rank, self.heads * (key + self.value_width), True)} | output

    @property
    def latent_width(self) -> int:
        """Features that tensor parallelism gathers for attention: h, or those of the latents."""
        return (self.q_rank or self.hidden) + self.kv_rank + self.rope_dim

    @cached_property
    def dense(self) -> Model:
        """The model as if all layers were like the first ones; itself if they are all alike."""
        if not self.dense_layers:
            return self
        less = {"experts": 0, "experts_per_token": 0, "groups": 1, "top_groups": 1, "shared_ffn": 0, "dense_layers": 0}
        return replace(self, **less, shared_gate=False, ffn=self.dense_ffn, dense_ffn=None)

    @property
    def routing(self) -> Routing:
        """How a token's experts are chosen, as far as it determines how many copies of the token are sent."""
        return Routing(self.experts, self.experts_per_token, groups=self.groups, top_groups=self.top_groups)

    @property
    def ffn_width(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    # --- parameters --------------------------------------------------------------------------------------------------

    @cached_property
    def layer_parts(self) -> Mapping[str, Part]:
        """The parameters of one layer: attention, mlp, router and norms."""
        h, ffn, latents = self.hidden, self.ffn_width, self.q_rank + self.kv_rank
        matrices = self.projections.values()
        split, copied = (sum(a * b for a, b, is_split in matrices if is_split == which) for which in (True, False))
        if self.bias or self.qkv_bias:  # with latents, the matrices that compute them have one
            split += 0 if self.kv_rank else self.attention_width + 2 * self.kv_width
            copied += latents + self.rope_dim
        copied += latents  # their norms
        copied += (h if self.bias or self.output_bias else 0) + (2 * self.head_width if self.qk_norm else 0)
        parts = {"attention": Part(split, copied)}
        up, bias = 2 if self.gated else 1, self.bias or self.mlp_bias
        if self.experts:
            each = (up + 1) * h
            parts["mlp"] = Part(experts=self.experts * each * ffn, split=each * self.shared_ffn)
            parts["router"] = Part(copied=h * (self.experts + self.shared_gate))
        else:
            parts["mlp"] = Part((up + 1) * h * ffn + bias * up * ffn, bias * h)
        return parts | {"norms": Part(copied=self.norms * self._norm)}

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.norm == "layer" else 1)

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer, including all experts."""
        return sum(part.total for part in self.layer_parts.values())

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        first = self.dense_layers * self.dense.layer_parameters
        return first + (self.layers - self.dense_layers) * self.layer_parameters + sum(self.end_parts.values())

    @property
    def end_parts(self) -> Mapping[str, int]:
        """The parameters outside the layers: embedding, positions (and a norm after them), final norm (and the head's
        bias), head (0 if it is tied)."""
        words = self.vocab * self.hidden
        return {
            "embedding": words,
            "positions": self.positions * self.hidden + (self.end_norms - 1) * self._norm,
            "final norm": self._norm + (self.vocab if self.head_bias else 0),
            "head": 0 if self.tied else words,
        }

    @cached_property
    def active_parameters(self) -> int:
        """The parameters that a token uses: of the experts, only those chosen for it."""
        if not self.experts:
            return self.parameters
        experts = self.layer_parts["mlp"].experts
        unused = experts - experts * self.experts_per_token // self.experts
        return self.parameters - (self.layers - self.dense_layers) * unused

    def layer_on_rank(self, tp: int = 1, ep: int = 1, etp: int | None = None) -> int:
        """The parameters of one layer on one rank."""
        return sum(part.on_rank(tp, ep, etp) for part in self.layer_parts.values())

    def vocab_on_rank(self, tp: int = 1) -> int:
        """The vocabulary entries of the first of `tp` ranks; if tp does not divide the vocabulary, the last ranks have
        fewer."""
        return len(cut(self.vocab, tp, "ceil")[0])

    # --- computing ---------------------------------------------------------------------------------------------------

    def matmuls(
        self,
        tokens: int,
        keys: int,
        tp: int = 1,
        ep: int = 1,
        *,
        sequence_parallel: bool = False,
        etp: int | None = None,
        load: float = 1.0,
    ) -> dict[str, tuple[int, int, int, int]]:
        """The forward matmuls of one layer on one rank, as (m, n, k, batch): 2 m n k batch FLOPs each.

        tokens   of this rank, all sequences together       keys   how many positions each of them attends to
        ep, etp  ranks that share the experts, and ranks that divide each of them: see `Plan`
        load     of a rank's experts, as a multiple of the mean
        sequence_parallel    whether each tensor-parallel rank computes latents only for its own tokens
        Scores and values are counted for all heads, without the half that a causal mask could save. A rank's experts
        are counted with equally many tokens.
        """
        h, heads = self.hidden, self.heads // tp
        up, ffn = (2 if self.gated else 1), self.ffn_width // tp
        found = dict[str, tuple[int, int, int, int]]()
        for name, (inner, outer, is_split) in self.projections.items():
            if name == "output projection":
                found["scores"] = (tokens, keys, self.head_width, heads)
                found["values"] = (tokens, self.value_width, keys, heads)
                found[name] = (tokens, outer, inner // tp, 1)
            else:
                rows = tokens if is_split or not sequence_parallel else tokens // tp
                found[name] = (rows, outer // tp if is_split else outer, inner, 1)
        if not self.experts:
            return found | {"up": (tokens, up * ffn, h, 1), "down": (tokens, h, ffn, 1)}
        found["router"] = (tokens, self.experts, h, 1)
        etp = expert_tp(tp, ep, etp)  # of ep x etp ranks, tp have the same tokens
        ffn, rows = self.ffn_width // etp, round(load * tokens * ep * etp * self.experts_per_token)
        routed, mine = -(-rows // (tp * self.experts)), self.experts // ep
        found |= {"up": (routed, up * ffn, h, mine), "down": (routed, h, ffn, mine)}
        if self.shared_ffn:
            shared = self.shared_ffn // tp
            found |= {"shared up": (tokens, up * shared, h, 1), "shared down": (tokens, h, shared, 1)}
        return found

    def head_matmul(self, tokens: int, tp: int = 1) -> tuple[int, int, int, int]:
        """The head's matmul on one rank, as (m, n, k, batch)."""
        return tokens, self.vocab_on_rank(tp), self.hidden, 1

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward of one token, as counted for MFU: 6 N + 12 L s (heads x head_dim).

        N is the number of parameters that a token uses, and every position attends to all s. Chowdhery et al. 2022
        (arXiv:2204.02311), appendix B.
        """
        return 6 * self.active_parameters + 12 * self.layers * self.attention_width * sequence

    # --- well-known models -------------------------------------------------------------------------------------------

    @classmethod
    def find(cls, model: str | Model) -> Model:
        """A model by name (`tplab.forecast.MODELS` has them all); a Model is returned unchanged.

        "meta-llama/Llama-3.1-70B" and "Llama3_70b" are also "llama3-70b".
        """
        if isinstance(model, Model):
            return model
        known = {_plain(name): known for name, known in MODELS.items()}
        if _plain(model) not in known:
            raise ValueError(f"no model is named {model!r}; there are {', '.join(MODELS)}; or give a Model of your own")
        return known[_plain(model)]

    @classmethod
    def of_config(cls, config: Any, name: str = "") -> Model:
        """From the configuration of a Hugging Face model (or its config.json, as a dict or by its path), or from a
        `GPTConfig`.

        `tplab.forecast.config.KINDS` has every `model_type` that is read. Raises ValueError for any other, and for a
        field that has a value and is not read, by name.
        """
        return cls(**sizes_of(config, name))


def _plain(name: str) -> str:
    """The canonical form of a model's name. Llama 3.1 and 3.3 have the sizes of Llama 3."""
    plain = "".join(letter for letter in name.lower().split("/")[-1] if letter.isalnum())
    plain = plain.removeprefix("meta").removesuffix("instruct")
    return "llama3" + plain[7:] if plain.startswith(("llama31", "llama33")) else plain


MODELS: Mapping[str, Model] = MappingProxyType({name: Model(**sizes, name=name) for name, sizes in SIZES.items()})
"""Well-known models by name."""
