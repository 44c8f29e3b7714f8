"""The exercises of lab 11: how many forwards to run ahead over a slow link, and a worker that splits its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tplab.exercises.calls import library_call
from tplab.exercises.check import Verdict, borrowed, not_started, raised, untouched
from tplab.exercises.damage import Untouched
from tplab.exercises.drawn import Drawn
from tplab.mesh import Mesh
from tplab.schedules import Action, Costs, Schedule, faults, one_f_one_b, simulate, zb_h1, zb_h2
from tplab.widgets.matrices import Panel, number_text

Ahead = Callable[[int, int], int]
Train = Callable[[Schedule, Any, Sequence[tuple[Any, Any]], Callable[..., Any]], Any]

# --- forwards ahead --------------------------------------------------------------------------------------------------

SIZES = ((4, 8), (2, 8), (3, 7), (1, 4), (5, 12))
SLOW = Costs(forward=1, input_grad=1, weight_grad=1, transfer=1)


def running_ahead(ahead: Sequence[int], microbatches: int) -> Schedule:
    """Rank r runs ahead[r] forwards, then alternates a forward and a backward, then runs what is left. In 1F1B,
    ahead[r] is p - 1 - r."""
    rows = []
    for rank, num in enumerate(min(num, microbatches) for num in ahead):
        row = [Action("F", rank, k) for k in range(num)]
        for k in range(microbatches - num):
            row += [Action("F", rank, num + k), Action("B", rank, k)]
        rows.append(row + [Action("B", rank, k) for k in range(microbatches - num, microbatches)])
    return Schedule(rows, name=f"ahead {', '.join(map(str, ahead))}")


def check_ahead(ahead: Ahead) -> Verdict:
    """Whether `ahead(rank, ranks)` gives numbers of forwards that hide messages lasting as long as a forward: a
    schedule without a deadlock, as fast as GPipe, that holds fewer than 2 p microbatches."""
    name = "ahead"
    for ranks, microbatches in SIZES:
        where = f"{ranks} ranks and {microbatches} microbatches"
        try:
            numbers = [ahead(rank, ranks) for rank in range(ranks)]
            if any(num is None or num is ... for num in numbers):
                return untouched(name)
            if not all(isinstance(num, int) and num >= 0 for num in numbers):
                return Verdict(False, f"{name}: with {ranks} ranks it gives {numbers}; give whole numbers, 0 or more.")
            schedule = running_ahead(numbers, microbatches)
        except Exception as error:
            return Verdict(False, f"{name}: {type(error).__name__} with {where}: {error}")
        given = f"With {where}, the ranks run {', '.join(map(str, numbers))} forwards ahead"
        if stuck := faults(schedule, at_most=1):
            rank = next(rank for rank in range(1, ranks) if numbers[rank] > numbers[rank - 1])  # its only cause
            return Drawn(
                False,
                f"{name}: {stuck[0]}.\n{given}. Before its first backward, rank {rank} needs F{numbers[rank - 1] + 1}, "
                f"which rank {rank - 1} runs only after its own first backward.",
                schedule,
            )
        run, best = simulate(schedule, SLOW), 3 * (microbatches + ranks - 1) + 2 * (ranks - 1)
        if run.makespan > best:
            steps = f"{run.makespan:g} steps over the slow link, where {best} would do"
            text = f"{name}: no deadlock. {given}, and need {steps}."
            return Drawn(False, f"{text}\n{_who_waits(numbers)}", schedule, SLOW)
        if run.peak_activations.max() > 2 * ranks - 1 and microbatches >= 2 * ranks:
            return Drawn(
                False,
                f"{name}: no deadlock, and {best} steps. {given}, so that a rank holds "
                f"{run.peak_activations.max():g} microbatches. {2 * ranks - 1} are enough.",
                schedule,
                SLOW,
                2 * ranks - 1,
            )
    listed = ", ".join(f"{ranks} x {microbatches}" for ranks, microbatches in SIZES)
    return Drawn(
        True,
        f"{name} is right: no deadlock, as fast as GPipe, and no more microbatches held than are needed to hide the "
        f"messages.\nTried with ranks x microbatches {listed}. This is the first of them:",
        running_ahead([ahead(rank, SIZES[0][0]) for rank in range(SIZES[0][0])], SIZES[0][1]),
        SLOW,
    )


def _who_waits(numbers: Sequence[int]) -> str:
    ranks = len(numbers)
    if numbers == [ranks - 1 - rank for rank in range(ranks)]:
        return "This is 1F1B. A rank has nothing to do while a forward travels down and its gradient comes back."
    return "A rank has nothing to do until its first gradient comes back. How many messages is that, there and back?"


# --- a worker that splits its backward -------------------------------------------------------------------------------

MESHES = (Mesh(pp=2), Mesh(pp=3), Mesh(pp=4), Mesh(pp=1))
MICROBATCHES, ROWS, WIDTH = 5, 4, 3


def check_train_split(fn: Train) -> Verdict:
    """Whether `fn(schedule, stage, microbatches, loss)`, run by every rank, leaves the gradients of plain accumulation
    in `.grad` and returns the loss on the last rank: for schedules with B, and with I and W."""
    name = "train_split"
    if not_started(fn):
        return untouched(name)
    if lazy := library_call(fn, ("train_batch",)):
        return borrowed(name, lazy)
    for mesh in MESHES:
        ranks = mesh.axis_size("pp")
        for rule in (one_f_one_b, zb_h1, zb_h2):
            schedule = rule(ranks, MICROBATCHES)
            try:
                if verdict := _compared(fn, schedule, mesh):
                    return verdict
            except Exception as error:
                return Verdict(False, f"{raised(error, fn, name, mesh)}\nThe schedule is {schedule.name}.")
    try:
        if (done := _work_of_late_w(fn)) < ENOUGH:
            return Verdict(
                False,
                f"{name}: the gradients are right, but I has computed them. In a schedule whose W all come last, rank "
                f"1 has {done:.0%} of\nthe weights' gradients left after its last I. I should compute only what the "
                "rank before it is waiting for.",
            )
        for rule in (zb_h1, one_f_one_b):
            few, many = (_most_kept(fn, rule, microbatches) for microbatches in (6, 24))
            if many > 1.2 * few:
                return Verdict(
                    False,
                    f"{name}: the gradients are right, but with {rule(2, 6).name} a rank keeps {few:,} bytes for 6 "
                    f"microbatches and {many:,} for 24.\nA microbatch that has gone forward and back should leave "
                    "nothing behind: neither its tensors nor its graph (`retain_graph`).",
                )
        if harm := _left(fn):
            return Verdict(False, f"{name}: the gradients are right, but {harm}")
        split, whole = _flops(fn, zb_h1), _flops(fn, one_f_one_b)
    except Exception as error:
        return Verdict(False, raised(error, fn, name, Mesh(pp=2)))
    if split > MOST_WORK * whole:
        return Verdict(
            False,
            f"{name}: the gradients are right, but on two ranks a batch takes {100 * (split / whole - 1):.0f}% more "
            "FLOPs with I and W than with B.\nIs something computed and not used, or a forward pass run again? I needs "
            "only the gradient of x, and W only those of the weights.",
        )
    text = f"{name} is right: loss and every gradient, for 1F1B, ZB-H1 and ZB-H2 on 1, 2, 3 and 4 ranks."
    if split > 1.02 * whole:  # below that it is additions, counted only where torch shows them
        text += (
            f"\nOn two ranks a batch takes {100 * (split / whole - 1):.0f}% more FLOPs with I and W than with B: W "
            "goes through the whole chain once more. tplab's `train_batch` avoids this: it keeps the gradient of each "
            "layer's output."
        )
    return Verdict(True, text)


def _compared(fn: Train, schedule: Schedule, mesh: Mesh) -> Verdict | None:
    """The verdict on the first thing that is wrong, if there is any."""
    from tplab.torch import run

    ranks, name = schedule.num_ranks, "train_split"
    where = f"{ranks} rank{'s' * (ranks > 1)} and {schedule.name}"
    per_rank = run(lambda: _one_rank(fn, schedule), mesh).per_rank
    loss, right, last = _plain(ranks)
    got = per_rank[-1][0]
    try:
        got = float(got)
    except (TypeError, ValueError):
        return Verdict(False, f"{name}: the last rank returned {got!r}; it must return the loss, with {where}.")
    for rank in range(ranks):
        for key, want in right[rank].items():
            grad = per_rank[rank][1][key]
            wrong = np.abs(grad - want) > 1e-9
            if wrong.any():
                text = f"{name}: the gradient of {key} is not right on rank {rank}, with {where}.\n"
                panels = [Panel(f"yours, {key}", grad, wrong), Panel("right", want)]
                hint = _hint(grad, want, last[rank][key])
                return Verdict(False, text + hint, [*panels, Panel("yours - right", grad - want, wrong)])
    if abs(got - loss) > 1e-9:
        times = " Is each microbatch's loss divided by their number?" if abs(got - MICROBATCHES * loss) < 1e-9 else ""
        return Verdict(False, f"{name}: the loss is {number_text(got)}, not {number_text(loss)}, with {where}.{times}")
    return None


def _hint(grad: np.ndarray, want: np.ndarray, last: np.ndarray) -> str:
    """A hint from what the wrong gradient looks like."""
    known: Iterator[tuple[Any, str]] = iter(
        [
            (0 * want, "Nothing has been added to it: does each B, or each W, add its part?"),
            (2 * want, "It is twice what it should be: `backward` in I has added it already, before W does."),
            (MICROBATCHES * want, "It is too large by the number of microbatches: the loss is their mean."),
            (last, "It is that of the last microbatch alone: W must add to `.grad`."),
        ]
    )
    return next((hint for guess, hint in known if np.allclose(grad, guess, rtol=0, atol=1e-9)), "") or (
        f"It is off by up to {number_text(float(np.abs(grad - want).max()))}."
    )


def _one_rank(fn: Train, schedule: Schedule) -> tuple[Any, dict[str, np.ndarray]]:
    from torch.nn import functional as F

    from tplab.torch import axis_index

    stage = _stage(axis_index("pp"))
    loss = fn(schedule, stage, _microbatches(), F.mse_loss)
    loss = loss.detach() if hasattr(loss, "detach") else loss
    return loss, _gradients(stage)


def _plain(ranks: int) -> tuple[float, list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]:
    """The mean loss, each stage's gradients of it, and the last microbatch's part of these."""
    from torch.nn import functional as F

    stages, total, before = [_stage(number) for number in range(ranks)], 0.0, []
    for k, (x, target) in enumerate(_microbatches()):
        if k == MICROBATCHES - 1:
            before = [_gradients(stage) for stage in stages]
        for stage in stages:
            x = stage(x)
        loss = F.mse_loss(x, target) / MICROBATCHES
        loss.backward()
        total += loss.item()
    right = [_gradients(stage) for stage in stages]
    last = [{key: found[key] - was[key] for key in found} for found, was in zip(right, before)]
    return total, right, last


def _stage(number: int) -> Any:
    import torch
    from torch import nn

    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
    random = np.random.default_rng(number)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape))))
    return stage


def _microbatches(number: int = MICROBATCHES) -> list[tuple[Any, Any]]:
    import torch

    both = torch.from_numpy(np.random.default_rng(99).normal(size=(number, 2, ROWS, WIDTH)))
    return [(x, target) for x, target in both]


def _gradients(stage: Any) -> dict[str, np.ndarray]:
    """The gradient of each parameter; zeros if it has none yet."""
    return {
        key: np.zeros(tuple(parameter.shape)) if parameter.grad is None else parameter.grad.numpy(force=True).copy()
        for key, parameter in stage.named_parameters()
    }


MOST_WORK = 1.22
"""The most FLOPs of I and W relative to B. W may go through the chain of the stage once more."""


def _left(fn: Train) -> str:
    """What is wrong after a second batch, whose gradients must be added to those of the first; "" if nothing is."""
    from torch.nn import functional as F

    from tplab.torch import axis_index, run

    def program() -> tuple[str, bool]:
        stage = _stage(axis_index("pp"))
        before, found = Untouched(dict(stage.named_parameters())), []
        for _ in range(2):
            fn(zb_h1(2, MICROBATCHES), stage, _microbatches(), F.mse_loss)
            found.append(_gradients(stage))
            if not all(parameter.requires_grad for parameter in stage.parameters()):
                return "it leaves parameters behind that no longer require a gradient.", True
        return before.damage(), all(np.allclose(found[1][key], 2 * grad) for key, grad in found[0].items())

    per_rank = run(program, Mesh(pp=2)).per_rank
    if harm := next((harm for harm, _ in per_rank if harm), ""):
        return harm
    if not all(adds for _, adds in per_rank):
        return "with a second batch, the gradients of the first are lost: add to what is already in `.grad`."
    return ""


ENOUGH = 0.9
"""How much of the work of the weights' gradients must be left for W, where all W come last."""


def _work_of_late_w(fn: Train) -> float:
    """Of the FLOPs of the weights' gradients, how many rank 1 of 2 does after its last message, if all W come last."""
    from tplab.torch import run

    late = " ".join(f"W{k}" for k in range(MICROBATCHES))
    first = "F0 " + " ".join(f"F{k + 1} I{k}" for k in range(MICROBATCHES - 1)) + f" I{MICROBATCHES - 1} {late}"
    last = " ".join(f"F{k} I{k}" for k in range(MICROBATCHES)) + f" {late}"
    rows = [[Action.parse(f"{rank}{cell}") for cell in row.split()] for rank, row in enumerate((first, last))]
    trace = run(lambda: _one_rank(fn, Schedule(rows, name="all W last")), Mesh(pp=2), cluster="h100").trace
    events = trace.select(rank=1).events
    end = max(place for place, event in enumerate(events) if event.kind == "send")
    of_weights = MICROBATCHES * 2 * (2 * ROWS * WIDTH * WIDTH)  # two matmuls
    return sum(event.flops for event in events[end:]) / of_weights


def _most_kept(fn: Train, rule: Callable[[int, int], Schedule], microbatches: int) -> int:
    """The most bytes that a rank of two has made and not freed."""
    from torch.nn import functional as F

    from tplab.torch import LiveBytes, axis_index, run

    given = _microbatches(microbatches)

    def program() -> int:
        stage = _stage(axis_index("pp"))
        with LiveBytes() as live:
            fn(rule(2, microbatches), stage, given, F.mse_loss)
        return live.peak

    return max(run(program, Mesh(pp=2)).per_rank)


def _flops(fn: Train, rule: Callable[[int, int], Schedule]) -> int:
    """The FLOPs of two ranks together."""
    from tplab.torch import run

    trace = run(lambda: _one_rank(fn, rule(2, MICROBATCHES)), Mesh(pp=2), cluster="h100").trace
    return int(trace.select(kind="compute").column("flops").sum())
