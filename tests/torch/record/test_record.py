"""Real runs, recorded: what gloo's processes sent is what simulated ranks send for the same unchanged script."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import pytest
import torch.distributed as dist

from tplab import Mesh, Trace, record
from tplab import merge as command
from tplab.torch import launch
from tplab.torch.record import start
from tplab.trace import merge

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


def torchrun(num_ranks: int, *args: str, cwd: Path = ROOT, check: bool = True) -> subprocess.CompletedProcess[str]:
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), *args]
    ran = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert not check or ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def free_ports(count: int) -> list[str]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(one.getsockname()[1]) for one in sockets]


ABOUT = "rank step kind op reduction axis group peer bytes shape dtype where phase"


def operations(trace: Trace) -> list[tuple[object, ...]]:
    """What was sent, by whom, in which round and phase, from which line."""
    events = [event for event in trace.events if event.kind in ("send", "receive", "collective")]
    return sorted(map(attrgetter(*ABOUT.split()), events))


def check_as_simulated(recorded: Trace, script: Path, mesh: Mesh) -> None:
    simulated = launch(script, mesh=mesh).trace
    assert operations(recorded) == operations(simulated)
    assert recorded.clock == "measured" and recorded.makespan > 0 and recorded.mesh == mesh


SCRIPTS = ("ddp", "fsdp", "dtensor", "pipeline")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have recorded of all scripts, one after another."""
    made = tmp_path_factory.mktemp("recorded")
    ports = ",".join(free_ports(2 * len(SCRIPTS)))
    torchrun(2, str(HERE / "driver.py"), str(made), ports, *(str(HERE / f"{name}.py") for name in SCRIPTS))
    return made


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_real_run_is_recorded_as_simulated_ranks_are(folder: Path, name: str):
    merged = merge(folder / name)
    check_as_simulated(merged.trace, HERE / f"{name}.py", Mesh(world=2))
    assert merged.doubt == 0 and merged.unfinished == []


@pytest.mark.parametrize("name, count", [("ddp", 19), ("fsdp", 6), ("dtensor", 6), ("pipeline", 5)])
def test_results_and_errors_are_the_same_to_the_bit(folder: Path, name: str, count: int):
    lines = [line.split() for line in (folder / name / "same").read_text().splitlines()]
    assert len(lines) == 2 and all(int(found) >= count and same == "True" for found, same in lines)


def test_a_wait_inside_of_the_backward_pass_is_seen(folder: Path):
    """DistributedDataParallel waits for its buckets in C++."""
    trace = merge(folder / "ddp").trace
    lines = (HERE / "ddp.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.strip().startswith("model(x[4:])"))
    waits = [event for event in trace.select(kind="wait").events if event.where == f"ddp.py:{line}"]
    assert {wait.op for wait in waits} >= {"all_reduce"} and all(wait.duration > 0 for wait in waits)


def test_ranks_compute_between_their_waits(folder: Path):
    trace = merge(folder / "fsdp").trace
    for rank in trace.mesh.ranks:
        events = [event for event in trace.select(rank=rank).events if event.kind in ("compute", "wait")]
        events.sort(key=lambda event: (event.start, event.end))
        for one, other in pairwise(events):
            assert other.start >= one.end - 1e-9
        assert events[0].start == 0


def test_a_script_is_recorded_without_a_line_in_it(tmp_path: Path):
    """By torchrun's own command, on 4 ranks; the names of its DeviceMesh name the groups."""
    script = HERE / "two_axes.py"
    torchrun(4, "-m", "tplab.record", "--to", "traces", str(script), cwd=tmp_path)
    merged = merge(tmp_path / "traces")
    check_as_simulated(merged.trace, script, Mesh(dp=2, tp=2))
    page = tmp_path / "run.html"
    assert command.main([str(tmp_path / "traces"), "--html", str(page), "--mesh", "pp=4"]) == 0
    assert "<title>" in page.read_text()


def test_a_process_without_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    script = tmp_path / "ten.py"
    script.write_text("print('ran')")
    monkeypatch.setattr("tplab.torch.record.group.start", lambda folder: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["record", str(script)])
    for name in record.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="2"):
        record.main()
    assert "RANK is not set; start it with torchrun --nproc-per-node 8 -m tplab.record" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_PROCID", "0")  # srun: a script may take its rank from that
    record.main()
    assert capsys.readouterr().out == "ran\n"


DIES = """\
def noted(rank, word):
    return f'"{word}"' in Path(f"traces/rank{rank}.jsonl").read_text()

if dist.get_rank() == 1:
    while not (noted(0, "broadcast") and noted(1, "end")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED = f"""\
import os, signal, time
from pathlib import Path
import torch, torch.distributed as dist
from tplab.torch.record import start

start("traces")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
{DIES}
dist.broadcast(torch.ones(2), 1)
"""


def test_a_rank_that_is_killed_leaves_its_file(tmp_path: Path):
    (tmp_path / "train.py").write_text(KILLED)
    assert torchrun(2, "train.py", cwd=tmp_path, check=False).returncode
    merged = merge(tmp_path / "traces")
    assert [event.op for event in merged.trace.select(rank=1, kind="collective").events] == ["all_reduce"]
    hang, broken = merged.unfinished
    assert hang == "never finished, over 'world':\n  rank 0: broadcast at train.py:17\n  rank 1 never reached it"
    assert re.match(r"the files? of ranks? (0, )?1 breaks? off", broken)  # torchrun may end rank 0 by force too


MODULE = """\
import sys
import torch, torch.distributed as dist
from pkg.helper import answer

dist.init_process_group("gloo")
print(answer, sys.argv[1:], sys.path[0])
"""


def test_a_module_is_recorded_wherever_it_is_called(tmp_path: Path):
    """A file of the working directory that has the name of a module which torch imports is in nobody's way."""
    (tmp_path / "queue.py").write_text("raise ImportError('not the one of the standard library')")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "helper.py").write_text("answer = 42")
    (tmp_path / "pkg" / "train.py").write_text(MODULE)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    ran = subprocess.run(
        [sys.executable, "-m", "tplab.record", "-m", "pkg.train", "--lr", "0.1"],
        cwd=tmp_path,
        env={**os.environ, **rank, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert ran.stdout == f"42 ['--lr', '0.1'] {tmp_path}\n", ran.stderr
    assert merge(tmp_path / "tplab_trace").trace.title == "train"


def test_without_torchrun_the_command_says_how_to_start_it(tmp_path: Path):
    """Before, a script without torch.distributed recorded nothing, without a word."""
    (tmp_path / "train.py").write_text("print(1)")
    environment = {name: text for name, text in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tplab.record"]
    for script, said in ((["train.py"], "start it with torchrun"), ([], "arguments are required: script (")):
        ran = subprocess.run([*command, *script], cwd=tmp_path, env=environment, text=True, capture_output=True)
        assert ran.returncode == 2 and said in ran.stderr and not ran.stdout


def test_a_recording_has_to_begin_before_torch_distributed_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recording = start(tmp_path)
    with pytest.raises(RuntimeError, match="already being recorded"):
        start(tmp_path)
    recording.stop()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="above init_process_group"):
        start(tmp_path)
    assert not list(tmp_path.iterdir())


def test_simulated_ranks_need_no_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(KILLED.replace(DIES, ""))
    assert {event.op for event in launch("train.py", ranks=2).trace.events} >= {"all_reduce", "broadcast"}
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
