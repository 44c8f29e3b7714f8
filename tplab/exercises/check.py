"""Grading an exercise: the learner's program runs on several meshes, with real tensors, and is compared with the plain
answer. The result is a `Verdict`, which says what is wrong, on which rank, and shows it.

A verdict never raises, so a notebook with an unsolved exercise still runs from top to bottom.
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from tplab.errors import RankError
from tplab.mesh import Axis, Mesh
from tplab.sharding import P, split
from tplab.trace.trace import Trace
from tplab.widgets.matrices import Matrices, Panel, number_text

Tensors = Mapping[str, np.ndarray]
Framework = Literal["torch", "jax"]

# Two ranks first, for the smallest picture of what is wrong. Three, because powers of two hide mistakes. An axis beside
# `tp`, because a program may mistake the world for its group. One rank, on which nothing is sent.
MESHES = (Mesh(tp=2), Mesh(tp=3), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(tp=1))


class Verdict:
    """What a check says. `passed` is True, False, or None if the exercise was not started."""

    def __init__(self, passed: bool | None, text: str, panels: Sequence[Panel] = ()):
        self.passed, self.text, self.panels = passed, text, tuple(panels)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        if not self.panels:
            return {"text/plain": self.text}
        title, _, text = self.text.partition("\n")
        return Matrices(self.panels, title, text)._repr_mimebundle_(**kwargs)


@dataclass(frozen=True)
class Seen:
    """One rank of one trial: what a `Mistake` can work with.

    tensors   the whole arguments        own    this rank's pieces of them
    want      this rank's right result   mesh, rank
    """

    tensors: Tensors
    own: Tensors
    want: np.ndarray
    mesh: Mesh
    rank: int


@dataclass(frozen=True)
class Mistake:
    """A known way to go wrong: `wrong` predicts what each rank then has for `result`; `hint` says what to think about.

    It is recognised if it explains what every rank has.
    """

    result: str
    hint: str
    wrong: Callable[[Seen], np.ndarray]


@dataclass(frozen=True)
class Exercise:
    """What a learner's function must do.

    name        of the function
    tensors     (random generator, mesh) -> its arguments, whole, by name and in order
    specs       how each argument is sharded
    plain       arguments -> the right results, whole, by name: first what the function returns, then the gradients.
                Given one rank's pieces, it computes what that rank would have without the others
    results     how each returned value is sharded, in order
    also        the same for values that it may also return, before or after the results; recognised by their shapes
    gradients   the arguments whose gradient is also compared, for the loss sum(result * weight(result)); the gradient
                of "x" is the result "dx"
    mistakes    known mistakes, the likeliest first
    fewest      (mesh, arguments) -> the bytes that all ranks together must send; sending more passes, with a remark
    tolerance   the largest difference that counts as rounding, relative to the largest entry, in float64
    """

    name: str
    tensors: Callable[[np.random.Generator, Mesh], Tensors]
    specs: Mapping[str, P]
    plain: Callable[[Tensors], Tensors]
    results: Mapping[str, P]
    also: Mapping[str, P] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    fewest: Callable[[Mesh, Tensors], int] | None = None
    tolerance: float = 1e-9
    meshes: tuple[Mesh, ...] = MESHES


def own_part(plain: Callable[[Tensors], Tensors], result: str, hint: str) -> Mistake:
    """The mistake of keeping the result of this rank's own pieces."""
    return Mistake(result, hint, lambda seen: plain(seen.own)[result])


def added_up_again(result: str, axis: Axis, hint: str) -> Mistake:
    """The mistake of adding up what is already the same on every rank of `axis`: R times too large."""
    return Mistake(result, hint, lambda seen: seen.want * seen.mesh.axis_size(axis))


def added_over(result: str, axis: Axis, dim: int, plain: Callable[[Tensors], Tensors], hint: str) -> Mistake:
    """The mistake of adding up different pieces, split over `axis` along `dim`, as if they were copies."""

    def wrong(seen: Seen) -> np.ndarray:
        return np.sum(np.split(plain(seen.tensors)[result], seen.mesh.axis_size(axis), axis=dim), axis=0)

    return Mistake(result, hint, wrong)


def weight(result: np.ndarray) -> np.ndarray:
    """What a result is multiplied by to make the loss: no two entries are equal, and none is zero."""
    return np.cos(np.arange(result.size)).reshape(result.shape)


def bytes_of_a_sum(tensor: np.ndarray, mesh: Mesh) -> int:
    """The bytes that all ranks together send to add up a tensor over `tp`: 2(R-1) times its size in every group.

    An all_gather and a reduce_scatter of it together send just as many.
    """
    num_ranks = mesh.axis_size("tp")
    return 2 * (num_ranks - 1) * tensor.nbytes * (mesh.size // num_ranks)


def not_started(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is a stub: nothing but `...`, or with `name = ...` left in it."""
    code = list(dis.get_instructions(fn))
    if any(one.argval is Ellipsis and two.opname.startswith(("STORE", "RETURN")) for one, two in pairwise(code)):
        return True
    if any("CONST" in one.opname and one.argval not in (None, ...) for one in code):
        return False
    nothing = ("RESUME", "NOP", "LOAD_CONST", "RETURN", "COPY_FREE_VARS", "POP_TOP")
    return all(one.opname.startswith(nothing) for one in code)


def untouched(name: str) -> Verdict:
    """The verdict on a stub."""
    return Verdict(None, f"{name}: not started. Replace the `...`, then run this cell again.")


def grade(
    fn: Callable[..., Any],
    exercise: Exercise,
    framework: Framework = "torch",
    seen: Callable[[Trace], None] | None = None,
) -> Verdict:
    """Compare `fn` with the plain answer on every mesh of the exercise, with different tensors each time.

    `seen` is called with the trace of each run whose results are right.
    """
    name = exercise.name
    if not_started(fn):
        return untouched(name)
    remark, shown = "", {}
    for seed, mesh in enumerate(exercise.meshes):
        tensors = exercise.tensors(np.random.default_rng(seed), mesh)
        try:
            num_bytes = 0
            for found, trace in _trials(framework, fn, exercise, mesh, tensors):
                if verdict := _compared(found, exercise, mesh, tensors, framework):
                    return verdict
                num_bytes = trace.bytes_sent()
                if seen:
                    seen(trace)
                if not seed:
                    shown |= found[0]
        except Exception as error:
            return Verdict(False, raised(error, fn, name, mesh))
        if exercise.fewest and not remark and not shown.keys() & exercise.also.keys():
            needed = exercise.fewest(mesh, tensors) // (1 if framework == "torch" else 2)  # JAX computes in float32
            if num_bytes > needed:
                remark = (
                    f"\nOn {mesh} it sends {num_bytes:,} bytes, where {needed:,} would do: "
                    "is there a collective that you can do without?"
                )
    listed = ", ".join(map(str, exercise.meshes))
    equal = "equals" if len(shown) == 1 else "equal"
    text = f"{name} is right.\n{', '.join(shown)} {equal} the unsharded result on {listed}.{remark}"
    panels = [Panel(f"your {result}, rank 0", array) for result, array in list(shown.items())[:3]]
    return Verdict(True, f"{text}\nThe picture shows rank 0 of {exercise.meshes[0]}.", panels)


def _trials(
    framework: Framework, fn: Callable[..., Any], exercise: Exercise, mesh: Mesh, tensors: Tensors
) -> Iterator[tuple[list[dict[str, np.ndarray]], Trace]]:
    """What each rank gets: first the results, then the gradients, so that a wrong result is reported as such."""
    specs = tuple(exercise.specs[key] for key in tensors)
    right = exercise.plain(tensors)

    def forward(*args: Any) -> tuple[Any, ...]:
        returned = fn(*args)
        results = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        also, num = exercise.also, len(exercise.results)
        if len(results) not in (num, num + len(also)) or any(result is None for result in results):
            found = "1 value" if len(results) == 1 else f"{len(results)} values"
            got = "None; is a `return` missing?" if returned is None else found
            raise TypeError(f"it must return {', '.join(exercise.results)}, and it returned {got}")
        first = [tuple(split(right[name], spec, mesh)[0].shape) for name, spec in also.items()]
        if len(results) > num and [tuple(result.shape) for result in results[: len(also)]] == first:
            results = results[len(also) :] + results[: len(also)]
        return results

    forward.__name__ = exercise.name  # the title of its trace
    yield _run(framework, forward, mesh, tensors, specs, [*exercise.results, *exercise.also])
    if exercise.gradients:
        chosen = [place for place, key in enumerate(tensors) if key in exercise.gradients]
        weights = {f"weight of {key}": weight(right[key]) for key in exercise.results}
        gradient = _torch_gradient if framework == "torch" else _jax_gradient
        names = [f"d{key}" for key in tensors if key in exercise.gradients]
        program = gradient(forward, chosen, len(weights))
        yield _run(framework, program, mesh, {**weights, **tensors}, (*exercise.results.values(), *specs), names)


def _run(
    framework: Framework,
    program: Callable[..., Any],
    mesh: Mesh,
    tensors: Tensors,
    specs: tuple[P, ...],
    names: list[str],
) -> tuple[list[dict[str, np.ndarray]], Trace]:
    is_narrowed = [framework == "jax" and array.dtype.kind == "f" for array in tensors.values()]  # ids stay integers
    arrays = [array.astype(np.float32) if is_so else array for array, is_so in zip(tensors.values(), is_narrowed)]
    out = run_of(framework)(program, mesh, *arrays, in_specs=specs)
    return [{name: np.asarray(array) for name, array in zip(names, results)} for results in out.per_rank], out.trace


def _torch_gradient(forward: Callable[..., Any], chosen: list[int], num_weights: int) -> Callable[..., Any]:
    def program(*args: Any) -> list[Any]:
        import torch

        weights, leaves = args[:num_weights], list(args[num_weights:])
        for place in chosen:
            leaves[place].requires_grad_()
        loss = torch.stack([(y * w).sum() for y, w in zip(forward(*leaves), weights)]).sum()
        loss.backward()
        grads = [leaves[place].grad for place in chosen]
        return [torch.zeros_like(leaves[place]) if grad is None else grad for place, grad in zip(chosen, grads)]

    return program


def _jax_gradient(forward: Callable[..., Any], chosen: list[int], num_weights: int) -> Callable[..., Any]:
    def program(*args: Any) -> Any:
        import jax

        weights, leaves = args[:num_weights], args[num_weights:]
        return jax.grad(lambda *xs: sum((y * w).sum() for y, w in zip(forward(*xs), weights)), tuple(chosen))(*leaves)

    return program


def _compared(
    found: list[dict[str, np.ndarray]], exercise: Exercise, mesh: Mesh, tensors: Tensors, framework: Framework
) -> Verdict | None:
    """The verdict on the first thing that is wrong, if there is any."""
    right = exercise.plain(tensors)
    tolerance = exercise.tolerance if framework == "torch" else 1e-4  # JAX computes in float32
    gradients = {f"d{key}": exercise.specs[key] for key in exercise.gradients}
    specs = {**exercise.results, **exercise.also, **gradients}
    for result in found[0]:
        slack = tolerance * max(1.0, float(np.abs(right[result]).max()))
        got, want = [results[result] for results in found], split(right[result], specs[result], mesh)
        for rank in mesh.ranks:
            if got[rank].shape != want[rank].shape:
                text = f"{exercise.name}: {result} has shape {list(got[rank].shape)} on rank {rank} of {mesh}."
                panels = [Panel(f"yours, {result}", got[rank]), Panel("right", want[rank])]
                return Verdict(False, f"{text}\nThe right one has shape {list(want[rank].shape)}.", panels)
        off = [~(np.abs(a - b) <= slack) for a, b in zip(got, want)]  # True for nan
        if any(map(np.any, off)):
            rank = next(rank for rank in mesh.ranks if off[rank].any())
            apart = got[rank] - want[rank]
            hint = _known_mistake(exercise, result, got, want, slack, mesh, tensors) or (
                f"{int(off[rank].sum())} of {off[rank].size} entries are off, "
                f"by up to {number_text(float(np.abs(apart).max()))}."
            )
            panels = [Panel(f"yours, {result}", got[rank], off[rank]), Panel("right", want[rank])]
            text = f"{exercise.name}: {result} is not right yet on rank {rank} of {mesh}.\n{hint}"
            return Verdict(False, text, [*panels, Panel("yours - right", apart, off[rank])])
    return None


def _known_mistake(
    exercise: Exercise,
    result: str,
    got: list[np.ndarray],
    want: list[np.ndarray],
    slack: float,
    mesh: Mesh,
    tensors: Tensors,
) -> str | None:
    """The hint of the first mistake that explains what every rank has."""
    pieces = {key: split(array, exercise.specs[key], mesh) for key, array in tensors.items()}
    seen = [Seen(tensors, {key: pieces[key][rank] for key in pieces}, want[rank], mesh, rank) for rank in mesh.ranks]
    for mistake in exercise.mistakes:
        if mistake.result == result:
            guesses = [np.asarray(mistake.wrong(one)) for one in seen]
            if all(a.shape == b.shape and np.allclose(a, b, rtol=0, atol=slack) for a, b in zip(guesses, got)):
                return mistake.hint
    return None


def raised(error: Exception, fn: Callable[..., Any], name: str, mesh: Mesh) -> str:
    """What the learner's function raised, and at which of its lines."""
    cause = error.__cause__ if isinstance(error, RankError) and error.__cause__ else error
    frames = traceback.extract_tb(cause.__traceback__)
    mine = [frame.line for frame in frames if frame.filename == fn.__code__.co_filename and frame.line]
    where = f"\nin the line: {mine[-1]}" if mine else ""
    which = f" on rank {error.rank}" if isinstance(error, RankError) else ""
    return f"{name}: {type(cause).__name__}{which} of {mesh}: {cause}{where}"


def run_of(framework: Framework) -> Callable[..., Any]:
    """The framework's `run`."""
    if framework == "torch":
        from tplab.torch import run
    else:
        from tplab.jax import run
    return run
