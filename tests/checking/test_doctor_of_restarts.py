"""`--resume`: a script that is started again from its own checkpoint, beside a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tplab import doctor
from tplab.torch import same_model

SCRIPT = """\
import argparse
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="")
parser.add_argument("--forget", default="")
parser.add_argument("--path", required=True)
parser.add_argument("--optimizer", default="adam")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dropout = nn.Dropout(args.dropout)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), dropout, nn.Linear(12, 3)))
kinds = {"adam": torch.optim.AdamW, "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)}
optimizer = kinds[args.optimizer](model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
first = 0
if args.resume:
    saved = torch.load(args.resume)
    if args.forget != "model":
        model.module.load_state_dict(saved["model"])
    if args.forget == "moments":
        saved["optimizer"]["state"] = {}
    if args.forget != "optimizer":
        optimizer.load_state_dict(saved["optimizer"])
    if args.forget != "schedule":
        schedule.load_state_dict(saved["schedule"])
    if args.forget != "step":
        first = saved["step"]
    if args.forget != "random":
        torch.set_rng_state(saved["random"][rank % len(saved["random"])])
for step in range(first, 9):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    optimizer.step()
    schedule.step()
    states = [None] * world
    dist.all_gather_object(states, torch.get_rng_state())
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"schedule": schedule.state_dict(), "step": step + 1, "random": states}, args.path)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(("ranks", "before", "options"), [
    (2, None, ()), (4, 2, ()), (2, None, ("--dropout", "0.3")), (2, None, ("--optimizer", "momentum")),
])  # fmt: skip
def test_a_right_restart_trains_what_a_run_trains_that_goes_on(
    script: Path, ranks: int, before: int | None, options: tuple[str, ...]
):
    """On another number of ranks, too."""
    saved, resume = str(script.with_name("last.pt")), ["--resume", str(script.with_name("last.pt"))]
    report = same_model(script, ["--path", saved, *options], ranks=ranks, steps=2, resume=resume, reference=before)
    assert report.verdict == "same", str(report)
    assert "after 2 steps, compared with" in report.about and report.about.endswith("that go on")


@pytest.mark.parametrize(
    ("forget", "what", "step", "cause", "options"),
    [
        ("model", "weights", 0, "these weights were not restored", ()),
        ("optimizer", "optimizer", 0, "(lr) is not that of the run that goes on", ()),
        ("moments", "optimizer", 0, "the optimizer's state was not restored", ()),
        ("moments", "optimizer", 0, "the optimizer's state was not restored", ("--optimizer", "momentum")),
        ("schedule", "optimizer", 1, "(lr) is not that of the run that goes on", ()),
    ],
)
def test_what_a_restart_forgets_is_the_first_that_is_wrong(
    script: Path, forget: str, what: str, step: int, cause: str, options: tuple[str, ...]
):
    saved = str(script.with_name("last.pt"))
    resume = ["--resume", saved, "--forget", forget]
    report = same_model(script, ["--path", saved, *options], ranks=2, steps=2, resume=resume)
    assert report.verdict == "different" and report.first is not None, str(report)
    assert (report.first.what, report.first.step) == (what, step), str(report)
    assert cause in report.first.cause and report.first.proof, str(report)


def test_a_restart_with_other_random_numbers_trains_the_same_model_by_other_masks(script: Path):
    saved = str(script.with_name("last.pt"))
    resume = ["--resume", saved, "--forget", "random"]
    report = same_model(script, ["--path", saved, "--dropout", "0.3"], ranks=2, steps=2, resume=resume)
    assert report.verdict == "same", str(report)
    assert "where random numbers are was not restored" in " ".join(str(report).split())


def test_a_restart_that_reads_the_samples_again(script: Path):
    saved = str(script.with_name("last.pt"))
    report = same_model(script, ["--path", saved], ranks=2, steps=2, resume=["--resume", saved, "--forget", "step"])
    assert report.verdict == "different", str(report)
    assert report.first is not None and report.first.what == "samples"


def test_the_command(script: Path, capsys):
    saved = str(script.with_name("last.pt"))
    flags = ["--nproc-per-node", "2", "--steps", "1", "--resume", f"--resume {saved} --forget model"]
    assert doctor.main([*flags, str(script), "--path", saved]) == 1
    assert "train.py on 2 ranks, started again with '--resume" in " ".join(capsys.readouterr().out.split())


COUNTS = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net, count, begin = torch.nn.Linear(4, 2, bias=False), 0, 0
if "--resume" in sys.argv:
    saved = torch.load("last.pt")
    net.load_state_dict(saved["net"])
    begin = saved["begin"]
for step in range(begin, begin + 4):
    data = torch.Generator().manual_seed(step)
    x, y = torch.randn(4, 4, generator=data), torch.randn(4, 2, generator=data)
    net.zero_grad()
    (net(x.chunk(world)[rank]) - y.chunk(world)[rank]).square().mean().backward()
    count += 1
    with torch.no_grad():
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p -= p.grad * (0.1 / count)
    if rank == 0:
        torch.save({"net": net.state_dict(), "begin": step + 1}, "last.pt")
    dist.barrier()
"""


def test_a_number_that_was_not_restored(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counts.py").write_text(COUNTS)
    report = same_model(tmp_path / "counts.py", ranks=2, steps=2, resume=["--resume"])
    first = report.first
    assert first is not None and first.what == "parameters" and first.proof, str(first)
    assert "gradients are the same" not in str(report), str(report)
    assert "multiplies by 0.1, and in the run that goes on by 0.0333" in first.cause, str(first)


def test_a_limit_that_was_not_restored_has_no_cause_but_a_place(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = COUNTS
    for old, new in (
        ("    (net(x.chunk(", "    far = (net(x.chunk("),
        (".square().mean().backward()", ".square()\n    (far * (far < 0.2 * count + 0.2)).mean().backward()"),
        ("            p -= p.grad * (0.1 / count)\n", ""),
        ("    if rank == 0", "    optimizer.step()\n    if rank == 0"),
        ("for step in", "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\nfor step in"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "counts.py").write_text(text)
    first = same_model(tmp_path / "counts.py", ranks=2, steps=2, resume=["--resume"]).first
    assert first is not None and first.what == "loss" and not first.cause and first.where, str(first)
