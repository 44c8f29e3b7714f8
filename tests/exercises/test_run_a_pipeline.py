"""Lab 11's exercises: the solutions pass, stubs are not started, and every known mistake gets its hint."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from labs.source import build
from tplab.exercises.run_a_pipeline import check_ahead, check_train_split, running_ahead
from tplab.schedules import one_f_one_b
from tplab.torch import axis_index, axis_size, receive, send

# ------------------------------------------------------------------------------------------------------ ahead


def test_ahead_solved():
    assert check_ahead(cast(Any, lambda rank, ranks: np.int64(2 * (ranks - 1 - rank)))).passed
    assert check_ahead(lambda rank, ranks: 2 * (ranks - 1 - rank)).passed
    assert running_ahead([3, 2, 1, 0], 8) == one_f_one_b(4, 8)


def returns_nothing(rank, ranks):
    2 * (ranks - 1 - rank)  # pyright: ignore[reportUnusedExpression]


@pytest.mark.parametrize(
    "ahead, said",
    [
        (lambda rank, ranks: ranks - 1 if rank == 0 else 2 * (ranks - 1 - rank), "rank 1 needs F4, which rank 0 runs"),
        (
            lambda rank, ranks: ranks - 1 - rank,
            "need 49 steps over the slow link, where 39 would do.\nEach rank waits for",
        ),
        (lambda rank, ranks: 6, "Each rank waits for its first gradient. How many messages is that"),
        (lambda rank, ranks: 99, "holds 8 microbatches. 7 are enough"),
        (
            lambda rank, ranks: 2 * (ranks - 1 - rank) - (rank == 0 and ranks == 4),  # enough for 8 microbatches
            "With 4 ranks and 12 microbatches, the ranks run 5, 4, 2, 0 forwards ahead, and need 55 steps",
        ),
        (lambda rank, ranks: rank, ": deadlock. With 4 ranks and 8 microbatches, the ranks run 0, 1, 2, 3"),
        (lambda rank, ranks: -1, "give whole numbers, 0 or more"),
        (lambda rank, ranks: 1.5, "give whole numbers, 0 or more"),
        (lambda rank, ranks: 1 // rank, "ZeroDivisionError"),
        (returns_nothing, "with 4 ranks it returns [None, None, None, None]; is a `return` missing?"),
        (lambda rank, ranks: None if rank else ranks, "is a `return` missing?"),
    ],
)
def test_ahead_not_solved(ahead, said: str):
    verdict = check_ahead(ahead)
    assert verdict.passed is False and said in verdict.text, verdict


@pytest.mark.parametrize("numbers", [lambda rank: 2 * (3 - rank), lambda rank: 3 - rank, lambda rank: rank])
def test_every_answer_is_drawn(numbers):
    data, metadata = check_ahead(lambda rank, ranks: max(numbers(rank) + ranks - 4, 0))._repr_mimebundle_()
    assert data["image/png"] and metadata["image/png"]["alt"] == data["text/plain"]


def test_ahead_not_started():
    assert check_ahead(cast(Any, lambda rank, ranks: ...)).passed is None


# -------------------------------------------------------------------------------------------------- train_split


def worker(mistake: str = ""):
    """The solution, or one with a mistake in it."""

    def train_split(schedule, stage, microbatches, loss):
        r, last, m = axis_index("pp"), axis_size("pp") - 1, len(microbatches)
        kept, kept_x, total = {}, {}, 0.0
        for action in schedule.by_rank()[r]:
            k = action.microbatch
            if action.kind == "F":
                x = microbatches[k][0] if r == 0 else receive("pp", r - 1).requires_grad_()  # type: ignore
                y = stage(x) if r < last else loss(stage(x), microbatches[k][1])
                if mistake == "dx again in W":
                    kept_x[k] = x
                if r == last:
                    y = y if mistake == "sum, not mean" else y / m
                    total += y.item() * (2 if mistake == "loss" else m if mistake == "loss times m" else 1)
                else:
                    send(y.detach(), "pp", r + 1)
                kept[k] = x, y
            elif action.kind == "B" and mistake != "no B":
                x, y = kept.pop(k)
                kept_x.pop(k, None)
                y.backward(receive("pp", r + 1) if r < last else None)
                if r > 0:
                    send(x.grad, "pp", r - 1)
            elif action.kind == "I":
                x, y = kept[k]
                if mistake == "W receives on rank 0" and r == 0 and last:
                    kept[k] = y, None  # rank 0 has no use for the gradient of its input
                    continue
                dy = receive("pp", r + 1) if r < last else torch.ones_like(y)
                if mistake == "backward in I" or (mistake == "backward in I for dx" and r > 0):
                    y.backward(dy, retain_graph=True)
                if mistake == "all in I":
                    inputs = [*([x] if r > 0 else []), *stage.parameters()]
                    dx, *grads = [*([] if r > 0 else [None]), *torch.autograd.grad(y, inputs, dy)]
                    if r > 0:
                        send(dx, "pp", r - 1)
                    kept[k] = grads
                    continue
                if mistake == "W in I on rank 0" and r == 0:
                    y.backward(dy)
                    kept[k] = torch.zeros(1, requires_grad=True).sum(), torch.ones(())
                    continue
                if mistake == "no graph" and r > 0:
                    torch.autograd.grad(y, x, dy)
                if r > 0 and mistake != "keeps dx":
                    send(torch.autograd.grad(y, x, dy, retain_graph=True)[0], "pp", r - 1)
                kept[k] = y, dy
            elif mistake == "all in I":
                for weight, grad in zip(stage.parameters(), kept.pop(k)):
                    weight.grad = grad if weight.grad is None else weight.grad + grad
            elif mistake != "no W":
                y, dy = kept[k] if mistake == "graph kept" else kept.pop(k)
                if mistake == "W receives on rank 0" and r == 0 and last:
                    dy = receive("pp", 1)
                weights = list(stage.parameters()) + ([kept_x.pop(k)] if mistake == "dx again in W" and r > 0 else [])
                if mistake == "last only":
                    for weight, grad in zip(weights, torch.autograd.grad(y, weights, dy)):
                        weight.grad = grad
                else:
                    given = -dy if mistake == "sign" else dy  # type: ignore
                    y.backward(given, inputs=weights, retain_graph=mistake == "graph kept")
        return None if mistake == "no loss" else total

    return train_split


def test_on_rank_0_w_may_receive():
    assert check_train_split(worker("W receives on rank 0")).passed


def test_train_split_solved():
    verdict = check_train_split(worker())
    assert verdict.passed and "10% more FLOPs" in verdict.text, verdict


@pytest.mark.parametrize(
    "mistake, said",
    [
        ("backward in I", "\nIt is twice what it should be"),
        ("backward in I for dx", "\nFrom rank 1 on, it is twice what it should be"),
        ("sum, not mean", "too large by the number of microbatches"),
        ("last only", "It is that of the last microbatch alone"),
        ("no W", "Nothing has been added to it"),
        ("no B", "with one_f_one_b, whose actions are F and B"),
        ("sign", "It is off by up to"),
        ("all in I", "rank 1 has 13% of\nthe weights' gradients left after its last I"),
        ("W in I on rank 0", "rank 0 has 3"),
        ("dx again in W", "18% more FLOPs with I and W than with B"),
        ("graph kept", "A microbatch that has gone forward and back should leave nothing behind"),
        ("keeps dx", "DeadlockError of Mesh(pp=2)"),
        ("no graph", "RuntimeError on rank 1 of Mesh(pp=2)"),
        ("no loss", "the last rank returned None; it must return the loss"),
        ("loss", "the loss is"),
        ("loss times m", "Is each microbatch's loss divided by their number?"),
    ],
)
def test_known_mistakes_in_train_split(mistake: str, said: str):
    verdict = check_train_split(worker(mistake))
    assert verdict.passed is False and said in verdict.text, verdict


def and_then(last, first=lambda stage: None):
    """The solution, with something done to the stage before and after."""

    def train_split(schedule, stage, microbatches, loss):
        first(stage)
        total = worker()(schedule, stage, microbatches, loss)
        last(stage)
        return total

    return train_split


def forgets(stage):
    stage.zero_grad()


def all_off(stage):
    for parameter in stage.parameters():
        parameter.requires_grad_(False)


def computes_too_much(kind: str):
    """I that also computes the weights' gradients and drops them, or W that runs the forward pass again."""

    def train_split(schedule, stage, microbatches, loss):
        r, last, m = axis_index("pp"), axis_size("pp") - 1, len(microbatches)
        kept, total, weights = {}, 0.0, list(stage.parameters())

        def forward(x, k):
            return stage(x) if r < last else loss(stage(x), microbatches[k][1]) / m

        for action in schedule.by_rank()[r]:
            k = action.microbatch
            if action.kind == "F":
                x = microbatches[k][0] if r == 0 else receive("pp", r - 1).requires_grad_()  # type: ignore
                y = forward(x, k)
                if r < last:
                    send(y.detach(), "pp", r + 1)
                total += y.item() if r == last else 0
                kept[k] = x, y, None
                continue
            x, y, dy = kept.pop(k)
            dy = receive("pp", r + 1) if r < last and action.kind != "W" else dy
            if action.kind == "B":
                y.backward(dy)
                if r > 0:
                    send(x.grad, "pp", r - 1)
            elif action.kind == "I":
                if r > 0:
                    also = weights if kind == "I" else []
                    send(torch.autograd.grad(y, [x, *also], dy, retain_graph=True)[0], "pp", r - 1)
                kept[k] = x, y, dy
            else:
                (forward(x, k) if kind == "W" else y).backward(dy, inputs=weights)
        return total

    return train_split


def all_in_w(schedule, stage, microbatches, loss):
    """I does nothing at all."""
    rows = [[a for a in row if a.kind != "I"] for row in schedule.by_rank()]
    in_b = [[replace(a, kind="B") if a.kind == "W" else a for a in row] for row in rows]
    return worker()(SimpleNamespace(by_rank=lambda: in_b), stage, microbatches, loss)


def forwards_first(schedule, stage, microbatches, loss):
    """I sends, but after all forwards."""
    rows = [sorted(row, key=lambda action: action.kind != "F") for row in schedule.by_rank()]
    return worker()(SimpleNamespace(by_rank=lambda: rows), stage, microbatches, loss)


@pytest.mark.parametrize(
    "fn, said",
    [
        (and_then(lambda stage: None, forgets), "with a second batch, the gradients of the first are lost"),
        (and_then(lambda stage: torch.manual_seed(0)), "it leaves torch's global generator in another state"),
        (and_then(all_off), "no longer require a gradient"),
        (all_in_w, "rank 1 sends its first gradient of x late"),
        (forwards_first, "it has by then computed as much as\n7 forward passes, although its first I comes after one"),
        (computes_too_much("I"), "more FLOPs with I and W than with B"),
        (computes_too_much("W"), "more FLOPs with I and W than with B"),
    ],
)
def test_right_gradients_that_leave_damage_or_cost_too_much(fn, said: str):
    verdict = check_train_split(fn)
    assert verdict.passed is False and said in verdict.text, verdict


def by_the_library(schedule, stage, microbatches, loss):
    from tplab.torch import stages_of, train_batch

    return train_batch(schedule, stages_of([stage], schedule), microbatches, loss)


def test_the_labs_train_unchanged_is_told_that_there_are_i_and_w():
    cells = (cell.source for cell in build.read_source("11_run_a_pipeline").cells if cell.cell_type == "code")
    names: dict[str, Any] = {"axis_index": axis_index, "axis_size": axis_size, "receive": receive, "send": send}
    exec(next(source for source in cells if source.startswith("def train(")), names)
    verdict = check_train_split(names["train"])
    assert verdict.passed is False and "whose actions are F, I and W: " in verdict.text, verdict


def test_the_librarys_worker_is_not_an_answer():
    assert "`train_batch` does the work" in check_train_split(by_the_library).text


def test_nan_is_no_loss():
    def train_split(*given: Any) -> Any:
        loss = worker()(*given)
        return None if loss is None else loss * torch.nan

    verdict = check_train_split(train_split)
    assert verdict.passed is False and "the loss is nan, not" in verdict.text, verdict


def test_train_split_not_started():
    def train_split(schedule, stage, microbatches, loss): ...

    assert check_train_split(train_split).passed is None
