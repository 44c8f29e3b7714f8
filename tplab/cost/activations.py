"""Tensors saved for the backward pass: those that a framework saved, and those that a layer must save.

`saved_tensors` of `tplab.torch` and `tplab.jax` lists what was saved; `activation_tensors` and `activation_bytes`
give what Korthikanti et al. 2022 (arXiv:2205.05198, section 4) count for one transformer layer, tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tplab.cost.algorithms import whole
from tplab.sharding import share


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that is kept from the forward to the backward pass.

    shape, dtype   as it was first kept
    bytes          of its storage; a storage that several tensors share is listed once
    made_by        the operation that computed it; "input" if it was passed to the function
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    made_by: str

    def __str__(self) -> str:
        return f"{self.bytes:>12,}  {self.dtype}{list(self.shape)}, made by {self.made_by}"


class SavedTensors(tuple[SavedTensor, ...]):
    """The tensors that a forward pass keeps, in order, without parameters. They print as one line each."""

    @property
    def bytes(self) -> int:
        """Bytes of all of them together."""
        return sum(tensor.bytes for tensor in self)

    def __repr__(self) -> str:
        return "\n".join((*map(str, self), f"{self.bytes:>12,}  bytes in {len(self)} tensors"))


def activation_tensors(
    sequence: int,
    batch: int,
    width: int,
    num_heads: int,
    num_ranks: int = 1,
    *,
    sequence_parallel: bool = False,
    itemsize: int = 2,
    dropout: bool = True,
    scores: bool = True,
    kv_heads: int | None = None,
    head_width: int | None = None,
    hidden: int | None = None,
    gated: bool = False,
    gathered: bool = False,
) -> dict[str, float]:
    """Bytes that each rank keeps of one transformer layer for its backward pass: one entry per kind of tensor.

    s, b, h, a: sequence, batch, width, heads; t: num_ranks; activations of `itemsize` bytes, masks of one. In 16 bit

        s b h (10 + 24/t + 5 a s / (h t))     tensor parallelism: the norms' inputs, the inputs of the two regions and
                                              the masks after them are on every rank; everything else is divided
        s b h (34 + 5 a s / h) / t            with sequence_parallel: everything is divided

    dropout   False: no masks are kept, nor the scores after dropout
    scores    False: attention computes softmax(q k^T) again in the backward pass ("selective recomputation", section 5;
              fused attention does the same, and keeps one number per row instead)
    kv_heads  key and value heads, if they are fewer than query heads; head_width: features of a head, if not h / a
    hidden    features of the MLP, if not 4 h; gated: they are a product of two (SwiGLU), whose inputs are kept (fused)
    gathered  with sequence_parallel: the inputs of the two regions are kept whole, and not gathered again

    The formulas are for as many key and value heads as query heads, and an MLP of 4 h hidden features with GeLU. As in
    the paper, small tensors (mean and deviation of a norm, 2 numbers per token), embedding and head are left out.
    Korthikanti et al. 2022, equations 1, 2 and 4.
    """
    share(num_heads, num_ranks, "num_heads is", why="heads are sharded whole")
    if sequence_parallel:
        share(sequence, num_ranks, "the sequence has length")
    token = sequence * batch * width
    heads = sequence * batch * (width // num_heads if head_width is None else head_width)
    square = num_heads * sequence * sequence * batch
    outside = num_ranks if sequence_parallel else 1
    entered = 1 if gathered else outside
    features = 4 * token if hidden is None else sequence * batch * hidden
    keys = heads * (num_heads if kv_heads is None else kv_heads)
    every = (  # name, elements, bytes of each, over how many ranks they are divided, whether they are kept
        ("input of norm 1", token, itemsize, outside, True),
        ("input of query, key, value", token, itemsize, entered, True),
        ("query", heads * num_heads, itemsize, num_ranks, True),
        ("key", keys, itemsize, num_ranks, True),
        ("value", keys, itemsize, num_ranks, True),
        ("scores after softmax", square, itemsize, num_ranks, scores),
        ("mask of the scores", square, 1, num_ranks, scores and dropout),
        ("scores after dropout", square, itemsize, num_ranks, scores and dropout),
        ("input of the output projection", heads * num_heads, itemsize, num_ranks, True),
        ("mask after attention", token, 1, outside, dropout),
        ("input of norm 2", token, itemsize, outside, True),
        ("input of up", token, itemsize, entered, True),
        ("gate", features, itemsize, num_ranks, gated),
        ("up" if gated else "input of gelu", features, itemsize, num_ranks, True),
        ("input of down", features, itemsize, num_ranks, True),
        ("mask after the MLP", token, 1, outside, dropout),
    )
    kept = {name: (elements * size, ranks) for name, elements, size, ranks, is_kept in every if is_kept}
    return {name: total / ranks if total % ranks else total // ranks for name, (total, ranks) in kept.items()}


def activation_bytes(
    sequence: int, batch: int, width: int, num_heads: int, num_ranks: int = 1, **options: Any
) -> float:
    """The sum of `activation_tensors`: in 16 bit, s b h (10 + 24/t + 5 a s / (h t)), or s b h (34 + 5 a s / h) / t."""
    return whole(sum(activation_tensors(sequence, batch, width, num_heads, num_ranks, **options).values()))
