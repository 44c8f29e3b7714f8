"""The results of a program: joined from the pieces of ranks, and checked where ranks should hold copies."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tplab.errors import ReplicationError, SpecError
from tplab.mesh import Mesh
from tplab.sharding import P, join, replicas
from tplab.torch.private import pytree
from tplab.torch.ranks.arguments import spread
from tplab.torch.ranks.outcomes import WITHOUT_KERNELS
from tplab.units import ranks_text


def without_graph(result: Any) -> Any:
    """A rank's result, with its tensors detached from the graph of the finished run."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach() if x.requires_grad else x, result)


def whole(per_rank: Sequence[Any], out_specs: Any, mesh: Mesh) -> Any:
    """Join the ranks' results as `out_specs` says. Raises ReplicationError if copies differ.

    A leaf that is None on every rank stays None. A program that returns only None has forgotten its result.
    """
    paths, structure = pytree.tree_flatten_with_path(per_rank[0])
    specs = spread(out_specs, per_rank[0], "out_specs")
    columns = []
    for rank, result in enumerate(per_rank):
        column, other = pytree.tree_flatten(result)
        if other != structure:
            raise SpecError(
                f"out_specs needs results of one structure, but rank 0 returned {_kind(per_rank[0])} and rank {rank} "
                f"{_kind(result)}; return the same on every rank, or read .per_rank"
            )
        columns.append([leaf if leaf is None and paths[0][0] else _tensor(leaf, rank) for leaf in column])
    joined = []
    for place, (path, _) in enumerate(paths):
        which = f"result{pytree.keystr(path)}" if path else "tensor"
        pieces = [column[place] for column in columns]
        missing = [rank for rank, piece in enumerate(pieces) if piece is None]
        if 0 < len(missing) < len(pieces):
            raise SpecError(
                f"{which} is None on rank {missing[0]}, and a tensor on other ranks; return a tensor on every rank, or "
                "None on all of them"
            )
        joined.append(None if missing else _joined(pieces, specs[place], mesh, which))
    return pytree.tree_unflatten(joined, structure)


def _kind(result: Any) -> str:
    names = pytree.tree_map(lambda leaf: type(leaf).__name__, result)
    return str(names).replace("'", "")


def _tensor(leaf: Any, rank: int) -> Tensor:
    try:
        return torch.as_tensor(leaf)
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(
            f"out_specs puts tensors together, but rank {rank} returned {leaf!r}, of type {type(leaf).__name__}; "
            "return tensors or numbers, or omit out_specs and read .per_rank"
        ) from None


def _joined(shards: list[Tensor], spec: P, mesh: Mesh, which: str) -> Tensor:
    for ranks in replicas(spec, mesh):
        _check_copies(shards, ranks, spec, mesh, which)
    for rank, shard in enumerate(shards):
        if shard.dtype != shards[0].dtype:
            raise SpecError(
                f"the pieces of {spec} must have one dtype, but rank 0 returned {shards[0].dtype} and rank {rank} "
                f"{shard.dtype}; convert them before they are returned"
            )
    return join(shards, spec, mesh, empty=lambda shape: shards[0].new_empty(shape))


def _check_copies(shards: list[Tensor], ranks: tuple[int, ...], spec: P, mesh: Mesh, which: str) -> None:
    """Raise ReplicationError unless ranks that should hold copies hold the same tensor, up to rounding: sums may differ
    in order.

    which   names one of several results: "result['loss']", otherwise "tensor"
    """
    first = shards[ranks[0]]
    for rank in ranks[1:]:
        other = shards[rank]
        if first.shape != other.shape or first.dtype != other.dtype:
            copies = "copies" if which == "tensor" else f"copies of {which}"
            raise ReplicationError(
                f"out_specs={spec} says that ranks {ranks[0]} and {rank} return {copies}, but one is {first.dtype} "
                f"{list(first.shape)} and the other {other.dtype} {list(other.shape)};\nreturn the same tensor, or "
                "name the axis along which they differ in out_specs"
            )
    gaps = {rank: gap for rank in ranks[1:] if (gap := _gap(first, shards[rank])) is not None}
    if gaps:
        others = ranks_text(gaps)
        how = f"by up to {max(gaps.values()):.3g} (largest value: {_largest(_exact(first)):.3g})"
        if max(gaps.values()) == math.inf:
            how = "where one is NaN or infinite and the other is not"
        spare = [name for name in mesh.axis_names if name not in spec.axis_names]
        raise ReplicationError(
            f"out_specs={spec} says that ranks {', '.join(map(str, ranks))} return the same {which}, but rank "
            f"{ranks[0]}'s differs from that of {others}, {how};\n"
            f"all_reduce over {' or '.join(map(repr, spare))} makes a partial result the same on every rank; "
            "if they are meant to differ, name the axis in out_specs"
        )


def _gap(a: Tensor, b: Tensor) -> float | None:
    """How far apart two copies are; None if only by rounding, infinite if only one is finite."""
    if _have_same_bits(a, b):
        return None
    exact_a, exact_b = _exact(a), _exact(b)
    differing = (exact_a != exact_b) & ~(exact_a.isnan() & exact_b.isnan())
    if (differing & ~(exact_a.isfinite() & exact_b.isfinite())).any():
        return math.inf
    gap = _largest((exact_a - exact_b)[differing])
    if a.is_floating_point() or a.is_complex():
        return gap if gap > _rounding(a) else None
    return max(gap, 1.0)  # float64 may not distinguish two large integers


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same."""
    if a.layout is not torch.strided:
        return False
    if _memcmp is not None and a.is_cpu and b.is_cpu:
        a, b = _in_order(a), _in_order(b)
        return _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0
    return bool((_bits(a) == _bits(b)).all())  # torch.equal compares one element after the other


def _of_c() -> Callable[[int, int, int], int] | None:
    """C's memcmp, which reads each byte once and writes none; None where the system lacks it."""
    try:
        memcmp = ctypes.CDLL(None).memcmp
    except (OSError, TypeError, AttributeError):  # Windows
        return None
    memcmp.argtypes, memcmp.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    return memcmp


_memcmp = _of_c()


def _bits(x: Tensor) -> Tensor:
    whole_numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return _in_order(x).reshape(-1).view(whole_numbers.get(x.itemsize, torch.int64))


def _in_order(x: Tensor) -> Tensor:
    """x with its actual elements in order in memory; x itself if they already are."""
    return x.resolve_conj().resolve_neg().contiguous()


def _exact(x: Tensor) -> Tensor:
    """x in a dtype that can be subtracted and holds more than its own."""
    if x.dtype in WITHOUT_KERNELS:
        x = _bits(x)
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _rounding(x: Tensor) -> float:
    """How far apart two copies of `x` may be because of the order of their sums: a few roundings of the largest value;
    very few in types of 16 bits or fewer, in which no program adds up long sums."""
    kind = torch.finfo(x.dtype)
    return {8: 1, 16: 4}.get(kind.bits, 64) * kind.eps * _largest(_exact(x))
