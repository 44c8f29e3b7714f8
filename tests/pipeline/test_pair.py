"""A forward and a backward pass at once: the same numbers, in less time where experts' tokens travel."""

import inspect
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tplab.torch as lab
from tplab import Mesh, P
from tplab.cost import Chip, Cluster, Link
from tplab.errors import RankError
from tplab.experts import Routing
from tplab.schedules import Costs, Schedule, dualpipe, dualpipe_v, simulate, zb_v

SLOW = Cluster("slow", Chip("abacus", {"float64": 1e10}, memory_bandwidth=1e12, memory=1e9), Link("wire", 1e-6, 3e8))
ROWS = 12
MESH = Mesh(pp=2, ep=2)


class Block(nn.Module):
    """A layer of experts on the ranks of "ep"."""

    def __init__(self, width: int, dispatch: str):
        super().__init__()
        self.moe = lab.MixtureOfExperts(width, 4 * width, Routing(8, 2), "ep", dispatch=dispatch)

    def forward(self, x):
        return x + self.moe(torch.tanh(x))[0]


def stages_of_experts(schedule: Schedule, width: int, dispatch: str) -> dict[int, nn.Module]:
    """Two layers for each stage, in float64: the same for each run."""
    stages: dict[int, nn.Module] = {}
    for number in sorted({*schedule.placement[lab.axis_index("pp")]}):
        stages[number] = nn.Sequential(Block(width, dispatch), Block(width, dispatch)).double()
        for place, (name, p) in enumerate(stages[number].named_parameters()):
            seed = 100 * number + place + 1000 * lab.axis_index("ep") * ("experts" in name)
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            p.data.copy_(0.3 * values)
    return stages


def trained(schedule: Schedule, dispatch: str = "all_to_all", width: int = 8, run=lab.run, **how):
    """The loss and all gradients of a batch."""
    generator = torch.Generator().manual_seed(5)
    num_rows = schedule.num_microbatches * ROWS * 2
    x, y = (torch.randn(num_rows, width, generator=generator, dtype=torch.float64) for _ in range(2))

    def step(x, y):
        stages = stages_of_experts(schedule, width, dispatch)
        parts = lab.split_batch(x, y, schedule.num_microbatches)
        loss = lab.train_batch(schedule, stages, parts, nn.functional.mse_loss, **how)
        return loss, {(n, name): p.grad for n, stage in stages.items() for name, p in stage.named_parameters()}

    return run(step, MESH, x, y, in_specs=(P("ep"), P("ep")))


def actions(out) -> set[str]:
    return {event.op for event in out.trace.events if event.kind == "compute"}


@pytest.mark.parametrize("dispatch", ["all_to_all", "per_rank", "gather"])
@pytest.mark.parametrize("schedule", [dualpipe(2, 4), dualpipe_v(2, 5)], ids=lambda schedule: schedule.name)
def test_gradients_are_the_same_to_the_bit(schedule: Schedule, dispatch: str):
    one_by_one, at_once = (trained(schedule, dispatch, overlap=overlap) for overlap in (False, True))
    assert any("+" in op for op in actions(at_once)) and not any("+" in op for op in actions(one_by_one))
    for want, got in zip(one_by_one.per_rank, at_once.per_rank, strict=True):
        assert want[0] == got[0]
        for key, grad in want[1].items():  # none of an expert that no token has chosen
            assert got[1][key] is grad is None or got[1][key].equal(grad)


def test_messages_lie_under_what_the_other_computes():
    """As many bytes, a shorter step, and while tokens of a forward pass travel, the rank computes in the same pair."""
    on_slow = partial(lab.run, cluster=SLOW)
    one_by_one, at_once = (trained(dualpipe_v(2, 12), width=32, run=on_slow, overlap=how) for how in (False, True))
    assert at_once.trace.bytes_sent(0) == one_by_one.trace.bytes_sent(0)
    assert at_once.trace.makespan < 0.95 * one_by_one.trace.makespan
    waits = [sum(e.end - e.start for e in out.trace.events if e.kind == "wait") for out in (one_by_one, at_once)]
    assert waits[1] < 0.85 * waits[0]
    mine = [event for event in at_once.trace.events if event.rank == 0]
    sent = [event for event in mine if event.kind == "collective" and event.bytes > 1000 and event.phase == "forward"]
    pairs = [event for event in mine if event.kind == "compute" and "+" in event.op]
    assert any(b.start <= a.start and a.end <= b.end for a in sent for b in pairs)


def test_processes_and_memory():
    """Real ranks add up in their own order; a thread's tensors count as the rank's."""
    schedule = dualpipe_v(2, 5)
    want = trained(schedule, run=partial(lab.run, count_memory=True))
    got = trained(schedule, overlap=True, run=partial(lab.run, count_memory=True))
    real = trained(schedule, overlap=True, run=partial(lab.run, on="processes"))
    assert any("+" in op for op in actions(real))
    for rank, (loss, grads) in enumerate(want.per_rank):
        torch.testing.assert_close(real.per_rank[rank], (loss, grads), rtol=1e-12, atol=1e-12)
        before, now = (float(out.memory[rank].of("activations").max()) for out in (want, got))
        assert now == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_a_pair_takes_as_many_steps_as_in_the_simulation(overlap: float):
    """Of stages that send nothing: the clock counts each collective as a step."""
    costs, schedule = Costs(transfer=1.0, overlap=overlap), dualpipe_v(2, 6)

    def step(x):
        stages = {number: nn.Linear(4, 4) for number in schedule.placement[lab.axis_index("pp")]}
        return lab.train_batch(
            schedule, stages, lab.split_batch(x, x, 6), nn.functional.mse_loss, costs=costs, overlap=True
        )

    out, simulated = lab.run(step, Mesh(pp=2), torch.ones(12, 4)), simulate(schedule, costs)
    took = [
        sorted((e.rank, e.op, e.where, e.end - e.start) for e in trace.events if e.kind == "compute")
        for trace in (out.trace, simulated.trace)
    ]
    assert took[0] == took[1] and any("+" in op for _, op, *_ in took[0])


def test_lines_are_those_of_the_program():
    """The forward pass runs in a thread of its own, whose calls the program has made none the less."""
    out = trained(dualpipe_v(2, 5), overlap=True)
    first = inspect.getsourcelines(Block)[1]
    where = {event.where for event in out.trace.events if event.kind == "collective" and event.phase == "forward"}
    assert all(text.startswith("test_pair.py:") for text in where) and f"test_pair.py:{first + 8}" in where


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_error_in_either_pass_is_told(phase: str):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, calls):
            ctx.calls = calls
            calls.append("forward")
            if phase == "forward" and calls.count("forward") == 4:
                raise KeyError("the fourth forward pass")
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            ctx.calls.append("backward")
            if phase == "backward" and ctx.calls.count("backward") == 2:
                raise KeyError("the second backward pass")
            return grads[0], None

    class Stage(nn.Linear):
        def forward(self, x):
            calls = vars(self).setdefault("calls", [])
            return lab.all_reduce(Fails.apply(super().forward(x), calls), "ep") / 2

    def step(x):
        schedule = dualpipe_v(2, 5)
        stages = {number: Stage(4, 4) for number in schedule.placement[lab.axis_index("pp")]}
        lab.train_batch(schedule, stages, lab.split_batch(x, x, 5), nn.functional.mse_loss, overlap=True)

    with pytest.raises(RankError, match=r"KeyError.* at test_pair.py.*the (fourth|second)") as caught:
        lab.run(step, MESH, torch.ones(10, 4))
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(trained(dualpipe_v(2, 5), overlap=True).per_rank) == 4  # the next run is as any other


def test_what_is_no_pair_and_what_cannot_be_one():
    assert not any("+" in op for op in actions(trained(zb_v(2, 4), overlap=True)))
    with pytest.raises((ValueError, RankError), match=r"overlap=True .* leave out one of them"):
        trained(dualpipe_v(2, 5), overlap=True, checkpoint_every=1)


def test_a_transform_inside_a_stage_waits_at_once():
    class Stage(nn.Linear):
        def forward(self, x):
            return torch.func.vmap(lambda row: lab.all_reduce(row, "ep"))(super().forward(x)) / 2

    def step(x, overlap):
        torch.manual_seed(0)
        schedule = dualpipe_v(2, 5)
        stages = {number: Stage(4, 4) for number in schedule.placement[lab.axis_index("pp")]}
        return lab.train_batch(schedule, stages, lab.split_batch(x, x, 5), nn.functional.mse_loss, overlap=overlap)

    losses = [lab.run(step, MESH, torch.ones(10, 4), overlap, out_specs=P()).value for overlap in (False, True)]
    assert losses[0] == losses[1]


class Recomputes(nn.Module):
    """Dropout and an exchange that the backward pass computes again, by torch's own checkpoint."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(lambda x: nn.functional.dropout(lab.all_reduce(self.linear(x), "ep")), x, use_reentrant=False)


def test_what_is_computed_again_draws_again():
    def step(x, overlap):
        torch.manual_seed(0)
        schedule = dualpipe_v(2, 5)
        stages = {number: Recomputes() for number in schedule.placement[lab.axis_index("pp")]}
        parts = lab.split_batch(x, x, 5)
        loss = lab.train_batch(schedule, stages, parts, nn.functional.mse_loss, overlap=overlap)
        after = torch.rand(3)
        return loss, [p.grad for stage in stages.values() for p in stage.parameters()], after

    one_by_one, at_once = (lab.run(step, MESH, torch.ones(20, 4), overlap).per_rank for overlap in (False, True))
    for want, got in zip(one_by_one, at_once, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_control_c_ends_a_forward_pass_of_a_pair():
    """It is in a thread of its own, which no rank leaves behind."""
    begun = threading.Event()

    class Loops(nn.Linear):
        def forward(self, x):
            if threading.current_thread() is not home[lab.axis_index("pp"), lab.axis_index("ep")]:
                begun.set()
                while True:
                    time.sleep(0.01)
            return lab.all_reduce(super().forward(x), "ep")

    def step(x):
        home[lab.axis_index("pp"), lab.axis_index("ep")] = threading.current_thread()
        schedule = dualpipe_v(2, 5)
        stages = {number: Loops(4, 4) for number in schedule.placement[lab.axis_index("pp")]}
        lab.train_batch(schedule, stages, lab.split_batch(x, x, 5), nn.functional.mse_loss, overlap=True)

    home: dict[tuple[Any, Any], threading.Thread] = {}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin deaf to it
    threading.Thread(target=lambda: begun.wait(60) and signal.raise_signal(signal.SIGINT), daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            lab.run(step, MESH, torch.ones(10, 4))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not getattr(caught.value, "__notes__", []), caught.value.__notes__


def test_torch_distributed_does_not_know_the_thread():
    def step(x):
        torch.distributed.init_process_group("gloo")
        stages = {number: nn.Linear(4, 4) for number in dualpipe_v(2, 5).placement[lab.axis_index("pp")]}
        lab.train_batch(dualpipe_v(2, 5), stages, lab.split_batch(x, x, 5), nn.functional.mse_loss, overlap=True)

    with pytest.raises((NotImplementedError, RankError), match="leave it out where the program"):
        lab.run(step, Mesh(pp=2), torch.ones(10, 4), distributed=True)


def test_what_the_other_pass_sends_is_not_for_the_unit_that_this_one_waits_for():
    """The mean over copies of pieces is waited for, and meanwhile the other pass sends tokens to experts."""

    def program():
        schedule, x = dualpipe_v(2, 5), torch.ones(20, 8, dtype=torch.float64)
        stages = stages_of_experts(schedule, 8, "all_to_all")
        for stage in stages.values():
            for block in stage.children():
                block.after = lab.shard_parameters(nn.Linear(8, 8).double(), "dp", replicate_axis="node")
                block.register_forward_hook(lambda block, _, y: block.get_submodule("after")(y))
        lab.train_batch(schedule, stages, lab.split_batch(x, x, 5), nn.functional.mse_loss, overlap=True)

    events = lab.run(program, Mesh(pp=2, ep=2, dp=2, node=2), keep_values=0).trace.events
    sent = {(event.axis, event.where.partition(", ")[2]) for event in events if event.kind == "collective"}
    assert sent == {("pp", ""), ("ep", ""), ("dp", "for the model"), ("node", "for the model")}
