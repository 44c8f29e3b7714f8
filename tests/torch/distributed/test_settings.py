"""What a script sets for its process, a simulated rank sets for itself."""

from __future__ import annotations

import builtins
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.torch.distributed.test_collectives import on
from tplab.torch import launch


def heard(logger: logging.Logger, to: list[str]) -> None:
    handler = logging.Handler()
    handler.emit = lambda record: to.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)


def test_each_rank_has_its_own_loggers():
    """Only rank 0 shall say what it does; each has handlers of its own, and what was there before comes back."""
    logger = logging.getLogger("tests.of.settings")
    before, said = logging.getLogger().handlers, list[str]()
    heard(logger, said)
    kept = dict(vars(logger))

    def program() -> list[str]:
        rank, own = dist.get_rank(), list[str]()
        logger.setLevel(logging.ERROR if rank else logging.INFO)
        heard(logging.getLogger(), own)
        for say in (logger.info, logger.error):
            dist.barrier()
            say("rank %d", rank)
        logger.handlers = []
        dist.barrier()
        logger.error("alone")
        return own

    assert on(3, program).per_rank == [["rank 0"] * 2 + ["alone"], ["rank 1", "alone"], ["rank 2", "alone"]]
    assert sorted(said) == ["rank 0", "rank 0", "rank 1", "rank 2"]
    assert {name: vars(logger)[name] for name in kept} == {**kept, "_cache": {}}
    assert logging.getLogger().handlers == before and not logger.isEnabledFor(logging.INFO)


PRINTS = """\
import builtins, os, torch.distributed as dist
dist.init_process_group("gloo")
rank, own = dist.get_rank(), builtins.print
builtins.print = lambda *args, force=False: own(*args) if rank == 0 or force else None
dist.barrier()
print("of", rank)
dist.barrier()
print("forced", rank, force=True)
os.makedirs("run", exist_ok=True)
os.chdir("run")
dist.barrier()
open(str(rank), "w").close()
"""


def test_print_and_the_working_directory(tmp_path: Path, monkeypatch: Any, capsys: Any):
    """Many scripts let only rank 0 print, and some go to the folder of the run, by a relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PRINTS)
    own = builtins.print
    launch(tmp_path / "train.py", ranks=3)
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] of 0", "[rank 0] forced 0", "[rank 1] forced 1", "[rank 2] forced 2",
    ]  # fmt: skip
    assert builtins.print is own and Path(os.getcwd()) == tmp_path
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["0", "1", "2"]


def test_ranks_with_different_default_dtypes_meet_in_a_barrier():
    def program() -> torch.dtype:
        torch.set_default_dtype(torch.float32 if dist.get_rank() else torch.float64)
        dist.barrier()
        return torch.ones(1).dtype

    assert on(2, program).per_rank == [torch.float64, torch.float32]
