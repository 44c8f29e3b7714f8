"""`python -m tplab.torchrun`: torchrun's flags, a summary, and what it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tplab import Trace, torchrun
from tplab.commands import mesh_of

SCRIPT = """\
import sys
import torch, torch.distributed as dist
dist.init_process_group("nccl")
x = torch.ones(1000)
dist.all_reduce(x)
print("sum", x[0].item(), sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_run_ends_with_one_screen(script: Path, capsys):
    flags = ["--nproc_per_node=2", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv_endpoint=host:1", "--standalone"]
    assert torchrun.main([*flags, "--cluster", "h100", str(script), "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    assert "[rank 3] sum 4.0 ['--lr', '1']" in shown
    # a ring over 4 ranks: 2 * 3/4 of 4,000 bytes, on each of 4 ranks
    assert ["world", "all_reduce", "1", "23.4", "KiB"] in [line.split() for line in shown.splitlines()]
    assert "train on Mesh(world=4), modelled on h100, data sheet" in shown
    assert "in all_reduce over world at train.py:5; 4 ranks wait there" in shown
    assert "peak memory of tensors: " in shown and "ranks are idle (not computing) for" in shown


LLAMA = """\
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
dist.init_process_group("nccl")
sizes = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
model = DistributedDataParallel(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)))
for step in range(3):
    ids = torch.randint(256, (2, 32))
    model(input_ids=ids, labels=ids).loss.backward()
"""
SIZES = "layers=2,hidden=64,heads=4,kv_heads=2,ffn=128,vocab=256"


def test_a_run_beside_its_forecast(tmp_path: Path, capsys):
    (tmp_path / "llama.py").write_text(LLAMA)
    planned = f"{SIZES},batch=8,sequence=32,microbatch=2,zero=0,dtype=float32,stack=tplab"
    flags = ["--nproc-per-node", "4", "--cluster", "h100-measured", "--forecast", planned]
    assert torchrun.main([*flags, str(tmp_path / "llama.py")]) == 0
    shown = capsys.readouterr().out
    assert "a step of the model, dp 4, microbatch 2, would take " in shown
    (line,) = (line.split() for line in shown.splitlines() if line.startswith("dp "))
    assert line[-1] == "3.00"  # DDP sent in three steps what the plan sends in one, three times


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--forecast", "model=llama3-8b"], "--forecast needs the hardware: give --cluster, too"),
        (["--cluster", "h100", "--forecast", "llama3-8b"], "--forecast is 'llama3-8b'; give columns of a table"),
        (["--cluster", "h100", "--forecast", "modl=a"], "the column 'modl' is not read; did you mean model?"),
        (
            ["--cluster", "h100", "--forecast", "model=llama3-8b,batch=2,sequence=8,cards=2"],
            "the cluster is given already, so the row cannot say its cards",
        ),
        (["--cluster", "h100", "--forecast", "model=llama3-8b"], "the row does not say its batch and sequence"),
    ],
)
def test_a_forecast_that_makes_no_sense(script: Path, flags: list[str], said: str, capsys):
    assert torchrun.main(["--nproc-per-node", "2", *flags, str(script)]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_says_cuda_runs_with_device_cpu(tmp_path: Path, capsys):
    path = tmp_path / "gpu.py"
    path.write_text("import torch\nx = torch.ones(2).cuda()\nprint(torch.cuda.max_memory_allocated(), 'bytes')\n")
    assert torchrun.main(["--nproc-per-node", "2", "--device", "cpu", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "[rank 1] 16 bytes" in shown  # 8 on the host, and 8 where the GPU would be
    assert shown.endswith("\ncuda was mapped to the cpu at gpu.py:2; gpu.py:3\n")


def test_what_it_writes(script: Path, tmp_path: Path, capsys):
    trace, page, perfetto = (str(tmp_path / name) for name in ("run.json", "run.html", "run.perfetto.json"))
    flags = ["--mesh", "dp=1,tp=2", "--trace", trace, "--html", page, "--perfetto", perfetto]
    assert torchrun.main([*flags, str(script)]) == 0
    read = Trace.from_json(Path(trace).read_text())
    assert read.mesh.axis_names == ("dp", "tp") and read.bytes_sent() == 8000
    assert "<title>" in Path(page).read_text() and Path(perfetto).stat().st_size > 100
    assert "computing is not counted: choose a cluster, such as h100, to model it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            ["--nproc-per-node", "many"],
            "--nproc-per-node is 'many'; give a whole number, 1 or more, or gpu, cpu or auto",
        ),
        (["--cluster", "h10"], "no cluster is named 'h10'; did you mean h100"),
        (["--fabric", "efa-p5"], "--fabric says how a cluster is; give --cluster, too"),
        (["--cluster", "h100", "--fabric", "efa"], "no fabric is named 'efa'"),
        (["--mesh", "tp"], "write each axis as name=size"),
        (["--mesh", "tp=4", "--nproc-per-node", "3"], "has 4 ranks, but --nproc-per-node 3 on 1 node makes 3"),
        (["--mesh", "tp=4", "--nproc-per-node", "1"], "has 4 ranks, but --nproc-per-node 1 on 1 node makes 1"),
        (["--mesh", "tp=4", "--nnodes", "3"], "has 4 ranks, which 3 nodes cannot share equally"),
        (["--mesh", "tp=2,tp=3"], "two axes named 'tp'"),
        (["--device", "gpu"], "device 'gpu' does not work here (Expected one of cpu"),
        (["--html", "nowhere/run.html"], "there is no folder nowhere"),
        (["--trace", "."], "--trace . is a folder"),
        (["-m"], "-m needs the name of a module, without .py"),
        (["-m", "nowhere"], "there is no module 'nowhere' to run"),
    ],
)
def test_flags_that_make_no_sense(script: Path, flags: list[str], said: str, capsys):
    assert torchrun.main([*flags, str(script)]) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_cluster_is_refused_before_the_script_is_read(tmp_path: Path, capsys):
    (tmp_path / "no.py").write_text("raise SystemExit(3)\n")
    assert torchrun.main(["--cluster", "mars", str(tmp_path / "no.py")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("tplab.torchrun: no cluster is named 'mars'; there are h100, h200,") and not said.out


def test_a_network_is_said_by_flags(script: Path, capsys):
    shown = []
    for more in ([], ["--fabric", "ethernet-100g", "--cards", "1", "--gpus-per-node", "2"]):
        assert torchrun.main(["--nproc-per-node", "4", "--cluster", "h100-measured", *more, str(script)]) == 0
        shown.append(capsys.readouterr().out)
    assert "on h100-measured" in shown[0] and shown[0] != shown[1]


def test_as_many_ranks_as_the_machine_has(script: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    for gpus, given, said in [
        (0, "auto", "--nproc-per-node auto: 3, because this machine has 3 CPU cores\n"),
        (2, "auto", "--nproc-per-node auto: 2, because this machine has 2 GPUs\n"),
        (1, "gpu", "--nproc-per-node gpu: 1, because this machine has 1 GPU\n"),
        (2, "cpu", "--nproc-per-node cpu: 3, because this machine has 3 CPU cores\n"),
    ]:
        monkeypatch.setattr("tplab.torch.scripts.num_gpus", lambda gpus=gpus: gpus)
        mesh = mesh_of(given, None, 2)
        assert capsys.readouterr().out == said
        assert mesh.size == 2 * int(said.split()[2].rstrip(","))
    monkeypatch.setattr("tplab.torch.scripts.num_gpus", lambda: 0)
    assert torchrun.main(["--nproc-per-node", "gpu", str(script)]) == 2
    assert "'gpu', and this machine has none; give a number" in capsys.readouterr().err
    assert torchrun.main(["--nproc-per-node", "auto", str(script)]) == 0
    assert "[rank 2] sum 3.0" in capsys.readouterr().out


def test_one_rank_sends_nothing(tmp_path: Path, capsys):
    path = tmp_path / "alone.py"
    path.write_text("x = 1\n")
    for num_ranks, said in (("1", "nothing was sent: there is only 1 rank\n"), ("2", "nothing was sent\n")):
        assert torchrun.main(["--nproc-per-node", num_ranks, str(path)]) == 0
        assert said in capsys.readouterr().out


def test_torchruns_flags_for_logs_are_accepted(script: Path, capsys):
    assert torchrun.main(["-r", "3", "-t", "3", "--numa-binding", "node", "--shutdown-timeout=9", str(script)]) == 0
    with pytest.raises(SystemExit):
        torchrun.main([])
    said = "tplab.torchrun: the following arguments are required: script (--help lists the flags)\n"
    assert capsys.readouterr().err == said


def test_a_script_that_is_not_python_shows_its_line(tmp_path: Path, capsys):
    path = tmp_path / "typo.py"
    path.write_text("def f(:\n")
    assert torchrun.main([str(path)]) == 1
    shown = capsys.readouterr().err
    assert 'typo.py", line 1' in shown and "SyntaxError" in shown and "tplab/torch" not in shown


def test_a_failure_shows_the_scripts_own_lines(tmp_path: Path, capsys):
    path = tmp_path / "fails.py"
    path.write_text("import torch\n\n\ndef load():\n    raise ValueError('bad data')\n\n\nload()\n")
    assert torchrun.main(["--nproc-per-node", "2", str(path)]) == 1
    shown = capsys.readouterr().err
    assert 'fails.py", line 8' in shown and "RankError: rank 0 raised ValueError at fails.py:5: bad data" in shown
    assert "tplab/torch" not in shown
    assert torchrun.main([str(tmp_path / "nowhere.py")]) == 2


def test_what_happened_before_a_deadlock_is_shown_and_written(script: Path, tmp_path: Path, capsys):
    script.write_text(SCRIPT + "if dist.get_rank() == 0: dist.barrier()\n")
    page = tmp_path / "run.html"
    assert torchrun.main(["--nproc-per-node", "2", "--html", str(page), str(script)]) == 1
    shown = capsys.readouterr()
    assert "rank 0 waits in barrier('world') at train.py:7 for rank 1" in shown.err
    assert "until then, train on Mesh(world=2)" in shown.out and "all_reduce" in shown.out
    assert "<title>" in page.read_text()


def test_as_a_command_in_another_folder(script: Path):
    """Also where a file lies beside the script that has the name of a module torch imports."""
    (script.parent / "cuda.py").write_text("raise SystemExit('imported')\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(torchrun.__file__).parents[1])}
    command = [sys.executable, "-m", "tplab.torchrun", "--nproc-per-node", "3", script.name]
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "[rank 2] sum 3.0 []" in done.stdout and "all_reduce" in done.stdout


def test_a_flag_behind_the_script_is_named_where_there_is_one_rank(script: Path, capsys):
    assert torchrun.main([str(script), "--nproc-per-node", "2"]) == 0
    shown = capsys.readouterr().err
    assert "on 1 rank: --nproc-per-node comes after" in shown and "so it is an argument of the script" in shown


def test_after_a_deadlock_it_says_what_was_never_received(tmp_path: Path, capsys):
    path = tmp_path / "stuck.py"
    path.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n    dist.send(torch.ones(8), 1)\ndist.all_reduce(torch.ones(1))\n"
    )
    page = tmp_path / "run.html"
    assert torchrun.main(["--nproc-per-node", "2", "--html", str(page), str(path)]) == 1
    shown = capsys.readouterr()
    assert "of these, never received:\n  send from rank 0 to rank 1, 32 B at stuck.py:4\n" in shown.out
    assert "DeadlockError" in shown.err and page.exists()
