"""Scripts that were written by somebody who had not read the doctor, each with its mended twin."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tplab.torch import same_model

FOLDER = Path(__file__).parent / "others"
pytestmark = pytest.mark.filterwarnings("ignore")


class Other(NamedTuple):
    """What a report of a script must say.

    what    is wrong first
    line    text of the line that it names; "" where it names another than the fault's own
    cause   words of the cause that a run with its repair has proven; "" where nothing may be stated as the cause
    """

    script: str
    ranks: int
    what: tuple[str, ...]
    line: str
    cause: str


OTHERS = (
    Other("lora_sequence_parallel", 2, ("gradient",), "self.lora_a(x)", "not added up over ranks"),
    Other("tied_over_stages", 2, ("gradient",), "optimizer.step()", "several stages hold embed.weight"),
    Other("fsdp_divides_again", 2, ("loss", "gradient"), "/ valid", "gradients are averaged over ranks once more"),
    Other("prefix_of_pretrained", 2, ("weights",), "strict=False", ""),
    Other("prefix_of_decay", 2, ("optimizer",), "torch.optim.AdamW(", "the weight decay is not what it is on one rank"),
    Other(
        "balance_loss_of_each_rank",
        2,
        ("loss",),
        "torch.bincount(",
        "the inputs of this line are right and its result is wrong",
    ),
    Other("tokens_counted_twice", 4, ("loss", "gradient"), "/ count", "divided by a number that is too large"),
    Other("wait_comes_too_late", 2, ("gradient",), "async_op=True", "does not wait for it"),
    Other(
        "gradients_over_the_other_axis",
        4,
        ("gradient",),
        "dist.all_reduce(p.grad, group=group)",
        "its group is not that of the ranks",
    ),
    Other("masters_before_broadcast", 2, ("parameters",), "", "the script itself writes it"),
    Other("sum_that_sums_backward", 2, ("gradient",), "functional.all_reduce(h)", "a sum over ranks twice"),
)


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.script)
def test_what_is_wrong_is_named_and_no_cause_is_guessed(row: Other):
    report = same_model(FOLDER / "wrong" / f"{row.script}.py", ranks=row.ranks)
    first = report.first
    assert report.exit_code == 1 and first is not None and first.what in row.what, str(report)
    text = (FOLDER / "wrong" / f"{row.script}.py").read_text().splitlines()
    assert row.line in text[int(first.where.rpartition(":")[2]) - 1], str(report)
    assert row.cause in first.cause and bool(first.cause) == bool(row.cause), str(report)
    assert bool(first.proof) == bool(row.cause)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.script)
def test_its_mended_twin_is_the_same_model(row: Other):
    report = same_model(FOLDER / "right" / f"{row.script}.py", ranks=row.ranks)
    assert (report.exit_code, report.findings) == (0, ()), str(report)
