"""`same_model`: does a training step train the same model on a mesh as on one device?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tplab.checking.causes import Sizes
from tplab.checking.gaps import gap, largest
from tplab.checking.observed import Way, factor_between, first_fit
from tplab.checking.same_model import NOT_FINITE, Finding, Row, SameModel, What, cannot_tell, could_not_run, named
from tplab.checking.verdict import EPSILON, NEITHER, Rounding, coarsest
from tplab.jax.checking.bench import explained
from tplab.jax.checking.given import Given, named_leaves, nudge, under
from tplab.jax.ranks.devices import jax_mesh
from tplab.jax.tracing.jaxprs import equations_of
from tplab.mesh import Mesh

ORDER: tuple[What, ...] = ("loss", "gradient", "norm", "optimizer", "parameters", "log")
_KINDS: dict[str, What] = {
    "loss": "loss", "grad": "gradient", "norm": "norm", "param": "parameters", "opt": "optimizer", "state": "optimizer",
}  # fmt: skip
MOST_OWN = 0.1
"""How far the reference may be off by its own rounding before a comparison with it is meaningless."""
MOST_ELEMENTS = 2**25
"""The most elements that all devices compute for a step to be taken apart; a larger step is only compared."""


def same_model(
    step: Callable[[jax.sharding.Mesh], Callable[..., Any]],
    args: Sequence[Any] = (),
    *,
    mesh: Mesh | jax.sharding.Mesh | None = None,
    reference_mesh: Mesh | jax.sharding.Mesh | None = None,
) -> SameModel:
    """Check that a training step computes the same on a mesh as on one device:

        same_model(make_step, (params, x, y), mesh=Mesh(dp=4))

    It runs the step once on each mesh, on CPU devices if there are not enough others, and compares all that it returns:
    the loss, gradients, their norm, and the update of the parameters. It reports what is first wrong, with its factor,
    its line and its usual cause. Every device's copy of each result is compared, not only the first one's.

    step    a mesh -> a training step, jitted or not; `lambda mesh: step` where it has no mesh in it
    args    what the step is called with; the first one is the parameters. All are whole, and the same for both meshes,
            on which arrays with Explicit axes are laid out as their types say. Refs are not changed; what the step
            writes into them is compared, too
    mesh, reference_mesh   without the second, one of the same axes with one device
    The names of results, as in {"loss": ..., "grads": ...} or an object's fields, say what they are; without any, a
    single number is the loss, and results with the names and shapes of parameters are their new values.

    Partitioning by XLA is not tested: arguments are whole arrays, of which XLA gives each device its piece, and a step
    without a `shard_map` is one program, which XLA does not change. The size of rounding follows from the dtypes, and
    from a second run of the reference with each argument off by one rounding.
    Raises whatever the step raises on the mesh, and ValueError without a mesh.
    """
    if not isinstance(mesh, Mesh | jax.sharding.Mesh):
        raise ValueError("give the mesh on which the step is to run: mesh=Mesh(dp=4), or one of JAX's")
    mesh = mesh if isinstance(mesh, jax.sharding.Mesh) else jax_mesh(mesh, "simulated")
    if reference_mesh is None:
        alone = jax_mesh(Mesh(**dict.fromkeys(mesh.axis_names, 1)), "simulated")
        reference_mesh = jax.sharding.Mesh(alone.devices, mesh.axis_names, axis_types=mesh.axis_types)
    if not isinstance(reference_mesh, jax.sharding.Mesh):
        reference_mesh = jax_mesh(reference_mesh, "simulated")
    about = f"{_text(mesh)}, compared with {_text(reference_mesh)}"
    if mesh.size == 1:
        return cannot_tell("the mesh has one device", about=about)
    given = Given(args)
    args = given.whole
    ours, theirs = (given.to(step, each) for each in (mesh, reference_mesh))
    jaxpr = under(mesh, jax.make_jaxpr(ours))(*args).jaxpr
    computed = [v.aval for eqn, _ in equations_of(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")]
    dtype = coarsest(str(aval.dtype) for aval in computed)
    others = [nudge(args, seed, EPSILON[dtype]) for seed in range(2)]
    try:
        want, *again = [_results(under(reference_mesh, theirs), each) for each in (args, *others)]
    except (TypeError, ValueError) as error:
        first = str(error).partition(chr(10))[0]
        return could_not_run(f"the reference raised {type(error).__name__}: {first}", about=about)
    got = _results(under(mesh, ours), args)
    if [one.name for one in got] != [one.name for one in want]:
        return cannot_tell("the step returns something else on one device", about=about)
    if not got:
        return cannot_tell("the step returns no floating-point numbers", about=about)
    if lost := [one.name or "the result" for one in want if not _is_finite(one.whole)]:
        return cannot_tell(f"{named(lost)} is not finite on one device", about=about)

    def in_full(finding: Finding, wrong: set[int]) -> Finding:
        if sum(aval.size for aval in computed) * mesh.size > MOST_ELEMENTS:
            return replace(finding, tried=("nothing: the step is too large to be evaluated equation by equation",))
        try:
            return explained(finding, wrong, ours, theirs, args, others[0], dict(mesh.shape), comparison.slack)
        except Exception as error:  # a vmap has many limits: the comparison is then without a cause
            first = str(error).partition(chr(10))[0]
            tried = f"nothing: the step cannot be taken apart: {type(error).__name__}: {first}"
            return replace(finding, tried=(tried,))

    floats = [x for x in jax.tree.leaves(args) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    rounding = Rounding.of([(dtype, np.shape(x)) for x in floats], [])
    comparison = _Comparison(args, others, mesh, rounding, in_full)
    has_ranks = any(eqn.primitive.name == "shard_map" for eqn, _ in equations_of(jaxpr))
    return comparison.report(got, want, again, has_ranks, about)


class _Result(NamedTuple):
    """One array that a step returned: its place among all, its name, its values, and each device's copy or piece, after
    its index in the whole."""

    place: int
    name: str
    whole: np.ndarray
    pieces: list[tuple[Any, np.ndarray]]


class _Comparison:
    """Compares the results of both, one by one.

    others   the arguments of further runs of the reference, each number off by a rounding
    in_full  returns a finding with its line and cause, given the places of the wrong results
    """

    def __init__(
        self, args: Sequence[Any], others: Sequence[Sequence[Any]], mesh: jax.sharding.Mesh, rounding: Rounding,
        in_full: Callable[[Finding, set[int]], Finding],
    ):  # fmt: skip
        self.params, *self.others = [dict(_named(given[0])) if given else {} for given in (args, *others)]
        self.rounding, self._in_full = rounding, in_full
        sixteen = rounding.dtype in ("bfloat16", "float16")
        self.slack = 4 * EPSILON[rounding.dtype] if sixteen else rounding.tolerance
        self.sizes = Sizes(mesh.size, [mesh.shape[name] for name in mesh.axis_names])

    def report(
        self, got: Sequence[_Result], want: Sequence[_Result], again: Sequence[Sequence[_Result]], has_ranks: bool,
        about: str,
    ) -> SameModel:  # fmt: skip
        wrong: dict[int, Finding] = {}  # by the place of the result
        seen: dict[What, list[tuple[float, float]]] = {}
        noisy: list[str] = []
        for ours, theirs, *moved in zip(got, want, *again, strict=True):
            what, before = self._what(ours, theirs)
            base = self.params[before] if before else 0.0
            values = theirs.whole - base
            size = largest(values[np.isfinite(values)]) or 1.0
            bases = [given[before] if before else 0.0 for given in self.others]
            own = max(gap(one.whole - at, values) for one, at in zip(moved, bases, strict=True)) / size
            tolerance = max(self.slack, 8 * own)
            if own > MOST_OWN:
                noisy.append(ours.name)
                continue
            pieces = [(piece - _at(base, index), _at(values, index)) for index, piece in ours.pieces]
            far = max((gap(piece, right) for piece, right in pieces), default=0.0) / size
            seen.setdefault(what, []).append((far, tolerance))
            if far > tolerance:
                wrong[ours.place] = self._judged(what, ours, pieces, tolerance * size, size)
        first = min(wrong.values(), default=None, key=lambda one: (not one.is_not_finite, ORDER.index(one.what)))
        findings = [self._finding(first, wrong)] if first else []
        rows = [Row(what, 0, None, _WHOLE) for what in ("weights", "samples")]
        for what in ORDER:
            if what in seen:
                rows.append(self._row(what, seen[what], first, any(one.what == what for one in wrong.values())))
        notes = [
            f"{self.rounding.dtype}: up to {self.slack:.2g} of the largest element is rounding, as is up to 8 times "
            "what one rounding of the arguments changes in the same result of the reference"
        ]
        if noisy:
            notes.append(f"not compared: one rounding of the arguments changes {named(noisy)} by over {MOST_OWN:.0%}")
        if not has_ranks:
            notes.append("no shard_map: XLA divides one program, and its results can differ by rounding only")
        reason = "" if seen else "rounding alone changes everything that the step returns"
        return SameModel(rows, findings, notes=notes, about=about, reason=reason)

    def _what(self, ours: _Result, theirs: _Result) -> tuple[What, str]:
        """Return the quantity that a result is, and for a parameter after the step its name before; else ""."""
        what: What | None = next((kind for word, kind in _KINDS.items() if word in ours.name.lower()), None)
        alike = (
            n for n, x in self.params.items() if f".{ours.name}".endswith(f".{n}") and x.shape == theirs.whole.shape
        )
        before = next(alike, "")
        if what is None:
            what = "parameters" if before else "log" if theirs.whole.shape else "loss"
        return what, before if what == "parameters" else ""

    def _judged(
        self, what: What, ours: _Result, pieces: list[tuple[np.ndarray, np.ndarray]], slack: float, size: float
    ) -> Finding:
        """Return how a wrong result relates to the right one. pieces: the actual and expected value on each device"""
        got, right = (dict(enumerate(some)) for some in zip(*pieces, strict=True))
        bad = tuple(rank for rank in got if gap(got[rank], right[rank]) > slack)
        copies: dict[str, list[int]] = {}  # by their place in the whole
        for rank, (index, _) in enumerate(ours.pieces):
            copies.setdefault(str(index), []).append(rank)
        groups, text, factor = [*copies.values()], NEITHER, None
        if not all(np.isfinite(x).all() or not np.isfinite(want).all() for x, want in pieces):
            text = f"{NOT_FINITE} on the mesh, as it is on one device"
        elif any(gap(got[rank], got[group[0]]) > slack for group in groups for rank in group):
            found = first_fit(got, [Way(right, [((), groups)])], slack)
            total = found.factor if found is not None and found.is_partial else 0.0
            how = {1.0: "sum", float(len(groups[0])): "mean"}.get(total, "")
            text = "its own part on each device" + f"; their {how} is the reference's" * bool(how)
        elif (times := factor_between(pieces, max(4 * slack, 1e-3 * size))) and abs(times - 1) > 1e-3:
            text, factor = self.sizes.words(times), times
        whose = () if len(bad) == len(pieces) else bad
        return Finding(what, ours.name, 0, text, factor, got=_about(got[0]), want=_about(right[0]), ranks=whose)

    def _finding(self, first: Finding, wrong: Mapping[int, Finding]) -> Finding:
        alike = {place: one for place, one in wrong.items() if one.what == first.what}
        others = [one.name for one in alike.values() if one is not first and one.text_of_factor == first.text_of_factor]
        name = "" if first.what in ("loss", "norm") else first.name
        return self._in_full(replace(first, name=name, others=tuple(others)), {*alike})

    def _row(self, what: What, gaps: Sequence[tuple[float, float]], first: Finding | None, is_wrong: bool) -> Row:
        far, tolerance = max(gaps, key=lambda one: one[0] / one[1])
        measured = f"off by {far:.2g}, where {tolerance:.2g} is rounding"
        if first is not None and what == first.what:
            return Row(what, 0, False, f"{first.text_of_factor}; {measured}", first.name, first.factor)
        if is_wrong:
            return Row(what, 0, None, f"not judged: it may follow; {measured}")
        return Row(what, 0, True, f"{measured}; {len(gaps)} compared")


_WHOLE = "not tested: arguments are whole arrays, of which XLA gives each device its piece"


def _results(step: Callable[..., Any], args: Sequence[Any]) -> list[_Result]:
    """Return all arrays that a step returns, with each device's part of them."""
    found = []
    for place, (name, leaf) in enumerate(named_leaves(step(*args))):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            continue
        leaf = jnp.asarray(leaf)
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        pieces = [(shard.index, np.asarray(shard.data, np.float64)) for shard in shards]
        found.append(_Result(place, name, np.asarray(leaf, np.float64), pieces))
    return found


def _named(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for name, leaf in named_leaves(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            yield name, np.asarray(leaf, np.float64)


def _at(x: Any, index: Any) -> Any:
    return x[index] if isinstance(x, np.ndarray) else x


def _is_finite(x: np.ndarray) -> bool:
    """Return whether it has no NaN, and a finite element: a mask of infinities may be intended."""
    return not np.isnan(x).any() and (not x.size or bool(np.isfinite(x).any()))


def _about(x: np.ndarray) -> str:
    return f"{float(x):.6g}" if not x.shape else f"a norm of {float(np.linalg.norm(x)):.6g}"


def _text(mesh: jax.sharding.Mesh) -> str:
    return f"the step on {Mesh(**mesh.shape)}" if mesh.size > 1 else "one device"
