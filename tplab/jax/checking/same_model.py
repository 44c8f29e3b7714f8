"""`same_model`: does a training step train the same model on a mesh as on one device?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tplab.checking.causes import Sizes, thread
from tplab.checking.same_model import Finding, Row, SameModel, What, cannot_tell, could_not_run
from tplab.checking.verdict import EPSILON, Rounding
from tplab.jax.checking.lines import Lines
from tplab.jax.ranks.devices import jax_mesh
from tplab.mesh import Mesh

ORDER: tuple[What, ...] = ("loss", "gradient", "norm", "parameters", "optimizer", "log")
_KINDS: dict[str, What] = {
    "loss": "loss", "grad": "gradient", "norm": "norm", "param": "parameters", "opt": "optimizer", "state": "optimizer",
}  # fmt: skip
MOST_OWN = 0.1
"""How far the reference may be off by its own rounding, before a comparison with it says nothing."""


def same_model(
    step: Callable[[jax.sharding.Mesh], Callable[..., Any]],
    args: Sequence[Any] = (),
    *,
    mesh: Mesh | jax.sharding.Mesh | None = None,
    reference_mesh: Mesh | jax.sharding.Mesh | None = None,
) -> SameModel:
    """Whether a training step computes on a mesh what it computes on one device:

        same_model(make_step, (params, x, y), mesh=Mesh(dp=4))

    It runs the step once on each mesh, on CPU devices where there are not enough others, and compares all that it
    returns: the loss, gradients, their norm, and what it has added to the parameters. What is first wrong is said with
    its factor, its line and its usual cause. Every device's copy of each result is looked at, not only the first one's.

    step    a mesh -> a training step, jitted or not; `lambda mesh: step` where it has no mesh in it
    args    what the step is called with; the first one is the parameters. All are whole, and the same for both meshes
    mesh, reference_mesh   without the second, one of the same axes with one device
    Which result is what is read from names, as in {"loss": ..., "grads": ...} or an object's fields; without any, a
    single number is the loss, and what is like the parameters is their new values.

    What partitioning cannot get wrong is not tested: arguments are whole arrays, of which XLA gives each device its
    piece, and a step without a `shard_map` is one program, which XLA does not change. How much may be rounding follows
    from the dtypes, and from running the reference again with each argument off by one rounding.
    Raises whatever the step raises on the mesh, and ValueError without a mesh.
    """
    if mesh is None:
        raise ValueError("give the mesh on which the step is to run: mesh=Mesh(dp=4), or one of JAX's")
    mesh = mesh if isinstance(mesh, jax.sharding.Mesh) else jax_mesh(mesh, "simulated")
    if reference_mesh is None:
        reference_mesh = Mesh(**dict.fromkeys(mesh.axis_names, 1))
    if not isinstance(reference_mesh, jax.sharding.Mesh):
        reference_mesh = jax_mesh(reference_mesh, "simulated")
    about = f"{_text(mesh)}, compared with {_text(reference_mesh)}"
    args = [jax.tree.map(_host, arg) for arg in args]
    ours = step(mesh)
    lines = Lines(ours, args, Mesh(**mesh.shape))
    theirs = step(reference_mesh)
    try:
        lines.compare(theirs, args)
        others = _nudged(args, EPSILON.get(lines.dtype, 2.0**-23))
        want, again = _results(theirs, args), _results(theirs, others)
    except (TypeError, ValueError) as error:
        first = str(error).partition(chr(10))[0]
        return could_not_run(f"the reference raised {type(error).__name__}: {first}", about=about)
    got = _results(ours, args)
    if [one.path for one in got] != [one.path for one in want]:
        return cannot_tell("the step returns something else on one device", about=about)
    rounding = Rounding.of(_sizes(args, lines.dtype), [])
    return _Comparison(args, others, mesh, lines, rounding).report(got, want, again, about)


class _Result(NamedTuple):
    """One array that a step returned: its path, its values, and each device's copy or piece, with its place in all."""

    path: str
    whole: np.ndarray
    pieces: list[tuple[int, Any, np.ndarray]]


class _Wrong(NamedTuple):
    place: int
    what: What
    name: str
    factor: float | None
    text: str
    ranks: tuple[int, ...]
    got: str
    want: str
    kind: str


class _Comparison:
    """The results of both, one by one.

    others   the arguments of the second run of the reference, each number off by a rounding
    """

    def __init__(
        self, args: Sequence[Any], others: Sequence[Any], mesh: jax.sharding.Mesh, lines: Lines, rounding: Rounding
    ):
        self.params = dict(_named(args[0])) if args else {}
        self.others = dict(_named(others[0])) if others else {}
        self.mesh, self.lines, self.rounding = mesh, lines, rounding
        sixteen = rounding.dtype in ("bfloat16", "float16")
        self.slack = 4 * EPSILON[rounding.dtype] if sixteen else rounding.tolerance
        groups = [mesh.shape[name] for name in mesh.axis_names]
        self.sizes = Sizes(mesh.size, groups)

    def report(
        self, got: Sequence[_Result], want: Sequence[_Result], again: Sequence[_Result], about: str
    ) -> SameModel:
        wrong: list[_Wrong] = []
        seen: dict[What, list[float]] = {}
        for place, (ours, theirs, other) in enumerate(zip(got, want, again, strict=True)):
            what, before = self._what(ours, theirs)
            base = self.params[before] if before else 0.0
            values, nudged = theirs.whole - base, other.whole - (self.others[before] if before else 0.0)
            size = float(np.abs(values).max(initial=0)) or 1.0
            own = float(np.abs(nudged - values).max(initial=0)) / size
            tolerance = max(self.slack, 8 * own)
            if own > MOST_OWN:
                continue
            pieces = [(piece - _at(base, index), _at(values, index)) for _, index, piece in ours.pieces]
            gap = max((_gap(piece, right) for piece, right in pieces), default=0.0)
            seen.setdefault(what, []).append(gap / size)
            if gap > tolerance * size:
                wrong.append(self._judged(place, what, ours, values, base, tolerance * size))
        first = self._first(wrong)
        findings = [self._finding(first, [one for one in wrong if one.what == first.what])] if first else []
        rows = [Row(what, 0, None, _WHOLE) for what in ("weights", "samples")]
        for what in ORDER:
            if what in seen:
                rows.append(self._row(what, seen[what], first, any(one.what == what for one in wrong)))
        notes = [
            f"{self.lines.dtype}: up to {self.slack:.2g} of the largest element is rounding, as is up to 8 times what "
            "one rounding of the arguments changes in the reference"
        ]
        if not self.lines.has_ranks:
            notes.append("no shard_map: XLA divides one program, and its results can differ by rounding only")
        return SameModel(rows, findings, notes=notes, about=about)

    def _what(self, ours: _Result, theirs: _Result) -> tuple[What, str]:
        """What a result is, and of a parameter after the step its name before; "" otherwise."""
        what: What | None = next((kind for word, kind in _KINDS.items() if word in ours.path.lower()), None)
        alike = (n for n, x in self.params.items() if ours.path.endswith(n) and x.shape == theirs.whole.shape)
        before = next(alike, "")
        if what is None:
            what = "parameters" if before else "log" if theirs.whole.shape else "loss"
        return what, before if what == "parameters" else ""

    def _judged(self, place: int, what: What, ours: _Result, want: np.ndarray, base: Any, slack: float) -> _Wrong:
        """What a wrong result is to the right one."""
        pieces = [(rank, piece - _at(base, index), _at(want, index)) for rank, index, piece in ours.pieces]
        bad = tuple(rank for rank, piece, right in pieces if _gap(piece, right) > slack)
        size = float(np.abs(want).max(initial=0)) or 1.0
        factors = [_factor(piece, right, slack / size) for _, piece, right in pieces]
        factor = factors[0]
        if factor is not None and not all(one is not None and abs(one / factor - 1) < 1e-2 for one in factors):
            factor = None
        kind, text = "other", "neither a multiple of the reference nor parts of it"
        copies: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}  # by their place in the whole
        for (_, piece, right), (_, index, _) in zip(pieces, ours.pieces):
            copies.setdefault(str(index), []).append((piece, right))
        if any(_gap(piece, same[0][0]) > slack for same in copies.values() for piece, _ in same):
            kind, text, factor = "own", "its own part on each device", None
            sums = [(np.sum([piece for piece, _ in same], 0), same[0][1], len(same)) for same in copies.values()]
            if all(_gap(total, right) <= slack for total, right, _ in sums):
                text += "; their sum is the reference's"
            elif all(_gap(total / count, right) <= slack for total, right, count in sums):
                text += "; their mean is the reference's"
        elif factor is not None:
            kind, text = "factor", self.sizes.words(factor)
        whose = () if len(bad) == len(pieces) else bad
        return _Wrong(
            place, what, _name(ours.path), factor, text, whose, _about(pieces[0][1]), _about(pieces[0][2]), kind
        )

    def _first(self, wrong: Sequence[_Wrong]) -> _Wrong | None:
        """The first of those that none of the others is computed from."""
        ordered = sorted(wrong, key=lambda one: ORDER.index(one.what))
        places = [one.place for one in wrong]
        free = [one for one in ordered if not self.lines.needs(one.place, [at for at in places if at != one.place])]
        return next(iter(free or ordered), None)

    def _finding(self, first: _Wrong, alike: Sequence[_Wrong]) -> Finding:
        where, cause, key = self.lines.blamed(first.place, first.what, first.kind, first.factor)
        others = tuple(one.name for one in alike if one.place != first.place and one.text == first.text)
        return Finding(
            first.what,
            "" if first.what in ("loss", "norm") else first.name,
            0,
            first.text,
            first.factor,
            where,
            cause,
            thread(key),
            first.got,
            first.want,
            first.ranks,
            others,
            (where,) if where else (),
        )

    def _row(self, what: What, gaps: Sequence[float], first: _Wrong | None, is_wrong: bool) -> Row:
        if first is not None and what == first.what:
            return Row(what, 0, False, first.text, first.name, first.factor)
        if is_wrong:
            return Row(what, 0, None, "not judged: it may follow")
        return Row(what, 0, True, f"within rounding ({max(gaps):.2g}), {len(gaps)} compared")


_WHOLE = "not tested: arguments are whole arrays, of which XLA gives each device its piece"


def _results(step: Callable[..., Any], args: Sequence[Any]) -> list[_Result]:
    """All arrays that a step returns, with what each device has of them."""
    found = []
    for path, leaf in jax.tree.flatten_with_path(step(*args))[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            continue
        leaf = jnp.asarray(leaf)
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        ranks = {shard.device: rank for rank, shard in enumerate(shards)}
        pieces = [(ranks[shard.device], shard.index, np.asarray(shard.data, np.float64)) for shard in shards]
        found.append(_Result(jax.tree_util.keystr(path), np.asarray(leaf, np.float64), pieces))
    return found


def _host(leaf: Any) -> Any:
    """An argument without a place on a mesh. Random keys stay as they are."""
    if isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return np.asarray(leaf)
    return leaf


def _nudged(args: Sequence[Any], epsilon: float) -> list[Any]:
    """The arguments, each number off by one rounding, up or down."""
    draw = np.random.default_rng(0)

    def nudged(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        signs = draw.choice([-1.0, 1.0], leaf.shape)
        return (leaf.astype(np.float64) * (1 + epsilon * signs)).astype(leaf.dtype)

    return [jax.tree.map(nudged, arg) for arg in args]


def _sizes(args: Sequence[Any], dtype: str) -> Iterator[tuple[str, Sequence[int]]]:
    for leaf in jax.tree.leaves(list(args)):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            yield dtype, np.shape(leaf)


def _named(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree.flatten_with_path(tree)[0]:
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            yield jax.tree_util.keystr(path), np.asarray(leaf, np.float64)


def _name(path: str) -> str:
    return path.translate(str.maketrans({"[": ".", "]": None, "'": None, '"': None})).lstrip(".")


def _at(x: Any, index: Any) -> Any:
    return x[index] if isinstance(x, np.ndarray) else x


def _gap(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference; infinite where one of them is not a number."""
    gap = np.abs(got - want)
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0))


def _factor(got: np.ndarray, want: np.ndarray, slack: float) -> float | None:
    """f where got is f times want, and f is neither 0 nor 1."""
    weight = float((want * want).sum())
    factor = float((got * want).sum()) / weight if weight else 0.0
    if abs(factor) < 1e-3 or abs(factor - 1) < 1e-3:
        return None
    size = float(np.abs(want).max(initial=0))
    return factor if _gap(got, factor * want) <= max(4 * slack, 1e-3) * abs(factor) * size else None


def _about(x: np.ndarray) -> str:
    return f"{float(x):.6g}" if not x.shape else f"a norm of {float(np.linalg.norm(x)):.6g}"


def _text(mesh: jax.sharding.Mesh) -> str:
    return f"the step on {Mesh(**mesh.shape)}" if mesh.size > 1 else "one device"
