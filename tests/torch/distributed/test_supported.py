"""docs/torch_distributed.md names every function of torch.distributed that communicates, and none that there is not."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d as c10d

from tplab import Mesh
from tplab.errors import MeshError
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
