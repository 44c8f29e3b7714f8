"""Lab 16's exercises: right ones pass, and the wrong ones that people write get their hints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tplab.exercises.data_parallel import check_loss, check_replicas
from tplab.torch import (
    all_gather,
    all_reduce,
    average_gradients,
    axis_size,
    broadcast,
    data_parallel,
    start,
    tokens_per_rank,
)


def summed(logits, targets):
    return F.cross_entropy(logits, targets, reduction="sum")


def count(targets):
    return (targets != -100).sum()


RIGHT = [
    lambda logits, targets: summed(logits, targets) / tokens_per_rank(targets, "dp"),
    lambda logits, targets: summed(logits, targets) * axis_size("dp") / all_reduce(count(targets), "dp"),
    lambda logits, targets: summed(logits, targets) / all_reduce(count(targets).double(), "dp", "mean"),
    lambda logits, targets: summed(logits, targets) / all_reduce(count(targets).float(), "dp", "mean"),
    lambda logits, targets: F.cross_entropy(logits, targets, reduction="none").sum() / tokens_per_rank(targets, "dp"),
]


def seeded(logits, targets):
    torch.manual_seed(0)
    return RIGHT[0](logits, targets)


WRONG = {
    "Each rank takes the mean of its own tokens": lambda logits, targets: F.cross_entropy(logits, targets),
    "a loss of nan: the mean of no numbers is 0/0": lambda logits, targets: (
        F.cross_entropy(logits, targets) * count(targets) / tokens_per_rank(targets, "dp")
    ),
    "weighs 1/2 of what it should": lambda logits, targets: summed(logits, targets) / all_reduce(count(targets), "dp"),
    "This is the sum of the losses": summed,
    "ignored are counted in the denominator": lambda logits, targets: summed(logits, targets) / len(targets),
    "do not all have the same weight": lambda logits, targets: summed(logits[:1], targets[:1]),
    "the logits of a rank are sent to others": lambda logits, targets: F.cross_entropy(
        all_gather(logits, "dp"), all_gather(targets, "dp")
    ),
    "leaves torch's global generator in another state": seeded,
    "its loss has no graph: it is detached, or made": lambda logits, targets: RIGHT[0](logits, targets).detach(),
    "No gradient reaches the logits": lambda logits, targets: torch.tensor(
        RIGHT[0](logits, targets).item(), requires_grad=True
    ),
    "A rank without targets needs gradients of 0 too": lambda logits, targets: (
        RIGHT[0](logits, targets) if count(targets) else RIGHT[0](logits, targets).new_zeros(())
    ),
    "Every token weighs 0.75 times what it should": lambda logits, targets: (
        summed(logits, targets) / all_reduce(count(targets), "dp", "max")
    ),
    "The gradients are right, but the mean of the ranks' losses is": lambda logits, targets: (
        all_reduce(summed(logits, targets), "dp") / all_reduce(count(targets).double(), "dp", "mean")
    ),
    "Targets of -100 count in it": lambda logits, targets: (
        summed(logits, targets.clamp(min=0)) / all_reduce(count(targets).double(), "dp", "mean")
    ),
    "a loss is a tensor of one number": lambda logits, targets: logits,
    "my_loss raised": lambda logits, targets: 1 / 0,
}


@pytest.mark.parametrize("which", range(len(RIGHT)))
def test_right_losses(which):
    verdict = check_loss(RIGHT[which])
    assert verdict.passed, verdict
    assert verdict._repr_mimebundle_()[0]["image/png"]


@pytest.mark.parametrize("hint", WRONG)
def test_wrong_losses(hint):
    verdict = check_loss(WRONG[hint])
    assert verdict.passed is False
    assert hint in verdict.text


def untouched(*_) -> Any: ...


def test_untouched_stubs_say_so():
    for check in (check_loss, check_replicas):
        assert check(untouched).passed is None
        assert "not started" in check(untouched).text


def by_hooks(model, op="mean", writes=True, clears=True, at_once=False):
    flights = {}

    def leave(p):
        flights[p] = start(all_reduce, p.grad, "dp", op)
        if at_once:
            p.grad = flights.pop(p).wait()

    def finish():
        for p, flight in flights.items():
            mean = flight.wait()
            if writes:
                p.grad = mean
        if clears:
            flights.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(leave)
    return finish


def of_tplab(model):
    return data_parallel(model, "dp", bucket_bytes=1e7, broadcast=False).wait


def keeps_the_first(model):
    flights = {}

    def leave(p):
        flights.setdefault(p, start(all_reduce, p.grad, "dp", "mean"))

    def finish():
        for p, flight in flights.items():
            p.grad = flight.wait().clone()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(leave)
    return finish


def clears_at_once(model):
    def clear(p):
        p.grad.zero_()

    finish = by_hooks(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clear)
    return finish


def scales_first(model):
    def scale(p):
        p.grad.div_(axis_size("dp"))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(scale)
    return by_hooks(model, op="sum")


def late(model):
    return lambda: average_gradients(model, "dp", bucket_bytes=1e9)


def with_the_same_start(model):
    """Rank 0's parameters are sent first. It counts as no part of a step."""
    for p in model.parameters():
        p.data.copy_(broadcast(p.data, "dp"))
    return by_hooks(model)


def by_grad_hooks(model):
    """A hook of the wrong kind: it sees this backward pass's gradient alone."""
    flights = {}

    def leave(p, grad):
        flights[p] = start(all_reduce, grad, "dp", "mean")

    def finish():
        for p, flight in flights.items():
            p.grad = flight.wait()
        flights.clear()

    for p in model.parameters():
        p.register_hook(lambda grad, p=p: leave(p, grad))
    return finish


def of_an_ever_longer_list(model):
    flights = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: flights.append((p, start(all_reduce, p.grad, "dp", "mean"))))

    def finish():
        for p, flight in flights[-len(list(model.parameters())) :]:
            p.grad = flight.wait().clone()

    return finish


def registered_again(model):
    """Its hooks are registered again in each step, so step n sends every gradient n times."""
    flights = {}

    def leave(p):
        flights[p] = start(all_reduce, p.grad, "dp", "mean")

    def register():
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(leave)

    def finish():
        for p, flight in flights.items():
            p.grad = flight.wait()
        flights.clear()
        register()

    register()
    return finish


def sends_everything(model):
    """Every rank gets the gradients of all ranks, to take their mean itself."""
    flights = {}

    def leave(p):
        flights[p] = start(all_gather, p.grad[None], "dp")

    def finish():
        for p in [*flights]:
            p.grad = flights.pop(p).wait().mean(0)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(leave)
    return finish


def in_pairs(model):
    """The gradients of two layers leave together: a quarter of them has nothing to hide behind."""
    waiting, flights = [], []

    def leave(p):
        waiting.append(p)
        if len(waiting) == 2:
            pair = waiting[:]
            flights.append((pair, start(all_reduce, torch.cat([p.grad.flatten() for p in pair]), "dp", "mean")))
            waiting.clear()

    def finish():
        for pair, flight in flights:
            for p, mean in zip(pair, flight.wait().split([p.numel() for p in pair])):
                p.grad = mean.view_as(p)
        flights.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(leave)
    return finish


def without_the_biases(model):
    """Hooks on the weights of layers only."""
    return by_hooks(torch.nn.ParameterList(layer.weight for layer in model))


def in_reverse(model):
    """Takes gradients to be complete in the reverse order of the parameters."""
    flights = []

    def finish():
        for p in reversed(list(model.parameters())):
            p.grad = flights.pop(0).wait()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: flights.append(start(all_reduce, p.grad, "dp", "mean")))
    return finish


def adds_the_mean(model):
    flights = {}

    def leave(p):
        flights[p] = start(all_reduce, p.grad, "dp", "mean")

    def finish():
        for p in [*flights]:
            p.grad += flights.pop(p).wait()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(leave)
    return finish


def seeds(model):
    torch.manual_seed(0)
    return by_hooks(model)


def steps_too(model):
    finish = by_hooks(model)

    def finish_and_step():
        finish()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad)

    return finish_and_step


def writes(change):
    """`change(p, buffer)` is called while the gradient of p is under way."""

    def replicas(model):
        flights, buffers = {}, {p: torch.empty_like(p) for p in model.parameters()}

        def leave(p):
            flights[p] = start(all_reduce, p.grad, "dp", "mean")
            with torch.no_grad():
                change(p, buffers[p])

        def finish():
            for p in [*flights]:
                p.grad = flights.pop(p).wait()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(leave)
        return finish

    return replicas


reads_it = writes(lambda p, buffer: torch.mul(p.grad, 2, out=buffer))
scales_it_with_others = writes(lambda p, buffer: torch._foreach_mul_([buffer, p.grad], 2))


@pytest.mark.parametrize("fn", [by_hooks, with_the_same_start, scales_first, reads_it])
def test_right_replicas(fn):
    verdict = check_replicas(fn)
    assert verdict.passed, verdict
    assert "Most of the communication is hidden" in verdict.text


@pytest.mark.parametrize(
    "fn, hint",
    [
        (lambda model: by_hooks(model, op="sum"), "They must be averaged"),
        (lambda model: by_hooks(model, writes=False), "every rank keeps its own gradients"),
        (keeps_the_first, "step 1 was right"),
        (of_tplab, "`data_parallel` does the work"),
        (by_grad_hooks, "what the first\nhas left in p.grad is lost"),
        (of_an_ever_longer_list, "is there a list that only grows?"),
        (registered_again, "are hooks registered again in each step?"),
        (late, "0% of the communication is hidden.\nBelow is one step"),
        (lambda model: by_hooks(model, at_once=True), "the rank waits until each one has arrived"),
        (sends_everything, "One all_reduce per gradient is enough"),
        (in_pairs, "75% of the communication is hidden.\nBelow is one step on a modelled H100 node. Which gradients"),
        (without_the_biases, "the gradients of 0.bias, 1.bias, 2.bias and 3.bias are not the means over the ranks"),
        (in_reverse, "p.grad has the mean of another parameter's gradients"),
        (adds_the_mean, "the mean is added to the rank's own gradient"),
        (seeds, "leaves torch's global generator in another state"),
        (clears_at_once, "a tensor is written while its all_reduce is under way"),
        (scales_it_with_others, "a tensor is written while its all_reduce is under way"),
        (steps_too, "it changes 0.weight in place, but a step is the optimizer's task"),
        (lambda model: model.zero_grad, "it leaves no gradient: p.grad is None"),
        (lambda model: print(end=""), "return the function that is called after the backward pass"),
        (lambda model: lambda: [p.grad.zero_() for p in model.parameters()], "the gradients are not the means over"),
    ],
)
def test_wrong_replicas(fn, hint):
    verdict = check_replicas(fn)
    assert verdict.passed is False
    assert hint in verdict.text, verdict.text


def test_nothing_of_a_check_is_left_behind():
    before = torch.get_rng_state()
    check_loss(RIGHT[0])
    assert torch.equal(torch.get_rng_state(), before)
