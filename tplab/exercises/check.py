"""Grading an `Exercise`: the learner's program runs on several meshes, with real tensors, and is compared with the
plain answer. The verdict says what is wrong, on which rank, and shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tplab.exercises.exercise import Exercise, Framework, Tensors, Wrong, own_part
from tplab.exercises.trials import Trial, arrays_for, run_of, share_of_work, trials
from tplab.exercises.verdict import Verdict, beside, cause, check, differs, listed, not_started, on, refuse, right
from tplab.mesh import Mesh
from tplab.trace.trace import Trace
from tplab.widgets.matrices import Panel, number_text

__all__ = ["Answer", "Verdict", "but", "grade", "not_started"]


@dataclass(frozen=True)
class Answer:
    """A learner's function that returns the right numbers and sends no more than it may, for further checks.

    traces    of all its runs: on each mesh the forward pass, then the one with gradients if there are any
    verdict   the verdict so far
    """

    fn: Callable[..., Any]
    exercise: Exercise
    framework: Framework
    traces: list[Trace]
    verdict: Verdict

    def tensors(self, mesh: Mesh) -> Tensors:
        return self.exercise.tensors(np.random.default_rng(0), mesh)

    def run(self, mesh: Mesh, tensors: Tensors | None = None, **options: Any) -> Any:
        """A run in float32 with the exercise's tensors, or with these."""
        tensors = self.tensors(mesh) if tensors is None else tensors
        specs = tuple(self.exercise.specs[key] for key in tensors)
        with on(mesh):
            return run_of(self.framework)(self.fn, mesh, *arrays_for("jax", tensors), in_specs=specs, **options)

    def says(self, remark: str) -> Verdict:
        """The verdict, with one more line."""
        return right(f"{self.verdict.text}\n{remark}", self.verdict.panels)


def grade(
    fn: Callable[..., Any],
    exercise: Exercise,
    framework: Framework = "torch",
    then: Callable[[Answer], Verdict] | None = None,
) -> Verdict:
    """Compare `fn` with the plain answer on every mesh of the exercise, with different tensors each time.

    `then` checks an answer whose numbers are right: it calls `but`, or returns the verdict.
    """
    return check(exercise.name, exercise.not_with)(_graded)(fn, exercise, framework, then)


def but(text: str, panels: Any = ()) -> Any:
    """End a check: the numbers are right, but this is not."""
    refuse(f": the numbers are right, but {text}", panels)


def _graded(
    fn: Callable[..., Any], exercise: Exercise, framework: Framework, then: Callable[[Answer], Verdict] | None
) -> Verdict:
    remark, wasteful, shown, traces, given = "", "", dict[str, np.ndarray](), list[Trace](), exercise
    for seed, mesh in enumerate(exercise.meshes):
        tensors = exercise.tensors(np.random.default_rng(seed), mesh)
        with on(mesh):
            for trial in trials(framework, fn, exercise, mesh, tensors):
                if any(array.dtype == np.float32 for array in trial.found[0].values()):  # precise enough
                    exercise = replace(given, tolerance=max(given.tolerance, SINGLE))
                if wrong := _wrong(trial.found, exercise, mesh, tensors, framework):
                    text, by, panels, result = wrong
                    hint = _hint(fn, exercise, framework, result, seed)
                    said = [hint] if hint else [by, *filter(None, [exercise.reminders.get(result)])]
                    refuse("\n".join([text, *said]), panels)
                _refuse(trial, exercise)
                traces.append(trial.trace)
                shown |= trial.found[0] if not seed else {}
        if exercise.fewest and not shown.keys() & exercise.also.keys():
            needed = exercise.fewest(mesh, tensors) // (1 if framework == "torch" else 2)  # JAX computes in float32
            if (num_bytes := traces[-1].bytes_sent()) > needed:
                sent = f"on {mesh} it sends {num_bytes:,} bytes, where {needed:,} would do"
                if num_bytes > needed * (exercise.slack if exercise.excess else 2):
                    wasteful = wasteful or f"{sent}.\n{exercise.excess or EXCESS}"
                remark = remark or f"\n{sent[0].upper()}{sent[1:]}: {exercise.surplus.format(num_bytes - needed)}"
    if wasteful:
        but(wasteful)
    _divided(fn, exercise, framework)
    _precise(fn, exercise, framework)
    meshes = ", ".join(map(str, exercise.meshes))
    equal = "equals" if len(shown) == 1 else "equal"
    text = f" is right.\n{', '.join(shown)} {equal} the unsharded result on {meshes}.{remark}"
    panels = [Panel(f"your {result}, rank 0", array) for result, array in list(shown.items())[:3]]
    verdict = right(f"{text}\nThe picture shows rank 0 of {exercise.meshes[0]}.", panels)
    return then(Answer(fn, exercise, framework, traces, verdict)) if then else verdict


SINGLE = 1e-5
"""The tolerance, relative to the largest entry, for a program that computes in float32."""

EXCESS = "Which of these messages can you do without? Send as little as possible."


def _refuse(trial: Trial, exercise: Exercise) -> None:
    """Refuse a run with the right numbers that is not what the exercise asks for, or that damages something."""
    if trial.damage:
        but(trial.damage)
    ops = sorted({event.op for event in trial.trace.events if event.kind == "collective"})
    if exercise.by_hand and ops:
        but(f"{who_works(ops)}.\nBuild it from {exercise.by_hand}.")


def who_works(ops: Sequence[str]) -> str:
    """ "`all_gather` and `reduce_scatter` do the work", which the learner should have written."""
    return f"{listed(f'`{op}`' for op in ops)} {'does' if len(ops) == 1 else 'do'} the work"


def _divided(fn: Callable[..., Any], exercise: Exercise, framework: Framework) -> None:
    """Refuse a program whose ranks gather everything and then each do all of the work."""
    if not exercise.divided:
        return
    mesh = Mesh(**{exercise.divided: 4})
    with on(mesh):
        tensors = exercise.tensors(np.random.default_rng(0), mesh)
        share = share_of_work(framework, fn, exercise.specs, tensors, exercise.divided, mesh.size)
    if share >= MOST_WORK:
        but(
            f"on {mesh} the busiest rank does {share:.0%} of what one rank alone would do.\nFour ranks should share "
            "the work. Let each of them compute with its own pieces."
        )


def _precise(fn: Callable[..., Any], exercise: Exercise, framework: Framework) -> None:
    """Refuse a program that is right only for integers, or only for numbers that 16 bits can represent."""
    mesh = exercise.meshes[0]
    tensors = {key: x * FINE for key, x in exercise.tensors(np.random.default_rng(0), mesh).items()}
    single = replace(exercise, tolerance=max(exercise.tolerance, SINGLE))  # float32 is precise enough
    with on(mesh):
        for trial in trials(framework, fn, single, mesh, tensors) if exercise.is_precise else ():
            if _wrong(trial.found, single, mesh, tensors, framework):
                refuse(
                    ": right for small whole numbers, but not for others: they lose digits on their way.\nLeave the "
                    "dtype of the numbers as it is."
                )


FINE = 1 + 2.0**-12
"""An integer times this needs more bits than a 16-bit float has, and fewer than float32 has."""

MOST_WORK = 0.7
"""The largest share of a single rank's work that one of four ranks may do."""


def _wrong(
    found: list[dict[str, np.ndarray]], exercise: Exercise, mesh: Mesh, tensors: Tensors, framework: Framework
) -> tuple[str, str, list[Panel], str] | None:
    """The first wrong result, if any: what and where, by how much, a picture, and its name."""
    for result in found[0]:
        want = exercise.on_ranks(result, exercise.right(result, tensors), mesh)
        got, slack = [results[result] for results in found], _slack(exercise, framework, want)
        for rank in mesh.ranks:
            if got[rank].shape != want[rank].shape:
                text = f": {result} has shape {list(got[rank].shape)} on rank {rank} of {mesh}."
                panels = beside(f"yours, {result}", got[rank], want[rank])
                return text, f"The right one has shape {list(want[rank].shape)}.", panels, ""
        off = [differs(a, b, slack) for a, b in zip(got, want)]
        if any(map(np.any, off)):
            rank = next(rank for rank in mesh.ranks if off[rank].any())
            count = int(off[rank].sum())
            entries = f"{count} of {off[rank].size} entries {'is' if count == 1 else 'are'} off"
            most = number_text(float(np.abs(got[rank] - want[rank]).max()))
            by = f"{entries}, by up to {most}." if off[rank].size > 1 else f"It is off by {most}."
            if np.isnan(got[rank]).any():
                by = f"{entries}, and some are nan: is anything divided by 0, or infinity subtracted from infinity?"
            if want[rank].dtype.kind == "i":  # an id that is nearly right is wrong
                one, other = (number_text(float(x[rank][off[rank]][0])) for x in (got, want))
                by = f"{entries}: {'the first' if count > 1 else 'it'} is {one}, and should be {other}."
            key = result.removeprefix("d")
            if result != key and key in exercise.gradients and not any(one[result].any() for one in found):
                by = f"All of it is zero, as if {key} were detached, or as if two uses of it cancelled."
            panels = beside(f"yours, {result}", got[rank], want[rank], off[rank], apart=True)
            return f": {result} is not right yet on rank {rank} of {mesh}.", by, panels, result
    return None


def _slack(exercise: Exercise, framework: Framework, want: Sequence[np.ndarray]) -> float:
    """The difference that counts as rounding, for the pieces of a result."""
    tolerance = exercise.tolerance if framework == "torch" else 1e-4  # JAX computes in float32
    return tolerance * max(1.0, *(float(np.abs(piece).max()) for piece in want))


def _hint(fn: Callable[..., Any], exercise: Exercise, framework: Framework, result: str, first: int) -> str:
    """The hint of the first mistake that explains a result on every rank of mesh number `first` and of all others.

    A mesh of one rank counts only if it is the first: many mistakes need two. One on which `fn` raises does not count.
    """
    known = exercise.known(result)
    for axes in dict.fromkeys([*((axis,) for axis in exercise.axes), exercise.axes]):
        along = " and ".join(axes)
        known.append((AGAIN.format(along), lambda seen, axes=axes: seen.want * seen.mesh.axis_size(axes)))
        known.append((A_MEAN.format(along), lambda seen, axes=axes: seen.want / seen.mesh.axis_size(axes)))

    def tried() -> Iterator[tuple[np.ndarray, dict[tuple[str, Wrong], np.ndarray]]]:
        meshes = [(seed, mesh) for seed, mesh in enumerate(exercise.meshes) if seed != first and mesh.size > 1]
        for seed, mesh in [(first, exercise.meshes[first]), *meshes]:
            tensors = exercise.tensors(np.random.default_rng(seed), mesh)
            runs = trials(framework, fn, exercise, mesh, tensors)
            try:
                found = next(trial.found for trial in runs if result in trial.found[0])
            except Exception:
                continue
            seen = exercise.seen(result, tensors, mesh)
            want = [one.want for one in seen]
            slack, got = _slack(exercise, framework, want), [results[result] for results in found]
            yield _flat(got, want, slack), {one: _flat(map(one[1], seen), want, slack) for one in known}

    return cause(tried(), ("", own_part), slack=1.0)[0]


AGAIN = "This is R times too large, for R ranks along {}. Is something added up that every rank already has?"
A_MEAN = "This is 1/R of what is right, for R ranks along {}. Is it divided by R once too often?"
"""Mistakes in every exercise's results, which come after its own."""


def _flat(pieces: Iterable[Any], like: Sequence[np.ndarray], slack: float) -> np.ndarray:
    """All ranks' numbers, in units of the tolerance; one constant for a piece of another shape."""
    pairs = [(np.asarray(piece), one) for piece, one in zip(pieces, like)]
    flat = [np.ravel(piece if piece.shape == one.shape else np.full(one.shape, np.nan)) for piece, one in pairs]
    return np.nan_to_num(np.concatenate(flat).astype(float) / slack, nan=1e300, posinf=np.inf, neginf=-np.inf)
