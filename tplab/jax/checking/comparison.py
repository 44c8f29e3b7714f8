"""`check_parallel`: somebody's parallel model, held against the unsharded one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np

from tplab.checking.report import ParallelReport, Row, perturbed
from tplab.checking.verdict import Rounding, judge, slack_of_step
from tplab.errors import SpecError
from tplab.jax.models.huggingface import shard_params
from tplab.jax.ranks.context import varying_axes
from tplab.jax.ranks.specs import spread
from tplab.jax.run import run
from tplab.layout import Layout, layout_of, take
from tplab.mesh import Mesh
from tplab.sharding import P

Model = Callable[..., Any]
Loss = Callable[[Any], Any]
Arrays = dict[str, np.ndarray]

_DTYPES = ("float64", "float32", "float16", "bfloat16")


def check_parallel(
    model: Model, reference: Model, *inputs: Any, params: Any, mesh: Mesh, loss: Loss | None = None,
    reference_loss: Loss | None = None, specs: Any = None, in_specs: Sequence[P | None] | P | None = None,
    optimizer: Any = None, after_backward: Callable[[Any], Any] | None = None, perturb: bool = True,
) -> ParallelReport:  # fmt: skip
    """Hold the outputs, the loss and every gradient of a parallel model against the unsharded `reference`.

    Called where `run` is called. It runs model(params, *inputs) on every rank of the mesh, each with its piece of the
    parameters, and reference(params, *inputs) on one, with all of them; both are differentiated by jax.grad.

    params          whole, nested as the model takes them; inputs too are whole
    reference       any function in plain JAX; also a model of this package, which is whole on one rank
    loss            of the model's output; without: itself if it is a scalar, or a weighted sum of all of it
    reference_loss  of the reference's output, where it must be another, as for logits that stay sharded
    specs           how parameters lie on the mesh: a structure of P; without, `model.specs`
    in_specs        one an input, or one for all: the model gets this rank's piece, as under sequence parallelism
    optimizer       one of optax's: the parameters after one step are compared too
    after_backward  gradients -> gradients, on each rank: where they are reduced by hand
    perturb         parameters that are all zeros or ones, as biases and norms begin, get other values for the check: a
                    bias of zeros may be added as often as one likes

    A difference is called rounding up to what dtype and sizes explain (see `tplab.checking.verdict`), for float32 and
    less also from how far the reference is off its own answer in float64.
    """
    if isinstance(in_specs, P):
        in_specs = (in_specs,) * len(inputs)
    if in_specs is not None and len(in_specs) != len(inputs):
        raise SpecError(f"in_specs has {len(in_specs)} entries, and there are {len(inputs)} inputs; give one for each")
    specs = getattr(model, "specs", None) if specs is None else specs
    if specs is None:
        raise SpecError("how parameters lie on the mesh is not known: give specs, a structure of P like that of params")
    inputs = tuple(jnp.asarray(x) for x in inputs)
    params, changed = _perturbed(params) if perturb else (params, [])
    alone = _Side(reference, params, inputs, Mesh(**dict.fromkeys(mesh.axis_names, 1)), reference_loss or loss)
    ours = _Side(model, shard_params(params, specs, mesh), inputs, mesh, loss, specs, in_specs)
    comparison = _Comparison(mesh, _rounding(params, inputs), dict(zip(_names(params), spread(specs, params, "specs"))))
    weights = comparison.weigh(ours, alone)
    want = alone.answer({name: x[None] for name, (x, _) in weights.items()}, optimizer)[0]
    exact = _exactly(reference, params, inputs, alone, reference_loss or loss, weights)
    told = ours.answer({name: pieces for name, (_, pieces) in weights.items()}, optimizer, after_backward)
    has_pieces = any(spec is not None and spec.axis_names for spec in in_specs or ())
    comparison.compare(told, want, exact, {n: np.asarray(x) for n, x in _named(params).items()}, has_pieces)
    notes = []
    if changed:
        notes.append(perturbed(changed))
    if counted := [name for name in ours.loss_varies if mesh.axis_size(name) > 1 and not has_pieces]:
        axes = " and ".join(map(repr, counted))
        notes.append(
            f"the loss may differ along {axes} as far as JAX's types know, and jax.grad adds up those of all ranks: "
            "where they are one loss, all_reduce(loss, axis, 'mean') says so"
        )
    return ParallelReport(comparison.rows, mesh=str(mesh), notes=notes)


class _Side:
    """One of the two models, with its parameters and inputs on its mesh.

    loss_varies   the axes along which the loss may differ, after `answer`
    """

    def __init__(
        self, model: Model, params: Any, inputs: tuple[Any, ...], mesh: Mesh, loss: Loss | None, specs: Any = None,
        in_specs: Sequence[P | None] | None = None,
    ):  # fmt: skip
        self.model, self.params, self.inputs, self.mesh, self.loss = model, params, inputs, mesh, loss
        self.specs = P() if specs is None else specs
        self.in_specs = tuple(spec or P() for spec in in_specs or (None,) * len(inputs))
        self.loss_varies: frozenset[str] = frozenset()

    def outputs(self) -> list[Arrays]:
        """The floating-point outputs of each rank."""

        def program(params: Any, inputs: tuple[Any, ...]) -> Any:
            return _floats_in(self.model(params, *inputs))

        return self._run(program, (self.params, self.inputs), (self.specs, self.in_specs))

    def answer(
        self, weights: Mapping[str, np.ndarray], optimizer: Any = None,
        after_backward: Callable[[Any], Any] | None = None,
    ) -> list[dict[str, Arrays]]:  # fmt: skip
        """What each rank has: "output", "loss", "gradient", "input" (its gradient), "parameter" (after a step)."""
        places = [place for place, x in enumerate(self.inputs) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def program(params: Any, inputs: tuple[Any, ...], weights: dict[str, Any]) -> Any:
            def total(params: Any, floats: list[Any]) -> Any:
                given = list(inputs)
                for place, x in zip(places, floats, strict=True):
                    given[place] = x
                output = self.model(params, *given)
                outputs = _floats_in(output)
                loss = self.loss or ((lambda x: x) if getattr(output, "ndim", None) == 0 else None)
                if loss is None:
                    parts = [(x * weights[name][0].astype(x.dtype)).sum() for name, x in outputs.items()]
                    return jnp.stack(parts).sum() if parts else jnp.zeros(()), ({}, outputs)
                value = loss(output)
                self.loss_varies = varying_axes(value)
                return value, ({"loss": value}, outputs if getattr(output, "ndim", None) != 0 else {})

            floats = [inputs[place] for place in places]
            grads, (loss, outputs) = jax.grad(total, (0, 1), has_aux=True)(params, floats)
            by_params = grads[0] if after_backward is None else after_backward(grads[0])
            told = {"output": outputs, "loss": loss, "gradient": _named(by_params)}
            told["input"] = {f"input {place}": grad for place, grad in zip(places, grads[1], strict=True)}
            if optimizer is not None:
                updates, _ = optimizer.update(by_params, optimizer.init(params), params)
                told["parameter"] = _named(jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates))
            return told

        in_specs = (self.specs, self.in_specs, P(self.mesh.axis_names))
        return self._run(program, (self.params, self.inputs, dict(weights)), in_specs)

    def _run(self, program: Callable[..., Any], args: tuple[Any, ...], in_specs: tuple[Any, ...]) -> list[Any]:
        results = run(program, self.mesh, *args, in_specs=in_specs).per_rank
        return [jax.tree.map(np.asarray, result) for result in results]


class _Comparison:
    """What the ranks have beside what they should have, row by row."""

    def __init__(self, mesh: Mesh, rounding: Rounding, specs: Mapping[str, P]):
        self.mesh, self.rounding, self.rows = mesh, rounding, list[Row]()
        self.layouts = {name: Layout(spec) for name, spec in specs.items()}

    def weigh(self, ours: _Side, alone: _Side) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Numbers to weight each output with, where there is no loss: whole, and each rank's piece of them.

        jax.grad adds up what all ranks make of them, so that of copies each has its share; parts of a sum have theirs.
        """
        if ours.loss is not None:
            return {}
        wanted, told = alone.outputs()[0], ours.outputs()
        if all(x.ndim == 0 for x in wanted.values()):
            return {}
        found = {}
        for name in set(wanted) & set(told[0]):
            whole = np.random.default_rng(crc32(name.encode())).standard_normal(wanted[name].shape)
            pieces = [rank[name] for rank in told]
            layout, num_copies = self._layout_of(wanted[name], pieces), 1
            spare = tuple(axis for axis in self.mesh.axis_names if axis not in layout.spec.axis_names)
            groups = self.mesh.groups(spare) if spare else []
            if groups and all(self._agree(pieces[a], pieces[b]) for a, *others in groups for b in others):
                num_copies = self.mesh.axis_size(spare)
            stacked = np.zeros((self.mesh.size, *pieces[0].shape))
            for rank in self.mesh.ranks:
                cut = take(whole, layout, self.mesh, rank)
                if cut.ndim == pieces[0].ndim and all(n <= m for n, m in zip(cut.shape, pieces[0].shape)):
                    stacked[(rank, *map(slice, cut.shape))] = cut / num_copies
            found[name] = whole, stacked
        return found

    def compare(
        self, told: list[dict[str, Arrays]], want: dict[str, Arrays], exact: dict[str, Arrays] | None, before: Arrays,
        has_pieces: bool,
    ) -> None:  # fmt: skip
        for name, whole in want["output"].items():
            self._add("output", name, whole, self._pieces(told, "output", name), None, exact)
        for name, whole in want["loss"].items():
            self._add("loss", name, whole, self._pieces(told, "loss", name), Layout(), exact, has_pieces=has_pieces)
        largest = max((float(np.abs(g).max(initial=0)) for g in want["gradient"].values()), default=0.0)
        for name, whole in want["gradient"].items():
            self._add("gradient", name, whole, self._pieces(told, "gradient", name), self.layouts[name], exact, largest)
        for name, whole in want["input"].items():
            pieces = self._pieces(told, "input", name)
            self._add("gradient", name, whole, pieces, None, exact, largest, among="input")
        for name, whole in want.get("parameter", {}).items():
            pieces, layout = self._pieces(told, "parameter", name), self.layouts[name]
            slack = slack_of_step(before[name], whole, want["gradient"][name], self.rounding, largest)
            for rank, piece in enumerate(pieces):
                cut, free = take(whole, layout, self.mesh, rank), take(slack, layout, self.mesh, rank)
                here = tuple(map(slice, cut.shape))
                if piece is not None and piece[here].shape == cut.shape:
                    pieces[rank] = piece = np.array(piece, np.float64)
                    piece[here] = np.where(np.abs(piece[here] - cut) <= free, cut, piece[here])
            self._add("parameter", name, whole, pieces, layout, None)

    def _add(
        self, kind: str, name: str, whole: np.ndarray, pieces: list[np.ndarray | None], layout: Layout | None,
        exact: dict[str, Arrays] | None, largest: float = 0.0, *, among: str = "", has_pieces: bool = False,
    ) -> None:  # fmt: skip
        layout = layout or self._layout_of(whole, pieces)
        own = None if exact is None else exact[among or kind].get(name)
        verdict = judge(pieces, whole, layout, self.mesh, self.rounding, what=kind, largest=largest, exact=own)
        if has_pieces and verdict.mistake == "partial":
            words = "each rank's part of it, as it has its part of the inputs"
            verdict = verdict._replace(ok=True, words=words, mistake="")
        self.rows.append(Row.of(kind, name, whole.shape, layout, verdict))

    def _pieces(self, told: list[dict[str, Arrays]], kind: str, name: str) -> list[np.ndarray | None]:
        return [rank[kind].get(name) for rank in told]

    def _layout_of(self, whole: np.ndarray, pieces: Sequence[np.ndarray | None]) -> Layout:
        shapes = [None if piece is None else piece.shape for piece in pieces]
        return layout_of(whole, pieces, shapes, self.mesh, 100 * self.rounding.tolerance) or Layout()

    def _agree(self, one: np.ndarray, other: np.ndarray) -> bool:
        size = 100 * self.rounding.tolerance * float(np.abs(one).max(initial=0))
        return np.allclose(one, other, rtol=0, atol=size)


def _exactly(
    reference: Model, params: Any, inputs: tuple[Any, ...], alone: _Side, loss: Loss | None, weights: Mapping[str, Any]
) -> dict[str, Arrays] | None:
    """The reference's answer in float64, where the first was not and it can be computed so."""
    def wide(x: Any) -> Any:
        return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else np.asarray(x)

    if _coarsest(params) == "float64":
        return None
    with jax.enable_x64(True):
        side = _Side(reference, jax.tree.map(wide, params), tuple(map(wide, inputs)), alone.mesh, loss)
        try:
            return side.answer({name: x[None] for name, (x, _) in weights.items()})[0]
        except TypeError:  # it computes with types of its own, which do not go with float64
            return None


def _perturbed(params: Any) -> tuple[Any, list[str]]:
    """The parameters, those that are constant with other values; and which these are."""
    leaves, structure = jax.tree.flatten(params)
    changed = []
    for place, (name, leaf) in enumerate(zip(_names(params), leaves)):
        values = np.asarray(leaf)
        if values.size > 1 and (values == values.flat[0]).all():
            noise = 0.1 * np.random.default_rng(crc32(name.encode())).standard_normal(values.shape)
            leaves[place] = jnp.asarray(values + noise.astype(values.dtype))
            changed.append(name)
    return structure.unflatten(leaves), changed


def _rounding(params: Any, inputs: Sequence[Any]) -> Rounding:
    """From what dtypes and sizes say: the longest sum is over features, words or tokens."""
    leaves = jax.tree.leaves(params)
    tokens = [x.size // (x.shape[-1] if jnp.issubdtype(x.dtype, jnp.inexact) else 1) for x in inputs if x.ndim]
    terms = max([size for leaf in leaves for size in np.shape(leaf)] + tokens, default=1)
    return Rounding(_coarsest(params), terms, max(1, sum(np.ndim(leaf) > 1 for leaf in leaves)))


def _coarsest(params: Any) -> str:
    dtypes = [str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params)]
    return max((dtype for dtype in dtypes if dtype in _DTYPES), key=_DTYPES.index, default="float32")


def _names(tree: Any) -> list[str]:
    """A name for each leaf: its path, joined by dots, as in torch's state_dict."""
    paths, _ = jax.tree.flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def _named(tree: Any) -> dict[str, Any]:
    return dict(zip(_names(tree), jax.tree.leaves(tree)))


def _floats_in(output: Any) -> dict[str, Any]:
    """The floating-point arrays of an output, by name."""
    found = {"output" + (f".{name}" if name else ""): jnp.asarray(x) for name, x in _named(output).items()}
    return {name: x for name, x in found.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
