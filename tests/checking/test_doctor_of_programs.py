"""What people give the doctor: programs that look for GPUs, cannot run on one rank, draw their own data, or fail."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tplab import doctor
from tplab.torch import same_model

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without a GPU")

SCRIPT = """\
import logging, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logging.basicConfig(level=logging.INFO)
FEWEST = 2
if torch.accelerator.device_count() < FEWEST:
    print(f"There are fewer than {FEWEST} gpus. Exiting.")
    sys.exit()
device = torch.accelerator.current_accelerator()
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
# ASSERT
torch.manual_seed(0)
model = nn.Linear(6, 3).to(device)
if world > 1:
    model = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
logging.info("begins")
for step in range(5):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).chunk(world)[rank].to(device)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    return path


@no_gpu
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_program_that_looks_for_gpus_finds_as_many_as_ranks_on_the_reference_too(script: Path, device: str | None):
    report = same_model(script, ranks=2, device=device)
    assert report.verdict == "same", str(report)
    assert "the reference found 2 GPUs, as the ranks did" in str(report)
    assert ("this machine has no GPU" in str(report)) == (device is None)


def test_what_a_program_printed_that_made_no_step_is_said(script: Path):
    script.write_text(SCRIPT.replace("FEWEST = 2", "FEWEST = 3"))
    report = same_model(script, ranks=2, device="cpu")
    assert report.exit_code == 3
    assert report.reason.startswith("on 2 ranks no step of an optimizer was seen")
    assert report.reason.endswith("it ended, and the last thing it printed was 'There are fewer than 3 gpus. Exiting.'")


def test_a_reference_that_cannot_run_on_one_rank_has_as_few_as_it_can(script: Path):
    script.write_text(SCRIPT.replace("# ASSERT", "assert world % 2 == 0, f'an even number, not {world}'"))
    report = same_model(script, ranks=4, device="cpu")
    assert report.verdict == "same", str(report)
    assert report.about.endswith("compared with 2 ranks")
    text = " ".join(str(report).split())
    assert "the reference has 2 ranks, because on 1 rank the script fails: rank 0 raised AssertionError at" in text
    assert "train_it.py:14: an even number, not 1" in text and "--reference" not in text
    reason = same_model(script, ranks=2, device="cpu").reason
    assert "an even number, not 1; the reference may need other arguments, or more ranks" in reason


def test_what_a_program_logs_is_not_shown_and_its_handlers_are_gone(script: Path, capfd):
    before = logging.root.handlers[:]
    same_model(script, ranks=2, device="cpu")
    assert "begins" not in "".join(capfd.readouterr())
    assert logging.root.handlers == before


def test_long_errors_of_torch_are_cut_to_their_first_sentence():
    def train() -> None:
        raise RuntimeError("Shapes are wrong. It got Spec(f32[4, 4](S(0)))\nand more\nand more")

    reason = same_model(train, ranks=2).reason
    assert reason.startswith("on 2 ranks the script fails: rank 0 raised RuntimeError at test_doctor_of_programs.py:")
    assert reason.endswith(": Shapes are wrong.")

    def long() -> None:
        raise RuntimeError("Spec" * 1000)

    assert len(same_model(long, ranks=2).reason) < 500


@pytest.mark.parametrize("name", ["no_such_package.train", "no_such_package"])
def test_a_module_that_is_not_there(name: str, capsys):
    assert doctor.main(["--nproc-per-node", "2", "-m", name]) == 2
    shown = capsys.readouterr().err
    assert shown == f"tplab.doctor: there is no module {name!r} to run, neither in this folder nor installed\n"


def test_a_script_that_python_cannot_read(script: Path, capsys):
    script.write_text("for\n")
    assert doctor.main(["--nproc-per-node", "2", str(script)]) == 2
    assert capsys.readouterr().err == "tplab.doctor: invalid syntax (train_it.py, line 1)\n"


def test_flags_behind_the_script_are_the_scripts(script: Path, capsys):
    assert doctor.main([str(script), "--nproc-per-node", "2"]) == 2
    shown = capsys.readouterr().err
    assert "give --nproc-per-node 4, or --mesh dp=2,tp=2, before the script: --nproc-per-node comes after" in shown


def test_one_rank_beside_one_rank_says_nothing(script: Path, capsys):
    assert doctor.main(["--nproc-per-node", "1", str(script)]) == 2
    assert "1 rank compared with 1 rank says nothing; give --nproc-per-node 2 or more" in capsys.readouterr().err


def test_an_unknown_flag_is_named_alone_and_only_a_near_one_is_suggested(capsys):
    for arguments, said in (
        (["--tolerence", "train.py"], "unrecognized argument: --tolerence (--help lists the flags)"),
        (["--htlm", "x.html", "train.py"], "unrecognized argument: --htlm; did you mean --html? (--help"),
    ):
        with pytest.raises(SystemExit):
            doctor.main(arguments)
        assert said in capsys.readouterr().err


HANG = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.send(torch.ones(2), 1 - dist.get_rank())
"""


def test_who_waits_where_keeps_its_lines(script: Path, capsys):
    script.write_text(HANG)
    assert doctor.main(["--nproc-per-node", "2", str(script)]) == 2
    shown = capsys.readouterr().out
    assert "on:\n  rank 0 waits in send(" in shown and "\n  rank 1 waits in send(" in shown


def command(script: Path, tail: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The doctor as a command in a shell."""
    path = os.pathsep.join([*environment.pop("first", "").split(), str(Path(doctor.__file__).parents[1])])
    text = f"{sys.executable} -m tplab.doctor --nproc-per-node 2 {script.name} {tail}"
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        ["bash", "-c", text], cwd=script.parent, env=environment, capture_output=True, text=True, timeout=120
    )


def test_without_torch_it_could_not_run(script: Path, tmp_path: Path):
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = command(script, first=str(folder))
    assert (done.returncode, done.stderr) == (2, "tplab.doctor: No module named 'torch'\n")


def test_who_reads_the_report_may_stop_reading(script: Path):
    done = command(script, "| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (128 + 13, "")  # as of a command that the system's SIGPIPE ends


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_reference_of_several_ranks_is_given_its_pieces_of_the_ranks_weights():
    """Each rank draws weights of its own, and the whole model's are pieces of them."""

    def train() -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            rows = torch.arange(48.0).reshape(8, 6).sin().chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = same_model(train, ranks=4)
    assert report.verdict == "same" and report.about.endswith("with 2 ranks"), str(report)
    assert "the reference was given the weights that the ranks begin with" in str(report)


@pytest.mark.parametrize("filled", [0, 1, 2])
def test_parameters_that_nothing_fills_are_named(filled: int):
    def train(filled: int) -> None:
        import torch.distributed as dist

        torch.manual_seed(0)
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
        model.to_empty(device="cpu")
        for layer in list(model)[:filled]:
            for p in layer.parameters():
                p.data.normal_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(24.0).reshape(4, 6).sin().chunk(dist.get_world_size())[dist.get_rank()]
        model(x).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()

    report = same_model(train, [filled], ranks=2)
    assert report.verdict == ("same" if filled == 2 else "cannot tell"), str(report)
    if filled < 2:
        first = f"nothing has filled {filled}.weight and {3 - 2 * filled} more before training begins: to_empty at"
        assert report.reason.startswith(f"{first} test_doctor_of_programs.py:")


# --- samples that ranks draw themselves -------------------------------------------------------------------------------


def draws_its_own(seeded: bool, factor: float) -> None:
    """Each rank draws a batch, and compares with something that no function of torch for losses sees."""
    import torch.distributed as dist

    model = torch.nn.Linear(6, 3)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if seeded:
        torch.manual_seed(dist.get_rank() + 1)
    for _ in range(3):
        for _ in range(2):
            noise = torch.rand(4, 3)
            x, y = torch.randn(4, 6), torch.randint(3, (4,))
            found = model(x) - torch.nn.functional.one_hot(y, 3) + 0.1 * noise
            (factor ** (dist.get_world_size() - 1) * found.square().mean() / 2).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("seeded", [True, False])
def test_the_reference_is_given_what_ranks_draw_where_it_draws_its_own(seeded: bool):
    report = same_model(draws_its_own, [seeded, 1.0], ranks=3, seed=1)
    assert report.verdict == "same", str(report)
    assert "the reference was given the samples that the ranks drew, because each of them draws its own" in str(report)
    first = same_model(draws_its_own, [seeded, 1.5], ranks=3, seed=1).first
    assert first is not None and (first.what, first.factor) == ("loss", pytest.approx(1.5**2, rel=1e-3))


class Denoised(torch.nn.Sequential):
    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.01 * t[:, None])


def removes_noise() -> None:
    """The model is called with a time that was drawn, and with noisy samples; the loss compares with the noise."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank + 1)
    model = Denoised(torch.nn.Linear(6, 6))
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.arange(48.0).sin().reshape(8, 6).roll(step, 0).chunk(world)[rank]
        t, noise = torch.randint(0, 1000, (len(x),)), torch.randn_like(x)
        (model(x + noise, t) - noise).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()


def test_noise_that_a_loss_compares_with_and_that_was_not_handed_over_is_no_fault():
    report = same_model(removes_noise, ranks=2)
    assert report.verdict == "cannot tell", str(report)
    assert "and not what the loss at test_doctor_of_programs.py" in report.reason


class Scaled(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image * 2 - 1


def augments_its_own(factor: float) -> None:
    """As a data set does: modules without parameters change one image after another, before these are one batch."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank + 1)
    model, change = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 3)), Scaled()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        images = torch.arange(48.0).sin().reshape(6, 2, 2, 2).roll(step, 0).tensor_split(world)[rank]
        x = torch.stack([change(image) for image in images])
        noisy = x + 0.1 * torch.randn(x.shape)
        loss = torch.nn.functional.mse_loss(model(noisy), torch.zeros(len(x), 3))
        (factor ** (world - 1) * loss).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()


def test_modules_that_change_single_images_are_no_models():
    report = same_model(augments_its_own, [1.0], ranks=3)
    assert report.verdict == "same", str(report)
    first = same_model(augments_its_own, [1.5], ranks=3).first
    assert first is not None and (first.what, first.factor) == ("loss", pytest.approx(1.5**2, rel=1e-3))


def begins_anew(reads_before: bool) -> None:
    """Two microbatches of two samples on each of two ranks; a batch may be read before the loop begins."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.arange(96.0).sin().reshape(16, 6)
    batches = [data[start:].narrow(0, 2 * rank, 2) for start in range(0, 16 - 2 * world + 1, 2 * world)]
    model = torch.nn.Linear(6, 3)
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.1)
    optimizer, rest = torch.optim.SGD(model.parameters(), lr=0.1), iter(batches)
    x = batches[0] if reads_before else next(rest)
    for _ in range(4 // world):
        (model(x).square().mean() * world / 4).backward()
        x = next(rest)
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    optimizer.step()


def test_a_batch_that_is_read_again_is_on_no_other_rank():
    assert same_model(begins_anew, [False], ranks=2).verdict == "same"
    report = same_model(begins_anew, [True], ranks=2)
    assert report.first is not None and report.first.what == "samples", str(report)
    assert "2 of the 8 samples are on one rank once too often; 2 are on none" in str(report)
    assert "proof" in str(report) and "several ranks" not in str(report)


def test_the_script_of_the_readme_is_compared(tmp_path: Path):
    whole = (Path(__file__).parents[2] / "docs" / "train.py").read_text()
    script = tmp_path / "train.py"
    script.write_text(whole.replace("WIDTH, BATCH = 1024, 2048", "WIDTH, BATCH = 16, 8"))
    report = same_model(script, ranks=4)
    assert report.verdict == "same", str(report)
    script.write_text(
        script.read_text().replace("    optimizer.step()", "    if world > 1: scale()\n    optimizer.step()")
    )
    scale = "def scale():\n    for p in model.parameters():\n        p.grad *= 2\n\n\nworld = dist.get_world_size()\n"
    script.write_text(script.read_text().replace("for _ in range(2):", scale + "for _ in range(2):"))
    first = same_model(script, ranks=4).first
    assert first is not None and first.factor == pytest.approx(2, rel=1e-3), str(first)


def test_ranks_that_gather_what_each_of_them_draws_are_not_blamed():
    """Sequence parallelism: the samples of a rank are a part of those that the ranks of the model work on."""

    def train() -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
        model = parallelize_module(model, mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.rand(4, 6)).sum().backward()
            optimizer.step()

    report = same_model(train, ranks=2)
    assert report.verdict == "same", str(report)
