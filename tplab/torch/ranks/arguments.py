"""What `run` is asked to run, and each rank's own piece of every argument."""

from __future__ import annotations

import copy
import mmap
import os
from collections.abc import Callable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tplab.comm import check_entries
from tplab.errors import SpecError
from tplab.mesh import Mesh
from tplab.sharding import P, check_spec, shard_slices
from tplab.spare import scratch_file
from tplab.torch.private import pytree
from tplab.torch.ranks.outcomes import WITHOUT_KERNELS, own

SHARED_FROM = 1 << 22  # bytes; up to here a copy is quick and small


class Job(NamedTuple):
    """What `run` is asked to run: a program, its ranks, and whole arguments. Each rank takes its own piece of them.

    in_specs      None (everything whole), one P for all, or a sequence with one entry per argument; an entry is None, a
                  P for every tensor in that argument, or a structure of them
    keep_values   the number of messages whose values the trace keeps
    """

    fn: Callable[..., Any]
    mesh: Mesh
    args: Sequence[Any]
    in_specs: Any
    seed: int
    keep_values: int
    device: torch.device | None
    title: str


class Arguments:
    """The arguments of a program. Each rank gets its own: the piece of each tensor that its spec selects, in memory
    that nothing else writes to.

    num_here   how many of the ranks are in this process
    Raises SpecError or ShapeError if they cannot be split as in_specs says.

    Everything is copied. A large tensor that several ranks get whole has only one copy until one of them writes to it.
    Within one rank, references are kept: a module and its optimizer, or a tensor that is passed twice. A tensor's
    `.grad` is not copied, just as when it is sent to another process.
    """

    def __init__(self, job: Job, num_here: int):
        args, in_specs, mesh = job.args, job.in_specs, job.mesh
        self._mesh, self._device, self._num_here = mesh, job.device, num_here
        self._pages: dict[int, Pages] = {}
        self._trees: list[tuple[Any, list[Any], list[P]]] = []
        for arg, entry in zip(args, entries_of(in_specs, len(args)), strict=True):
            leaves, structure = pytree.tree_flatten(arg)
            specs = spread(entry, arg, "in_specs")
            for leaf, spec in zip(leaves, specs, strict=True):
                if isinstance(leaf, Tensor | np.ndarray):
                    check_spec(leaf.shape, spec, mesh)
                elif spec.axis_names and leaf is not None:  # None has nothing to split, as in JAX
                    kind = type(leaf).__name__
                    raise SpecError(f"in_specs splits a {kind} as {spec}; only tensors and arrays can be split")
            self._trees.append((structure, leaves, specs))

    @torch.no_grad()
    def of(self, rank: int) -> list[Any]:
        """The arguments of one rank."""
        found: dict[tuple[int, P], Tensor] = {}  # what this rank already has, so that it is made only once
        memo: dict[int, Any] = {}  # the same for `copy.deepcopy`, which ignores specs
        args = []
        for place, (structure, leaves, specs) in enumerate(self._trees):
            mine = []
            for leaf, spec in zip(leaves, specs, strict=True):
                if not isinstance(leaf, Tensor | np.ndarray):
                    mine.append(self._copied(leaf, place, memo))
                    continue
                piece = memo.get(id(leaf)) if not spec.axis_names else found.get((id(leaf), spec))
                if piece is None:
                    piece = found[id(leaf), spec] = self._piece(leaf, spec, rank)
                    if not spec.axis_names:
                        memo[id(leaf)] = piece
                mine.append(piece)
            args.append(pytree.tree_unflatten(mine, structure))
        return args

    def _piece(self, leaf: Any, spec: P, rank: int) -> Tensor:
        original, device = leaf if isinstance(leaf, Tensor) else _tensor_of(leaf), self._device
        if spec.axis_names:
            piece = original[shard_slices(original.shape, spec, self._mesh, rank)]
            piece = piece.clone(memory_format=torch.contiguous_format).to(device or original.device)
        elif device is not None and original.device != device:
            piece = original.detach().to(device)
        else:
            piece = self._whole(original, id(leaf))
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(piece, requires_grad=leaf.requires_grad)
        return piece.requires_grad_(isinstance(leaf, Tensor) and leaf.requires_grad)

    def _whole(self, x: Tensor, key: int) -> Tensor:
        """A copy of x in its own memory layout, as torch's clone makes it."""
        if x.dtype in WITHOUT_KERNELS:
            return own(x)
        is_plain = x.is_cpu and x.layout is torch.strided
        if self._num_here == 1 or not is_plain or x.numel() * x.itemsize < SHARED_FROM:
            return x.clone()
        if key not in self._pages:
            self._pages[key] = Pages(x)
        return self._pages[key].copy()

    def _copied(self, leaf: Any, place: int, memo: dict[int, Any]) -> Any:
        if isinstance(leaf, ModuleType):
            return leaf
        for tensor in _tensors_of(leaf):
            if id(tensor) not in memo:
                memo[id(tensor)] = self._piece(tensor, P(), 0)
        try:
            mine = copy.deepcopy(leaf, memo)
        except Exception as error:
            raise TypeError(
                f"argument {place} is or holds a {type(leaf).__name__}, which cannot be copied for each rank: "
                f"{error};\nmake it inside the program, or let the program read it from outside: ranks then share it"
            ) from error
        return mine.to(self._device) if isinstance(mine, nn.Module) and self._device is not None else mine


def entries_of(specs: Any, count: int) -> list[Any]:
    """One entry of `in_specs` for each of `count` arguments."""
    if specs is None or isinstance(specs, P):
        return [specs] * count
    _check_whose(specs, "in_specs")
    check_entries(specs, count, "in_specs", "arguments")
    return list(specs)


def spread(spec: Any, tree: Any, name: str) -> list[P]:
    """One P per leaf of `tree`, from a spec with the same structure, in which a P may replace a whole subtree."""
    if spec is None:
        spec = P()
    if isinstance(spec, P):
        return [spec] * len(pytree.tree_leaves(tree))
    _check_whose(spec, name)
    if type(spec) is not type(tree) or not isinstance(tree, tuple | list | dict) or len(spec) != len(tree):
        kind = type(tree).__name__
        raise SpecError(f"{name} has {spec!r} where the value is a {kind}; give a P, or the same structure")
    if isinstance(tree, dict) and set(spec) != set(tree):
        raise SpecError(f"{name} has the keys {sorted(spec)} where the value has {sorted(tree)}; give the same ones")
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    return [leaf for key in keys for leaf in spread(spec[key], tree[key], name)]


def _check_whose(spec: Any, name: str) -> None:
    """Raise SpecError for JAX's own PartitionSpec: it looks the same as a P."""
    if type(spec).__module__.partition(".")[0] == "jax":
        entries = ", ".join(map(repr, spec))
        raise SpecError(f"{name} has JAX's own PartitionSpec; write `from tplab import P`, and here P({entries})")


def _tensor_of(array: np.ndarray) -> Tensor:
    """The array as a tensor, which may share its memory."""
    if not array.dtype.isnative or min(array.strides, default=0) < 0 or not array.flags.writeable:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def _tensors_of(leaf: Any) -> list[Tensor]:
    """The tensors of an object that may be large: a module or an optimizer."""
    if isinstance(leaf, nn.Module):
        return list(chain(leaf.parameters(), leaf.buffers()))
    if isinstance(leaf, torch.optim.Optimizer):
        return [tensor for group in leaf.param_groups for tensor in group["params"]]
    return []


# --- large tensors that every rank gets whole: in memory once, while ranks only read them -----------------------------


class Pages:
    """A copy of a CPU tensor, and further copies that share its memory page by page until a page is written to.

    The operating system keeps track: each copy is a private mapping of one unnamed file. So every write counts, whether
    torch makes it or not. Like any memory that torch does not own, such a tensor cannot be resized.
    """

    def __init__(self, x: Tensor):
        self._dtype, self._shape, self._num_bytes = x.dtype, x.shape, x.numel() * x.itemsize
        self._strides = torch.empty_like(x, device="meta").stride()  # those of x if it is dense
        self._file = os.fdopen(scratch_file(), "r+b")
        os.truncate(self._file.fileno(), self._num_bytes)
        self._tensor(mmap.ACCESS_WRITE).copy_(x)

    def __del__(self) -> None:
        self._file.close()  # each mapping keeps the file open by itself

    def copy(self) -> Tensor:
        return self._tensor(mmap.ACCESS_COPY)

    def _tensor(self, access: int) -> Tensor:
        mapping = mmap.mmap(self._file.fileno(), self._num_bytes, access=access)
        memory = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=self._dtype, device="cpu").set_(memory, 0, self._shape, self._strides)
