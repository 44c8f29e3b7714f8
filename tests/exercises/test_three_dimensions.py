"""Lab 24: solutions, and the wrong answers people give."""

import pytest
import torch

from tplab.exercises.three_dimensions import LAYOUTS, check_clipping, check_layouts
from tplab.torch import all_reduce, clip_gradients


def untouched(stages, max_norm, specs): ...


def own_norm(stages, max_norm, specs):
    torch.nn.utils.clip_grad_norm_(stages.parameters(), max_norm)


def scaled(stages, max_norm, total):
    for parameter in stages.parameters():
        parameter.grad.mul_(torch.clamp(max_norm / (total.sqrt() + 1e-6), max=1.0))


def sum_over_all(stages, max_norm, specs):
    squares = torch.stack([parameter.grad.square().sum() for parameter in stages.parameters()]).sum()
    scaled(stages, max_norm, all_reduce(squares, ("dp", "pp", "tp")))


def largest(stages, max_norm, specs):
    squares = torch.stack([parameter.grad.square().sum() for parameter in stages.parameters()]).sum()
    scaled(stages, max_norm, all_reduce(squares, ("dp", "pp", "tp"), "max"))


@pytest.mark.parametrize(
    "clip, right, hint",
    [
        (untouched, None, "not started"),
        (clip_gradients, True, "every rank scales by the same factor"),
        (own_norm, False, "The ranks do not agree"),
        (sum_over_all, False, "counted more than once"),
        (largest, False, "what other ranks hold is missing"),
        (lambda stages, most, specs: 1 / 0, False, "division by zero"),
    ],
)
def test_clipping(clip, right, hint):
    verdict = check_clipping(clip)
    assert hint in str(verdict)
    assert verdict.passed is right


def test_layouts_of_two_nodes():
    """Tensor parallelism fills a node, and data parallelism crosses. The last answer is the right one."""
    assert "not started" in str(check_layouts({"2 nodes of 4": ""}))
    for layout, hint in (
        ("8 tp", "send activations over the slow links"),
        ("2 pp x 4 tp", "idle for a third of the time"),
        ("4 dp x 2 tp", "Only gradients cross the slow links"),
        ("9 tp", "'9 tp' is not among the layouts"),
    ):
        verdict = check_layouts({"2 nodes of 4": layout})
        assert verdict.passed is False
        assert hint in str(verdict)
    said = str(check_layouts({"2 nodes of 4": "2 dp x 4 tp"}))
    assert "2 nodes of 4: 2 dp x 4 tp is the fastest" in said
    assert "one node of 8: not chosen yet" in said
    assert "2 dp x 4 tp" in LAYOUTS
