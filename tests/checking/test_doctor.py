"""`same_model` and `python -m tplab.doctor`: what they find in one script with several mistakes, and what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tplab import Mesh, doctor, torchrun
from tplab.checking.copies import check_copies
from tplab.checking.recording import Piece, Seen, Step
from tplab.torch import same_model

SCRIPT = """\
import argparse
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--bug", default="")
parser.add_argument("--batch-size", type=int, default=2)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if args.bug == "seed" else 0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
if args.bug in ("", "loss", "log", "multiple", "fixed", "own data"):
    model = DistributedDataParallel(model)
lr = 0.1 * world if args.bug == "rate" else 0.1
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
generator = torch.Generator().manual_seed(1)
if args.bug == "own data":
    torch.manual_seed(100 + rank)
for step in range(0 if args.bug == "never" else 5):
    if args.bug == "own data":
        x, y = torch.randn(2, 6), torch.randn(2, 3)
    else:
        size = args.batch_size * world if args.bug == "fixed" else 8
        x, y = torch.randn(size, 6, generator=generator), torch.randn(size, 3, generator=generator)
    if args.bug not in ("same data", "own data"):
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    elif args.bug == "same data":
        x, y = x.chunk(world)[0], y.chunk(world)[0]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    if args.bug == "loss":
        loss = loss * world
    loss.backward()
    if args.bug in ("sum", "rate", "constant", "same data", "seed", "norm"):
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= 1 if args.bug == "sum" else 4 if args.bug == "constant" else world
    if args.bug == "norm":
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()]) ** 2
        dist.all_reduce(total)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total.sqrt())
    optimizer.step()
    if args.bug == "multiple":
        loss = 3 * loss
    elif args.bug != "log":
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"step {step} loss {loss.item():.5f}")
"""


def line_of(text: str) -> str:
    """The line of the script, as findings name it."""
    lines = SCRIPT.splitlines()
    return f"train.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_what_is_right_is_called_the_same(script: Path):
    report = same_model(script, ranks=4)
    assert (report.verdict, report.exit_code, report.findings) == ("same", 0, ()), str(report)
    whats = {"weights", "samples", "loss", "gradient", "optimizer", "parameters", "log"}
    assert {(row.what, row.step) for row in report.rows if row.ok} == {
        (what, k) for what in whats for k in range(3)
    } - {
        ("weights", 1),
        ("weights", 2),
    }
    assert "count as equal" in str(report)


@pytest.mark.parametrize(("bug", "runs"), [("", 1), ("sum", 2)])
def test_the_reference_runs_again_only_where_rounding_must_be_told_from_a_fault(script: Path, bug: str, runs: int):
    seen, counted = script.with_name("runs"), script.with_name("counted.py")
    count = (
        f"if os.environ['WORLD_SIZE'] == '1':\n    with open({str(seen)!r}, 'a') as file:\n        file.write('.')\n"
    )
    counted.write_text("import os\n" + count + SCRIPT)
    report = same_model(counted, ["--bug", bug] if bug else [], ranks=4)
    assert ("another order of summation" in str(report)) == (runs > 1)
    assert len(seen.read_text()) == runs


def test_flat_parameters_are_not_judged():
    def train() -> None:
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel

        torch.manual_seed(0)
        model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()

    report = same_model(train, ranks=2)
    assert report.verdict == "cannot tell" and "use fully_shard (FSDP2)" in report.reason, str(report)


@pytest.mark.parametrize(
    ("bug", "what", "factor", "line", "cause"),
    [
        ("loss", "loss", 4.0, "loss = loss * world", "multiplied by their number"),
        ("sum", "gradient", 4.0, "dist.all_reduce(p.grad", "ReduceOp.AVG"),
        ("constant", "gradient", 4.0, "p.grad /= 1", "on one rank too"),
        ("nothing", "gradient", None, "loss.backward()", "nothing averages them"),
        ("rate", "optimizer", 4.0, "optimizer = torch.optim.SGD", "learning rate"),
        ("norm", "norm", 4.0**0.5, "nn.utils.clip_grads_with_norm_", "copies"),
        ("log", "log", None, "print(f", "own samples"),
        ("multiple", "log", None, "print(f", "own samples: average it"),
        ("same data", "samples", 2 / 8, "loss = nn.functional.mse_loss(model(x), y)", "the same samples"),
        ("seed", "weights", None, "torch.manual_seed(rank", "seeds 0, 1, 2, 3"),
    ],
)
def test_a_bug_is_named_with_its_factor_and_line(script: Path, bug: str, what: str, factor, line: str, cause: str):
    first = same_model(script, ["--bug", bug], ranks=4).first
    assert first is not None and (first.what, first.step) == (what, 0)
    assert first.factor == pytest.approx(factor, rel=1e-3) if factor else what in ("gradient", "log", "weights")
    assert first.where == line_of(line)
    assert cause in first.cause


def test_the_argument_is_named_that_makes_samples_the_same(script: Path):
    report = same_model(script, ["--bug", "fixed"], ranks=4)
    assert (report.verdict, report.exit_code) == ("cannot tell", 3)
    assert "the two runs did not see the same samples" in report.reason
    assert report.reason.endswith("--reference-args '--batch-size 8'")
    again = same_model(script, ["--bug", "fixed"], ranks=4, reference_args=["--batch-size", "8"])
    assert again.verdict == "same", str(again)


def test_data_that_ranks_draw_themselves_is_handed_to_the_reference(script: Path):
    mine = SCRIPT.replace(
        "torch.randn(2, 6), torch.randn(2, 3)", "torch.randn(8 // world, 6), torch.randn(8 // world, 3)"
    )
    for text in (mine, mine.replace("mse_loss(model(x), y)", "mse_loss(model(x), x[:, :3])")):
        script.write_text(text)
        report = same_model(script, ["--bug", "own data"], ranks=2)
        assert report.verdict == "same", str(report)
        assert "the reference was given the samples that the ranks drew" in str(report)
    script.write_text(SCRIPT)
    report = same_model(script, ["--bug", "own data"], ranks=2)  # where the reference draws two, it is given four
    assert report.verdict == "same", str(report)
    drawn = "torch.from_numpy(np.random.randn(2, 6)).float(), torch.from_numpy(np.random.randn(2, 3)).float()"
    script.write_text("import numpy as np\n" + SCRIPT.replace("torch.randn(2, 6), torch.randn(2, 3)", drawn))
    reason = same_model(script, ["--bug", "own data"], ranks=2).reason
    assert "the ranks drew 4 samples in a step, and the reference has used 2" in reason
    assert "from the seeds 100, 101 set at train.py:" in reason


def test_ranks_and_reference_that_draw_in_different_orders():
    """A sampler's seeds are at fault; a shuffle is not, and the reference is given the ranks' samples."""

    def train(sampler_seed: int | None, is_seen: bool = True) -> None:
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        rank, world = dist.get_rank(), dist.get_world_size()
        data = TensorDataset(torch.arange(128.0).reshape(32, 4).sin(), torch.arange(32.0)[:, None].cos())
        options: dict = {"sampler": list(range(rank, 32, world)) if world > 1 else list(reversed(range(32)))}
        if sampler_seed is not None:
            options = {"sampler": DistributedSampler(data, seed=sampler_seed * rank)}
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(data, batch_size=8 // world, **options):
            optimizer.zero_grad()
            (torch.nn.functional.mse_loss(model(x), y) if is_seen else (model(x) - y).pow(2).mean()).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()

    first = same_model(train, [7], ranks=2).first
    assert first is not None and (first.what, first.step) == ("samples", 0)
    assert "samplers shuffle by the seeds 0, 7" in first.text_of_factor
    report = same_model(train, [None], ranks=2)
    assert report.verdict == "same" and "because it draws in another order" in str(report)
    unseen = same_model(train, [None, False], ranks=2)  # what the loss compares with cannot be handed over
    assert unseen.verdict == "cannot tell" and "draw in different orders" in unseen.reason
    assert "--reference-args" not in unseen.reason


def test_a_log_of_a_ranks_own_loss_is_recognised_under_a_loss_scale():
    """backward() is called on a multiple of what is logged."""

    def train() -> None:
        import torch
        import torch.distributed as dist

        x = torch.arange(64.0).reshape(16, 4).sin()
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        loss = model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
        (loss * 8).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            p.grad = p.grad / 8  # type: ignore[operator]
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.5f}")

    report = str(same_model(train, ranks=2))
    assert "rank 0 has logged what it computed from its own samples" in report, report


def test_each_rank_of_a_reference_is_given_the_targets_of_all_its_losses():
    """A reference of two ranks, each with two losses, in the place of four ranks that draw in another order."""

    def train() -> None:
        import torch
        import torch.distributed as dist

        rank, world = dist.get_rank(), dist.get_world_size()
        x = torch.arange(128.0).reshape(32, 4).sin()
        first, second = torch.arange(32.0)[:, None].cos(), torch.arange(32.0)[:, None].sin()
        order = torch.arange(32) if world == 4 else torch.arange(32).flip(0)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in order[rank::world].split(8 // world):
            optimizer.zero_grad()
            y = model(x[part])
            loss = torch.nn.functional.mse_loss(y, first[part]) + torch.nn.functional.mse_loss(y, second[part])
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()

    report = same_model(train, ranks=4, reference=2)
    assert report.verdict == "same" and "because it draws in another order" in str(report), str(report)


def test_samples_are_marked_with_a_word_and_not_with_a_factor(script: Path):
    rows = same_model(script, ["--bug", "same data"], ranks=2, steps=1).rows
    assert [row.mark for row in rows if row.what == "samples"] == ["WRONG"]


def test_a_script_that_never_steps(script: Path):
    report = same_model(script, ["--bug", "never"], ranks=2)
    assert report.exit_code == 3
    assert "no step of an optimizer was seen" in report.reason


def test_ranks_that_end_early_and_a_reference_that_does_not_fit(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT + "\nif world > 1 and rank == 0:\n    raise SystemExit(3)\n")
    assert "on 2 ranks the script fails: rank 0" in same_model(path, ranks=2, steps=9).reason
    path.write_text("import os\nassert int(os.environ['WORLD_SIZE']) > 1, 'needs a pipeline'\n" + SCRIPT)
    reason = same_model(path, ranks=2).reason
    assert "on 1 rank the script fails" in reason and "needs a pipeline" in reason and "--reference" in reason
    assert same_model(path, ranks=4, reference=2).verdict == "same"


def test_a_function_is_a_script_too():
    def train(rate: float) -> None:
        import torch
        import torch.distributed as dist

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        rank, world = dist.get_rank(), dist.get_world_size()
        for _ in range(3):
            x = torch.arange(32.0).reshape(8, 4).chunk(world)[rank]
            model(x).pow(2).mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()

    assert same_model(train, [1e-4], mesh=Mesh(dp=2)).verdict == "same"


def test_buffers_that_drift_are_named_in_the_step_in_which_they_do():
    """The first forward pass changes them already, in the order count, total."""

    def train() -> None:
        import torch
        import torch.distributed as dist

        class Counts(torch.nn.Linear):
            total: torch.Tensor
            count: torch.Tensor

            def __init__(self) -> None:
                super().__init__(4, 4)
                self.register_buffer("total", torch.ones(4))
                self.register_buffer("count", torch.ones(1))

            def forward(self, x):
                self.count.mul_(0.8).add_(len(x), alpha=0.2)
                self.total.mul_(0.8).add_(x.sum(0), alpha=0.2)
                return super().forward(x)

        torch.manual_seed(0)
        model = Counts()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.arange(32.0).reshape(8, 4).chunk(dist.get_world_size())[dist.get_rank()]).mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()

    first = same_model(train, ranks=2).first
    assert first is not None and (first.what, first.step) == ("buffers", 0), str(first)
    assert (first.name, first.others) == ("count", ("total",))


def test_the_command(script: Path, tmp_path: Path, capsys):
    page = tmp_path / "report.html"
    assert doctor.main(["--nproc-per-node", "2", "--html", str(page), str(script), "--bug", "sum"]) == 1
    shown = capsys.readouterr().out
    assert "train.py on 2 ranks, compared with 1 rank: NOT the same model" in shown
    assert f"at {line_of('dist.all_reduce(p.grad')}" in shown and "loss 0" not in shown
    assert "NOT the same model" in page.read_text()
    assert doctor.main(["--mesh", "dp=2", "--steps", "1", str(script)]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give --nproc-per-node 4, or --mesh dp=2,tp=2"),
        (["--nproc-per-node", "two"], "give a whole number"),
        (["--nproc-per-node", "3", "--mesh", "dp=2"], "has 2 ranks, but --nproc-per-node 3 on 1 node makes 3"),
        (["--nproc-per-node", "2", "--reference", "3"], "it has no more ranks"),
    ],
)
def test_flags_that_make_no_sense(script: Path, flags: list[str], said: str, capsys):
    assert doctor.main([*flags, str(script)]) == 2
    assert said in capsys.readouterr().err


def test_as_a_command_in_another_folder(script: Path):
    environment = {**os.environ, "PYTHONPATH": str(Path(doctor.__file__).parents[1])}
    command = [sys.executable, "-m", "tplab.doctor", "--nproc-per-node", "2", script.name, "--bug", "loss"]
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "2 (the number of ranks) times the reference's" in done.stdout


@pytest.mark.parametrize(
    ("bug", "code", "said"),
    [
        ("", 0, "train.py, its copies compared with one another: copies stay the same"),
        ("", 0, "4 of 4 parameters begin as the same on several ranks: only these are compared"),
        ("nothing", 1, "the gradient of 0.weight and of 3 others: not the same on ranks 0, 1"),
        ("seed", 3, "no parameter begins as the same on two ranks"),
        ("sum", 0, "copies stay the same"),  # by a factor, but the same one on all ranks
    ],
)
def test_copies_are_compared_without_a_reference(script: Path, bug: str, code: int, said: str, capsys):
    flags = ["--nproc-per-node", "2", "--check-copies"]
    assert torchrun.main([*flags, str(script), "--bug", bug]) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert said in shown and "step 4 loss" in shown  # the script ran to its end


def test_what_was_not_compared_is_said_of_copies():
    """Constants tell nothing, an empty shard is no copy, and buffers that differ are named."""
    noise, ones, empty = np.arange(8.0), np.ones(8), np.zeros((0, 8))

    def seen(rank: int) -> Seen:
        weights = {
            "a.weight": Piece(noise),
            "norm.weight": Piece(ones),
            "b.weight": Piece(noise if rank == 0 else empty),
        }
        step = Step(parameters=weights, buffers={"codes": Piece(noise + rank)}, lines={"step": "train.py:1"})
        return Seen(weights=weights, buffers={"codes": Piece(noise)}, steps=[step])

    shown = str(check_copies([seen(0), seen(1)], "train.py"))
    assert shown.startswith("train.py: copies stay the same")
    assert "1 of 3 parameters begin as the same on several ranks" in shown
    assert "not compared: norm.weight, of which" in shown and "not judged: codes differ on ranks 0, 1" in shown


def test_copies_with_which_a_rank_computes_nothing_are_no_copies():
    """As those of other stages, where every rank makes the whole model."""
    before, after = ({"a.weight": Piece(x)} for x in (np.arange(4.0), np.arange(4.0) + 1))

    def seen(is_used: bool, has_moved: bool) -> Seen:
        step = Step(parameters=after if has_moved else before, parts=[{"a.weight": np.ones(4)}] * is_used)
        return Seen(weights=before | {"b.weight": Piece(x)}, steps=[replace(step, lines={"step": "train.py:1"})])

    x = np.arange(5.0)
    same = check_copies([seen(True, True), seen(False, False)])
    assert same.verdict == "same"
    assert same.notes == ("copies that a rank does not use are not compared: a.weight on rank 1",)
    assert check_copies([seen(True, True), seen(True, False)]).verdict == "different"


def test_dropout_is_named_where_gradients_of_copies_differ_for_the_same_samples():
    x, weights = np.arange(8.0), {"a.weight": Piece(np.arange(4.0))}

    def cause(kinds: set[str], *data: np.ndarray) -> str:
        seen = []
        for rank, given in enumerate(data):
            moved = {"a.weight": Piece(np.arange(4.0) + rank)}
            step = Step(samples=[{"x": given}], gradients=moved, parameters=moved, lines={"step": "train.py:1"})
            seen.append(Seen(weights=weights, steps=[step], kinds=kinds))
        first = check_copies(seen).first
        assert first is not None
        return first.cause

    assert "averaged over ranks" in cause({"Dropout"}, x, x + 1)
    assert "dropout masks" in cause({"Dropout"}, x, x)
    assert "in the backward pass" in cause(set(), x, x)
