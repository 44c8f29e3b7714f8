"""Self-attention whose heads are sharded over an axis of the mesh.

Heads are independent: each rank computes the scores, the softmax and the values of its own heads, and the output
projection, which is row-parallel, adds up their contributions (Shoeybi et al. 2019, section 3). A head must not be
split: part of a head would give part of each score, and the softmax of a sum is not the sum of softmaxes.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tplab.errors import one_of
from tplab.jax.comm.collectives import axis_size
from tplab.jax.layers.linear import ColumnParallelLinear, RowParallelLinear, enter
from tplab.jax.layers.parameters import Composite, Params
from tplab.jax.layers.sequence_attention import gather_attention, head_attention, ring_attention
from tplab.jax.ranks.context import this_mesh
from tplab.mesh import Axis
from tplab.models.checks import SEQUENCE_SCHEMES, SequenceScheme, check_attention_input, check_heads
from tplab.sequence import LayoutName

_OVER_RANKS = {"ring": ring_attention, "gather": gather_attention, "head": head_attention}


@dataclass(frozen=True)
class ParallelSelfAttention(Composite):
    """y = output(softmax(q k^T / sqrt(d)) v), where each rank of `axis` (R ranks) has H/R of the heads.

    x [B, S, D]   query.weight [H d/R, D]   key.weight, value.weight [K d/R, D]   output.weight [D, H d/R]   d = D/H
      ->  y [B, S, D], the same on every rank
    cost      one all_reduce forward, after output, and one backward, before q, k and v together: 2(R-1)/R of x each
    num_kv_heads   K: each key and value head serves H/K query heads next to each other (grouped-query attention,
                   Ainslie et al. 2023). R must divide K too; if K is smaller, repeat the rows of each H/K times
    causal         a token sees itself and the tokens before it
    sequence_dim   1: x and y are this rank's piece of the sequence: all_gather before, reduce_scatter after
    context_axis   the axis whose ranks share the sequence for attention too: S is then the number of tokens on each, in
                   this `layout`, and queries see the others' keys by this `scheme`: "ring" is `ring_attention` of this
                   rank's heads, and so on
    Raises ShapeError if H does not divide D, K does not divide H, or R does not divide them.
    """

    width: int
    num_heads: int
    axis: Axis
    _: KW_ONLY
    num_kv_heads: int | None = None
    bias: bool = True
    causal: bool = True
    sequence_dim: int | None = None
    context_axis: Axis | None = None
    layout: LayoutName = "zigzag"
    scheme: SequenceScheme = "ring"

    def __post_init__(self) -> None:
        one_of("scheme", self.scheme, SEQUENCE_SCHEMES)
        check_heads(self.width, self.num_heads, self._num_kv_heads, 1, "", self.sequence_dim)

    @property
    def _num_kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def parts(self) -> dict[str, Any]:
        kv_width = self._num_kv_heads * (self.width // self.num_heads)
        key_or_value = ColumnParallelLinear(self.width, kv_width, self.axis, bias=self.bias)
        return {
            "query": ColumnParallelLinear(self.width, self.width, self.axis, bias=self.bias),
            "key": key_or_value,
            "value": key_or_value,
            "output": RowParallelLinear(
                self.width, self.width, self.axis, bias=self.bias, sequence_dim=self.sequence_dim
            ),
        }

    def __call__(self, params: Params, x: Array) -> Array:
        self.check_ranks()
        check_attention_input(x.shape, self.width)
        x = enter(x, self.axis, self.sequence_dim)  # once, for query, key and value together
        parts, head_width = self.parts(), self.width // self.num_heads
        features = (parts[name].features(params[name], x) for name in ("query", "key", "value"))
        q, k, v = (y.reshape(*y.shape[:2], y.shape[2] // head_width, head_width) for y in features)  # [B, S, heads, d]
        return parts["output"](params["output"], lax.collapse(self._attended(q, k, v), 2))

    def _attended(self, q: Array, k: Array, v: Array) -> Array:
        if self.context_axis is None:
            return _attended(q, k, v, self.causal)
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # [B, heads, S, d]
        o = _OVER_RANKS[self.scheme](q, k, v, self.context_axis, layout=self.layout, causal=self.causal)
        return o.swapaxes(1, 2)

    def check_ranks(self) -> None:
        label = ",".join(this_mesh().names(self.axis))
        check_heads(self.width, self.num_heads, self._num_kv_heads, axis_size(self.axis), label, self.sequence_dim)


def _attended(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """For each query head the mean of the values, weighted by the softmax of the scores, in float32 at least."""
    batch, length, num_heads, head_width = q.shape
    q = q.reshape(batch, length, k.shape[2], num_heads // k.shape[2], head_width)  # grouped by key head
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    scores = scores * head_width**-0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    shares = jax.nn.softmax(scores, -1).astype(v.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", shares, v).reshape(batch, length, num_heads, head_width)
