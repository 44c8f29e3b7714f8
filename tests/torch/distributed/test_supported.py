"""docs/torch_distributed.md names every function of torch.distributed that communicates, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

TABLE = Path(__file__).parents[3] / "docs" / "torch_distributed.md"
ROWS = re.findall(r"^\| (`.*?) \| (yes|no) \| (.*?) ?\|$", TABLE.read_text(encoding="utf8"), re.M)
ONLY_ASKS = re.compile(r"(get|is|supports)_.*|group|reduce_op|default_pg_timeout")


def test_the_table_is_complete():
    named = {name for cell, _, _ in ROWS for name in re.findall(r"`([\w.]+)`", cell)}
    functions = {name for name in c10d.__all__ if name[0].islower() and not ONLY_ASKS.fullmatch(name)}
    assert functions <= named, functions - named
    for name in named:
        home = torch if name.startswith("torch.") else dist
        for part in name.removeprefix("torch.").split("."):
            assert name.startswith("torch.") or hasattr(home, part) or hasattr(c10d, part), name


def test_a_no_says_what_to_do_or_why():
    assert all(note for _, answer, note in ROWS if answer == "no")
