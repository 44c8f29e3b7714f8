"""Lab 26: solutions, and the wrong answers people give."""

import pytest
import torch
import torch.distributed as dist

from tplab.exercises import three_dimensions
from tplab.exercises.three_dimensions import LAYOUTS, check_clipping, check_layouts
from tplab.torch import all_gather, all_reduce, axis_index, axis_size, clip_gradients, device_mesh


def untouched(stages, max_norm, specs): ...


def own_norm(stages, max_norm, specs):
    torch.nn.utils.clip_grad_norm_(stages.parameters(), max_norm)


def scaled(stages, max_norm, total):
    for parameter in stages.parameters():
        parameter.grad.mul_(torch.clamp(max_norm / (total.sqrt() + 1e-6), max=1.0))


def sum_over_all(stages, max_norm, specs):
    squares = torch.stack([parameter.grad.square().sum() for parameter in stages.parameters()]).sum()
    scaled(stages, max_norm, all_reduce(squares, ("dp", "pp", "tp")))


def adds_norms(stages, max_norm, specs):
    norm = torch.stack([parameter.grad.norm() for parameter in stages.parameters()]).sum()
    scaled(stages, max_norm, all_reduce(norm, ("pp", "tp")) ** 2)


def largest(stages, max_norm, specs):
    squares = torch.stack([parameter.grad.square().sum() for parameter in stages.parameters()]).sum()
    scaled(stages, max_norm, all_reduce(squares, ("dp", "pp", "tp"), "max"))


def whole_norm(stages, untied=True):
    """The square of the model's norm: every number once."""
    later = {place for places in stages.tied for place in places[1:]} if untied else set()
    total = torch.zeros(())
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            if (number, name) not in later:
                copies = 1 if "tp" in SPECS[number][name] else axis_size("tp")
                total = total + parameter.grad.square().sum() / copies
    return all_reduce(total, ("pp", "tp"))


SPECS: dict = {}


def clip_of(factor, **options):
    """The right norm, and some formula for the factor."""

    def clip(stages, max_norm, specs):
        SPECS.update(specs)
        norm = whole_norm(stages, **options).sqrt()
        for parameter in stages.parameters():
            parameter.grad.mul_(factor(max_norm, norm))

    return clip


def by_branch(stages, max_norm, specs):
    """Without a 1e-6, without a clamp, with new gradients, in float32."""
    SPECS.update(specs)
    norm = whole_norm(stages).sqrt().float()
    if norm > max_norm:
        for parameter in stages.parameters():
            parameter.grad = parameter.grad * (max_norm / norm)


def by_torch_distributed(stages, max_norm, specs):
    later = {place for places in stages.tied for place in places[1:]}
    total = torch.zeros(())
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            if (number, name) not in later and ("tp" in specs[number][name] or axis_index("tp") == 0):
                total = total + parameter.grad.square().sum()
    for axis in ("pp", "tp"):
        dist.all_reduce(total, group=device_mesh().get_group(axis))
    torch.nn.utils.clip_grads_with_norm_(stages.parameters(), max_norm, total.sqrt())


def summed_over_one_axis(stages, max_norm, specs):
    squares = torch.stack([parameter.grad.square().sum() for parameter in stages.parameters()]).sum()
    scaled(stages, max_norm, all_reduce(squares, "tp"))


def to_nothing(stages, max_norm, specs):
    """The new gradients are made, and forgotten."""
    for parameter in stages.parameters():
        _ = parameter.grad * 0.5


def gathers_gradients(stages, max_norm, specs):
    """Every rank gets the whole gradients, to take their norm."""
    later = {place for places in stages.tied for place in places[1:]}
    total = torch.zeros(())
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            whole = all_gather(parameter.grad, "tp") if "tp" in specs[number][name] else parameter.grad
            total = total + (0 if (number, name) in later else whole.square().sum())
    scaled(stages, max_norm, all_reduce(total, "pp"))


def clips_values(stages, max_norm, specs):
    torch.nn.utils.clip_grad_value_(stages.parameters(), max_norm / 10)


def leaves_out_one(stages, max_norm, specs):
    SPECS.update(specs)
    factor = (max_norm / whole_norm(stages).sqrt()).clamp(max=1.0)
    for parameter in [*stages.parameters()][1:]:
        parameter.grad.mul_(factor)


def seeds(stages, max_norm, specs):
    torch.manual_seed(0)
    by_branch(stages, max_norm, specs)


def steps_too(stages, max_norm, specs):
    by_branch(stages, max_norm, specs)
    for parameter in stages.parameters():
        parameter.data.sub_(parameter.grad)


@pytest.mark.parametrize(
    "clip, right, hint",
    [
        (untouched, None, "not started"),
        (clip_of(lambda most, norm: torch.clamp(most / (norm + 1e-6), max=1.0)), True, "scales by the same factor"),
        (clip_of(lambda most, norm: min(1.0, most / norm)), True, "scales by the same factor"),
        (by_branch, True, "scales by the same factor"),
        (clip_of(lambda most, norm: most / (norm + 1e-6)), False, "The norm is below max_norm"),
        (clip_of(lambda most, norm: torch.clamp(0.1 / norm, max=1.0)), False, "With max_norm 0.05 on Mesh(dp=1, pp=1"),
        (clip_of(lambda most, norm: min(1.0, most / norm**2)), False, "Take the root"),
        (clip_of(lambda most, norm: min(1.0, most / norm), untied=False), False, "counted twice"),
        (to_nothing, False, "Are the new gradients written to `.grad`?"),
        (clip_gradients, False, "`clip_gradients` does the work"),
        (lambda *args: clip_gradients(*args), False, "`clip_gradients` does the work"),
        (gathers_gradients, False, "what is the least that ranks must tell each other?"),
        (clips_values, False, "not all entries of the gradient of"),
        (leaves_out_one, False, "multiply all gradients by the same factor"),
        (seeds, False, "leaves torch's global generator in another state"),
        (steps_too, False, "it changes 0.0.embedding.weight in place"),
        (by_torch_distributed, True, "scales by the same factor"),
        (own_norm, False, "The ranks do not agree"),
        (summed_over_one_axis, False, "Over which ranks must the squares still be added up?"),
        (sum_over_all, False, "counted twice"),
        (adds_norms, False, "are norms added and not squares?"),
        (largest, False, "is something missing in the norm that other ranks hold?"),
        (lambda stages, most, specs: 1 / 0, False, "division by zero"),
    ],
)
def test_clipping(clip, right, hint):
    verdict = check_clipping(clip)
    assert hint in str(verdict)
    assert verdict.passed is right


def test_layouts_of_four_machines(monkeypatch: pytest.MonkeyPatch):
    """Tensor parallelism fills a machine, and a pipeline leaves fewer gradients to cross. The last answer is right.

    Which layout is the fastest is what lab 26 claims, and `tests/labs/test_claims.py` runs them all; one is run here.
    """
    fastest = {"4 machines of 2": "2 pp x 2 dp x 2 tp", "8 machines": "4 dp x 2 pp"}
    assert 0.01 < three_dimensions._seconds("8 dp", "4 machines of 2") < 1
    monkeypatch.setattr(three_dimensions, "_seconds", lambda layout, on: 0.2 if layout == fastest[on] else 0.3)
    assert "not started" in str(check_layouts({"4 machines of 2": ""}))
    for layout, hint in (
        ("8 tp", "send activations over the slow links"),
        ("4 dp x 2 pp", "Only the pipeline is inside a machine, where links are fast"),
        ("8 dp", "Nothing is divided inside a machine"),
        ("4 dp x 2 tp", "Only gradients cross the slow links"),
        ("9 tp", "'9 tp' is not among the layouts"),
    ):
        verdict = check_layouts({"4 machines of 2": layout})
        assert verdict.passed is False
        assert hint in str(verdict)
    said = str(check_layouts({"4 machines of 2": "2 pp x 2 dp x 2 tp"}))
    assert "4 machines of 2: 2 pp x 2 dp x 2 tp is the fastest" in said
    assert "one node of 8: not chosen yet" in said
    assert "is the fastest" in str(check_layouts({"4 machines of 2": " 2 pp × 2 dp  x 2 tp"}))
    # The layout with the fewest bytes is not the fastest here, so no hint may ask for it.
    assert "Only gradients cross the slow links" in str(check_layouts({"8 machines": "8 dp"}))
    for wrong, hint in (
        ({"four machines": "8 tp"}, "'four machines' is not among the clusters"),
        (["8 tp"], "by its name"),
    ):
        verdict = check_layouts(wrong)  # type: ignore[arg-type]
        assert verdict.passed is False and hint in str(verdict)
    assert [layout for layout, mesh in LAYOUTS.items() if len(mesh.shape) == 3] == ["2 pp x 2 dp x 2 tp"]
