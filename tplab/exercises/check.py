"""Grading an exercise: the learner's program runs on several meshes, with real tensors, and is compared with the plain
answer. The result is a `Verdict`, which says what is wrong, on which rank, and shows it.

A verdict never raises, so a notebook with an unsolved exercise still runs from top to bottom.
"""

from __future__ import annotations

import dis
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from tplab.errors import RankError
from tplab.exercises.calls import library_call
from tplab.exercises.exercise import Exercise, Framework, Seen, Tensors
from tplab.exercises.trials import Trial, share_of_work, trials
from tplab.mesh import Mesh
from tplab.sharding import split
from tplab.trace.trace import Trace
from tplab.widgets.matrices import Matrices, Panel, number_text


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


def not_started(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is a stub: nothing but `...`, or with `name = ...` left in it."""
    code = list(dis.get_instructions(fn))
    ends = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "RETURN")  # and not STORE_SUBSCR, as in `x[...] = y`
    if any(one.argval is Ellipsis and two.opname.startswith(ends) for one, two in pairwise(code)):
        return True
    if any("CONST" in one.opname and one.argval not in (None, ...) for one in code):
        return False
    nothing = ("RESUME", "NOP", "LOAD_CONST", "RETURN", "COPY_FREE_VARS", "POP_TOP")
    return all(one.opname.startswith(nothing) for one in code)


def untouched(name: str) -> Verdict:
    """The verdict on a stub."""
    return Verdict(None, f"{name}: not started. Replace the `...`, then run this cell again.")


def not_a_function(fn: Any, name: str) -> Verdict | None:
    """The verdict on anything that was not written with `def` or `lambda`; None for what was."""
    if isinstance(fn, FunctionType | MethodType):
        return None
    return Verdict(False, f"{name}: this is an object of type {type(fn).__name__}. Write a function, with `def`.")


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
    if lazy := library_call(fn, exercise.not_with):
        return borrowed(name, lazy)
    remark, shown, wasteful, given = "", {}, None, exercise
    for seed, mesh in enumerate(exercise.meshes):
        tensors = exercise.tensors(np.random.default_rng(seed), mesh)
        try:
            for trial in trials(framework, fn, exercise, mesh, tensors):
                if any(array.dtype == np.float32 for array in trial.found[0].values()):  # precise enough
                    exercise = replace(given, tolerance=max(given.tolerance, SINGLE))
                if verdict := _compared(trial.found, exercise, mesh, tensors, framework) or _refused(trial, exercise):
                    return verdict
                if seen:
                    seen(trial.trace)
                if not seed:
                    shown |= trial.found[0]
                num_bytes = trial.trace.bytes_sent()
        except Exception as error:
            return Verdict(False, raised(error, fn, name, mesh))
        if exercise.fewest and not shown.keys() & exercise.also.keys():
            needed = exercise.fewest(mesh, tensors) // (1 if framework == "torch" else 2)  # JAX computes in float32
            if num_bytes > needed:
                sent = f"on {mesh} it sends {num_bytes:,} bytes, where {needed:,} would do"
                if num_bytes > needed * (exercise.slack if exercise.excess else 2):
                    text = f"{name}: the numbers are right, but {sent}.\n{exercise.excess or EXCESS}"
                    wasteful = wasteful or Verdict(False, text)
                remark = remark or f"\n{sent[0].upper()}{sent[1:]}: can you do without one of the messages?"
    if verdict := wasteful or _undivided(fn, exercise, framework) or _rough(fn, exercise, framework):
        return verdict
    listed = ", ".join(map(str, exercise.meshes))
    equal = "equals" if len(shown) == 1 else "equal"
    text = f"{name} is right.\n{', '.join(shown)} {equal} the unsharded result on {listed}.{remark}"
    panels = [Panel(f"your {result}, rank 0", array) for result, array in list(shown.items())[:3]]
    return Verdict(True, f"{text}\nThe picture shows rank 0 of {exercise.meshes[0]}.", panels)


SINGLE = 1e-5
"""The tolerance, relative to the largest entry, for a program that computes in float32."""

EXCESS = "Which of these messages can you do without? Send as little as possible."


def borrowed(name: str, function: str) -> Verdict:
    """The verdict on a program that calls a function of the library which does the exercise."""
    return Verdict(False, f"{name}: `{function}` does the work. Here you write it yourself.")


def _refused(trial: Trial, exercise: Exercise) -> Verdict | None:
    """The verdict on a run with the right numbers that is not what the exercise asks for, or that damages something."""
    if trial.damage:
        return Verdict(False, f"{exercise.name}: the numbers are right, but {trial.damage}")
    ops = sorted({event.op for event in trial.trace.events if event.kind == "collective"})
    if exercise.by_hand and ops:
        names = f"`{'` and `'.join(ops)}` {'does' if len(ops) == 1 else 'do'} the work"
        text = f"{exercise.name}: the numbers are right, but {names}.\nBuild it from {exercise.by_hand}."
        return Verdict(False, text)
    return None


def _undivided(fn: Callable[..., Any], exercise: Exercise, framework: Framework) -> Verdict | None:
    """The verdict on a program whose ranks compute everything, after gathering what they need for that."""
    if not exercise.divided:
        return None
    num_ranks = 4
    mesh = Mesh(**{exercise.divided: num_ranks})
    tensors = exercise.tensors(np.random.default_rng(0), mesh)
    try:
        share = share_of_work(framework, fn, exercise.specs, tensors, exercise.divided, num_ranks)
    except Exception as error:
        return Verdict(False, raised(error, fn, exercise.name, mesh))
    if share < MOST_WORK:
        return None
    return Verdict(
        False,
        f"{exercise.name}: the numbers are right, but on {mesh} the busiest rank does {share:.0%} of what one rank "
        f"alone would do.\nFour ranks should share the work. Let each of them compute with its own pieces.",
    )


def _rough(fn: Callable[..., Any], exercise: Exercise, framework: Framework) -> Verdict | None:
    """The verdict on a program that is right only for whole numbers, or for those that 16 bits can hold."""
    if not exercise.is_precise:
        return None
    mesh = exercise.meshes[0]
    tensors = {key: x * FINE for key, x in exercise.tensors(np.random.default_rng(0), mesh).items()}
    single = replace(exercise, tolerance=max(exercise.tolerance, SINGLE))  # float32 is precise enough
    for trial in trials(framework, fn, single, mesh, tensors):
        if _compared(trial.found, single, mesh, tensors, framework) is not None:
            return Verdict(
                False,
                f"{exercise.name}: right for small whole numbers, but not for others: they lose digits on their way.\n"
                "Leave the dtype of the numbers as it is.",
            )
    return None


FINE = 1 + 2.0**-12
"""Times this, a whole number needs more bits than a 16-bit number has, and fewer than float32."""

MOST_WORK = 0.7
"""The most that one of four ranks may do of the work of one rank alone."""


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
            entries = f"{int(off[rank].sum())} of {off[rank].size} entries are off, by up to"
            by = f"{entries if off[rank].size > 1 else 'It is off by'} {number_text(float(np.abs(apart).max()))}."
            hint = _known_mistake(exercise, result, got, want, slack, mesh, tensors) or by
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
