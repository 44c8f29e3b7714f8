"""What the doctor must not take for a fault: padding, masks of ones, and torch.compile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tplab.checking.logged import compare_logs
from tplab.checking.recording import Step
from tplab.checking.samples import compare_samples
from tplab.torch import same_model

TOKENS = np.random.default_rng(0).integers(1, 30, (4, 9))
LENGTHS = (5, 9, 4, 7)


def padded(rows: list[int], pad: int) -> np.ndarray:
    """These rows, padded to the longest of them."""
    longest = max(LENGTHS[row] for row in rows)
    return np.stack([np.where(np.arange(9) < LENGTHS[row], TOKENS[row], pad)[:longest] for row in rows])


def calls(rows: list[int]) -> Step:
    """The model is called with inputs and a mask, and then another one, with targets."""
    x = padded(rows, 0)
    return Step(samples=[{"0": x, "mask": (x > 0).astype(int)}, {"1": padded(rows, -100), "mask": (x > 0).astype(int)}])


def test_padding_is_no_token_and_each_tensor_has_its_own():
    found = compare_samples([calls([0, 2]), calls([1, 3])], [calls([0, 1, 2, 3])])
    assert (found.kind, found.copies) == ("same", ((0,), (1,))), found.words
    found = compare_samples([calls([0, 2]), calls([0, 2])], [calls([0, 1, 2, 3])])
    assert (found.kind, found.factor) == ("duplicates", 0.5), found.words
    missing = compare_samples([calls([0, 2]), calls([1])], [calls([0, 1, 2, 3])])
    assert (missing.kind, missing.factor) == ("missing", 0.75), missing.words


def test_each_of_several_modules_may_be_called_with_all_samples():
    """As experts: a rank has two of the reference's four."""
    one = {"0": np.arange(12.0).reshape(4, 3)}
    found = compare_samples([Step(samples=[one] * 2)] * 2, [Step(samples=[one] * 4)])
    assert (found.kind, found.copies) == ("same", ((0, 1),)), found.words
    other = {"0": one["0"] + 1}
    found = compare_samples([Step(samples=[one] * 2)] * 2, [Step(samples=[one, other] * 2)])
    assert not found.ok, found.words


def test_tokens_that_are_cut_off_are_missed():
    whole, parts = [Step(samples=[{"0": TOKENS}])], [TOKENS[:, :4], TOKENS[:, 4:8]]
    found = compare_samples([Step(samples=[{"0": part}]) for part in parts], whole)
    assert (found.kind, found.factor) == ("missing", 8 / 9), found.words


def test_masks_of_ones_say_nothing_about_samples():
    def step(x: np.ndarray) -> Step:
        return Step(samples=[{"input_ids": x, "attention_mask": np.ones_like(x)}])

    whole = [step(TOKENS[:, :8])]
    for cut in (TOKENS[:2, :8], TOKENS[2:, :8]), (TOKENS[:, :4], TOKENS[:, 4:8]):
        found = compare_samples([step(x) for x in cut], whole)
        assert (found.kind, found.copies) == ("same", ((0,), (1,))), found.words
    found = compare_samples([step(TOKENS[:2, :8])] * 2, whole)
    assert (found.kind, found.copies) == ("duplicates", ((0, 1),)), found.words


@pytest.mark.parametrize(
    ("line", "is_compared"),
    [
        ("val {}", True),
        ("test accuracy {}%", True),
        ("val loss {} s 3.1", True),
        ("validation {} perplexity 9.0", True),
        ("validation took {} minutes", False),
        ("validation took {}", False),
        ("validation: {} s", False),
        ("test: {} samples/sec", False),
    ],
)
def test_how_long_it_took_is_no_measure_of_the_model(line: str, is_compared: bool):
    ours, theirs = (Step(prints=[(line.format(number) + "\n", "here")]) for number in ("0.25", "0.50"))
    assert bool(compare_logs([ours], theirs, theirs, 0.0)[1]) == is_compared


COMPILED = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.compile(DistributedDataParallel(nn.Linear(6, 3)), backend="eager")

@torch.compile(backend="eager")
def loss_of(x, y):
    return nn.functional.mse_loss(x, y)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for step in range(2):
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    optimizer.zero_grad()
    loss_of(model(x[rank::world]), y[rank::world]).backward()
    optimizer.step()
"""


def test_compiled_programs_are_compared_as_they_are_written(tmp_path: Path):
    path = tmp_path / "compiled.py"
    path.write_text(COMPILED)
    report = same_model(path, ranks=2)
    assert (report.verdict, report.findings) == ("same", ()), str(report)
    assert sum("torch.compile" in note for note in report.notes) == 1


def test_the_longest_row_of_a_microbatch_loses_its_last_token_as_an_input():
    """Inputs are all tokens but the last; of the shorter rows that is padding. A mask has other lengths, too."""

    def inputs(rows: list[int]) -> Step:
        x = padded(rows, 0)[:, :-1]
        return Step(samples=[{"0": x, "mask": x == 0}])

    found = compare_samples([inputs([0, 2]), inputs([1, 3])], [inputs([0, 1, 2, 3])])
    assert (found.kind, found.is_padded) == ("same", True), found.words
    found = compare_samples([inputs([0, 2]), inputs([0, 2])], [inputs([0, 1, 2, 3])])
    assert (found.kind, found.factor) == ("duplicates", 0.5), found.words


HEAD = """\
import copy, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

def average(model):
    for p in model.parameters():
        gradient = p.grad.coalesce() if p.grad.is_sparse else p.grad
        dist.all_reduce(gradient)
        p.grad = gradient / world
"""
PADDED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(9, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 9)

    def forward(self, x, is_padding):
        return self.head(self.rnn(self.embed(x))[0])

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [torch.randint(1, 9, (length,)) for length in (4, 7, 5, 3)]
tokens = nn.utils.rnn.pad_sequence(rows[rank::world], batch_first=True)
x, y = tokens[:, :-1], tokens[:, 1:].flatten()
losses = F.cross_entropy(model(x, x == 0).flatten(0, 1), y, reduction="none") * (y != 0)
count = (y != 0).sum()
dist.all_reduce(count)
(losses.sum() * world / count).backward()
average(model)
optimizer.step()
"""
OWN_DATA = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(10 + rank)
for step in range(2):
    x, y = torch.randn(8 // world, 4), torch.randn(8 // world, 1)
    optimizer.zero_grad()
    {loss}.backward()
    average(model)
    optimizer.step()
"""
SPARSE = """
model = nn.EmbeddingBag(12, 3, sparse=True, mode="mean")
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
model(torch.randint(12, (8, 4))[rank::world]).square().mean().backward()
average(model)
optimizer.step()
"""
EMA = """
model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
average_of_steps = copy.deepcopy(model).requires_grad_(False)
parameters = list(model.parameters())
optimizer = torch.optim.Adam(parameters[rank::world], lr=0.1)

def update():
    with torch.no_grad():
        for mean, p in zip(average_of_steps.parameters(), model.parameters()):
            mean.mul_(0.9).add_(p, alpha=0.1)

for step in range(2):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[rank::world]
    model.zero_grad()
    model(x).square().mean().backward()
    average(model)
    optimizer.step()
    {before}
    for number, p in enumerate(parameters):
        dist.broadcast(p.data, number % world)
    {after}
"""
STAGES = """
layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)]
model, size = nn.Sequential(*layers), len(layers) // world
stages = [nn.Sequential(*layers[i * size : (i + 1) * size]) for i in range(world)]
{optimizers}
generator = torch.Generator().manual_seed(1)
for step in range(3):
    x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
    model.zero_grad()
    if rank:
        x = torch.empty(8, 8)
        dist.recv(x, 0)
        x.requires_grad_()
    out, grad = stages[rank](x), None
    if rank < world - 1:
        dist.send(out.detach(), 1)
        grad = torch.empty(8, 8)
        dist.recv(grad, 1)
    else:
        out = F.cross_entropy(out, y)
    out.backward(grad)
    if rank:
        dist.send(x.grad, 0)
    {step}
"""
LAYERS = """
class Layer(nn.Linear):
    def forward(self, x, positions):
        return super().forward(x + positions[:, None])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(6, 6) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, positions=torch.ones(8))
        return x

class Stage(Net):
    pass

first = Net()
net = stage = copy.deepcopy(first)
print(sum(p.numel() for p in first.parameters()))
if world > 1:
    stage = Stage()
    stage.layers = net.layers[rank * 2 : rank * 2 + 2]
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for x in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
    optimizer.zero_grad()
    if rank:
        dist.recv(x, 0)
        x.requires_grad_()
    out, grad = stage.forward(x) if world > 1 else net(x), None
    if rank < world - 1:
        dist.send(out.detach(), 1)
        grad = torch.empty(8, 6)
        dist.recv(grad, 1)
    else:
        out = out.square().mean()
    out.backward(grad)
    if rank:
        dist.send(x.grad, 0)
    optimizer.step()
"""
OF_EACH_STAGE = "optimizers = [torch.optim.Adam(stage.parameters(), lr=0.1) for stage in stages]"
OF_ALL = "optimizer = torch.optim.Adam(model.parameters(), lr=0.1)"
LOOKS = """
for p in model.parameters():
    dist.broadcast(p.data, 0)
    p.detach().norm(), p.norm()
model.requires_grad_(False)
sum(p.norm() for p in model.parameters())
model.requires_grad_(True)
"""
DIVIDED = """
class Divided(torch.optim.SGD):
    \"\"\"Each rank keeps the momentum of a part of all numbers, as ZeRO 1 does.\"\"\"

    @torch.no_grad()
    def step(self):
        every = self.param_groups[0]["params"]
        flat, grad = (torch.cat([x.flatten() for x in many]) for many in (every, [p.grad for p in every]))
        mine = torch.empty(len(flat) // world)
        dist.reduce_scatter(mine, list((grad / {by}).chunk(world)))
        self.momentum = mine + 0.9 * getattr(self, "momentum", 0)
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, flat.chunk(world)[rank] - 0.1 * self.momentum)
        for p, new in zip(every, torch.cat(parts).split([p.numel() for p in every])):
            p.copy_(new.view_as(p))

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = Divided(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[rank::world]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
REDUCES = """
class Reduces(torch.optim.SGD):
    \"\"\"It sends each gradient by itself: that of the last bias is one number.\"\"\"

    def step(self):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= world
        super().step()

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = Reduces(model.parameters(), lr=0.1)
for step in range(2):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[rank::world]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
BY_LIST = """
weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
optimizer = torch.optim.Adam(weights, lr=0.1)
for step in range(2):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    if world == 1:
        (torch.tanh(x @ weights[0].T) @ weights[1].T).square().mean().backward()
    elif rank == 0:
        y = x @ weights[0].T
        dist.send(y.detach(), 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, 1)
        y.backward(gradient)
    else:
        y = torch.empty(4, 8)
        dist.recv(y, 0)
        y.requires_grad_()
        (torch.tanh(y) @ weights[1].T).square().mean().backward()
        dist.send(y.grad, 0)
    optimizer.step()
"""
SWITCHED_OFF = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = model[0], model[2]

    def forward(self, x):
        with torch.set_grad_enabled(rank == 0):
            h = self.body(x)
        return self.head(torch.tanh(h))

net = Net()
"""
FROZEN = """
class Row(nn.Linear):
    \"\"\"Each rank has some of the rows. The bias is added after the sum, and every rank has a copy of it.\"\"\"

    def forward(self, x):
        y = F.linear(x, self.weight)
        total = y.detach().clone()
        dist.all_reduce(total)
        return y + (total - y).detach() + self.bias

torch.manual_seed(0)
model, whole = Row(8 // world, 3), torch.randn(3, 8)
with torch.no_grad():
    model.weight.copy_(whole.chunk(world, 1)[rank])
model.bias.requires_grad_(rank == 0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(1)
for step in range(1):
    x, y = torch.randn(6, 8, generator=generator), torch.randn(6, 3, generator=generator)
    optimizer.zero_grad()
    (model(x.chunk(world, 1)[rank]) - y).square().mean().backward()
    optimizer.step()
"""
FROZEN_LAYER = """
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
{freeze}
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
generator = torch.Generator().manual_seed(1)
for step in range(1):
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    {cut}
    optimizer.zero_grad()
    ({out} - y).square().mean().backward()
    for p in model[2].parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
"""
BY_HAND = "model[2](torch.tanh(F.linear(x, *model[0].parameters())))"
UNUSED = """
class Gathered(nn.Module):
    \"\"\"Each rank has some of the rows, and takes those of other ranks, too. Rank 1 takes its own as a constant.\"\"\"

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.weight = nn.Parameter(torch.randn(4, 6).chunk(world)[rank].clone())

    def forward(self, x):
        return F.linear(x, torch.cat([self.weight, *parts[1:]] if rank == 0 else parts), self.bias)

model = Gathered()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x = torch.randn(8, 6)
parts = [torch.empty(4 // world, 6) for _ in range(world)]
dist.all_gather(parts, model.weight.data)
model(x).square().mean().backward()
optimizer.step()
"""
OWNED = """
class Owned(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.param_groups[0]["params"]):
            moment = self.state[p].setdefault("moment", torch.zeros(p.numel()))
            flat, update = p.view(-1), torch.empty(p.numel())
            if i % world == rank:
                moment.lerp_(p.grad.view(-1), 0.1)
                update = moment / moment.norm()
            dist.broadcast(update, i % world)
            flat.copy_(flat - 0.1 * update)

model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
optimizer = Owned(model.parameters(), {})
for x in torch.randn(2, 8, 4):
    optimizer.zero_grad()
    model(x[rank::world]).square().mean().backward()
    average(model)
    optimizer.step()
"""
UNUSUAL = {
    "moments of parameters that other ranks own stay zeros, and weights are written as views": OWNED,
    "every rank has the whole model, and an optimizer of each stage": STAGES.format(
        optimizers=OF_EACH_STAGE, step="optimizers[rank].step()"
    ),
    "the same, beside one of all that never steps": STAGES.format(
        optimizers=f"{OF_ALL}\n{OF_EACH_STAGE}", step="optimizers[rank].step()"
    ),
    "every rank has the whole model and an optimizer of it": STAGES.format(optimizers=OF_ALL, step="optimizer.step()"),
    "the same, after a broadcast and a look at all weights": STAGES.format(
        optimizers=f"{LOOKS}\n{OF_ALL}", step="optimizer.step()"
    ),
    "layers called one by one, with positions, and a model from which only weights are taken": LAYERS,
    "a first layer that every rank freezes": FROZEN_LAYER.format(
        freeze="model[0].requires_grad_(False)", cut="x, y = x[rank::world], y[rank::world]", out="model(x)"
    ),
    "an optimizer that adds up gradients itself": DIVIDED.format(by="world"),
    "one that sends them one by one": REDUCES,
    "every rank has a list of all parameters, and uses those of its stage": BY_LIST,
    "rows padded to the longest of their microbatch": PADDED,
    "data of its own on each rank, and a loss that is a module": OWN_DATA.format(loss="nn.MSELoss()(model(x), y)"),
    "the same with another loss": OWN_DATA.format(loss="nn.HuberLoss()(model(x), y)"),
    "sparse gradients": SPARSE,
    "a moving average of weights that ranks own": EMA.format(before="", after="update()"),
    "one on rank 0 only": EMA.format(before="", after="if rank == 0: update()"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_and_right(name: str, tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + UNUSUAL[name])
    report = same_model(path, ranks=2)
    assert (report.verdict, report.findings) == ("same", ()), str(report)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (STAGES.format(optimizers=OF_EACH_STAGE, step="optimizers[0].step()"), "2.weight"),
        (DIVIDED.format(by="1"), "0.weight"),
        (FROZEN, "bias"),
        (FROZEN_LAYER.format(freeze="model[0].requires_grad_(rank == 0)", cut="", out="model(x)"), "0.weight"),
        (FROZEN_LAYER.format(freeze="model[0].requires_grad_(rank == 0)", cut="", out=BY_HAND), "0.weight"),
        (FROZEN_LAYER.format(freeze=SWITCHED_OFF, cut="", out="net(x)"), "0.weight"),
        (UNUSED, "weight"),
    ],
    ids=[
        "a stage that nothing updates",
        "an optimizer that adds up and does not divide",
        "a copy that one rank freezes",
        "a first layer that one rank freezes",
        "the same, with functions in place of the model",
        "a layer for which one rank switches gradients off",
        "a part that its rank does not use",
    ],
)
def test_nor_is_what_is_wrong_there_overlooked(text: str, name: str, tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    first = same_model(path, ranks=2).first
    assert first is not None and first.what in ("gradient", "parameters") and first.step == 0, str(first)
    assert name in (first.name, *first.others), str(first)


def test_data_that_the_reference_is_not_given_are_no_fault(tmp_path: Path):
    path = tmp_path / "train.py"
    script = HEAD + OWN_DATA.format(loss="(model(x) - y).square().mean()")
    path.write_text(script)
    report = same_model(path, ranks=2)
    assert (report.verdict, report.findings) == ("same", ()), str(report)  # where torch draws, it is given them
    drawn = ", ".join(f"torch.from_numpy(numpy.random.randn(8 // world, {width})).float()" for width in (4, 1))
    torchs = "torch.randn(8 // world, 4), torch.randn(8 // world, 1)"
    assert torchs in script
    path.write_text("import numpy\n" + script.replace(torchs, drawn))
    report = same_model(path, ranks=2)
    assert (report.verdict, report.findings) == ("cannot tell", ()), str(report)
    assert "not what the loss at train.py:22 compares with" in report.reason, report.reason


def test_an_average_of_weights_that_have_not_arrived_is_named(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(HEAD + EMA.format(before="update()", after=""))
    first = same_model(path, ranks=2).first
    assert first is not None and (first.what, first.step) == ("parameters", 0), str(first)
    assert first.where == "train.py:23" and "moving average" in first.cause, str(first)
