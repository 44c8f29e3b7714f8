"""Where a step on a mesh first departs from the step on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from tplab.checking.gaps import gap, largest, near
from tplab.checking.observed import Observed, axis_sets, every_way
from tplab.checking.trail import reached
from tplab.checking.verdict import label
from tplab.jax.checking.tape import Node, Source
from tplab.lines import line_text
from tplab.mesh import Mesh
from tplab.sharding import P, names_in

Axes = tuple[str, ...]
SUMS = ("psum", "psum_invariant")
Whole = Mapping[Any, Sequence[tuple[Sequence[np.ndarray], Sequence[float]]]]
"""By the key of a node: the results of the reference's nodes with this key, in order, and the tolerance of each."""


class Departure:
    """The evidence of one evaluation of a step: the values of its nodes, beside those of the reference."""

    def __init__(
        self, axes: Mapping[str, int], nodes: Sequence[Node], values: Sequence[Sequence[np.ndarray]], whole: Whole
    ):
        self.axes, self.nodes, self.values, self.whole, self.mesh = axes, nodes, values, whole, Mesh(**axes)
        self._counts = Counter(node.key for node in self.nodes)
        order, self._order = Counter[Any](), list[int]()
        for node in self.nodes:
            self._order.append(order[node.key])
            order[node.key] += 1
        self.types = cache(self._types)
        self.last = len(self.nodes) - 1

    # --- what is right -------------------------------------------------------------------------------------------

    def _references(self, source: Source) -> Iterator[tuple[np.ndarray, float]]:
        """Yield the values that this one may have in the reference, and their tolerances."""
        at, place = source
        found = self.whole.get(self.nodes[at].key, [])
        if len(found) == self._counts[self.nodes[at].key]:
            found = found[self._order[at] : self._order[at] + 1]
        yield from ((whole[place], noise[place]) for whole, noise in found if place < len(whole))

    def _types(self, source: Source) -> list[Observed] | None:
        """Return how the devices hold the reference's value; None if that cannot be told, [] if they do not."""
        node, x = self.nodes[source[0]], self.values[source[0]][source[1]]
        if node.name == "argument":
            return [Observed("equal")]
        found: list[Observed] | None = None
        for whole, tolerance in self._references(source):
            some = self._types_of(x, whole, tolerance, node.is_inside)
            if some is not None:
                found = [*(found or []), *some]
        if node.spec is not None and found:
            inner = node.sources[0]
            if inner is not None and not any(self._fits(one, node.spec) for one in self.types(inner) or ()):
                return []
        return found

    def _types_of(self, x: np.ndarray, whole: np.ndarray, tolerance: float, is_inside: bool) -> list[Observed] | None:
        """Return as `every_way` does. Inside of a shard_map, the first dims of x are the axes of the mesh."""
        if is_inside:
            is_whole = x.ndim == len(self.axes) + whole.ndim
            devices = x.reshape(self.mesh.size, *x.shape[len(self.axes) :])
            return every_way(devices, whole, self.mesh, tolerance) if is_whole else None
        size = largest(whole) if whole.dtype != bool else 1.0
        return [Observed("equal")] * (gap(x, whole) <= tolerance * size) if x.shape == whole.shape else None

    def _fits(self, one: Observed, spec: Any) -> bool:
        cut = [tuple(name for name in entry if self.axes[name] > 1) for entry in map(names_in, spec)]
        while cut and not cut[-1]:
            cut.pop()
        return one.is_right and one.layout.spec == P(*cut)

    def is_right(self, source: Source | None) -> bool:
        return source is None or bool(self.types(source))

    def _is_plain(self, source: Source | None) -> bool:
        """Return whether it is right without a factor, which could come from a loss that is a mean of local means."""
        return source is None or any(one.factor == 1 for one in self.types(source) or ())

    def wrong(self) -> set[int]:
        """Return the places of the results that are not the reference's."""
        return {
            place for place, source in enumerate(self.nodes[self.last].sources)
            if not self.is_right((self.last, place)) or not self._copies_agree(source)
        }  # fmt: skip

    def _copies_agree(self, source: Source | None) -> bool:
        if source is None or self.nodes[source[0]].is_inside:
            return True
        node = self.nodes[source[0]]
        return self.is_right(source) if node.spec is not None else all(map(self._copies_agree, node.sources))

    # --- where it begins -----------------------------------------------------------------------------------------

    def chain(self, wrong: set[int], ends_at: Callable[[Source | None], bool] | None = None) -> list[int]:
        """Return the nodes that the wrong results depend on through wrong values only, in program order."""
        sources, ends_at = self.nodes[self.last].sources, ends_at or self.is_right
        ends = (source[0] for place in wrong if (source := sources[place]) is not None)
        return sorted(reached(ends, lambda at: [one[0] for one in self.nodes[at].sources if one and not ends_at(one)]))

    def firsts(self, wrong: set[int]) -> list[int]:
        """Return the nodes with right inputs and a wrong result. Behind a factor that may come from a mean of local
        means, only sums over devices can be at fault."""
        given = [at for at in self.chain(wrong) if self._departs(at)]
        behind = [at for at in self.chain(wrong, self._is_plain) if self._departs(at) and self.nodes[at].name in SUMS]
        inner, ends = ([at for at in given if (self.nodes[at].spec is None) == is_in] for is_in in (True, False))
        return list(dict.fromkeys([*inner, *behind, *ends]))

    def _departs(self, at: int) -> bool:
        names = ("axis_index", "argument", "ppermute")
        return self.nodes[at].name not in names and self._is_given(at) and self._is_wrong(at)

    def _is_given(self, at: int) -> bool:
        """Return whether the inputs are right."""
        return all(map(self.is_right, self.nodes[at].sources))

    def _is_wrong(self, at: int) -> bool:
        return any(self.types((at, place)) == [] for place in range(len(self.values[at])))

    def located(self, wrong: set[int]) -> tuple[str, str]:
        """Return the line at which the fault begins, as far as that can be told, and the operation there that has right
        inputs and a wrong result; "" if another factor may come from a mean of local means."""
        for at in self.firsts(wrong):
            node = self.nodes[at]
            if self.values[at][0].dtype.kind == "f" and not (node.is_backward and self._factor((at, 0))):
                return self.line(at), node.name if node.spec is None else ""
        chain = [at for at in self.chain(wrong) if self.line(at)]
        seen = [at for at in chain if self.values[at][0].dtype.kind == "f" and self._is_wrong(at)]
        given = [at for at in chain if self.nodes[at].name != "axis_index" and self._is_given(at)]
        return next((self.line(at) for at in [*given, *seen, *chain]), ""), ""

    def line(self, at: int, outermost: bool = False) -> str:
        frames = self.nodes[at].frames
        return line_text(*frames[-1 if outermost else 0]) if frames else ""

    # --- numbers -------------------------------------------------------------------------------------------------

    def _factor(self, source: Source) -> float | None:
        """Return f if a value is f times the reference's, whole or in pieces; None for 1."""
        x, node = self.values[source[0]][source[1]], self.nodes[source[0]]
        for whole, tolerance in self._references(source):
            size = largest(whole) if x.dtype.kind == "f" else 0.0
            ratio = largest(x) / size if size else 1.0
            if ratio and abs(ratio - 1) > 1e-2 and np.isfinite(ratio):
                types = self._types_of(x / ratio, whole, max(tolerance, 1e-4), node.is_inside)
                if any(one.is_right for one in types or ()):
                    return ratio
        return None

    def _size(self, factor: float) -> str:
        """Return the number of the run that a factor, or its inverse, equals, in words."""
        count = factor if factor > 1 else 1 / factor
        groups = [some for some in axis_sets(self.mesh) if self._is(count, self.mesh.axis_size(some))]
        found = [f"the number of devices along {label(some)}" for some in groups]
        rounds = Counter(node.key for node in self.nodes if node.name == "part").values()
        return " and ".join([*found, *["the number of rounds of a scan"] * any(self._is(count, one) for one in rounds)])

    @staticmethod
    def _is(count: float, size: int) -> bool:
        return size > 1 and near(count, size)
