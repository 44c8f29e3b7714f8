"""What the doctor must not take for a fault: padding, masks of ones, and torch.compile."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tplab.checking.recording import Step
from tplab.checking.samples import compare_samples
from tplab.torch import same_model

TOKENS = np.random.default_rng(0).integers(1, 30, (4, 9))
LENGTHS = (5, 9, 4, 7)


def padded(rows: list[int], pad: int) -> np.ndarray:
    """These rows, padded to the longest of them."""
    longest = max(LENGTHS[row] for row in rows)
    return np.stack([np.where(np.arange(9) < LENGTHS[row], TOKENS[row], pad)[:longest] for row in rows])


def calls(rows: list[int]) -> Step:
    """The model is called with inputs and a mask, and then another one, with targets."""
    x = padded(rows, 0)
    return Step(samples=[{"0": x, "mask": (x > 0).astype(int)}, {"1": padded(rows, -100), "mask": (x > 0).astype(int)}])


def test_padding_is_no_token_and_each_tensor_has_its_own():
    found = compare_samples([calls([0, 2]), calls([1, 3])], [calls([0, 1, 2, 3])])
    assert (found.kind, found.copies) == ("same", ((0,), (1,))), found.words
    found = compare_samples([calls([0, 2]), calls([0, 2])], [calls([0, 1, 2, 3])])
    assert (found.kind, found.factor) == ("duplicates", 0.5), found.words
    missing = compare_samples([calls([0, 2]), calls([1])], [calls([0, 1, 2, 3])])
    assert (missing.kind, missing.factor) == ("missing", 0.75), missing.words


def test_tokens_that_are_cut_off_are_missed():
    whole, parts = [Step(samples=[{"0": TOKENS}])], [TOKENS[:, :4], TOKENS[:, 4:8]]
    found = compare_samples([Step(samples=[{"0": part}]) for part in parts], whole)
    assert (found.kind, found.factor) == ("missing", 8 / 9), found.words


def test_masks_of_ones_say_nothing_about_samples():
    def step(x: np.ndarray) -> Step:
        return Step(samples=[{"input_ids": x, "attention_mask": np.ones_like(x)}])

    whole = [step(TOKENS[:, :8])]
    for cut in (TOKENS[:2, :8], TOKENS[2:, :8]), (TOKENS[:, :4], TOKENS[:, 4:8]):
        found = compare_samples([step(x) for x in cut], whole)
        assert (found.kind, found.copies) == ("same", ((0,), (1,))), found.words
    found = compare_samples([step(TOKENS[:2, :8])] * 2, whole)
    assert (found.kind, found.copies) == ("duplicates", ((0, 1),)), found.words


COMPILED = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.compile(DistributedDataParallel(nn.Linear(6, 3)), backend="eager")

@torch.compile(backend="eager")
def loss_of(x, y):
    return nn.functional.mse_loss(x, y)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for step in range(2):
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    optimizer.zero_grad()
    loss_of(model(x[rank::world]), y[rank::world]).backward()
    optimizer.step()
"""


def test_compiled_programs_are_compared_as_they_are_written(tmp_path: Path):
    path = tmp_path / "compiled.py"
    path.write_text(COMPILED)
    report = same_model(path, ranks=2)
    assert (report.verdict, report.findings) == ("same", ()), str(report)
    assert sum("torch.compile" in note for note in report.notes) == 1
