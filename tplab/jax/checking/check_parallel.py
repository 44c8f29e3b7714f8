"""`check_parallel`: a parallel model compared with the unsharded one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tplab.checking.comparison import each_input, noise_for
from tplab.checking.proofs import FACTS, Check, Reduction, Trial, of_reductions
from tplab.checking.report import ParallelReport, Row, perturbed
from tplab.checking.verdict import Rounding, label
from tplab.errors import SpecError
from tplab.jax.checking.given import name_of, named_leaves, nudge
from tplab.jax.checking.reading import backward_order, softmaxes, with_changes
from tplab.jax.comm.collectives import all_reduce, axis_index
from tplab.jax.models.huggingface import shard_params
from tplab.jax.ranks.context import vary, varying_axes
from tplab.jax.ranks.specs import spread
from tplab.jax.run import run
from tplab.layout import Layout
from tplab.mesh import Mesh
from tplab.sharding import P

Model = Callable[..., Any]
Loss = Callable[[Any], Any]
Arrays = dict[str, np.ndarray]


def check_parallel(
    model: Model,
    reference: Model,
    *,
    params: Any,
    mesh: Mesh,
    inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    reference_loss: Loss | None = None,
    specs: Any = None,
    in_specs: Sequence[P | None] | P | None = None,
    optimizer: Any = None,
    after_backward: Callable[[Any], Any] | None = None,
    perturb: bool = True,
) -> ParallelReport:
    """Compare the outputs, the loss and every gradient of a parallel model with those of the unsharded `reference`.

    Call it where you would call `run`. It runs model(params, *inputs, **kwargs) on every rank of the mesh, each with
    its piece of the parameters, and reference(params, *inputs, **kwargs) on one, with all of them; jax.grad
    differentiates both.

    params          whole, nested as the model takes them
    inputs, kwargs  what both are called with, whole
    reference       any function in plain JAX; or a model of this package, unsharded on one rank
    loss            of the model's output; without one: itself if it is a scalar, or a weighted sum of all of it
    reference_loss  of the reference's output, if it must be different, as for logits that stay sharded
    specs           how parameters are laid out on the mesh: a structure of P; without it, `model.specs`
    in_specs        one per input, or one for all: the model gets this rank's piece, as under sequence parallelism
    optimizer       one of optax's: the parameters after one step are compared too
    after_backward  gradients -> gradients, on each rank: where they are reduced by hand
    perturb         parameters that are all zeros or ones, as biases and norms begin, get other values for the check: a
                    bias of zeros gives the same result however often it is added

    How much of a difference counts as rounding is measured for each tensor: see `tplab.checking.verdict.Rounding`. A
    cause is stated only where a new run with its repair was right.
    """
    spec_of_each = each_input(in_specs, len(inputs))
    specs = getattr(model, "specs", None) if specs is None else specs
    if specs is None:
        raise SpecError("how parameters lie on the mesh is not known: give specs, a structure of P like that of params")
    inputs = tuple(jnp.asarray(x) for x in inputs)
    for name, x in _whole_arrays(params).items():
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"the parameter {name} is of dtype {x.dtype}; jax.grad differentiates floats only. Give whole "
                "numbers in kwargs, or let the model close over them"
            )
    drawn = {name: noise_for(name, x) if perturb else None for name, x in _whole_arrays(params).items()}
    noise = {name: x for name, x in drawn.items() if x is not None}
    params = _changed(params, noise, lambda x, more: jnp.asarray(x + more.astype(np.asarray(x).dtype)))
    alone = Mesh(**dict.fromkeys(mesh.axis_names, 1))
    theirs = _Side(reference, params, inputs, kwargs or {}, alone, reference_loss or loss)
    pieces = shard_params(params, specs, mesh)
    ours = _Side(model, pieces, inputs, kwargs or {}, mesh, loss, specs, spec_of_each, after_backward)
    params_by_name = _whole_arrays(params)
    layouts = {name: Layout(spec) for name, spec in zip(params_by_name, spread(specs, params, "specs"))}
    comparison = Check(mesh, _rounding(params, inputs), layouts, spec_of_each)
    comparison.addends = {name: x for name, x in params_by_name.items() if x.ndim == 1}
    comparison.addends |= {f"input {index}": np.asarray(x) for index, x in enumerate(inputs) if x.ndim}
    comparison.notes += [perturbed([*noise])] if noise else []
    comparison.compare(
        theirs,
        ours,
        (_again(theirs, seed) for seed in (0, 1)),
        lambda row, answer: _trials(row, ours, mesh),
        has_loss=loss is not None or not any(x.ndim for x in theirs.outputs()[0].values()),
        share_copies=True,
        optimizer=optimizer,
        before=params_by_name,
    )
    if (first := comparison.first_wrong) is not None and first.mistake not in FACTS:
        _look_for_the_cause(first, theirs, ours, comparison)
    return comparison.report(theirs.order)


class _Side:
    """One of the two models, with its parameters and inputs on its mesh.

    loss_varies   the axes along which the loss may differ, after `answer`
    order         the parameters in the order in which their gradients are complete, after `answer`
    reductions    the all_reduces of the last program that was run with an empty `at`
    """

    def __init__(
        self, model: Model, params: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh,
        loss: Loss | None, specs: Any = None, in_specs: Sequence[P] | None = None,
        after_backward: Callable[[Any], Any] | None = None,
    ):  # fmt: skip
        self.model, self.params, self.inputs, self.kwargs = model, params, inputs, kwargs
        self.mesh, self.loss, self.specs = mesh, loss, P() if specs is None else specs
        self.after_backward = after_backward
        self.in_specs = tuple(in_specs or [P()] * len(inputs))
        self.loss_varies: frozenset[str] = frozenset()
        self.reductions: list[Reduction] = []
        self.order: list[str] = []

    def outputs(self, at: Mapping[str, Any] | None = None) -> list[Arrays]:
        """Return the floating-point outputs of each rank, with the changes of a trial."""

        def program(params: Any, inputs: tuple[Any, ...]) -> Any:
            found = _floats_in(self.model(params, *inputs, **self.kwargs))
            if at and "exit" in at:
                name, axes, added = at["exit"]
                found[name] = all_reduce(found[name] - added, axes) + added
            return found

        return self._run(program, (self.params, self.inputs), (self.specs, self.in_specs), at)

    def softmaxes(self) -> list[list[np.ndarray]]:
        """Return the input of each softmax, for each rank."""

        def program(params: Any, inputs: tuple[Any, ...]) -> Any:
            return softmaxes(partial(self.model, **self.kwargs), params, *inputs)

        return self._run(program, (self.params, self.inputs), (self.specs, self.in_specs))

    def answer(
        self,
        weights: Mapping[str, Sequence[np.ndarray]],
        optimizer: Any = None,
        at: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Arrays]]:
        """Return each rank's "output", "loss", "gradient", "input" (its gradient) and "parameter" (after a step), with
        the changes of a trial."""
        indices = [index for index, x in enumerate(self.inputs) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def program(params: Any, inputs: tuple[Any, ...], weights: dict[str, Any]) -> Any:
            def total(params: Any, floats: list[Any]) -> Any:
                given = list(inputs)
                for index, x in zip(indices, floats, strict=True):
                    given[index] = x
                output = self.model(params, *given, **self.kwargs)
                outputs = _floats_in(output)
                loss = self.loss or ((lambda x: x) if getattr(output, "ndim", None) == 0 else None)
                if loss is None:
                    parts = [(x * weights[name][0].astype(x.dtype)).sum() for name, x in outputs.items()]
                    return jnp.stack(parts).sum() if parts else jnp.zeros(()), ({}, outputs)
                value = loss(output)
                if axes := (at or {}).get("loss"):
                    value = all_reduce(vary(value, axes), axes, "mean")
                else:
                    self.loss_varies = varying_axes(value)
                return value, ({"loss": value}, outputs if getattr(output, "ndim", None) != 0 else {})

            forward = jax.make_jaxpr(partial(self.model, **self.kwargs))(params, *inputs)
            self.order = backward_order(forward, [name for name, _ in named_leaves(params)])
            floats = [inputs[index] for index in indices]
            grads, (loss, outputs) = jax.grad(total, (0, 1), has_aux=True)(params, floats)
            by_params = grads[0] if self.after_backward is None else self.after_backward(grads[0])
            told = {"output": outputs, "loss": loss, "gradient": dict(named_leaves(by_params))}
            told["input"] = {f"input {index}": grad for index, grad in zip(indices, grads[1], strict=True)}
            if optimizer is not None:
                updates, _ = optimizer.update(by_params, optimizer.init(params), params)
                stepped = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
                told["parameter"] = dict(named_leaves(stepped))
            return told

        in_specs = (self.specs, self.in_specs, P(self.mesh.axis_names))
        stacked = {name: np.stack(each) for name, each in weights.items()}
        return self._run(program, (self.params, self.inputs, stacked), in_specs, at)

    def _run(
        self,
        program: Callable[..., Any],
        args: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        at: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Return each rank's results, with the changes of a trial. An empty one notes all calls of all_reduce."""

        def changed(params: Any, *more: Any) -> Any:
            if at is None:
                return program(params, *more)
            if "once" in at:
                name, axes = at["once"]
                params = _changed(params, {name: axis_index(axes) == 0}, lambda x, is_first: x * is_first)
            return with_changes(program, at, [] if at else self.reductions)(params, *more)

        results = run(changed, self.mesh, *args, in_specs=in_specs).per_rank
        return [jax.tree.map(np.asarray, result) for result in results]


def _trials(row: Row, ours: _Side, mesh: Mesh) -> Iterator[Trial]:
    """Yield trials for a wrong gradient if all outputs are right."""
    if axes := tuple(name for name in mesh.axis_names if name in ours.loss_varies and mesh.axis_size(name) > 1):
        words = f"with all_reduce(loss, {label(axes)}, 'mean'): it may differ along it as far as JAX's types know, and "
        yield Trial(f"{words}jax.grad adds up the gradients of all", "a mean of the loss", {"loss": axes})
    yield from of_reductions(ours.reductions, row.words, is_backward=True)


def _look_for_the_cause(first: Row, theirs: _Side, ours: _Side, comparison: Check) -> None:
    """Look for a repair with which the first wrong output is right."""
    outputs = theirs.outputs()[0]
    ours.outputs({})

    def makes_right(trial: Trial) -> str:
        again = ours.outputs(trial.at)
        found = [comparison.judge_output(x, [rank.get(name) for rank in again]) for name, x in outputs.items()]
        return "it is right" if all(one is not None and one[1].ok for one in found) else ""

    trials = [
        *comparison.additions(first, comparison.added.get(first.name), first.name),
        *of_reductions(ours.reductions, first.words),
    ]
    trials += comparison.scores(theirs.softmaxes()[0], ours.softmaxes())
    if unknown := comparison.prove(first, trials, makes_right):
        comparison.enter(first, unknown)


def _again(theirs: _Side, seed: int) -> _Side:
    """Return the reference with every input number off by one unit in the last place."""

    params, inputs = nudge(theirs.params, seed), nudge(theirs.inputs, seed) if seed else theirs.inputs
    return _Side(theirs.model, params, inputs, theirs.kwargs, theirs.mesh, theirs.loss)


def _changed(tree: Any, by: Mapping[str, Any], change: Callable[[Any, Any], Any]) -> Any:
    """Return the tree with change(leaf, by[name]) in place of the leaves of these names."""
    return jax.tree.map_with_path(lambda path, x: change(x, by[name_of(path)]) if name_of(path) in by else x, tree)


def _rounding(params: Any, inputs: Sequence[Any]) -> Rounding:
    leaves = [(str(jnp.result_type(leaf)), np.shape(leaf)) for leaf in jax.tree.leaves(params)]
    return Rounding.of(leaves, [(x.shape, jnp.issubdtype(x.dtype, jnp.inexact)) for x in inputs])


def _whole_arrays(tree: Any) -> Arrays:
    return {name: np.asarray(x) for name, x in named_leaves(tree)}


def _floats_in(output: Any) -> dict[str, Any]:
    """Return the floating-point arrays of an output, by name."""
    found = {"output" + (f".{name}" if name else ""): jnp.asarray(x) for name, x in named_leaves(output)}
    return {name: x for name, x in found.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
