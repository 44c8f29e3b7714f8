"""Models: their parameters are those that others publish, and those of real models of the same configuration."""

from typing import Any

import pytest

from tplab.errors import ShapeError
from tplab.experts import Routing
from tplab.forecast import MODELS, Model
from tplab.models.gpt import GPTConfig, GPTExperts, gpt_state

# What the model cards and the index files of the weights say.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,  # transformers' model on the meta device: the paper's 671B
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_are_published(name: str):
    assert MODELS[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ["Llama3_70B", "meta-llama/Llama-3.1-70B", "LLAMA3.3-70B-Instruct", "llama3-70b"])
def test_names_are_understood_as_people_write_them(name: str):
    assert Model.find(name) is MODELS["llama3-70b"]


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("bias", [True, False])
def test_tplabs_own_gpt_is_described_exactly(activation: str, norm: str, bias: bool):
    config = GPTConfig(37, 24, 3, 6, 10, num_kv_heads=2, hidden=30, activation=activation, norm=norm, bias=bias)
    assert Model.of_config(config).parameters == sum(x.size for x in gpt_state(config).values())


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_matmuls_are_six_n_flops_and_twelve_lhs(name: str, tp: int):
    """Counted matmul by matmul, without what is no matmul: norms, biases, positions."""
    model, tokens = Model.find(name), 2048
    counted = 0
    for kind, layers in ((model, model.layers - model.dense_layers), (model.dense, model.dense_layers)):
        for part, (m, n, k, batch) in kind.matmuls(tokens, tokens, tp).items():
            is_copied = part == "router" or part.endswith("latent")  # which every tensor-parallel rank computes
            counted += 3 * layers * 2 * m * n * k * batch * (1 if is_copied else tp)
    m, n, k, _ = model.head_matmul(tokens, tp)
    counted += 3 * 2 * tp * m * n * k
    without = model.end_parts["positions"]
    without += 0 if model.tied else model.vocab * model.hidden  # the embedding is read, not multiplied
    expected = tokens * (model.flops_per_token(tokens) - 6 * without)
    assert counted == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("blocks", [None, (1, 2), (2,), ()])
@pytest.mark.parametrize("shared", [0, 14])
def test_a_gpt_with_experts_is_described_exactly(blocks: tuple[int, ...] | None, shared: int):
    experts = GPTExperts(Routing(4, 2), 10, blocks=blocks, shared=shared)
    for activation in ("gelu", "swiglu"):
        config = GPTConfig(37, 24, 3, 6, 10, hidden=30, activation=activation, bias=True, experts=experts)
        assert Model.of_config(config).parameters == sum(x.size for x in gpt_state(config).values())


def test_experts_that_a_model_cannot_have_are_refused():
    for experts, why in (
        (GPTExperts(Routing(4, 2), 10, blocks=(0, 2)), r"blocks \(0, 2\) are not read"),
        (GPTExperts(Routing(4, 2), 10, bias_rate=0.1), "bias_rate=0.1 is not read"),
    ):
        with pytest.raises(ValueError, match=why):
            Model.of_config(GPTConfig(37, 24, 3, 6, 10, experts=experts))


def test_what_ranks_hold_adds_up_to_the_model():
    model = Model.find("qwen3-30b-a3b")
    parts = model.layer_parts.values()
    for tp, ep in ((1, 1), (2, 1), (4, 8)):
        copied = sum(part.copied for part in parts)
        split = sum(part.split for part in parts)
        experts = sum(part.experts for part in parts)
        assert model.layer_on_rank(tp, ep) == copied + split // tp + experts // (ep if ep > 1 else tp)
    assert sum(part.total for part in parts) == model.layer_parameters


def test_impossible_models_are_refused():
    with pytest.raises(ShapeError, match="12 query heads cannot share 5 key and value heads"):
        Model(layers=2, hidden=48, heads=12, kv_heads=5, vocab=10)
    with pytest.raises(ShapeError, match="heads=12 does not divide hidden=50"):
        Model(layers=2, hidden=50, heads=12, vocab=10)
    sizes: dict[str, Any] = {"layers": 3, "hidden": 48, "heads": 12, "vocab": 10}
    experts = {**sizes, "experts": 4, "experts_per_token": 2}
    for given, why in (
        ({**experts, "groups": 3}, "4 experts cannot be 3 equal groups"),
        ({**experts, "dense_layers": 3, "dense_ffn": 9}, "dense_layers=3 of 3 layers"),
        ({**sizes, "dense_layers": 1, "dense_ffn": 9}, "give experts, more layers"),
        ({**experts, "dense_layers": 1}, "and dense_ffn"),
        ({**sizes, "q_rank": 8}, "give kv_rank too"),
        ({**sizes, "kv_rank": 8, "rope_dim": 4}, "rope_dim=4 of head_dim=4 are impossible"),
        ({**sizes, "kv_rank": 8, "kv_heads": 6}, "kv_heads=6 and"),
    ):
        with pytest.raises(ShapeError, match=why):
            Model(**given)
    with pytest.raises(ValueError, match="no model is named 'llama9'; there are llama-7b"):
        Model.find("llama9")
