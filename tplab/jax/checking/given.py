"""The arguments of a step: whole arrays, from which each run makes its own arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tplab.checking.comparison import nudged
from tplab.checking.verdict import EPSILON
from tplab.jax.private import devices_around, is_ref, new_ref


class Given:
    """The arguments of a step.

    whole   the arguments as whole arrays, without a place on a mesh; for a Ref, its value
    """

    def __init__(self, args: Sequence[Any]):
        leaves, self._tree = jax.tree.flatten(list(args))
        self._are_refs = [is_ref(leaf) for leaf in leaves]
        leaves = [leaf[...] if is_ref(leaf) else leaf for leaf in leaves]
        self._specs = [_explicit(leaf) for leaf in leaves]
        self.whole = jax.tree.unflatten(self._tree, [_host(leaf) for leaf in leaves])

    def to(self, make: Callable[..., Any], mesh: jax.sharding.Mesh) -> Callable[..., Any]:
        """Return the step of a mesh as a function of whole arrays. It gets those with Explicit axes as their types say,
        and Refs of its own, whose final values are among its results."""
        step = under(mesh, make)(mesh)
        if not callable(step):
            raise TypeError(f"step takes a mesh and returns a training step, as `lambda mesh: step`, not {step!r}")
        if not any(self._are_refs) and not any(self._specs):
            return step

        def call(*whole: Any) -> Any:
            given = [
                leaf if spec is None else jax.device_put(leaf, NamedSharding(mesh, spec))
                for leaf, spec in zip(jax.tree.leaves(list(whole)), self._specs, strict=True)
            ]
            given = [new_ref(leaf) if is_one else leaf for leaf, is_one in zip(given, self._are_refs, strict=True)]
            returned = step(*jax.tree.unflatten(self._tree, given))
            if not any(self._are_refs):
                return returned
            written = [leaf[...] if is_ref(leaf) else None for leaf in given]
            return {"returned": returned, "written": jax.tree.unflatten(self._tree, written)}

        return call


def under(mesh: jax.sharding.Mesh, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` as a function that sets `mesh` if another mesh is set: `fn` may have specs without a mesh."""

    def call(*args: Any) -> Any:
        with jax.set_mesh(mesh) if devices_around() else nullcontext():
            return fn(*args)

    return call


def name_of(path: Any) -> str:
    """Return the name of a leaf: its path, joined by dots, as in torch's state_dict."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(name_of(path), leaf) for path, leaf in jax.tree.flatten_with_path(tree)[0]]


def nudge(tree: Any, seed: int, epsilon: float | None = None) -> Any:
    """Return a structure of arrays with each number off by one rounding, up or down: of its own dtype, or epsilon."""
    draw = np.random.default_rng(seed)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        by = EPSILON.get(str(leaf.dtype), EPSILON["float32"]) if epsilon is None else epsilon
        return nudged(np.asarray(leaf), by, draw).astype(leaf.dtype)

    return jax.tree.map(other, tree)


def _explicit(leaf: Any) -> jax.sharding.PartitionSpec | None:
    """Return how an array is laid out along Explicit axes, which is part of its type; None if it has none."""
    if not isinstance(leaf, jax.Array):
        return None
    spec = jax.typeof(leaf).sharding.spec
    return spec if any(names is not None for names in spec) else None


def _host(leaf: Any) -> Any:
    """Return an argument without a place on a mesh. Random keys are not changed."""
    if isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return np.asarray(leaf)
    return leaf
