"""Lab 25's exercises: right answers pass, a stub is not started, and every known mistake gets its hint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tplab.exercises.same_model import check_step, check_token_mean
from tplab.torch import all_gather, all_reduce, average_gradients, axis_size, device_mesh, tokens_per_rank

# --- a mean over tokens ----------------------------------------------------------------------------------------------


def by_mean_count(losses, mask):
    return (losses * mask).sum() / all_reduce(mask.sum(), "dp", "mean")


def by_whole_count(losses, mask):
    return (losses * mask).sum() * axis_size("dp") / all_reduce(mask.sum(), "dp")


def by_boolean(losses, mask):
    total = all_reduce(mask.bool().sum(), "dp")
    return losses[mask.bool()].sum() / total * axis_size("dp")


def by_tplab(losses, mask):
    targets = torch.where(mask > 0, 1, -100)
    return (losses * mask).sum() / tokens_per_rank(targets, "dp")


def by_shares(losses, mask):
    mine = mask.sum()
    share = mine / all_reduce(mine, "dp", "mean")
    return share * (losses * mask).sum() / mine.clamp(min=1)


def in_float32(losses, mask):
    return (losses.float() * mask.float()).sum() / all_reduce(mask.sum(), "dp", "mean").float()


def by_torch(losses, mask):
    total = mask.sum()
    dist.all_reduce(total, group=device_mesh().get_group("dp"))
    return torch.einsum("t,t->", losses, mask) * axis_size("dp") / total


def with_the_whole_value(losses, mask):
    """The gradient is that of this rank's tokens; the value is the mean over all tokens."""
    mine = by_whole_count(losses, mask)
    return mine + (all_reduce(mine.detach(), "dp", "mean") - mine.detach())


def by_gathered_counts(losses, mask):
    return (losses * mask).sum() / all_gather(mask.sum().reshape(1), "dp", dim=0).mean()


MEANS = [by_mean_count, by_whole_count, by_boolean, by_tplab, by_shares, in_float32]


@pytest.mark.parametrize("right", [*MEANS, by_torch, with_the_whole_value, by_gathered_counts])
def test_right_means_pass(right):
    verdict = check_token_mean(right)
    assert verdict.passed, verdict


def own_mean(losses, mask):
    return (losses * mask).sum() / mask.sum()


def own_mean_without_nan(losses, mask):
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def mean_of_all(losses, mask):
    return losses.mean()


def no_mask(losses, mask):
    return losses.sum() / all_reduce(mask.sum(), "dp", "mean")


def divides_twice(losses, mask):
    return (losses * mask).sum() / all_reduce(mask.sum(), "dp")


def two_ranks(losses, mask):
    return 2 * (losses * mask).sum() / all_reduce(mask.sum(), "dp")


def only_a_sum(losses, mask):
    return (losses * mask).sum()


def averages_means(losses, mask):
    return all_reduce((losses * mask).sum() / mask.sum().clamp(min=1), "dp", "mean")


def over_every_axis(losses, mask):
    return axis_size("dp") * (losses * mask).sum() / all_reduce(mask.sum(), ("dp", "tp"))


def detached(losses, mask):
    return (losses.detach() * mask).sum() / all_reduce(mask.sum(), "dp", "mean")


def no_number(losses, mask):
    return losses * mask / all_reduce(mask.sum(), "dp", "mean")


def in_place(losses, mask):
    total = all_reduce(mask.sum(), "dp", "mean")
    mask *= axis_size("dp")
    return (losses * mask).sum() / axis_size("dp") / total


def reseeded(losses, mask):
    torch.manual_seed(0)
    return by_mean_count(losses, mask)


def by_length(losses, mask):
    return (losses * mask).mean()


def gathers_losses(losses, mask):
    losses, mask = all_gather(losses, "dp", dim=0), all_gather(mask, "dp", dim=0)
    return (losses * mask).sum() / mask.sum()


def skips_empty_ranks(losses, mask):
    total = all_reduce(mask.sum(), "dp", "mean")
    return (losses * mask).sum() / total if mask.any() else torch.zeros((), requires_grad=True)


def only_rank_0(losses, mask):
    return by_mean_count(losses, mask) if dist.get_rank() == 0 else 0 * losses.sum()


def a_float(losses, mask):
    return by_mean_count(losses, mask).item()


@pytest.mark.parametrize(
    "wrong, said",
    [
        (by_length, "0.4 times as large as they should be.\nWhat do you divide the sum by"),
        (gathers_losses, "the gradients are right, but rank 0 sends 240 bytes, as if to gather all losses"),
        (skips_empty_ranks, "a rank without tokens needs a gradient of zeros too"),
        (only_rank_0, "every rank of a group must call the same collectives"),
        (a_float, "it must return one number, as a tensor; it returned float"),
        (own_mean, "Mesh(dp=2, tp=1), where the ranks of 'dp' have 6 and 2 tokens: the gradients are no multiple"),
        (own_mean_without_nan, "Each token must count alike, whichever rank it is on"),
        (mean_of_all, "no multiple"),
        (no_mask, "no multiple"),
        (divides_twice, "0.5 times as large as they should be.\nAveraging divides by the number of ranks"),
        (two_ranks, "3, 0, 8 and 2 tokens: the gradients are 0.5 times as large"),
        (only_a_sum, "4 times as large as they should be.\nWhat do you divide the sum by"),
        (averages_means, "no multiple"),
        (over_every_axis, "7 and 4 tokens: the gradients are 0.5 times as large as they should be.\nThe ranks of 'tp'"),
        (detached, "Do not detach it"),
        (no_number, "it must return one number, as a tensor; it returned a tensor [10]"),
        (in_place, "it changes its argument mask in place"),
        (reseeded, "it leaves torch's global generator in another state"),
    ],
)
def test_wrong_means_get_their_hint(wrong, said: str):
    verdict = check_token_mean(wrong)
    assert verdict.passed is False and said in verdict.text, verdict


def test_a_mean_that_is_0_over_0_is_named():
    def local(losses, mask):
        share = mask.sum() / all_reduce(mask.sum(), "dp", "mean")
        return share * (losses * mask).sum() / mask.sum()

    verdict = check_token_mean(local)
    assert verdict.passed is False and "A rank without tokens divides 0 by 0" in verdict.text, verdict


# --- a step ----------------------------------------------------------------------------------------------------------


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


STEPS = [solution, by_averages, by_world, in_halves, mean_over_both, by_torch_distributed, in_one_piece]


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
        (gathers_outputs, "rank 0 sends 2,352 bytes along 'dp', and an all_reduce of the gradients sends 624"),
        (over_the_world, "the gradient of up on rank 0 is no multiple"),
        (loss_on_rank_0, "the loss that rank 1 returns is 0 times"),
        (retains_its_graph, "the graph of this step is still in memory"),
        (freezes, "it leaves scale without requires_grad"),
        (returns_words, "it must return the loss, one number; it returned str"),
        (gathers_first, "the model gets more rows than the rank's own"),
        (backward_of_the_sum, "the gradient of scale on rank 0 is 2 times"),
        (no_backward, "scale has no gradient. Call loss.backward()"),
        (returns_nothing, "it must return the loss; is a `return` missing?"),
        (changes_x, "it changes its argument x in place"),
        (steps_too, "it changes the weights"),
        (reseeds, "it leaves torch's global generator in another state"),
        (in_double, "it leaves torch's default dtype changed"),
    ],
)
def test_wrong_steps_get_their_hint(wrong, said: str):
    verdict = check_step(wrong)
    assert verdict.passed is False and said in verdict.text, verdict


def test_stubs_are_not_started():
    def token_mean(losses, mask): ...

    def step(net, x, y): ...

    assert check_token_mean(token_mean).passed is None and check_step(step).passed is None
