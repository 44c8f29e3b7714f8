"""Data parallelism with gradients that are averaged inside the backward pass, bucket by bucket."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from tplab.data.buckets import BUCKET_BYTES, Bucket
from tplab.jax.comm.derivatives import with_backward
from tplab.jax.data.average import mean_of, plan_of
from tplab.jax.ranks.context import this_mesh, vary
from tplab.mesh import Axis

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
    leaves, structure = jax.tree.flatten(params)
    same = list(leaves)
    for bucket in plan_of(leaves, bucket_bytes):
        for index, x in zip(bucket.indices, _averaged([leaves[index] for index in bucket.indices], names, bucket)):
            same[index] = x
    return structure.unflatten(same)


def _averaged(members: list[Array], names: Names, bucket: Bucket) -> list[Array]:
    """The members as each rank's own, whose gradient becomes the mean over the ranks."""
    return with_backward(_each, _mean, members, names, bucket)


def _each(members: list[Array], names: Names, bucket: Bucket) -> list[Array]:
    return [vary(x, names) for x in members]


def _mean(grads: list[Array], axes: list[Names], names: Names, bucket: Bucket) -> list[Array]:
    return [vary(mean, along) for mean, along in zip(mean_of(bucket, grads, names), axes)]
