"""A loss whose mean over the ranks is the mean over all tokens, however they are spread."""

from __future__ import annotations

from torch import Tensor

from tplab.mesh import Axis
from tplab.torch.comm.collectives import all_reduce, axis_size


def tokens_per_rank(targets: Tensor, axis: Axis, *, ignore_index: int = -100) -> Tensor:
    """What every rank divides its summed loss by: the mean number of counted tokens over the ranks of `axis`.

        loss = cross_entropy(logits, targets, reduction="sum") / tokens_per_rank(targets, "dp")

    targets   this rank's targets, of any shape; tokens that are ignore_index do not count. To accumulate, pass those of
              all microbatches together: every microbatch's sum is divided by the same number

    With n_r tokens on rank r of R, and N in total, the mean over ranks is that over all tokens:
        1/R sum_r (sum of the losses of rank r) / (N/R) = (sum of all losses) / N
    Each rank's own mean would give the tokens of a rank with few of them more weight; and on a rank with none it would
    be 0/0, where this is 0.
    cost   an all_reduce of 1 number
    """
    total = all_reduce((targets != ignore_index).sum(), axis)
    return total.clamp(min=1).double() / axis_size(axis)


def share_of_tokens(targets: Tensor, axis: Axis, *, ignore_index: int = -100) -> Tensor:
    """This rank's number of counted tokens over the mean number: multiply a loss by it that is already a mean.

    It is n_r / (N/R), which is 1 where all ranks have the same number. A loss that is a mean over no tokens is 0/0, and
    stays so: where a rank may have none, divide the sum by `tokens_per_rank`.
    cost   an all_reduce of 1 number
    """
    return (targets != ignore_index).sum() / tokens_per_rank(targets, axis, ignore_index=ignore_index)
