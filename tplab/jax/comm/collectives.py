"""Collectives over an axis of the mesh: what ranks send each other.

They are XLA's own, and can be used in any `jax.shard_map`. `start(op, x, ...)` begins one and returns a handle, as in
torch. But the compiler, not the program, decides what overlaps, and it only considers data dependencies.

All are differentiable, by JAX's convention for `shard_map`. The results of `all_reduce` and `broadcast` are
*replicated*: every rank holds the same array and, in the backward pass, the same gradient of it. The other results are
*varying*: each rank's gradient is the contribution of its own use of the array, and contributions are added. JAX tracks
this in its types, and so knows which results `out_specs` may declare the same on every rank.

    op              y on the rank at index i                 backward: dx on the rank at index i
    all_reduce      sum_j x_j                                dy                          (mean: dy / R)
    all_gather      x_0 | x_1 | ... | x_(R-1)                reduce_scatter(dy)
    reduce_scatter  piece i of sum_j x_j                     all_gather(dy)              (mean: / R)
    all_to_all      piece i of x_0 | piece i of x_1 | ...    all_to_all(dy), dims exchanged
    broadcast       x_root                                   dy on the root, zeros elsewhere
    reduce          sum_j x_j on the root, zeros elsewhere   broadcast(dy)               (mean: / R)
    gather          x_0 | x_1 | ... on the root, else zeros  scatter(dy)
    scatter         piece i of x_root                        gather(dy)
    ppermute        x_j where (j, i) is a pair, else zeros   ppermute(dy) with the pairs reversed
    ring_shift      x_(i - shift)                            ring_shift(dy, -shift)

Unlike torch's, these take the same shape on every rank: the program is compiled once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tplab.comm import check_pairs, check_reduction, dim_of, pairs_of, position_of, whole_number
from tplab.jax.comm.derivatives import Differentiable
from tplab.jax.ranks.context import this_mesh, vary
from tplab.mesh import Axis
from tplab.sharding import share


class Handle(NamedTuple):
    """A collective that has been started."""

    result: Any

    def wait(self) -> Any:
        """This rank's result. A second call returns the same."""
        return self.result


class _Place(NamedTuple):
    """An axis of the mesh that is being traced: its names, and the ranks along it in the group of rank 0."""

    names: tuple[str, ...]
    group: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.group)

    @property
    def label(self) -> str:
        return ",".join(self.names)


def axis_index(axis: Axis) -> Array:
    """The position of this rank along `axis`, from 0, as an array whose value is known only at run time."""
    return lax.axis_index(_place(axis).names)


def axis_size(axis: Axis) -> int:
    """The number of ranks along `axis`."""
    return _place(axis).num_ranks


def start(op: Callable[..., Any], x: Any, /, *args: Any, **kwargs: Any) -> Handle:
    """Begin a collective without waiting for it: `h = start(ring_shift, x, "tp")`, then `y = h.wait()`.

    `op` is any collective of this module. XLA overlaps it with whatever does not need its result, whether or not that
    is between the two lines.
    """
    if begin := getattr(op, "begin", None):  # it sends several messages
        return begin(x, *args, **kwargs)
    if op not in _COLLECTIVES:
        raise TypeError(f"start needs a collective, as in start(ring_shift, x, 'tp'), not {op!r}")
    return Handle(op(x, *args, **kwargs))


def all_reduce(x: Any, axis: Axis, op: str = "sum") -> Array:
    """Combine what every rank of `axis` holds: `op` is sum, mean, max or min, element by element.

    x [...]   ->   y [...], the same on every rank
    ring      2(R-1)/R of x is sent by each rank, in 2(R-1) hops
    backward  sum: dx = dy; mean: dy / R; max, min: dy to the ranks that hold the extreme, shared between equals
    Raises TypeError for the mean of whole numbers and the extreme of complex ones. A sum of booleans is "any".
    """
    place, x = _place(axis), _array("all_reduce", x)
    op = _reduction("all_reduce", x, op)
    x = vary(x, place.names)
    if op in ("max", "min"):
        return _extremes[op](x, axes=place.names)
    return lax.psum(x, place.names) if op == "sum" else lax.pmean(x, place.names)


def all_gather(x: Any, axis: Axis, dim: int = 0) -> Array:
    """Concatenate what every rank of `axis` holds along `dim`.

    x [.., n, ..]   ->   y [.., R n, ..], the same values on every rank, though JAX's types do not know it
    ring      each rank sends (R-1) pieces, in R-1 hops
    backward  dx = reduce_scatter(dy)
    """
    place, x = _place(axis), _array("all_gather", x)
    dim = dim_of(x.shape, dim, "all_gather")
    x = vary(x, place.names)
    if x.shape[dim] == 0:  # XLA refuses this
        return x
    return lax.all_gather(x, place.names, axis=dim, tiled=True)


def reduce_scatter(x: Any, axis: Axis, dim: int = 0, op: str = "sum") -> Array:
    """Combine what every rank of `axis` holds; each rank keeps one piece along `dim`.

    x [.., R n, ..]   ->   y [.., n, ..]: piece i on the rank at index i
    ring      each rank sends (R-1)/R of x, in R-1 hops
    backward  dx = all_gather(dy)   (mean: / R; max, min: to the ranks that hold the extreme)
    Raises ShapeError if R does not divide the dim; TypeError as all_reduce does.
    """
    place, x = _place(axis), _array("reduce_scatter", x)
    dim = dim_of(x.shape, dim, "reduce_scatter")
    op = _reduction("reduce_scatter", x, op)
    _check_divides("reduce_scatter", x, dim, place)
    x = vary(x, place.names)
    if x.shape[dim] == 0:  # XLA refuses this
        return x
    if op in ("max", "min"):  # XLA can add while it scatters, but JAX has no name for anything else
        pieces = lax.all_to_all(x, place.names, dim, dim, tiled=True)
        size = x.shape[dim] // place.num_ranks
        pieces = pieces.reshape(*x.shape[:dim], place.num_ranks, size, *x.shape[dim + 1 :])
        return jnp.max(pieces, dim) if op == "max" else jnp.min(pieces, dim)
    total = lax.psum_scatter(x, place.names, scatter_dimension=dim, tiled=True)
    return total if op == "sum" else total / place.num_ranks


def all_to_all(x: Any, axis: Axis, split_dim: int = 0, concat_dim: int = 0) -> Array:
    """Cut x into one piece per rank along `split_dim`, give piece i to the rank at index i, join along `concat_dim`.

    x [.., R n, .., m, ..]   ->   y [.., n, .., R m, ..]
    cost      each rank sends (R-1)/R of x
    backward  dx = all_to_all(dy), dims exchanged
    Raises ShapeError if R does not divide `split_dim`.
    """
    place, x = _place(axis), _array("all_to_all", x)
    split_dim, concat_dim = dim_of(x.shape, split_dim, "all_to_all"), dim_of(x.shape, concat_dim, "all_to_all")
    _check_divides("all_to_all", x, split_dim, place)
    return lax.all_to_all(vary(x, place.names), place.names, split_dim, concat_dim, tiled=True)


def broadcast(x: Any, axis: Axis, root: int = 0) -> Array:
    """Give every rank of `axis` the x of the rank at index `root`; the others' x only gives the shape.

    x [...]   ->   y [...] = x of the root
    cost      that of all_reduce: JAX has no broadcast, so zeros are added to the root's x
    backward  dx = dy on the root, zeros elsewhere
    """
    place, x = _place(axis), _array("broadcast", x)
    root = position_of("broadcast", root, place.num_ranks, place.label)
    kept = _on_root(x, place, root)
    with _named(root, "broadcast"):
        return lax.psum(kept, place.names).astype(x.dtype)


def reduce(x: Any, axis: Axis, root: int = 0, op: str = "sum") -> Array:
    """Combine what every rank of `axis` holds, as `all_reduce` does, for the one at index `root`.

    x [...]   ->   y [...] on the root, zeros elsewhere
    cost      that of all_reduce: JAX has no reduce, so the others receive the result too, and discard it
    backward  dx = broadcast(dy)   (mean: / R; max, min: to the ranks that hold the extreme, shared between equals)
    Raises MeshError if the axis has no such position; TypeError as all_reduce does.
    """
    place, x = _place(axis), _array("reduce", x)
    root, op = position_of("reduce", root, place.num_ranks, place.label), _reduction("reduce", x, op)
    x = vary(x, place.names)
    with _named(root, "reduce"):
        total = all_reduce(x, axis, op)
    with _named(root, "broadcast"):  # the backward pass of reduce
        total = vary(total, place.names)
    return _on_root(total, place, root)


def gather(x: Any, axis: Axis, root: int = 0, dim: int = 0) -> Array:
    """Concatenate what every rank of `axis` holds along `dim`, for the one at index `root`.

    x [.., n, ..]   ->   y [.., R n, ..] on the root, zeros elsewhere
    cost      that of all_gather: JAX has no gather, so the others receive the pieces too, and discard them
    backward  dx = scatter(dy)
    Raises MeshError if the axis has no such position.
    """
    place, x = _place(axis), _array("gather", x)
    root, dim = position_of("gather", root, place.num_ranks, place.label), dim_of(x.shape, dim, "gather")
    with _named(root, "gather", "scatter"):
        whole = all_gather(x, axis, dim)
    return _on_root(whole, place, root)


def scatter(x: Any, axis: Axis, root: int = 0, dim: int = 0) -> Array:
    """Cut the x of the rank at index `root` into one piece per rank of `axis`; the others' x only gives the shape.

    x [.., R n, ..]   ->   y [.., n, ..]: piece i of the root's x on the rank at index i
    cost      that of reduce_scatter: JAX has no scatter, so zeros are added to the root's x
    backward  dx = gather(dy): on the root, zeros elsewhere
    Raises MeshError if the axis has no such position, ShapeError if R does not divide the dim.
    """
    place, x = _place(axis), _array("scatter", x)
    root, dim = position_of("scatter", root, place.num_ranks, place.label), dim_of(x.shape, dim, "scatter")
    _check_divides("scatter", x, dim, place)
    kept = _on_root(x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x, place, root)
    with _named(root, "scatter", "gather"):
        return reduce_scatter(kept, axis, dim).astype(x.dtype)


def ppermute(x: Any, axis: Axis, perm: Sequence[tuple[int, int]]) -> Array:
    """Send x along pairs (from index, to index) of `axis`; a rank to which nothing is sent gets zeros.

    x [...]   ->   y [...]: the sender's x
    backward  dx = ppermute(dy), pairs reversed
    Raises MeshError if a position is not on the axis, sends twice or receives twice.
    """
    place, x = _place(axis), _array("ppermute", x)
    pairs = pairs_of(perm)
    check_pairs(pairs, place.num_ranks, place.label)
    return _permute(vary(x, place.names), place, pairs)


def ring_shift(x: Any, axis: Axis, shift: int = 1) -> Array:
    """Pass x on around the ring of `axis`: the x of index i goes to index i + shift.

    x [...]   ->   y [...]: the x of index i - shift
    cost      x is sent once by each rank, in one hop
    backward  dx = ring_shift(dy, -shift)
    """
    place, x, shift = _place(axis), _array("ring_shift", x), whole_number(shift, "ring_shift: shift")
    x = vary(x, place.names)
    if shift % place.num_ranks == 0:
        return x
    with jax.named_scope("tplab.ring_shift"):
        return _permute(x, place, [(index, (index + shift) % place.num_ranks) for index in range(place.num_ranks)])


def barrier(axis: Axis | None = None) -> None:
    """Wait until every rank of `axis` (of the whole mesh, if None) has arrived.

    In a compiled program there is nothing to wait for: an operation runs once its operands are ready, and no rank can
    tell how far another one has come. So nothing is sent; only the axis is checked.
    """
    _place(this_mesh().axis_names if axis is None else axis)


def _extreme(x: Array, axes: tuple[str, ...], op: str) -> Array:
    """The extreme over all ranks; NaN where a rank has NaN.

    XLA's own extreme loses NaN on some devices. So numbers are sent as integers of the same size in the same order:
    their bits, with all bits but the sign inverted if it is negative. NaN is beyond all numbers.
    """
    pick = lax.pmax if op == "max" else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return pick(x, axes)
    whole = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    limits = jnp.iinfo(whole)

    def turned(bits: Array) -> Array:
        return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

    order = jnp.where(jnp.isnan(x), limits.max if op == "max" else limits.min, turned(_as_type(x, whole)))
    return _as_type(turned(pick(order, axes)), x.dtype)


def _as_type(x: Array, dtype: Any) -> Array:
    return lax.bitcast_convert_type(x, dtype)


def _extreme_tangent(x: Array, y: Array, dx: Array, axes: tuple[str, ...], op: str) -> Array:
    """The tangent: that of the ranks that hold the extreme, in equal shares; NaN where the extreme is NaN."""
    holds = jnp.where(jnp.isnan(y), y, (x == y).astype(y.dtype))  # XLA would turn 0 / 0 into 0
    with jax.named_scope("tplab.all_reduce"):  # also for a reduce, because each rank needs to know how many hold it
        return lax.psum(holds * dx, axes) / lax.psum(holds, axes)


_extremes = {
    op: Differentiable(f"tplab_{op}", partial(_extreme, op=op), partial(_extreme_tangent, op=op))
    for op in ("max", "min")
}


_COLLECTIVES = (
    *(all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter),
    *(ppermute, ring_shift),
)


def _place(axis: Axis) -> _Place:
    mesh = this_mesh()
    return _Place(mesh.names(axis), mesh.group(0, axis))


def _named(root: int, *names: str) -> Any:
    """A context that gives collectives one of these names, and the root, in the trace."""
    return jax.named_scope("".join(f"tplab.{name}." for name in names) + f"root{root}")


def _on_root(x: Array, place: _Place, root: int) -> Array:
    """x on the root, zeros elsewhere."""
    return jnp.where(lax.axis_index(place.names) == root, x, jnp.zeros_like(x))


def _permute(x: Array, place: _Place, pairs: Sequence[tuple[int, int]]) -> Array:
    """JAX's ppermute, which numbers the ranks of several axes in the order of the mesh, not of the names."""
    group = place.group
    position = {rank: place for place, rank in enumerate(sorted(group))}
    return lax.ppermute(x, place.names, [(position[group[a]], position[group[b]]) for a, b in pairs])


def _array(op: str, x: Any) -> Array:
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, np.ndarray | np.generic | int | float | complex):
        return jnp.asarray(x)
    raise TypeError(f"{op} sends an array, not {type(x).__name__}; jax.tree.map applies it to each array of a pytree")


def _reduction(op: str, x: Array, reduction: str) -> str:
    """The reduction that combines x: for booleans, "any" is their max. Raises ValueError, TypeError."""
    is_fraction, is_complex = (bool(jnp.issubdtype(x.dtype, kind)) for kind in (jnp.floating, jnp.complexfloating))
    check_reduction(op, reduction, x.dtype, is_fraction=is_fraction, is_complex=is_complex)
    return "max" if reduction == "sum" and x.dtype == jnp.bool_ else reduction


def _check_divides(op: str, x: Array, dim: int, place: _Place) -> None:
    share(x.shape[dim], place.num_ranks, f"{op}: dim {dim} has size", axis=place.label)
