"""Lab 09's exercises: the layer mended and the plan written pass; known mistakes are named; nothing raises."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn

import tplab.torch
from tplab.exercises.hugging_face_gpt2 import check_llama_plan, check_row, small_llama
from tplab.torch import all_reduce, axis_index, axis_size, copy_to, gather_from, reduce_from

pytest.importorskip("transformers", reason="the extra `huggingface` is not installed")

PLAN = {
    "model.embed_tokens": "vocab",
    "model.layers.*.input_layernorm": "replicate",
    "model.layers.*.self_attn.q_proj": "column",
    "model.layers.*.self_attn.k_proj": "column",
    "model.layers.*.self_attn.v_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.post_attention_layernorm": "replicate",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.norm": "replicate",
    "lm_head": "vocab",
}


class Row(nn.Module):
    """The lab's layer, mended."""

    def __init__(self, given: nn.Module):
        super().__init__()
        mine = given.weight.detach().chunk(axis_size("tp"))[axis_index("tp")]  # type: ignore[operator, union-attr]
        self.weight, self.bias = nn.Parameter(mine.clone()), nn.Parameter(given.bias.detach().clone())  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight, "tp") + self.bias


class BiasInside(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight + self.bias, "tp")


class NoSum(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class NoBias(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight, "tp")


class OthersRows(Row):
    def __init__(self, given: nn.Module):
        super().__init__(given)
        pieces = given.weight.detach().chunk(axis_size("tp"))  # type: ignore[operator, union-attr]
        self.weight = nn.Parameter(pieces[axis_index("tp") - 1].clone())


class NoGradient(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce((x @ self.weight).detach(), "tp") + self.bias


class GradientTwice(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight, "tp") + copy_to(self.bias, "tp")


class AddsGradientsOfX(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_from(copy_to(x, "tp") @ self.weight, "tp") + self.bias


class Whole(Row):
    """Right numbers, from all rows on every rank."""

    def __init__(self, given: nn.Module):
        super().__init__(given)
        self.weight = nn.Parameter(given.weight.detach().clone())  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from(x, "tp") @ self.weight + self.bias


class GathersEachTime(Row):
    """Right numbers, from all rows, which every rank gathers in each forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from(x, "tp") @ gather_from(self.weight, "tp", dim=0) + self.bias


class Changes(Row):
    def __init__(self, given: nn.Module):
        super().__init__(given)
        given.weight.data.zero_()  # type: ignore[operator, union-attr]


class DividedBias(Row):
    """Every rank has a part of the bias, so the sum is right, and its step is R times too large."""

    def __init__(self, given: nn.Module):
        super().__init__(given)
        self.bias = nn.Parameter(given.bias.detach() / axis_size("tp"))  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight + self.bias, "tp")


class AsLinear(Row):
    """The weight lies as nn.Linear has it."""

    def __init__(self, given: nn.Module):
        super().__init__(given)
        self.weight = nn.Parameter(self.weight.detach().T.contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight.T, "tp") + self.bias


class AnotherStyle(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = reduce_from(torch.einsum("bsi,io->bso", x, self.weight), "tp")
        y += self.bias
        return y


class OtherNames(Row):
    def __init__(self, given: nn.Module):
        super().__init__(given)
        self.w, self.bias = self.weight, None
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.w, "tp")


class NoParameters(nn.Module):
    """Right numbers, and nothing that an optimizer would find."""

    def __init__(self, given: Any):
        super().__init__()
        self.weight = given.weight.detach().chunk(axis_size("tp"))[axis_index("tp")].clone()
        self.bias = given.bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight, "tp") + self.bias


class BiasDetached(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight, "tp") + self.bias.detach()


class BiasOnOneRank(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return all_reduce(y if axis_index("tp") else y + self.bias, "tp")


class NoReturn(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[return]
        all_reduce(x @ self.weight, "tp")


class ShareOfTheBias(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_from(x @ self.weight + self.bias / axis_size("tp"), "tp")


class Raises(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_the_layer():
    verdict = check_row(Row)
    assert verdict.passed and verdict.text.startswith("Row is right"), verdict
    assert check_row(AnotherStyle).passed


@pytest.mark.parametrize(
    "layer, parts",
    [
        (BiasInside, ("output of transformer.h.0.mlp.c_proj", "bias is added 2 times")),
        (NoSum, ("output of transformer.h.0.mlp.c_proj", "over 'tp' the parts add up to the reference")),
        (
            NoBias,
            (
                "output of transformer.h.0.mlp.c_proj",
                "its bias is not added; what goes in is right. Add it once, after",
            ),
        ),
        (OthersRows, ("value of transformer.h.0.mlp.c_proj.weight", "rank 0 has that of rank 1")),
        (NoGradient, ("gradient of transformer.h.1.mlp.c_proj.weight", "no gradient on every rank")),
        (GradientTwice, ("c_proj.bias: 2 times the reference on every rank", "Is there a copy_to on the bias?")),
        (AddsGradientsOfX, ("gradient of transformer.h.1.mlp.c_fc.bias: off by", "Is there a copy_to on x?")),
        (Whole, ("the numbers are right", "4,128 parameters of this layer, where 2,080 would do")),
        (GathersEachTime, ("the numbers are right", "each of 4 ranks does 100% of the whole layer's work")),
        (Changes, ("it changes given.weight in place",)),
        (
            ShareOfTheBias,
            ("1/2 of the reference on every rank (there are 2 ranks of 'tp'). Does each rank add a share",),
        ),
        (DividedBias, ("value of transformer.h.0.mlp.c_proj.bias", "1/2 of the reference on every rank")),
        (AsLinear, ("its weight has shape [32, 64]", "of nn.Linear is the transpose")),
        (OtherNames, ("its parameters are w. ", "make self.weight and self.bias")),
        (NoParameters, ("its parameters are none. ", "each an nn.Parameter")),
        (BiasDetached, ("no gradient on every rank", "or autograd does not see that it does")),
        (BiasOnOneRank, ("gradient of transformer.h.1.mlp.c_proj.bias: no gradient on rank 1: the loss",)),
        (NoReturn, ("its forward returned None; is a `return` missing?",)),
        (Raises, ("RuntimeError", "return x @ self.weight.T")),
        (lambda given: given.missing, ("AttributeError", "given.missing")),
    ],
)
def test_a_wrong_layer_is_told_where_it_begins_and_why(layer: Callable[..., Any], parts: tuple[str, ...]):
    verdict = check_row(layer)
    assert verdict.passed is False and layer.__name__ in verdict.text, verdict
    for part in parts:
        assert part in verdict.text, verdict


def test_what_is_no_layer_is_told():
    for given, kind in (("MyRow", "str"), (nn.Linear(2, 2), "Linear")):
        verdict = check_row(given)  # type: ignore[arg-type]
        assert verdict.passed is False and f"this is an object of type {kind}" in verdict.text, verdict


def test_a_notebook_shows_the_report_below_the_text():
    for layer in (Row, BiasInside):
        shown = check_row(layer)._repr_mimebundle_()["text/html"]
        assert "<details><summary>" in shown and "gradient of transformer.wte.weight" in shown


def test_the_plan():
    assert check_llama_plan(dict(PLAN)).passed  # without a function
    verdict = check_llama_plan(lambda: dict(PLAN))
    assert verdict.passed and "each of 4 ranks holds 26% of the parameters" in verdict.text, verdict


def test_a_plan_that_computes_something_else_is_told_where_it_begins(monkeypatch: pytest.MonkeyPatch):
    """`parallelize` refuses the wrong plans that we know. If one slips through, the report says what is wrong."""
    shard = tplab.torch.parallelize

    def biased(model: Any, plan: Any) -> Any:
        sharded: Any = shard(model, plan)
        sharded.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, output: 2 * output)
        return sharded

    monkeypatch.setattr(tplab.torch, "parallelize", biased)
    verdict = check_llama_plan(lambda: dict(PLAN))
    assert verdict.passed is False and "It begins with the output of model.layers.1.mlp.down_proj: " in verdict.text
    assert "2 times the reference" in verdict.text, verdict


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model.layers.*.self_attn.k_proj": "replicate"}, "k_proj"),
        ({"model.layers.*.mlp.down_proj": "replicate"}, "plan it as 'row'"),
        ({"model.layers.*.mlp.gate": "column"}, "matches no module"),
        ({"model.layers.*.mlp.up_proj": "row"}, "read the same input, as gate and up do, plan both as 'column'"),
        ({"model.layers.*.self_attn.o_proj": "column"}, "plan the layer that takes these features as 'row'"),
        ({"lm_head": "column"}, "plan it as 'replicate', or a model's head as 'vocab'"),
        ({"lm_head": "row"}, "plan it as 'replicate', or a model's head as 'vocab'"),
        (
            {"model.embed_tokens": "replicate", "lm_head": "replicate"},
            "Every rank holds all of model.embed_tokens.weight, and 1 more",
        ),
        ({"lm_head": "replicate"}, "Every rank holds all of lm_head.weight."),
        (None, "a plan is a dict"),
    ],
)
def test_wrong_plans(change: dict | None, said: str):
    verdict = check_llama_plan(lambda: change if change is None else {**PLAN, **change})
    assert verdict.passed is False and said in verdict.text, verdict


@pytest.mark.parametrize("given", [None, 7, "column", [("lm_head", "column")]])
def test_what_is_no_plan_is_told(given: Any):
    verdict = check_llama_plan(given)
    assert verdict.passed is False
    assert f"a plan is a dict from module names to what becomes of them, not {given!r}" in verdict.text, verdict


def by_the_library():
    return tplab.torch.llama_plan(small_llama())


def test_the_librarys_plan_is_not_an_answer():
    assert "`llama_plan` does the work" in check_llama_plan(by_the_library).text


def untouched(): ...


def test_not_started():
    assert check_llama_plan(untouched).passed is None
