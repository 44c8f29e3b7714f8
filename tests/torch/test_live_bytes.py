"""LiveBytes: every tensor made inside counts while it lives, once; what was there before does not."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.torch.distributed.test_collectives import on
from tplab import Mesh
from tplab.pipeline.partition import LayerSpec
from tplab.schedules import gpipe
from tplab.torch import all_gather, axis_index, run, stages_of, start
from tplab.torch.watching.live_bytes import LiveBytes

ONE = 1000 * 4


def test_what_is_made_counts_while_it_lives():
    with LiveBytes() as live:
        a = torch.ones(1000)
        assert live.now() == live.peak == ONE
        b = a + 1
        assert live.now() == 2 * ONE
        del a
        assert (live.now(), live.peak) == (ONE, 2 * ONE)
        c = b * 2
        assert (live.now(), live.peak) == (2 * ONE, 2 * ONE)
        del b, c
        assert live.now() == 0


def test_operations_that_make_no_memory_are_told_from_those_that_do():
    """Views of what was there before count nowhere; memory that an operation is given counts from then on."""
    old = torch.ones(1000)
    with LiveBytes() as live:
        view = old[1:].view(-1).add_(1)
        copy = view.contiguous() + view.detach()
        assert live.now() == copy.nbytes
        given = torch.empty(0).set_(torch.UntypedStorage(ONE))
        with torch.profiler.record_function("nothing"):
            pieces = given.split(1)
        assert live.now() == copy.nbytes + ONE == live.peak
        del given, pieces
        assert live.now() == copy.nbytes
        grown = torch.empty(0)
        torch.add(old, 1, out=grown)
        assert live.now() == copy.nbytes + old.nbytes
        grown.resize_(3000)
        assert live.now() == copy.nbytes + 3 * old.nbytes


def test_tensors_that_hold_nothing_do_not_count():
    """torch.compile and torch.library.opcheck trace with fake tensors, whose sizes may be symbols."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    x = fake.from_tensor(torch.ones(1000), static_shapes=False)
    with LiveBytes() as live:
        with fake:
            y = torch.cat([x, x]) * 2
            live.made(torch._to_functional_tensor(y))
        z = torch.ones(1000, device="meta") + 1
        assert live.now() == live.peak == 0
        assert isinstance(y, Tensor) and z.is_meta


def test_memory_that_several_share_counts_once():
    with LiveBytes() as live:
        a = torch.ones(10, 100)
        views = [a[3], a.T, a.detach(), a.view(-1)]
        a += 1
        assert live.now() == live.peak == ONE
        del a
        assert live.now() == ONE  # the views still need it
        views.clear()
        assert live.now() == 0


def test_memory_that_changes_its_size_counts_as_much_as_it_has():
    """FSDP frees whole parameters, and makes them again, by resizing their memory."""

    def program() -> None:
        before = torch.ones(1000)
        with LiveBytes() as live:
            x = torch.ones(1000)
            x.untyped_storage().resize_(0)
            y = torch.ones(1000)
            assert live.now() == live.peak == ONE
            x.untyped_storage().resize_(2 * ONE)
            torch.add(y, before, out=torch.empty(0))
            assert live.peak == 4 * ONE
            del x
            before.resize_(10)
            assert live.now() == ONE and len(y) == 1000

    on(2, program)


def test_what_was_there_before_does_not_count():
    a = torch.ones(1000)
    with LiveBytes() as live:
        b = a.view(10, 100)
        a += 1
        assert live.peak == 0
        c = b + 1
        assert live.now() == c.nbytes == ONE


def test_memory_is_found_again_where_other_memory_was():
    """A freed tensor's place may be given to the next one, at once."""
    outside = torch.ones(1000)
    with LiveBytes() as live:
        for _ in range(50):
            outside = outside + 1  # the first was there before, the others are new
            made = outside * 2
            del made
        assert live.now() == ONE
        assert 2 * ONE <= live.peak <= 3 * ONE


def test_gradients_and_what_the_backward_pass_needs():
    x, w = torch.ones(10, 100), torch.ones(100, 100, requires_grad=True)
    with LiveBytes() as live:
        y = torch.tanh(x @ w)
        assert live.now() == ONE  # tanh keeps its result, and nobody keeps x @ w
        y.sum().backward()
        del y
        assert w.grad is not None
        assert live.now() == w.grad.nbytes
    assert live.peak >= w.grad.nbytes + 2 * ONE


def test_what_is_made_of_numbers_counts_and_what_is_numpys_does_not():
    array = np.ones(1000, np.float32)
    with LiveBytes() as live:
        x = torch.tensor([0.0] * 1000)
        assert live.now() == ONE
        y = torch.from_numpy(array)
        z = y.view(10, 100)
        assert live.now() == ONE
        del x
        assert live.now() == 0
    assert z.numel() == 1000


def test_the_meta_device_has_no_memory():
    with LiveBytes() as live, torch.device("meta"):
        nn.Linear(10_000, 10_000)
    assert live.peak == 0


def test_each_rank_sees_its_own():
    def program():
        with LiveBytes() as live:
            x = torch.ones(100 * (axis_index("pp") + 1))
            stages = stages_of([LayerSpec(nn.Linear, 8, 8)] * 4, gpipe(2, 1))
        return live.now() - x.nbytes - sum(p.nbytes for p in stages.parameters()), live.peak - live.now()

    assert run(program, Mesh(pp=2)).per_rank == [(0, 0)] * 2


def test_what_collectives_bring_counts():
    """Blocking or started: the whole that is gathered, of which views are taken afterwards."""

    def program():
        piece = torch.ones(1000)
        with LiveBytes() as live:
            whole = all_gather(piece, "tp").view(3, 1000)
            assert live.now() == 3 * ONE
            del whole
            handle = start(all_gather, piece, "tp")
            other = handle.wait()[:10]
            del handle
            assert live.now() == 3 * ONE
            del other
            assert live.now() == 0
        return live.peak

    assert run(program, Mesh(tp=3)).per_rank == [3 * ONE] * 3


def calls_of(action: Callable[[], Any]) -> int:
    """How many functions Python calls for it."""
    seen = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("count_memory", [False, True])
def test_an_operation_takes_as_long_however_much_is_alive(count_memory: bool):
    """A walk over all that is alive, after each operation, would make a program quadratic."""

    def program():
        x = torch.ones(4)
        with nullcontext() if count_memory else LiveBytes():
            found = []
            for num_alive in (10, 1000):
                held = [x + 1 for _ in range(num_alive)]
                found.append(calls_of(lambda: x * 2))
                del held
        return found

    few, many = run(program, Mesh(dp=1), count_memory=count_memory).per_rank[0]
    assert 0 < many <= few  # of the first, also the line has to be looked up


def test_what_is_freed_in_the_middle_of_the_count_is_not_lost():
    """By Python's collector of cycles, at any moment; and where another tensor got the place of a freed one."""
    with LiveBytes() as live:
        for _ in range(20):
            rings = []
            for _ in range(50):
                ring: list[Any] = [torch.ones(1000)]
                ring.append(ring)
                rings.append(ring)
            del rings, ring
            torch.ones(1000)
        gc.collect()
        assert live.now() == 0
        kept = torch.ones(1000)
        assert live.now() == kept.nbytes
