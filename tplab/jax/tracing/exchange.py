"""JAX's collectives, as equations of a jaxpr: which ranks each joins, and what it returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from tplab.jax.tracing.held import PerRank
from tplab.mesh import Mesh

Groups = list[tuple[int, ...]]


class Exchange(NamedTuple):
    """One kind of collective: its name in tplab, what each member of a group receives from the inputs of all, and how
    it combines them: "sum", "max", "min", or "" where it does not."""

    op: str
    results: Callable[[dict[str, Any], list[np.ndarray]], Sequence[np.ndarray]]
    combines: str = ""

    def reduction(self, name: str) -> str:
        """How it combines the ranks' inputs, where the program called it `name`: a broadcast is a sum of one."""
        return "" if name == "broadcast" else self.combines

    def name_in(self, eqn: Any) -> str:
        """What the program called it, as far as its equation says."""
        scope = str(eqn.source_info.name_stack)
        return next((name for name in _SCOPED.get(self.op, ()) if f"tplab.{name}" in scope), self.op)

    def root(self, eqn: Any) -> int:
        """The position that a broadcast comes from."""
        found = re.search(r"tplab\.broadcast\.from(\d+)", str(eqn.source_info.name_stack))
        return int(found[1]) if found else 0

    def names(self, params: dict[str, Any]) -> tuple[str, ...]:
        """The axes it runs along."""
        names = params["axes"] if "axes" in params else params["axis_name"]
        return (names,) if isinstance(names, str) else tuple(name for name in names if isinstance(name, str))

    def groups(self, params: dict[str, Any], mesh: Mesh) -> Groups:
        """The ranks that do it together, in the order of their positions."""
        groups = mesh.groups(self.names(params))
        if self.op == "ppermute":  # JAX numbers the ranks in the mesh's order here, not in that of the names
            return [tuple(sorted(group)) for group in groups]
        if parts := params.get("axis_index_groups"):
            return [tuple(group[index] for index in part) for group in groups for part in parts]
        return groups

    def apply(self, params: dict[str, Any], groups: Groups, values: PerRank) -> PerRank:
        """Every rank's result."""
        results: PerRank = [None] * len(values)
        for group in groups:
            outputs = self.results(params, [np.asarray(values[rank]) for rank in group])
            for rank, output in zip(group, outputs, strict=True):
                results[rank] = output
        return results


def _alike(combine: Callable[[Any, Any], Any]) -> Callable[[dict[str, Any], list[np.ndarray]], list[np.ndarray]]:
    return lambda params, inputs: [reduce(combine, inputs)] * len(inputs)


def _gathered(params: dict[str, Any], inputs: list[np.ndarray]) -> list[np.ndarray]:
    join = np.concatenate if params["tiled"] else np.stack
    return [join(inputs, params["all_gather_dimension"])] * len(inputs)


def _scattered(params: dict[str, Any], inputs: list[np.ndarray]) -> Sequence[np.ndarray]:
    total, dim = reduce(np.add, inputs), params["scatter_dimension"]
    if params["tiled"]:
        return np.split(total, len(inputs), dim)
    return [np.take(total, index, dim) for index in range(len(inputs))]


def _exchanged(params: dict[str, Any], inputs: list[np.ndarray]) -> Sequence[np.ndarray]:
    split, concat, count = params["split_axis"], params["concat_axis"], len(inputs)
    if params["tiled"]:
        pieces = [np.split(x, count, split) for x in inputs]
        return [np.concatenate([row[index] for row in pieces], concat) for index in range(count)]
    return [np.stack([np.take(x, index, split) for x in inputs], concat) for index in range(count)]


def _permuted(params: dict[str, Any], inputs: list[np.ndarray]) -> Sequence[np.ndarray]:
    outputs = [np.zeros_like(x) for x in inputs]
    for source, target in params["perm"]:
        outputs[target] = inputs[source]
    return outputs


_SCOPED = {"ppermute": ("ring_shift", "send"), "all_reduce": ("broadcast",)}
"""What tplab does by another name; it says so in a `named_scope`."""

_SUM, _GATHER = Exchange("all_reduce", _alike(np.add), "sum"), Exchange("all_gather", _gathered)
_MAX, _MIN = Exchange("all_reduce", _alike(np.maximum), "max"), Exchange("all_reduce", _alike(np.minimum), "min")

EXCHANGES = {
    "psum": _SUM,
    "psum_invariant": _SUM,
    "pmax": _MAX,
    "pmin": _MIN,
    "tplab_max": _MAX,
    "tplab_min": _MIN,
    "all_gather": _GATHER,
    "all_gather_invariant": _GATHER,
    "reduce_scatter": Exchange("reduce_scatter", _scattered, "sum"),
    "all_to_all": Exchange("all_to_all", _exchanged),
    "ppermute": Exchange("ppermute", _permuted),
}
"""By the names of JAX's primitives, and of those that tplab adds: `tplab.jax.comm`."""
