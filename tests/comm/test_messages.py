"""send and receive: in order, of any shape and type, between two ranks alone; on simulated ranks and on processes."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from tplab import Mesh
from tplab.errors import CollectiveMismatchError, DeadlockError, MeshError, RankError
from tplab.torch import all_reduce, axis_index, receive, run, send, start
from tplab.torch.ranks.rank import Apart

ON = pytest.mark.parametrize("on", ["simulated", "processes"])


@ON
def test_any_shape_type_and_number_in_order(on):
    big = torch.arange(10_000, dtype=torch.float64)

    def program():
        index = axis_index("pp")
        if index == 0:
            x = torch.arange(6.0).reshape(2, 3)
            send(x, "pp", 1)
            x.zero_()  # what is written later does not travel
            send((torch.ones(2, dtype=torch.int64), big, torch.tensor([True])), "pp", 1)
            send(torch.zeros(0, 4), "pp", 1)
            return receive("pp", 2)
        if index == 1:
            first, several, empty = (start(receive, "pp", 0) for _ in range(3))
            last = empty.wait()  # waited for in another order
            send((big.sum(),), "pp", 2)
            return first.wait(), several.wait(), last, several.wait()
        (total,) = receive("pp", 1)
        send(total * 2, "pp", 0)
        return total

    zero, one, two = run(program, Mesh(pp=3), on=on).per_rank
    assert zero == 2 * big.sum() and two == big.sum()
    first, (ints, same, truth), empty, again = one
    assert torch.equal(first, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(ints, torch.ones(2, dtype=torch.int64)) and torch.equal(same, big) and truth.item() is True
    assert empty.shape == (0, 4) and again[1] is not None


@ON
def test_messages_do_not_disturb_collectives_of_the_same_two_ranks(on):
    def program(x):
        other = 1 - axis_index("pp")
        if other:
            send(x, "pp", other)
        total = all_reduce(x, "pp")
        if other:
            return total, receive("pp", other)
        send(x + 1, "pp", other)
        return total, receive("pp", other)

    out = run(program, Mesh(pp=2), torch.ones(2), on=on)
    assert [[float(t.sum()) for t in result] for result in out.per_rank] == [[4, 4], [4, 2]]
    assert out.trace.bytes_sent(op="send") == 16
    sent = out.trace.select(kind="send", op="send").events
    assert sorted((e.rank, e.peer, e.group) for e in sent) == [(0, 1, (0, 1)), (1, 0, (1, 0))]


def test_many_in_flight_and_along_any_axis():
    def program():
        index = axis_index("pp")
        for k in range(100):
            if index:
                send(torch.tensor(float(k)), "pp", 0)
        return [float(cast(torch.Tensor, receive("pp", 1))) for _ in range(100)] if not index else None

    out = run(program, Mesh(dp=2, pp=2))
    assert out.per_rank == [list(range(100)), None] * 2


@ON
@pytest.mark.parametrize("axes", [("a", "b"), ["a", "b"]], ids=["tuple", "list"])
def test_two_ranks_have_one_order_whatever_the_axis(on, axes):
    """Receives over one axis that are only started come before those over another one that the same two ranks share."""

    def program():
        a, b = axis_index("a"), axis_index("b")
        if (a, b) == (1, 0):
            for value in (1, 2, 3):
                send(torch.tensor(float(value)), axes, 3)
            for value in (10, 20):
                send(torch.tensor(float(value)), "b", 1)
        if (a, b) == (1, 1):
            started = [start(receive, axes, 2) for _ in range(3)]
            later = [cast(torch.Tensor, receive("b", 0)).item() for _ in range(2)]
            return [cast(torch.Tensor, handle.wait()).item() for handle in started], later
        return None

    assert run(program, Mesh(a=2, b=2), on=on).per_rank[3] == ([1, 2, 3], [10, 20])


@ON
def test_what_nobody_sends_or_takes_is_found(on):
    def waits():
        return receive("pp", 1 - axis_index("pp"))

    with pytest.raises(DeadlockError, match=r"rank 0 waits in receive\('pp', 1\) at .* for a message from rank 1"):
        run(waits, Mesh(pp=2), on=on)

    def left():
        if axis_index("pp") == 0:
            send(torch.ones(2), "pp", 1)

    words = r"send\(x, 'pp', 1\), which rank 0 called at .*:\d+, meets no receive: rank 1 returned without calling it"
    with pytest.raises(CollectiveMismatchError, match=words):
        run(left, Mesh(pp=2), on=on)

    def begun():
        if axis_index("pp") == 1:
            start(receive, "pp", 0)

    with pytest.raises(CollectiveMismatchError, match=r"receive\('pp', 0\), which rank 1 .* meets no send: rank 0"):
        run(begun, Mesh(pp=2), on=on)


def test_errors_in_words():
    def fails(words, call, error):
        with pytest.raises(Exception, match=words) as caught:
            run(call, Mesh(pp=2))
        found = caught.value.__cause__ if isinstance(caught.value, RankError) else caught.value
        assert isinstance(found, error)

    x = torch.ones(2)
    fails("positions 0 to 1; target=2 is not one", lambda: send(x, "pp", 2), MeshError)
    fails("position 0 of axis 'pp' is this rank itself", lambda: receive("pp", axis_index("pp")), MeshError)
    fails("a whole number, not 'next'", lambda: send(x, "pp", cast(int, "next")), TypeError)
    fails("requires grad would end here; send x.detach", lambda: send(x.requires_grad_(), "pp", 1), ValueError)
    fails("this tuple is empty", lambda: send((), "pp", 1), ValueError)
    fails("sends a torch.Tensor, not int", lambda: send(cast(torch.Tensor, 1), "pp", 1), TypeError)


def test_a_pair_is_another_group_than_its_two_ranks():
    plain = (0, 1)
    assert Apart(plain) != plain and plain != Apart(plain)
    assert Apart((0, 1)) == Apart((0, 1)) != Apart((1, 0))
    assert len({(0, 1), Apart((0, 1)), Apart((1, 0))}) == 3
