"""Lab 09's exercises: the layer mended and the plan written pass; known mistakes are named; nothing raises."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn

from tplab.exercises.hugging_face_gpt2 import check_llama_plan, check_row
from tplab.torch import all_reduce, axis_index, axis_size

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

    def __init__(self, given: nn.Module, axis: str):
        super().__init__()
        self.axis = axis
        mine = given.weight.detach().chunk(axis_size(axis))[axis_index(axis)]  # type: ignore[operator, union-attr]
        self.weight, self.bias = nn.Parameter(mine.clone()), nn.Parameter(given.bias.detach().clone())  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight, self.axis) + self.bias


class BiasInside(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x @ self.weight + self.bias, self.axis)


class NoSum(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Raises(Row):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_the_layer():
    assert check_row(Row).passed
    verdict = check_row(BiasInside)
    assert verdict.passed is False
    assert "output of transformer.h.0.mlp.c_proj" in verdict.text and "bias is added 2 times" in verdict.text
    assert "output of transformer.h.0.mlp.c_proj" in check_row(NoSum).text
    assert "RuntimeError" in check_row(Raises).text


def test_the_plan():
    verdict = check_llama_plan(lambda: dict(PLAN))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model.layers.*.self_attn.k_proj": "replicate"}, "k_proj"),
        ({"model.layers.*.mlp.down_proj": "replicate"}, "plan it as 'row'"),
        ({"model.layers.*.mlp.gate": "column"}, "matches no module"),
        ({"model.embed_tokens": "replicate", "lm_head": "replicate"}, "what is left whole?"),
        (None, "a plan is a dict"),
    ],
)
def test_wrong_plans(change: dict | None, said: str):
    verdict = check_llama_plan(lambda: change if change is None else {**PLAN, **change})
    assert verdict.passed is False and said in verdict.text, verdict


def untouched():
    ...


def test_not_started():
    assert check_llama_plan(untouched).passed is None
