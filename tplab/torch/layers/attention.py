"""Self-attention whose heads are sharded over an axis of the mesh.

Heads are independent: each rank computes the scores, the softmax and the values of its own heads, and the row-parallel
output projection adds up their contributions (Shoeybi et al. 2019, section 3). A head must not be split: part of a head
would give part of each score, and the softmax of a sum is not the sum of softmaxes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from tplab.errors import one_of
from tplab.mesh import Axis
from tplab.models.checks import SequenceScheme, check_attention_input, check_heads
from tplab.sequence import LayoutName
from tplab.torch.layers.linear import ColumnParallelLinear, RowParallelLinear, enter
from tplab.torch.layers.parameters import Layer
from tplab.torch.layers.sequence_attention import gather_attention, head_attention, ring_attention
from tplab.torch.ranks.rank import this_rank

SCHEMES = {"ring": ring_attention, "gather": gather_attention, "head": head_attention}
"""Attention over the ranks of a context axis."""


class ParallelSelfAttention(Layer):
    """y = output(softmax(q k^T / sqrt(d)) v), where each rank of `axis` (R ranks) has H/R of the heads.

    x [B, S, D]   query.weight [H d/R, D]   key.weight, value.weight [K d/R, D]   output.weight [D, H d/R]   d = D/H
      ->  y [B, S, D], the same on every rank
    cost      one all_reduce forward, after output, and one backward, before q, k and v together: 2(R-1)/R of x each
    num_kv_heads   K: each key and value head serves H/K adjacent query heads (grouped-query attention, Ainslie et al.
                   2023). R must divide K too; if K is smaller than R, repeat the rows of each head H/K times
    causal         a token sees itself and the tokens before it
    sequence_dim   1: x and y are this rank's piece of the sequence: all_gather before, reduce_scatter after
    context_axis   the axis along which ranks also share the sequence in attention: S is then the number of tokens of
                   each rank, in this `layout`, and queries see other ranks' keys by this `scheme`: "ring" is
                   `ring_attention` of this rank's heads, and so on
    Raises ShapeError where H does not divide D, K does not divide H, or R does not divide them.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        axis: Axis,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        causal: bool = True,
        sequence_dim: int | None = None,
        context_axis: Axis | None = None,
        layout: LayoutName = "zigzag",
        scheme: SequenceScheme = "ring",
    ):
        super().__init__()
        one_of("scheme", scheme, tuple(SCHEMES))
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        place = this_rank().place(axis)
        check_heads(width, num_heads, num_kv_heads, len(place.group), place.label, sequence_dim)
        self.width, self.num_heads, self.num_kv_heads = width, num_heads, num_kv_heads
        self.axis, self.causal, self.sequence_dim = axis, causal, sequence_dim
        self.context_axis, self.scheme = context_axis, scheme
        self.layout: LayoutName = layout
        self.head_width = width // num_heads
        kv_width = num_kv_heads * self.head_width
        self.query = ColumnParallelLinear(width, width, axis, bias=bias)
        self.key = ColumnParallelLinear(width, kv_width, axis, bias=bias)
        self.value = ColumnParallelLinear(width, kv_width, axis, bias=bias)
        self.output = RowParallelLinear(width, width, axis, bias=bias, sequence_dim=sequence_dim)

    def forward(self, x: Tensor) -> Tensor:
        check_attention_input(x.shape, self.width)
        x = enter(x, self.axis, self.sequence_dim)  # once, for query, key and value together
        q, k, v = (self._heads(layer.features(x)) for layer in (self.query, self.key, self.value))
        return self.output(self._attended(q, k, v).transpose(1, 2).flatten(2))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.context_axis is not None:
            return SCHEMES[self.scheme](q, k, v, self.context_axis, layout=self.layout, causal=self.causal)
        if self.num_kv_heads < self.num_heads:
            group = self.num_heads // self.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads d] -> [B, heads, S, d]"""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
