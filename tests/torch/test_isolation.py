"""Ranks share no memory: what is passed in, sent or received is its owner's alone, and large weights lie there once."""

import copy
import ctypes
import gc
import sys
import threading
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tplab import Mesh, P
from tplab.errors import RankError
from tplab.torch import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    barrier,
    broadcast,
    ppermute,
    reduce_scatter,
    ring_shift,
    run,
    start,
)

MESH = Mesh(tp=3)
SIZES = [0, 1, 3, 30_000]
Pair = namedtuple("Pair", "left right")


def layouts(size: int) -> dict[str, Tensor]:
    """Tensors of 3 x size elements or so, in every kind of memory."""
    numbers = torch.arange(3.0 * size)
    mapped = np.arange(3.0 * size, dtype=np.float32)
    read_only = mapped.copy()
    read_only.flags.writeable = False
    return {
        "contiguous": numbers.reshape(3, size),
        "transposed": numbers.reshape(size, 3).t().contiguous().t() if size else numbers.reshape(0, 3),
        "view into the middle": torch.arange(9.0 * max(size, 1))[2 : 2 + 3 * size].reshape(3, size),
        "every other": torch.arange(6.0 * size)[::2],
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, size),
        "of numpy's memory": torch.from_numpy(mapped),
        "parameter": nn.Parameter(numbers.reshape(3, size).clone()),
        "needs no gradient": nn.Parameter(numbers.reshape(3, size).clone(), requires_grad=False),
        "scalar": torch.tensor(3.0),
    }


CASES = [(kind, size) for size in SIZES for kind in layouts(1)]


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, size", CASES)
def test_an_argument_is_each_ranks_own(kind: str, size: int):
    x = layouts(size)[kind]
    kept = x.detach().clone()

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        arrived = x.detach().clone()
        with torch.no_grad():
            x.add_(100 * (1 + axis_index("tp")))
        barrier()
        return arrived, x

    for rank, (arrived, written) in enumerate(run(program, MESH, x).per_rank):
        assert torch.equal(arrived, kept)
        assert torch.equal(written, kept + 100 * (1 + rank))
    assert torch.equal(x.detach(), kept)


@pytest.mark.parametrize("size", SIZES)
def test_the_caller_and_ranks_of_an_earlier_run_do_not_write_into_each_other(size: int):
    x = torch.arange(float(size))
    first = run(lambda x: x, MESH, x).per_rank
    x.add_(1)
    first[0].mul_(3)
    second = run(lambda x: x, MESH, x).per_rank
    assert torch.equal(second[1], torch.arange(float(size)) + 1)
    assert torch.equal(first[1], torch.arange(float(size)))
    assert torch.equal(first[0], torch.arange(float(size)) * 3)


@pytest.mark.parametrize("size", SIZES)
def test_a_numpy_view_of_an_argument_stays_the_callers(size: int):
    """Memory that NumPy writes to behind torch's back must not have become the ranks'."""
    x = torch.zeros(size)
    view = x.numpy()

    def program(x: Tensor) -> Tensor:
        view[:] = 7
        return x

    for result in run(program, MESH, x).per_rank:
        assert torch.equal(result, torch.zeros(size))
    assert torch.equal(x, torch.full((size,), 7.0))
    x.add_(1)
    assert (view == 8).all()  # and the caller's two names still mean one memory


@pytest.mark.parametrize("size", SIZES)
def test_numpy_arguments_become_tensors_of_each_ranks_own(size: int):
    x = np.arange(float(size))

    def program(x: Tensor, y: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        assert x.dtype == torch.float64
        assert y.shape == (0,) if size == 0 else y.shape == (size,)
        return x.add_(axis_index("tp"))

    for rank, result in enumerate(run(program, MESH, x, x[::-1]).per_rank):
        assert torch.equal(result, torch.arange(float(size), dtype=torch.float64) + rank)
    assert np.array_equal(x, np.arange(float(size)))


def test_numpy_arrays_in_odd_memory():
    big_endian = np.arange(6.0).astype(">f8")
    read_only = np.arange(6.0)
    read_only.flags.writeable = False
    scalar = np.array(4.0)
    out = run(lambda *xs: xs, Mesh(tp=2), big_endian, read_only, scalar, np.arange(12.0).reshape(3, 4)[:, ::-2])
    for a, b, c, d in out.per_rank:
        assert a.tolist() == b.tolist() == [0, 1, 2, 3, 4, 5]
        assert c.shape == () and c.item() == 4
        assert d.tolist() == [[3, 1], [7, 5], [11, 9]]


@pytest.mark.parametrize("size", [6, 6000])
def test_pieces_are_each_ranks_own(size: int):
    x = torch.arange(float(size)).reshape(2, -1)

    def program(x: Tensor) -> Tensor:
        return x.neg_()

    out = run(program, Mesh(dp=2, tp=3), x, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"))
    assert torch.equal(out.value, -x)
    assert torch.equal(x, torch.arange(float(size)).reshape(2, -1))
    out.value.zero_()
    assert not out.per_rank[5].eq(0).any()


@pytest.mark.parametrize("width", [3, 70])
def test_a_module_is_each_ranks_own(width: int):
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    model[0].bias.requires_grad_(False)
    model.tied = model[0].weight
    model.train()
    kept = copy.deepcopy(model.state_dict())

    def program(model: nn.Sequential) -> tuple[Any, Any]:
        assert model.tied is model[0].weight
        assert not model[0].bias.requires_grad
        assert model.training
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1 + axis_index("tp"))
        model(torch.randn(5, width))  # moves the running statistics
        return model[0].weight, model[1].running_mean

    results = run(program, MESH, model).per_rank
    for rank, (weight, _) in enumerate(results):
        assert torch.equal(weight, kept["0.weight"] + (1 + rank))
    assert not torch.equal(results[0][1], results[1][1])
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name


def test_a_model_and_its_optimizer_stay_together():
    """The optimizer that a rank gets steps the parameters of the model that this rank gets, with its state."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    kept, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    def program(things: dict) -> tuple[Tensor, Tensor]:
        model, (optimizer,) = things["model"], things["optimizers"]
        assert model.weight.grad is None  # what was accumulated before the run stays behind, as with processes
        model(torch.ones(2, 40) * (1 + axis_index("tp"))).square().sum().backward()
        optimizer.step()
        return model.weight, optimizer.state[model.weight]["step"]

    for weight, step in run(program, MESH, {"model": model, "optimizers": [optimizer]}).per_rank:
        assert not torch.equal(weight, kept["weight"])
        assert step == 2
    assert torch.equal(model.weight, kept["weight"])
    assert optimizer.state_dict()["state"][0]["step"] == state["state"][0]["step"] == 1


def test_an_argument_given_twice_is_one_tensor_on_each_rank():
    x, w = torch.ones(2000), nn.Linear(2, 2)

    def program(a: Tensor, b: list[Tensor], model: nn.Linear, weight: nn.Parameter) -> bool:
        a.add_(1)
        return a is b[0] and model.weight is weight and isinstance(weight, nn.Parameter)

    assert run(program, MESH, x, [x], w, w.weight).per_rank == [True] * 3


@dataclass
class Settings:
    rate: float
    weights: Tensor
    names: list


class Scaler:
    """An object that can be called and has a state of its own."""

    def __init__(self):
        self.seen = []

    def __call__(self, x):
        self.seen.append(float(x))
        return x


def test_structures_and_objects_are_each_ranks_own():
    given = {
        "list": [torch.zeros(2), 3],
        "pair": Pair(torch.zeros(2000), "name"),
        "ordered": OrderedDict(a=torch.zeros(1), b=None),
        "settings": Settings(0.1, torch.zeros(3), ["a"]),
        "callable": Scaler(),
        "method": Scaler().__call__,
        "generator": torch.Generator().manual_seed(3),
        "text": "text",
        "function": torch.tanh,
        "plain": lambda x: x,
    }

    def program(given: dict) -> tuple:
        one = 1 + axis_index("tp")
        given["list"][0].add_(one)
        given["list"].append(one)
        given["pair"].left.add_(one)
        given["ordered"]["a"].add_(one)
        given["settings"].weights.add_(one)
        given["settings"].names.append(one)
        given["callable"](one)
        given["method"](one)
        barrier()
        return (
            given["list"],
            given["pair"].left[0].item(),
            given["ordered"]["a"].item(),
            given["settings"].weights.tolist(),
            given["settings"].names,
            given["callable"].seen,
            given["method"].__self__.seen,
            torch.rand(1, generator=given["generator"]).item(),
            given["function"] is torch.tanh and given["plain"](2) == 2 and given["text"] == "text",
        )

    draw = torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    for rank, result in enumerate(run(program, MESH, given).per_rank):
        one = rank + 1
        (first, three, last), *rest = result
        assert (first.tolist(), three, last) == ([one, one], 3, one)
        assert rest == [one, one, [one] * 3, ["a", one], [one], [one], draw, True]
    assert given["list"][0].tolist() == [0, 0] and len(given["list"]) == 2
    assert given["settings"].names == ["a"] and given["callable"].seen == []
    assert given["pair"].left.sum() == 0


def test_what_cannot_be_copied_is_named():
    with pytest.raises(TypeError, match=r"argument 1 .*lock.* cannot be copied"):
        run(lambda x, lock: None, MESH, torch.ones(1), threading.Lock())


# --- messages ---------------------------------------------------------------------------------------------------------

OPS = {
    "all_reduce": lambda x: start(all_reduce, x, "tp"),
    "mean": lambda x: start(all_reduce, x, "tp", op="mean"),
    "max": lambda x: start(all_reduce, x, "tp", op="max"),
    "all_gather": lambda x: start(all_gather, x, "tp"),
    "reduce_scatter": lambda x: start(reduce_scatter, x, "tp"),
    "all_to_all": lambda x: start(all_to_all, x, "tp"),
    "broadcast": lambda x: start(broadcast, x, "tp", root=1),
    "ppermute": lambda x: start(ppermute, x, "tp", [(0, 1), (1, 0)]),
    "itself": lambda x: start(ppermute, x, "tp", [(0, 0), (1, 1), (2, 2)]),
    "ring_shift": lambda x: start(ring_shift, x, "tp"),
}


def fresh(kind: str, size: int) -> Tensor:
    """A tensor of this rank's own whose first dim 3 divides."""
    x = (layouts(size)[kind].detach() + 1000 * axis_index("tp")).clone()
    if kind == "scalar":
        return x.reshape(1).expand(3)
    if kind == "transposed":
        return x.contiguous().t().contiguous().t() if x.shape[0] % 3 == 0 else x.t()
    if kind == "view into the middle":
        return torch.cat([torch.zeros(2), x.reshape(-1), torch.zeros(3)])[2:-3].reshape(3, size)
    if kind == "expanded":
        return (torch.arange(3.0) + 1000 * axis_index("tp")).reshape(3, 1).expand(3, size)
    if kind == "of numpy's memory":
        return torch.from_numpy(x.numpy().copy())
    return x


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [0, 3, 3000])
def test_what_is_sent_and_what_is_received_are_two_things(op: str, size: int):
    """Between start and wait the sender overwrites what it sent; afterwards every rank overwrites what it got."""

    def quiet(kind: str) -> Tensor:
        return OPS[op](fresh(kind, size)).wait().clone()

    def noisy(kind: str) -> tuple[Tensor, Tensor]:
        x = fresh(kind, size)
        flight = OPS[op](x)
        _overwrite(x)
        barrier()
        y = flight.wait()
        arrived = y.clone()
        barrier()  # everybody has its own
        y.fill_(-5 - axis_index("tp"))  # must be possible, and must not travel
        barrier()
        assert torch.equal(flight.wait(), torch.full_like(arrived, -5 - axis_index("tp")))
        assert y.is_contiguous()
        return arrived, x

    for kind in layouts(size):
        wanted = run(quiet, MESH, kind).per_rank
        for rank, (arrived, x) in enumerate(run(noisy, MESH, kind).per_rank):
            assert torch.equal(arrived, wanted[rank]), (kind, rank)
            assert x.numel() == 0 or x.max() == -1, (kind, rank)


def _overwrite(x: Tensor) -> None:
    """Write into the memory of x, also where several of its elements are one."""
    torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).fill_(-1)


@pytest.mark.parametrize("size", SIZES)
def test_numpy_views_on_either_side_do_not_travel(size: int):
    def program() -> Tensor:
        x = torch.full((size,), float(axis_index("tp")))
        view = x.numpy()
        y = ring_shift(x, "tp")
        x_again = ring_shift(x, "tp", 2)
        barrier()
        view[:] = 50
        assert torch.equal(x, torch.full((size,), 50.0))
        y.numpy()[:] += 10
        barrier()
        return torch.stack([y, x_again])

    for rank, result in enumerate(run(program, MESH).per_rank):
        wanted = torch.tensor([(rank - 1) % 3 + 10.0, (rank - 2) % 3]).reshape(2, 1).expand(2, size)
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("op", [all_reduce, ring_shift])
def test_writes_that_torch_does_not_see_do_not_travel(op: Any):
    """Through DLPack, and through an address, taken before and after."""

    def program() -> list[Tensor]:
        x, y = (torch.full((5000,), 1.0 + axis_index("tp")) for _ in range(2))
        view = torch.from_dlpack(x)
        address = ctypes.cast(y.data_ptr(), ctypes.POINTER(ctypes.c_float))
        flights = [start(op, sent, "tp") for sent in (x, y)]
        view.fill_(9)
        address[0] = address[4999] = 9
        barrier()
        x, y = (flight.wait() for flight in flights)
        view = torch.from_dlpack(x)
        barrier()
        view.add_(100 * axis_index("tp"))
        barrier()
        return [x, y]

    for rank, (x, y) in enumerate(run(program, Mesh(tp=2)).per_rank):
        wanted = 3.0 if op is all_reduce else 2.0 - rank
        assert torch.equal(x, torch.full((5000,), wanted + 100 * rank))
        assert torch.equal(y, torch.full((5000,), wanted))


@pytest.mark.parametrize("size", [1000, 20_000])
def test_what_a_rank_has_can_be_resized(size: int):
    def program(x: Tensor) -> list[float]:
        found = []
        for own in (x, ring_shift(x, "tp"), all_reduce(x, "tp")):
            own.resize_(3 * size).fill_(1)
            found.append(own.sum().item())
            torch.add(torch.ones(5 * size), 1, out=own.resize_(0))
            found.append(own.sum().item())
        return found

    assert run(program, Mesh(tp=2), torch.ones(size)).per_rank == [[3.0 * size, 10.0 * size] * 3] * 2


def test_a_small_piece_of_a_large_tensor_does_not_carry_all_of_it():
    def program() -> tuple[int, int]:
        large = torch.zeros(1000, 1000)
        piece = ring_shift(large[:2], "tp")
        piece.add_(1)
        column = ring_shift(large[:, :2], "tp")
        return piece.untyped_storage().nbytes(), column.untyped_storage().nbytes()

    assert run(program, Mesh(tp=2)).per_rank == [(8000, 8000)] * 2


BLOCKING = [
    lambda x: all_reduce(x, "tp"),
    lambda x: all_gather(x, "tp"),
    lambda x: reduce_scatter(x, "tp"),
    lambda x: all_to_all(x, "tp"),
    lambda x: broadcast(x, "tp", 1),
    lambda x: ring_shift(x, "tp"),
]


@pytest.mark.parametrize("size", [3, 3000])
def test_lazily_conjugated_and_negated_tensors_arrive_plain(size: int):
    def program() -> list[tuple]:
        x = torch.arange(3 * size).double() * (1 + 1j)
        found = []
        for op in BLOCKING:
            for lazy in (x.conj(), x.conj().imag):
                y = op(lazy)
                same = torch.equal(y, op(lazy.resolve_conj().resolve_neg().clone()))
                found.append((y.is_conj(), y.is_neg(), same))
        return found

    assert run(program, MESH).per_rank == [[(False, False, True)] * 12] * 3


def test_what_arrives_is_contiguous_whatever_was_sent():
    def program() -> list[tuple]:
        x = torch.arange(36.0).reshape(6, 6)
        return [op(y).stride() for op in BLOCKING for y in (x.t(), x[:, ::2], x[:1].expand(6, 6)[:, :3])]

    strides = run(program, MESH).per_rank
    assert strides == [[(6, 1), (3, 1), (3, 1)] * 6] * 3


def test_sparse_tensors_are_refused_with_the_way_out():
    for op in BLOCKING:
        with pytest.raises(RankError, match=r"sends dense tensors, not torch.sparse_coo; x.to_dense\(\)"):
            run(lambda op=op: op(torch.eye(3).to_sparse()), MESH)


def test_results_of_one_collective_are_not_each_others():
    def program() -> Tensor:
        y = all_reduce(torch.ones(5000), "tp")
        y.add_(axis_index("tp"))
        barrier()
        return y

    for rank, result in enumerate(run(program, MESH).per_rank):
        assert torch.equal(result, torch.full((5000,), 3.0 + rank))


def test_results_that_are_sent_on_may_be_written_to():
    """A large result shares its memory with others' until somebody writes to it: here every rank does, in its own way,
    and a result is sent again before."""

    def program() -> list[Tensor]:
        y = all_gather(torch.full((5000,), 1.0 + axis_index("tp")), "tp")
        again = start(all_reduce, y, "tp")
        if axis_index("tp") == 0:
            y.numpy()[:] = 50
        elif axis_index("tp") == 1:
            y.view(3, -1)[1].mul_(10)
        barrier()
        return [y, again.wait()]

    sent = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(5000)
    written = torch.full_like(sent, 50), sent.where(sent != 2, 20), sent
    for (y, again), want in zip(run(program, MESH).per_rank, written, strict=True):
        assert torch.equal(y, want)
        assert torch.equal(again, 3 * sent)


def test_sending_does_not_change_what_autograd_saved():
    """A tensor that is saved for the backward pass, sent, and then written to: torch notices, as without a send."""

    def program() -> None:
        w = torch.ones(5000, requires_grad=True)
        x = w * 2
        y = x.square().sum()
        ring_shift(x, "tp")
        x.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    run(program, Mesh(tp=2))


# --- cost -------------------------------------------------------------------------------------------------------------


SHAPE = (1500, 1000)  # 6 MB


def large(kind: str) -> Any:
    x = torch.arange(1.5e6).reshape(SHAPE)
    if kind == "module":
        layer = nn.Linear(1, 1)
        layer.weight = nn.Parameter(x)
        return layer
    kinds = {"parameter": nn.Parameter, "transposed": Tensor.t, "numpy": Tensor.numpy, "view": lambda x: x[1:]}
    return kinds[kind](x)


@pytest.mark.parametrize("kind", ["parameter", "module", "transposed", "numpy", "view"])
def test_a_large_tensor_that_ranks_get_whole_is_each_ranks_own(kind: str):
    """Whoever writes to it, and however: torch, NumPy, or somebody who has the address."""
    given = large(kind)
    kept = torch.as_tensor(getattr(given, "weight", given)).detach().clone()

    def program(x: Any) -> tuple[Tensor, bool]:
        x = getattr(x, "weight", x).detach()
        same = torch.equal(x, kept) and x.stride() == kept.stride()
        barrier()
        if axis_index("tp") == 0:
            x[0] = -1
        elif axis_index("tp") == 1:
            x.numpy()[0] = -2
        else:
            ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0] = -3
        barrier()
        return x, same

    (zero, *_), (one, *_), (two, *_) = outs = run(program, MESH, given).per_rank
    assert all(same for _, same in outs)
    assert (zero[0] == -1).all() and (one[0] == -2).all() and two[0, 0] == -3
    assert all(torch.equal(x[1:], kept[1:]) for x in (zero, one, two))
    assert torch.equal(torch.as_tensor(getattr(given, "weight", given)).detach(), kept)


def _megabytes() -> int:
    """What this process has in memory; what is there under several addresses counts once."""
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) // 1024 for line in f if line.startswith("Pss:"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of this process from /proc")
def test_a_weight_that_eight_ranks_read_is_copied_once():
    def program(w: Tensor) -> int:
        w.sum()
        barrier()
        return _megabytes()

    w = torch.ones(10_000_000)  # 40 MB
    run(program, Mesh(tp=2), torch.ones(10))
    before = _megabytes()
    assert max(run(program, Mesh(tp=8), w).per_rank) < before + 60
    assert _megabytes() < before + 20


def test_a_run_leaves_nothing_behind():
    """Arguments, results and messages are freed with the last name for them, without waiting for the collector."""

    def program(w: Tensor) -> Tensor:
        flight = start(ring_shift, w * 2, "tp")
        y = all_reduce(w.requires_grad_(), "tp") + flight.wait()
        start(all_reduce, y, "tp").wait().sum().backward()
        start(ring_shift, y, "tp")  # never waited for
        return ring_shift(y.detach(), "tp")

    def num_tensors() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    w = torch.ones(100, 100)
    run(program, Mesh(tp=4), w, cluster="h100")  # torch makes things of its own the first time
    gc.collect()
    gc.disable()
    try:
        before = num_tensors()
        for _ in range(3):
            run(program, Mesh(tp=4), w, cluster="h100")
        assert num_tensors() == before
    finally:
        gc.enable()


def test_an_asynchronous_collective_frees_its_tensors():
    """Nothing in the graph of a started collective holds itself alive."""

    def program() -> list:
        refs = []
        for _ in range(3):
            x = torch.ones(3, requires_grad=True)
            flight = start(all_gather, x * 2, "tp")
            y = flight.wait()
            y.sum().backward()
            refs += [weakref.ref(x), weakref.ref(y), weakref.ref(flight)]
            del x, y, flight
        return refs

    refs = [ref for refs in run(program, Mesh(tp=2)).per_rank for ref in refs]
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
