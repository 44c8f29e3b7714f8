"""Schedules executed on real tensors: loss and every gradient equal plain accumulation, whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import pipelines
from tests.frameworks import FRAMEWORKS
from tests.pipelines import EXECUTORS
from tplab import Mesh, P
from tplab.errors import MeshError, ScheduleError, ShapeError
from tplab.schedules import (
    RULES,
    Costs,
    Schedule,
    chimera,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    naive,
    one_f_one_b,
    simulate,
    with_communication,
    with_optimizer_step,
    zb_h1,
    zb_v,
)


@pytest.fixture(params=EXECUTORS)
def execute(request):
    return EXECUTORS[request.param]


def legal(rule, ranks):
    """A schedule of this rule whose microbatches are no multiple of the ranks, where the rule allows that."""
    for microbatches in (1,) if rule is naive else (2 * ranks + 1, 2 * ranks + 2, 2 * ranks):
        try:
            return rule(ranks, microbatches)
        except ScheduleError:
            continue
    return None


IN_TORCH = [made for rule in RULES.values() for ranks in (1, 2, 3, 4) if (made := legal(rule, ranks)) is not None]


# JAX compiles each one: every rule once, on 2 and 3 ranks in turn, and two on others
IN_JAX = [
    next(made for ranks in (2 + place % 2, 2) if (made := legal(rule, ranks)) is not None)
    for place, rule in enumerate(RULES.values())
]
IN_JAX += [zb_h1(1, 3), one_f_one_b(4, 9)]
CASES = [("torch", schedule) for schedule in IN_TORCH] + [("jax", schedule) for schedule in IN_JAX]


@pytest.mark.parametrize("framework, schedule", CASES, ids=lambda case: getattr(case, "name", case))
def test_every_schedule_gives_the_plain_gradients(framework, schedule):
    batch = pipelines.batch(schedule.num_stages, schedule.num_microbatches)
    results, _ = EXECUTORS[framework](schedule, batch)
    pipelines.check(results, schedule, batch)


def test_that_all_rules_are_among_them():
    for schedules in (IN_TORCH, IN_JAX):
        assert {schedule.name for schedule in schedules} == set(RULES)
        assert any(schedule.num_microbatches % schedule.num_ranks for schedule in schedules)
    assert {(s.num_ranks, s.num_microbatches) for s in IN_TORCH if s.name == "one_f_one_b"} == {
        (1, 3), (2, 5), (3, 7), (4, 9)
    }  # fmt: skip
    assert {s.num_ranks for s in IN_JAX} == {1, 2, 3, 4}


EDITED = {
    "by hand": Schedule.parse("F0 F1 .. B0 .. .. B1\n.. F0 B0 F1 .. B1 .."),
    "W much later": Schedule.parse("F0 F1 .. I0 .. I1 W1 W0\n.. F0 I0 F1 I1 W0 .. W1"),
    "half split": Schedule.parse("F0 F1 .. I0 W0 B1\n.. F0 I0 F1 B1 W0"),
    "moved": one_f_one_b(3, 4).moved(0, 3, 4),
    "with communication": with_communication(zb_v(2, 3)),
    "with steps and sums": with_optimizer_step(one_f_one_b(2, 3), sync=True),
}


@pytest.mark.parametrize("name", EDITED)
def test_what_the_user_wrote_or_edited(execute, name):
    schedule = EDITED[name]
    batch = pipelines.batch(schedule.num_stages, schedule.num_microbatches)
    results, _ = execute(schedule, batch)
    pipelines.check(results, schedule, batch)


def test_a_schedule_that_is_not_right_says_why(execute):
    wrong = one_f_one_b(2, 3).moved(1, 0, 1)
    with pytest.raises(ScheduleError, match="B0 of stage 1 before F0"):
        execute(wrong, pipelines.batch(2, 3))
    stuck = Schedule.parse("F0 B0 F1 B1\nF1 B1 F0 B0")
    with pytest.raises(ScheduleError, match="deadlock"):
        execute(stuck, pipelines.batch(2, 2))


@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (2, 4)], ids=str)
def test_data_parallel_pipelines(execute, shape):
    """8 workers as 8x1, 4x2 and 2x4: every rank its own batch, gradients the mean."""
    data, ranks = shape
    mesh, schedule = Mesh(dp=data, pp=ranks), zb_h1(ranks, 3)
    batch = pipelines.batch(ranks, 3 * data)

    def mine(index):
        return batch[3 * index : 3 * index + 3]

    results, _ = execute(schedule, mine, mesh=mesh, data_axis="dp")
    for copy in range(data):
        pipelines.check(results[copy * ranks : (copy + 1) * ranks], schedule, batch)


@pytest.mark.parametrize("schedule", [zb_v(2, 3), chimera(2, 4), dualpipe_v(2, 4)], ids=lambda s: s.name)
def test_ranks_that_are_processes(schedule):
    batch = pipelines.batch(schedule.num_stages, schedule.num_microbatches)
    results, out = pipelines.run_torch(schedule, batch, on="processes")
    pipelines.check(results, schedule, batch)
    assert out.trace.clock == "measured"


TIMED = [gpipe(4, 8), one_f_one_b(4, 8), zb_h1(4, 8), interleaved_1f1b(4, 8), zb_v(4, 8)]


@pytest.mark.parametrize(
    "framework, schedule",
    [("torch", s) for s in TIMED] + [("jax", s) for s in [*TIMED[:3], zb_v(2, 8)]],
    ids=lambda case: getattr(case, "name", case),
)
def test_the_executed_timeline_is_the_simulated_one(framework, schedule):
    """On the clock that counts steps, with F = I = W = 1 a rank, and messages that take their link for 1. In JAX a tick
    costs its slowest rank."""
    costs = Costs(message_bytes=1, bandwidth=1, links="queue")
    trace = EXECUTORS[framework](schedule, pipelines.batch(schedule.num_stages, 8), costs=costs)[1].trace
    run = simulate(schedule, costs, lockstep=framework == "jax")
    done = [e for e in trace.events if e.kind == "compute"]
    found = {(e.rank, e.op, e.where): (e.start, e.end) for e in done}
    assert len(done) == len(found) == len(schedule)
    for place in range(len(schedule)):
        action = schedule.action(place)
        span = found[int(schedule.rank[place]), action.label, f"stage {action.stage}"]
        assert span == (run.start[place], run.end[place])
    origin, piece = trace.chunks[next(e.chunk for e in done if e.op == "F3")]
    assert (origin, piece) == (0, 3)  # a microbatch is a chunk: what belongs together has one colour


@pytest.mark.parametrize("framework", EXECUTORS)
def test_what_is_sent(framework):
    """Each cut carries every microbatch once each way, and nothing else travels but the loss. In JAX every message is
    as long as the longest."""
    schedule = one_f_one_b(3, 4)
    trace = EXECUTORS[framework](schedule, pipelines.batch(3, 4))[1].trace
    one = 2 * pipelines.TOKENS * 8
    widths = pipelines.widths(3)
    if framework == "jax":
        widths[1:3] = [max(widths[1:3])] * 2
    sent = [trace.bytes_sent(rank=rank, op="send") for rank in range(3)]
    assert sent == [4 * one * widths[1], 4 * one * (widths[1] + widths[2]), 4 * one * widths[2]]
    assert {e.op for e in trace.events if e.kind == "collective"} == {"all_reduce"}
    assert np.sum([e.kind == "collective" for e in trace.events]) == 3


@pytest.mark.parametrize(
    "framework, schedule",
    [
        *(("torch", schedule) for schedule in (gpipe(1, 2), one_f_one_b(3, 4), zb_v(2, 3), chimera(2, 4))),
        *(("jax", schedule) for schedule in (gpipe(1, 2), zb_v(2, 3))),
    ],
    ids=lambda case: getattr(case, "name", case),
)
def test_an_evaluation_runs_forward_only(framework, schedule):
    """The same loss, no gradients, nothing kept, and half of what is sent."""
    batch = pipelines.batch(schedule.num_stages, schedule.num_microbatches)
    results, out = EXECUTORS[framework](schedule, batch, evaluates=True)
    loss, _ = pipelines.plain(schedule.num_stages, batch)
    for found, grads in results:
        np.testing.assert_allclose(found, loss, rtol=1e-12)
        assert not any(grads.values())
    sends = schedule.num_microbatches * sum(
        schedule.rank_of(stage, 0) != schedule.rank_of(stage + 1, 0) for stage in range(schedule.num_stages - 1)
    )
    events = out.trace.events
    assert sum(e.kind == "send" for e in events) == sends
    done = [e for e in events if e.kind == "compute"]
    assert {e.op[0] for e in done} == {"F"}
    assert len(done) == schedule.num_stages * schedule.num_microbatches
    assert all(e.held <= 0 for e in done)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_copies_are_not_along_the_pipeline(name):
    """Before, the gradients of different stages were averaged."""
    fw = FRAMEWORKS[name]()

    def program(x):
        lab, w = fw.lab, x[:3]
        stage = (lambda w, x: x @ w, w) if name == "jax" else Product(w)
        return lab.train_batch(
            one_f_one_b(2, 2), stage, lab.split_batch(x, x, 2), lambda y, _: y.mean(), data_axis="pp"
        )

    with pytest.raises(MeshError, match="ranks along 'pp' hold different stages, and no copies"):
        fw.lab.run(program, Mesh(pp=2), fw.array(np.ones((4, 3))), in_specs=P())


class Product(torch.nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = torch.nn.Parameter(w)

    def forward(self, x):
        return x @ self.w


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_loss_of_whole_numbers_is_refused_for_that(name):
    fw = FRAMEWORKS[name]()

    def program(x):
        lab, w = fw.lab, x[:3]
        stage = (lambda w, x: x @ w, w) if name == "jax" else Product(w)
        return lab.evaluate_batch(one_f_one_b(1, 2), stage, lab.split_batch(x, x, 2), lambda y, _: (y > 0).sum())

    with pytest.raises(ShapeError, match=r"int\d\d \w+ \[\]; it must be one number, of floating point: .mean"):
        fw.lab.run(program, Mesh(pp=1), fw.array(np.ones((4, 3))), in_specs=P())
