"""count_memory: the bytes of each kind on each rank, exactly; and nothing else about the run changes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tplab.torch as lab
from tplab import Mesh
from tplab.data.pieces import Pieces
from tplab.data.zero import MIXED_ADAM, StateBytes, state_bytes
from tplab.errors import RankError, TraceError
from tplab.schedules import gpipe, one_f_one_b, zb_h1
from tplab.trace.memory import KINDS, Ledger, Memory

AdamW = partial(torch.optim.AdamW, lr=0.01)
SHAPES = ((6, 8), (6,), (5, 6), (5,))
FLOAT_ADAM = StateBytes(4, 4, 8)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5))


def steps(stage: int, is_mixed: bool = False) -> tuple[Any, Any]:
    """One step and one more backward pass. What is returned is alive at the end."""
    model = net().bfloat16() if is_mixed else net()
    master = torch.float32 if is_mixed else None
    if stage == 3:
        lab.shard_parameters(model, "dp")
    shard = {1: lab.shard_optimizer, 2: lab.shard_gradients}.get(stage)
    optimizer = shard(AdamW, model.parameters(), "dp", master_dtype=master) if shard else AdamW(model.parameters())
    x = torch.ones(4, 8, dtype=torch.bfloat16 if is_mixed else torch.float32)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()
        if stage == 0:
            lab.average_gradients(model, "dp")
    return model, optimizer


# ----------------------------------------------------------------------------------------------------------- by kind


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("stage", "is_mixed"), [(0, False), (1, False), (1, True), (2, True), (3, False)])
def test_states_are_those_of_the_formulas(stage: int, is_mixed: bool, num_ranks: int):
    """To the byte, on every rank. Beside the formula: Adam's step counters, and padding where gradients are rows."""
    memory = lab.run(steps, Mesh(dp=num_ranks), stage, is_mixed, count_memory=True).memory
    each = MIXED_ADAM if is_mixed else FLOAT_ADAM
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    for rank, held in enumerate(memory):
        expected = state_bytes(stage, sizes, num_ranks, rank, each)
        gradients = each.gradients * (Pieces(SHAPES, num_ranks).width if stage >= 2 else sum(sizes))
        counters = 4 * len(SHAPES)
        assert held.at(-1) == {
            "parameters": expected.parameters,
            "optimizer": expected.optimizer + counters,
            "gradients": gradients,
            "gathered": 0,
            "activations": 0,
            "other": 0,
        }
        if all(size % num_ranks == 0 for size in sizes):
            assert gradients == expected.gradients


def test_activations_are_what_is_saved_and_fall_to_nothing():
    def program(x):
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid())
        saved = lab.saved_tensors(model, x).bytes
        y = model(x)
        y.sum().backward()
        return y, saved

    out = lab.run(program, Mesh(dp=2), torch.ones(4, 8), count_memory=True)
    held, saved = out.memory[0], out.per_rank[0][1]
    activations = held.of("activations")
    batch, output = 4 * 8 * 4, 4 * 5 * 4
    assert activations.max() == saved - batch  # which the program was given
    assert held.phases[int(np.flatnonzero(activations)[-1])] == "backward"
    assert held.at(-1)["activations"] == 0
    assert held.at(-1)["other"] == batch + output  # y is no activation any more, and is still there


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_parameters_are_a_kind(reshard: bool):
    def program(x):
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
        model = lab.shard_parameters(layers, reshard_after_forward=reshard, prefetch=False)
        model(x).sum().backward()
        return model

    held = lab.run(program, Mesh(dp=4), torch.ones(4, 8), count_memory=True).memory[0]
    layer = 8 * 8 * 4
    gathered = held.of("gathered")
    assert held.at(-1)["gathered"] == 0
    assert layer <= gathered.max() <= (2 if reshard else 7) * layer
    assert reshard or gathered.max() >= 5 * layer  # the first layer's weight is not needed: its input has no gradient


def test_recomputed_activations_are_activations():
    width, rows = 16, 8
    one = rows * width * 4

    def program(x, again):
        layers = (nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Linear(width, width)) for _ in range(6))
        model = nn.Sequential(*layers)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        x.sum().backward()
        return model

    whole, less = (
        lab.run(program, Mesh(dp=1), torch.ones(rows, width), again, count_memory=True).memory[0].of("activations")
        for again in (False, True)
    )
    assert whole.max() == (1 + 5 * 3) * one  # of the first layer what its product takes in, of others all that is made
    assert 5 * one <= less.max() <= (5 + 4) * one  # what enters layers, and one layer that is computed again


def test_what_is_said_goes_before_what_is_found():
    def program():
        w = torch.ones(10, 10, requires_grad=True)
        momentum = torch.zeros(10, 10)
        lab.count_as("parameters", {"w": w})
        lab.count_as("optimizer", [momentum])
        (w * 2).sum().backward()
        return w, momentum

    at_end = lab.run(program, Mesh(dp=1), count_memory=True).memory[0].at(-1)
    assert at_end == dict.fromkeys(KINDS, 0) | {"parameters": 400, "optimizer": 400, "gradients": 400}
    with pytest.raises(ValueError, match="no kind 'weights' of memory; kinds are parameters, optimizer"):
        lab.count_as("weights", torch.ones(1))
    lab.count_as("other", torch.ones(1))  # where nothing is counted it does nothing


def test_on_meta_it_counts_what_real_tensors_would_take():
    def program(device):
        with torch.device(device):
            model, x = net(), torch.ones(4, 8)
        model(x).sum().backward()
        return model

    real = lab.run(program, Mesh(dp=1), "cpu", count_memory=True).memory[0]
    shapes = lab.run(program, Mesh(dp=1), "meta", device="meta", count_memory=True).memory[0]
    assert shapes.at(-1) == real.at(-1) != dict.fromkeys(KINDS, 0)
    assert max(shapes.of("activations")) == max(real.of("activations")) > 0


def own_model():
    return nn.Linear(100, 100)(torch.ones(1, 100)).sum().backward()


def own_model_on_meta():
    with torch.device("meta"):
        own_model()


def trained():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(lab.all_gather(torch.ones(4, 8), "tp")).sum().backward()
    optimizer.step()
    return model, optimizer


def test_tensors_on_meta_that_are_not_counted_are_said():
    def partly() -> torch.Tensor:
        own_model_on_meta()
        return torch.ones(2)

    with pytest.warns(UserWarning, match="0 B, because tensors on the device meta have no memory; give device='meta'"):
        out = lab.run(own_model_on_meta, Mesh(tp=2), count_memory=True)
    assert out.memory.peaks == [0, 0]
    assert lab.run(partly, Mesh(tp=2), count_memory=True).memory.peaks == [8, 8]


@pytest.mark.parametrize("program", [own_model, own_model_on_meta, trained])
def test_on_meta_what_the_program_makes_itself_counts_too(program: Any):
    """Wherever the program makes it: device="meta" only says where its arguments are."""
    real = own_model if program is own_model_on_meta else program
    want = lab.run(real, Mesh(tp=2), count_memory=True)
    got = lab.run(program, Mesh(tp=2), count_memory=True, device="meta")
    assert want.peaks and got.peaks == want.peaks and min(want.peaks) > 0
    assert [held.at(-1) for held in got.memory] == [held.at(-1) for held in want.memory]


# ------------------------------------------------------------------------------------------------- beside other counts


def test_peaks_are_those_of_all_live_bytes():
    def program(x):
        with lab.LiveBytes() as live:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(2):
                model(lab.all_reduce(lab.all_gather(x, "dp"), "dp")).sum().backward()
                optimizer.step()
        return live.peak

    out = lab.run(program, Mesh(dp=3), x := torch.ones(4, 8), count_memory=True)
    assert out.peaks == out.memory.peaks == [peak + x.nbytes for peak in out.per_rank]  # which was there before


def test_what_a_collective_brings_counts_from_its_start():
    def program(x):
        arriving = lab.start(lab.all_gather, x, "tp")
        busy = torch.ones(1000)
        del busy
        return arriving.wait() + 1

    held = lab.run(program, Mesh(tp=4), torch.ones(50), count_memory=True).memory[2]
    by_op = dict(zip(held.ops, held.totals.tolist()))
    assert (by_op["start"], by_op["ones"]) == (200, 200 + 800 + 4000)
    assert held.peak == 200 + 800 + 4000


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("rule", [gpipe, one_f_one_b])
def test_activations_of_a_pipeline_are_what_its_trace_says_is_held(rule: Any, every: int | None):
    schedule = rule(ranks=3, microbatches=4)

    def program(x, y):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
        stages = lab.stages_of(layers, schedule)
        batches = lab.split_batch(x, y, 4)
        lab.train_batch(schedule, stages, batches, nn.functional.mse_loss, checkpoint_every=every)
        return stages

    out = lab.run(program, Mesh(pp=3), torch.ones(8, 8), torch.zeros(8, 8), count_memory=True)
    for rank, held in enumerate(out.memory):
        most = held.of("activations").max()
        if every is None:
            assert most == out.trace.peak_bytes[rank] > 0
        else:  # the trace is noted between actions, and a backward pass computes again what it needs
            assert most > out.trace.peak_bytes[rank]
        assert held.at(-1)["activations"] == 0
        assert held.at(-1)["gradients"] == held.at(-1)["parameters"] == (8 * 8 + 8) * 2 * 4


@pytest.mark.parametrize("rule", [one_f_one_b, zb_h1])
def test_gradients_of_a_pipeline_are_gradients_while_they_add_up(rule: Any):
    def program(x):
        torch.manual_seed(0)
        schedule = rule(ranks=2, microbatches=3)
        stages = lab.stages_of([nn.Linear(40, 40), nn.Linear(40, 40)], schedule)
        lab.train_batch(schedule, stages, lab.split_batch(x, x, 3), nn.functional.mse_loss)
        return stages

    for held in lab.run(program, Mesh(pp=2), torch.ones(3, 40), count_memory=True).memory:
        parameters = held.at(-1)["parameters"]
        assert held.of("gradients").max() >= 2 * parameters  # a sum, and the next term
        assert held.of("other").max() < parameters


def test_nothing_else_changes():
    def program(x):
        model = nn.Linear(8, 6)
        lab.data_parallel(model, "dp")
        y = model(lab.ppermute(x, "dp", [(0, 1), (1, 0)]))
        y.square().sum().backward()
        return model.weight.grad

    without, counted = (
        lab.run(program, Mesh(dp=2), torch.ones(4, 8), cluster="h100", count_memory=count) for count in (False, True)
    )
    assert counted.trace == without.trace
    assert torch.equal(counted.per_rank[1], without.per_rank[1])
    times = counted.memory[0].times
    assert times[0] == 0 and (np.diff(times) >= 0).all()
    assert times[-1] == counted.trace.select(rank=0).makespan
    with pytest.raises(ValueError, match="not asked to count memory; give count_memory=True"):
        _ = without.memory
    assert without.peaks is None


def test_a_saved_tensor_that_was_written_to_is_an_error_as_without():
    def program():
        w = nn.Parameter(torch.ones(3))
        y = (w * 2).sin()
        z = y.exp()
        z.add_(1)
        z.sum().backward()

    for count in (False, True):
        with pytest.raises(RankError, match="has been modified by an inplace operation") as caught:
            lab.run(program, Mesh(dp=1), count_memory=count)
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_second_derivatives_are_right():
    def program():
        w = nn.Parameter(torch.tensor([0.5, 2.0]))
        (first,) = torch.autograd.grad((w**3).sin().sum(), w, create_graph=True)
        first.sum().backward()
        return w.grad

    one, other = (lab.run(program, Mesh(dp=1), count_memory=count).per_rank[0] for count in (False, True))
    assert torch.equal(one, other)


def test_where_and_when():
    def program(x):
        w = torch.ones(1000)
        y = lab.all_gather(x, "tp")
        return w, y

    out = lab.run(program, Mesh(tp=2), torch.ones(10), cluster="h100", count_memory=True)
    held = out.memory[1]
    (row,) = [row for row, op in enumerate(held.ops) if op == "all_gather"]
    assert held.at(row)["other"] - held.at(row - 1)["other"] == 80
    assert held.where[row].startswith("test_memory.py:") and held.phases[row] == "forward"
    assert 0 < held.times[row] == out.trace.makespan
    assert (held.peak, held.peak_row) == (4000 + 40 + 80, row)


def test_fsdp2_lets_go_of_whole_parameters():
    def program():
        from torch.distributed.fsdp import fully_shard

        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
        for part in [*model, model]:
            fully_shard(part, mesh=lab.device_mesh(), reshard_after_forward=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        return model

    held = lab.run(program, Mesh(dp=4), distributed=True, count_memory=True).memory[0]
    layer = 16 * 16 * 4
    pieces = 6 * layer // 4
    assert held.at(-1)["parameters"] == held.at(-1)["gradients"] == pieces
    began = next(row for row, phase in enumerate(held.phases) if phase == "backward")
    sharded = next(row for row, op in enumerate(held.ops) if op == "all_gather")
    assert pieces + layer <= held.of("parameters")[sharded:].max() <= pieces + 3 * layer
    assert held.of("parameters")[began] < pieces + 3 * layer


def test_on_processes_too():
    out = lab.run(steps, Mesh(dp=2), 1, on="processes", count_memory=True)
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    for rank, held in enumerate(out.memory):
        expected = state_bytes(1, sizes, 2, rank, FLOAT_ADAM)
        assert held.at(-1)["optimizer"] == expected.optimizer + 4 * len(SHAPES)
        assert held.at(-1)["parameters"] == expected.parameters
    assert (out.memory.clock, out.memory.unit) == ("measured", "s")


# --------------------------------------------------------------------------------------------------------- the ledger


def test_a_ledger_books_by_kind_and_row():
    ledger = Ledger()
    for time, op in [(1.0, "start"), (1.0, "a"), (2.0, "b"), (2.5, "c"), (4.0, "end")]:
        ledger.open_row(time, op, "", "forward")
    ledger.book(8, [(1, "other"), (2, "activations")], 3)
    ledger.book(100, [(0, "parameters")], 5)
    held = ledger.closed()
    assert held.times.tolist() == [0, 0, 1, 1.5, 3] and held.ops == ("start", "a", "b", "c", "end")
    assert held.of("other").tolist() == [0, 8, 0, 0, 0]
    assert held.of("activations").tolist() == [0, 0, 8, 0, 0]
    assert held.totals.tolist() == [100, 108, 108, 100, 100]
    assert (held.peak, held.peak_row) == (108, 1)
    with pytest.raises(TraceError, match="there is no kind 'x' of memory"):
        held.of("x")
    with pytest.raises(TraceError, match=r"Mesh\(dp=2\) has 2 ranks, and there is memory of 1"):
        Memory(Mesh(dp=2), [held])
    assert repr(Memory(Mesh(dp=1), [held], title="f")) == "Memory of f: 1 ranks, peak 108 B"
