"""Gradients averaged over the ranks that hold copies of the parameters, and losses whose mean is over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tplab.data.gradients import Bucket, Gradient, buckets_of
from tplab.mesh import Axis
from tplab.torch.comm.collectives import Handle, all_reduce, axis_size, start
from tplab.torch.data.parameters import Key, Model, Named, check_dense, text, trainable
from tplab.torch.layers.parameters import copies_in
from tplab.torch.ranks.rank import Pending


def average_gradients(
    parameters: Model, axis: Axis, *, bucket_bytes: float | None = None, find_unused: bool = False
) -> None:
    """Make every `.grad` the mean over the ranks of `axis` (R ranks). Every rank calls this after `backward`.

    parameters     a module, `Stages`, or parameters; frozen ones are left alone
    bucket_bytes   None: one all_reduce per parameter. Otherwise gradients travel in flat buffers of at most this size,
                   one dtype each, from the last parameter to the first
    find_unused    whether a parameter may have no gradient on some ranks: ranks then first exchange which ones they
                   have used. A missing gradient counts as zeros; if no rank has used the parameter, .grad stays None

    A parameter that is cut along some of these axes, such as an expert, is the same piece only on the ranks of the
    other axes: its gradients are added up over these, and divided by R like all others. Modules know how their
    parameters are cut. In a list, deep copies of such parameters count as
    copies.

    Afterwards the gradients of a bucket are views of its buffer, and the old ones are freed.
    cost   2(R-1)/R of the gradients' bytes are sent by each rank; the fewer buckets, the fewer latencies.
           find_unused: 1 more byte per parameter, all_reduced
    The mean over ranks is the mean over the whole batch if every rank's loss is a mean over the same amount of data:
    otherwise see `tokens_per_rank`. Raises ValueError for a parameter without a gradient, TypeError for a sparse one.
    """
    named = trainable(parameters)
    buckets = plan_of(named, bucket_bytes, copies_of(parameters, axis))
    used = used_anywhere(named, axis) if find_unused else check_all_used(named)
    flights = [send_bucket(bucket, named) for bucket in buckets]
    for bucket, flight in zip(buckets, flights):
        keep_mean(bucket, named, flight.wait() if isinstance(flight, Pending) else flight, axis, used)


def copies_of(model: Model, axis: Axis, are_averaged: bool = True) -> Callable[[Tensor], Axis]:
    """The part of `axis` along which ranks hold copies of a parameter: all of it, unless it is known to be cut along
    some of the axes; () if it is cut along all of them."""
    held = list(model.values()) if isinstance(model, Mapping) else [model]
    return copies_in([module for module in held if isinstance(module, nn.Module)], axis, are_averaged)


def plan_of(named: Named, bucket_bytes: float | None, copies: Callable[[Tensor], Axis]) -> tuple[Bucket, ...]:
    """The buckets of these parameters' gradients. The last item of a bucket's kind is the axis of its copies."""
    kinds = [(p.dtype, p.device, copies(p)) for _, p in named]
    return buckets_of(
        [Gradient(p.numel(), p.element_size(), kind) for (_, p), kind in zip(named, kinds, strict=True)], bucket_bytes
    )


def send_bucket(bucket: Bucket, named: Named) -> Handle | Tensor:
    """Start the all_reduce of a bucket over its copies, or return the bucket if there are none. A missing
    gradient counts as zeros."""
    with torch.no_grad():
        gradients = []
        for index in bucket.indices:
            key, p = named[index]
            gradients.append(torch.zeros_like(p) if p.grad is None else check_dense(key, p.grad))
        # a single one needs no buffer, and keeps its shape in the trace
        flat = gradients[0] if len(gradients) == 1 else torch.cat([gradient.reshape(-1) for gradient in gradients])
        return start(all_reduce, flat, bucket.kind[-1], "mean") if bucket.kind[-1] else flat


def keep_mean(bucket: Bucket, named: Named, mean: Tensor, axis: Axis, used: set[Key]) -> None:
    """Make `.grad` of each parameter its part of the bucket's mean over `axis`: a view, so nothing is copied.

    mean   over the copies only: ranks that hold other pieces are included here
    """
    with torch.no_grad():
        num_copies, num_ranks = axis_size(bucket.kind[-1]) if bucket.kind[-1] else 1, axis_size(axis)
        if num_copies < num_ranks:
            mean = mean * (num_copies / num_ranks)
        for index, begin, size in bucket.pieces:
            key, parameter = named[index]
            if key in used:
                parameter.grad = mean.reshape(-1)[begin : begin + size].view(parameter.shape)


def check_all_used(named: Named, more: str = "") -> set[Key]:
    """Return all keys. Raises ValueError if one has no gradient on this rank; `more` is added to the message."""
    missing = [text(key) for key, parameter in named if parameter.grad is None]
    if missing:
        raise ValueError(no_gradient(missing, len(named)) + more)
    return {key for key, _ in named}


def used_anywhere(named: Named, axis: Axis) -> set[Key]:
    """The keys of parameters that have a gradient on any rank of the axis."""
    if not named:
        return set()
    here = [parameter.grad is not None for _, parameter in named]
    flags = all_reduce(torch.tensor(here, dtype=torch.uint8, device=named[0][1].device), axis, "max")
    anywhere = here if flags.is_meta else flags.tolist()  # without values, only this rank's own flags are known
    return {key for (key, _), is_used in zip(named, anywhere) if is_used}


def no_gradient(missing: Sequence[str], num_parameters: int) -> str:
    """The message for parameters without a gradient."""
    if len(missing) == num_parameters:
        return "no parameter has a gradient; call backward first"
    listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
    return (
        f"{listed}: no gradient on this rank, where {num_parameters - len(missing)} others have one; freeze what the "
        "loss never uses with requires_grad_(False), or pass find_unused=True where only some ranks use it"
    )


# --- tokens -----------------------------------------------------------------------------------------------------------


def tokens_per_rank(targets: Tensor, axis: Axis, *, ignore_index: int = -100) -> Tensor:
    """The float64 divisor of every rank's summed loss: the mean number of counted tokens over the ranks of `axis`.

        loss = cross_entropy(logits, targets, reduction="sum") / tokens_per_rank(targets, "dp")

    targets   this rank's targets, of any shape; tokens that are ignore_index do not count. To accumulate, pass the
              targets of all microbatches together: every microbatch's sum is divided by the same number

    With n_r tokens on rank r of R, and N in total, the mean over ranks is the mean over all tokens:
        1/R sum_r (sum of the losses of rank r) / (N/R) = (sum of all losses) / N
    Each rank's own mean would give the tokens of a rank with few of them more weight; with none it would be 0/0, not 0.
    cost   an all_reduce of 1 number
    """
    total = all_reduce(_is_counted(targets, ignore_index).sum(), axis)
    return total.clamp(min=1).double() / axis_size(axis)


def share_of_tokens(targets: Tensor, axis: Axis, *, ignore_index: int = -100) -> Tensor:
    """This rank's number of counted tokens over the mean number: multiply a loss that is already a mean by it.

    It is n_r / (N/R), which is 1 if all ranks have the same number. A loss that is a mean over no tokens is 0/0, and
    stays so: if a rank may have none, divide the sum by `tokens_per_rank`.
    cost   an all_reduce of 1 number
    """
    return _is_counted(targets, ignore_index).sum() / tokens_per_rank(targets, axis, ignore_index=ignore_index)


def _is_counted(targets: Tensor, ignore_index: int) -> Tensor:
    return targets.long() != ignore_index  # a byte cannot be compared with -100
