"""The doctor's four answers: what is called the same is the same, and where nothing can be learnt it says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tplab.checking.copies import check_copies
from tplab.checking.gaps import farthest, gap
from tplab.checking.recording import Piece, Seen, Step
from tplab.checking.reference import Reference
from tplab.torch import same_model

HEAD = """\
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)

def batch(rows=8):
    return torch.randn(rows, 4, generator=draw), torch.randn(rows, 3, generator=draw)
"""


def report_of(text: str, tmp_path: Path, ranks: int = 2):
    path = tmp_path / "train.py"
    path.write_text(HEAD + text)
    return same_model(path, ranks=ranks)


def line_of(words: str, text: str) -> str:
    return f"train.py:{(HEAD + text)[: (HEAD + text).index(words)].count(chr(10)) + 1}"


def test_what_is_not_finite_is_infinitely_far_away():
    assert gap([1.0, np.nan], [1.0, 2.0]) == gap([np.nan], [np.nan]) == gap([np.inf], [-np.inf]) == np.inf
    assert gap([np.inf, 1.0], [np.inf, 1.5]) == 0.5
    assert farthest([1.0, 3.0, np.nan], [1.0, 1.0, 4.0])[1] == 4.0


NAN = """
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = (part.chunk(world)[rank] for part in batch())
    out = model(x)
    if step == 1 and {when}:
        out = out * {number}
    optimizer.zero_grad()
    F.mse_loss(out, y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("number", ["float('nan')", "float('inf')"])
@pytest.mark.parametrize("when", ["world > 1", "rank == 1"])
def test_nan_on_ranks_is_another_model(when: str, number: str, tmp_path: Path):
    text = NAN.format(when=when, number=number)
    report = report_of(text, tmp_path)
    assert report.verdict in ("different", "logs differ") and report.exit_code == 1, str(report)
    first = report.first
    assert first is not None and (first.what, first.step) == ("loss", 1)
    assert first.where == line_of("F.mse_loss(out, y).backward()", text)
    assert first.ranks == ((1,) if when == "rank == 1" else ())
    assert "not finite" in report.title and "NaN" in report.title and first.where in report.title


def test_nan_on_both_sides_tells_nothing(tmp_path: Path):
    report = report_of(NAN.format(when="True", number="float('nan')"), tmp_path)
    assert (report.verdict, report.exit_code, report.findings) == ("cannot tell", 3, ()), str(report)
    assert "NaN" in report.reason and "step 1" in report.reason


UPDATED = """
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(2):
    x, y = (part.chunk(world)[rank] for part in batch())
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    if world > 1 and rank == 1:
        {change}
"""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("model.weight.data[0, 0] = float('nan')", "parameters"),
        ("optimizer.state[model.bias]['momentum_buffer'][1] = float('inf')", "optimizer"),
    ],
)
def test_nan_in_what_a_step_leaves_is_another_model(change: str, what: str, tmp_path: Path):
    report = report_of(UPDATED.format(change=change), tmp_path)
    assert report.first is not None and (report.first.what, report.first.ranks) == (what, (1,)), str(report)
    assert report.first.is_not_finite


def test_copies_that_become_nan_are_not_the_same():
    def seen(value: float) -> Seen:
        begun, after = ({"w": Piece(np.array([1.0, x], np.float32))} for x in (2.0, value))
        step = Step(gradients=begun, parameters=after, lines={"step": "train.py:3"})
        return Seen(weights=begun, steps=[step, Step()])

    start = seen(2.0)
    other = seen(float("nan"))
    other.weights["w"] = start.weights["w"]
    assert check_copies([start, other]).verdict == "different"


TRAINED = """
{before}
model = {model}
optimizer = torch.optim.SGD({optimized}, lr={lr})
for step in range(3):
    x, y = {data}
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    {reduce}
    optimizer.step()
"""
CUT = "(part.chunk(world)[rank] for part in batch())"
USUAL = {"before": "", "model": "DDP(nn.Linear(4, 3))", "optimized": "model.parameters()", "lr": "0.1", "data": CUT,
         "reduce": ""}  # fmt: skip
ALL_HAVE_IT = {"data": "batch()"}
BY_HAND = {
    "model": "nn.Linear(4, 3)",
    "reduce": "for p in model.parameters(): dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)",
}
IN_FSDP = {"before": "from torch.distributed.fsdp import fully_shard", "model": "fully_shard(nn.Linear(4, 3))"}
NO_NEWS = {
    "replicas that see the same samples": (ALL_HAVE_IT, "same samples"),
    "the same, averaged by hand": (ALL_HAVE_IT | BY_HAND, "same samples"),
    "the same, in FSDP2": (ALL_HAVE_IT | IN_FSDP, "same samples"),
    "nothing is sent": ({"data": "batch()", "model": "nn.Linear(4, 3)"}, "sent anything"),
    "a learning rate of 0": ({"lr": "0.0"}, "no parameter has changed"),
    "parameters of another model": ({"before": "other = nn.Linear(4, 3)", "optimized": "other.parameters()"},
                                    "no parameter has changed"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_NEWS)
def test_what_cannot_differ_tells_nothing(name: str, tmp_path: Path):
    changed, words = NO_NEWS[name]
    report = report_of(TRAINED.format(**USUAL | changed), tmp_path)
    assert (report.verdict, report.exit_code, report.findings) == ("cannot tell", 3, ()), str(report)
    assert words in report.reason, report.reason


def test_one_rank_tells_nothing(tmp_path: Path):
    report = report_of(TRAINED.format(**USUAL), tmp_path, ranks=1)
    assert (report.verdict, report.exit_code) == ("cannot tell", 3) and "one rank" in report.reason, str(report)
    assert report_of(TRAINED.format(**USUAL), tmp_path).verdict == "same"


def test_a_schedule_may_begin_with_a_rate_of_nothing(tmp_path: Path):
    text = TRAINED.format(**USUAL).replace(
        "for step", "warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)\nfor step"
    )
    report = report_of(text + "    warm.step()\n", tmp_path)
    assert (report.verdict, report.findings) == ("same", ()), str(report)


def test_parameters_whose_memory_is_freed_are_not_read(tmp_path: Path):
    text = """
from torch.distributed.fsdp import fully_shard
model = fully_shard(nn.Linear(4, 3))
model(batch()[0])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(3):
    x, y = (part.chunk(world)[rank] for part in batch())
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    report = report_of(text, tmp_path)
    assert (report.verdict, report.exit_code) == ("cannot tell", 3), str(report)
    assert "no parameter has changed" in report.reason and line_of("optimizer = ", text) in report.reason


PADDED = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
data = TensorDataset(*batch(30))
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(data, drop_last={drop_last})
for epoch in range(3):
    for x, y in DataLoader(data, batch_size={size}, sampler=sampler, drop_last=True):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
"""


def test_samples_that_padding_repeats_are_no_fault(tmp_path: Path):
    text = PADDED.format(drop_last=False, size="8 if world > 1 else 30")
    report = report_of(text, tmp_path, ranks=4)
    assert (report.verdict, report.exit_code) == ("cannot tell", 3), str(report)
    assert f"DistributedSampler made at {line_of('sampler = ', text)}" in report.reason
    assert report_of(PADDED.format(drop_last=True, size="8 // world"), tmp_path, ranks=4).verdict == "same"


def test_a_doctor_that_fails_says_where(tmp_path: Path, monkeypatch):
    from tplab.checking import diagnosis

    def fail(*_: object):
        raise ZeroDivisionError("by nothing")
        yield

    monkeypatch.setattr(diagnosis, "buffers", fail)
    monkeypatch.setitem(diagnosis._AFTER, "buffers", (fail,))
    report = report_of(TRAINED.format(**USUAL), tmp_path)
    assert (report.verdict, report.exit_code) == ("cannot tell", 3), str(report)
    assert "the doctor failed at test_doctor_answers.py:" in report.reason and "by nothing" in report.reason


WARM_UP = """
model = {model}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
warm = F.mse_loss(model(batch()[0]), batch()[1])
for step in range(3):
    x, y = (part.chunk(world)[rank] for part in batch())
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
"""


def test_a_warm_up_has_no_samples(tmp_path: Path):
    report = report_of(WARM_UP.format(model="DDP(nn.Linear(4, 3))"), tmp_path)
    assert (report.verdict, report.findings) == ("same", ()), str(report)


BARE = """
a, b = torch.randn(4, 6).requires_grad_(), torch.randn(6, 3).requires_grad_()
optimizer = torch.optim.SGD([a, b], lr=0.1)
for step in range(5):
    x, y = (part.chunk(world)[rank] for part in batch())
    loss = F.mse_loss((x @ a).tanh() @ b, y)
    optimizer.zero_grad()
    loss.backward()
    for w in (a, b) if step < {until} else ():
        dist.all_reduce(w.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
"""


@pytest.mark.parametrize("until", [9, 2, 0])
def test_steps_of_a_script_without_modules_are_told_apart(until: int, tmp_path: Path):
    report = report_of(BARE.format(until=until), tmp_path)
    if until == 9:
        assert report.verdict == "same" and {row.step for row in report.rows} == {0, 1, 2}, str(report)
    else:
        assert report.first is not None and (report.first.what, report.first.step) == ("gradient", until), str(report)


CLIPPED = """
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = (part.chunk(world)[rank] for part in batch())
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        p.grad /= {count}
    square = sum(p.grad.pow(2).sum() for p in model.parameters())
    {square}
    norm = square.sqrt()
    for p in model.parameters():
        p.grad.mul_({scale})
    optimizer.step()
"""
CLIPS = {"count": "world", "square": "", "scale": "min(1.0, 0.1 / norm.item())"}
BY_TENSOR = {"scale": "(0.1 / (norm + 1e-6)).clamp(max=1.0)"}


@pytest.mark.parametrize("changed", [{}, BY_TENSOR, {"count": "1", "square": "square /= world ** 2", "scale":
                                     "min(1.0, 0.1 / norm.item()) / world"}])  # fmt: skip
def test_a_clip_by_hand_is_no_fault(changed: dict, tmp_path: Path):
    report = report_of(CLIPPED.format(**CLIPS | changed), tmp_path)
    assert (report.verdict, report.findings) == ("same", ()), str(report)


@pytest.mark.parametrize("scale", [CLIPS["scale"], BY_TENSOR["scale"]])
def test_gradients_are_judged_before_a_clip_by_hand(scale: str, tmp_path: Path):
    wrong = {"count": "(1 if name == '2.bias' else world)", "scale": scale}
    first = report_of(CLIPPED.format(**CLIPS | wrong), tmp_path).first
    assert first is not None and (first.what, first.name) == ("gradient", "2.bias")
    assert first.factor == pytest.approx(2.0, rel=1e-3) and not first.others


@pytest.mark.parametrize("scale", [CLIPS["scale"], BY_TENSOR["scale"]])
def test_the_factor_is_that_of_the_norm(scale: str, tmp_path: Path):
    wrong = {"square": "dist.all_reduce(square)", "scale": scale}
    text = CLIPPED.format(**CLIPS | wrong)
    first = report_of(text, tmp_path).first
    assert first is not None and (first.what, first.step) == ("norm", 0)
    assert first.factor == pytest.approx(2**0.5, rel=1e-3)
    assert first.where == line_of("dist.all_reduce(square)", text)


def test_a_clip_on_one_rank_is_named(tmp_path: Path):
    first = report_of(CLIPPED.format(**CLIPS | {"scale": "1.0 if rank == 1 else 0.5"}), tmp_path).first
    assert first is not None and (first.what, first.ranks) == ("norm", (1,)), str(first)


def test_a_report_says_what_was_compared(tmp_path: Path):
    report = report_of(TRAINED.format(**USUAL), tmp_path)
    assert report.coverage == (
        "compared in steps 0 to 2: 2 weights, samples, loss, 2 gradients, optimizer, 2 parameters; "
        "not compared: dropout, norm, buffers, log, evaluation"
    )
    assert report.coverage.partition(";")[0] in " ".join(str(report).split())


STAGES = """
class Part(nn.Module):
    def __init__(self, names):
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(4, 4) for name in "abc"}
        for name in names:
            setattr(self, name, layers[name])
        self.names = names

    def forward(self, x):
        for name in self.names:
            x = getattr(self, name)(x).tanh()
        return x

model = DDP(Part("abc" if world == 1 else "ac"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = batch()[0].chunk(world)[rank]
model(x).square().mean().backward()
optimizer.step()
"""
FAN_IN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed({seed})
        self.w = nn.Parameter(torch.randn(32 // world, 64) / {fan_in} ** 0.5)

    def forward(self, x):
        parts = [torch.zeros(len(x), 32 // world) for _ in range(world)]
        dist.all_gather(parts, x @ self.w.detach().T)
        return sum(part.sum() for part in parts) + (x @ self.w.T).sum()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 64, generator=draw)).backward()
optimizer.step()
"""


def test_parameters_on_no_rank_are_named(tmp_path: Path):
    first = report_of(STAGES, tmp_path).first
    assert first is not None and (first.what, first.name, first.others) == ("weights", "b.weight", ("b.bias",))
    assert first.text_of_factor == "held by no rank; the reference's other 4 parameters are"


@pytest.mark.parametrize(
    ("seed", "fan_in", "words"), [("rank", "(64 // world)", "times as large as"), ("0", "64", "the same")]
)
def test_weights_of_another_size_or_drawn_alike_are_named(seed: str, fan_in: str, words: str, tmp_path: Path):
    first = report_of(FAN_IN.format(seed=seed, fan_in=fan_in), tmp_path).first
    assert first is not None and (first.what, first.name) == ("weights", "w"), str(first)
    assert words in first.text_of_factor
    assert fan_in == "64" or first.factor == pytest.approx(2**0.5, rel=0.1)


def test_a_fault_that_is_larger_than_rounding_is_no_rounding(tmp_path: Path):
    text = TRAINED.format(**USUAL).replace("model(x)", "model(x) * (1 + {} * (world > 1))")
    report = report_of(text.replace("{}", "2e-5"), tmp_path)
    assert report.verdict == "different", str(report)
    assert any(row.what == "loss" and row.ok is not True for row in report.rows), str(report)
    assert report_of(text.replace("{}", "1e-8"), tmp_path).verdict == "same"


def test_noise_is_of_each_tensor():
    """The gradient of a key's bias is nothing but rounding: that says nothing of others, nor of the loss."""

    def seen(noise: float) -> Seen:
        gradients = {"key.bias": np.array([noise, 0.0]), "weight": np.array([1.0, 2.0])}
        step = Step(losses=[(1.9, "")], gradients={name: Piece(x.astype(np.float32)) for name, x in gradients.items()})
        return Seen(weights=step.gradients, steps=[step, Step()])

    reference = Reference([seen(1e-9)], [seen(-1e-8)])
    assert reference.slack_of_loss(0) < 1e-5 and reference.slack_of_norm(0) == 0.0
    assert reference.slack_of_gradient("weight", 0) < 1e-5
    assert 8e-8 < reference.slack_of_gradient("key.bias", 0) < 1e-6


OWN_SETTING = """
class Mine(torch.optim.SGD):
    def __init__(self, params, lr, heads):
        super().__init__(params, lr)
        self.param_groups[0]["heads"] = heads
"""


def test_only_settings_that_ranks_must_share_are_compared(tmp_path: Path):
    text = OWN_SETTING + TRAINED.format(**USUAL).replace("torch.optim.SGD(", "Mine(").replace(
        "lr=0.1", "lr=0.1, heads=8 // world"
    )
    assert report_of(text, tmp_path).verdict == "same"
    adam = TRAINED.format(**USUAL).replace("SGD", "Adam").replace("lr=0.1", "lr=0.1, betas=(0.9, 0.9 + 0.01 * world)")
    first = report_of(adam, tmp_path).first
    assert first is not None and (first.what, first.name) == ("optimizer", "betas[1]"), str(first)


def test_a_layer_may_be_given_columns_and_a_mask_may_be_whole(tmp_path: Path):
    text = """
weight = torch.randn(3, 8)
row = nn.Linear(8 // world, 3, bias=False)
row.weight.data.copy_(weight.chunk(world, 1)[rank])
optimizer = torch.optim.SGD(row.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(8, 8, generator=draw), batch()[1]
    part = row(x.chunk(world, 1)[rank])
    total = part.detach().clone()
    dist.all_reduce(total)
    F.mse_loss(part + (total - part.detach()), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    report = report_of(text, tmp_path)
    assert (report.verdict, report.findings) == ("same", ()), str(report)
    masked = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.layer(x) * mask[:1]
""" + TRAINED.format(**USUAL | {"model": "DDP(Net())"}).replace(
        "model(x)", "model(x, torch.arange(6.).view(2, 3)[[rank * 0, 0]])"
    )
    report = report_of(masked, tmp_path)
    assert (report.verdict, report.findings) == ("same", ()), str(report)


RESTART = (
    TRAINED.format(**USUAL)
    + """
saved = model.module.state_dict()
torch.manual_seed(5)
model = DDP(nn.Linear(4, 3))
if {loads}:
    model.module.load_state_dict(saved)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = (part.chunk(world)[rank] for part in batch())
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
"""
)


def test_a_model_that_is_made_anew_is_looked_at(tmp_path: Path):
    text = RESTART.replace("range(3)", "range(1)", 1)
    assert report_of(text.replace("{loads}", "True"), tmp_path).verdict == "same"
    first = report_of(text.replace("{loads}", "world == 1"), tmp_path).first
    assert first is not None and first.step == 1 and first.what in ("loss", "gradient"), str(first)


def test_all_numbers_of_a_line_are_compared(tmp_path: Path):
    text = (
        TRAINED.format(**USUAL)
        + "    print(f'step {step} loss {0.5:.4f} aux {1.5 * world:.4f}') if rank == 0 else None\n"
    )
    first = report_of(text, tmp_path).first
    assert first is not None and (first.what, first.name, first.factor) == ("log", "aux", 2.0), str(first)


SCALED = """
model = DDP(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(5):
    x, y = (part.chunk(world)[rank] for part in batch())
    loss = F.mse_loss(model(x), y)
    if step == 1 and {when}:
        loss = loss * 3e38 * 3e38
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_an_update_that_is_skipped_on_both_sides_is_left_out(tmp_path: Path):
    report = report_of(SCALED.format(when="True"), tmp_path)
    assert (report.verdict, report.findings) == ("same", ()), str(report)
    assert any("skipped" in row.words and row.step == 1 and row.ok is None for row in report.rows)
    never = report_of(SCALED.format(when="True").replace("step == 1", "step < 9"), tmp_path)
    assert never.verdict == "cannot tell" and "skipped" in never.reason and "NaN" in never.reason


def test_an_update_that_only_ranks_skip_is_another_model(tmp_path: Path):
    first = report_of(SCALED.format(when="world > 1"), tmp_path).first
    assert first is not None and (first.what, first.step) == ("optimizer", 1), str(first)
    assert "skipped" in first.text_of_factor
