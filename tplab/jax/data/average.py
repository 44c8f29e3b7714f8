"""Gradients averaged over the ranks that hold copies of the parameters, and losses whose mean is over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tplab.data.gradients import BUCKET_BYTES, Bucket, Gradient, buckets_of
from tplab.jax.comm.collectives import all_reduce, axis_size
from tplab.jax.comm.derivatives import with_backward
from tplab.jax.ranks.context import this_mesh, vary, varying_axes
from tplab.jax.ranks.specs import spread
from tplab.mesh import Axis


def average_gradients(gradients: Any, axis: Axis, *, bucket_bytes: float | None = None) -> Any:
    """The mean of gradients over the ranks of `axis` (R ranks), the same on every rank, and JAX's types know it.

    gradients      a pytree of arrays, each rank's own: of parameters that differ along `axis` by JAX's types, which
                   `copy_to(x, axis)` makes them do outside the differentiated function
    bucket_bytes   None: one all_reduce per array. Otherwise arrays are sent in flat buffers of at most this size, one
                   dtype each, from the last to the first

    cost   2(R-1)/R of the gradients' bytes are sent by each rank; the fewer buckets, the fewer latencies
    The mean over ranks is the mean over the whole batch if every rank's loss is a mean over the same amount of data:
    otherwise see `tokens_per_rank`. Raises ValueError for gradients that JAX has already added up: those of parameters
    that are the same on every rank by their types, whose gradient is a psum.
    """
    check_own(gradients, axis)
    return _by_bucket(gradients, bucket_bytes, partial(_mean_of, axis=axis))


def check_own(gradients: Any, axis: Axis, then: str = "") -> None:
    """Raise ValueError if JAX has added up a gradient over `axis`. `then`: what to do with one that is the mean."""
    names = this_mesh().names(axis)
    along = names[0] if len(names) == 1 else names
    for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]:
        same = [name for name in names if name not in varying_axes(gradient)]
        if same:
            raise ValueError(
                f"the gradient{named(path)} is the same on every rank of {', '.join(map(repr, same))}: JAX has added "
                "up the ranks' parts, because the parameter is the same on all of them. Differentiate the mean of the "
                f"losses, all_reduce(loss, {along!r}, 'mean'), and it is the mean already{then}; or make the parameter "
                f"each rank's own first, with copy_to(parameter, {along!r}), outside of what is differentiated"
            )


def check_reduced(gradients: Any, axis: Axis, specs: Any = None) -> None:
    """Raise ValueError if a gradient differs along `axis` by JAX's types, and specs do not say that it is cut."""
    names, leaves = this_mesh().names(axis), jax.tree_util.tree_flatten_with_path(gradients)[0]
    for (path, gradient), spec in zip(leaves, spread(specs, gradients, "specs"), strict=True):
        differs = [name for name in names if name in varying_axes(gradient) and name not in spec.axis_names]
        if differs:
            raise ValueError(
                f"the gradient{named(path)} differs along {', '.join(map(repr, differs))} by JAX's types, and "
                "is_reduced says that it has been combined there; combine it first (`average_gradients`), or leave "
                "is_reduced out"
            )


def named(path: Any) -> str:
    """The name of a gradient in a pytree, for a message: " ['w']"; "" if it is the only one."""
    name = jax.tree_util.keystr(path)
    return name and f" {name}"


def _by_bucket(arrays: Any, bucket_bytes: float | None, function: Callable[..., Sequence[Array]]) -> Any:
    """A pytree of what `function(arrays of a bucket, bucket)` returns for each bucket."""
    leaves, structure = jax.tree.flatten(arrays)
    kinds = [(str(x.dtype), tuple(sorted(varying_axes(x)))) for x in leaves]
    found, each = list(leaves), [Gradient(x.size, x.dtype.itemsize, kind) for x, kind in zip(leaves, kinds)]
    for bucket in buckets_of(each, bucket_bytes):
        for index, x in zip(bucket.indices, function([leaves[index] for index in bucket.indices], bucket)):
            found[index] = x
    return structure.unflatten(found)


def _mean_of(members: Sequence[Array], bucket: Bucket, axis: Axis) -> list[Array]:
    """The means over the axis of a bucket's arrays, which are in the order of its pieces."""
    if len(members) == 1:  # a single one needs no buffer, and keeps its shape in the trace
        return [all_reduce(members[0], axis, "mean")]
    mean = all_reduce(jnp.concatenate([x.reshape(-1) for x in members]), axis, "mean")
    return [mean[p.begin : p.begin + p.size].reshape(x.shape) for p, x in zip(bucket.pieces, members)]


# --- tokens -----------------------------------------------------------------------------------------------------------


def tokens_per_rank(targets: Array, axis: Axis, *, ignore_index: int = -100) -> Array:
    """The divisor of every rank's summed loss: the mean number of counted tokens over the ranks of `axis`.

        loss = cross_entropy(logits, targets).sum() / tokens_per_rank(targets, "dp")

    targets   this rank's targets, of any shape; tokens that are ignore_index do not count. To accumulate, pass those of
              all microbatches together: every microbatch's sum is divided by the same number

    With n_r tokens on rank r of R, and N in total, the mean over ranks is that over all tokens:
        1/R sum_r (sum of the losses of rank r) / (N/R) = (sum of all losses) / N
    Each rank's own mean would give more weight to the tokens of a rank with few of them; and on a rank with none it
    would be 0/0, where this is 0.
    cost   an all_reduce of 1 number
    """
    total = all_reduce(_is_counted(targets, ignore_index).sum(), axis)
    return jnp.maximum(total, 1) / axis_size(axis)


def share_of_tokens(targets: Array, axis: Axis, *, ignore_index: int = -100) -> Array:
    """This rank's number of counted tokens over the mean number: the factor for a loss that is already a mean.

    It is n_r / (N/R), which is 1 if all ranks have the same number. A loss that is a mean over no tokens is 0/0, and
    stays so: if a rank may have none, divide the sum by `tokens_per_rank`.
    cost   an all_reduce of 1 number
    """
    return _is_counted(targets, ignore_index).sum() / tokens_per_rank(targets, axis, ignore_index=ignore_index)


def _is_counted(targets: Array, ignore_index: int) -> Array:
    return targets.astype(int) != ignore_index  # a byte cannot be compared with -100


# --- inside the backward pass -----------------------------------------------------------------------------------------


Names = tuple[str, ...]


def data_parallel(params: Any, axis: Axis, *, bucket_bytes: float | None = BUCKET_BYTES) -> Any:
    """The same parameters, but their gradient becomes the mean over the ranks of `axis` (R ranks).

        def loss(params, x, y):
            params = data_parallel(params, "dp")
            return cross_entropy(model(params, x), y)       # of this rank's part of the batch

        grads = jax.grad(loss)(params, x, y)                # the mean over the ranks, the same on all of them

    params         a pytree of arrays
    bucket_bytes   the size limit of a bucket; buckets are filled from the last array to the first; None: one per array

    forward   nothing is sent
    backward  one all_reduce per bucket, which depends only on its own gradients: XLA may overlap it with the rest of
              the backward pass. 2(R-1)/R of the gradients' bytes are sent by each rank
    If several operations could run, the trace keeps the program's order, in which packing comes last. If you call this
    on each layer's parameters where the layer uses them, buckets are sent during the backward pass in the trace too.
    Without it, JAX itself adds the gradients up, one psum per array, because the parameters are the same on every rank
    by their types and the data is not. To accumulate, call it on the parameters of the function that is differentiated
    over all microbatches: then gradients are sent once.
    """
    names = this_mesh().names(axis)
    return _by_bucket(params, bucket_bytes, lambda members, bucket: with_backward(_each, _mean, members, names, bucket))


def _each(members: list[Array], names: Names, bucket: Bucket) -> list[Array]:
    """The members as each rank's own, whose gradient becomes the mean over the ranks."""
    return [vary(x, names) for x in members]


def _mean(grads: list[Array], axes: list[Names], names: Names, bucket: Bucket) -> list[Array]:
    return [vary(mean, along) for mean, along in zip(_mean_of(grads, bucket, names), axes)]
