"""Simulated ranks that share one GPU: `run(..., device="cuda")`."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tplab import Mesh, P
from tplab.errors import DeadlockError, RankError
from tplab.torch import (
    Result,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    broadcast,
    copy_to,
    device_mesh,
    ppermute,
    reduce_from,
    reduce_scatter,
    ring_all_reduce,
    ring_shift,
    run,
    start,
)

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here: device='cuda' was NOT tested", allow_module_level=True)

FOUR = Mesh(tp=4)


def on_gpu(program, mesh: Mesh, *args, **options) -> Result:
    return run(program, mesh, *args, device="cuda", **options)


def test_arguments_and_results_are_on_the_gpu():
    def program(x: Tensor, y: Tensor, model: nn.Linear) -> Tensor:
        assert {x.device, y.device, model.weight.device} == {torch.device("cuda", torch.cuda.current_device())}
        assert x.requires_grad
        assert torch.zeros(1, device="cuda").device == x.device
        return model(x + y).detach()

    x = torch.ones(4, 8, requires_grad=True)
    model = nn.Linear(8, 2)
    out = on_gpu(program, FOUR, x, torch.ones(8), model, in_specs=(P("tp"), P(), P()), out_specs=P("tp"))
    assert out.value.is_cuda
    assert torch.allclose(out.value.cpu(), model(x + 1), atol=1e-6)
    assert not model.weight.is_cuda


def collectives(x: Tensor) -> list[Tensor]:
    return [
        all_reduce(x, "tp"),
        all_reduce(x, "tp", "max"),
        all_gather(x, "tp"),
        reduce_scatter(x, "tp"),
        all_to_all(x, "tp"),
        broadcast(x, "tp", 2),
        ppermute(x, "tp", [(0, 3)]),
        ring_shift(x, "tp"),
        start(ring_shift, x, "tp", -1).wait(),
        start(all_reduce, x, "tp", op="mean").wait(),
        ring_all_reduce(x, "tp"),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_collectives_give_the_cpus_bits(dtype: torch.dtype):
    def program(x: Tensor) -> list[Tensor]:
        if x.is_complex():
            return [broadcast(x, "tp", 2), all_reduce(x, "tp"), ring_shift(x, "tp")]
        return collectives(x)

    x = torch.randn(16, 8).to(dtype)
    here, there = (run(program, FOUR, x, in_specs=P("tp"), device=device) for device in (None, "cuda"))
    for a, b in zip(here.per_rank, there.per_rank, strict=True):
        assert all(y.is_cuda for y in b)
        assert all(torch.equal(p, q.cpu()) for p, q in zip(a, b, strict=True))
    assert [(e.rank, e.op, e.bytes, e.start) for e in here.trace.events] == [
        (e.rank, e.op, e.bytes, e.start) for e in there.trace.events
    ]


def test_a_backward_pass_runs_in_its_ranks_own_thread():
    """Its collectives know their rank, and the first one that waits does not stop the others."""

    def layer(x: Tensor, a: Tensor, b: Tensor) -> tuple:
        y = reduce_from((copy_to(x, "tp") @ a).tanh() @ b, "tp")
        flight = start(all_gather, y * 1, "tp")
        (y.square().sum() + flight.wait().sum() * 0).backward()
        return y, x.grad, a.grad, b.grad

    x, a, b = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((5, 3), (3, 8), (8, 2)))
    columns, rows = P(None, "tp"), P("tp", None)
    options = {"in_specs": (P(), columns, rows), "out_specs": (P(), P(), columns, rows)}
    for got, wanted in zip(on_gpu(layer, FOUR, x, a, b, **options).value, run(layer, FOUR, x, a, b, **options).value):
        assert torch.allclose(got.cpu(), wanted, rtol=1e-12, atol=1e-12)


def noisy() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, device="cuda")
    x = nn.functional.dropout(all_reduce(nn.functional.dropout(x, 0.5), "tp"), 0.3)
    return ring_shift(x, "tp") + torch.rand(64, device="cuda"), torch.rand(64)


def test_every_rank_draws_its_own_numbers_and_the_kernels_generators_are_untouched():
    kept = torch.get_rng_state(), torch.cuda.get_rng_state()
    runs = [[x.cpu() for pair in on_gpu(noisy, FOUR, seed=3).per_rank for x in pair] for _ in range(5)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    assert len({tuple(x.tolist()) for x in runs[0]}) == 8
    with pytest.raises(RankError):
        on_gpu(lambda: torch.rand(3, device="cuda")[[5]].cpu() if axis_index("tp") > 9 else [][1], FOUR)
    assert torch.equal(torch.get_rng_state(), kept[0])
    assert torch.equal(torch.cuda.get_rng_state(), kept[1])


@pytest.mark.parametrize("size", [10, 100_000])
def test_ranks_do_not_write_into_each_other(size: int):
    x = torch.zeros(size, device="cuda")

    def program(x: Tensor) -> Tensor:
        x.add_(1 + axis_index("tp"))
        flight = start(ring_shift, x, "tp")
        x.fill_(-1)
        y = flight.wait()
        y.mul_(10)
        return y

    out = on_gpu(program, FOUR, x)
    assert [y.unique().tolist() for y in out.per_rank] == [[40], [10], [20], [30]]
    assert x.eq(0).all()


def test_the_callers_stream_is_the_ranks():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert on_gpu(lambda: torch.cuda.current_stream() == stream, FOUR).per_rank == [True] * 4


@pytest.mark.parametrize("is_started", [False, True])
def test_ranks_with_streams_of_their_own_get_each_others_numbers(is_started: bool):
    """Each makes what it sends long after it has said so, as kernels before it take their time."""

    def program() -> tuple[float, float]:
        rank = dist.get_rank()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000 * (4 - rank))
            x = torch.full((1000,), 1.0 + rank, device="cuda")
            work = dist.all_reduce(x, async_op=is_started)
            if work is not None:
                work.wait()
            y = torch.empty(4, 1000, device="cuda")
            torch.cuda._sleep(20_000_000 * rank)
            dist.all_gather_into_tensor(y, x * (1 + rank))
            return x.sum().item(), y.sum().item()

    for found in on_gpu(program, FOUR, distributed=True).per_rank:
        assert found == (10 * 1000, 10 * 10 * 1000)


def test_fsdp_is_on_the_device_of_the_run():
    from torch.distributed.fsdp import fully_shard

    def program() -> tuple[str, Tensor]:
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(8, 8, device="cuda"), mesh=device_mesh())
        return device_mesh().device_type, model(torch.ones(2, 8, device="cuda"))

    torch.manual_seed(0)
    want = nn.Linear(8, 8, device="cuda")(torch.ones(2, 8, device="cuda"))
    for kind, y in on_gpu(program, FOUR, distributed=True, seed=0).per_rank:
        assert kind == "cuda"
        torch.testing.assert_close(y, want)


def test_the_measured_clock_waits_for_the_gpu():
    """A kernel is done when it has run, not when it has been launched."""

    def program(x: Tensor) -> None:
        for _ in range(20):
            x = x @ x * 1e-4
        ring_shift(x[:1], "tp")

    x = torch.ones(4096, 4096, device="cuda")
    on_gpu(program, Mesh(tp=1), x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        x = x @ x * 1e-4
    end.record()
    torch.cuda.synchronize()
    took = begin.elapsed_time(end) / 1e3
    busy = on_gpu(program, Mesh(tp=2), torch.ones(4096, 4096, device="cuda"), clock="measured").trace.busy()
    assert busy.min() > 0.5 * took  # launching alone takes a hundredth of it


def test_the_modelled_clock_and_the_trace_are_those_of_the_cpu():
    def program(x: Tensor) -> Tensor:
        return ring_shift((x @ x).relu(), "tp")

    traces = [run(program, FOUR, torch.ones(64, 64), cluster="h100", device=d).trace for d in (None, "cuda")]
    rows = [[(e.rank, e.kind, e.op, e.start, e.end, e.flops, e.bytes) for e in trace.events] for trace in traces]
    assert rows[0] == rows[1]


def test_errors_are_named_and_the_gpu_lives_on():
    def early(x: Tensor) -> None:
        if axis_index("tp"):
            all_reduce(x, "tp")

    with pytest.raises(DeadlockError, match="rank 0 has returned"):
        on_gpu(early, FOUR, torch.ones(3))
    assert on_gpu(lambda x: all_reduce(x, "tp").sum().item(), FOUR, torch.ones(3)).per_rank == [12.0] * 4


BROKEN = """
import torch
from tplab import Mesh
from tplab.errors import RankError
from tplab.torch import all_reduce, axis_index, run

def program(x):
    if axis_index("tp") == 1:
        x = x[torch.tensor([99], device=x.device)]  # no such row: the GPU is lost
        torch.cuda.synchronize()
    return all_reduce(x, "tp")

try:
    run(program, Mesh(tp=2), torch.ones(3), device="cuda")
except RankError as error:
    print("said", error)
print("after", run(lambda: all_reduce(torch.ones(1), "tp"), Mesh(tp=2)).per_rank)
"""


def test_a_rank_that_breaks_the_gpu_is_named_and_the_kernel_lives_on(tmp_path: Path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert "said rank 1 raised" in done.stdout and "broken.py" in done.stdout, done
    assert "after [tensor([2.]), tensor([2.])]" in done.stdout, done
