"""What overlaps takes place in the order of modelled time, whatever ranks are called and whoever had the turn first."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.cost.event_simulator import BANDWIDTH, LATENCY, Op, random_programs, renamed, simulated
from tests.torch.distributed.test_collectives import group_of
from tplab import Mesh, Trace
from tplab.cost import Chip, Cluster, Link
from tplab.errors import CrossedOrderWarning, DeadlockError
from tplab.torch import Result, all_reduce, axis_index, receive, ring_shift, run, send, start
from tplab.torchrun import main as torchrun

CHIP = Chip("z", {"float32": 1e9}, 1e9, 1e9)
SLOW = Cluster("c", CHIP, Link("i", 1e-6, 1e6))
WIRE = Cluster("w", CHIP, Link("wire", LATENCY, BANDWIDTH))
HALF, WORK = torch.ones(125_000), torch.ones(25_000_000)  # 0.5 s on the link; 0.2 s of computing
SUM = 0.5 + 2e-6  # s: a ring all_reduce of HALF over 2 ranks


def events(out: Result, names: list[int] | None = None) -> list[tuple]:
    """What happened and when; rank r is called names[r]."""
    name = list(out.trace.mesh.ranks) if names is None else names
    return sorted(
        (name[e.rank], e.kind, e.op, e.start, e.end, -1 if e.peer is None else name[e.peer], e.step)
        for e in out.trace.events
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_collective_that_all_have_called_does_not_wait_for_a_later_message(num_ranks: int):
    def program(busy: int) -> None:
        here, other = axis_index("dp"), (busy + 1) % num_ranks
        total = start(all_reduce, HALF, "dp")
        if here == busy:
            torch.neg(WORK)
            send(HALF, "dp", other)
        total.wait()
        if here == other:
            receive("dp", busy)

    seconds = 2 * (num_ranks - 1) * (1e-6 + 0.5 / num_ranks)
    outs = [run(program, Mesh(dp=num_ranks), busy, cluster=SLOW) for busy in range(num_ranks)]
    for busy, out in enumerate(outs):
        (span,) = {(e.start, e.end) for e in out.trace.events if e.kind == "collective"}
        assert span == pytest.approx((0.0, seconds))
        assert out.trace.makespan == pytest.approx(seconds + 0.5 + 1e-6)
        names = [(rank + busy) % num_ranks for rank in range(num_ranks)]
        assert events(outs[0], names) == events(out)


def test_several_axes():
    """Each rank of a row starts a sum over its column; the last row's rank computes first and is late."""

    def program(late: int) -> None:
        row, column = axis_index("dp"), axis_index("tp")
        if row == late:
            torch.neg(WORK)
        up = start(all_reduce, HALF, "dp")
        if column == 0 and row != late:
            ring_shift(HALF, "tp")  # leaves at once: the sum is not ready yet
        elif row != late:
            ring_shift(HALF, "tp")
        up.wait()
        if row == late:
            ring_shift(HALF, "tp")

    outs = [run(program, Mesh(dp=2, tp=2), late, cluster=SLOW) for late in range(2)]
    for late, out in enumerate(outs):
        sent = {row: {e.start for e in out.trace.events if e.kind == "send" and e.rank // 2 == row} for row in (0, 1)}
        assert sent[1 - late] == {0.0}
        assert sorted(sent[late]) == pytest.approx([0.5 + SUM])
    assert events(outs[0], [2, 3, 0, 1]) == events(outs[1])


def test_a_sum_over_one_axis_is_not_held_up_by_one_over_another_that_is_ready_later():
    def program(late: int) -> None:
        here = axis_index("dp"), axis_index("tp")
        rows = start(all_reduce, HALF, "tp") if here[0] != late else None
        columns = start(all_reduce, HALF, "dp") if here[0] != late else None
        if here[0] == late:
            torch.neg(WORK)
            columns = start(all_reduce, HALF, "dp")
            rows = start(all_reduce, HALF, "tp")
        assert rows is not None and columns is not None
        rows.wait()
        columns.wait()

    outs = [run(program, Mesh(dp=2, tp=2), late, cluster=SLOW) for late in range(2)]
    assert events(outs[0], [2, 3, 0, 1]) == events(outs[1])
    spans = sorted({(e.start, e.axis) for e in outs[0].trace.events if e.kind == "collective"})
    assert [axis for _, axis in spans] == ["tp", "dp", "tp"]


# --- random programs --------------------------------------------------------------------------------------------------

MESHES = [Mesh(dp=2), Mesh(dp=3), Mesh(dp=2, tp=2), Mesh(dp=2, tp=3)]


def traced(programs: list[list[Op]], mesh: Mesh, cluster: Cluster | None = WIRE, clock: str | None = None) -> Trace:
    """The programs of `random_programs` as torch runs them."""
    axes = {mesh.group(rank, axis): axis for axis in mesh.axis_names for rank in mesh.ranks}
    world = tuple(mesh.axis_names)
    order: dict[tuple[int, int], list[str]] = {}  # of the messages between two ranks
    for rank, ops in enumerate(programs):
        for kind, *about in ops:
            if kind == "send":
                order.setdefault((rank, about[1]), []).append(about[0])
    source = {name: (pair[0], place) for pair, names in order.items() for place, name in enumerate(names)}

    def program() -> None:
        here, handles, receipts = axis_index(world), {}, {}
        for kind, *about in programs[here]:
            if kind == "compute":
                torch.neg(torch.empty(round(about[0] * 1e9 / 8)))
            elif kind == "send":
                send(torch.empty(about[2] // 4), world, about[1])
            elif kind == "issue":
                handles[about[0]] = start(all_reduce, torch.empty(about[2] // 4), axes[tuple(sorted(about[1]))])
            elif about[0] in handles:
                handles[about[0]].wait()
            else:
                other, place = source[about[0]]
                taken = receipts.setdefault(other, [])
                while len(taken) <= place:
                    taken.append(start(receive, world, other))
                taken[place].wait()

    return run(program, mesh, cluster=cluster, clock=clock).trace


def run_programs(programs: list[list[Op]], mesh: Mesh) -> dict[str, tuple[float, float]]:
    """Name -> when each message and collective of these programs runs."""
    trace = traced(programs, mesh)
    spans = {}
    for rank, ops in enumerate(programs):
        for ops_kind, event_kind in (("send", "send"), ("issue", "collective")):
            mine = [about for kind, *about in ops if kind == ops_kind]
            found = [e for e in trace.events if e.rank == rank and e.kind == event_kind]
            keys = [("send", about[1]) if ops_kind == "send" else tuple(sorted(about[1])) for about in mine]
            for key in set(keys):
                names = [about[0] for about, other in zip(mine, keys) if other == key]
                theirs = [e for e in found if (("send", e.peer) if ops_kind == "send" else e.group) == key]
                assert len(names) == len(theirs)
                for name, e in zip(names, theirs):
                    spans[name] = e.start, e.end
    return spans


def whole(programs: list[list[Op]]) -> list[list[Op]]:
    """The same, where computing takes as long as some number of elements."""
    return [[("compute", round(op[1] * 1e9 / 8) * 8 / 1e9) if op[0] == "compute" else op for op in p] for p in programs]


def alike(programs: list[list[Op]]) -> list[list[Op]]:
    """The same, where all collectives and messages are of one line each, as in `run_programs`, and of bytes of their
    own."""
    said = {"send": ("line 0", "send"), "issue": ("line 1", "all_reduce")}
    names = sorted({op[1] for p in programs for op in p if op[0] in said})
    size = {op[1]: op[3] + 4 * names.index(op[1]) for p in programs for op in p if op[0] in said}
    return [
        [(*op[:3], size[op[1]], (*said[op[0]], size[op[1]])) if op[0] in said else op for op in p] for p in programs
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_random_programs_take_as_long_as_events_say(mesh: Mesh):
    groups = sorted({mesh.group(rank, axis) for axis in mesh.axis_names for rank in mesh.ranks})
    for seed in range(15):
        programs = alike(whole(random_programs(random.Random(seed), groups, mesh.size)))
        wanted, found = simulated(programs), run_programs(programs, mesh)
        for name, span in found.items():
            assert span == pytest.approx(wanted[name], rel=1e-9, abs=1e-15), (seed, name)
        assert len(found) == sum(not name.startswith("end") for name in wanted)


def test_renaming_ranks_renames_random_traces():
    mesh = Mesh(dp=2, tp=2)
    groups = sorted({mesh.group(rank, axis) for axis in mesh.axis_names for rank in mesh.ranks})
    for seed in range(15):
        programs = alike(whole(random_programs(random.Random(seed), groups, mesh.size)))
        for names in ([2, 3, 0, 1], [1, 0, 3, 2], [3, 2, 1, 0]):  # along one axis, along the other, along both
            assert run_programs(programs, mesh) == run_programs(renamed(programs, names), mesh), seed


# --- torch.distributed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [0, 1, 2])
def test_async_collectives_of_torch_distributed(busy: int):
    def program() -> None:
        here, other = dist.get_rank(), (busy + 1) % 3
        x = HALF.clone()
        work = dist.all_reduce(x, async_op=True)
        if here == busy:
            torch.neg(WORK)
            dist.isend(HALF, other)
        assert work is not None
        work.wait()
        if here == other:
            dist.recv(torch.empty(125_000), busy)

    out = run(program, Mesh(dp=3), distributed=True, cluster=SLOW)
    (span,) = {(e.start, e.end) for e in out.trace.events if e.kind == "collective"}
    seconds = 4 * (1e-6 + 0.5 / 3)
    assert span[1] - span[0] == pytest.approx(seconds)
    (sent,) = [(e.start, e.end) for e in out.trace.events if e.kind == "send"]
    assert sent == pytest.approx((span[1], span[1] + 0.5 + 1e-6))


def test_a_thread_of_a_rank_communicates_when_its_time_comes():
    """One thread sums over one group while the other computes and then sums over another."""

    def program(busy: int) -> None:
        mine = group_of([0, 1])

        def beside() -> None:
            dist.all_reduce(HALF.clone(), group=mine)

        thread = Thread(target=beside)
        thread.start()
        if dist.get_rank() == busy:
            torch.neg(WORK)
        dist.all_reduce(HALF.clone())
        thread.join()

    outs = [run(program, Mesh(dp=2), busy, distributed=True, cluster=SLOW) for busy in range(2)]
    for out in outs:
        first, second = sorted({(e.start, e.end) for e in out.trace.events if e.kind == "collective"})
        assert first[1] <= second[0] == pytest.approx(first[1])
    assert events(outs[0], [1, 0]) == events(outs[1])


def test_buckets_of_ddp_are_summed_in_modelled_order():
    """A message that a rank sends after its backward pass goes behind the buckets that are ready before it."""

    def program(busy: int) -> None:
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.016)
        for _ in range(2):
            loss = model(torch.ones(8, 64)).sum()
            if dist.get_rank() == busy:
                torch.neg(WORK[:2_000_000])
            loss.backward()
            if dist.get_rank() == busy:
                dist.isend(HALF, 1 - busy)
            else:
                dist.recv(torch.empty(125_000), busy)

    outs = [run(program, Mesh(dp=2), busy, distributed=True, cluster=SLOW) for busy in range(2)]
    assert events(outs[0], [1, 0]) == events(outs[1])
    assert len([e for e in outs[0].trace.events if e.kind == "collective" and e.rank == 0]) >= 6


@pytest.mark.parametrize("asks", [0, 1])
def test_elapsed_time_waits_for_ranks_that_are_behind(asks: int):
    """The rank that asks is ahead of the other one's thread: what that one does earlier still holds it up."""

    def program() -> float:
        from tplab.torch.distributed.devices import Event

        begin, end = Event(), Event()
        begin.record()
        here, rest = dist.get_rank(), group_of([1 - asks, 2])
        works = [dist.all_reduce(HALF.clone(), async_op=True)]
        if here != asks:
            works.append(dist.all_reduce(HALF.clone(), group=rest, async_op=True))
        if here == asks:
            works[0].wait()  # type: ignore[union-attr]
            torch.neg(WORK)
        end.record()
        seconds = begin.elapsed_time(end) / 1e3
        for work in works:
            work.wait()  # type: ignore[union-attr]
        return seconds

    out = run(program, Mesh(dp=3), distributed=True, cluster=SLOW)
    (ended,) = [e.end for e in out.trace.events if e.rank == asks and e.op == "neg"]
    assert out.per_rank[asks] == pytest.approx(ended)


def test_the_trace_of_a_program_that_hangs_has_times():
    def program() -> None:
        total = start(all_reduce, HALF, "dp")
        torch.neg(WORK)
        total.wait()
        receive("dp", 1 - axis_index("dp"))

    with pytest.raises(DeadlockError) as caught:
        run(program, Mesh(dp=2), cluster=SLOW)
    trace = caught.value.trace
    assert {(e.kind, e.start, e.end) for e in trace.events} == {
        ("collective", 0.0, SUM),
        ("compute", 0.0, 0.2),
        ("wait", 0.2, SUM),
    }


# --- what may hang on GPUs --------------------------------------------------------------------------------------------


def in_opposite_orders(is_same: bool, waits: bool = False) -> None:
    x, axes = torch.ones(4), ["tp", "dp,tp"]
    if axis_index(("dp", "tp")) == 1 and not is_same:
        axes.reverse()
    works = []
    for axis in axes:
        works.append(start(all_reduce, x, tuple(axis.split(","))))
        if waits:
            works[-1].wait()
    for work in works:
        work.wait()


def test_collectives_in_flight_together_in_opposite_orders_are_a_warning_that_names_both():
    mesh, first = Mesh(dp=2, tp=2), in_opposite_orders.__code__.co_firstlineno
    with pytest.warns(CrossedOrderWarning, match="NCCL may hang here") as caught:
        out = run(in_opposite_orders, mesh, False)
    (text,) = out.warnings
    assert str(caught[0].message) == text and Path(caught[0].filename).name == "test_event_order.py"
    assert f"all_reduce over 'tp' at test_event_order.py:{first + 6}" in text and "all_reduce over 'dp,tp'" in text
    assert "rank 0 in this order, rank 1 in the other" in text
    assert out.trace.warnings == out.trace.since(0.1).warnings == [text]


def test_the_same_order_is_no_warning():
    assert run(in_opposite_orders, Mesh(dp=2, tp=2), True).warnings == []
    assert run(in_opposite_orders, Mesh(dp=2, tp=2), True, True).warnings == []

    def apart() -> None:  # one rank is in both groups: it cannot disagree with anybody
        axes = ["dp", "tp"] if axis_index("dp") == axis_index("tp") else ["tp", "dp"]
        for work in [start(all_reduce, torch.ones(4), axis) for axis in axes]:
            work.wait()

    assert run(apart, Mesh(dp=2, tp=2)).warnings == []


def test_groups_of_torch_distributed_with_the_same_ranks_are_two_communicators():
    def program(is_same: bool) -> None:
        groups = [group_of([0, 1]), None]
        if dist.get_rank() == 1 and not is_same:
            groups.reverse()
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for group in groups]
        for work in works:
            work.wait()  # type: ignore[union-attr]

    with pytest.warns(CrossedOrderWarning, match="NCCL may hang here"):
        run(program, Mesh(dp=2), False, distributed=True)
    assert run(program, Mesh(dp=2), True, distributed=True).warnings == []


def test_torchrun_says_what_may_hang_once(tmp_path: Path, capfd: pytest.CaptureFixture):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]\n"
        "order = groups if dist.get_rank() else groups[::-1]\n"
        "works = [dist.all_reduce(torch.ones(4), group=g, async_op=True) for g in order]\n"
        "[work.wait() for work in works]\n"
    )
    assert torchrun(["--nproc-per-node", "2", str(script)]) == 0
    shown = "".join(capfd.readouterr())
    assert shown.count("NCCL may hang here") == 1 and "warning: all_reduce over" in shown and "train.py:5" in shown


@pytest.mark.parametrize("cards, wanted", [(None, 1.0), (1, 2.0)])
def test_groups_that_cross_one_card_in_a_run_wait_for_each_other(cards: int | None, wanted: float):
    """Two sums over dp, each between the same two nodes: together they take twice as long if they share a card."""
    cluster = Cluster("n", CHIP, Link("i", 0.0, 1e6), node_size=2, outer_link=Link("o", 0.0, 1e6), cards=cards)
    trace = run(lambda: all_reduce(HALF, "dp"), Mesh(dp=2, tp=2), cluster=cluster).trace
    alone = cluster.collective_seconds("all_reduce", HALF.nbytes, (0, 2))
    assert {(e.start, e.end) for e in trace.events if e.kind == "collective"} == {(0.0, wanted * alone)}
