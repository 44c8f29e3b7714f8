"""docs/torch_distributed.md names every function of torch.distributed that communicates, and none that there is not."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d as c10d

from tplab import Mesh
from tplab.errors import RankError
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


@pytest.mark.parametrize(
    "start, said",
    [
        (lambda: dist.TCPStore("127.0.0.1", 29500, 2, dist.get_rank() == 0), "TCPStore does not work"),
        (lambda: dist.FileStore("somewhere", 2), "FileStore does not work"),
        (lambda: torch.multiprocessing.spawn(print, nprocs=2), "spawn does not work on simulated ranks"),
    ],
)
def test_what_would_stop_all_ranks_is_refused(start, said):
    before = dist.TCPStore, torch.multiprocessing.spawn
    with pytest.raises(RankError, match=said):
        run(start, Mesh(dp=2), distributed=True)
    assert (dist.TCPStore, torch.multiprocessing.spawn) == before
