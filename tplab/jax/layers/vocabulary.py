"""The vocabulary, sharded over an axis of the mesh: the embedding, the head tied to it, and the loss on sharded logits.

Each of R ranks has ceil(V / R) of the V vocabulary entries: rank i has those from i * ceil(V / R) on. The last ranks'
weights and logits are padded to that number, since all ranks run one program. The logits are never gathered: the loss
needs one maximum and two sums per token (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tplab.jax.comm.collectives import all_reduce, axis_index, axis_size
from tplab.jax.layers.linear import check_weight, enter, leave, linear
from tplab.jax.layers.parameters import Params, normal
from tplab.mesh import Axis
from tplab.models.checks import check_entries, check_loss, check_vocabulary
from tplab.sharding import P, cut


@dataclass(frozen=True)
class VocabParallelEmbedding:
    """A row of `weight` for each id, where each rank of `axis` (R ranks) has the rows of some vocabulary entries.

    ids [...], the same on every rank   weight [n, D], n = ceil(V/R), padded on the last ranks   ->   y [..., D]
    forward   y = all_reduce(weight[id], or zeros where another rank has the entry)   2(R-1)/R of y is sent by each rank
    backward  dweight[id] += dy on the rank that has the entry                        nothing is sent

    logits    the head with the same weights ("tied"): x [..., D] -> [..., n], this rank's entries; through copy_to, so
              the all_reduce is in its backward pass. The weight's gradient is that of both uses, and needs no sum
    sequence_dim   y, and the x of logits, are this rank's piece along that dim: reduce_scatter, all_gather
    V may be any number: `pad_vocabulary` pads the whole weight so that the ranks can share it. An id outside the
    vocabulary gives NaN, since a compiled program cannot raise. Weights are drawn from N(0, 1), as in torch's
    nn.Embedding.
    """

    vocab_size: int
    width: int
    axis: Axis
    _: KW_ONLY
    sequence_dim: int | None = None

    def __post_init__(self) -> None:
        check_vocabulary(self.vocab_size)

    @property
    def specs(self) -> Params:
        """How the parameters are sharded."""
        return {"weight": P(self.axis)}

    def init(self, key: Any) -> Params:
        """The rows of V vocabulary entries; inside a rank's program, only its own rows, padded with zeros."""
        return {"weight": normal(key, (self.vocab_size, self.width), P(self.axis), 1.0)}

    def __call__(self, params: Params, ids: Array) -> Array:
        ids = _ids(ids)
        self._check(params)
        begin, num_entries, _ = _entries_here(self.vocab_size, self.axis)
        is_here = (ids >= begin) & (ids < jnp.minimum(begin + num_entries, self.vocab_size))
        rows = jnp.where(is_here[..., None], params["weight"][jnp.where(is_here, ids - begin, 0)], 0)
        rows = jnp.where(_is_word(ids, self.vocab_size)[..., None], rows, jnp.nan)
        return leave(rows, self.axis, self.sequence_dim)

    def logits(self, params: Params, x: Array) -> Array:
        """x times the rows of this rank's entries: [..., D] -> [..., n]."""
        self._check(params)
        return linear(enter(x, self.axis, self.sequence_dim), params["weight"])

    def _check(self, params: Params) -> None:
        num_entries = len(cut(self.vocab_size, axis_size(self.axis), "ceil")[0])
        check_weight("VocabParallelEmbedding", params["weight"], (num_entries, self.width), self.axis)


def vocab_parallel_cross_entropy(
    logits: Array,
    ids: Array,
    axis: Axis,
    vocab_size: int,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Array:
    """The loss of torch.nn.functional.cross_entropy, for logits whose vocabulary is sharded over `axis` (R ranks).

    logits [..., n], this rank's entries, n = ceil(V/R)   ids [...], the same on every rank
      ->  the loss, the same on every rank: a scalar, or [...] for "none"

    With z the logits less their maximum m over all entries, e the label_smoothing and t the id:
    forward   loss = log sum_v exp z_v - (1-e) z_t - e/V sum_v z_v     averaged over the tokens that are not ignored
    backward  dlogits = softmax(logits) - (1-e) [v = t] - e/V, times dloss     nothing is sent
    cost      an all_reduce of 1 number per token (m) and one of 2 (the first sum, z_t; 3 with label smoothing), while
              gathering the logits would send (R-1)/R V per token

    No logit is too large, since exp is only taken of numbers up to 0. 16-bit logits are converted to float32, and the
    loss is then float32. Columns beyond the vocabulary, which pad the last ranks' logits, are ignored and get no
    gradient. An id outside the vocabulary gives NaN. Raises ShapeError for logits of another width.
    """
    ids = _ids(ids)
    begin, num_entries, index = _entries_here(vocab_size, axis)
    check_loss(logits.shape, ids.shape, reduction, label_smoothing)
    whose = f"each of the {axis_size(axis)} ranks of axis {axis!r} has"
    check_entries(logits.shape[-1], (num_entries,), vocab_size, whose, axis)
    is_counted = ids != ignore_index

    z = logits.astype(jnp.float32) if logits.dtype.itemsize < 4 else logits
    is_entry = index * num_entries + jnp.arange(num_entries) < vocab_size
    lowest = jnp.finfo(z.dtype).min
    largest = jnp.where(is_entry, lax.stop_gradient(z), lowest).max(-1)
    z = z - all_reduce(largest, axis, "max")[..., None]
    of_padding = jnp.where(is_entry, z, 0)  # a large logit there would make exp infinite, and its gradient NaN

    is_here = (ids >= begin) & (ids < begin + num_entries) & is_counted
    of_id = jnp.take_along_axis(of_padding, jnp.where(is_here, ids - begin, 0)[..., None], -1)[..., 0]
    parts = [jnp.where(is_entry, jnp.exp(of_padding), 0).sum(-1), jnp.where(is_here, of_id, 0)]
    parts += [of_padding.sum(-1)] if label_smoothing else []
    total, of_id, *of_all = all_reduce(jnp.stack(parts), axis)
    loss = jnp.log(total) - (1 - label_smoothing) * of_id
    if label_smoothing:
        loss = loss - label_smoothing / vocab_size * of_all[0]
    loss = jnp.where(is_counted, jnp.where(_is_word(ids, vocab_size), loss, jnp.nan), 0)
    if reduction == "none":
        return loss
    return loss.sum() / is_counted.sum() if reduction == "mean" else loss.sum()


def pad_vocabulary(weight: Any, num_ranks: int) -> Array:
    """Add rows of zeros after the last entry, until `num_ranks` ranks can share them: [V, D] -> [R ceil(V/R), D].

    No id and no logit reads them; their gradient is zero. weight[:V] removes them again.
    """
    weight = jnp.asarray(weight)
    return jnp.pad(weight, [(0, -weight.shape[0] % num_ranks), *[(0, 0)] * (weight.ndim - 1)])


def _entries_here(vocab_size: int, axis: Axis) -> tuple[Array, int, Array]:
    """(the first entry of this rank, how many entries each rank has, this rank's position)."""
    num_entries, index = len(cut(vocab_size, axis_size(axis), "ceil")[0]), axis_index(axis)
    return index * num_entries, num_entries, index


def _is_word(ids: Array, vocab_size: int) -> Array:
    return (ids >= 0) & (ids < vocab_size)


def _ids(ids: Any) -> Array:
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids are whole numbers, not {ids.dtype}; ids.astype(int) makes them so")
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids  # a byte cannot be compared with 256 or -100
