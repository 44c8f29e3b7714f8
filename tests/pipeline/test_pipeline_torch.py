"""What torch's executor does beside running schedules: tuples, ties, dropout, recomputation, memory, times, errors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tplab import Mesh
from tplab.errors import RankError, ScheduleError, ShapeError
from tplab.pipeline.partition import LayerSpec, TiedSpec
from tplab.schedules import (
    Costs,
    chimera,
    dualpipe,
    gpipe,
    interleaved_1f1b,
    naive,
    one_f_one_b,
    simulate,
    v_min,
    zb_h1,
    zb_v,
)
from tplab.schedules.measured import compare, measured_costs, measured_strip
from tplab.torch import axis_index, evaluate_batch, gradient_norm, run, split_batch, stages_of, train_batch
from tplab.torch import dropout as shared_dropout
from tplab.torch.pipeline.redraw import Redraw
from tplab.torch.pipeline.stage import Pass, Stage
from tplab.torch.ranks.rank import this_rank

D, WORDS = 8, 13


def grad_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, D, dtype=torch.float64))

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    def __init__(self, p=0.0, shared_p=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.drop, self.shared_p = nn.Dropout(p), shared_p
        self.double()

    def forward(self, x):
        y = shared_dropout(self.drop(F.gelu(self.up(self.norm(x)))), self.shared_p)
        return x + self.down(y)


def gpt(num_blocks=6, **options):
    """A list of layers whose first and last have one matrix."""
    head = TiedSpec("words", Words, forward=lambda words, x: x @ words.weight.T)
    return [TiedSpec("words", Words), *[LayerSpec(Block, **options)] * num_blocks, head]


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


IDS = torch.arange(40).reshape(8, 5) * 7 % WORDS
TARGETS = (IDS + 3) % WORDS


def trained(schedule, layers, mesh=None, batches=1, bounds=None, **options):
    """(losses, gradient of each layer's parameters by name) of all ranks together; copies must agree."""

    def program():
        stages = stages_of(layers, schedule, bounds=bounds)
        batch = split_batch(IDS, TARGETS, schedule.num_microbatches)
        losses = [train_batch(schedule, stages, batch, cross_entropy, **options) for _ in range(batches)]
        found = {}
        for number, stage in stages.items():
            for place, layer in enumerate(stage.children()):
                for name, p in layer.named_parameters():
                    found[f"{stages.partition.bounds[number] + place}.{name.removeprefix('layer.')}"] = p.grad
        return losses, found

    per_rank = run(program, mesh or Mesh(pp=schedule.num_ranks)).per_rank
    grads = {}
    for losses, found in per_rank:
        assert losses == per_rank[0][0]  # the same bits on every rank
        for name, grad in found.items():
            assert name not in grads or torch.equal(grads[name], grad), name
            grads[name] = grad
    return [float(loss) for loss in per_rank[0][0]], grads


def same(got, want):
    assert got[0] == pytest.approx(want[0], rel=1e-12)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert (got[1][name] - grad).abs().max() <= 1e-12 * grad.abs().max(), name


def plain(layers, num_microbatches):
    """One device, one microbatch after another, one matrix for words in and out; begun as the pipeline's layers are."""
    found = {}

    def program():
        stages = stages_of(layers, gpipe(1, 1))
        modules = list(stages[0].children())
        words = modules[0].weight
        modules[-1].layer.weight = words  # type: ignore
        for x, y in split_batch(IDS, TARGETS, num_microbatches):
            out = x
            for module in modules:
                out = module(out)
            loss = cross_entropy(out, y) / num_microbatches
            found["loss"] = found.get("loss", 0) + float(loss.detach())
            loss.backward()
        named = [(f"{i}.{n.removeprefix('layer.')}", p) for i, m in enumerate(modules) for n, p in m.named_parameters()]
        return {name: p.grad for name, p in named}

    grads = run(program, Mesh(pp=1)).per_rank[0]
    return [found["loss"]], grads


# ------------------------------------------------------------------------------------------------------ ties


@pytest.mark.parametrize(
    "schedule",
    [gpipe(1, 4), one_f_one_b(3, 4), zb_h1(4, 4), zb_v(2, 4), interleaved_1f1b(2, 4), chimera(4, 4), dualpipe(2, 4)],
    ids=repr,
)
def test_tied_words_and_copies_of_stages(schedule):
    """First and last layer are one matrix: on two ranks, on one rank twice (V), on one rank in one stage (p = 1), on
    two ranks twice (two directions)."""
    same(trained(schedule, gpt()), plain(gpt(), 4))


def test_gradients_add_up_over_batches():
    losses, grads = trained(one_f_one_b(3, 4), gpt(), batches=2)
    want, once = plain(gpt(), 4)
    same((losses, grads), (want * 2, {name: 2 * grad for name, grad in once.items()}))


def test_ties_by_hand():
    def program():
        torch.manual_seed(axis_index("pp"))
        stage = nn.Linear(4, 4, bias=False)
        x = torch.ones(2, 4)
        with torch.no_grad():
            stage.weight.fill_(0.5)
        train_batch(naive(2, 1), stage, [(x, x)], F.mse_loss, tied=[((0, "weight"), (1, "weight"))])
        return stage.weight.grad

    first, second = run(program, Mesh(pp=2)).per_rank
    assert torch.equal(first, second)
    weight = torch.full((4, 4), 0.5, requires_grad=True)
    F.mse_loss(torch.ones(2, 4) @ weight.T @ weight.T, torch.ones(2, 4)).backward()
    torch.testing.assert_close(first, weight.grad)


# --------------------------------------------------------------------------------------------------- dropout


OF_FOUR_STAGES = [v_min(2, 4), interleaved_1f1b(1, 4, 4), chimera(4, 4)]


@pytest.mark.parametrize("options", [{"p": 0.3}, {"shared_p": 0.3}], ids=["torch's", "tplab's"])
def test_dropout_is_the_same_in_every_schedule(options):
    bounds = [0, 2, 4, 6, 8]
    want = trained(gpipe(4, 4), gpt(**options), batches=2, bounds=bounds)
    assert want[0][0] != pytest.approx(want[0][1])  # a new batch, new masks
    assert want[0][0] != pytest.approx(trained(gpipe(4, 4), gpt(), bounds=bounds)[0][0])
    for schedule in OF_FOUR_STAGES:
        same(trained(schedule, gpt(**options), batches=2, bounds=bounds), want)
    same(trained(zb_h1(4, 4), gpt(**options), batches=2, bounds=bounds, checkpoint_every=1), want)


def test_an_evaluation_draws_what_the_next_batch_will_and_leaves_the_generator_alone():
    """Modules in training mode drop; an evaluation does not count as a batch."""

    def program():
        stages = stages_of(gpt(p=0.3), schedule, bounds=[0, 2, 4, 6, 8])
        batch, found = split_batch(IDS, TARGETS, 4), []
        for _ in range(2):
            before = torch.get_rng_state()
            found.append(evaluate_batch(schedule, stages, batch, cross_entropy))
            assert torch.equal(before, torch.get_rng_state())
            assert torch.is_grad_enabled()
            found.append(train_batch(schedule, stages, batch, cross_entropy))
        return found

    schedule = v_min(2, 4)
    for first, same_as_first, second, same_as_second in run(program, Mesh(pp=2)).per_rank:
        assert first == same_as_first != second == same_as_second


def test_an_evaluation_is_the_mean_over_the_data_axis_and_refuses_a_wrong_schedule():
    def program(schedule):
        stages = stages_of(gpt(), schedule)
        mine = slice(4 * axis_index("dp"), 4 * axis_index("dp") + 4)
        batch = split_batch(IDS[mine], TARGETS[mine], 4)
        return [evaluate_batch(schedule, stages, batch, cross_entropy, data_axis=axis) for axis in (None, "dp")]

    mesh = Mesh(dp=2, pp=2)
    found = run(program, mesh, one_f_one_b(2, 4)).per_rank
    assert found[0][0] != found[2][0]
    for alone, together in found:
        assert together == pytest.approx((found[0][0] + found[2][0]) / 2)
        assert alone in (found[0][0], found[2][0])
    with pytest.raises(ScheduleError, match="deadlock"):
        run(program, mesh, one_f_one_b(2, 4).moved(1, 1, 7))


# ---------------------------------------------------------------------------- several tensors, changing shapes


class Widen(nn.Module):
    """A tensor -> three: one is a mask, and one nothing uses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D).double()

    def forward(self, x):
        y = self.linear(x)
        return y, y[..., :3].sum(-1, keepdim=True), (x > 0)


class Through(nn.Module):
    """No parameters: hands on what it gets, in another order."""

    def forward(self, y, z, mask):
        return z, mask, y


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, 1).double()

    def forward(self, z, mask, y):
        return self.linear(y * mask) + z


@pytest.mark.parametrize("rule", [gpipe, one_f_one_b, zb_h1])
@pytest.mark.parametrize("on", ["simulated", "processes"])
def test_several_tensors_between_stages_and_shapes_that_change(rule, on):
    def batch(sizes):
        random = torch.Generator().manual_seed(0)
        xs = [torch.randn(size, 5, D, dtype=torch.float64, generator=random) for size in sizes]
        return [(x, x.mean(-1, keepdim=True)) for x in xs]

    def program(kind):
        torch.manual_seed(0)
        layers = [Widen(), Through(), Narrow()]
        if kind == "plain":
            for sizes in ([2, 3, 4], [1, 1, 6]):
                for x, y in batch(sizes):
                    (F.mse_loss(layers[2](*layers[1](*layers[0](x))), y) / 3).backward()
            return {i: [p.grad for p in layer.parameters()] for i, layer in enumerate(layers)}
        index = axis_index("pp")
        for sizes in ([2, 3, 4], [1, 1, 6]):  # and from call to call: nothing has to be reset
            train_batch(rule(3, 3), layers[index], batch(sizes), F.mse_loss)
        return {index: [p.grad for p in layers[index].parameters()]}

    want = program("plain")
    for found in run(program, Mesh(pp=3), "pipeline", on=on).per_rank:
        for stage, grads in found.items():
            for got, grad in zip(grads, want[stage], strict=True):
                torch.testing.assert_close(got, grad, rtol=1e-12, atol=1e-15)


# --------------------------------------------------------------------------------- recomputation, FLOPs, memory


class Dropped(nn.Linear):
    """A layer with both kinds of dropout; with torch's checkpoint around it, or without."""

    is_checkpointed = False

    def forward(self, x):
        def layer(x):
            return F.dropout(shared_dropout(super(Dropped, self).forward(x), 0.5), 0.5)

        return checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)


def test_dropout_inside_torchs_checkpoint_and_inside_that_of_train_batch():
    def program(is_checkpointed, every):
        stage = nn.Sequential(Dropped(6, 6), Dropped(6, 6))
        for index, layer in enumerate(stage):
            layer.is_checkpointed = is_checkpointed
            with torch.no_grad():
                layer.weight.fill_(0.1 + index)  # type: ignore[operator]
        xs = torch.arange(24.0).reshape(4, 6)
        train_batch(one_f_one_b(2, 2), stage, split_batch(xs, xs, 2), F.mse_loss, checkpoint_every=every)
        return [layer.weight.grad for layer in stage]

    want = run(program, Mesh(pp=2), False, None).per_rank
    for is_checkpointed, every in ((True, None), (False, 1), (True, 1)):
        for got, expected in zip(run(program, Mesh(pp=2), is_checkpointed, every).per_rank, want, strict=True):
            assert all(map(torch.equal, got, expected)), (is_checkpointed, every)


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 4), zb_h1(3, 4), zb_v(2, 4)], ids=lambda s: s.name)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_recomputed_activations_change_nothing(schedule, every):
    """Also where a checkpoint falls on a stage's first layer, which only gets a message."""
    same(trained(schedule, gpt(), checkpoint_every=every), trained(schedule, gpt()))


def held_by(schedule, **options):
    """A trace of it, with two blocks in each stage."""

    def program():
        stages = {n: nn.Sequential(Block(), Block()) for n in schedule.placement[axis_index("pp")]}
        x = torch.ones(3, 5, D, dtype=torch.float64)
        train_batch(schedule, stages, [(x, x)] * schedule.num_microbatches, F.mse_loss, **options)

    return run(program, Mesh(pp=schedule.num_ranks)).trace


def flops_by_kind(schedule, **options):
    """FLOPs of all ranks, by kind of action: what the trace says on the clock of a cluster."""

    def program():
        stages = {n: nn.Sequential(linear(), nn.Tanh(), linear()) for n in schedule.placement[axis_index("pp")]}
        x = torch.ones(3, 4)
        train_batch(schedule, stages, [(x, x)] * schedule.num_microbatches, F.mse_loss, **options)

    flops = Counter()
    for event in run(program, Mesh(pp=1), cluster="h100").trace.select(kind="compute").events:
        if event.where.startswith("stage"):
            flops[event.op[0]] += event.flops
    return flops


def test_flops_of_the_whole_batch():
    """B = I + W; recomputing costs one forward pass more, whether the backward pass is split or not."""
    whole = flops_by_kind(one_f_one_b(1, 4))
    split = flops_by_kind(zb_h1(1, 4))
    assert whole["F"] == split["F"] > 0
    assert split["I"] + split["W"] == whole["B"]
    once = 4  # the losses of four microbatches are added up
    again = flops_by_kind(one_f_one_b(1, 4), checkpoint_every=1)
    assert again["B"] == whole["B"] + whole["F"] - once
    again = flops_by_kind(zb_h1(1, 4), checkpoint_every=1)
    assert again["I"] + again["W"] == whole["B"] + whole["F"] - once
    assert again["W"] == split["W"]


@pytest.mark.parametrize(
    "schedule", [gpipe(2, 4), one_f_one_b(2, 4), zb_h1(2, 4), zb_v(2, 4), interleaved_1f1b(2, 4)], ids=lambda s: s.name
)
def test_bytes_held_are_those_predicted(schedule):
    """After every action, on every rank: the strip of the simulation, with the bytes of one microbatch put in."""

    trace = held_by(schedule)
    costs = measured_costs(schedule, trace)
    assert np.min(costs.activation) > 3 * 5 * D * 8 * 10  # two blocks keep more than ten tensors of x's size
    predicted = simulate(schedule, costs)
    assert trace.peak_bytes == pytest.approx(predicted.peak_bytes)
    for rank in range(schedule.num_ranks):
        strip = measured_strip(predicted, rank, trace)[1][1:]
        assert strip[-1] == 0
        steps = predicted.activation_bytes(rank)[1][1:]
        if not schedule.splits_backward:  # else equal times are ordered otherwise
            assert strip == pytest.approx(steps)


class Alive(TorchDispatchMode):
    """Bytes of all tensors that were met inside and still live: counted without asking the executor."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result

    def num_bytes(self, *apart):
        """Without the memory of these tensors."""
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
        others = {x.untyped_storage()._cdata for x in apart}
        return sum(num_bytes for key, (_, num_bytes) in self.storages.items() if key not in others)


def test_bytes_held_are_what_really_lives():
    """An allocation counter sees the same: what F keeps, what I leaves, and that B and W let go of everything."""

    def program():
        stage, found = Stage(nn.Sequential(Block(), Block()), 1, 3), []
        for split in (False, True):
            x = torch.ones(64, 5, D, dtype=torch.float64)
            with Alive() as alive:
                made = Pass(stage, (x * 1,), None, Redraw(this_rank(), (0,), "pp", x.device))
                made.outputs = ()
                apart = [x, *stage.module.parameters()]
                found.append((alive.num_bytes(*apart), made.num_bytes()))
                if split:
                    apart += made.input_grads((torch.ones_like(x),))
                    found.append((alive.num_bytes(*apart), made.num_bytes()))
                    apart += made.weight_grads().values()
                else:
                    dx, dw = made.backward((torch.ones_like(x),))
                    apart += [*dx, *dw.values()]
                found.append((alive.num_bytes(*apart), made.num_bytes()))
        return found

    whole, after_b, split, after_i, after_w = run(program, Mesh(pp=1)).per_rank[0]
    one = 64 * 5 * D * 8
    # a block keeps the norm's input, two statistics a row, its output, and up's output and gelu's, which are 2 D wide
    assert whole == split == (2 * (one + 2 * 64 * 5 * 8 + one + 2 * one + 2 * one),) * 2
    assert after_i[0] == after_i[1]
    assert after_b == after_w == (0, 0)


def test_recomputing_keeps_only_what_enters_the_pieces():
    (kept,), (recomputed,) = (held_by(gpipe(1, 4), checkpoint_every=every).peak_bytes for every in (None, 1))
    one = 3 * 5 * D * 8
    assert recomputed == 4 * one  # of four microbatches what enters the second block; the first's input is the batch's
    assert kept > 10 * recomputed


def test_the_microbatch_itself_is_not_counted():
    """Targets are slices of a whole batch, whose memory is there anyway; as inputs are."""

    def program(num_microbatches):
        ids = torch.arange(8 * 5).reshape(8, 5) % D
        batch = split_batch(ids, ids.flip(0), 8)[:num_microbatches]
        stage = nn.Sequential(nn.Embedding(D, D), nn.Linear(D, D))
        train_batch(gpipe(1, num_microbatches), stage, batch, cross_entropy)

    one, four = (run(program, Mesh(pp=1), count).trace.peak_bytes for count in (1, 4))
    assert four == 4 * one
    # the linear layer's input, the loss's log softmax, and the sum of its weights
    assert one == 5 * D * 4 + 5 * D * 4 + 4


def test_memory_of_accumulation():
    """On one device microbatches follow each other; in a pipeline the first rank holds as many as there are in flight:
    all of them in GPipe, as many as there are ranks in 1F1B."""

    def peak(schedule):
        return held_by(schedule).peak_bytes[0]

    one = peak(one_f_one_b(1, 1))
    assert [peak(one_f_one_b(1, m)) for m in (2, 6)] == [one, one]
    first = peak(naive(3, 1))
    assert [peak(gpipe(3, m)) for m in (2, 6)] == [2 * first, 6 * first]
    assert [peak(one_f_one_b(3, m)) for m in (2, 6)] == [2 * first, 3 * first]


# ----------------------------------------------------------------------------------------------------- times


def test_measured_times_are_fed_back():
    schedule = zb_h1(2, 4)

    def program():
        stage = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        x = torch.ones(64, 64)
        for _ in range(3):
            train_batch(schedule, stage, [(x, x)] * 4, F.mse_loss)

    trace = run(program, Mesh(pp=2), clock="measured").trace
    assert {"F0", "I3", "W2"} <= set(trace.codes("op")[0])
    costs = measured_costs(schedule, trace)
    assert costs.unit == "s"
    assert min(map(np.min, (costs.forward, costs.input_grad, costs.weight_grad))) > 0
    assert costs.transfer > 0
    beside = compare(schedule, trace)
    assert beside.predicted.busy.sum() == pytest.approx((beside.end - beside.start).sum())
    # what is left is what the executor does between actions: the prediction is a lower bound, and not far off
    assert beside.residual >= -1e-9
    assert (beside.lag >= -1e-9).all()
    assert "predicted" in str(beside) and len(str(beside).splitlines()) == 4
    first, last = (compare(schedule, trace, batch=number) for number in (0, 2))
    assert first.makespan != last.makespan
    with pytest.raises(ScheduleError, match="3 batches of this schedule on rank 0, so there is no batch 3"):
        compare(schedule, trace, batch=3)
    with pytest.raises(ScheduleError, match="must be of this schedule"):
        compare(gpipe(2, 4), trace)


def test_times_of_processes_and_of_a_cluster():
    schedule = one_f_one_b(2, 2)

    def program():
        x = torch.ones(8, 8)
        train_batch(schedule, nn.Linear(8, 8), [(x, x)] * 2, F.mse_loss)

    for trace in (run(program, Mesh(pp=2), cluster="h100").trace, run(program, Mesh(pp=2), on="processes").trace):
        done = trace.select(rank=1, kind="compute")
        names = [(e.op, e.where) for e in done.events if e.where.startswith("stage")]
        assert names == [("F0", "stage 1"), ("B0", "stage 1"), ("F1", "stage 1"), ("B1", "stage 1")]
        assert compare(schedule, trace).makespan > 0
    flops = run(program, Mesh(pp=2), cluster="h100").trace.select(rank=0, op="F0").column("flops")
    assert flops.tolist() == [2 * 8 * 8 * 8]


# ----------------------------------------------------------------------------------------------------- hooks


class Hooked(nn.Linear):
    """Its output's gradient times 10, and its weight's times 3; both counted."""

    def __init__(self):
        super().__init__(D, D, dtype=torch.float64)
        self.calls = [0, 0]
        self.weight.register_hook(lambda g: self.count(1, g * 3))

    def count(self, which, g):
        self.calls[which] += 1
        return g

    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda g: self.count(0, g * 10))
        return y


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 3), zb_h1(2, 3), zb_v(2, 3)], ids=lambda s: s.name)
@pytest.mark.parametrize("every", [None, 1])
def test_hooks_of_tensors_run_once_for_each_microbatch(schedule, every):
    batch = [(x, x + 1) for x in torch.randn(3, 2, D, dtype=torch.float64)]
    layers = [Hooked() for _ in range(schedule.num_stages)]
    for x, target in batch:
        (F.mse_loss(nn.Sequential(*layers)(x), target) / 3).backward()
    want = [(layer.weight.grad, [3, 3]) for layer in layers]
    states = [layer.state_dict() for layer in layers]

    def program():
        held = {n: Hooked() for n in schedule.placement[axis_index("pp")]}
        for n, layer in held.items():
            layer.load_state_dict(states[n])
        stages = {n: nn.Sequential(layer) for n, layer in held.items()}
        train_batch(schedule, stages, batch, F.mse_loss, checkpoint_every=every)
        return {n: (layer.weight.grad, layer.calls) for n, layer in held.items()}

    found = {n: value for held in run(program, Mesh(pp=2)).per_rank for n, value in held.items()}
    for n, (grad, calls) in enumerate(want):
        torch.testing.assert_close(found[n][0], grad)
        assert found[n][1] == calls


@pytest.mark.parametrize("schedule", [gpipe(2, 4), zb_h1(2, 4), chimera(2, 4)], ids=lambda s: s.name)
def test_post_accumulate_grad_hooks_are_called_once_with_the_whole_gradient(schedule):
    """When the parts of other ranks, and those of tied names, are in it: an optimizer may step in such a hook."""

    def program():
        seen = []
        stages = {n: linear() for n in dict.fromkeys(schedule.placement[axis_index("pp")])}
        for n, stage in stages.items():
            stage.weight.register_post_accumulate_grad_hook(lambda p, n=n: seen.append((n, p.grad.clone())))
            stage.bias.register_post_accumulate_grad_hook(lambda p: seen.append("frozen"))
            stage.bias.requires_grad_(False)
        x = torch.randn(2, 4) + axis_index("dp")
        train_batch(
            schedule,
            stages,
            [(x, x + k) for k in range(4)],
            F.mse_loss,
            data_axis="dp",
            tied=[[(0, "weight"), (1, "weight")]],
        )
        assert sorted(n for n, _ in seen) == sorted(stages)
        return [(grad, stages[n].weight.grad) for n, grad in seen]

    ranks = run(program, Mesh(dp=2, pp=2)).per_rank
    (first, _) = ranks[0][0]
    for rank in ranks:
        for then, now in rank:
            assert torch.equal(then, now) and torch.equal(then, first)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("schedule", [gpipe(2, 4), zb_h1(2, 4)], ids=lambda s: s.name)
def test_statistics_move_once_also_where_activations_are_computed_again(schedule, every):
    def program(every):
        torch.manual_seed(1)
        stage = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Tanh(), nn.BatchNorm1d(D))
        x = torch.randn(4, 3, D)
        train_batch(schedule, stage, [(y, y) for y in x], F.mse_loss, checkpoint_every=every)
        return dict(stage.state_dict()), [p.grad for p in stage.parameters()]

    for (state, grads), (want, want_grads) in zip(
        run(program, Mesh(pp=2), every).per_rank, run(program, Mesh(pp=2), None).per_rank, strict=True
    ):
        assert want["1.num_batches_tracked"] == 4
        for name, value in want.items():
            torch.testing.assert_close(state[name], value)
        torch.testing.assert_close(grads, want_grads)


# ---------------------------------------------------------------------------------------------------- errors


def refused(
    words,
    schedule=None,
    stages=None,
    batch=None,
    loss=F.mse_loss,
    error: type[Exception] = ScheduleError,
    mesh=None,
    **options,
):
    schedule = schedule or one_f_one_b(2, 2)
    x = torch.ones(2, 4)

    def program():
        given = nn.Linear(4, 4) if stages is None else stages(axis_index("pp"))
        return train_batch(schedule, given, [(x, x)] * 2 if batch is None else batch, loss, **options)

    with pytest.raises((error, RankError), match=words) as caught:
        run(program, mesh or Mesh(pp=2))
    assert isinstance(caught.value, error) or isinstance(caught.value.__cause__, error)


def linear():
    return nn.Linear(4, 4)


def no_tensor(*_):
    return 1.0


def test_what_does_not_fit_is_told_in_words():
    x, halves = torch.ones(2, 4), Returns(torch.ones(2, 4).long())
    refused("for 3 ranks, but axis 'pp' has 2; make the schedule with ranks=2", one_f_one_b(3, 2))
    refused("the schedule has 2 microbatches, but 1 were given", batch=[(x, x)])
    refused("microbatch 0 is a Tensor; it must be a pair", batch=[x, x])
    refused("holds stage 0, but was given stage 1: stage 0 is missing", stages=lambda i: {1 - i: linear()})
    refused("holds stages 0, 3, but was given 1; give a module for each", zb_v(2, 2), stages=lambda i: linear())
    refused("stage 1 is not its own", stages=lambda i: {0: linear(), 1: linear()})
    refused("microbatch 0 is a torch.float32 tensor .2, 4.; it must be one", loss=lambda y, t: y - t, error=ShapeError)
    refused("loss of microbatch 0 is a float;", loss=no_tensor, error=ShapeError)
    refused("stage 0 returned a dict; it must return a tensor", stages=lambda i: Returns({}))
    refused("stage 0 returned a tuple of Tensor, NoneType", stages=lambda i: Returns((x, None)))
    refused("nothing that enters stage 1 is of floating point", stages=lambda i: Floats() if i else halves)
    refused("checkpoint_every=2 needs the layers of stage 0, which is a Linear", checkpoint_every=2)
    refused("checkpoint_every is 0", stages=lambda i: nn.Sequential(linear()), checkpoint_every=0)
    for value in None, F.relu, 3:
        words = "takes an nn.Module for each stage, not .*; stages_of"
        refused(words, stages=lambda i, value=value: value, error=TypeError)
        refused("stage 0 is .*; it must be an nn.Module", stages=lambda i, value=value: [value], error=TypeError)
    with pytest.raises(RankError, match=r"TypeError at .*: layer 1 is 'relu', which cannot be called; a layer is a"):
        run(lambda: stages_of([linear(), "relu"], gpipe(2, 1)), Mesh(pp=2))  # type: ignore[list-item]


@pytest.mark.parametrize("every", [None, 1])
def test_a_loss_without_a_gradient_is_refused_as_by_backward(every):
    def detached(y, target):
        return F.mse_loss(y.detach(), target)

    words = "the loss of microbatch 0 depends on nothing that has a gradient"
    refused(words, loss=detached, stages=lambda i: nn.Sequential(linear()), checkpoint_every=every)
    refused(
        words,
        gpipe(1, 2),
        lambda i: nn.Sequential(linear()).requires_grad_(False),
        mesh=Mesh(pp=1),
        checkpoint_every=every,
    )


def test_ties_that_cannot_be_are_told_in_words():
    refused("tied names stage 5; there are stages 0 to 1", tied=[((0, "weight"), (5, "weight"))])
    refused("'wait' of stage 0, which it does not have; it has weight, bias", tied=[((0, "wait"), (1, "weight"))])
    refused(r"'bias' of stage 0 is \[4\] here, and its copy at position 1", tied=[((0, "bias"), (1, "weight"))])
    for wrong in ["weight"], "weight", [(0, "weight")], [[("weight", 0)]], [[(0, "weight", 1)]], 3:
        refused(r"where it must say \(stage, name\), a list of them for each parameter", tied=wrong)


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value, self.linear = value, linear()

    def forward(self, x):
        return self.value


class Floats(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(x.float())


def test_batches_that_cannot_be_split():
    x = torch.ones(6, 2)
    assert [a.shape[0] for a, _ in split_batch(x, x, 3)] == [2, 2, 2]
    (a, b), y = split_batch((x, x + 1), x, 2)[1]
    assert torch.equal(b, a + 1) and y.shape == (3, 2)
    with pytest.raises(ShapeError, match="batch has size 6, which 4 microbatches cannot share equally;\npad it to 8"):
        split_batch(x, x, 4)
    for inputs, targets, words in [
        ([1, 2], [3, 4], "the inputs have an object of type list; give a tensor, or a tuple"),
        (x, {"ids": x}, "the targets have an object of type dict"),
        ((x, None), x, "the inputs have an object of type NoneType"),
        (x, torch.tensor(1.0), "the targets have a tensor without dims"),
    ]:
        with pytest.raises(TypeError, match=words):
            split_batch(inputs, targets, 2)
    with pytest.raises(ShapeError, match="batches of 2, 6; they must agree"):
        split_batch(x, x[:2], 2)


def test_costs_say_how_long_steps_are():
    def program():
        x = torch.ones(2, 4)
        train_batch(gpipe(1, 2), linear(), [(x, x)] * 2, F.mse_loss, costs=Costs(3, 1, 4))

    trace = run(program, Mesh(pp=1)).trace
    assert [(e.op, e.start, e.end) for e in trace.events if e.kind == "compute"] == [
        ("F0", 0, 3), ("F1", 3, 6), ("B0", 6, 11), ("B1", 11, 16)
    ]  # fmt: skip


@pytest.mark.parametrize("schedule", [gpipe(2, 2), interleaved_1f1b(2, 2, 2), chimera(2, 2)], ids=repr)
@pytest.mark.parametrize("is_one", [True, False])
def test_parameters_that_modules_in_several_stages_share_are_tied(schedule, is_one):
    """The same module twice, or two modules with one weight: gradients, and the norm, are those of the whole."""
    first, last = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    last.weight = first.weight
    layers = nn.Sequential(first, first, nn.Tanh(), nn.Linear(4, 4).double(), first if is_one else last)
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def program(layers, x, y):
        stages = stages_of(list(layers), schedule)
        train_batch(schedule, stages, split_batch(x, y, 2), F.mse_loss)
        return [p.grad for p in layers.parameters() if p.grad is not None], gradient_norm(stages)

    F.mse_loss(layers(x), y).backward()
    whole = [grad_of(p) for p in layers.parameters()]
    for grads, norm in run(program, Mesh(pp=2), layers, x, y).per_rank:
        torch.testing.assert_close(grads[0], whole[0])
        torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in whole]).norm())


def test_gradients_of_tied_parameters_have_memory_of_their_own():
    """Scaled in place, as clipping does, each is scaled once."""

    def program():
        stages = stages_of([TiedSpec("w", nn.Linear, 4, 4, bias=False)] * 2, gpipe(1, 1))
        train_batch(gpipe(1, 1), stages, [(torch.ones(2, 4), torch.zeros(2, 4))], F.mse_loss)
        first, second = (parameter.grad for parameter in stages.parameters())
        assert first is not None and second is not None
        before = second.clone()
        first.mul_(0.5)
        assert torch.equal(second, before)

    run(program, Mesh(pp=1))


@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize("make", [gpipe, zb_h1])
def test_gradients_that_autograd_gives_to_several_parameters_have_memory_of_their_own(make, has_hooks):
    """One tensor is the gradient of all that is added up, and also goes on to the stage before."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(torch.ones(2, 4) * (number + 1) for number in range(3))

        def forward(self, x):
            return (x + (self.parts[0] + self.parts[1])) * self.parts[2]

    def halve(parameter):
        parameter.grad.mul_(0.5)

    def program():
        stages = [Sum()]
        for parameter in stages[0].parameters() if has_hooks else ():
            parameter.register_post_accumulate_grad_hook(halve)
        train_batch(make(2, 1), stages, [(torch.ones(2, 4), torch.zeros(2, 4))], F.mse_loss)
        grads = [grad_of(parameter) for parameter in stages[0].parameters()]
        for grad in () if has_hooks else grads:
            grad.mul_(0.5)
        return grads

    whole = nn.Sequential(Sum(), Sum())
    F.mse_loss(whole(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
    found = [grad for grads in run(program, Mesh(pp=2)).per_rank for grad in grads]
    for parameter, grad in zip(whole.parameters(), found, strict=True):
        torch.testing.assert_close(grad, 0.5 * grad_of(parameter))
