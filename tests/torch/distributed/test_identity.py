"""What a rank's program is told about its process, and how it ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.torch.distributed.test_collectives import on
from tplab import torchrun
from tplab.errors import RankError
from tplab.torch import launch


def test_each_rank_has_a_number_of_its_own():
    """In all of its threads; libraries, such as multiprocessing, find the process's."""

    def program() -> Any:
        import multiprocessing.process as processes

        found = [os.getpid()]
        thread = threading.Thread(target=lambda: found.append(os.getpid()))
        thread.start()
        thread.join()
        os.kill(os.getpid(), 0)  # it exists
        assert processes.BaseProcess(name="one")._parent_pid == process  # type: ignore[attr-defined]
        dist.barrier()
        assert set(found) == {os.getpid()}
        return os.getpid()

    process = os.getpid()
    numbers = on(3, program).per_rank
    assert len({*numbers, process}) == 4 and os.getpid() == process


def test_a_process_that_a_rank_starts_has_its_own_number():
    def program() -> list[int]:
        said = subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid(), os.getppid())"])
        return list(map(int, said.split()))

    assert all(numbers[1] == os.getpid() for numbers in on(2, program).per_rank)


SCRIPT = """\
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    try:
        os._exit(CODE)
    except Exception:
        pass
dist.barrier()
"""


@pytest.mark.skipif(os.name == "nt", reason="a shell of POSIX")
def test_what_a_rank_starts_has_its_environment():
    """Before, a child found no RANK, and os.environ of the rank that had changed it last."""

    def program() -> Any:
        os.environ["MINE"] = f"of rank {dist.get_rank()}"
        dist.barrier()
        say, python = 'echo "$RANK $MINE"', "import os; print(os.environ['RANK'], os.environ['MINE'])"
        found = [subprocess.check_output(say, shell=True, text=True)]
        found.append(subprocess.check_output([sys.executable, "-c", python], text=True))
        with os.popen(say) as output:
            found.append(output.read())
        given = subprocess.check_output(say, shell=True, text=True, env={"RANK": "x", "MINE": "y"})
        return (
            found,
            given,
            os.system(f'test "$RANK" = {dist.get_rank()}'),
            os.system("exit 3"),
            os.system("kill -9 $$"),
        )

    for rank, (found, given, *codes) in enumerate(on(2, program).per_rank):
        assert found == [f"{rank} of rank {rank}\n"] * 3 and given == "x y\n"
        assert codes == [0, 3 << 8, 9]
    assert os.system("exit 3") == 3 << 8


def test_a_rank_that_ends_its_process_is_named(tmp_path: Path, capsys):
    (tmp_path / "train.py").write_text(SCRIPT.replace("CODE", "7"))
    assert torchrun.main(["--nproc-per-node", "2", str(tmp_path / "train.py")]) == 1
    said = capsys.readouterr().err
    assert "RankError: rank 1 ended its process by os._exit(7) at train.py:6" in said
    with pytest.raises(RankError) as caught:
        launch(tmp_path / "train.py", ranks=2)
    assert caught.value.rank == 1


def test_os_exit_of_0_is_the_end_of_one_rank(tmp_path: Path):
    """Some scripts end so, to leave out what libraries do at the end."""
    (tmp_path / "train.py").write_text("import os\nx = int(os.environ['RANK'])\nos._exit(0)\nx = -1\n")
    launch(tmp_path / "train.py", ranks=2)


def test_a_thread_that_ends_the_process():
    def program() -> None:
        thread = threading.Thread(target=os._exit, args=(3,))
        if dist.get_rank() == 0:
            thread.start()
        dist.barrier()
        dist.barrier()

    with pytest.raises(RankError, match=r"rank 0 ended its process by os._exit\(3\)"):
        on(2, program)


def test_each_rank_has_its_own_handlers_of_signals():
    """A scheduler's SIGTERM is often rehearsed so; alarms that watch over a program do not go off."""
    kept = signal.signal, os.kill, signal.getsignal(signal.SIGTERM)

    def program() -> list[int]:
        rank, got = dist.get_rank(), list[int]()
        assert signal.signal(signal.SIGTERM, lambda number, frame: got.append(number)) == signal.SIG_DFL
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if rank else lambda number, frame: got.append(number))
        signal.alarm(1)
        signal.setitimer(signal.ITIMER_REAL, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        signal.alarm(0)
        dist.barrier()
        return got

    both = [int(signal.SIGTERM), int(signal.SIGUSR1)]
    assert on(2, program).per_rank == [both, both[:1]]
    assert (signal.signal, os.kill, signal.getsignal(signal.SIGTERM)) == kept


def test_a_signal_without_a_handler_ends_the_rank_that_sends_it_to_itself():
    def program() -> None:
        if dist.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)
        dist.barrier()

    with pytest.raises(RankError, match=r"rank 1 ended its process by SIGTERM at test_identity\.py:"):
        on(2, program)


def test_ddp_says_the_backend_that_was_asked_for(tmp_path: Path):
    def program() -> tuple[str, str]:
        data = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))._get_ddp_logging_data()
        return data["backend_name"], data["master_port"]

    assert on(2, program).per_rank == [("gloo", "29500")] * 2
