"""`launch`: scripts that were written for torchrun, on simulated ranks, unchanged."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tplab import Mesh
from tplab.errors import CollectiveMismatchError, DeadlockError, RankError
from tplab.torch import launch

TRAIN = """\
import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import parallel_state

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    parallel_state.RANK = rank
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    torch.manual_seed(100 + rank)
    for _ in range(3):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert parallel_state.rank() == rank  # a global of a module is each rank's own
    if rank == 0:
        print("lr", args.lr)
    dist.destroy_process_group()
    return [p.detach().clone() for p in model.parameters()], loss.item()


if __name__ == "__main__":
    weights, loss = main()
    local_rank, num_args = int(os.environ["LOCAL_RANK"]), len(sys.argv)
"""
STATE = "RANK = None\n\n\ndef rank():\n    return RANK\n"


@pytest.fixture
def script(tmp_path: Path):
    """Writes a script, and the module that it imports; gives its path."""
    (tmp_path / "parallel_state.py").write_text(STATE)

    def write(text: str, name: str = "train.py") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def process_state() -> list[object]:
    """What a notebook would not want to find changed."""
    numpys = np.random.get_state()  # noqa: NPY002
    return [dict(os.environ), sys.argv, list(sys.path), sys.modules["__main__"], set(sys.modules),
            dist.is_initialized(), torch.get_rng_state().tolist(), random.getstate(), str(numpys)]  # fmt: skip


def test_a_script_runs_unchanged_on_each_rank(script, capsys):
    launch(script(TRAIN), ["--lr", "0.2"], ranks=2)  # the first one imports what it needs
    before = process_state()
    out = launch(script(TRAIN), ["--lr", "0.2"], ranks=4, num_nodes=2, cluster="h100")
    assert process_state() == before
    first = out.per_rank[0]["weights"]
    assert all(torch.equal(w, v) for rank in out.per_rank for w, v in zip(rank["weights"], first, strict=True))
    assert len({rank["loss"] for rank in out.per_rank}) == 4  # each its own data and dropout
    assert [rank["local_rank"] for rank in out.per_rank] == [0, 1, 0, 1]
    assert [rank["num_args"] for rank in out.per_rank] == [3] * 4
    assert capsys.readouterr().out.endswith("[rank 0] lr 0.2\n")
    assert {event.axis for event in out.trace.select(kind="collective").events} == {"world"}
    line = TRAIN[: TRAIN.index("loss.backward")].count("\n") + 1
    assert any(event.where == f"train.py:{line}" for event in out.trace.events)


def test_the_same_bits_each_time(script):
    losses = {tuple(rank["loss"] for rank in launch(script(TRAIN), ranks=3).per_rank) for _ in range(5)}
    assert len(losses) == 1


def test_the_axes_of_the_mesh_name_the_groups(script):
    text = """
import torch, torch.distributed as dist
dist.init_process_group()
for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 3]):
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        dist.all_reduce(torch.ones(2), group=group)
dist.all_reduce(torch.ones(2))
"""
    trace = launch(script(text), mesh=Mesh(dp=2, tp=2)).trace
    assert {event.axis for event in trace.select(kind="collective").events} == {"tp", "dp", "dp,tp", "ranks 0,3"}


def test_a_module_runs_as_with_python_m(script, monkeypatch):
    folder = script("").parent
    (folder / "work").mkdir()
    (folder / "work" / "__init__.py").write_text("")
    (folder / "work" / "other.py").write_text("NAME = __name__\n")
    (folder / "work" / "__main__.py").write_text("from .other import NAME\nname = NAME, __name__, __package__\n")
    monkeypatch.chdir(folder)
    out = launch("work", ranks=2, module=True)
    assert out.per_rank[1]["name"] == ("work.other", "__main__", "work")
    assert "work.other" not in sys.modules


def test_a_module_may_communicate_while_it_is_imported(script):
    script(
        "import torch, torch.distributed as dist\ndist.init_process_group()\nx = torch.ones(1)\ndist.all_reduce(x)\n",
        "setup_ranks.py",
    )
    out = launch(script("import setup_ranks\nimport setup_ranks as again\nx = again.x.item()\n"), ranks=3)
    assert [rank["x"] for rank in out.per_rank] == [3.0] * 3


def test_memory_is_counted_where_asked(script):
    text = "import torch, os\nx = torch.zeros(100 * (1 + int(os.environ['RANK'])))\ny = x + 1\n"
    assert launch(script(text), ranks=2, count_memory=True).peaks == [800, 1600]
    assert launch(script(text), ranks=2).peaks is None


@pytest.mark.parametrize(
    "text, error, said",
    [
        (
            "if dist.get_rank() == 1: raise ValueError('bad data')\ndist.barrier()",
            RankError,
            ["rank 1 raised ValueError at train.py:3: bad data"],
        ),
        (
            "import sys\nif dist.get_rank() == 1: sys.exit(3)\ndist.barrier()",
            RankError,
            ["rank 1 raised SystemExit at train.py:4: exit code 3"],
        ),
        (
            "import sys\nif dist.get_rank() == 1: sys.exit('no data')",
            RankError,
            ["rank 1 raised SystemExit at train.py:4: no data"],
        ),
        (
            "x = torch.ones(3)\nif dist.get_rank(): dist.all_reduce(x)\nelse: dist.broadcast(x, 0)",
            CollectiveMismatchError,
            ["rank 0: broadcast", "train.py:5", "rank 1: all_reduce", "train.py:4"],
        ),
        ("dist.all_reduce(torch.ones(3 + dist.get_rank()))", CollectiveMismatchError, ["[3] at train.py:3", "[4]"]),
        (
            "x = torch.ones(3)\ndist.send(x, 1 - dist.get_rank())\ndist.recv(x, 1 - dist.get_rank())",
            DeadlockError,
            [
                "rank 0 waits in send(x, 'world', 1) at train.py:4 for rank 1",
                "rank 1 waits in send",
                "a send waits for its receive",
            ],
        ),
        (
            "x = torch.ones(3)\ndist.recv(x, 1 - dist.get_rank())\ndist.isend(x, 1 - dist.get_rank())",
            DeadlockError,
            ["rank 0 waits in receive", "\na receive waits for its send: at least one of these ranks must send first"],
        ),
        (
            "if dist.get_rank(): dist.barrier()",
            DeadlockError,
            ["rank 0 has returned", "rank 1 waits in barrier('world')"],
        ),
        (
            "import torch.distributed.distributed_c10d as c\nc._get_default_store().get('key')",
            DeadlockError,
            ["waits in the store, for", "train.py:4"],
        ),
    ],
)
def test_what_goes_wrong_is_named_and_everything_put_back(script, text, error, said):
    path = script(f"import torch, torch.distributed as dist\ndist.init_process_group()\n{text}\n")
    launch(script("import torch.distributed as dist\ndist.init_process_group()\n", "first.py"), ranks=2)
    before = process_state()
    with pytest.raises(error) as caught:
        launch(path, ranks=2)
    for words in said:
        assert words in str(caught.value), caught.value
    assert process_state() == before


def test_what_contradicts_itself_is_refused(script):
    path = script(TRAIN)
    with pytest.raises(ValueError, match="give either ranks=8 or mesh="):
        launch(path)
    with pytest.raises(ValueError, match="3 nodes cannot share 4 ranks equally"):
        launch(path, ranks=4, num_nodes=3)
    with pytest.raises(FileNotFoundError):
        launch("nowhere.py", ranks=2)
    with pytest.raises(ModuleNotFoundError, match="no module 'nowhere'"):
        launch("nowhere", ranks=2, module=True)
