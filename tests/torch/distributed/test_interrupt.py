"""Ctrl-C in programs for torch.distributed: the kernel lives on, and all that ranks share is as it was."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to itself")

SCRIPT = """
    import os, random, signal, sys, tempfile, threading, time, warnings
    from pathlib import Path
    import numpy as np
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed import distributed_c10d as c10d
    from tplab import Mesh
    from tplab.torch import launch, run

    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin deaf to it

    def collectives():
        while True:
            dist.all_reduce(torch.ones(4))

    def ddp():
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        while True:
            model(torch.ones(2, 4)).sum().backward()

    def fsdp():
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(nn.Linear(4, 4))
        while True:
            model(torch.ones(2, 4)).sum().backward()

    def unanswered():
        os.environ["MINE"] = str(dist.get_rank())
        if dist.get_rank() == 1:
            while True:
                pass
        dist.recv(torch.empty(1), 1)

    def store():
        if dist.get_rank() == 1:
            time.sleep(0.001)
            while True:
                pass
        c10d._get_default_store().get("never")

    def threads():
        own = dist.new_group(list(range(dist.get_world_size())))
        def beside():
            while True:
                dist.barrier(own)
        thread = threading.Thread(target=beside)
        thread.start()
        for _ in range(100):
            dist.barrier()
        thread.join()

    FILE = Path(tempfile.mkdtemp()) / "train.py"
    FILE.write_text(
        "import os, sys, torch, torch.distributed as dist\\n"
        "dist.init_process_group('nccl')\\n"
        "os.environ['MINE'] = sys.argv[1]\\n"
        "while True:\\n    dist.barrier()\\n"
    )

    def script():
        launch(FILE, ["x"], ranks=3)

    def kept():
        return (
            c10d._world, dict(os.environ), list(sys.argv), sys.modules["__main__"], list(sys.meta_path), sys.stdout,
            threading.Lock, threading.Thread.start, time.sleep,
            dist.init_process_group.__code__, dist.TCPStore, dist.is_initialized(), torch.get_rng_state().tolist(),
            random.getstate(), np.random.get_state()[1].tolist(), "MINE" in os.environ, os.getenv("MINE"),
        )

    def press(after):
        def pressing():
            time.sleep(after)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=pressing).start()

    def program():
        x = torch.ones(2) * dist.get_rank()
        dist.all_reduce(x)
        return x[0].item()

    run(ddp_once := lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2)) and 0, Mesh(dp=2), distributed=True)
    before = kept()
    for body in (collectives, ddp, fsdp, unanswered, store, threads, script):
        press(0.6)
        try:
            script() if body is script else run(body, Mesh(dp=3), distributed=True)
            raise SystemExit("not interrupted")
        except KeyboardInterrupt:
            pass
        after = kept()
        assert after == before, [place for place, pair in enumerate(zip(before, after)) if pair[0] != pair[1]]
        assert run(program, Mesh(dp=3), distributed=True).per_rank == [3.0] * 3
        deadline = time.monotonic() + 30
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert threading.active_count() == 1, threading.enumerate()
        print(body.__name__, flush=True)
"""


def test_ctrl_c_leaves_everything_as_it_was():
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=170, check=False
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == ["collectives", "ddp", "fsdp", "unanswered", "store", "threads", "script"]
