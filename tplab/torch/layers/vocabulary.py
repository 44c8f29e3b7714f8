"""The vocabulary, sharded over an axis of the mesh: the embedding, the tied head, and the loss on sharded logits.

Of V vocabulary entries each of R ranks has ceil(V / R), the last ranks fewer: rank i has those from i * ceil(V / R) on.
The logits are never gathered: the loss needs one maximum and two sums per token (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tplab.mesh import Axis
from tplab.models.checks import check_entries, check_loss, check_vocabulary
from tplab.sharding import P, cut
from tplab.torch.comm.collectives import all_reduce
from tplab.torch.layers.linear import enter, leave
from tplab.torch.layers.parameters import Layer, drawn_normal, note_cuts
from tplab.torch.ranks.rank import this_rank


class VocabParallelEmbedding(Layer):
    """A row of `weight` for each id, where each rank of `axis` (R ranks) has the rows of some vocabulary entries.

    ids [...], the same on every rank   weight [n, D], n = ceil(V/R), fewer on the last ranks   ->   y [..., D]
    forward   y = all_reduce(weight[id], or zeros where another rank has the entry)   2(R-1)/R of y is sent by each rank
    backward  dweight[id] += dy on the rank that has the entry                        nothing is sent

    logits    the head with the same weights ("tied"): x [..., D] -> [..., n], this rank's entries; through copy_to, so
              its all_reduce is in the backward pass. The weight's gradient covers both uses, and needs no sum
    sequence_dim   y, and the x of logits, are this rank's piece along that dim: reduce_scatter, all_gather
    V may be any number. Raises IndexError for an id outside the vocabulary. Weights are drawn from N(0, 1), as in
    nn.Embedding.
    """

    def __init__(self, vocab_size: int, width: int, axis: Axis, *, sequence_dim: int | None = None):
        super().__init__()
        self.vocab_size, self.width, self.axis, self.sequence_dim = vocab_size, width, axis, sequence_dim
        check_vocabulary(vocab_size)
        self.weight = nn.Parameter(drawn_normal((vocab_size, width), P(axis), 1.0))
        note_cuts(self, axis, "weight")

    def forward(self, ids: Tensor) -> Tensor:
        begin, num_entries = entries_here(self.vocab_size, self.axis)
        _check_ids(ids, self.vocab_size)
        is_here = (ids >= begin) & (ids < begin + num_entries)
        if num_entries == 0:
            rows = self.weight.new_zeros(*ids.shape, self.width) + self.weight.sum()  # of no rows: it keeps the graph
        else:
            rows = F.embedding(torch.where(is_here, ids - begin, 0), self.weight).masked_fill(~is_here.unsqueeze(-1), 0)
        return leave(rows, self.axis, self.sequence_dim)

    def logits(self, x: Tensor) -> Tensor:
        """x times the rows of this rank's entries: [..., D] -> [..., n]."""
        return enter(x, self.axis, self.sequence_dim) @ self.weight.T


def vocab_parallel_cross_entropy(
    logits: Tensor,
    ids: Tensor,
    axis: Axis,
    vocab_size: int,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of torch.nn.functional.cross_entropy, of logits whose vocabulary is spread over `axis` (R ranks).

    logits [..., n], this rank's entries: ceil(V/R), fewer on the last ranks   ids [...], the same on every rank
      ->  the loss, the same on every rank: a scalar, or [...] for "none"

    With z the logits less their maximum m over all entries, e the label_smoothing and t the id:
    forward   loss = log sum_v exp z_v - (1-e) z_t - e/V sum_v z_v     averaged over the tokens that are not ignored
    backward  dlogits = softmax(logits) - (1-e) [v = t] - e/V, times dloss     nothing is sent
    cost      an all_reduce of 1 number per token (m) and one of 2 (the first sum, z_t; 3 with label smoothing), where
              gathering the logits would send (R-1)/R V per token

    No logit is too large, because exp is only taken of numbers up to 0. 16-bit logits are converted to float32, as is
    the loss. Columns beyond the vocabulary, which pad the last ranks' logits, are ignored and get no gradient. Raises
    IndexError for an id outside the vocabulary, ShapeError for logits of another width.
    """
    begin, num_entries = entries_here(vocab_size, axis)
    _check_whole(ids)
    check_loss(logits.shape, ids.shape, reduction, label_smoothing)
    _check_entries(logits.shape[-1], vocab_size, axis)
    is_counted = ids != ignore_index
    _check_ids(ids, vocab_size, is_counted)

    z = logits[..., :num_entries]
    z = z.float() if z.dtype.itemsize < 4 else z
    lowest = torch.finfo(z.dtype).min
    largest = z.detach().amax(-1) if num_entries else z.new_full(ids.shape, lowest)
    z = z - all_reduce(largest, axis, "max").unsqueeze(-1)

    is_here = (ids >= begin) & (ids < begin + num_entries) & is_counted
    if num_entries:
        of_id = z.gather(-1, torch.where(is_here, ids - begin, 0).unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0)
    else:
        of_id = z.sum(-1)
    parts = [z.exp().sum(-1), of_id] + ([z.sum(-1)] if label_smoothing else [])
    total, of_id, *of_all = all_reduce(torch.stack(parts), axis).unbind()
    loss = total.log() - (1 - label_smoothing) * of_id
    if label_smoothing:
        loss = loss - label_smoothing / vocab_size * of_all[0]
    loss = loss.masked_fill(~is_counted, 0)
    if reduction == "none":
        return loss
    return loss.sum() / is_counted.sum() if reduction == "mean" else loss.sum()


def entries_here(vocab_size: int, axis: Axis) -> tuple[int, int]:
    """The first entry of this rank, and how many entries it has: ceil(V / R), fewer on the last ranks."""
    place = this_rank().place(axis)
    entries = cut(vocab_size, len(place.group), "ceil")[place.index]
    return entries.start, len(entries)


def _check_whole(ids: Tensor) -> None:
    if ids.is_floating_point() or ids.dtype is torch.bool:
        raise TypeError(f"ids are whole numbers, not {ids.dtype}; ids.long() makes them so")


def _check_ids(ids: Tensor, vocab_size: int, is_counted: Tensor | None = None) -> None:
    _check_whole(ids)
    if ids.is_meta:
        return
    ids = ids if is_counted is None else ids[is_counted]
    if ids.numel() == 0:
        return
    lowest, highest = (int(extreme) for extreme in torch.aminmax(ids))
    if lowest < 0 or highest >= vocab_size:
        raise IndexError(
            f"ids run from {lowest} to {highest}, but a vocabulary of {vocab_size} has 0 to {vocab_size - 1}; "
            "make vocab_size larger, or give the loss an ignore_index for tokens that do not count"
        )


def _check_entries(num_columns: int, vocab_size: int, axis: Axis) -> None:
    place = this_rank().place(axis)
    entries = cut(vocab_size, len(place.group), "ceil")
    whose = f"rank {place.index} of the {len(place.group)} of axis {place.label!r} has"
    check_entries(num_columns, (len(entries[place.index]), len(entries[0])), vocab_size, whose, axis)
