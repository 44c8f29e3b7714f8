"""A model as a forecast needs it: its sizes, its parameters part by part, and its matmuls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from tplab.errors import ShapeError, one_of
from tplab.forecast.config import sizes_of
from tplab.forecast.known import SIZES
from tplab.models.gpt import NORMS
from tplab.sharding import cut


class Part(NamedTuple):
    """How many numbers a part of the model has, by how tensor parallelism and expert parallelism divide them.

    split     divided over the tensor-parallel ranks     copied    on each of them
    experts   divided over the ranks that share experts, each of which is whole; if ep is 1, over tensor-parallel ranks
    """

    split: int = 0
    copied: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def on_rank(self, tp: int = 1, ep: int = 1) -> int:
        """The numbers that one rank has."""
        return self.split // tp + self.copied + self.experts // (ep if ep > 1 else tp)


@dataclass(frozen=True)
class Model:
    """A decoder of transformer blocks.

    layers, hidden        L blocks on a residual stream of h features
    heads, kv_heads       query heads; key and value heads (as many if None) of head_dim features (h / heads if None)
    ffn, gated            features inside the MLP (4 h if None); gated: three matrices (SwiGLU), else two
    vocab, tied           entries; tied: the head has the embedding's weight
    experts               MLPs per layer, of which a token goes through experts_per_token; 0: one MLP and no router
    shared_ffn            features of an MLP beside the experts, which every token goes through
    positions             learned positions; 0: rotary ones, which have no parameters
    norm, bias            "rms" or "layer", which has a bias; whether linear layers have one
    qkv_bias, output_bias, mlp_bias, head_bias      whether only these have a bias: query, key and value; attention's
                          output projection; the MLP; the head
    qk_norm               whether query and key have a norm per head
    norms, end_norms      norms of a layer; and outside of the layers: the final one, and with 2 one after the embedding
    shared_gate           whether a gate of h numbers is before the shared MLP
    window                tokens that a token attends to in some layers; 0: all. Longer sequences are refused
    dropout               whether it is trained with dropout, whose masks are kept

    A layer computes attention, and then the MLP. Models that compute both at once are counted so, too.
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
    shared_ffn: int = 0
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
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_dim", "end_norms"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ShapeError(f"a model with {name}={size} is impossible; it is 1 or more")
        for name in ("experts", "shared_ffn", "positions", "norms", "window"):
            if getattr(self, name) < 0:
                raise ShapeError(f"a model with {name}={getattr(self, name)} is impossible; it is 0 or more")
        if self.heads % self.num_kv_heads:
            raise ShapeError(
                f"{self.heads} query heads cannot share {self.kv_heads} key and value heads equally; kv_heads must "
                "divide heads"
            )
        if self.head_dim is None and self.hidden % self.heads:
            raise ShapeError(f"heads={self.heads} does not divide hidden={self.hidden}; give head_dim, or change one")
        if not 0 <= self.experts_per_token <= self.experts or bool(self.experts) != bool(self.experts_per_token):
            raise ShapeError(f"a token cannot go through {self.experts_per_token} of {self.experts} experts")

    # --- sizes -------------------------------------------------------------------------------------------------------

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """Features of all query heads together: h, in most models."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Features of all key heads together."""
        return self.num_kv_heads * self.head_width

    @property
    def ffn_width(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    # --- parameters --------------------------------------------------------------------------------------------------

    @cached_property
    def layer_parts(self) -> Mapping[str, Part]:
        """The parameters of one layer: attention, mlp, router and norms."""
        h, inner, ffn = self.hidden, self.attention_width, self.ffn_width
        qkv = inner + 2 * self.kv_width
        attention = Part(
            split=h * qkv + inner * h + (qkv if self.bias or self.qkv_bias else 0),
            copied=(h if self.bias or self.output_bias else 0) + (2 * self.head_width if self.qk_norm else 0),
        )
        parts = {"attention": attention}
        if self.experts:
            parts["mlp"] = Part(experts=self.experts * sum(self._mlp(ffn)), split=3 * h * self.shared_ffn)
            parts["router"] = Part(copied=h * (self.experts + self.shared_gate))
        else:
            split, copied = self._mlp(ffn)
            parts["mlp"] = Part(split=split, copied=copied)
        return parts | {"norms": Part(copied=self.norms * self._norm)}

    def _mlp(self, ffn: int) -> tuple[int, int]:
        """(numbers that are split, numbers that are copied) of one MLP."""
        up, bias = 2 if self.gated else 1, self.bias or self.mlp_bias
        return (up + 1) * self.hidden * ffn + (up * ffn if bias else 0), self.hidden if bias else 0

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.norm == "layer" else 1)

    @cached_property
    def layer_parameters(self) -> int:
        """Of one layer, all experts included."""
        return sum(part.total for part in self.layer_parts.values())

    @cached_property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.layer_parameters + sum(self.end_parts.values())

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
        """Those that a token meets: of the experts only the ones it goes through."""
        if not self.experts:
            return self.parameters
        experts = self.layer_parts["mlp"].experts
        return self.parameters - self.layers * (experts - experts * self.experts_per_token // self.experts)

    def layer_on_rank(self, tp: int = 1, ep: int = 1) -> int:
        """The parameters of one layer that one rank has."""
        return sum(part.on_rank(tp, ep) for part in self.layer_parts.values())

    def vocab_on_rank(self, tp: int = 1) -> int:
        """The vocabulary entries of the first of `tp` ranks: where tp does not divide the vocabulary, the last ones
        have fewer."""
        return len(cut(self.vocab, tp, "ceil")[0])

    # --- computing ---------------------------------------------------------------------------------------------------

    def matmuls(self, tokens: int, keys: int, tp: int = 1, ep: int = 1) -> dict[str, tuple[int, int, int, int]]:
        """The forward matmuls of one layer on one rank, as (m, n, k, batch): 2 m n k batch FLOPs each.

        tokens   of this rank, all sequences together       keys   how many positions each of them attends to
        ep       ranks that share the experts, each of which is whole; 1: tensor parallelism divides all of them
        Scores and values are counted for all heads, without the half that a causal mask could save. Experts are
        counted as if tokens were spread equally over them.
        """
        h, heads = self.hidden, self.heads // tp
        up, ffn = (2 if self.gated else 1), self.ffn_width // tp
        found = {
            "query, key, value": (tokens, (self.attention_width + 2 * self.kv_width) // tp, h, 1),
            "scores": (tokens, keys, self.head_width, heads),
            "values": (tokens, self.head_width, keys, heads),
            "output projection": (tokens, h, self.attention_width // tp, 1),
        }
        if not self.experts:
            return found | {"up": (tokens, up * ffn, h, 1), "down": (tokens, h, ffn, 1)}
        found["router"] = (tokens, self.experts, h, 1)
        several, ffn = (ep, self.ffn_width) if ep > 1 else (tp, ffn)  # of these ranks, tp have the same tokens
        routed, mine = -(-tokens * several * self.experts_per_token // (tp * self.experts)), self.experts // ep
        found |= {"up": (routed, up * ffn, h, mine), "down": (routed, h, ffn, mine)}
        if self.shared_ffn:
            shared = self.shared_ffn // tp
            found |= {"shared up": (tokens, up * shared, h, 1), "shared down": (tokens, h, shared, 1)}
        return found

    def head_matmul(self, tokens: int, tp: int = 1) -> tuple[int, int, int, int]:
        """The head's matmul on one rank, as (m, n, k, batch)."""
        return tokens, self.vocab_on_rank(tp), self.hidden, 1

    def flops_per_token(self, sequence: int) -> float:
        """Forward and backward of one token, as an MFU counts them: 6 N + 12 L s (heads x head_dim).

        N are the parameters that a token meets, and every position attends to all s. Chowdhery et al. 2022
        (arXiv:2204.02311), appendix B.
        """
        return 6 * self.active_parameters + 12 * self.layers * self.attention_width * sequence

    # --- well-known models -------------------------------------------------------------------------------------------

    @classmethod
    def find(cls, model: str | Model) -> Model:
        """A model by name (`tplab.forecast.MODELS` has them all); a Model is returned unchanged.

        "meta-llama/Llama-3.1-70B" and "Llama3_70b" are "llama3-70b", too.
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

        `tplab.forecast.config.KINDS` has every `model_type` that is read. Raises ValueError for another one, and for a
        field that says something and is not read: it is named.
        """
        return cls(**sizes_of(config, name))


def _plain(name: str) -> str:
    """A model's name without what people write differently. Llama 3.1 and 3.3 have the sizes of Llama 3."""
    plain = "".join(letter for letter in name.lower().split("/")[-1] if letter.isalnum())
    plain = plain.removeprefix("meta").removesuffix("instruct")
    return "llama3" + plain[7:] if plain.startswith(("llama31", "llama33")) else plain


MODELS: Mapping[str, Model] = MappingProxyType({name: Model(**sizes, name=name) for name, sizes in SIZES.items()})
"""Well-known models by name."""
