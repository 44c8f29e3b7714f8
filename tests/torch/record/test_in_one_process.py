"""What a rank notes, looked at without other processes: torch's fake backend answers at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tplab.torch.record import start
from tplab.torch.record.group import RecordedGroup, Watched
from tplab.torch.record.listener import Heard, Listener
from tplab.torch.record.notes import Notes
from tplab.trace import merge
from tplab.trace.recorded.rank_file import ANY, read


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_group_that_gets_the_name_of_one_before_is_another(tmp_path: Path):
    """After destroy_process_group, torch names groups from 0 again."""
    x = torch.ones(4)
    for rank in range(4):
        recording = start(tmp_path)
        for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
            with world(rank, 4):
                groups = [dist.new_group(pair) for pair in pairs]
                mine = next(group for pair, group in zip(pairs, groups, strict=True) if rank in pair)
                dist.all_reduce(x, group=mine)
        recording.stop()
    merged = merge(tmp_path)
    met = {(event.rank, event.group) for event in merged.trace.select(kind="collective").events}
    first = {(rank, pair) for pair in ((0, 1), (2, 3)) for rank in pair}
    second = {(rank, pair) for pair in ((0, 2), (1, 3)) for rank in pair}
    assert met == first | second
    assert len({event.message for event in merged.trace.select(kind="collective").events}) == 4


class Polled(dist.Work):
    """The work of a message, on a backend that has no futures: done when it is asked for the second time."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked == 2

    def get_future(self) -> None:
        raise NotImplementedError

    def _source_rank(self) -> int:
        return 1


def test_a_message_that_is_asked_for_until_it_is_there(tmp_path: Path):
    notes = Notes(tmp_path)
    notes.joined(None, 0, 2, is_world=True)
    notes.meet("0", "default_pg", [0, 1])
    heard = Heard("receive", 8, (1,), "float64", "", ANY, 0, True, None)
    work = Watched(notes, [(notes.begin("0", heard), heard)], Polled(), lambda position: position)
    assert [work.is_completed(), work.is_completed()] == [False, True]
    notes.close()
    (received,) = read(tmp_path / "rank0.jsonl").operations
    assert received.peer == 1 and received.end is not None


class NotYetToldOf:
    """A future that has woken who waits for it, and has not called back yet."""

    def done(self) -> bool:
        return True


def test_what_is_done_at_the_end_of_a_backward_pass_was_waited_for(tmp_path: Path):
    """Even if its future calls back only after the rank has gone on."""
    notes = Notes(tmp_path)
    notes.joined(None, 0, 2, is_world=True)
    notes.meet("0", "default_pg", [0, 1])
    heard = Heard("all_reduce", 8, (1,), "float64", "sum", None, 0, True, None)
    begun = [(notes.begin("0", heard), heard)]
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: notes.watch_backward(begun, NotYetToldOf()))
    x.square().backward()
    notes.close()
    found = read(tmp_path / "rank0.jsonl")
    assert found.operations[0].end is not None
    assert [wait.operation.op for wait in found.waits] == ["all_reduce"]


class FakeEvent:
    """An event of a GPU that comes to it (1 + index of the GPU) hours after the one before."""

    def __init__(self, enable_timing: bool):
        self.gpu = -1

    def record(self, stream: int | None = None) -> None:
        self.gpu = FakeDevice.current
        assert stream in (None, self.gpu)

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.gpu == later.gpu >= 0, "CUDA refuses events of two GPUs"
        return 3600e3 * (1 + later.gpu)


class FakeDevice:
    """`torch.cuda.device`."""

    current = 0

    def __init__(self, gpu: int):
        self.gpu = gpu

    def __enter__(self) -> None:
        self.before, FakeDevice.current = FakeDevice.current, self.gpu

    def __exit__(self, *_: object) -> None:
        FakeDevice.current = self.before


def test_each_gpu_has_a_clock_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where a program never says which GPU is the current one, and so it is always GPU 0."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "device", FakeDevice)
    monkeypatch.setattr(torch.cuda, "Stream", lambda gpu: gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    recording, now = start(tmp_path), time.perf_counter()
    with world(0, 2), FakeTensorMode():
        for gpu in (1, 0, 1):
            dist.all_reduce(torch.empty(4, device=f"cuda:{gpu}"))
    recording.stop()
    begins = [operation.begin - now for operation in read(tmp_path / "rank0.jsonl").operations]
    assert [round(begin / 3600) for begin in begins] == [2, 1, 2]


def test_a_gather_into_one_tensor_is_noted_as_a_gather():
    opts = dist.GatherOptions()  # type: ignore[attr-defined]
    opts.rootRank, opts.asyncOp = 2, False
    x = torch.ones(2, 3)
    for rank, num_bytes in ((0, 24), (2, 0)):
        listener = Listener(rank, range(3), "world")
        (one,) = listener.hear("gather_single", (torch.empty(18), x, opts), {})
        (several,) = listener.hear("gather", ([[torch.empty(2, 3)] * 3], [x], opts), {})
        assert one == several and (one.op, one.num_bytes) == ("gather", num_bytes)
    assert ("gather_single" in vars(RecordedGroup)) == hasattr(dist, "gather_single")  # torch has it since 2.14
