"""Lab 24's exercise: the solution passes, a stub is not started, and every known mistake gets its hint."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tplab.exercises.your_own_program import check_accumulate


def solution(net, loss_of, batches):
    with net.no_sync():
        for batch in batches[:-1]:
            (loss_of(net, batch) / len(batches)).backward()
    (loss_of(net, batches[-1]) / len(batches)).backward()


def sends_each_time(net, loss_of, batches):
    for batch in batches:
        (loss_of(net, batch) / len(batches)).backward()


def forgets_to_divide(net, loss_of, batches):
    with net.no_sync():
        for batch in batches[:-1]:
            loss_of(net, batch).backward()
    loss_of(net, batches[-1]).backward()


def never_sends(net, loss_of, batches):
    with net.no_sync():
        for batch in batches:
            (loss_of(net, batch) / len(batches)).backward()


def only_the_last(net, loss_of, batches):
    loss_of(net, batches[-1]).backward()


def no_backward(net, loss_of, batches):
    for batch in batches:
        loss_of(net, batch)


def fails(net, loss_of, batches):
    return batches[7]


def test_the_solution_is_right():
    verdict = check_accumulate(solution)
    assert verdict.passed, verdict


def by_hand(net, loss_of, batches):
    """Without DDP's hooks: the ranks average in the end."""
    for batch in batches:
        (loss_of(net.module, batch) / len(batches)).backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def in_reverse(net, loss_of, batches):
    for number in reversed(range(len(batches))):
        net.require_backward_grad_sync = number == 0
        loss = loss_of(net, batches[number])
        loss.backward(loss.new_tensor(1 / len(batches)))


def with_autograd(net, loss_of, batches):
    weights = list(net.parameters())
    total = [torch.zeros_like(weight) for weight in weights]
    for batch in batches:
        for sum_of, grad in zip(total, torch.autograd.grad(loss_of(net.module, batch), weights)):
            sum_of += grad / len(batches)
    for weight, grad in zip(weights, total):
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
        weight.grad = grad


def with_a_log(net, loss_of, batches):
    """The sum of the losses keeps no activations once their backward passes have run."""
    total = torch.zeros(())
    for number, batch in enumerate(batches):
        with net.no_sync() if number < len(batches) - 1 else nullcontext():
            loss = loss_of(net, batch) / len(batches)
            loss.backward()
        total = total + loss
    dist.all_reduce(total.detach())
    return total


def scaled_later(net, loss_of, batches):
    with net.no_sync():
        for batch in batches:
            loss_of(net, batch).backward()
    flat = torch.cat([weight.grad.flatten() for weight in net.parameters()]) / len(batches)
    works = [dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)]
    assert works[0] is not None
    works[0].wait()
    for weight, grad in zip(net.parameters(), flat.split([weight.numel() for weight in net.parameters()])):
        weight.grad.copy_(grad.view_as(weight))


@pytest.mark.parametrize("solution", [by_hand, in_reverse, with_autograd, with_a_log, scaled_later])
def test_other_peoples_solutions_are_right_too(solution):
    verdict = check_accumulate(solution)
    assert verdict.passed, verdict


def all_at_once(net, loss_of, batches):
    loss_of(net, torch.cat(list(batches))).backward()


def of_the_sum(net, loss_of, batches):
    torch.stack([loss_of(net, batch) for batch in batches]).mean().backward()


KEPT = []


def retains_graphs(net, loss_of, batches):
    for batch in batches:
        loss = loss_of(net, batch)
        loss.backward(retain_graph=True)
        KEPT.append(loss)


def retains_one_graph(net, loss_of, batches):
    with net.no_sync():
        for batch in batches[:-1]:
            (loss_of(net, batch) / len(batches)).backward()
    loss = loss_of(net, batches[-1]) / len(batches)
    loss.backward(retain_graph=True)
    KEPT.append(loss)


@pytest.mark.parametrize(
    "fn, said",
    [
        (all_at_once, "it asks for the loss of 12 rows at once, and a part has 4"),
        (of_the_sum, "the activations of 2 parts are in memory at the same time"),
        (retains_graphs, "the activations of 2 parts are in memory at the same time"),
        (retains_one_graph, "a graph is still in memory afterwards, with its activations"),
    ],
)
def test_a_batch_that_does_not_fit_in_memory(fn, said: str):
    verdict = check_accumulate(fn)
    assert verdict.passed is False and said in verdict.text, verdict


def test_a_stub_is_not_started():
    def accumulate(net, loss_of, batches): ...

    assert check_accumulate(accumulate).passed is None


def divides_by(divisor):
    def accumulate(net, loss_of, batches):
        with net.no_sync():
            for batch in batches[:-1]:
                (loss_of(net, batch) / divisor(batches)).backward()
        (loss_of(net, batches[-1]) / divisor(batches)).backward()

    return accumulate


def never_averages(net, loss_of, batches):
    for batch in batches:
        (loss_of(net.module, batch) / len(batches)).backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)


def gathers_first(net, loss_of, batches):
    mine = torch.stack(list(batches))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    for part in torch.cat(parts):
        (loss_of(net.module, part) / len(torch.cat(parts))).backward()


def gathers_gradients(net, loss_of, batches):
    for batch in batches:
        (loss_of(net.module, batch) / len(batches)).backward()
    for parameter in net.parameters():
        grads = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, parameter.grad)
        parameter.grad = torch.stack(grads).mean(0)


def does_not_wait(net, loss_of, batches):
    for batch in batches:
        (loss_of(net.module, batch) / len(batches)).backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, async_op=True)


def drops_gradients(net, loss_of, batches):
    with net.no_sync():
        for batch in batches[:-1]:
            (loss_of(net, batch) / len(batches)).backward()
    net.zero_grad()
    (loss_of(net, batches[-1]) / len(batches)).backward()


def drops_some(net, loss_of, batches):
    with net.no_sync():
        for batch in batches[:-1]:
            net.zero_grad()
            (loss_of(net, batch) / len(batches)).backward()
    (loss_of(net, batches[-1]) / len(batches)).backward()


def drops_one_of_four(net, loss_of, batches):
    with net.no_sync():
        for batch in batches[len(batches) == 4 : -1]:
            (loss_of(net, batch) / len(batches)).backward()
    (loss_of(net, batches[-1]) / len(batches)).backward()


def sends_the_last_again(net, loss_of, batches):
    with net.no_sync():
        for batch in batches:
            (loss_of(net, batch) / len(batches)).backward()
    (loss_of(net, batches[-1]) / len(batches)).backward()


def clips(net, loss_of, batches):
    solution(net, loss_of, batches)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)


def leaves(damage):
    def accumulate(net, loss_of, batches):
        solution(net, loss_of, batches)
        damage(net, batches)

    return accumulate


def steps(net, batches):
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def hooks_parameters(net, batches):
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: grad)


def hooks_communication(net, batches):
    net.register_comm_hook(None, default_hooks.allreduce_hook)


def remembers(net, batches):
    net.extra = batches


def sends_no_more(net, batches):
    net.require_backward_grad_sync = False


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "wrong, said",
    [
        (sends_each_time, "on 2 ranks with 3 parts each, where 336 are enough.\nEvery backward pass sends, unless"),
        (forgets_to_divide, "3 times as large"),
        (divides_by(lambda batches: 3), "1.333 times as large as they should be on 3 ranks with 4 parts each"),
        (divides_by(lambda batches: dist.get_world_size() * len(batches)), "what divides by their number a second"),
        (divides_by(lambda batches: {1: 2, 2: 3, 3: 4}[dist.get_world_size()]), "on 2 ranks with 2 parts each"),
        (clips, "does anything scale the gradients later?"),
        (drops_some, "Each part should count once. Instead, they count 0, 1 and 1 times"),
        (drops_one_of_four, "Instead, they count 0, 1, 1 and 1 times"),
        (leaves(hooks_parameters), "it leaves a hook on a parameter"),
        (leaves(hooks_communication), "it leaves a hook on `net`"),
        (leaves(lambda net, batches: net.register_forward_hook(print)), "it leaves a hook on `net`"),
        (leaves(remembers), "it leaves `net.extra`"),
        (leaves(lambda net, batches: torch.set_default_dtype(torch.float64)), "torch's default dtype changed"),
        (
            lambda *given: [solution(*given), [p.grad.mul_(torch.nan) for p in given[0].parameters()]],
            "are not finite numbers on 2 ranks",
        ),
        (never_averages, "2 times as large as they should be on 2 ranks with 3 parts each.\nThis is their sum"),
        (gathers_first, "computes the loss of 24 rows, and its own parts have 12"),
        (gathers_gradients, "sends 672 bytes on 3 ranks with 4 parts each, where 448 are enough"),
        (does_not_wait, "the ranks end with different gradients"),
        (drops_gradients, "Instead, they count 0, 0 and 1 times"),
        (leaves(steps), "it changes the weights"),
        (leaves(sends_no_more), "DDP would not send the gradients of the next step"),
        (leaves(lambda net, batches: batches[0].zero_()), "it changes batches[0] in place"),
        (leaves(lambda net, batches: batches.pop()), "it changes the list `batches`"),
        (leaves(lambda net, batches: torch.manual_seed(0)), "it leaves torch's global generator in another state"),
        (leaves(lambda net, batches: net.eval()), "it leaves `net` in eval mode"),
        (leaves(lambda net, batches: net.requires_grad_(False)), "it leaves weight without requires_grad"),
        (never_sends, "the ranks end with different gradients on 2 ranks"),
        (only_the_last, "Instead, they count 0, 0 and 3 times"),
        (no_backward, "some parameters have no gradient"),
        (sends_the_last_again, "Instead, they count 1, 1 and 2 times"),
        (fails, "IndexError"),
    ],
)
def test_known_mistakes(wrong, said):
    verdict = check_accumulate(wrong)
    assert verdict.passed is False and said in verdict.text, verdict
