"""The same script under torchrun: on this machine, and on two hosts, which are network namespaces of this machine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from tests.torch import torchrun_program
from tplab.torch import run
from tplab.trace.trace import Trace

ROOT = Path(__file__).parents[2]
SCRIPT = Path(torchrun_program.__file__)
IN_CI = bool(os.environ.get("CI"))


def torchrun(*args: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *args, str(SCRIPT)]


def environment(**more: str) -> dict[str, str]:
    """This process's, as a shell has it that torchrun is typed into."""
    ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def bits(result):
    if isinstance(result, torch.Tensor):
        return result.dtype, tuple(result.shape), result.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [bits(item) for item in result]


def steps(trace: Trace):
    """What was sent, by whom and in which order."""
    events = [e for e in trace.events if e.kind in ("send", "receive", "collective")]
    return sorted((e.rank, e.step, e.kind, e.op, e.peer, e.bytes, e.shape, e.where) for e in events)


def check_as_simulated(seen: list[dict]) -> None:
    """What every process saw is what simulated ranks make of the same program."""
    program, mesh, specs = torchrun_program.program, torchrun_program.MESH, torchrun_program.SPECS
    simulated = run(program, mesh, *torchrun_program.arguments(), **specs)
    for saw in seen:
        assert bits(saw["per_rank"]) == bits(simulated.per_rank)  # a sum of two is the same in either order
        assert bits(saw["value"]) == bits(simulated.value)
        assert saw["trace"] == seen[0]["trace"]
    trace = Trace.from_json(seen[0]["trace"])
    assert trace.clock == "measured" and trace.makespan > 0
    assert steps(trace) == steps(simulated.trace)


def read(folder: Path) -> list[dict]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def test_torchrun_on_this_machine(tmp_path):
    command = [*torchrun("--standalone", "--nproc-per-node", "2"), str(tmp_path), "all"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] a line of 0", "[rank 1] a line of 1"]
    seen = read(tmp_path)
    check_as_simulated(seen)
    for saw in seen:
        assert bits(saw["again"]) == bits(saw["per_rank"])
        assert saw["after"] == [torch.full((1,), 2.0)] * 2
        assert saw["wrong mesh"][:2] == (
            "MeshError",
            "torchrun has started 2 processes, and Mesh(tp=3) has 3 ranks; give torchrun --nnodes and --nproc-per-node "
            "that make 3, or run on a mesh of 2",
        )
        kind, text, cause = saw["raises"]
        assert kind == "RankError" and text.startswith("rank 1 raised ValueError at torchrun_program.py:")
        assert text.endswith(": lost my shard") and cause == "ValueError('lost my shard')"
        kind, text, _ = saw["early"]
        assert kind == "DeadlockError" and "rank 0 has returned\n  rank 1 waits in all_reduce(x, 'tp', 'sum')" in text
        kind, text, _ = saw["differs"]
        assert kind == "CollectiveMismatchError" and "float32 [3]" in text and "float32 [4]" in text
        kind, text, _ = saw["nobody"]
        assert kind == "CollectiveMismatchError" and "rank 0 returned without calling it" in text


def why_no_namespaces() -> str | None:
    if not shutil.which("ip"):
        return "there is no `ip`; on Debian: apt-get install iproute2"
    if os.geteuid():
        return "network namespaces need root"
    name = f"tplab-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return f"`ip netns add` fails: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def two_hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces, joined by a cable: (name, interface, address) of each."""
    name, end = f"tplab-{os.getpid()}", f"tp{os.getpid()}"
    hosts = [(f"{name}-{side}", f"{end}{side}", f"10.77.0.{place}") for place, side in ((1, "a"), (2, "b"))]

    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True)

    with ExitStack() as stack:
        for name, _, _ in hosts:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        (first, one_end, _), (second, other_end, _) = hosts
        ip("link", "add", one_end, "netns", first, "type", "veth", "peer", "name", other_end, "netns", second)
        for name, interface, address in hosts:
            ip("-n", name, "address", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield hosts


def test_torchrun_on_two_hosts(tmp_path):
    if reason := why_no_namespaces():
        if IN_CI and os.geteuid() == 0:
            pytest.fail(reason, pytrace=False)
        pytest.skip(f"torchrun on two hosts was NOT tested: {reason}")
    with two_hosts() as hosts:
        address = hosts[0][2]
        processes = []
        for place, (name, interface, _) in enumerate(hosts):
            where = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={place}", f"--master-addr={address}"]
            command = ["ip", "netns", "exec", name, *torchrun(*where, "--master-port=29400"), str(tmp_path), "one"]
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, env=environment(GLOO_SOCKET_IFNAME=interface), **streams))
        try:
            said = [process.communicate(timeout=100)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], said
    check_as_simulated(read(tmp_path))
