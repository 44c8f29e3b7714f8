"""Sharding: which rank holds which piece of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal

from tplab.errors import ShapeError, SpecError
from tplab.mesh import Axis, Mesh

Rule = Literal["equal", "ceil", "even"]


class P(tuple):
    """How a tensor is sharded over a mesh: one entry per dim, as in `jax.sharding.PartitionSpec`.

    An entry is None (every rank holds the whole dim), the name of a mesh axis (the dim is split over it), or a
    tuple of names (split over all of them, the first one slowest). Dims past the last entry are whole; along an axis
    that `P` does not name, the tensor is replicated.

        P()             every rank holds all of it
        P(None, "tp")   columns split over tp
        P(("dp", "tp")) rows split over dp, and each of those parts over tp

    As in JAX, P(("tp",)) is P("tp") and P(()) is P(None). Unlike in JAX, P is a tuple.
    """

    __slots__ = ()

    def __new__(cls, *entries: str | tuple[str, ...] | None):
        for entry in entries:
            names = entry if isinstance(entry, tuple | list) else () if entry is None else (entry,)
            if not all(isinstance(name, str) for name in names):
                raise SpecError(f"an entry of P is None, an axis name or a tuple of axis names, not {entry!r}")
        entries = tuple(_plain(entry) for entry in entries)
        named = [name for entry in entries for name in names_in(entry)]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            listed = ", ".join(map(repr, entries))
            raise SpecError(f"P({listed}) names axis {twice[0]!r} twice; an axis can split only one dim, once")
        return super().__new__(cls, entries)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Every mesh axis that splits a dim."""
        return tuple(name for entry in self for name in names_in(entry))

    def __getnewargs__(self):
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


@lru_cache(maxsize=4096)  # collectives ask at every call
def cut(size: int, parts: int, rule: Rule) -> tuple[range, ...]:
    """Which of `size` elements each of `parts` holds. Nothing else in tplab decides this.

    rule     10 over 4                   where it is used, and why
    equal    ShapeError; 12: 3 3 3 3     `P`, collectives, heads and features of layers, microbatches: every rank runs
                                         one program on one shape, as under `jax.shard_map`
    ceil     3 3 3 1; 9: 3 3 3 0         vocabularies, `Layout`, states: row v is on rank v // ceil(size / parts), and
                                         the last ranks hold less, or nothing. These are torch.chunk's pieces (which
                                         leaves the empty ones out) and DTensor's; XLA pads them to one size
    even     3 3 2 2                     the hops of a ring, groups of microbatches: no part is more than one larger
                                         than another, so that no hop is slow. These are np.array_split's pieces

    Raises ShapeError if the rule is "equal" and the size does not divide evenly.
    """
    if rule == "equal":
        most = share(size, parts, "the size is", sharers="parts")
    elif rule == "ceil":
        most = -(-size // parts)
    elif rule == "even":
        least, more = divmod(size, parts)
        return tuple(range(i * least + min(i, more), (i + 1) * least + min(i + 1, more)) for i in range(parts))
    else:
        raise ValueError(f"rule is {rule!r}; it must be 'equal', 'ceil' or 'even'")
    return tuple(range(min(i * most, size), min((i + 1) * most, size)) for i in range(parts))


def share(
    size: int, parts: int, what: str, *, axis: Axis | None = None, sharers: str = "ranks", least: int = 0, why: str = ""
) -> int:
    """How many of `size` elements each of `parts` holds, if all hold equally many.

    what      how the error message begins: "dim 1 has size", "num_heads is"
    axis      the mesh axis whose ranks share; without one, `sharers` says who shares: "microbatches"
    least     the smallest size that is accepted
    why       a reason to add, such as "heads are sharded whole"
    Raises ShapeError if the size does not divide evenly:

        dim 1 has size 10, which the 4 ranks of axis 'tp' cannot share equally;
        pad it to 12, or use a mesh whose 'tp' divides 10
    """
    if parts > 0 and size % parts == 0 and size >= least:
        return size // parts
    if axis is None:
        who, other = f"{parts} {sharers}", f"take a number of {sharers} that divides {size}"
    else:
        names = axis.split(",") if isinstance(axis, str) else axis
        label = " x ".join(map(repr, names))
        who = f"the {parts} {sharers} of {'axis' if len(names) == 1 else 'axes'} {label}"
        other = f"use a mesh whose {label} divides {size}"
    multiple = max(1, parts)
    padded = max(1, -(-size // multiple)) * multiple
    reason = f": {why}" if why else ""
    way_out = f"pad it to {padded}, or {other}" if size > 0 else f"make it {padded}"
    raise ShapeError(f"{what} {size}, which {who} cannot share equally{reason};\n{way_out}")


def check_spec(shape: Sequence[int], spec: P, mesh: Mesh) -> None:
    """Raise SpecError or ShapeError if a tensor of `shape` cannot be sharded over `mesh` as `spec` says."""
    _check_names(spec, mesh)
    check_dims(spec, shape, "the tensor of")
    for dim, entry in enumerate(spec):
        if names := names_in(entry):
            share(shape[dim], mesh.axis_size(names), f"dim {dim} has size", axis=names)


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


def check_dims(spec: P, shape: Sequence[int], whose: str) -> None:
    """Raise SpecError if a spec has more entries than dims. whose: "the tensor of"."""
    if len(spec) > len(shape):
        raise SpecError(
            f"{spec} has {len(spec)} entries, and {whose} shape {tuple(shape)} has {len(shape)} dims; "
            f"give at most one entry per dim"
        )


def local_shape(shape: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the piece that each rank holds of a tensor of global `shape`."""
    check_spec(shape, spec, mesh)
    return tuple(map(len, held_by(shape, spec, mesh, 0, "equal")))


def global_shape(shape: Sequence[int], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the whole tensor of which each rank holds a piece of local `shape`."""
    _check_names(spec, mesh)
    check_dims(spec, shape, "each rank's piece of")
    parts = [math.prod(mesh.shape[name] for name in names_in(entry)) for entry in spec]
    return tuple(size * part for size, part in zip_longest(shape, parts, fillvalue=1))


def held_by(shape: Sequence[int], spec: P, mesh: Mesh, rank: int, rule: Rule = "ceil") -> tuple[range, ...]:
    """Which elements of each dim of a whole array `rank` holds, by this rule of `cut`."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return tuple(
        range(size) if entry is None else cut(size, mesh.axis_size(entry), rule)[mesh.index(rank, entry)]
        for size, entry in zip(shape, entries, strict=True)
    )


def shard_slices(shape: Sequence[int], spec: P, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """Where the piece of `rank` is in the whole tensor: one slice per dim."""
    check_spec(shape, spec, mesh)
    mesh.check_rank(rank)
    return tuple(slice(held.start, held.stop) for held in held_by(shape, spec, mesh, rank, "equal"))


def split(array: Any, spec: P, mesh: Mesh) -> list[Any]:
    """The piece of every rank, in rank order. For NumPy and torch they are views of `array`; JAX has no views."""
    # The ellipsis keeps a 0-dim NumPy array an array; array[()] would turn it into a scalar.
    return [array[(*shard_slices(array.shape, spec, mesh, rank), ...)] for rank in mesh.ranks]


def join(shards: Sequence[Any], spec: P, mesh: Mesh, empty: Callable[[tuple[int, ...]], Any] | None = None) -> Any:
    """Put the pieces of all ranks together: the reverse of `split`. The result is of the pieces' kind (NumPy, torch,
    JAX).

    If ranks hold copies, the lowest rank's is used; it is up to the caller to check that the copies agree.
    `empty(shape)` makes the array to be filled; by default it is like the first piece.
    """
    import numpy as np  # here, so that `import tplab` stays quick

    if len(shards) != mesh.size:
        raise ShapeError(f"{mesh} has {mesh.size} ranks, but there are {len(shards)} pieces; give one per rank")
    shapes = {tuple(shard.shape) for shard in shards}
    if len(shapes) > 1:
        listed = ", ".join(f"rank {rank} {tuple(shard.shape)}" for rank, shard in enumerate(shards))
        raise ShapeError(f"the pieces of {spec} must have one shape, but have these: {listed}")
    first = shards[0]
    shape = global_shape(first.shape, spec, mesh)
    empty = empty or getattr(first, "new_empty", None)  # torch's own: its dtype, its device
    whole = np.empty(shape, first.dtype) if empty is None else empty(shape)
    for rank in owners(spec, mesh):
        whole[(*shard_slices(shape, spec, mesh, rank), ...)] = shards[rank]
    # JAX arrays cannot be filled in place, so we fill a NumPy array and then convert it to JAX.
    is_jax = empty is None and not isinstance(first, np.ndarray | np.generic) and hasattr(first, "__array_namespace__")
    return first.__array_namespace__().asarray(whole) if is_jax else whole


def names_in(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """The axes of an entry of P, or of JAX's PartitionSpec, the slowest first."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def dims_cut(spec: Sequence[Any]) -> dict[str, int]:
    """The dim that each axis cuts, of those that a spec names."""
    return {name: dim for dim, entry in enumerate(spec) for name in names_in(entry)}


def owners(spec: P, mesh: Mesh) -> list[int]:
    """The lowest rank that holds each distinct piece; together these ranks hold the whole exactly once."""
    return [copies[0] for copies in replicas(spec, mesh)]


def replicas(spec: P, mesh: Mesh) -> list[tuple[int, ...]]:
    """Groups of ranks that hold the same piece: they differ only along axes that `spec` does not name."""
    _check_names(spec, mesh)
    spare = tuple(name for name in mesh.axis_names if name not in spec.axis_names)
    return mesh.groups(spare) if spare else [(rank,) for rank in mesh.ranks]


def _plain(entry: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """An entry of P in its canonical form: None, a name, or a tuple of two or more names."""
    if entry is None or isinstance(entry, str):
        return entry
    return tuple(entry) if len(entry) > 1 else entry[0] if entry else None
