"""torch.profiler on every rank: each has its own profile."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler
from torch.utils.flop_counter import FlopCounterMode

from tests.torch.distributed.test_collectives import group_of, on
from tplab.errors import RankError
from tplab.torch.distributed.profiling import Profiled
from tplab.torch.private import KinetoEvent
from tplab.torch.watching.live_bytes import LiveBytes

CPU = [ProfilerActivity.CPU]
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events", "ignore::FutureWarning")


def work(num_matmuls: int) -> Tensor:
    x = torch.ones(4, 4)
    for _ in range(num_matmuls):
        x = x @ x
    dist.all_reduce(x)
    return x


def counts(found: Any) -> dict[str, int]:
    return {average.key: average.count for average in found.key_averages()}


def events_of(profiled: Any) -> Any:
    return profiled.events()


def kind_of_results(profiled: Any) -> str:
    return type(profiled.profiler.kineto_results).__name__


@pytest.mark.parametrize("kind", ["torch.profiler", "torch.autograd.profiler"])
def test_each_rank_has_its_own_profile(kind: str):
    """What tplab does to combine the tensors is in none of them."""

    def program() -> dict[str, int]:
        with profile(activities=CPU) if kind == "torch.profiler" else autograd_profile() as profiled:
            work(dist.get_rank() + 1)
        return counts(profiled)

    for rank, found in enumerate(on(3, program).per_rank):
        assert found["aten::mm"] == rank + 1 and found["gloo:all_reduce"] == 1
        ops = {"aten::" + name for name in ["ones", "empty", "fill_", "matmul", "mm", "resolve_conj"]}
        assert set(found) == {*ops, "gloo:all_reduce"}


def test_counting_memory_adds_nothing_to_a_profile():
    """Nor does it hide what a mode of the program adds."""

    def trains() -> list[tuple[str, int, int]]:
        x = torch.ones(4, 4, requires_grad=True)
        with profile(activities=CPU, with_flops=True) as profiled:
            (torch.ones(4, 4) @ x).relu().sum().backward()
            work(1)
            with FlopCounterMode(display=False):
                x = x @ x
        return [(a.key, a.count, a.flops) for a in profiled.key_averages() if a.key != "detach"]

    def counted() -> list[tuple[str, int, int]]:
        with LiveBytes():
            return trains()

    alone, found = on(2, trains).per_rank, on(2, counted).per_rank
    assert found == alone and ("PythonDispatchMode", 1, 0) in found[0]


def test_the_loop_of_the_manual():
    def program() -> int:
        with profile(activities=CPU) as profiled:
            for _ in range(3):
                x = torch.ones(4) @ torch.ones(4, 4)
                dist.all_reduce(x)
                profiled.step()
        return len(events_of(profiled))

    assert len(set(on(2, program).per_rank)) == 1


def test_schedules_steps_and_handlers(tmp_path: Path):
    """Ranks may profile different steps, and each writes a file of its own."""

    def program() -> list[list[str]]:
        rank, steps = dist.get_rank(), list[list[str]]()

        def ready(profiled: Any) -> None:
            steps.append([event.trace_name for event in events_of(profiled) if event.name == "ProfilerStep*"])
            tensorboard_trace_handler(str(tmp_path))(profiled)

        plan = schedule(wait=rank, warmup=1, active=2, repeat=2)
        with profile(activities=CPU, schedule=plan, on_trace_ready=ready) as profiled:
            for _ in range(12):
                work(1)
                profiled.step()
        return steps

    first, second, third = on(3, program).per_rank
    assert first == [["ProfilerStep#1", "ProfilerStep#2"], ["ProfilerStep#4", "ProfilerStep#5"]]
    assert second == [["ProfilerStep#2", "ProfilerStep#3"], ["ProfilerStep#6", "ProfilerStep#7"]]
    assert third == [["ProfilerStep#3", "ProfilerStep#4"], ["ProfilerStep#8", "ProfilerStep#9"]]
    workers = [path.name.split(".")[0] for path in tmp_path.iterdir()]
    assert len(workers) == 6 and len(set(workers)) == 3


def test_what_is_exported_can_be_read(tmp_path: Path):
    def program() -> None:
        rank = dist.get_rank()
        settings: Any = {"record_shapes": True, "with_stack": True, "with_flops": True, "profile_memory": True}
        with profile(activities=CPU, **settings) as profiled:
            profiled.add_metadata("note", f"of rank {rank}")
            with record_function(f"part of rank {rank}"):
                work(2)
        profiled.export_chrome_trace(str(tmp_path / f"{rank}.json.gz"))
        profiled.export_stacks(str(tmp_path / f"stacks{rank}"), "self_cpu_time_total")
        (product,) = [a for a in profiled.key_averages(group_by_input_shape=True) if a.key == "aten::mm"]
        assert product.count == 2 and product.input_shapes == [[4, 4], [4, 4]] and product.flops == 2 * 2 * 4**3
        assert product.cpu_memory_usage == 2 * 64
        assert "aten::mm" in profiled.key_averages(group_by_stack_n=2).table(sort_by="cpu_time_total")

    on(2, program)
    for rank in range(2):
        read = json.loads(gzip.decompress((tmp_path / f"{rank}.json.gz").read_bytes()))
        assert read["distributedInfo"]["rank"] == rank and read["note"] == f"of rank {rank}"
        shown = [event for event in read["traceEvents"] if event["ph"] == "X"]
        names = [event["name"] for event in shown]
        assert (
            names.count("aten::mm") == 2 and f"part of rank {rank}" in names and f"part of rank {1 - rank}" not in names
        )
        (part,) = [event for event in shown if event["name"].startswith("part")]
        inside = [event for event in shown if event["name"] == "aten::mm"]
        assert all(part["ts"] <= e["ts"] and e["ts"] + e["dur"] <= part["ts"] + part["dur"] for e in inside)
        assert inside[0]["args"]["Input Dims"] == [[4, 4], [4, 4]] and "work" in inside[0]["args"]["Call stack"]
        assert "test_profiling.py" in (tmp_path / f"stacks{rank}").read_text()


def test_a_profile_on_one_rank_only():
    def program() -> int:
        if dist.get_rank() == 1:
            with profile(activities=CPU) as profiled:
                work(1)
            return counts(profiled)["aten::mm"]
        work(5)
        return 0

    assert on(3, program).per_rank == [0, 1, 0]
    with profile(activities=CPU) as profiled:  # afterwards torch's own is back
        torch.ones(2).add(1)
    assert counts(profiled)["aten::add"] == 1
    assert kind_of_results(profiled) == "_ProfilerResult"


def test_training_with_ddp():
    """The backward pass is the rank's own as well, and the buckets are there."""

    def program() -> dict[str, int]:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with profile(activities=CPU) as profiled:
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
        return counts(profiled)

    for found in on(2, program).per_rank:
        assert (
            found["DistributedDataParallel.forward"] == found["Optimizer.step#SGD.step"] == found["AddmmBackward0"] == 2
        )
        assert found["gloo:all_reduce"] == 2


def test_a_collective_lasts_until_it_is_waited_for():
    def program() -> tuple[list[Any], ...]:
        x, y, others = torch.ones(2), torch.ones(3), group_of([0, 1])
        with profile(activities=CPU, record_shapes=True) as profiled:
            works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=others, async_op=True)]
            with record_function("between"):
                y = torch.ones(4) * 2
            for started in reversed(works):
                started.wait()  # type: ignore[union-attr]
            dist.barrier()
            if dist.get_rank() == 0:
                dist.send(y, 1)
            else:
                dist.recv(y)
        events = events_of(profiled)
        (between,) = [event for event in events if event.name == "between"]
        asked = [event for event in events if event.name.startswith("gloo:")]
        assert all(event.is_async and event.count == 1 for event in asked)
        assert all(event.time_range.end > between.time_range.end for event in asked)
        return [event.name for event in asked], [event.input_shapes for event in asked]

    for rank, (names, shapes) in enumerate(on(2, program).per_rank):
        last = "gloo:recvAnySource" if rank else "gloo:send"
        assert names == ["gloo:all_reduce", "gloo:all_reduce", "gloo:barrier", last]
        assert shapes[:3] == [[[2]], [[3]], []] and shapes[3] == [[4]]


def test_threads_and_failures():
    """A thread has a profile of its own; a rank that fails while it profiles leaves nothing behind."""

    def program() -> int:
        found: list[int] = []

        def beside() -> None:
            with profile(activities=CPU) as profiled:
                torch.ones(2).add(1)
            found.append(counts(profiled)["aten::add"])

        with profile(activities=CPU) as profiled:
            thread = threading.Thread(target=beside)
            thread.start()
            work(1)
            thread.join()
        return found[0] + counts(profiled).get("aten::add", 0)

    def fails() -> None:
        with profile(activities=CPU):
            work(1)
            raise ValueError("in the middle")

    assert on(2, program).per_rank == [1, 1]
    with pytest.raises(RankError, match="in the middle"):
        on(2, fails)
    assert on(2, program).per_rank == [1, 1]
    assert not torch.autograd.profiler._is_profiler_enabled


def test_what_is_not_there_is_refused_by_name():
    def program() -> None:
        with profile(activities=CPU, profile_memory=True, record_shapes=True, with_stack=True) as profiled:
            work(1)
        profiled._memory_profile()

    with pytest.raises(RankError, match="keeps no tree of allocations"):
        on(2, program)


def test_a_later_torch_may_ask_an_event_for_more(monkeypatch: pytest.MonkeyPatch):
    """As torch 2.14 asks for typed_metadata, which 2.13 does not know."""
    known = {name for name in dir(KinetoEvent) if not name.startswith("_")} - {"duration_ns"}
    event = Profiled("aten::mm", thread=1, start_ns=3, end_ns=5)
    assert known <= event.values.keys()
    assert event.name() == "aten::mm" and event.duration_ns() == 2 and event.typed_metadata() == {}
    assert not hasattr(event, "asked_later")
    monkeypatch.setattr(KinetoEvent, "asked_later", lambda event: 1, raising=False)
    assert event.asked_later() is None


def test_twice_at_once_is_refused_in_torchs_words():
    def program() -> None:
        with profile(activities=CPU), profile(activities=CPU):
            work(1)

    with pytest.raises(RankError, match="already enabled on this thread"):
        on(2, program)


def test_one_rank_has_torchs_own():
    def program() -> str:
        with profile(activities=CPU) as profiled:
            work(1)
        return kind_of_results(profiled)

    assert on(1, program).per_rank == ["_ProfilerResult"]
