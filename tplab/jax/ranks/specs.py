"""Specs over structures: which `P` belongs to which array of the arguments and of the results."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from tplab.comm import check_entries
from tplab.errors import ReplicationError, SpecError
from tplab.jax.ranks.context import varying_axes
from tplab.mesh import Mesh
from tplab.sharding import P, check_spec


def spec_of_each(specs: Any, args: tuple[Any, ...]) -> list[P]:
    """One P for each leaf of `args`; None is not a leaf.

    `specs` is None (every rank gets everything), one P for all, or a sequence with one entry per argument; an entry is
    None, a P for all arrays in that argument, or a structure of them.
    """
    if specs is None or is_spec(specs):
        return spread(specs, args, "in_specs")
    check_entries(specs, len(args), "in_specs", "arguments")
    return [leaf for spec, arg in zip(specs, args, strict=True) for leaf in spread(spec, arg, "in_specs")]


def spread(spec: Any, tree: Any, name: str) -> list[P]:
    """One P per leaf of `tree`, from a structure of specs of the same form, in which one P may cover a whole subtree.

    None in the tree is not a leaf, as in JAX: whatever its spec, it has nothing to split.
    """
    specs = jax.tree.map(lambda leaf: P(*(leaf or ())), spec, is_leaf=_is_leaf)
    try:
        full = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise SpecError(
            f"{name} has {spec!r} where the value is {jax.tree.structure(tree)}; give a P, or the same structure"
        ) from error
    return jax.tree.leaves(full, is_leaf=is_spec)


def check(specs: Any, name: str, mesh: Mesh) -> None:
    """Raise SpecError for anything but P and None among the specs, and for an axis that `mesh` does not have."""
    for leaf in jax.tree.leaves(specs, is_leaf=_is_leaf):
        if leaf is not None and not is_spec(leaf):
            raise SpecError(f"{name} has {leaf!r} where a P belongs; P() stands for all of it on every rank")
        spec = P(*(leaf or ()))
        check_spec([0] * len(spec), spec, mesh)


def to_jax(specs: Any) -> Any:
    """The same structure with JAX's own PartitionSpec in it."""
    return jax.tree.map(lambda spec: PartitionSpec(*(spec or ())), specs, is_leaf=_is_leaf)


def is_spec(value: Any) -> bool:
    return isinstance(value, P | PartitionSpec)


def _is_leaf(node: Any) -> bool:
    return node is None or is_spec(node)


def check_results(results: Any, out_specs: Any, mesh: Mesh) -> None:
    """Raise an error if the results of one rank do not fit `out_specs`.

    JAX's types say along which axes a value may differ. A value that may differ along an axis where it should be the
    same is refused before anything runs, with a ReplicationError.
    """
    leaves, _ = jax.tree.flatten_with_path(results)
    for (path, leaf), spec in zip(leaves, spread(out_specs, results, "out_specs"), strict=True):
        which = f"result{jax.tree_util.keystr(path)}"
        shape = tuple(leaf.shape)
        if len(spec) > len(shape):
            raise SpecError(
                f"out_specs gives {which} {spec}, which has {len(spec)} entries, and each rank's piece has "
                f"{len(shape)} dims {shape}; give at most one entry per dim"
                + ("" if shape else ": x.reshape(1) makes a scalar a piece that can be joined to others")
            )
        differs = [name for name in mesh.axis_names if name in varying_axes(leaf) and name not in spec.axis_names]
        if differs:
            raise ReplicationError(_not_the_same(which, shape, spec, differs))


def _not_the_same(which: str, shape: tuple[int, ...], spec: P, differs: list[str]) -> str:
    axes = " and ".join(map(repr, differs))
    joining = ""
    if shape and not spec[:1]:
        pieces = P(differs[0] if len(differs) == 1 else tuple(differs))
        joining = f": return this rank's piece, with out_specs={pieces}"
    return (
        f"out_specs={spec} says that {which}, {list(shape)}, is the same on all ranks of axis {axes}, but nothing in "
        "the program makes it so: it depends on values that differ there.\n"
        f"If it is a partial result, all_reduce over {axes} makes it the same everywhere. "
        f"If all_gather or a ring gathered it, JAX cannot know that the ranks agree{joining}.\n"
        f"If the ranks are meant to differ, name {axes} in out_specs"
    )
