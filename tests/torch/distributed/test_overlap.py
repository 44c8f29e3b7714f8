"""What overlaps on the modelled clock: between a collective's start and its wait, and in DDP's backward pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tplab import Mesh
from tplab.torch import run
from tplab.trace import Trace

NUM_RANKS = 4


def times(trace: Trace, op: str) -> list[tuple[float, float]]:
    """Start and end of what rank 0 does."""
    events = [event for event in trace.select(rank=0, op=op).events if event.kind != "wait"]
    return [(event.start, event.end) for event in events]


@pytest.mark.parametrize("num_products", [1, 40])
def test_what_lies_between_start_and_wait_overlaps(num_products: int):
    """It takes as long as the longer of the two, not as their sum."""

    def program(is_async: bool) -> None:
        x, y = torch.ones(1 << 20), torch.ones(256, 256)
        work = dist.all_reduce(x, async_op=is_async)
        for _ in range(num_products):
            torch.mm(y, y)
        if work is not None:
            work.wait()

    apart, together = (
        run(program, Mesh(dp=NUM_RANKS), is_async, distributed=True, cluster="h100").trace for is_async in (False, True)
    )
    ((start, end),) = times(together, "all_reduce")
    products = times(together, "mm")
    assert len(products) == num_products and products[0][0] <= start + 1e-12
    busy = products[-1][1] - products[0][0]
    assert together.makespan == pytest.approx(max(end, products[-1][1]) - together.start, rel=1e-12)
    assert apart.makespan - together.makespan == pytest.approx(min(end - start, busy), rel=1e-6)
    stands_still = busy < end - start  # its products end first
    assert len(together.select(rank=0, kind="wait")) == stands_still


def test_a_future_and_a_wait_are_the_same_time():
    def program(of_future: bool) -> None:
        work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        assert work is not None
        torch.mm(torch.ones(256, 256), torch.ones(256, 256))
        if of_future:
            work.get_future().wait()
        else:
            work.wait()

    spans = [run(program, Mesh(dp=2), way, distributed=True, cluster="h100").trace.makespan for way in (False, True)]
    assert spans[0] == spans[1]


def test_the_buckets_of_ddp_leave_during_the_backward_pass():
    """Each while the pass computes the gradients of the next; the rank waits at the end, for the last one alone."""

    def program(bucket_mb: float) -> None:
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
        for _ in range(2):  # in the second pass buckets are as the first has shown to be best
            model(torch.ones(1024, 512)).sum().backward()

    def last_pass(trace: Trace, num_buckets: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Its buckets; and what is computed from the first of them on."""
        buckets = times(trace, "all_reduce")[-num_buckets:]
        return buckets, [product for product in times(trace, "mm") if product[0] >= buckets[0][0]]

    many, one = (
        run(program, Mesh(dp=NUM_RANKS), size, distributed=True, cluster="h100").trace for size in (0.9, 100.0)
    )
    buckets, products = last_pass(many, 4)
    for (start, end), (following, _) in pairwise(buckets):
        assert any(start <= first < end for first, _ in products) and following > start
    assert buckets[-1][0] >= max(end for _, end in products)  # of the first layer, the last gradient to be computed
    (wait,) = [wait for wait in many.select(rank=0, kind="wait", op="all_reduce").events if wait.end > buckets[0][0]]
    assert (wait.start, wait.end) == pytest.approx(buckets[-1], rel=1e-12)
    (bucket,), products = last_pass(one, 1)
    assert not products and bucket[1] - bucket[0] > buckets[-1][1] - buckets[-1][0]
    assert many.makespan < one.makespan
