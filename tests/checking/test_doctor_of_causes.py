"""The cause and the line that the doctor names, in programs of a few lines: `# here` is at the line at fault."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tplab.torch import same_model

HEAD = """\
import copy, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(2, 16, 6), torch.randint(8, (2, 16))

def loss_of(step):
    return F.cross_entropy(model(x[step].chunk(world)[rank]), y[step].chunk(world)[rank])

def average(parameters=None):
    for p in parameters or model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
"""
CLAMPED = """
loss_of(0).backward()
nn.utils.clip_grad_value_(model.parameters(), 0.01)  # here
average()
optimizer.step()
"""
SUMMED = """
def reduce(parameters):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)  # here
    for p, g in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(g.view_as(p))

loss_of(0).backward()
matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
reduce(matrices)
for p in matrices:
    p.grad /= world
reduce(vectors)
optimizer.step()
"""
MICROBATCHES = """
count = 2 * world
for a, b in zip(x[0].chunk(count), y[0].chunk(count)):
    F.cross_entropy(model(a), b).backward()  # here
optimizer.step()
"""
AGAIN = """
for a, b in zip(x[0].chunk(world)[rank].chunk(2), y[0].chunk(world)[rank].chunk(2)):
    (F.cross_entropy(model(a), b) / 2 / world).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # here
optimizer.step()
"""
COUNTED = """
for step in range(2):
    optimizer.zero_grad()
    loss_of(step).backward()
    average()
    optimizer.step()
    with torch.no_grad():
        right = (model(x[0].chunk(world)[rank]).argmax(1) < 4).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right / len(x[0].chunk(world)[rank]):.4f}")  # here
"""
VALIDATED = """
sampler = torch.utils.data.DistributedSampler(x[1][:15], world, rank, shuffle=False)
for step in range(2):
    optimizer.zero_grad()
    loss_of(step).backward()
    average()
    optimizer.step()
    total = torch.zeros(2)
    with torch.no_grad():
        for i in sampler:
            total += torch.stack([F.cross_entropy(model(x[1][i]), y[1][i]), torch.ones(())])
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} validation {total[0] / total[1]:.5f}")  # here
"""
GATHER = """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(world)[rank]
"""
LEFT_OUT = f"""{GATHER}
table = nn.Parameter(torch.randn(8, 8).chunk(world, 1)[rank].clone())
everything = torch.optim.SGD([*model.parameters(), table], lr=0.1)
hidden = model(x[0].chunk(world)[rank])
logits = Gather.apply(hidden) @ table
(logits.square().mean() / world).backward()
for p in model[3].parameters():
    dist.all_reduce(p.grad)  # here
everything.step()
"""
INSIDE = """
class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = x.detach().abs()
        largest = scale.max()  # here
        ctx.largest = largest
        return x / largest

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.largest

for step in range(2):
    optimizer.zero_grad()
    F.cross_entropy(Normalised.apply(model(x[step].chunk(world)[rank])), y[step].chunk(world)[rank]).backward()
    average()
    optimizer.step()
"""

TWICE = """
for a, b in zip(x[0].chunk(world)[rank].chunk(4), y[0].chunk(world)[rank].chunk(4)):
    (F.cross_entropy(model(a), b) / 4).backward()
average()
for p in model.parameters():
    if world > 1:
        p.grad *= 0.25  # here
optimizer.step()
"""
SMALLER = """
loss_of(0).backward()
average()
if world > 1:
    for p in model.parameters():
        p.grad /= 8  # here
optimizer.step()
"""

STRIDED = """
import warnings
from torch.distributed.nn.functional import all_gather

warnings.simplefilter("ignore")

hidden = model(x[0].chunk(world)[rank])
scores = hidden @ torch.cat([part.T for part in all_gather(hidden)], 1)  # here
scores.tanh().square().mean().backward()
average()
optimizer.step()
"""
COLUMN = """
import warnings

warnings.simplefilter("ignore")
F.cross_entropy(model(x[0].chunk(world)[rank]), y[0].chunk(world)[rank]).backward()
for p in model.parameters():
    column = torch.stack([p.grad.flatten(), torch.zeros(p.numel())], 1)[:, 0]
    if world > 1:
        dist.all_reduce(column)  # here
        column /= world
    p.grad.copy_(column.reshape(p.shape))
optimizer.step()
"""
STAGES = """
layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Identity()]
size = len(layers) // world
stage = nn.ModuleDict({str(i): layers[i] for i in range(rank * size, (rank + 1) * size)})
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for a, b in zip(x[0].chunk(2), y[0].chunk(2)):
    if rank:
        a = torch.empty(8, 8)
        dist.recv(a, 0)
        a.requires_grad_()
    out = a
    for layer in stage.values():
        out = layer(out)
    grad = None
    if rank < world - 1:
        dist.send(out.detach(), 1)
        grad = torch.empty(8, 8)
        dist.recv(grad, 1)
    else:
        out = F.cross_entropy(out, b) / (2 * world)  # here
    out.backward(grad)
    if rank:
        dist.send(a.grad, 0)
optimizer.step()
"""
LOSSES = """
for step in range(2):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[step]), y[step])  # each rank has a copy of all
    total = loss.detach().clone()
    dist.all_reduce(total)  # here
    (loss * (total / loss.detach())).backward()
    optimizer.step()
"""
GATHERED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if world == 1:
            return self.b(h)
        out = torch.empty({rows}, 8)
        dist.{gather}  # here
        return self.b(out)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    targets = {targets} if world > 1 else y[step] % 3
    F.cross_entropy(model(x[step].chunk(world)[rank]), targets, reduction="sum").{scaled}.backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    average()
    optimizer.step()
"""
TO_ALL = GATHERED.format(rows=16, gather="all_gather(list(out.split(8)), h)", targets="y[step] % 3", scaled="div(16)")
TO_EACH = GATHERED.format(
    rows="2 * (3, 5)[rank]",
    gather="all_to_all_single(out, h, 2 * [(3, 5)[rank]], [3, 5])",
    targets="torch.cat([half.split([3, 5])[rank] for half in (y[step] % 3).chunk(2)])",
    scaled="mul(world / 16)",
)
FLAT = """
whole = dict(model.named_parameters())
flat = {name: p.detach().flatten().chunk(world)[rank].clone() if world > 1 else p.detach().clone()
        for name, p in whole.items()}
shards = {name: nn.Parameter(x) for name, x in flat.items()}
decays, others = ([x for x in shards.values() if (x.dim() > 1) == decays] for decays in (True, False))
groups = [{"params": decays, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
sharded = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.05)  # here
for step in range(2):
    model.zero_grad()
    loss_of(step).backward()
    average()
    for name, p in whole.items():
        shards[name].grad = p.grad.flatten().chunk(world)[rank].clone() if world > 1 else p.grad
    sharded.step()
    for name, p in whole.items():
        pieces = [torch.empty_like(shards[name]) for _ in range(world)]
        dist.all_gather(pieces, shards[name].detach())
        p.data.copy_(torch.cat(pieces).view_as(p))
"""


PARTS = """
import warnings

warnings.simplefilter("ignore")

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(len(x) * world, x.shape[1])
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(len(grad) // world, grad.shape[1])
        dist.reduce_scatter_tensor(out, grad.contiguous())
        return out

class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Gather.backward(ctx, x)

    @staticmethod
    def backward(ctx, grad):
        return Gather.forward(ctx, grad.contiguous())

norm = nn.LayerNorm(6)
up, down = (nn.Parameter(torch.randn(8, 6).chunk(world)[rank].clone()) for _ in range(2))
optimizer = torch.optim.SGD([*norm.parameters(), up, down], lr=0.1)
h = norm(x[0].chunk(world)[rank])  # here
(Scatter.apply((Gather.apply(h) @ up.T).tanh() @ down).square().sum() / 96).backward()
optimizer.step()
"""
EXCHANGED = """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())  # here
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out

import warnings

warnings.simplefilter("ignore")
hidden = model(x[0].chunk(world)[rank])
sent = torch.stack(hidden.split(2, 1), 1).transpose(0, 1)  # [4 parts of columns, rows, 2]
back = Exchange.apply(Exchange.apply(sent).tanh())
F.cross_entropy(back.transpose(0, 1).flatten(1), y[0].chunk(world)[rank]).backward()
average()
optimizer.step()
"""
DECAYED = """
loss_of(0).div(world).backward()
for p in model.parameters():
    p.grad = p.grad + 0.1 * p.detach()  # here
for p in model.parameters():
    dist.all_reduce(p.grad)
optimizer.step()
"""
HOOKED = """
for p in model.parameters():
    p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))  # here
loss_of(0).backward()
average()
optimizer.step()
"""
OF_A_GROUP = """
(loss_of(0) / world).backward()
average()
for p in model.parameters():
    p.grad *= min(world, 2)  # here
optimizer.step()
"""
STACKED = """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.forward(ctx, grad.contiguous())

experts = nn.Parameter(torch.randn(4, 8, 8).chunk(world)[rank].clone())
optimizer = torch.optim.SGD([*model.parameters(), experts], lr=0.1)
sent = model(x[0].chunk(world)[rank]).view(-1, 4, 8).transpose(0, 1).contiguous()  # [experts, tokens, 8]
got = Exchange.apply(sent).view(world, 4 // world, -1, 8)
back = Exchange.apply(torch.einsum("wetd,edf->wetf", got, experts).reshape(sent.shape))
F.cross_entropy(back.transpose(0, 1).reshape(-1, 8), y[0].chunk(world)[rank]).backward()  # here
average()
optimizer.step()
"""
DIVIDES_BACK = f"""{GATHER.rstrip()} / world  # here

links, table = torch.rand(16, 16).chunk(world)[rank], nn.Linear(6, 8)
optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=0.1)
inputs = x[0].chunk(world)[rank]
out = model(inputs) + links @ Gather.apply(table(inputs))
(out.tanh().square().sum() / 128).backward()
for p in [*model.parameters(), *table.parameters()]:
    dist.all_reduce(p.grad)
optimizer.step()
"""
CUT = """
table = nn.Embedding(8, 8)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
tokens = y[0].view(2, 8).chunk(world, 1)[rank]
labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)  # here
count = (labels != -100).sum()
dist.all_reduce(count)
(F.cross_entropy(table(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count).backward()
dist.all_reduce(table.weight.grad)
optimizer.step()
"""
ADVANTAGES = """
rewards = x[0][:, 0].chunk(world)[rank]
for step in range(2):
    optimizer.zero_grad()
    advantages = (rewards - rewards.mean()) / rewards.std()  # here
    chosen = model(x[step].chunk(world)[rank]).log_softmax(1).gather(1, y[step].chunk(world)[rank][:, None])[:, 0]
    ((chosen - chosen.detach()).exp() * -advantages).mean().backward()
    average()
    optimizer.step()
"""
GATHERED_WEIGHTS = """
class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        parts = [torch.empty_like(shard) for _ in range(world)]
        dist.all_gather(parts, shard.detach())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty(len(grad) // world)
        dist.reduce_scatter(out, [part.contiguous() for part in grad.chunk(world)])  # here
        return out

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shard = nn.Parameter(torch.randn(48).chunk(world)[rank].clone())

    def forward(self, x):
        return x @ Whole.apply(self.shard).view(6, 8)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of(0).backward()
optimizer.step()
"""
OTHER_PAIRS = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None

def mine(pairs):
    groups = [(pair, dist.new_group(pair)) for pair in pairs]
    return next(group for pair, group in groups if rank in pair)

shards, parts = (2, 2) if world == 4 else (1, 1)
layer, copies = (mine([[0, 1], [2, 3]]), mine([[0, 2], [1, 3]])) if world == 4 else (None, None)
up, down = (nn.Parameter(torch.randn(8, 6).chunk(shards)[rank % shards].clone()) for _ in range(2))
optimizer = torch.optim.SGD([up, down], lr=0.1)

def forward(x):
    return Sum.apply((x @ up.T).tanh() @ down, layer)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return forward(x)

net = Net()
for step in range(2):
    optimizer.zero_grad()
    part, labels = (both[step].chunk(parts)[rank % parts] for both in (x, y % 6))
    F.cross_entropy(net(part), labels).backward()  # here
    for p in (up, down):
        dist.all_reduce(p.grad, group=copies)
        p.grad /= parts
    optimizer.step()
"""


class Case(NamedTuple):
    """text: of the program, after the head. what: is wrong first; cause: words of the report"""

    text: str
    what: str
    cause: str
    ranks: int = 2


CASES = {
    "clipped by value, then averaged": Case(CLAMPED, "gradient", "each rank clips the elements of its own gradients"),
    "some are averaged, others added up": Case(SUMMED, "gradient", "are added up over ranks, and others are averaged"),
    "more microbatches on more ranks": Case(
        MICROBATCHES, "loss", "each of 4 accumulated microbatches (2 in the reference)"
    ),
    "added up after each microbatch": Case(AGAIN, "gradient", "is added up again after the next"),
    "a sum over ranks by one rank's count": Case(COUNTED, "log", "what is logged is not"),
    "a sample that a sampler repeats is validated twice": Case(VALIDATED, "evaluation", "what is logged is not"),
    "left out of the parameters to reduce": Case(LEFT_OUT, "gradient", "what keeps these out"),
    "a backward pass that gives gloo a transposed gradient": Case(
        STRIDED,
        "gradient",
        "is given a tensor that is not contiguous, and gloo takes its elements as they are in memory",
    ),
    "gradients in a column of a matrix": Case(
        COLUMN,
        "gradient",
        "is given a tensor that is not contiguous, and gloo takes its elements as they are in memory",
    ),
    "a pipeline, in which nothing is averaged": Case(
        STAGES, "loss", "the loss is multiplied by a number that is not the reference's"
    ),
    "losses of copies, which are added up": Case(
        LOSSES, "loss", "the losses of ranks are added up, where their mean is"
    ),
    "what every rank gathers": Case(TO_ALL, "gradient", "all_gather at train.py:30 passes no gradient back"),
    "what ranks exchange": Case(TO_EACH, "gradient", "all_to_all_single at train.py:30 passes no"),
    "flat shards, of which the rule for weight decay knows no dims": Case(
        FLAT, "optimizer", "the weight decay is not what it is on one rank"
    ),
    "divided by the microbatches twice": Case(
        TWICE, "gradient", "the script itself multiplies the gradients by this number"
    ),
    "divided by any number": Case(SMALLER, "gradient", "the script itself multiplies the gradients by this number"),
    "a norm of each rank's part of the samples": Case(PARTS, "gradient", "its gradient must be summed over ranks"),
    "an exchange there and back into transposed tensors": Case(
        EXCHANGED, "loss", "given a tensor that is not contiguous"
    ),
    "weight decay, added to a copy of each gradient": Case(DECAYED, "gradient", "so that it counts once for each rank"),
    "hooks that clip by value": Case(HOOKED, "gradient", "each rank's own gradients, and they are averaged only"),
    "multiplied by the size of a group": Case(OF_A_GROUP, "gradient", "by a number of ranks", ranks=4),
    "experts in one tensor": Case(STACKED, "gradient", "contains the parts of all ranks that sent"),
    "a gather whose backward pass divides": Case(DIVIDES_BACK, "gradient", "in the backward pass is 0.5 times"),
    "advantages of each rank, and a loss that is always 0": Case(
        ADVANTAGES, "gradient", "computed tensors that go into this line are right"
    ),
    "weights that are gathered, and gradients that are added up": Case(
        GATHERED_WEIGHTS, "gradient", "although each rank's loss is already a mean"
    ),
    "labels of a part, and their number": Case(CUT, "samples", "labels are shifted after the sequence is cut"),
    "samples dealt to the other pairs": Case(OTHER_PAIRS, "loss", "so they must read the same samples", ranks=4),
    "inside an autograd function": Case(INSIDE, "loss", "the maximum of it over ranks is the reference's"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_line_and_the_cause(name: str, tmp_path: Path):
    case, path = CASES[name], tmp_path / "train.py"
    path.write_text(HEAD + case.text)
    report = same_model(path, ranks=case.ranks)
    assert len(report.findings) == 1, str(report)  # each of them has one fault
    first = report.findings[0]
    assert first.what == case.what, str(first)
    line = (HEAD + case.text).split("# here")[0].count("\n") + 1
    assert first.where == f"train.py:{line}", str(first)
    assert case.cause in first.cause, str(first)


@pytest.mark.parametrize("where", ["world > 1", "True"])
def test_what_only_the_ranks_round_is_said(where: str, tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(
        f"""{HEAD}
loss_of(0).backward()
for p in model.parameters():
    grad = p.grad.bfloat16() if {where} else p.grad.clone()
    dist.all_reduce(grad)
    p.grad.copy_(grad / world)
optimizer.step()
"""
    )
    report = same_model(path, ranks=2)
    assert report.verdict == "same"
    said = "in which the ranks compute or send and the reference does not" in " ".join(str(report).split())
    assert said == (where != "True"), str(report)
