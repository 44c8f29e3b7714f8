"""JAX's collectives, as equations of a jaxpr: which ranks take part in each, and what it returns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from tplab.comm import ROWS
from tplab.jax.tracing.held import PerRank
from tplab.mesh import Mesh

Groups = list[tuple[int, ...]]


class Exchange(NamedTuple):
    """One kind of collective: its name in tplab, and how it combines inputs, if it does: "sum", "max", "min"."""

    op: str
    combines: str = ""

    def reduction(self, name: str) -> str:
        """How it combines the ranks' inputs if the program called it `name`: a broadcast is implemented as a sum."""
        return self.combines if ROWS[name].combines else ""

    def name_in(self, eqn: Any) -> str:
        """The program's name for it, if its equation has one: tplab names its collectives by a `named_scope`."""
        scope, names = str(eqn.source_info.name_stack), [name for name, row in ROWS.items() if row.jax == self.op]
        return max(self.op, *names, key=lambda name: scope.rfind(f"tplab.{name}")) if names else self.op

    def root(self, eqn: Any) -> int:
        """The position of the root; 0 if there is none."""
        found = re.findall(r"tplab\.\w+\.root(\d+)", str(eqn.source_info.name_stack))
        return int(found[-1]) if found else 0

    def names(self, params: dict[str, Any]) -> tuple[str, ...]:
        """The axes it runs along."""
        names = params["axes"] if "axes" in params else params["axis_name"]
        return (names,) if isinstance(names, str) else tuple(name for name in names if isinstance(name, str))

    def groups(self, params: dict[str, Any], mesh: Mesh) -> Groups:
        """The groups of ranks that take part together, in the order of their positions."""
        groups = mesh.groups(self.names(params))
        if self.op == "ppermute":  # JAX numbers the ranks here in the order of the mesh, not of the names
            return [tuple(sorted(group)) for group in groups]
        if parts := params.get("axis_index_groups"):
            return [tuple(group[index] for index in part) for group in groups for part in parts]
        return groups

    def apply(self, params: dict[str, Any], groups: Groups, values: PerRank, only: int | None = None) -> PerRank:
        """Every rank's result. `only` is the position that keeps it, if the others discard theirs."""
        results: PerRank = [None] * len(values)
        for group in groups:
            outputs = self._results(params, [np.asarray(values[rank]) for rank in group])
            for index, (rank, output) in enumerate(zip(group, outputs, strict=True)):
                results[rank] = output if only in (None, index) else np.zeros_like(output)
        return results

    def dims(self, params: dict[str, Any]) -> tuple[int, int]:
        """(the dim along which it cuts a rank's input, the dim along which it joins pieces)."""
        dim = params.get("scatter_dimension", params.get("all_gather_dimension", 0))
        return params.get("split_axis", dim), params.get("concat_axis", dim)

    def _results(self, params: dict[str, Any], inputs: list[np.ndarray]) -> Sequence[np.ndarray | None]:
        """What each member of a group receives, from the inputs of all."""
        if self.op == "ppermute":
            found = [np.zeros_like(x) for x in inputs]
            for source, target in params["perm"]:
                found[target] = inputs[source]
            return found
        (cut_dim, join_dim), count, is_tiled = self.dims(params), len(inputs), params.get("tiled", True)

        def cut(x: np.ndarray, _: int) -> Sequence[np.ndarray]:
            return np.split(x, count, cut_dim) if is_tiled else list(np.moveaxis(x, cut_dim, 0))

        def merge(parts: Sequence[np.ndarray]) -> np.ndarray:
            if self.combines:
                return reduce(_COMBINE[self.combines], parts)
            return np.concatenate(parts, join_dim) if is_tiled else np.stack(parts, join_dim)

        return ROWS[self.op].outcomes(inputs, cut, merge)


_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}
_SUM, _MAX, _MIN = (Exchange("all_reduce", how) for how in _COMBINE)
_GATHER = Exchange("all_gather")

EXCHANGES = {
    "psum": _SUM,
    "psum_invariant": _SUM,
    "pmax": _MAX,
    "pmin": _MIN,
    "tplab_max": _MAX,
    "tplab_min": _MIN,
    "all_gather": _GATHER,
    "all_gather_invariant": _GATHER,
    "reduce_scatter": Exchange("reduce_scatter", "sum"),
    "all_to_all": Exchange("all_to_all"),
    "ragged_all_to_all": Exchange("all_to_all"),
    "ppermute": Exchange("ppermute"),
}
"""By the names of JAX's primitives, and of the primitives that `tplab.jax.comm` adds."""
