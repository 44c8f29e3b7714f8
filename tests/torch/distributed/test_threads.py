"""Threads that a rank's program starts: they communicate beside the rank's own thread, and belong to the rank."""

from __future__ import annotations

import _thread
import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

from tests.torch.distributed.test_collectives import group_of, on
from tplab import Mesh
from tplab.errors import CollectiveMismatchError, DeadlockError, RankError
from tplab.torch import run
from tplab.torch.ranks import watches

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def world() -> Any:
    """A group of all ranks, apart from the default one."""
    return group_of(list(range(dist.get_world_size())))


def summed(group: Any = None) -> float:
    x = torch.ones(4) + dist.get_rank()
    dist.all_reduce(x, group=group)
    return x[0].item()


# --- ways to wait for one another ------------------------------------------------------------------------------------


def by_join(task: Callable[[], float]) -> float:
    found: list[float] = []
    thread = Thread(target=lambda: found.append(task()))
    thread.start()
    summed()
    thread.join()
    return found[0]


def by_future(task: Callable[[], float]) -> float:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(task)
        summed()
        return future.result()


def by_event(task: Callable[[], float]) -> float:
    found, done = list[float](), threading.Event()
    Thread(target=lambda: (found.append(task()), done.set())).start()
    summed()
    assert done.wait(60)
    return found[0]


def by_queue(task: Callable[[], float]) -> float:
    """A producer that communicates, and may be one item ahead."""
    items: queue.Queue[float] = queue.Queue(1)
    Thread(target=lambda: [items.put(task()) for _ in range(4)]).start()
    found = [(items.get(), summed())[0] for _ in range(4)]
    assert len(set(found)) == 1
    return found[0]


def by_lock(task: Callable[[], float]) -> float:
    """Each holds the lock while it communicates."""
    lock, found = threading.RLock(), list[float]()

    def beside() -> None:
        with lock, lock:
            found.append(task())

    with lock:
        thread = Thread(target=beside)
        thread.start()
        summed()
    while not found:
        time.sleep(1e-3)
    with lock:
        return found[0]


def by_condition(task: Callable[[], float]) -> float:
    found, ready = list[float](), threading.Condition()

    def beside() -> None:
        value = task()
        with ready:
            found.append(value)
            ready.notify()

    Thread(target=beside).start()
    with ready:
        ready.wait_for(lambda: found)
    return found[0]


def by_timer(task: Callable[[], float]) -> float:
    found: list[float] = []
    timer = threading.Timer(0.01, lambda: found.append(task()))
    timer.start()
    summed()
    timer.join()
    return found[0]


def by_asyncio(task: Callable[[], float]) -> float:
    async def both() -> float:
        future = asyncio.create_task(asyncio.to_thread(task))
        await asyncio.sleep(0)
        return await future

    return asyncio.run(both())


WAYS = [by_join, by_future, by_event, by_queue, by_lock, by_condition, by_timer, by_asyncio]


@pytest.mark.parametrize("way", WAYS)
def test_a_second_thread_communicates_while_the_first_one_does(way: Callable[[Callable[[], float]], float]):
    def program() -> list[float]:
        group = world()
        return [way(lambda: summed(group)), summed()]

    assert on(3, program).per_rank == [[6, 6]] * 3


def test_the_order_of_threads_is_the_same_each_time():
    """Their random numbers are the rank's, as in a process, and each rank has its own."""

    def program() -> list[Any]:
        group, drawn = world(), list[Any]()

        def beside() -> None:
            for _ in range(3):
                drawn.append(torch.rand(()).item())
                summed(group)

        threads = [Thread(target=beside) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            drawn.append(torch.rand(()).item())
            summed()
        for thread in threads:
            thread.join()
        return drawn

    runs = [run(program, Mesh(world=3), distributed=True, cluster="h100") for _ in range(4)]
    assert all(out.per_rank == runs[0].per_rank and out.trace == runs[0].trace for out in runs[1:])
    assert len({draw for drawn in runs[0].per_rank for draw in drawn}) == 3 * 10


def test_a_thread_is_in_the_process_of_its_rank(capsys):
    def program() -> Any:
        import os

        def beside() -> tuple[Any, ...]:
            group = world()  # made in this thread, used by the other one as well
            made.append(group)
            y = functional_all_reduce(torch.ones(()), "sum", group)
            print("beside")
            return os.environ["RANK"], dist.get_rank(), int(y)

        made: list[Any] = []
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(beside).result()
        return *found, int(functional_all_reduce(torch.ones(()), "sum", made[0]))

    assert on(2, program).per_rank == [("0", 0, 2, 2), ("1", 1, 2, 2)]
    assert capsys.readouterr().out == "[rank 0] beside\n[rank 1] beside\n"


def test_on_the_clock_both_communicate_at_once():
    """The second thread's message takes no time of the first one's, until that waits for it."""

    def program(is_beside: bool) -> None:
        group, x = world(), torch.ones(1 << 16)
        thread = Thread(target=dist.all_reduce, args=(x,), kwargs={"group": group})
        thread.start()
        if not is_beside:
            thread.join()
        y = torch.ones(256, 256)
        for _ in range(4):
            y = y @ y
        if is_beside:
            thread.join()

    apart, beside = (
        run(lambda b=b: program(b), Mesh(world=2), distributed=True, cluster="ethernet").trace for b in (False, True)
    )
    computed = float(apart.busy()[0])
    (first, *_), (second, *_) = ([e for e in trace.events if e.kind == "collective"] for trace in (apart, beside))
    assert (first.start, first.end) == (second.start, second.end)
    assert apart.makespan == pytest.approx(first.end - first.start + computed, rel=1e-9)
    assert beside.makespan == pytest.approx(max(computed, second.end), rel=1e-9)
    assert beside.makespan < apart.makespan and list(beside.busy()) == pytest.approx([computed] * 2, rel=1e-9)


def test_checkpoints_are_saved_while_training_goes_on(tmp_path):
    def program() -> list[bool]:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(6, 4))
        optimizer, group = torch.optim.SGD(model.parameters(), 0.1), world()
        future: Any = None
        kept = []
        for step in range(3):
            kept.append([p.full_tensor().clone() for p in model.parameters()])
            if future is not None:
                future.result()
            state = {"model": model.state_dict()}
            future = checkpoint.async_save(state, checkpoint_id=tmp_path / f"{step}", process_group=group)
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        future.result()
        same = []
        for step in range(3):
            state = model.state_dict()
            checkpoint.load({"model": state}, checkpoint_id=tmp_path / f"{step}")
            loaded = [p.full_tensor() for p in model.parameters()]
            same.append(all(torch.equal(a, b) for a, b in zip(kept[step], loaded, strict=True)))
        return same

    assert on(2, program).per_rank == [[True] * 3] * 2


LOADER = """\
import queue
from threading import Thread

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
group = dist.new_group()
squares = torch.utils.data.TensorDataset(torch.arange(12.0) ** 2)
sampler = torch.utils.data.DistributedSampler(squares, shuffle=False)
loader = torch.utils.data.DataLoader(squares, 2, sampler=sampler, num_workers=1)
batches = queue.Queue(1)

def fetch():
    for (batch,) in loader:
        dist.all_reduce(batch, group=group)
        batches.put(batch)
    batches.put(None)

Thread(target=fetch, daemon=True).start()
while (batch := batches.get()) is not None:
    mine = torch.ones(1)
    dist.all_reduce(mine)
    print("sum", batch.sum().item() + mine.item())
"""


def test_batches_of_a_loader_with_workers_are_fetched_by_a_thread(tmp_path: Path):
    """The loader's own threads and processes run as always, beside a thread that takes turns and communicates. The
    script has a process of its own, because this one may have imported JAX, after which it should not fork."""
    (tmp_path / "train.py").write_text(LOADER)
    command = [sys.executable, "-m", "tplab.torchrun", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    squares = [index**2 for index in range(12)]
    for first in (0, 4, 8):
        assert said.stdout.count(f"sum {sum(squares[first : first + 4]) + 2.0}") == 2, said.stdout + said.stderr


# --- what goes wrong -------------------------------------------------------------------------------------------------


def fails(program: Callable[[], Any], error: type[Exception], *said: str) -> None:
    with pytest.raises(error) as caught:
        on(2, program)
    for words in said:
        assert words in str(caught.value), str(caught.value)


def test_a_deadlock_says_which_thread_waits_where():
    def program() -> None:
        group = world()
        thread = Thread(target=lambda: dist.get_rank() == 0 and dist.barrier(group), name="beside")
        thread.start()
        if dist.get_rank() == 0:
            thread.join()
        dist.barrier()

    fails(
        program,
        DeadlockError,
        "rank 0 waits in Thread.join of 'beside' at test_threads.py:",
        "    its thread 'beside' waits in barrier('world') at test_threads.py:",
        "for rank 1\n  rank 1 waits in barrier('world') at test_threads.py:",
    )


def test_a_lock_that_nobody_gives_back():
    def program() -> None:
        lock = threading.Lock()
        lock.acquire()
        if dist.get_rank() == 0:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lock.acquire).result()
        dist.barrier()

    fails(
        program,
        DeadlockError,
        "rank 0 waits in Future.result at",
        "its thread 'ThreadPoolExecutor-",
        "rank 1 waits in barrier",
    )


def test_a_thread_that_sleeps_and_looks_again_hides_no_deadlock(monkeypatch):
    monkeypatch.setattr(watches, "_LOOKING", 0.3)

    def program() -> None:
        def look() -> None:
            while True:
                time.sleep(1e-3)

        Thread(target=look, name="looks", daemon=True).start()
        if dist.get_rank() == 0:
            dist.barrier()
        dist.barrier(world())

    fails(program, (CollectiveMismatchError, DeadlockError))  # type: ignore[arg-type]


def test_two_threads_in_one_group_out_of_order_are_a_mismatch_with_both_lines():
    def program() -> None:
        thread = Thread(target=dist.barrier)
        thread.start()
        if dist.get_rank() == 0:
            thread.join(1e-3)
        summed()
        thread.join()

    fails(program, (CollectiveMismatchError, DeadlockError), "barrier", "all_reduce")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_a_thread_has_raised_is_in_the_error_that_follows():
    def program() -> None:
        def beside() -> None:
            raise ValueError("no such batch")

        Thread(target=beside, name="beside").start()
        if dist.get_rank() == 0:
            dist.barrier(world())
        dist.barrier()

    fails(program, Exception, "barrier")
    fails(program, DeadlockError, "its thread 'beside' has raised ValueError at test_threads.py:", "no such batch")


def test_a_thread_that_no_program_has_started_is_refused():
    def program() -> str:
        said, done = list[str](), threading.Event()

        def beside() -> None:
            try:
                dist.barrier()
            except RuntimeError as error:
                said.append(str(error))
            done.set()

        _thread.start_new_thread(beside, ())
        done.wait(10)
        return said[0]

    with pytest.raises(RankError) as caught:
        on(1, lambda: _refused(program()))
    assert "belongs to no rank and uses a process group of rank 0" in str(caught.value)


def _refused(text: str) -> None:
    raise ValueError(text)


# --- at the end ------------------------------------------------------------------------------------------------------


def test_what_is_left_running_is_waited_for_or_let_go(capfd):
    """A thread that keeps a process alive is waited for; an executor that waits for work, and daemons, are let go."""
    kept = threading.Lock, threading.Thread.start, queue.SimpleQueue, time.sleep
    late: list[float] = []

    def program() -> ThreadPoolExecutor:
        group, other = world(), world()

        def at_last() -> None:
            time.sleep(0.02)
            late.append(summed(group))

        def heartbeat() -> None:
            while True:
                time.sleep(1e-3)
                if dist.get_rank() == 0:
                    dist.barrier(other)

        Thread(target=at_last).start()
        Thread(target=heartbeat, daemon=True).start()
        pool = ThreadPoolExecutor(2)
        pool.submit(summed, other if dist.get_rank() > 5 else None).result()
        return pool

    before = threading.active_count()
    pools = on(3, program).per_rank
    assert late == [6, 6, 6] and len(pools) == 3
    assert threading.active_count() <= before
    assert (threading.Lock, threading.Thread.start, queue.SimpleQueue, time.sleep) == kept
    assert capfd.readouterr().err == ""


def test_several_runs_in_several_threads_of_the_notebook():
    """Each has the floor for a while, and leaves torch and Python to the next one as they were."""

    def kept() -> list[Any]:
        return [dist.init_process_group.__code__, dist.PrefixStore, threading.Lock, Thread.start, time.sleep]

    def program() -> float:
        group = world()
        thread = Thread(target=summed, args=(group,))
        thread.start()
        for _ in range(200):
            last = summed()
        thread.join()
        return last

    before = kept()
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(on, ranks, program) for ranks in (2, 3, 2, 3, 2, 3)]
        assert [run.result().per_rank for run in runs] == [[3.0] * 2, [6.0] * 3] * 3
    assert kept() == before


def test_an_executor_of_the_notebook_works_as_before():
    with ThreadPoolExecutor(1) as pool:
        assert run(lambda: pool.submit(lambda: 7).result(), Mesh(dp=2), distributed=True).per_rank == [7, 7]
        assert pool.submit(lambda: 8).result() == 8


# --- what a review found ---------------------------------------------------------------------------------------------


def test_two_threads_may_wait_for_the_same_work():
    """The second one too waits until the data is there. A thread's function may be a method of what torch returned."""

    def program() -> float:
        x = torch.ones(3)
        if dist.get_rank():
            dist.all_reduce(x)
            return x[0].item()
        work: Any = dist.all_reduce(x, async_op=True)
        thread = Thread(target=work.wait)
        thread.start()
        time.sleep(0.001)  # the thread begins to wait
        work.wait()
        assert work.is_completed()
        found = x[0].item()
        thread.join()
        return found

    assert on(2, program).per_rank == [2.0, 2.0]


def test_a_run_inside_of_a_rank_leaves_the_one_around_it_as_it_was():
    def program() -> list[float]:
        inner = run(dist.get_world_size, Mesh(tp=1), distributed=True).per_rank
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(summed, world()).result()
        return [*inner, found]

    assert on(2, program).per_rank == [[1, 3.0]] * 2


def test_locks_and_queues_are_used_as_pythons_are():
    def program() -> list[Any]:
        lock: Any = threading.Lock()
        found = [lock.acquire_lock(), lock.locked_lock(), lock.acquire(False)]
        lock.release()
        for given in ((False, 1), (True, -2)):
            with pytest.raises(ValueError, match="timeout"):
                lock.acquire(*given)

        class Counted(queue.SimpleQueue[int]):
            num_put = 0

            def put(self, *given: Any) -> None:
                self.num_put += 1
                super().put(*given)

        queued = Counted()
        queued.put(3)
        queued.put_nowait(4)
        return [*found, queued.get(), queued.get_nowait(), queued.qsize(), queued.empty(), queued.num_put]

    assert on(1, program).per_rank == [[True, True, False, 3, 4, 0, True, 1]]


def test_threads_of_a_rank_compute_one_after_another_on_the_clock():
    x = torch.ones(512, 512)

    def alone() -> None:
        for _ in range(2):
            torch.mm(x, x)

    def both() -> None:
        thread = Thread(target=lambda: torch.mm(x, x))
        thread.start()
        torch.mm(x, x)
        thread.join()

    took = [run(program, Mesh(tp=1), distributed=True, cluster="h100").trace for program in (alone, both)]
    products = [trace.select(kind="compute").events for trace in took]
    assert sum(event.op == "mm" for event in products[1]) == 2
    assert took[1].makespan == pytest.approx(took[0].makespan)


def test_a_future_of_torch_is_waited_for():
    def program() -> float:
        future, group = torch.futures.Future[float](), world()
        Thread(target=lambda: future.set_result(summed(group))).start()
        return future.wait()

    assert on(2, program).per_rank == [3.0] * 2
