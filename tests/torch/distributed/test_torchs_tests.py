"""Some of PyTorch's own tests of torch.distributed, on simulated ranks; `make torchs-tests` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch.distributed import torchs

PASS = [
    "test_all_gather_coalesced_with_empty",  # profiled, with the events that it expects
    "test_all_to_all_single_unequal_split",
    "test_batch_isend_irecv_gloo",
    "test_ddp_logging_data_cpu",
    "test_get_rank",  # each rank writes a file that is named after os.getpid()
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo",
    "test_send_recv_any_source_autograd_profiler",
    "test_sparse_all_reduce_sum",
]
SKIPPED = {"test_all_gather_cuda": torchs.NEEDS_CUDA, "test_barrier_group": torchs.NOT_HERE}


@pytest.mark.timeout(300)  # 20 s on a machine that has nothing else to do
def test_a_selection_passes():
    """In a process of their own: torch's test harness changes much in the one where it runs."""
    command = [sys.executable, "-W", "ignore", "-m", torchs.__name__, "--each", *PASS, *SKIPPED]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    found = [torchs.Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    expected = {**dict.fromkeys(PASS, torchs.PASSED), **SKIPPED}
    assert {one.name: one.kind for one in found} == expected, [one.reason for one in found] + [done.stderr[-3000:]]


SKIPS = {73: "Skipped due to small world size.", 74: "CUDA is not available.", 86: "Test skipped at subprocess level"}


@pytest.mark.parametrize(
    "codes, said, error, kind",
    [
        ([0, 0, 0], [], "", torchs.PASSED),
        ([0, 0, 0], [], "a rank has failed", torchs.FAILED),
        ([74, 74, 74], [], "", torchs.NEEDS_CUDA),
        ([86, 86, 86], ["Test requires backend gloo to be one of {'nccl'}"], "", torchs.NEEDS_CUDA),
        ([73, 73, 73], [], "", torchs.NOT_HERE),
        ([10, 0, 0], ["AssertionError: 1 != 2"], "", torchs.FAILED),
        ([None, None, None], [], "no rank can go on", torchs.FAILED),
        ([74, 10, 74], ["AssertionError"], "", torchs.FAILED),
    ],
)
def test_what_exit_codes_mean(codes: list[int | None], said: list[str], error: str, kind: str):
    reports = [(code, said if rank == 0 else []) for rank, code in enumerate(codes)]
    assert torchs.judged("test_it", error, reports, SKIPS).kind == kind
