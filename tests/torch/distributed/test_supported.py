"""docs/torch_distributed.md names every function of torch.distributed that communicates, and none that there is not."""

from __future__ import annotations

import pkgutil
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d as c10d

from tests.torch.distributed.test_dispatch_modes import Seen
from tplab import Mesh
from tplab.errors import MeshError, ShapeError
from tplab.torch import run

TABLE = Path(__file__).parents[3] / "docs" / "torch_distributed.md"
ROWS = re.findall(r"^\| (`.*?) \| (yes|no) \| (.*?) ?\|$", TABLE.read_text(encoding="utf8"), re.M)
SINCE = re.compile(r"since torch (\d+)\.(\d+);")
INSTALLED = tuple(int(part) for part in torch.__version__.split(".")[:2])
ONLY_ASKS = re.compile(r"(get|is|supports)_.*|group|reduce_op|default_pg_timeout")


def test_the_table_is_complete():
    named = {name for cell, _, _ in ROWS for name in re.findall(r"`([\w.]+)`", cell)}
    functions = {name for name in c10d.__all__ if name[0].islower() and not ONLY_ASKS.fullmatch(name)}
    assert functions <= named, functions - named
    for cell, _, note in ROWS:
        since = SINCE.match(note)
        is_there = since is None or tuple(map(int, since.groups())) <= INSTALLED
        for name in re.findall(r"`([\w.]+)`", cell):
            if name.startswith("torch."):
                assert pkgutil.resolve_name(name), name
            else:
                assert (hasattr(dist, name) or hasattr(c10d, name)) == is_there, name


def test_a_no_says_what_to_do_or_why():
    assert all(note for _, answer, note in ROWS if answer == "no")


@pytest.mark.skipif(INSTALLED < (2, 12), reason="torch.distributed.record_comm is in torch since 2.12")
def test_a_name_for_the_profiler_changes_nothing():
    def program() -> torch.Tensor:
        x = torch.ones(3)
        with c10d.record_comm("all gradients"):  # type: ignore[attr-defined]
            dist.all_reduce(x)
        return x

    out = run(program, Mesh(dp=2), distributed=True)
    assert all(torch.equal(x, torch.full((3,), 2.0)) for x in out.per_rank)
    assert {event.op for event in out.trace.events} == {"all_reduce"}


def gather_single(x: torch.Tensor, output: torch.Tensor | None, dst: int, async_op: bool = False) -> Any:
    """torch's function; before torch 2.14, what it asks of the group."""
    if INSTALLED >= (2, 14):
        return dist.gather_single(x, output, dst=dst, async_op=async_op)  # type: ignore[attr-defined]
    opts = dist.GatherOptions()  # type: ignore[attr-defined]
    opts.rootRank, opts.asyncOp = dst, async_op
    group: Any = c10d._get_default_group()
    return group.gather_single(x.new_empty(0) if output is None else output, x, opts)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_gather_into_one_tensor(num_ranks: int, is_async: bool):
    def program() -> list[torch.Tensor] | None:
        rank, root = dist.get_rank(), num_ranks - 1
        x = torch.arange(6.0).reshape(2, 3) + 10 * rank
        outputs = [x.new_empty(num_ranks * 6), x.new_empty(num_ranks, 2, 3)]
        for output in outputs:
            work = gather_single(x, output if rank == root else None, root, is_async)
            assert (work is not None) == (is_async or INSTALLED < (2, 14))
            if is_async:
                work.wait()
        return outputs if rank == root else None

    out = run(program, Mesh(dp=num_ranks), distributed=True)
    want = torch.stack([torch.arange(6.0).reshape(2, 3) + 10 * rank for rank in range(num_ranks)])
    flat, stacked = out.per_rank[-1]
    assert torch.equal(flat, want.reshape(-1)) and torch.equal(stacked, want)
    if num_ranks > 1:
        assert {event.op for event in out.trace.events} == {"gather"}
        assert sum(event.bytes for event in out.trace.events) == 2 * 24 * (num_ranks - 1)


def test_a_gather_into_a_tensor_of_another_size_is_refused():
    def program() -> None:
        gather_single(torch.ones(3), torch.ones(4), dst=1)

    with pytest.raises(ShapeError, match=r"gather_single over 'dp' \(2 ranks\).*rank 1 is \[4\], .* must have 6"):
        run(program, Mesh(dp=2), distributed=True)


@pytest.mark.skipif(INSTALLED < (2, 14), reason="these names are in torch since 2.14")
def test_what_came_with_torch_2_14():
    def program() -> list[str]:
        dist.set_timeout(timedelta(seconds=1))  # type: ignore[attr-defined]
        x = torch.ones(2)
        with pytest.warns(FutureWarning, match="gather_single"):
            dist.gather_into_tensor(x, torch.empty(4), dst=0)  # type: ignore[attr-defined]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            gather_single(x, torch.empty(4), dst=0)
        with Seen() as seen:
            gather_single(x, torch.empty(4), dst=0)
        assert c10d.get_backend_impl().name() == "gloo"  # type: ignore[attr-defined]
        names = [event.name for event in profiled.events() or ()]  # type: ignore[union-attr]
        return [name for name in names if name.startswith("gloo:")] + [str(call) for call in seen.calls]

    names = run(program, Mesh(dp=2), distributed=True).per_rank
    for rank, size in enumerate((4, 0)):
        call = "c10d.gather_into_tensor_.default", ((size,), (2,), "...", 0, False, -1)
        assert names[rank] == ["gloo:gather_single", str(call)]


def test_spawn_calls_the_function_on_the_rank_of_its_number(capsys):
    """As in torch's tutorials, whose scripts start their own processes."""

    def worker(rank: int, world: int, scale: float) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        x = torch.ones(1) * (rank + 1)
        dist.all_reduce(x)
        print(x.item() * scale)
        dist.destroy_process_group()

    before = dist.TCPStore, torch.multiprocessing.spawn

    def program(nprocs: int) -> Any:
        torch.multiprocessing.spawn(worker, args=(nprocs, 0.5), nprocs=nprocs)
        context: Any = torch.multiprocessing.spawn(print, nprocs=nprocs, join=False)
        return context.join()

    assert run(lambda: program(3), Mesh(dp=3), distributed=True).per_rank == [True] * 3
    assert capsys.readouterr().out.splitlines() == [f"[rank {r}] {said}" for r in range(3) for said in ("3.0", r)]
    with pytest.raises(MeshError, match=r"nprocs=3\) on 2 simulated ranks.*run it on 3 ranks"):
        run(lambda: program(3), Mesh(dp=2), distributed=True)
    assert (dist.TCPStore, torch.multiprocessing.spawn) == before
