"""Ranks that are processes do what simulated ranks do: the same results up to rounding, the same messages."""

import os
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tplab import Mesh, P
from tplab.spare import resident_bytes
from tplab.torch import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    barrier,
    broadcast,
    copy_to,
    gather,
    ppermute,
    reduce,
    reduce_scatter,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_shift,
    run,
    scatter,
    start,
)
from tplab.torch.processes import shut_down, warm
from tplab.torch.processes.rank import ProcessRank
from tplab.torch.ranks.rank import this_rank

ROOT = Path(__file__).parents[2]
LARGE = 5000  # float32 elements: more than the bytes of one frame


@pytest.fixture(scope="module", autouse=True)
def _no_processes_are_left():
    yield
    shut_down()


def both(fn, mesh, *args, **given):
    """Run on simulated ranks and on processes: the same results and the same messages, up to rounding, as gloo adds up
    in another order. Returns the processes' result."""
    simulated = run(fn, mesh, *args, **given)
    real = run(fn, mesh, *args, on="processes", **given)
    check_close(real.per_rank, simulated.per_rank)
    sent, expected = messages(real.trace), messages(simulated.trace)
    assert kept(sent) == kept(expected)
    for about, values in sent.items():
        for one, other in zip(values, expected[about], strict=True):
            if one is not None and other is not None:
                check_close(torch.tensor(one), torch.tensor(other), getattr(torch, about[8]))
    assert real.trace.clock == "measured" and real.trace.unit == "s"
    return real


def kept(sent):
    """How often something was sent, and with how many values."""
    return {about: (len(values), sum(x is not None for x in values)) for about, values in sent.items()}


def check_close(found: Any, expected: Any, dtype: torch.dtype | None = None) -> None:
    """The same types and shapes. What was only moved, and whole numbers, are the same; sums are within the rounding of
    `dtype`, in which they were added up."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_close(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        dtype = dtype or expected.dtype
        if bits(found) != bits(expected):
            assert dtype in ROUNDING, "gloo does not add up this type, so it is added up as on simulated ranks"
            largest = float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING[dtype] * max(1.0, largest))
    else:
        assert found == expected


ROUNDING = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-20, torch.float64: 2**-49}
"""Some units in the last place of the largest number: each of up to three additions may round."""


def bits(result):
    """A result as something that compares to the last bit."""
    if isinstance(result, torch.Tensor):
        flat = result.detach().resolve_conj().clone(memory_format=torch.contiguous_format).reshape(-1)
        return result.dtype, tuple(result.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    if isinstance(result, dict):
        return {key: bits(value) for key, value in result.items()}
    return [bits(item) for item in result] if isinstance(result, list | tuple) else result


def messages(trace):
    """Everything in a trace that does not depend on when it happened, each with the values that were kept of it."""
    chunks, found = [*trace.chunks, None], {}
    for e in trace.events:
        if e.kind in ("send", "receive", "collective") or e.chunk >= 0:
            about = e.rank, e.kind, e.op, e.axis, e.group, e.peer, e.bytes, e.shape, e.dtype, e.step
            found.setdefault((*about, chunks[e.chunk], e.contributors, e.where), []).append(e.values)
    for values in found.values():
        values.sort(key=lambda x: [] if x is None else x.reshape(-1).tolist())
    return found


# --- the same as simulated -------------------------------------------------------------------------------------------


def every_collective(x):
    """x has 12 rows. Along one axis, or along both, in both orders; a group of one too."""
    results = {}
    for axis in ("tp", "dp", ("dp", "tp"), ("tp", "dp")):
        size, index = axis_size(axis), axis_index(axis)
        mine = x * (index + 1) + axis_index(("dp", "tp"))
        for op in ("sum", "mean", "max", "min"):
            results[axis, "all_reduce", op] = all_reduce(mine, axis, op)
            results[axis, "reduce_scatter", op] = reduce_scatter(mine, axis, 0, op)
        results[axis, "all_gather"] = all_gather(mine, axis, 1)
        results[axis, "uneven"] = all_gather(mine[:index], axis)
        results[axis, "all_to_all"] = all_to_all(mine, axis, 0, 1)
        results[axis, "broadcast"] = broadcast(mine, axis, size - 1)
        for op in ("sum", "mean", "max"):
            results[axis, "reduce", op] = reduce(mine, axis, size - 1, op)
        results[axis, "gather"] = gather(mine[: index + 1], axis, size - 1)
        results[axis, "scatter"] = scatter(mine, axis, size - 1)
        results[axis, "shift"] = ring_shift(mine, axis, -2)
        results[axis, "shapes"] = ring_shift(mine[:index], axis)
        results[axis, "ppermute"] = ppermute(mine, axis, [(0, size - 1)]), ppermute(mine, axis, [])
        barrier(axis)
    barrier()
    return results


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(dp=3, tp=1), Mesh(dp=1, tp=1)], ids=str)
@pytest.mark.parametrize("columns", [3, 700], ids=["small", "large"])
def test_every_collective(mesh, columns):
    both(every_collective, mesh, torch.randn(12, columns, generator=torch.Generator().manual_seed(1)))


def test_torch_distributed_carries_the_tensors_in_a_group_per_axis():
    def program():
        rank = cast(ProcessRank, this_rank())
        for op in (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast):
            op(torch.ones(2), "tp")
        ring_shift(torch.ones(1), "dp")  # a message needs no group
        barrier()
        return {group: type(backend) for (group, _), backend in rank.engine._backends.items()}

    gloo = dist.ProcessGroupGloo
    groups = run(program, Mesh(dp=2, tp=2), on="processes").per_rank
    assert groups == [{group: gloo, (0, 1, 2, 3): gloo} for group in ((0, 1), (0, 1), (2, 3), (2, 3))]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes():
    moved = [
        torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
        torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
        torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    ]  # fmt: skip
    added = [dtype for dtype in moved if dtype is not torch.bool]

    def program(x):
        results = []
        for dtype in moved:
            y = (x + axis_index("tp")).to(dtype)
            results += [all_gather(y, "tp"), ring_shift(y, "tp"), broadcast(y, "tp", 1), all_to_all(y, "tp")]
            results += [gather(y, "tp", 1), scatter(y, "tp", 1)] if dtype is not torch.float8_e8m0fnu else []
            if dtype in added:
                results += [all_reduce(y, "tp"), reduce_scatter(y, "tp")]
                results += [reduce(y, "tp", 1)] if dtype is not torch.float8_e8m0fnu else []  # it has no zero
        return results

    for size in (6, 3 * LARGE):
        both(program, Mesh(tp=3), torch.arange(size) % 50 * 0.37)


def test_awkward_shapes():
    def program():
        i = axis_index("tp")
        scalar, nothing = torch.tensor(2.5 + i), torch.zeros(0, 3)
        large = torch.arange(4.0 * LARGE).reshape(4, LARGE) / 7 + i
        columns = large.t()[:, 1:]  # strided, 3 columns
        results = [all_reduce(scalar, "tp"), ring_shift(scalar, "tp"), broadcast(scalar, "tp", 2)]
        results += [op(nothing, "tp") for op in (all_reduce, all_gather, reduce_scatter, all_to_all, ring_shift)]
        results += [op(nothing, "tp", 1) for op in (reduce, gather, scatter)] + [reduce(scalar, "tp", 1)]
        results += [all_reduce(nothing.t(), "tp", "max"), all_gather(torch.ones(i * LARGE), "tp")]
        results += [op(columns, "tp", 1) for op in (all_gather, reduce_scatter, all_to_all)]
        results += [gather(columns, "tp", 2, 1), scatter(columns, "tp", 2, 1), gather(torch.ones(i, 3), "tp", 1)]
        nan = torch.arange(6.0).where(torch.arange(6) % 3 != i, torch.nan)  # which would come first or last on a ring
        results += [op(nan, "tp", op=how) for op in (all_reduce, reduce_scatter, reduce) for how in ("max", "min")]
        results += [all_reduce(columns, "tp"), ring_shift(columns, "tp"), all_reduce(large[:, :4099], "tp", "mean")]
        conj = torch.view_as_complex(large[:, :2].contiguous()).conj()  # conjugate, and negative, only once it is read
        one = torch.arange(2.0)[::2]  # of one element, with a stride of 2
        results += [op(x, "tp") for op in (all_reduce, all_gather, ring_shift) for x in (conj, conj.imag, one)]
        return [*results, start(broadcast, one, "tp").wait(), ppermute(conj, "tp", [(i, i) for i in range(3)])]

    both(program, Mesh(tp=3))


@pytest.mark.parametrize("rows", [lambda i, j: (i + j) % 3, lambda i, j: 0, lambda i, j: 2 * (i == 0 and j == 1)])
def test_pieces_of_different_sizes(rows):
    """As tokens travel to experts: also none, and from one rank to another alone."""

    def program(rows):
        i, num_ranks = axis_index("tp"), axis_size("tp")
        sizes = [rows(i, j) for j in range(num_ranks)]
        received = all_to_all(torch.tensor(sizes), "tp").tolist()
        x = (torch.arange(2.0 * sum(sizes)).reshape(-1, 2) + 10 * i).requires_grad_()
        y = all_to_all(x, "tp", sizes=sizes, received=received)
        (y * (i + 1)).sum().backward()
        started = start(all_to_all, x.detach().bfloat16(), "tp", sizes=sizes, received=received)
        return y.detach(), x.grad, started.wait()

    for ranks in (1, 3):
        both(program, Mesh(tp=ranks), rows)


def test_handles():
    def program(size):
        i = axis_index("tp")
        x = torch.arange(float(size)) + i
        up, down = start(ring_shift, x, "tp", 1), start(ring_shift, x * 2, "tp", -1)  # of two ranks, both to one
        total, whole = start(all_reduce, x, "tp"), start(all_gather, x, "dp")
        x += 100  # does not travel
        y = down.wait() + up.wait()
        results = [y, whole.wait(), total.wait(), total.wait()]
        with torch.inference_mode():
            mean = start(all_reduce, x, "tp", "mean")
            results += [mean.wait(), start(all_gather, mean.wait(), "dp").wait()]
        over_dp, over_tp = start(all_reduce, x, "dp"), start(all_reduce, x, "tp")
        first, second = (over_dp, over_tp) if i else (over_tp, over_dp)  # ranks wait in different orders
        return [*results, first.wait(), second.wait()]

    for size in (5, LARGE, 40 * LARGE):
        both(program, Mesh(dp=2, tp=2), size)


def test_what_nobody_waits_for_does_not_reach_the_next_run():
    def program(x):
        start(ring_shift, x, "tp")
        return x

    def shifted(x):
        return ring_shift(x + axis_index("tp"), "tp")

    for size in (3, LARGE):
        both(program, Mesh(tp=2), torch.ones(size))
        both(shifted, Mesh(tp=2), torch.zeros(size))


def test_gradients():
    def program(x, w):
        results = []
        for blocking in (True, False):

            def go(op, *args, blocking=blocking, **kwargs):
                return op(*args, **kwargs) if blocking else start(op, *args, **kwargs).wait()

            y = go(all_gather, copy_to(x, "tp") @ w, "tp", 1).tanh()
            y = y + go(ring_shift, y * (axis_index("tp") + 1), "tp") + go(ppermute, y, "tp", [(0, 1)])
            y = go(reduce_scatter, y, "tp", 1, "mean") + go(all_to_all, y, "tp", 1, 0)[: y.shape[0], : w.shape[1]]
            y = y + go(scatter, go(gather, y, "tp", 1, 1), "tp", 1, 1) + go(reduce, y, "tp", 0, "max")
            y = go(all_reduce, y.sin(), "tp") + go(broadcast, y, "tp", 1) + go(all_reduce, y, "tp", "max")
            results += [y, *torch.autograd.grad(y.square().sum(), (x, w))]
        return results

    weights = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    x = torch.linspace(-1, 1, 18).reshape(3, 6).requires_grad_()
    real = both(program, Mesh(tp=2), x, weights, in_specs=(P(), P(None, "tp")))
    assert not any(tensor.requires_grad for tensor in real.per_rank[0])
    assert real.per_rank[0][2].abs().sum() > 0


@pytest.mark.parametrize("direction", ["up", "down", "both", "split"])
def test_rings(direction):
    def program(x):
        i = axis_index("tp")
        gathered = ring_all_gather({"a": x + i, "b": x[:1] * i}, "tp", direction)
        scattered = ring_reduce_scatter(list((x.reshape(3, 2) * (i + 1)).unbind()), "tp", direction)
        return [gathered, scattered, ring_all_reduce(x * i, "tp", direction)]

    both(program, Mesh(tp=3), torch.arange(6.0))


def test_random_numbers():
    def program(module):
        x = torch.nn.functional.dropout(torch.randn(33, 4), 0.3)
        return module(all_reduce(x, "tp")), torch.rand(3)

    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    first, again, other = (both(program, Mesh(tp=2), module, seed=seed) for seed in (7, 7, 8))
    assert bits(first.per_rank) == bits(again.per_rank) != bits(other.per_rank)
    assert not torch.equal(first.per_rank[0][1], first.per_rank[1][1])
    assert torch.equal(before, torch.get_rng_state())


def test_arguments_and_results():
    tied = nn.Linear(3, 3, bias=False)
    module = nn.ModuleList([tied, tied])
    whole = torch.arange(60_000.0).reshape(6, 10_000)

    def program(x, array, rest, model):
        x += 1  # each rank's own
        model[0].weight.data.zero_()
        return {"x": x, "array": array, "rest": [rest["n"], rest["t"] * 2], "tied": model[1].weight.sum()}

    specs = (P("tp"), P(None, "tp"), None, None)
    out = {"x": P("tp"), "array": P(None, "tp"), "rest": P(), "tied": P()}
    args = whole, np.arange(8.0).reshape(2, 4), {"n": 3, "t": torch.ones(2)}, module
    real = both(program, Mesh(tp=2), *args, in_specs=specs, out_specs=out)
    assert torch.equal(real.value["x"], whole + 1) and whole[0, 0] == 0
    assert real.value["tied"] == 0 and tied.weight.abs().sum() > 0


def test_settings_of_the_caller_hold():
    def program():
        y = torch.ones(2, requires_grad=True) * 2
        product = torch.ones(2, 2, dtype=torch.float32) @ torch.ones(2, 2, dtype=torch.float32)
        return torch.zeros(1).dtype, y.requires_grad, product.dtype, os.getcwd()

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            real = run(program, Mesh(tp=2), on="processes")
    finally:
        torch.set_default_dtype(default)
    assert real.per_rank == [(torch.float64, False, torch.bfloat16, os.getcwd())] * 2
    assert run(lambda: torch.zeros(1).dtype, Mesh(tp=2), on="processes").per_rank == [torch.float32] * 2


def test_each_process_gets_its_share_of_the_threads():
    shares = run(torch.get_num_threads, Mesh(tp=2), on="processes").per_rank
    assert shares == [max(1, torch.get_num_threads() // 2)] * 2


def test_trace_is_measured(tmp_path):
    arrived = tmp_path / "arrived"

    def program():
        x = torch.ones(400, 400) * axis_index("tp")
        handle = start(ring_shift, x, "tp")
        for _ in range(3):
            x = x @ x / 400
        y = handle.wait()
        if axis_index("tp") == 0:
            arrived.touch()
        else:
            while not arrived.exists():  # on a busy machine rank 0 comes late
                time.sleep(0.01)
            time.sleep(1.0)
        return all_reduce(y.sum() + x.sum(), "tp")

    trace = run(program, Mesh(tp=2), on="processes").trace
    sends, receives = trace.select(kind="send"), trace.select(kind="receive")
    assert {(e.message, e.start, e.end, e.rank) for e in sends.events} == {
        (e.message, e.start, e.end, e.peer) for e in receives.events
    }
    assert trace.start == 0 and trace.busy()[1] > 1
    first, second = trace.select(kind="collective").events
    assert first.message == second.message and first.start == second.start > 1
    (wait,) = trace.select(kind="wait", rank=0, op="all_reduce").events
    assert wait.duration > 0.1  # rank 0 stood still while rank 1 slept
    assert trace.select(kind="send").events[0].values is None


def test_values_are_kept_of_as_many_messages_as_asked():
    def program():
        return [all_reduce(torch.ones(2), "tp") for _ in range(10)]

    events = run(program, Mesh(tp=2), on="processes", keep_values=8).trace.select(kind="collective").events
    assert sum(event.values is not None for event in events) == 8


# --- where a function comes from -------------------------------------------------------------------------------------


def in_a_module(x):
    return all_reduce(x, "tp")


def test_a_function_of_a_module():
    both(in_a_module, Mesh(tp=2), torch.ones(2))


def test_functions_of_a_notebook():
    """As in a cell: code without a file, in a `__main__` that no other process has."""
    cells = textwrap.dedent("""
        from dataclasses import dataclass
        import torch
        from tplab.torch import all_reduce, axis_index

        scale = torch.tensor(3.0)

        @dataclass
        class Pair:
            total: object
            index: int

        def helper(x):
            return x * scale

        def program(x):
            return Pair(all_reduce(helper(x), "tp"), axis_index("tp"))

        def make(n):
            return lambda x: all_reduce(x * n + scale, "tp")

        closure = make(4)
    """)
    main, ours = types.ModuleType("__main__"), sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(compile(cells, "<cell>", "exec"), main.__dict__)
        pairs = run(main.program, Mesh(tp=2), torch.ones(2), on="processes").per_rank
        assert [(type(pair), pair.total.tolist(), pair.index) for pair in pairs] == [
            (main.Pair, [6, 6], 0),
            (main.Pair, [6, 6], 1),
        ]
        both(main.closure, Mesh(tp=2), torch.ones(2))
        both(main.closure, Mesh(tp=2), torch.ones(3))  # a second time: what was shipped before is not in the way
        main.__dict__["scale"] = torch.tensor(5.0)
        both(main.closure, Mesh(tp=2), torch.ones(3))
    finally:
        sys.modules["__main__"] = ours


def test_a_module_that_was_edited_is_imported_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "tplab_test_edited.py"
    file.write_text("def program():\n    return 1\n")
    import tplab_test_edited  # type: ignore[import-not-found]

    assert run(tplab_test_edited.program, Mesh(tp=2), on="processes").per_rank == [1, 1]
    file.write_text("def program():\n    return 22\n")
    os.utime(file, (1, 1))
    assert run(tplab_test_edited.program, Mesh(tp=2), on="processes").per_rank == [22, 22]
    del sys.modules["tplab_test_edited"]


def test_what_ranks_print(capsys):
    def program():
        print("first\nline of", axis_index("tp"))
        barrier()
        print("second", end="")
        print("careful", file=sys.stderr)

    run(program, Mesh(tp=2), on="processes")
    out, err = capsys.readouterr()
    lines = [["first", f"line of {rank}", "second"] for rank in (0, 1)]
    assert out.splitlines() == [f"[rank {rank}] {line}" for rank in (0, 1) for line in lines[rank]]
    assert err.splitlines() == ["[rank 0] careful", "[rank 1] careful"]


# --------------------------------------------------------------------------------------------------------- at rest


def soon(is_so):
    """Whether something comes true; it is given much more time than it needs."""
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_processes_end_when_no_other_run_follows(monkeypatch):
    monkeypatch.setattr(warm, "SECONDS_AT_REST", 0.2)
    monkeypatch.setattr(warm, "SECONDS_TO_KEEP", 0.3)
    pids = run(os.getpid, Mesh(tp=2), on="processes").per_rank
    launcher = run(os.getppid, Mesh(tp=1), on="processes").per_rank[0]
    assert soon(lambda: not any(map(is_running, [*pids, launcher])))
    monkeypatch.setattr(warm, "SECONDS_AT_REST", 600.0)
    torch.optim.SGD([torch.ones(1, requires_grad=True)])  # imports torch's compiler: 70 MB, which ranks have in common
    assert run(lambda: "torch._dynamo" in sys.modules, Mesh(tp=2), on="processes").per_rank == [True, True]
    again = [run(os.getpid, Mesh(tp=2), on="processes").per_rank for _ in range(3)]
    assert again[0] == again[1] == again[2] != pids  # which are warm as long as runs follow


def test_processes_at_rest_return_what_they_have_freed():
    """Below a tensor that stays, the C library keeps all that is freed."""

    def fill():
        held = [torch.ones(25_000) for _ in range(2000)]
        sys.stays = torch.ones(25_000)  # type: ignore[attr-defined]
        del held
        return resident_bytes()

    def held():
        return run(resident_bytes, Mesh(tp=2), on="processes").per_rank

    before = held()
    filled = run(fill, Mesh(tp=2), on="processes").per_rank
    assert all(now - then > 150_000_000 for now, then in zip(filled, before))

    def is_returned():
        time.sleep(1.0)  # at rest
        return all(now - then < 50_000_000 for now, then in zip(held(), before))

    assert soon(is_returned)
