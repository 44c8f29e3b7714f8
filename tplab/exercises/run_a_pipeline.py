"""The exercises of lab 11: how many forwards to run ahead over a slow link, and a worker that splits its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product, takewhile
from typing import Any

import numpy as np

from tplab.exercises.damage import PARAMETER, Untouched
from tplab.exercises.data_parallel import but
from tplab.exercises.drawn import Drawn
from tplab.exercises.verdict import Refused, Verdict, beside, cause, check, differs, listed, on, refuse, right, run_on
from tplab.mesh import Mesh
from tplab.schedules import Action, Costs, Schedule, faults, one_f_one_b, simulate, zb_h1, zb_h2
from tplab.widgets.matrices import number_text

Ahead = Callable[[int, int], int]
Rule = Callable[[int, int], Schedule]
Train = Callable[[Schedule, Any, Sequence[tuple[Any, Any]], Callable[..., Any]], Any]

# --- forwards ahead --------------------------------------------------------------------------------------------------

SIZES = ((4, 8), (2, 8), (3, 7), (1, 4), (5, 12), (4, 12))  # in 4 x 8, one less suffices for rank 0
SLOW = Costs(forward=1, input_grad=1, weight_grad=1, transfer=1)


def running_ahead(ahead: Sequence[int], microbatches: int) -> Schedule:
    """Rank r runs ahead[r] forwards, then alternates a forward and a backward, then runs the remaining backwards. In
    1F1B, ahead[r] is p - 1 - r."""
    rows = []
    for rank, num in enumerate(min(num, microbatches) for num in ahead):
        row = [Action("F", rank, k) for k in range(num)]
        for k in range(microbatches - num):
            row += [Action("F", rank, num + k), Action("B", rank, k)]
        rows.append(row + [Action("B", rank, k) for k in range(microbatches - num, microbatches)])
    return Schedule(rows, name=f"ahead {', '.join(map(str, ahead))}")


@check("ahead")
def check_ahead(ahead: Ahead) -> Verdict:
    """Check that `ahead(rank, ranks)` gives numbers of forwards that hide messages lasting as long as a forward: a
    schedule without a deadlock, as fast as GPipe, that holds fewer than 2 p microbatches."""
    for ranks, microbatches in SIZES:
        where = f"{ranks} ranks and {microbatches} microbatches"
        with on(f"with {where}"):
            numbers = [ahead(rank, ranks) for rank in range(ranks)]
            if None in numbers:
                refuse(f": with {ranks} ranks it returns {numbers}; is a `return` missing?")
            if not all(isinstance(num, int | np.integer) and num >= 0 for num in numbers):
                refuse(f": with {ranks} ranks it gives {numbers}; give whole numbers, 0 or more.")
            schedule = running_ahead(numbers, microbatches)
        given = f"With {where}, the ranks run {', '.join(map(str, numbers))} forwards ahead"
        if faults(schedule, at_most=1):
            rank = next(rank for rank in range(1, ranks) if numbers[rank] > numbers[rank - 1])  # its only cause
            text = (
                f": deadlock. {given}.\nBefore its first backward, rank {rank} needs F{numbers[rank - 1] + 1}, which "
                f"rank {rank - 1} runs only after its own first backward."
            )
            raise Refused(Drawn(False, text, schedule))
        run, best = simulate(schedule, SLOW), 3 * (microbatches + ranks - 1) + 2 * (ranks - 1)
        if run.makespan > best:
            steps = f"{run.makespan:g} steps over the slow link, where {best} would do"
            text = f": no deadlock. {given}, and need {steps}.\n{WAITS}"
            raise Refused(Drawn(False, text, schedule, SLOW))
        most, enough = run.peak_activations.max(), 2 * ranks - 1
        if most > enough and microbatches >= 2 * ranks:
            text = f": no deadlock, and {best} steps. {given}, so that a rank holds {most:g} microbatches."
            text += f" {enough} are enough."
            raise Refused(Drawn(False, text, schedule, SLOW, enough))
    listed = ", ".join(f"{ranks} x {microbatches}" for ranks, microbatches in SIZES)
    text = (
        " is right: no deadlock, as fast as GPipe, and no more microbatches held than a long batch needs to hide its "
        f"messages.\nTried with ranks x microbatches {listed}. This is the first of them:"
    )
    ranks, microbatches = SIZES[0]
    return Drawn(True, text, running_ahead([ahead(rank, ranks) for rank in range(ranks)], microbatches), SLOW)


WAITS = "Each rank waits for its first gradient. How many messages is that, there and back, and so how many forwards?"


# --- a worker that splits its backward -------------------------------------------------------------------------------

MESHES = (Mesh(pp=2), Mesh(pp=3), Mesh(pp=4), Mesh(pp=1))
RULES = (one_f_one_b, zb_h1, zb_h2)
MICROBATCHES, ROWS, WIDTH = 5, 4, 3


@check("train_split", not_with=("train_batch",))
def check_train_split(fn: Train) -> Verdict:
    """Check that `fn(schedule, stage, microbatches, loss)`, run by every rank, leaves the gradients of plain
    accumulation in `.grad` and returns the loss on the last rank: for schedules with B, and with I and W."""
    for mesh, rule in product(MESHES, RULES):
        _compare(fn, rule, mesh)
    shares, early = _work_of_late_w(fn)
    if early > 2 * 4:  # a forward pass, and the backward pass of x and of the weights, are 6
        but(
            "rank 1 sends its first gradient of x late. In a schedule whose W all come last, it has by then computed "
            f"as much as\n{early / 2:.0f} forward passes, although its first I comes after one. The rank before it "
            "waits for that: send it in the I action, in the schedule's order."
        )
    if (done := min(shares)) < ENOUGH:
        but(
            f"they are computed in I actions. In a schedule whose W all come last, rank {shares.index(done)} has "
            f"{done:.0%} of\nthe weights' gradients left after its last I. An I action should compute only what the "
            "rank before it is waiting for."
        )
    for rule in (zb_h1, one_f_one_b):
        few, many = (_most_kept(fn, rule, microbatches) for microbatches in (6, 24))
        if many > 1.2 * few:
            but(
                f"with {rule(2, 6).name} a rank keeps {few:,} bytes for 6 microbatches and {many:,} for 24.\nA "
                "microbatch that has gone forward and back should leave nothing behind: neither its tensors nor its "
                "graph (`retain_graph`)."
            )
    _run(lambda stage: _leaves_nothing(fn, stage))
    split, whole = (_flops(fn, rule(2, MICROBATCHES)) for rule in (zb_h1, one_f_one_b))
    more = f"on two ranks a batch takes {100 * (split / whole - 1):.0f}% more FLOPs with I and W than with B"
    if split > MOST_WORK * whole:
        but(
            f"{more}.\nIs something computed and not used, or a forward pass run again? An I action needs only the "
            "gradient of x, and a W action only those of the weights."
        )
    text = " is right: loss and every gradient, for 1F1B, ZB-H1 and ZB-H2 on 1, 2, 3 and 4 ranks."
    if split > 1.02 * whole:  # a smaller excess is additions, counted only where torch shows them
        text += (
            f"\nO{more[1:]}: W goes through the whole chain once more. tplab's `train_batch` avoids this: it keeps the "
            "gradient of each layer's output."
        )
    return right(text)


def _compare(fn: Train, rule: Rule, mesh: Mesh) -> None:
    """Refuse a loss or a gradient that is not that of one device."""
    schedule = rule(mesh.size, MICROBATCHES)
    name = f"{schedule.name}, whose actions are {listed(dict.fromkeys(one.kind for one in schedule.by_rank()[0]))}"
    where = f"with {mesh.size} rank{'s' * (mesh.size > 1)} and {name}"
    with on(f"with {name}"):
        per_rank = _trained_on(fn, schedule, mesh)
    loss, grads, _ = _plain(mesh.size)
    returned = per_rank[-1][0]
    try:
        got = float(returned)
    except (TypeError, ValueError):
        refuse(f": the last rank returned {returned!r}; it must return the loss, {where}.")
    for rank, (_, found) in enumerate(per_rank):
        for key, want in grads[rank].items():
            if (wrong := differs(found[key], want)).any():
                off = f"It is off by up to {number_text(float(np.abs(found[key] - want).max()))}."
                text = f": the gradient of {key} is not right on rank {rank}, {where}."
                panels = beside(f"yours, {key}", found[key], want, wrong, apart=True)
                refuse(f"{text}\n{cause(_tried(fn, key, rule), off)}", panels)
    if differs(got, loss):
        times = " Is each microbatch's loss divided by their number?" if abs(got - MICROBATCHES * loss) < 1e-9 else ""
        refuse(f": the loss is {number_text(got)}, not {number_text(loss)}, {where}.{times}")


def _run(program: Callable[[Any], Any], mesh: Mesh = Mesh(pp=2), **options: Any) -> Any:  # noqa: B008
    """A run of `program(stage)` on the ranks of a pipeline."""
    from tplab.torch import axis_index

    return run_on(mesh, lambda: program(_stage(axis_index("pp"))), **options)


def _tried(fn: Train, key: str, rule: Rule) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """A gradient on every rank of every mesh under this rule, and the predictions of known mistakes."""
    for mesh in MESHES:
        schedule, (_, grads, last) = rule(mesh.size, MICROBATCHES), _plain(mesh.size)
        got = np.array([found[key] for _, found in _trained_on(fn, schedule, mesh)])
        want, alone = (np.array([one[key] for one in of]) for of in (grads, last))
        twice = "t is twice what it should be: is it added once in I or B, and once more?"
        known = {
            "Nothing has been added to it.": 0 * want,
            f"I{twice}": 2 * want,
            f"From rank 1 on, i{twice}": np.concatenate([want[:1], 2 * want[1:]]),
            "It is too large by the number of microbatches: the loss is their mean.": MICROBATCHES * want,
            "It is that of the last microbatch alone: add to `.grad`.": alone,
        }
        yield got, known


def _trained_on(fn: Train, schedule: Schedule, mesh: Mesh) -> Sequence[Any]:
    """Each rank's return value and gradients."""
    return _run(lambda stage: (_trained(fn, schedule, stage), _gradients(stage)), mesh).per_rank


def _trained(fn: Train, schedule: Schedule, stage: Any, number: int = MICROBATCHES) -> Any:
    """The worker's return value for a batch of `number` microbatches."""
    from torch.nn import functional as F

    loss = fn(schedule, stage, _microbatches(number), F.mse_loss)
    return loss.detach() if hasattr(loss, "detach") else loss


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
    grads = [_gradients(stage) for stage in stages]
    last = [{key: found[key] - was[key] for key in found} for found, was in zip(grads, before)]
    return total, grads, last


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


MOST_WORK = 1.14
"""The most FLOPs of I and W relative to B. W may go through the chain of the stage once more (1.10), but not on to the
gradient of x (1.18)."""


def _leaves_nothing(fn: Train, stage: Any) -> None:
    """Refuse damage that two batches leave behind, and gradients of the second that are not added to the first's."""
    before, found = Untouched(dict(stage.named_parameters()), instead=PARAMETER), []
    for _ in range(2):
        _trained(fn, zb_h1(2, MICROBATCHES), stage)
        found.append(_gradients(stage))
        if not all(parameter.requires_grad for parameter in stage.parameters()):
            but("it leaves parameters behind that no longer require a gradient.")
    if harm := before.damage():
        but(harm)
    if not all(np.allclose(found[1][key], 2 * grad) for key, grad in found[0].items()):
        but("with a second batch, the gradients of the first are lost: add to what is already in `.grad`.")


ENOUGH = 0.9
"""The fraction of the work on the weights' gradients that must be left for W, if all W come last."""


def _work_of_late_w(fn: Train) -> tuple[list[float], float]:
    """The fraction of the weights' gradients, in FLOPs, that each of two ranks computes after its last message if all W
    come last; and the work of rank 1 before it first sends, in matmuls.

    Rank 0 receives a gradient last, for which I has nothing to compute on the first rank. W may receive it instead."""
    late = " ".join(f"W{k}" for k in range(MICROBATCHES))
    first = "F0 " + " ".join(f"F{k + 1} I{k}" for k in range(MICROBATCHES - 1)) + f" I{MICROBATCHES - 1} {late}"
    last = " ".join(f"F{k} I{k}" for k in range(MICROBATCHES)) + f" {late}"
    rows = [[Action.parse(f"{rank}{cell}") for cell in row.split()] for rank, row in enumerate((first, last))]
    trace = _run(lambda stage: _trained(fn, Schedule(rows, name="all W last"), stage), cluster="h100").trace
    matmul, shares, before = 2 * ROWS * WIDTH * WIDTH, [], 0.0
    for rank in range(2):
        events = trace.select(rank=rank).events
        end = max(place for place, event in enumerate(events) if event.kind in ("send", "receive"))
        sent = max(place for place, event in enumerate(events) if event.kind == "send")
        forward = MICROBATCHES * (2 * matmul + ROWS * WIDTH)
        if rank == 0 and sum(event.flops for event in events[:sent]) < forward + matmul:
            end = sent  # until then it has only run forwards: W also receives the gradients
        shares.append(sum(event.flops for event in events[end:]) / (MICROBATCHES * 2 * matmul))
        before = sum(event.flops for event in takewhile(lambda event: event.kind != "send", events)) / matmul
    return shares, before


def _most_kept(fn: Train, rule: Rule, microbatches: int) -> int:
    """The most bytes that a rank of two has made and not freed."""
    from tplab.torch import LiveBytes

    def program(stage: Any) -> int:
        with LiveBytes() as live:
            _trained(fn, rule(2, microbatches), stage, microbatches)
        return live.peak

    return max(_run(program).per_rank)


def _flops(fn: Train, schedule: Schedule) -> int:
    """The FLOPs of two ranks together."""
    trace = _run(lambda stage: _trained(fn, schedule, stage), cluster="h100").trace
    return int(trace.select(kind="compute").column("flops").sum())
