"""Changes of one equation of a step that may make its results right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tplab.checking.gaps import near
from tplab.checking.observed import Observed, axis_sets
from tplab.checking.verdict import label
from tplab.jax.checking.departure import SUMS, Axes, Departure
from tplab.jax.checking.tape import Repair, Site, Source
from tplab.jax.tracing.exchange import EXCHANGES
from tplab.layout import layouts_for, take

MOST_PLACES = 3


class Repairs(Departure):
    """The possible repairs of a departure."""

    def repairs(self, wrong: set[int]) -> Iterator[Repair]:
        """Yield repairs, the likeliest first."""
        groups: dict[Any, list[int]] = {}
        for at in dict.fromkeys([*self.firsts(wrong), *self.firsts(self.wrong())]):
            groups.setdefault(self._group(at), []).append(at)
        for alike in list(groups.values())[:MOST_PLACES]:
            if self.nodes[alike[0]].name in SUMS:
                for some in dict.fromkeys([tuple(alike), tuple(self._alike(alike[0]))]):
                    yield from self._instead(some)
            else:
                yield from self._at(alike)
        chain = self.chain(wrong)
        for at in {self.nodes[at].key: at for at in reversed(chain) if self.nodes[at].name == "ppermute"}.values():
            back = [(target, source) for source, target in self.nodes[at].params["perm"]]
            axes = self.nodes[at].params["axis_name"]
            yield Repair(
                self._results(self._alike(at)), lambda x, _, axes=axes, back=back: lax.ppermute(x, axes, back),
                f"the ppermute in {self.line(at)} in the other direction",
                "the ppermute sends in the other direction than the rest of the step takes pieces to come from",
                self.line(at),
            )  # fmt: skip
        for at in [at for at in chain if self.nodes[at].name == "carry"]:
            others = [one for one in chain if self.nodes[one].key == self.nodes[at].key and self._is_wrong(one)]
            yield Repair(
                self._results(others), lambda rounds, _: rounds.sum(0), f"the sum of what {self.line(at)} carries",
                f"the scan in {self.line(at)} returns what its last round has computed, and the sum over its rounds is "
                "needed", self.line(at),
            )  # fmt: skip
        yield from self._divided(wrong, chain)
        yield from self._in_place(chain)

    def _group(self, at: int) -> Any:
        node = self.nodes[at]
        if node.name == "psum_invariant" and node.is_backward:  # inserted by jax.grad itself
            return node.name, node.frames[-1:]
        return node.key[:-1] if node.spec is not None else node.key

    def _alike(self, at: int) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if node.key == self.nodes[at].key]

    def _results(self, alike: Sequence[int]) -> list[Site]:
        return [(at, "result", place) for at in alike for place in range(len(self.values[at]))]

    def _type(self, source: Source | None) -> Observed | None:
        return next(iter(self.types(source) or ()), None) if source is not None else None

    def _at(self, alike: Sequence[int]) -> Iterator[Repair]:
        at, node, line = alike[0], self.nodes[alike[0]], self.line(alike[0])
        types = [self._type(source) for source in node.sources]
        yield from self._once(alike, types)
        for i, one in enumerate(types):
            if one is not None and one.kind == "apart":
                sites = [(s[0], "result", s[1]) for n in alike if (s := self.nodes[n].sources[i]) is not None]
                yield self._only(sites, one, line, f"that device's value on all of them before {line}")
            elif one is not None and one.is_partial:
                yield from self._added_up(alike, i, one)
        axes = types[0].layout.spec.axis_names if types and types[0] else ()
        if node.name in ("reduce_max", "reduce_min") and axes:
            call = "pmax" if node.name == "reduce_max" else "pmin"
            yield Repair(
                self._results(alike), lambda _, y: getattr(lax, call)(y, axes),
                f"a {call} over {label(axes)} after {node.name} in {line}",
                f"{node.name} sees only each device's part along {label(axes)}: a {call} is missing after it", line,
            )  # fmt: skip
        for place in range(len(self.values[at])):
            if (factor := self._factor((at, place))) and self._size(factor):
                yield self._scaled([(one, "result", place) for one in alike], factor, line, node.name)

    def _once(self, alike: Sequence[int], types: Sequence[Observed | None]) -> Iterator[Repair]:
        """Yield the division of an addend that every device adds to its part of a sum, so that it counts too often."""
        node, line = self.nodes[alike[0]], self.line(alike[0])
        for i, one in enumerate(types if node.name in ("add", "sub", "add_any") else ()):
            for other in types:
                if one is None or other is None or other is one or not other.is_partial:
                    continue
                count, axes = self.mesh.axis_size(other.axes), label(other.axes)
                if one.is_partial and (one.axes != other.axes or not near(one.factor, count * other.factor)):
                    continue
                how = "a mean" if one.is_partial else "the same"
                yield Repair(
                    [(where, "operand", i) for where in alike], lambda x, _, n=count: x / n,
                    f"what {line} adds divided by {count}, the number of devices along {axes}",
                    f"what {node.name} adds to a part of a sum over {axes} is {how} on each of {count} devices, and "
                    f"counts {count} times once they are added up", line,
                )  # fmt: skip
                break

    def _instead(self, alike: Sequence[int]) -> Iterator[Repair]:
        """Yield another reduction in place of a psum."""
        at, node, line = alike[0], self.nodes[alike[0]], self.line(alike[0])
        axes = tuple(name for name in node.params["axes"] if self.axes[name] > 1)
        if not axes:
            return
        sites, count, one = self._results(alike), self.mesh.axis_size(axes), self._type(node.sources[0])
        users = [other for other in self.nodes if other.name == "div" and other.frames == node.frames]
        is_mean = any((at, 0) in other.sources for other in users)
        call = "the pmean" if is_mean else "the psum"
        is_jaxs = node.is_backward and node.name == "psum_invariant"
        where = self.line(at, outermost=is_jaxs)
        call += " of the backward pass" if node.is_backward else ""
        if one is not None and one.kind == "apart":
            words = f"{call} in {line} of that device's value alone"
            yield self._only(sites, one, line, words, count if is_mean else 1)
        if not is_mean and one is not None and (one.is_partial or one.factor > 1):
            cause = f"{call} over {label(axes)} is where a mean is meant"
            if is_jaxs:
                cause = (
                    "with check_vma, jax.grad itself adds up over the devices the gradients of what is the same on "
                    "all: they are the sum of what each device's own loss gives, and a pmean of them changes nothing"
                )
            words = f"a pmean over {label(axes)} in place of {call} in {line}"
            yield Repair(sites, lambda _, y: y / count, words, cause, where)
        scale = count if is_mean else 1
        yield Repair(
            sites, lambda x, _: x * scale, f"without {call} over {label(axes)} in {line}",
            f"{call} over {label(axes)} combines what is the same on every device, or is to stay apart", where,
        )  # fmt: skip
        for other in axis_sets(self.mesh):
            if set(other) != set(axes):
                by = count / self.mesh.axis_size(other) if is_mean else 1.0
                yield Repair(
                    sites, lambda x, _, other=other, by=by: lax.psum(x, other) * by,
                    f"{call} in {line} over {label(other)} in place of {label(axes)}",
                    f"{call} is over {label(axes)}, and is to be over {label(other)}", where,
                )  # fmt: skip

    def _only(self, sites: Sequence[Site], only: Observed, line: str, words: str, by: int = 1) -> Repair:
        (name,) = only.axes
        rank = self.mesh.index(only.ranks[0], name)

        def becomes(x: Any, _: Any) -> Any:
            return lax.psum(jnp.where(lax.axis_index(name) == rank, x, jnp.zeros_like(x)), name) * by

        cause = f"only device {rank} along {name!r} has the value; what the others have there is combined with it"
        return Repair(sites, becomes, words, cause, line)

    def _added_up(self, alike: Sequence[int], operand: int, one: Observed) -> Iterator[Repair]:
        """Yield a psum or pmean of a part of a sum: where it becomes one, where it is used, or for one use."""
        node, line, axes, count = self.nodes[alike[0]], self.line(alike[0]), one.axes, self.mesh.axis_size(one.axes)
        sources = [source for i in alike if (source := self.nodes[i].sources[operand]) is not None]
        births = [self._birth(source, one) for source in sources]
        born = self.nodes[births[0][0]]
        is_own, is_last = born.is_backward and self._is_gradient(sources[0], births[0]), node.spec is not None
        where = self.line(births[0][0], outermost=is_last and (is_own or not born.is_backward))
        where = line if is_own and not is_last else where
        name = "gradients" if is_own else f"what {born.name} in {where} returns"
        for sites in ([(i, "result", place) for i, place in births], [(i, "result", place) for i, place in sources],
                      [(i, "operand", operand) for i in alike]):  # fmt: skip
            use = f", where {node.name} in {line} takes it" if sites[0][1] == "operand" else ""
            for call, by in (("psum", 1), ("pmean", count)) if one.factor == 1 else (("pmean", count), ("psum", 1)):
                cause = f"{name} is only each device's part of a sum over {label(axes)}: a {call} is missing"
                cause += f" before {node.name} in {line}" if line and line != where else ""
                if self._has_equal_copies(births[0], axes):
                    cause = f"{name} is 1/{count} of the sum over {label(axes)}: a mean where a sum is needed"
                elif is_last or is_own:
                    cause = f"each device has only its own part of {name}: a {call} over {label(axes)} is missing"
                elif born.is_backward:
                    cause = f"the backward pass lacks a {call} over {label(axes)}: {name} there is a part of a sum"
                words = f"a {call} over {label(axes)} of {name}{use}"
                yield Repair(sites, lambda _, y, by=by: lax.psum(y, axes) / by, words, cause, where, line)

    def _birth(self, source: Source, one: Observed) -> Source:
        """Return the value that first became partial."""
        while True:
            sources = [s for s in self.nodes[source[0]].sources if s is not None and self.nodes[s[0]].is_inside]
            parts = [s for s in sources if any(t.is_partial and t.axes == one.axes for t in self.types(s) or ())]
            if not parts:
                return source
            source = parts[0]

    def _is_gradient(self, source: Source, birth: Source) -> bool:
        """Return whether a gradient changes only its layout and scale between its origin and its use."""
        while source != birth:
            node = self.nodes[source[0]]
            if node.name in ("dot_general", "mul") and node.is_backward:
                return False
            source = max((s for s in node.sources if s is not None and s >= birth), default=birth)
        return True

    def _has_equal_copies(self, source: Source, axes: Axes) -> bool:
        x, places = self.values[source[0]][source[1]], [list(self.axes).index(name) for name in axes]
        return all(np.allclose(x, np.take(x, [0], place)) for place in places)

    def _divided(self, wrong: set[int], chain: Sequence[int]) -> Iterator[Repair]:
        """Yield values that wrong results depend on, divided by the factor of these."""
        sources = self.nodes[self.last].sources
        factors = {place: self._factor((self.last, place)) for place in sorted(wrong)}
        for factor in {round(one, 3): one for one in factors.values() if one and self._size(one)}.values():
            ends = [sources[place] for place, one in factors.items() if one and abs(one / factor - 1) < 1e-2]
            inner = [self.nodes[s[0]].sources[0] if self.nodes[s[0]].spec is not None else s for s in ends if s]
            sites = [(s[0], "result", s[1]) for s in inner if s is not None]
            if sites:
                end = self.nodes[sites[0][0]]
                line = self.line(sites[0][0], outermost=end.is_backward and end.name != "div")
                yield self._scaled(sites, factor, line, "gradients" if end.is_backward else end.name)
            for at in (i for i in chain if self.nodes[i].name in SUMS):
                yield self._scaled(self._results(self._alike(at)), factor, self.line(at), "the psum")

    def _scaled(self, sites: Sequence[Site], factor: float, line: str, name: str) -> Repair:
        by = f"divided by {factor:.4g}" if factor > 1 else f"times {1 / factor:.4g}"
        cause = f"what {name} in {line} returns is right {by}, which is {self._size(factor)}"
        return Repair(sites, lambda _, y: y / factor, f"what {name} in {line} returns, {by}", cause, line)

    def _in_place(self, chain: Sequence[int]) -> Iterator[Repair]:
        """Yield the reference's value in place of a wrong one: everything after it is then right."""
        known = [at for at in chain if self.nodes[at].is_inside and self.line(at) and self._is_wrong(at)]
        least = 2 * self.mesh.size  # more than a number on each device
        known = [at for at in known if self.values[at][0].size >= least and self.values[at][0].dtype.kind in "fiu"]
        for at in known[:MOST_PLACES]:
            whole, _ = next(self._references((at, 0)))
            local = self.values[at][0].shape[len(self.axes) :]
            layout = next(iter(layouts_for(whole.shape, [local] * self.mesh.size, self.mesh)), None)
            if layout is None:
                continue
            pieces = np.stack([take(whole, layout, self.mesh, rank) for rank in self.mesh.ranks])
            pieces = pieces.reshape(*self.axes.values(), *local)

            def becomes(_: Any, y: Any, pieces: Any = pieces) -> Any:
                return jnp.asarray(pieces, y.dtype)[tuple(map(lax.axis_index, self.axes))]

            name, line, axes = self.nodes[at].name, self.line(at), layout.spec.axis_names
            part = f", of which each device needs its part along {label(axes)}" if axes else ""
            if name in ("random_bits", "threefry2x32"):
                part += ": random numbers are drawn there on each device, and one device draws others"
            sends = [one for one in chain if one < at and self.nodes[one].name in EXCHANGES]
            yield Repair(
                [(at, "result", 0)], becomes, f"the reference's value in place of what {name} in {line} returns",
                f"{name} returns something else there than on one device{part}; nothing after it is wrong", line,
                self.line(sends[-1]) if sends else "", is_step=False,
            )  # fmt: skip
