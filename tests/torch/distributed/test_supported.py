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
ONLY_ASKS = re.compile(r"(get|is|supports)_.*|group|reduce_op|default_pg_timeout")


def test_the_table_is_complete():
    named = {name for cell, _, _ in ROWS for name in re.findall(r"`([\w.]+)`", cell)}
    functions = {name for name in c10d.__all__ if name[0].islower() and not ONLY_ASKS.fullmatch(name)}
    assert functions <= named, functions - named
    for name in named:
        if name.startswith("torch."):
            assert pkgutil.resolve_name(name), name
        else:
            assert hasattr(dist, name) or hasattr(c10d, name), name


def test_a_no_says_what_to_do_or_why():
    assert all(note for _, answer, note in ROWS if answer == "no")


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
