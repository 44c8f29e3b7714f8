"""Ranks that sleep and look again: for a file that another rank writes, or a lock that it holds."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

from tests.torch.distributed.test_collectives import on
from tplab import Mesh
from tplab.errors import DeadlockError
from tplab.torch import launch, run
from tplab.torch.ranks import watches


def summed() -> float:
    x = torch.ones(4) + dist.get_rank()
    dist.all_reduce(x)
    return x[0].item()


def by_file(folder: Path) -> None:
    """Rank 1 prepares the data; the others wait for it."""
    flag = folder / "ready"
    if dist.get_rank() == 1:
        time.sleep(1e-3)
        flag.touch()
    while not flag.exists():
        time.sleep(1e-3)


def by_counter(folder: Path) -> None:
    """Torch's own tests wait for one another in this way."""
    (folder / str(dist.get_rank())).touch()
    for _ in range(10_000):
        if len(list(folder.iterdir())) == dist.get_world_size():
            return
        time.sleep(1e-3)
    raise TimeoutError


def by_file_lock(folder: Path) -> None:
    """Each holds it while it waits for something that takes time."""
    with filelock.FileLock(folder / "lock", poll_interval=1e-3):
        assert not (folder / "inside").exists()
        (folder / "inside").touch()
        time.sleep(2e-3)
        (folder / "inside").unlink()


def by_flock(folder: Path) -> None:
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        by_nothing(folder)
        fcntl.flock(file, fcntl.LOCK_UN)


def by_nothing(folder: Path) -> None:
    assert not (folder / "inside").exists()
    (folder / "inside").touch()
    time.sleep(2e-3)
    (folder / "inside").unlink()


def by_baton(folder: Path) -> None:
    """As torch.utils.cpp_extension builds an extension once."""
    baton = FileBaton(str(folder / "baton"), wait_seconds=1e-3)
    if baton.try_acquire():
        time.sleep(5e-3)
        (folder / "built").touch()
        baton.release()
    else:
        baton.wait()
    assert (folder / "built").exists()


def by_store(folder: Path) -> None:
    """Rank 1 polls the store."""
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        while not store.check(["ready"]):
            time.sleep(1e-3)
    else:
        store.set("ready", "yes")


def looking(look: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Rank 1 makes a file; the others wait for it, and do this as long as it is not there."""

    def way(folder: Path) -> None:
        flag = folder / "ready"
        if dist.get_rank() == 1:
            flag.touch()
        while not os.path.exists(flag):
            look(flag)

    return way


def by_busy_store(folder: Path) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.set("busy", "no")
    while not store.check(["busy"]):
        pass


WITHOUT_SLEEP = {
    "nothing": looking(lambda flag: None),
    "a second look": looking(lambda flag: flag.is_file()),
    "an event": looking(lambda flag: threading.Event().wait(1e-3)),
    "a lock": looking(lambda flag: locked().acquire(timeout=1e-3)),
    "asyncio": looking(lambda flag: asyncio.run(asyncio.sleep(1e-3))),
    "a selector": looking(lambda flag: selectors.DefaultSelector().select(1e-3)),
    "a store": by_busy_store,
}
WAYS = [by_file, by_counter, by_file_lock, by_flock, by_baton, by_store]


def locked() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@pytest.mark.parametrize("way", WITHOUT_SLEEP.values(), ids=WITHOUT_SLEEP)
def test_a_rank_that_looks_without_sleeping_lets_the_others_go_on(way: Callable[[Path], None], tmp_path: Path):
    def program() -> float:
        way(tmp_path)
        return summed()

    kept = os.path.exists, Path.is_file
    assert on(3, program).per_rank == [6.0] * 3
    assert (os.path.exists, Path.is_file) == kept


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_rank_that_polls_lets_the_others_go_on(way: Callable[[Path], None], tmp_path: Path):
    def program() -> float:
        way(tmp_path)
        return summed()

    kept = time.sleep, fcntl.flock, subprocess.Popen.__init__
    assert on(3, program).per_rank == [6.0] * 3
    assert (time.sleep, fcntl.flock, subprocess.Popen.__init__) == kept


def test_a_script_that_waits_for_a_file(tmp_path: Path):
    """The loop from the manual, and one rank that is in a collective while another still polls."""
    (tmp_path / "train.py").write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "flag = 'flag'\n"
        "if dist.get_rank() == 1:\n"
        "    open(flag, 'w').close()\n"
        "else:\n"
        "    while not os.path.exists(flag): time.sleep(0.01)\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n".replace("'flag'", repr(str(tmp_path / "flag")))
    )
    assert [names["x"].item() for names in launch(tmp_path / "train.py", ranks=3).per_rank] == [3.0] * 3


def test_one_sleeps_while_others_work():
    """A sleep lasts as long as it should, and the others do not wait for it."""

    def program() -> float:
        group, start = dist.new_group([1, 2]), time.perf_counter()
        if dist.get_rank() == 0:
            time.sleep(0.3)
        else:
            for _ in range(20):
                dist.all_reduce(torch.ones(2), group=group)
        return time.perf_counter() - start

    order = list[int]()

    def noted() -> float:
        seconds = program()
        order.append(dist.get_rank())
        return seconds

    assert on(3, noted).per_rank[0] >= 0.3 and order[-1] == 0


def test_on_the_measured_clock_sleeping_is_the_ranks_own_time():
    def program() -> None:
        time.sleep(0.03 if dist.get_rank() else 0.01)
        summed()

    trace = run(program, Mesh(world=2), distributed=True, clock="measured").trace
    assert trace.busy()[0] >= 0.01 and trace.busy()[1] >= 0.03
    assert all(event.start >= 0.03 for event in trace.events if event.kind == "collective")


# --- what never comes ------------------------------------------------------------------------------------------------


def fails(program: Callable[[], Any], *said: str) -> None:
    with pytest.raises(DeadlockError) as caught:
        on(2, program)
    for words in said:
        assert words in str(caught.value), str(caught.value)


def test_a_file_that_never_comes_is_a_deadlock_with_a_name(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(watches, "_LOOKING", 0.1)

    def program() -> None:
        began = time.time()
        if dist.get_rank() == 1:
            while not (tmp_path / "never").exists():
                waited = time.time() - began
                assert waited < 60
                time.sleep(1e-3)
        dist.barrier()

    fails(
        program,
        "rank 0 waits in barrier('world') at test_polling.py:",
        "rank 1 waits in time.sleep, again and again, at test_polling.py:",
        "a rank that sleeps and looks again waits for something that no other rank will do",
    )


def test_a_loop_without_sleep_that_looks_for_ever(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(watches, "_LOOKING", 0.1)

    def program() -> None:
        if dist.get_rank() == 1:
            while not os.path.exists(tmp_path / "never"):
                pass
        dist.barrier()

    fails(program, "rank 1 waits in os.path.exists, again and again, at test_polling.py:")


def busy(seconds: float) -> None:
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        pass


def test_a_rank_that_keeps_its_turn_is_named(monkeypatch, capsys):
    """Nothing can be done about such a loop, but it is not silent."""
    monkeypatch.setattr(watches, "LONG", 0.05)
    monkeypatch.setattr("tplab.torch.ranks.turns.LONG", 0.05)
    on(2, lambda: busy(0.3 * dist.get_rank()))
    first = capsys.readouterr().err.splitlines()[0]
    assert re.match(r"tplab: the run has taken \d+ s so far; now rank 1 is at test_polling.py:\d+, and has had", first)


def test_a_long_run_says_where_it_is_and_blames_no_rank(monkeypatch, capsys):
    """Many short turns; what is said is said again after twice as long."""
    monkeypatch.setattr("tplab.torch.ranks.turns.LONG", 0.15)

    def program() -> None:
        for _ in range(12):
            busy(0.03)
            dist.barrier()

    on(2, program)
    said = capsys.readouterr().err.splitlines()
    assert 1 <= len(said) <= 3
    assert all(re.fullmatch(r"tplab: the run has taken \d s so far; now rank [01] is at \S+:\d+", one) for one in said)


def test_all_ranks_look_for_what_none_does(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(watches, "_LOOKING", 0.1)

    def program() -> None:
        FileBaton(str(tmp_path), wait_seconds=1e-3).wait()

    fails(program, "rank 0 waits in FileBaton.wait, again and again, at test_polling.py:", "rank 1 waits in FileBaton")


def test_a_loop_that_counts_is_believed_for_longer(monkeypatch, tmp_path: Path):
    """It may be work that takes time, as in a rehearsal, and is not taken for one that only looks."""
    monkeypatch.setattr(watches, "_LOOKING", 0.02)

    def program(is_endless: bool) -> float:
        step = 0
        if dist.get_rank() == 1:
            while is_endless or step < 60:
                time.sleep(1e-3)
                step += 1
        return summed()

    assert on(2, lambda: program(False)).per_rank == [3.0] * 2
    monkeypatch.setattr(watches, "_COUNTING", 0.1)
    fails(lambda: program(True), "again and again")


def test_long_sleeps_are_not_taken_for_a_deadlock(monkeypatch, tmp_path: Path):
    """One rank sleeps once, longer than a rank may look in vain; another looks for what that one does afterwards."""
    monkeypatch.setattr(watches, "_LOOKING", 0.02)
    monkeypatch.setattr(watches, "_COUNTING", 0.02)

    def program() -> float:
        if dist.get_rank() == 0:
            time.sleep(0.15)
            (tmp_path / "there").touch()
        while not (tmp_path / "there").exists():
            time.sleep(1e-3)
        return summed()

    assert on(2, program).per_rank == [3.0] * 2


def test_a_rank_may_wait_for_a_process_that_it_has_started(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(watches, "_LOOKING", 0.02)

    def program() -> float:
        if dist.get_rank() == 0:
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
            while process.poll() is None:
                time.sleep(1e-3)
        return summed()

    assert on(2, program).per_rank == [3.0] * 2
