"""Regions: the boundaries where an array that all ranks share enters divided work, and where it leaves it.

Megatron's two conjugate pairs (Shoeybi et al. 2019, section 3). The backward pass of each is the forward pass of its
partner:

    forward                                backward             JAX's type of y
    copy_to       f    y = x               all_reduce(dy)       varying
    reduce_from   g    y = all_reduce(x)   dy                   replicated
    scatter_to         y = my piece of x   all_gather(dy)       varying
    gather_from        y = all_gather(x)   my piece of dy       replicated

So JAX's types say on which side of a pair an array is. If you omit f, JAX inserts it itself.

Sequence parallelism has a third pair, which is in `comm`: the backward pass of all_gather is reduce_scatter, and vice
versa. It differs from gather_from in the use of y: all ranks use the result of `gather_from` in the same way, while
each uses the result of `all_gather` in its own way, and the gradients are added.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tplab.comm import dim_of
from tplab.jax.comm.collectives import all_reduce
from tplab.jax.comm.derivatives import with_backward
from tplab.jax.ranks.context import this_mesh, vary, varying_axes
from tplab.mesh import Axis
from tplab.sharding import share

Names = tuple[str, ...]


def copy_to(x: Any, axis: Axis) -> Array:
    """Megatron's f: x enters work that the ranks of `axis` divide, and its gradient is the sum of theirs.

    x [...], the same on every rank   ->   y = x
    forward   nothing is sent
    backward  dx = all_reduce(dy)    2(R-1)/R of x is sent by each rank
    """
    names = this_mesh().names(axis)
    already = tuple(name for name in names if name in varying_axes(x))  # equal by value, though not by type
    return vary(with_backward(_same, _summed, [x], already)[0] if already else x, names)


def reduce_from(x: Any, axis: Axis) -> Array:
    """Megatron's g: add up the results of the ranks of `axis`, and return the sum on every rank.

    x [...], each rank's part   ->   y, the same on every rank
    forward   y = all_reduce(x)    2(R-1)/R of x is sent by each rank
    backward  dx = dy              nothing is sent
    """
    return all_reduce(x, axis)


def scatter_to(x: Any, axis: Axis, dim: int = -1) -> Array:
    """Return each rank's own piece of an x that all ranks of `axis` hold.

    x [.., R n, ..], the same on every rank   ->   y [.., n, ..]: piece i on the rank at index i
    forward   nothing is sent
    backward  dx = all_gather(dy)    each rank sends (R-1)/R of x
    Raises ShapeError if R does not divide the dim.
    """
    mesh, x = this_mesh(), jnp.asarray(x)
    names, dim = mesh.names(axis), dim_of(x.shape, dim, "scatter_to")
    share(x.shape[dim], mesh.axis_size(names), f"scatter_to: dim {dim} has size", axis=names)
    if len({name in varying_axes(x) for name in names}) == 1:
        return _scattered(x, names, dim)
    for name in names:  # x is the same along all these axes, but the types may know it only for some
        x = _scattered(x, (name,), dim)
    return x


def gather_from(x: Any, axis: Axis, dim: int = -1) -> Array:
    """Join the pieces of all ranks along `dim`; every rank uses the whole in the same way.

    x [.., n, ..], each rank's piece   ->   y [.., R n, ..], the same on every rank, and JAX's types know it
    forward   y = all_gather(x)      each rank sends (R-1) pieces
    backward  dx = its piece of dy   nothing is sent
    """
    names, x = this_mesh().names(axis), jnp.asarray(x)
    return _gathered(vary(x, names), names, dim_of(x.shape, dim, "gather_from"))


def _gathered(x: Array, names: Names, dim: int) -> Array:
    """All pieces, replicated."""
    if x.shape[dim] == 0:  # XLA refuses this
        return lax.psum(x, names)
    if _CAN_GATHER_REPLICATED:
        return lax.all_gather(x, names, axis=dim, tiled=True, to="invarying")
    size, num_ranks = x.shape[dim], lax.axis_size(names)
    whole = vary(jnp.zeros((*x.shape[:dim], size * num_ranks, *x.shape[dim + 1 :]), x.dtype), tuple(varying_axes(x)))
    return lax.psum(lax.dynamic_update_slice_in_dim(whole, x, lax.axis_index(names) * size, dim), names)


_CAN_GATHER_REPLICATED = "to" in inspect.signature(lax.all_gather).parameters
"""Since jax 0.10. Earlier versions sum arrays of zeros with each piece in its place, at twice the bytes."""


def _scattered(x: Array, names: Names, dim: int) -> Array:
    return with_backward(_cut, _cut_backward, [x], names, dim)[0]


def _cut(xs: list[Array], names: Names, dim: int) -> list[Array]:
    (x,) = xs
    size = x.shape[dim] // lax.axis_size(names)
    return [lax.dynamic_slice_in_dim(vary(x, names), lax.axis_index(names) * size, size, dim)]


def _cut_backward(dys: list[Array], axes: list[Names], names: Names, dim: int) -> list[Array]:
    return [vary(_gathered(dys[0], names, dim), axes[0])]


def _same(xs: list[Array], names: Names) -> list[Array]:
    return xs


def _summed(dys: list[Array], axes: list[Names], names: Names) -> list[Array]:
    return [vary(lax.psum(dys[0], names), names)]
