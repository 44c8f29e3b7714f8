"""Lab 25's exercise: right answers pass, a stub is not started, and every known mistake gets its hint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tplab.exercises.same_model import check_step
from tplab.torch import all_gather, all_reduce, average_gradients, axis_size, device_mesh


def two_bugs(net, x, y):
    loss = (net(x) - y).square().mean() / (axis_size("dp") * axis_size("tp"))
    loss.backward()
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp")
    return all_reduce(loss.detach(), ("dp", "tp"))


def solution(net, x, y):
    loss = (net(x) - y).square().mean() / axis_size("dp")
    loss.backward()
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp")
    return all_reduce(loss.detach(), "dp")


def by_averages(net, x, y):
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    average_gradients(net, "dp")
    return all_reduce(loss.detach(), "dp", "mean").item()


def by_world(net, x, y):
    world = axis_size("dp") * axis_size("tp")
    loss = (net(x) - y).square().mean() / world
    loss.backward()
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp") * axis_size("tp")
    return all_reduce(loss.detach(), ("dp", "tp"))


def in_halves(net, x, y):
    total = torch.zeros(())
    for rows, targets in zip(x.chunk(2), y.chunk(2)):
        loss = (net(rows) - targets).square().sum() / (2 * axis_size("dp") * y.chunk(2)[0].numel())
        loss.backward()
        total = total + loss.detach()
    for p in net.parameters():
        p.grad.copy_(all_reduce(p.grad, "dp"))
    return all_reduce(total, "dp")


def mean_over_both(net, x, y):
    loss = (net(x) - y).square().mean()
    loss.backward()
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp", "mean")
    return all_reduce(loss, ("dp", "tp"), "mean")


def by_torch_distributed(net, x, y):
    group = device_mesh().get_group("dp")
    loss = (net(x) - y).square().mean()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=group)
    loss = loss.detach()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=group)
    return loss


def in_one_piece(net, x, y):
    weights = list(net.parameters())
    loss = (net(x) - y).square().mean()
    flat = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, weights)])
    for p, grad in zip(weights, all_reduce(flat, "dp", "mean").split([p.numel() for p in weights])):
        p.grad = grad.view_as(p)
    return all_reduce(loss, "dp", "mean")


def by_gathering(net, x, y):
    """The mean of all gradients, on each rank; on four ranks it sends twice as much as a ring that adds them up."""
    loss = (net(x) - y).square().mean()
    loss.backward()
    for p in net.parameters():
        p.grad = all_gather(p.grad[None], "dp", dim=0).mean(0)
    return all_gather(loss.detach()[None], "dp", dim=0).mean()


STEPS = [by_gathering, solution, by_averages, by_world, in_halves, mean_over_both, by_torch_distributed, in_one_piece]


@pytest.mark.parametrize("right", STEPS)
def test_right_steps_pass(right):
    verdict = check_step(right)
    assert verdict.passed, verdict


def with_step(divisor, reduce, returned):
    def step(net, x, y):
        loss = (net(x) - y).square().mean() / divisor()
        loss.backward()
        for p in net.parameters():
            p.grad = reduce(p.grad)
        return returned(loss.detach())

    return step


def one():
    return 1


def dp():
    return axis_size("dp")


def world():
    return axis_size("dp") * axis_size("tp")


def summed(value):
    return all_reduce(value, "dp")


def averaged(value):
    return all_reduce(value, "dp", "mean")


def summed_over_both(value):
    return all_reduce(value, ("dp", "tp"))


def gathers_first(net, x, y):
    x, y = all_gather(x, "dp", dim=0), all_gather(y, "dp", dim=0)
    loss = (net(x) - y).square().mean()
    loss.backward()
    return loss.detach()


def gathers_outputs(net, x, y):
    loss = (all_gather(net(x), "dp", dim=0) - all_gather(y, "dp", dim=0)).square().mean()
    loss.backward()
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp", "mean")
    return loss.detach()


def over_the_world(net, x, y):
    loss = (net(x) - y).square().mean()
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    return averaged(loss.detach())


def loss_on_rank_0(net, x, y):
    loss = solution(net, x, y)
    return loss if dist.get_rank() == 0 else torch.zeros(())


def retains_its_graph(net, x, y):
    loss = (net(x) - y).square().mean()
    loss.backward(retain_graph=True)
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp", "mean")
    return all_reduce(loss, "dp", "mean")


def clears_its_gradients(net, x, y):
    loss = solution(net, x, y)
    net.zero_grad()
    return loss


def adds_one_again(net, x, y):
    loss = solution(net, x, y)
    net.scale.grad = all_reduce(net.scale.grad, "tp")
    return loss


def freezes(net, x, y):
    loss = solution(net, x, y)
    net.requires_grad_(False)
    return loss


def returns_words(net, x, y):
    return f"loss {solution(net, x, y)}"


def no_backward(net, x, y):
    return averaged((net(x) - y).square().mean().detach())


def backward_of_the_sum(net, x, y):
    loss = all_reduce((net(x) - y).square().mean(), "dp")
    loss.backward()
    for p in net.parameters():
        p.grad = all_reduce(p.grad, "dp")
    return loss.detach() / axis_size("dp")


def returns_nothing(net, x, y):
    solution(net, x, y)


def changes_x(net, x, y):
    loss = solution(net, x, y)
    x.mul_(2)
    return loss


def steps_too(net, x, y):
    loss = solution(net, x, y)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return loss


def reseeds(net, x, y):
    torch.manual_seed(3)
    return solution(net, x, y)


def in_double(net, x, y):
    torch.set_default_dtype(torch.float64)
    return solution(net, x, y)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (two_bugs, "Mesh(dp=2, tp=2): the gradient of scale on rank 0 is 0.5 times that of the whole batch"),
        (with_step(world, summed, summed), "the gradient of scale on rank 0 is 0.5 times"),
        (with_step(dp, summed, summed_over_both), "and the loss that rank 0 returns is 2 times that of the whole"),
        (with_step(one, summed, averaged), "the gradient of scale on rank 0 is 2 times"),
        (with_step(dp, averaged, summed), "the gradient of scale on rank 0 is 0.5 times"),
        (with_step(lambda: 2, summed, summed), "Mesh(dp=4, tp=1): the gradient of scale on rank 0 is 2 times"),
        (with_step(dp, lambda grad: 2 * summed(grad), summed), "on rank 0 is 2 times"),
        (with_step(world, summed_over_both, summed_over_both), "the gradient of up on rank 0 is no multiple"),
        (with_step(one, lambda grad: grad, averaged), "is no multiple of that of the whole batch"),
        (with_step(one, averaged, lambda loss: loss), "all gradients are right, and the loss that rank 0 returns is"),
        (
            gathers_outputs,
            "rank 0 sends 2,352 bytes along 'dp', and an all_reduce of the gradients and the loss sends 632",
        ),
        (over_the_world, "the gradient of up on rank 0 is no multiple"),
        (loss_on_rank_0, "the loss that rank 1 returns is 0 times"),
        (retains_its_graph, "the graph of this step is still in memory"),
        (freezes, "it leaves scale without requires_grad"),
        (returns_words, "it must return the loss, one number; it returned str"),
        (gathers_first, "the model gets more rows than the rank's own"),
        (backward_of_the_sum, "the gradient of scale on rank 0 is 2 times"),
        (no_backward, "scale has no gradient after the step. Call loss.backward()"),
        (clears_its_gradients, "leave what it gives in `.grad`"),
        (adds_one_again, "on rank 0 is 2 times that of the whole batch.\nThose of the other parameters are right"),
        (returns_nothing, "it must return the loss; is a `return` missing?"),
        (changes_x, "it changes x in place"),
        (steps_too, "it changes the weights"),
        (reseeds, "it leaves torch's global generator in another state"),
        (in_double, "it leaves torch's default dtype changed"),
    ],
)
def test_wrong_steps_get_their_hint(wrong, said: str):
    verdict = check_step(wrong)
    assert verdict.passed is False and said in verdict.text, verdict


def test_a_stub_is_not_started():
    def step(net, x, y): ...

    assert check_step(step).passed is None
