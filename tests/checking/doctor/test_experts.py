"""A script that divides experts over ranks: right as it stands, and with one of the faults that others have met."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tplab.torch import same_model

RIGHT = (Path(__file__).parent / "experts.py").read_text(encoding="utf8")
pytestmark = pytest.mark.filterwarnings("ignore")


class Fault(NamedTuple):
    """What is put in place of a text of the script, and what the report must say.

    what    is wrong first
    line    text of the line that it names; "" where it names another than the fault's own
    cause   words of the cause that a run with its repair has proven; "" where nothing may be stated as the cause
    """

    old: str
    new: str
    what: str
    line: str = ""
    cause: str = ""
    ranks: int = 2


FAULTS = {
    "NVIDIA/Megatron-LM#5916: each rank takes the norm of its own experts": Fault(
        "    clip(model)\n", "    nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n",
        "norm", "nn.utils.clip_grad_norm_(", "takes the norm of only what it holds",
    ),
    "NVIDIA/Megatron-LM#1622, a neighbour: the norm takes experts for copies": Fault(
        "if rank == 0 or p is model.experts.weight:", "if rank == 0:",
        "norm", "nn.utils.clip_grads_with_norm_(", "parts are missing",
    ),
    "a broadcast that makes copies equal overwrites the experts": Fault(
        "    if p is not model.experts.weight:\n        dist.broadcast(p.data, 0)\n", "    dist.broadcast(p.data, 0)\n",
        "weights",
    ),
    "each rank draws its own experts from one seed": Fault(
        "torch.randn(count, dim, dim).chunk(world)[rank]", "torch.randn(count // world, dim, dim)",
        "weights", "torch.manual_seed(3)",
    ),
    "huggingface/transformers#48687, a neighbour: gates are gathered without a gradient": Fault(
        "Gather.apply(gates)",
        "torch.cat([gates if i == rank else x.detach() for i, x in enumerate(Gather.apply(gates).chunk(world))])",
        "gradient", "x.detach()",
    ),
    "counts are added up in place, and divided by this rank's": Fault(
        "(chosen.numel() * world)", "chosen.numel()",
        "loss", "counts / chosen.numel()",
    ),
    "the mask is cut along ep first, and tokens along dp": Fault(
        "is_token.chunk(dp)[d].chunk(ep)[e]", "is_token.chunk(ep)[e].chunk(dp)[d]",
        "loss", "(each * mask).sum()", ranks=4,
    ),
}  # fmt: skip


def report_of(text: str, ranks: int, folder: Path):
    path = folder / "experts.py"
    path.write_text(text, encoding="utf8")
    return same_model(path, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_script_is_right(ranks: int, tmp_path: Path):
    report = report_of(RIGHT, ranks, tmp_path)
    assert (report.exit_code, report.findings) == (0, ()), str(report)


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_seen_and_no_cause_is_guessed(name: str, tmp_path: Path):
    fault = FAULTS[name]
    assert RIGHT.count(fault.old) == 1
    text = RIGHT.replace(fault.old, fault.new)
    report = report_of(text, fault.ranks, tmp_path)
    first = report.first
    assert report.exit_code == 1 and first is not None and first.what == fault.what, str(report)
    assert fault.line in text.splitlines()[int(first.where.rpartition(":")[2]) - 1], str(report)
    assert fault.cause in first.cause and bool(first.cause) == bool(first.proof) == bool(fault.cause), str(report)
