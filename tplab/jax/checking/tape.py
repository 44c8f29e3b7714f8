"""A training step taken apart: every equation in program order, with its result on each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tplab.jax.tracing.jaxprs import called, folded, frames_of, is_transposed, loop_parts, opened, own_frames
from tplab.mesh import Mesh
from tplab.sharding import P, join, split

Source = tuple[int, int]
"""A node, and the index of one of its results."""
Site = tuple[int, str, int]
"""A node, "result" or "operand", and its index."""

_QUICKLY = {"xla_backend_optimization_level": 0}
"""Compilation takes far longer than the run."""
MOST_ROUNDS = 64
"""Longer loops are one equation."""
_TYPE_ONLY = {"pvary", "pcast", "sharding_constraint", "optimization_barrier"}


class Node(NamedTuple):
    """An equation, once for each time that it is evaluated.

    key      its lines and what it computes: the same in the step on another mesh
    sources  the sources of its operands; None for a literal
    is_inside   whether it is in a shard_map; `spec`: for a result of one, its out_specs
    frames   the lines of the program that it comes from, the innermost first
    """

    key: tuple[Any, ...]
    name: str
    sources: tuple[Source | None, ...]
    frames: tuple[tuple[str, int], ...] = ()
    is_backward: bool = False
    is_inside: bool = False
    spec: Any = None
    params: Mapping[str, Any] = {}


class Repair(NamedTuple):
    """A replacement of results, or operands, of equations.

    becomes   (the operand, the result) on each device -> the replacement
    words     the same for a reader; cause: the cause of the fault, if this mends it
    where     the line at fault; other: another that has to do with it
    is_step   whether it may be one of several that mend a step together
    """

    sites: Sequence[Site]
    becomes: Callable[[Any, Any], Any]
    words: str
    cause: str
    where: str
    other: str = ""
    is_step: bool = True


class Tape:
    """`step` on a mesh, evaluated on one device, where the devices of the mesh are dims of arrays.

    nodes     all equations in program order
    """

    def __init__(self, step: Callable[..., Any], args: Sequence[Any], axes: Mapping[str, int]):
        self.axes, self.nodes = dict(axes), list[Node]()
        self._closed = jax.make_jaxpr(step)(*args)
        self._args = jax.tree.leaves(args)

    def values(
        self,
        *runs: Sequence[Any],
        done: Sequence[Repair] = (),
        tried: Sequence[Repair] = (),
        watched: Sequence[int] = (),
    ) -> Iterator[list[list[Any]]]:
        """Yield each node's results for each of `runs`, which are arguments: those of the step unless others are given.

        The changes in `done` are made. If some are `tried`, there is a run for each, which keeps only the results of
        `watched` nodes, and the values that enter and leave a shard_map. All runs share one compilation. Inside of a
        shard_map, values have the axes of the mesh as their first dims. The last node has the step's results.
        """

        def run(which: Any, *given: Any) -> Any:
            walk = _Walk(self.axes, [(change, None) for change in done] + list(zip(tried, range(len(tried)))), which)
            read = [walk.note(("argument", i), "argument", (), [x])[0] for i, x in enumerate(given)]
            found = walk.evaluate(self._closed, read, ())
            walk.note(("results",), "results", [source for _, source in found], [x for x, _ in found])
            self.nodes, kept = walk.nodes, {*watched, len(walk.nodes) - 1}
            for at, node in enumerate(walk.nodes):
                if node.spec is not None or at in watched:
                    kept |= {at, *(source[0] for source in node.sources if source)}
            return [x if not tried or at in kept else [] for at, x in enumerate(walk.kept)]

        compiled = jax.jit(run, compiler_options=_QUICKLY)
        for given in runs or (self._args,):
            for which in range(len(tried)) if tried else [-1]:
                yield jax.tree.map(_in_numpy, compiled(which, *jax.tree.leaves(given)))


class _Walk:
    def __init__(self, axes: Mapping[str, int], changes: Sequence[tuple[Repair, int | None]], which: Any):
        self.axes, self.nodes, self.kept, self._which = axes, list[Node](), list[list[Any]](), which
        self._is_inside = False
        self._changes: dict[Site, list[tuple[Repair, int | None]]] = {}
        for change, number in changes:
            for site in dict.fromkeys(change.sites):
                self._changes.setdefault(site, []).append((change, number))

    def note(
        self, key: Any, name: str, sources: Sequence[Source | None], results: Sequence[Any], **more: Any
    ) -> list[tuple[Any, Source]]:
        number = len(self.nodes)
        self.nodes.append(Node(key, name, tuple(sources), **{"is_inside": self._is_inside, **more}))
        self.kept.append(list(results))
        return [(x, (number, place)) for place, x in enumerate(results)]

    def _changed(self, number: int, kind: str, place: int, operand: Any, x: Any) -> Any:
        for change, which in self._changes.get((number, kind, place), ()):
            other = change.becomes(operand, x).astype(x.dtype)
            x = other if which is None else jnp.where(self._which == which, other, x)
        return x

    def evaluate(self, inner: Any, args: Sequence[Any], path: Any) -> list[Any]:
        jaxpr, _ = opened(inner)

        def visit(eqn: Any, given: list[Any], _: Any) -> list[Any]:
            frames = own_frames(frames_of(eqn, jaxpr)) or (path[-1][0] if path else ())
            within = (*path, (frames, eqn.primitive.name, is_transposed(eqn)))
            if (body := called(eqn)) is not None:
                return self.evaluate(body, given, within)
            if eqn.primitive.name == "scan" and eqn.params["length"] <= MOST_ROUNDS:
                return self._scan(eqn, given, within)
            if eqn.primitive.name == "shard_map":
                return self._mapped(eqn.params, given, within)
            number, sources = len(self.nodes), [source for _, source in given]
            inputs = [self._changed(number, "operand", i, x, x) for i, (x, _) in enumerate(given)]
            found = _bound(eqn, inputs)
            operands = inputs if len(inputs) == len(found) else [inputs[0] if inputs else None] * len(found)
            found = [self._changed(number, "result", i, operands[i], x) for i, x in enumerate(found)]
            back = any(step[2] for step in within)
            more = {"frames": frames, "is_backward": back, "params": eqn.params}
            return self.note(within, eqn.primitive.name, sources, found, **more)

        return folded(inner, args, visit, given=lambda value, _: (value, None))

    def _scan(self, eqn: Any, given: list[Any], path: Any) -> list[Any]:
        params, (consts, carry, xs) = eqn.params, loop_parts(eqn, given)
        num_carry, rounds = len(carry), range(params["length"])
        found, carried = list[list[Any]](), list[list[Any]]()
        for at in reversed(rounds) if params["reverse"] else rounds:
            parts = [self.note((*path, "part"), "part", [source], [x[at]])[0] for x, source in xs]
            out = self.evaluate(params["jaxpr"], [*consts, *carry, *parts], path)
            carry, found = out[:num_carry], [*found, out[num_carry:]]
            carried.append(carry)
        found = found[::-1] if params["reverse"] else found
        stacked = [([x for x, _ in column], [source for _, source in column]) for column in zip(*found)]
        carry = [self._carried(column, path) for column in zip(*carried)] if carried else carry
        return [*carry, *(self.note((*path, "stack"), "stack", s, [jnp.stack(x)])[0] for x, s in stacked)]

    def _carried(self, rounds: Sequence[Any], path: Any) -> Any:
        """Return the final carry of a scan; the operand of a change is its carry from all rounds."""
        number, (x, _) = len(self.nodes), rounds[-1]
        if (number, "result", 0) in self._changes:
            x = self._changed(number, "result", 0, jnp.stack([one for one, _ in rounds]), x)
        return self.note((*path, "carry"), "carry", [rounds[-1][1]], [x], frames=path[-1][0])[0]

    def _mapped(self, params: Mapping[str, Any], given: Sequence[Any], path: Any) -> list[Any]:
        """Evaluate a shard_map by a vmap for each axis of its mesh."""
        specs, outer = list(zip(params["in_specs"], given)), self.kept
        cut = [_cut(x, spec, self.axes) for spec, (x, _) in specs]
        found: list[Any] = []

        def body(_: Any, *pieces: Any) -> Any:
            self.kept, self._is_inside = [], True
            read = [
                self.note((*path, "cut", i), "cut", [source], [x])[0]
                for i, (x, (_, (_, source))) in enumerate(zip(pieces, specs))
            ]
            out = self.evaluate(params["jaxpr"], read, path)
            found[:] = [source for _, source in out]
            return self.kept, [x for x, _ in out]

        mapped: Callable[..., Any] = body
        for name in reversed(list(self.axes)):
            mapped = jax.vmap(mapped, axis_name=name, axis_size=self.axes[name])
        kept, out = mapped(np.zeros(tuple(self.axes.values())), *cut)
        self.kept, self._is_inside = [*outer, *kept], False
        frames = path[-1][0]
        results = []
        for i, (x, source, spec) in enumerate(zip(out, found, params["out_specs"], strict=True)):
            more = {"frames": frames, "spec": spec}
            results += self.note((*path, "result", i), "result", [source], [_joined(x, spec, self.axes)], **more)
        return results


def _bound(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in _TYPE_ONLY:
        return list(inputs)
    if name in ("psum", "psum_invariant"):
        return [lax.psum(x, params["axes"], axis_index_groups=params.get("axis_index_groups")) for x in inputs]
    if name == "all_gather_invariant":
        dim, tiled = params["all_gather_dimension"], params["tiled"]
        return [lax.all_gather(x, params["axis_name"], axis=dim, tiled=tiled) for x in inputs]
    results = eqn.primitive.bind(*inputs, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _cut(x: Any, spec: Any, axes: Mapping[str, int]) -> Any:
    """Return each device's piece: the axes of the mesh are the first dims."""
    pieces = split(jnp.asarray(x), P(*spec), Mesh(**axes))
    return jnp.stack(pieces).reshape(*axes.values(), *pieces[0].shape)


def _joined(x: Any, spec: Any, axes: Mapping[str, int]) -> Any:
    """Return the whole that out_specs make of the pieces: the first copy, if a spec says that there are copies."""
    mesh = Mesh(**axes)
    places = np.arange(x.size).reshape(mesh.size, *x.shape[len(axes) :])
    return x.reshape(-1)[join([*places], P(*spec), mesh)]


def _in_numpy(x: Any) -> Any:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else np.asarray(x)
