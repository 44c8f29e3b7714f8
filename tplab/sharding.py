"""Sharding: which rank holds which piece of a tensor, as `P` says it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tplab.errors import ShapeError, SpecError
from tplab.mesh import Mesh


class P(tuple):
    """How a tensor lies on a mesh: one entry a dim, as in `jax.sharding.PartitionSpec`.

    An entry is None (every rank holds the whole dim), the name of a mesh axis (the dim is split over it), or a
    tuple of names (split over all of them, the first one slowest). Dims past the last entry are whole; an axis
    that `P` does not name holds copies.

        P()             every rank holds all of it
        P(None, "tp")   columns split over tp
        P(("dp", "tp")) rows split over dp, each part of that over tp

    As in JAX, P(("tp",)) is P("tp") and P(()) is P(None); other than in JAX, P is a tuple.
    """

    __slots__ = ()

    def __new__(cls, *entries: str | tuple[str, ...] | None):
        for entry in entries:
            names = entry if isinstance(entry, tuple | list) else () if entry is None else (entry,)
            if not all(isinstance(name, str) for name in names):
                raise SpecError(f"an entry of P is None, an axis name or a tuple of axis names, not {entry!r}")
        entries = tuple(_plain(entry) for entry in entries)
        named = [name for entry in entries for name in _names(entry)]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            listed = ", ".join(map(repr, entries))
            raise SpecError(f"P({listed}) names axis {twice[0]!r} twice; an axis can split one dim, and once")
        return super().__new__(cls, entries)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Every mesh axis that splits a dim."""
        return tuple(name for entry in self for name in _names(entry))

    def __getnewargs__(self):
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


def check_spec(shape: Sequence[int], spec: P, mesh: Mesh) -> None:
    """Raise SpecError or ShapeError where a tensor of `shape` cannot lie on `mesh` as `spec` says."""
    _check_names(spec, mesh)
    _check_dims(spec, shape, "the tensor")
    for dim, entry in enumerate(spec):
        if names := _names(entry):
            check_divides(shape[dim], dim, names, mesh)


def _check_names(spec: P, mesh: Mesh) -> None:
    if not isinstance(spec, P):
        raise SpecError(
            f"a spec is a tplab.P, for example P(None, {mesh.axis_names[-1]!r}), and {spec!r} is of type "
            f"{type(spec).__name__}; P(*entries) makes one"
        )
    for name in spec.axis_names:
        if name not in mesh.shape:
            listed = ", ".join(map(repr, mesh.axis_names))
            raise SpecError(f"{spec} names axis {name!r}, which {mesh} does not have; its axes are {listed}")


def _check_dims(spec: P, shape: Sequence[int], whose: str) -> None:
    if len(spec) > len(shape):
        raise SpecError(
            f"{spec} has {len(spec)} entries, and {whose} of shape {tuple(shape)} has {len(shape)} dims; "
            f"give at most one entry a dim"
        )


def check_divides(size: int, dim: int, axis: str | tuple[str, ...], mesh: Mesh) -> None:
    """Raise ShapeError where the ranks of `axis` cannot share `size` equally."""
    num_ranks = mesh.axis_size(axis)
    if size % num_ranks:
        names = (axis,) if isinstance(axis, str) else axis
        one = len(names) == 1
        label = repr(names[0]) if one else " x ".join(map(repr, names))
        raise ShapeError(
            f"dim {dim} has size {size}, which the {num_ranks} ranks of {'axis' if one else 'axes'} {label} cannot "
            f"share equally;\npad it to {-(-size // num_ranks) * num_ranks}, or use a mesh whose {label} divides {size}"
        )


def local_shape(shape: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the piece each rank holds of a tensor of global `shape`."""
    check_spec(shape, spec, mesh)
    parts = [_num_parts(entry, mesh) for entry in spec] + [1] * (len(shape) - len(spec))
    return tuple(size // part for size, part in zip(shape, parts, strict=True))


def global_shape(shape: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the whole tensor of which each rank holds a piece of local `shape`."""
    _check_names(spec, mesh)
    _check_dims(spec, shape, "each rank's piece")
    parts = [_num_parts(entry, mesh) for entry in spec] + [1] * (len(shape) - len(spec))
    return tuple(size * part for size, part in zip(shape, parts, strict=True))


def shard_slices(shape: Sequence[int], spec: P, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """Where the piece of `rank` lies in the whole: one slice a dim."""
    sizes = local_shape(shape, spec, mesh)
    mesh.check_rank(rank)
    slices = []
    for dim, size in enumerate(sizes):
        names = _names(spec[dim]) if dim < len(spec) else ()
        position = mesh.index(rank, names) if names else 0
        slices.append(slice(position * size, (position + 1) * size))
    return tuple(slices)


def split(array: Any, spec: P, mesh: Mesh) -> list[Any]:
    """The piece of every rank, in the order of ranks. Of NumPy and torch they are views of `array`; JAX has none."""
    # The ellipsis keeps a NumPy array without dims an array, which array[()] would turn into a scalar.
    return [array[(*shard_slices(array.shape, spec, mesh, rank), ...)] for rank in mesh.ranks]


def join(shards: Sequence[Any], spec: P, mesh: Mesh, empty: Callable[[tuple[int, ...]], Any] | None = None) -> Any:
    """Put the pieces of all ranks together: the reverse of `split`, of the same kind as the pieces (NumPy, torch, JAX).

    Of ranks that hold copies the lowest one's is taken; whether the copies agree is for the caller to check.
    `empty(shape)` makes the array that is filled; by default one like the first piece.
    """
    import numpy as np  # here, so that `import tplab` stays quick

    if len(shards) != mesh.size:
        raise ShapeError(f"{mesh} has {mesh.size} ranks, and there are {len(shards)} pieces; give one a rank")
    shapes = {tuple(shard.shape) for shard in shards}
    if len(shapes) > 1:
        listed = ", ".join(f"rank {rank} {tuple(shard.shape)}" for rank, shard in enumerate(shards))
        raise ShapeError(f"the pieces of {spec} must have one shape, and have: {listed}")
    first = shards[0]
    shape = global_shape(first.shape, spec, mesh)
    empty = empty or getattr(first, "new_empty", None)  # torch's own: its dtype, its device
    whole = np.empty(shape, first.dtype) if empty is None else empty(shape)
    for rank in owners(spec, mesh):
        whole[(*shard_slices(shape, spec, mesh, rank), ...)] = shards[rank]
    # JAX arrays cannot be filled in place, so theirs are filled as NumPy and then handed to JAX.
    is_jax = empty is None and not isinstance(first, np.ndarray | np.generic) and hasattr(first, "__array_namespace__")
    return first.__array_namespace__().asarray(whole) if is_jax else whole


def owners(spec: P, mesh: Mesh) -> list[int]:
    """The lowest rank that holds each distinct piece; together they hold the whole once."""
    return [copies[0] for copies in replicas(spec, mesh)]


def replicas(spec: P, mesh: Mesh) -> list[tuple[int, ...]]:
    """Groups of ranks that hold the same piece: those that differ only along axes which `spec` does not name."""
    _check_names(spec, mesh)
    spare = tuple(name for name in mesh.axis_names if name not in spec.axis_names)
    return mesh.groups(spare) if spare else [(rank,) for rank in mesh.ranks]


def piece_sizes(size: int, num_ranks: int) -> list[int]:
    """`size` elements shared over ranks as evenly as it goes, the first ones larger: 10 over 4 is [3, 3, 2, 2]."""
    return [size // num_ranks + (index < size % num_ranks) for index in range(num_ranks)]


# --- weights of the overlapped layers, kept in the order in which a ring brings what they multiply -------------------


def async_weight(weight: Any, num_ranks: int, mode: str, direction: str = "up") -> Any:
    """The weight of a blocking layer as the overlapped layers of R ranks keep it: the same numbers in another order.

    weight [F, D], whole, as nn.Linear has it   ->   stacked [R (rank), R (arrival), F/R, D/R]
    "gather"    stacked[i, k] = rows of i, columns of (i-k) mod R: what multiplies the k-th piece of x that i gets
    "scatter"   stacked[j, k] = rows of (j-1-k) mod R, columns of j: what makes the k-th part of y that j sends
    direction   "up" and "both" as above; "down": (i+k) and (j+1+k). "split": each block's first half (of its columns
                for "gather", of its rows for "scatter"; the larger one of an odd number) as "up", the second as "down"

    NumPy, torch and JAX arrays alike. Raises ShapeError where R does not divide F and D.
    """
    rows, columns = _block_sizes(weight.shape, num_ranks, mode, direction)
    blocks = weight.reshape(num_ranks, rows, num_ranks, columns)
    size = columns if mode == "gather" else rows
    rank, place, inner = _grid(num_ranks, num_ranks, size)
    other = _partner(rank, place, inner >= size - size // 2, num_ranks, mode, direction)
    if mode == "gather":
        return blocks[rank, :, other, inner].swapaxes(-1, -2)  # dims of index arrays with a slice between come first
    return blocks[other, inner, rank, :]


def blocking_weight(stacked: Any, mode: str, direction: str = "up") -> Any:
    """The reverse of async_weight: stacked [R, R, F/R, D/R] -> weight [F, D], bit for bit."""
    if len(stacked.shape) != 4 or stacked.shape[0] != stacked.shape[1]:
        raise ShapeError(
            f"blocking_weight takes [R, R, F/R, D/R], the pieces of each of R ranks, and got {list(stacked.shape)}; "
            "weight.reshape(R, R, ...) makes it of the pieces of all ranks behind one another"
        )
    num_ranks, _, rows, columns = stacked.shape
    _block_sizes((num_ranks * rows, num_ranks * columns), num_ranks, mode, direction)
    size = columns if mode == "gather" else rows
    rank, other, inner = _grid(num_ranks, num_ranks, size)
    place = _partner(rank, other, inner >= size - size // 2, num_ranks, mode, direction, back=True)
    if mode == "gather":  # [rank, owner, columns, rows]
        blocks = stacked[rank, place, :, inner].swapaxes(-1, -2).swapaxes(1, 2)
    else:  # [rank, owner, rows, columns]
        blocks = stacked[rank, place, inner, :].swapaxes(0, 1).swapaxes(1, 2)
    return blocks.reshape(num_ranks * rows, num_ranks * columns)


def _partner(
    rank: Any, given: Any, is_second: Any, num_ranks: int, mode: str, direction: str, back: bool = False
) -> Any:  # fmt: skip
    """Of each place, the rank whose piece it is; `back`: of each rank, the place.

    up    gather i - k, scatter j - 1 - k: its own reverse
    down  gather i + k, scatter j + 1 + k, of which the reverse is owner - i, owner - 1 - j
    """
    first = 0 if mode == "gather" else 1
    up = (rank - first - given) % num_ranks
    down = (given - first - rank) % num_ranks if back else (rank + first + given) % num_ranks
    if direction == "split":
        return up * ~is_second + down * is_second
    return (down if direction == "down" else up) + 0 * is_second


def _grid(*sizes: int) -> tuple[Any, ...]:
    import numpy as np  # here, so that `import tplab` stays quick

    return np.ogrid[tuple(slice(size) for size in sizes)]


def _block_sizes(shape: Sequence[int], num_ranks: int, mode: str, direction: str) -> tuple[int, int]:
    """Rows and columns of one of R x R blocks."""
    if mode not in ("gather", "scatter"):
        raise ValueError(f"mode is {mode!r}; it must be 'gather' or 'scatter': only these have a blocking form")
    if direction not in ("up", "down", "both", "split"):
        raise ValueError(f"direction is {direction!r}; it must be one of up, down, both, split")
    if len(shape) != 2 or shape[0] % num_ranks or shape[1] % num_ranks:
        raise ShapeError(
            f"a weight [F, D] of shape {list(shape)} cannot be cut into {num_ranks} x {num_ranks} equal blocks; "
            f"make F and D multiples of {num_ranks}"
        )
    return shape[0] // num_ranks, shape[1] // num_ranks


def _plain(entry: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """An entry of P in its one form: None, a name, or a tuple of two names or more."""
    if entry is None or isinstance(entry, str):
        return entry
    return tuple(entry) if len(entry) > 1 else entry[0] if entry else None


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _num_parts(entry: str | tuple[str, ...] | None, mesh: Mesh) -> int:
    return math.prod(mesh.shape[name] for name in _names(entry))
