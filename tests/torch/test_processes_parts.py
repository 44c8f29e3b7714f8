"""The parts that ranks as processes are made of: the verdict on who waits for whom, and parcels."""

import multiprocessing.reduction
import os
import pickle
import queue
import socket
import stat
from multiprocessing.connection import Pipe
from pathlib import Path
from threading import Thread
from types import CodeType
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tplab import Mesh
from tplab.errors import CollectiveMismatchError, DeadlockError, ShapeError
from tplab.torch import run
from tplab.torch.processes.frames import Header, Side, decode, empty_frame, encode
from tplab.torch.processes.parcels import Parcel, Received, receive, send
from tplab.torch.processes.program import Raised, error_of
from tplab.torch.processes.waits import Report, Wait, verdict
from tplab.trace.label import Label


def side(rank, op="all_reduce", shape=(3,)):
    return Side(rank, (op, "tp", ("sum",)), "float32", shape, shape, "file.py:1")


def report(rank, number, missing, group=(0, 1, 2), op="all_reduce"):
    """Rank `rank` waits in its collective `number` for `missing`; None: it has returned after so many."""
    calls = {(group, n): side(rank, op) for n in range(number + (missing is not None))}
    wait = None if missing is None else Wait(side(rank, op), group, number, missing)
    return Report(rank, wait, {group: len(calls)}, calls)


def test_verdict():
    mesh = Mesh(tp=3)

    def judged(*reports):
        return verdict({one.rank: one for one in reports}, mesh)

    assert judged() is None
    assert judged(report(0, 0, (1,)), report(1, 0, (2,))) is None  # rank 2 is running
    assert judged(*(report(rank, 0, ((rank + 1) % 3,)) for rank in range(3))) is None  # all have begun: on its way
    assert judged(report(0, 1, (1,)), report(1, 0, (2,)), report(2, 0, (1,))) is None  # 1 and 2 can go on, then 0
    assert judged(report(0, 0, None), report(1, 0, None), report(2, 0, None)) is None  # all have returned
    stuck = judged(report(0, 1, (1, 2)), report(1, 1, None), report(2, 1, (1,)))
    assert isinstance(stuck, DeadlockError)
    assert "rank 0 waits in all_reduce(x, 'tp', 'sum') at file.py:1 for rank 1\n" in str(stuck)
    assert "rank 1 has returned" in str(stuck)
    circle = [report(0, 1, (1,)), report(1, 0, (2,), (1, 2)), report(2, 0, (0,), (0, 2))]
    assert isinstance(judged(*circle), DeadlockError)
    other = judged(report(0, 0, (1,)), report(1, 2, None, op="barrier"))
    assert isinstance(other, CollectiveMismatchError) and "barrier" in str(other)


def sent(content):
    return Received(Parcel(content, shared=False).body).open()


def test_parcels():
    base = torch.arange(20_000.0)
    content = {"whole": base, "view": base[5:8], "t": base.reshape(2, -1).t(), "empty": torch.zeros(0, 2), "n": 3}
    there = sent(content)
    assert all(torch.equal(there[key], content[key]) for key in ("whole", "view", "t")) and there["n"] == 3
    assert there["empty"].shape == (0, 2) and there["t"].stride() == (1, 10_000)
    there["whole"][5] = -1
    assert there["view"][0] == -1 and base[5] == 5  # views stay views, of other memory
    assert base.nbytes < len(Parcel(content, shared=False).body) < 1.1 * base.nbytes  # once, not thrice
    module = nn.Linear(2, 2)
    pair = sent([module, module.weight])
    assert pair[0].weight is pair[1] and pair[1].requires_grad
    assert sent(lambda x: x + base[3])(1) == 4


@pytest.fixture
def impatient():
    """A program's own limit for sockets."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(60)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.usefixtures("impatient")
def test_parcels_pass_while_both_sides_listen(monkeypatch):
    monkeypatch.setattr(multiprocessing.reduction, "ACKNOWLEDGE", True)  # as on macOS
    ends, got = Pipe(), queue.SimpleQueue[float]()

    def listen(end):
        while (parcel := receive(end)) is not None:
            got.put(parcel.open().sum().item())

    for end in ends:
        Thread(target=listen, args=(end,), daemon=True).start()
    for end in (*ends, *ends):
        Thread(target=send, args=(end, torch.ones(100_000)), daemon=True).start()
        assert got.get(timeout=5) == 100_000
    assert all(os.get_blocking(end.fileno()) for end in ends)


def test_a_parcel_of_a_side_that_is_gone():
    ours, theirs = Pipe()
    theirs.send(True)  # that memory follows
    theirs.close()
    assert receive(ours) is None and receive(ours) is None
    with pytest.raises(ConnectionError):
        send(ours, torch.ones(100_000))


CELL = """
def factor(): return [2 for _ in range(1)]
class Layer:
    def __init__(self, x): self.double = lambda: [factor()[0] * y for y in (x,)]
    @property
    def doubled(self): return self.double()
    @staticmethod
    def broken(): raise LayerError(1)
class LayerError(Exception):
    def __init__(self, code): super().__init__(code)
def program(x):
    def inner(): return Layer(x)
    return inner
"""


@pytest.mark.parametrize("cloudpickle_keeps_the_file", [True, False])
def test_a_function_arrives_with_its_file_and_lines(cloudpickle_keeps_the_file, monkeypatch):
    if not cloudpickle_keeps_the_file:  # as from cloudpickle 3.1.3 on
        table = cloudpickle.Pickler.dispatch_table
        reduce = table[CodeType]
        monkeypatch.setitem(table, CodeType, lambda code: reduce(code.replace(co_filename="<dynamic-code>")))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, "/tmp/ipykernel_1/27.py", "exec"), names)
    there = sent(names["program"])(21)
    layer = there()
    assert layer.doubled == [42]
    with pytest.raises(Exception, match="1") as caught:
        layer.broken()
    error = caught.value
    in_cell = [there, there.__globals__["factor"], type(layer).doubled.fget, layer.double, type(error).__init__]
    for function in [*in_cell, layer.broken]:
        for code in nested(function.__code__):
            assert code.co_filename == "/tmp/ipykernel_1/27.py"
    assert caught.traceback[-1].frame.code.raw.co_filename == "/tmp/ipykernel_1/27.py"
    assert caught.traceback[-1].lineno == CELL.split("\n").index("    def broken(): raise LayerError(1)")
    assert str(caught.traceback[0].path) == __file__
    assert sent(sent.__code__).co_filename == __file__


def nested(code):
    """A code object and all that are in it."""
    return [code] + [found for const in code.co_consts if isinstance(const, CodeType) for found in nested(const)]


def test_what_ranks_tell_each_other_survives_the_way():
    header = Header(side(1, "all_gather", (2, 3)), 4, Label(7, (0, 2)))
    long = header._replace(side=header.side._replace(held="\N{FIRE}\ud800" * 500))
    for sent in (header, long):
        frame, buffer = encode(sent), empty_frame()
        buffer[: len(frame)] = frame
        assert decode(buffer) == sent
    for told in (report(0, 2, (1,)), report(1, 3, None)):
        assert Report.from_text(told.to_text()) == told
    said = Raised(b"a pickle", "ShapeError", "too small", "cell 1, line 2", [("file.py", 3, "f")], False, True)
    rank, there = Raised.from_text(said.to_text(2))
    assert rank == 2 and there.error is None
    assert isinstance(error_of(2, there, Mesh(tp=3), {}), ShapeError)


def test_nothing_that_comes_over_a_socket_is_unpickled():
    class Spy:
        def __reduce__(self):
            return pytest.fail, ("a pickle was opened",)

    with pytest.raises(ValueError, match=r"JSON|codec"):
        Header.from_text(pickle.dumps(Spy()))
    with pytest.raises(ValueError, match=r"JSON|codec"):
        Report.from_text(pickle.dumps(Spy()))


def test_ranks_meet_where_only_this_user_can_look():
    def program():
        store: Any = dist.distributed_c10d._get_default_store()
        return stat.S_IMODE(Path(store.underlying_store.path).parent.stat().st_mode)

    assert run(program, Mesh(tp=2), on="processes").per_rank == [0o700, 0o700]
