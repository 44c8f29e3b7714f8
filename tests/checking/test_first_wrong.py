"""check_parallel blames the first thing that is wrong, in plain functions too, and says nothing that is not so."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tplab.torch as lab
from tplab import Mesh, P
from tplab.torch import check_parallel

WIDTH, HIDDEN = 8, 24


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.head = nn.LayerNorm(WIDTH), MLP(), nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(x + self.mlp(self.norm(x)))


class Linear(nn.Module):
    """This rank's part of a layer, whose output is what the ranks have to add up."""

    weight: Any
    bias: Any

    def forward(self, x, bias=None):
        return F.linear(x, self.weight, bias)


class Bare(nn.Module):
    """The same block with its collectives in plain code. `mistake` is what is wrong in it."""

    def __init__(self, whole, mistake):
        super().__init__()
        self.mistake, ranks, index = mistake, lab.axis_size("tp"), lab.axis_index("tp")
        self.up, self.down = Linear(), Linear()
        for layer, name, dim in ((self.up, "up", 0), (self.down, "down", 1)):
            weight = getattr(whole, name).weight.detach()
            layer.weight = nn.Parameter(weight.chunk(ranks, dim)[index].clone())
        self.up.bias = nn.Parameter(whole.up.bias.detach().chunk(ranks)[index].clone())
        self.down.bias = nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x):
        mistake, ranks = self.mistake, lab.axis_size("tp")
        h = self.up(lab.copy_to(x, "tp"), self.up.bias)
        if mistake == "relu":
            h = F.relu(h)
        elif mistake == "silu":
            h = F.silu(h)
        else:
            h = F.gelu(h, approximate="tanh" if mistake == "tanh" else "none")
        bias = self.down.bias
        if mistake == "bias before the sum":
            return lab.reduce_from(self.down(h, bias), "tp")
        if mistake == "a share of the bias":
            return lab.reduce_from(self.down(h, lab.copy_to(bias, "tp") / ranks), "tp")
        y = self.down(h)
        if mistake == "divided":
            y = lab.reduce_from(y, "tp") / ranks
        elif mistake == "mean":
            y = lab.all_reduce(y, "tp", "mean")
        elif mistake == "doubled":
            y = lab.reduce_from(lab.reduce_from(y, "tp"), "tp")
        elif mistake == "largest":
            y = lab.all_reduce(y, "tp", "max")
        elif mistake != "missing":
            y = lab.reduce_from(y, "tp")
        if mistake == "no bias":
            return y
        if mistake == "bias twice":
            return y + bias + bias
        return y + bias


APART = r"apart from mlp\.down\.bias, it is"
UNKNOWN = "what goes in is right; cause not known; tried: leaving out an all_reduce"
REPORTS = {  # the module in which it happens, and what is said of it
    "missing": ("mlp.down", "own part, without its bias.* all outputs are right with an all_reduce over 'tp' here$"),
    "doubled": (
        "mlp",
        rf"{APART} 3 times the reference .* all outputs are right without all_reduce\(x, 'tp'\) in test_f",
    ),
    "mean": ("mlp", rf"{APART} 1/3 of the reference .* all outputs are right with a sum in place of all_reduce"),
    "divided": ("mlp", rf"{APART} 1/3 of the reference .* not divided by the number of ranks"),
    "bias before the sum": ("mlp", r"bias is added 3 times; all outputs are right with mlp\.down\.bias on one rank"),
    "bias twice": ("mlp", f"bias is added 2 times; {UNKNOWN}"),
    "no bias": ("mlp", f"bias is not added; {UNKNOWN}"),
    "tanh": ("mlp.down", "its input is: off by .* what is between mlp.up and mlp.down; cause not known"),
    "relu": ("mlp.down", "its input is: off by .* what is between mlp.up and mlp.down; cause not known"),
    "silu": ("mlp.down", "its input is: off by .* what is between mlp.up and mlp.down; cause not known"),
    "largest": ("mlp", "off by .* all outputs are right with a sum in place of all_reduce"),
}


def report_of(mistake: str, num_ranks: int = 3) -> Any:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, WIDTH)

    def sharded(whole: Any) -> nn.Module:
        model = copy.deepcopy(whole)
        model.mlp = Bare(whole.mlp, mistake)
        return model

    return check_parallel(sharded, net, inputs=(x,), mesh=Mesh(tp=num_ranks))


@pytest.mark.parametrize("mistake", REPORTS)
def test_what_happens_in_a_plain_function_is_blamed_on_it(mistake: str):
    report = report_of(mistake)
    first = next(row for row in report.rows if not row.ok)
    where, words = REPORTS[mistake]
    assert (first.kind, first.name) == ("activation", where)
    assert re.search(words, first.words), first.words
    assert all(row.ok or row.follows or row is first for row in report.rows)
    assert not re.search(r"\b1 times|only its own part, and together", str(report))
    if mistake not in ("bias before the sum", "bias twice"):
        assert "is added" not in first.words.replace("is not added", "")


@pytest.mark.parametrize("mistake", ["", "a share of the bias"])
def test_what_is_right_is_blamed_for_nothing(mistake: str):
    for num_ranks in (2, 3, 4):
        assert report_of(mistake, num_ranks).ok


class Residual(nn.Module):
    """A block with a residual inside, and a bias or none: x + down(relu(up(x)))."""

    def __init__(self, has_bias: bool):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=has_bias)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class BareResidual(nn.Module):
    """This rank's part of the block. Its lines with an all_reduce are marked by what is wrong in them."""

    def __init__(self, whole, mistake):
        super().__init__()
        ranks, index = lab.axis_size("tp"), lab.axis_index("tp")
        self.mistake, self.up, self.down = mistake, Linear(), Linear()
        for layer, name, dim in ((self.up, "up", 0), (self.down, "down", 1)):
            weight = getattr(whole, name).weight.detach()
            layer.weight = nn.Parameter(weight.chunk(ranks, dim)[index].clone())
            layer.bias = None
        self.down.bias = None if whole.down.bias is None else nn.Parameter(whole.down.bias.detach().clone())

    def forward(self, x):
        mistake, ranks = self.mistake, lab.axis_size("tp")
        bias = 0 if self.down.bias is None else self.down.bias
        y = self.down(F.relu(self.up(lab.copy_to(x, "tp"))))
        if mistake == "residual before the sum":
            return lab.all_reduce(x + y, "tp") + bias
        if mistake == "missing":
            return x + y + bias
        if mistake == "mean":
            return x + lab.all_reduce(y, "tp", "mean") + bias  # mean
        if mistake == "largest":
            return x + lab.all_reduce(y, "tp", "max") + bias  # largest
        if mistake == "started":
            return x + lab.start(lab.all_reduce, y, "tp", "mean").wait() + bias  # started
        y = lab.all_reduce(y, "tp")  # divided
        if mistake == "doubled":
            y = lab.all_reduce(y, "tp")  # doubled
        elif mistake == "divided":
            y = y / ranks
        elif mistake == "another factor":
            y = 3 * y
        return y + bias if mistake == "no residual" else x + y + bias


def line_marked(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"test_first_wrong.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'  # {mark}'))}"


REST = "apart from its input(?: and down.bias)?, it is "
WITHOUT = "all outputs are right without all_reduce"
RESIDUALS = {
    "doubled": (REST + "3 times the reference", WITHOUT),
    "mean": (REST + "1/3 of the reference", "with a sum in place of"),
    "started": (REST + "1/3 of the reference", "with a sum in place of"),
    "divided": (REST + "1/3 of the reference", "returns is not divided by the number of ranks"),
    "largest": ("off by", "with a sum in place of"),
    "another factor": (REST + "3 times the reference", ""),
    "missing": ("own part.* over 'tp' the parts add up to the reference; all outputs are right with an all_reduce", ""),
    "residual before the sum": ("its input is added 3 times; what goes in is right; cause not known", ""),
    "no residual": ("its input is not added", ""),
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("mistake", RESIDUALS)
def test_a_residual_hides_no_cause_and_the_line_at_fault_is_named(mistake: str, has_bias: bool):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Residual(has_bias), nn.Linear(WIDTH, 5))

    def sharded(whole: Any) -> nn.Module:
        model = copy.deepcopy(whole)
        model[1] = BareResidual(whole[1], mistake)
        return model

    report = check_parallel(sharded, net, inputs=(torch.randn(4, WIDTH),), mesh=Mesh(tp=3))
    first = next(row for row in report.rows if not row.ok)
    words, way_out = RESIDUALS[mistake]
    assert (first.kind, first.name) == ("activation", "1.down" if mistake == "missing" else "1")
    assert re.search(words, first.words.replace("1.down", "down")), first.words
    if way_out:
        assert way_out in first.words and line_marked(mistake) in first.words, first.words
    else:
        assert ".py" not in first.words
    assert "neither" not in str(report)


class Between(nn.Module):
    """A function between two modules, where the reference calls `down`. `mistake` is what is wrong in the function."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)
        self.mistake = ""

    def forward(self, x):
        if not self.mistake:
            return self.norm(x + self.down(F.gelu(self.up(x))))
        h = F.gelu(self.up(x), approximate="tanh" if self.mistake == "tanh" else "none")
        piece = (layer.chunk(lab.axis_size("tp"), -1)[lab.axis_index("tp")] for layer in (h, self.down.weight))
        y, bias = F.linear(*piece), self.down.bias
        if self.mistake == "bias before the sum":
            return self.norm(x + lab.all_reduce(y + bias, "tp"))
        y = y if self.mistake == "missing" else lab.all_reduce(y, "tp", "mean" if self.mistake == "mean" else "sum")
        return self.norm(x + (lab.all_reduce(y, "tp") if self.mistake == "doubled" else y) + bias)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            "missing",
            "each rank adds the input of up and down.bias to its own part: apart from that, over 'tp' the parts",
        ),
        ("doubled", "apart from the input of up and down.bias, it is 3 times the reference"),
        ("doubled", WITHOUT),
        ("missing", "all outputs are right with an all_reduce over 'tp' here, before the input of up and down.bias"),
        ("mean", "apart from the input of up and down.bias, it is 1/3 of the reference"),
        ("mean", "all outputs are right with a sum in place of all_reduce(x, 'tp', 'mean') in test_first_wrong.py"),
        ("bias before the sum", "down.bias is added 3 times"),
        (
            "bias before the sum",
            "all outputs are right with down.bias on one rank of 'tp' alone, so every rank adds it",
        ),
        ("tanh", "cause not known"),
    ],
)
def test_a_module_that_gets_something_wrong_is_not_to_blame(mistake: str, words: str):
    torch.manual_seed(0)

    def sharded(whole: Any) -> nn.Module:
        model = copy.deepcopy(whole)
        model.mistake = mistake
        return model

    report = check_parallel(sharded, Between(), inputs=(torch.randn(4, WIDTH),), mesh=Mesh(tp=3))
    first = next(row for row in report.rows if not row.ok)
    assert (first.kind, first.name) == ("activation", "norm")
    assert first.words.startswith("the first that is wrong, since its input is: ")
    assert words in first.words and "look at what is between up and norm" in first.words, first.words


def test_the_line_is_named_where_no_module_is_inside():
    torch.manual_seed(0)
    whole = Residual(False)
    report = check_parallel(
        lambda whole: BareResidual(whole, "doubled"), whole, inputs=(torch.randn(4, WIDTH),), mesh=Mesh(tp=2)
    )
    first = next(row for row in report.rows if not row.ok)
    assert first.name == "output" and line_marked("doubled") in first.words
    assert "apart from input 0, it is 2 times the reference" in first.words


FUNCTIONS = {
    "": None,
    "a share of the bias": None,
    "doubled": "apart from down_bias, it is 3 times the reference",
    "another factor": "apart from down_bias, it is 3 times the reference",
    "mean": "apart from down_bias, it is 1/3 of the reference",
    "missing": "it is right with an all_reduce over 'tp' here, before down_bias is added",
    "bias before the sum": "down_bias is added 3 times",
    "tanh": "the same on every rank; cause not known",
}


@pytest.mark.parametrize("mistake", FUNCTIONS)
def test_functions_in_jax(mistake: str):
    import jax

    import tplab.jax as on_jax

    draw = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "up_bias": (HIDDEN,), "down": (HIDDEN, WIDTH), "down_bias": (WIDTH,)}
    params = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def whole(p, x):
        return jax.nn.gelu(x @ p["up"] + p["up_bias"], approximate=False) @ p["down"] + p["down_bias"]

    def model(p, x):
        y = jax.nn.gelu(x @ p["up"] + p["up_bias"], approximate=mistake == "tanh") @ p["down"]
        if mistake == "bias before the sum":
            return on_jax.all_reduce(y + p["down_bias"], "tp")
        if mistake == "a share of the bias":
            return on_jax.all_reduce(y + p["down_bias"] / 3, "tp")
        if mistake != "missing":
            y = on_jax.all_reduce(y, "tp", "mean" if mistake == "mean" else "sum")  # in JAX
        if mistake == "doubled":
            y = on_jax.all_reduce(y, "tp")  # twice
        return (3 * y if mistake == "another factor" else y) + p["down_bias"]

    specs = {"up": P(None, "tp"), "up_bias": P("tp"), "down": P("tp"), "down_bias": P()}
    x = draw.normal(size=(4, WIDTH)).astype(np.float32)
    report = on_jax.check_parallel(model, whole, params=params, inputs=(x,), mesh=Mesh(tp=3), specs=specs)
    words = FUNCTIONS[mistake]
    assert report.ok == (words is None)
    if words is not None:
        first = next(row for row in report.rows if not row.ok)
        assert first.kind == "output" and words in first.words
        line = {"doubled": line_marked("twice"), "mean": line_marked("in JAX")}.get(mistake)
        assert line in first.words if line else ".py" not in first.words
