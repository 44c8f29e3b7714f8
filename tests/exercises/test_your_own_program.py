"""Lab 22's exercise: the solution passes, a stub is not started, and every known mistake gets its hint."""

from __future__ import annotations

import pytest

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
    import torch.distributed as dist

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


@pytest.mark.parametrize("solution", [by_hand, in_reverse])
def test_other_peoples_solutions_are_right_too(solution):
    verdict = check_accumulate(solution)
    assert verdict.passed, verdict


def all_at_once(net, loss_of, batches):
    import torch

    loss_of(net, torch.cat(list(batches))).backward()


def of_the_sum(net, loss_of, batches):
    import torch

    torch.stack([loss_of(net, batch) for batch in batches]).mean().backward()


@pytest.mark.parametrize(
    "fn, said",
    [
        (all_at_once, "it asks for the loss of 12 rows at once, and a part has 4"),
        (of_the_sum, "the activations of 3 parts are in memory at the same time"),
    ],
)
def test_a_batch_that_does_not_fit_in_memory(fn, said: str):
    verdict = check_accumulate(fn)
    assert verdict.passed is False and said in verdict.text, verdict


def test_a_stub_is_not_started():
    def accumulate(net, loss_of, batches): ...

    assert check_accumulate(accumulate).passed is None


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "wrong, said",
    [
        (sends_each_time, "the gradients are right, but rank 0 sends 1,008 bytes of them on 2 ranks, where 336 are"),
        (forgets_to_divide, "3 times as large"),
        (never_sends, "the ranks end with different gradients on 2 ranks"),
        (only_the_last, "not those of the mean loss over all batches"),
        (no_backward, "some parameters have no gradient"),
        (fails, "IndexError"),
    ],
)
def test_known_mistakes(wrong, said):
    verdict = check_accumulate(wrong)
    assert verdict.passed is False and said in verdict.text, verdict
