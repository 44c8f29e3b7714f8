"""Configurations: each is read whole, with as many parameters as the real model has, or refused with the field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tplab.errors import PlanError
from tplab.forecast import Model, Plan
from tplab.forecast.config import KINDS, SIZES


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**sizes, "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab, **more}


def without(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {other: value for other, value in config.items() if other != name}


def falcon(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 65024}
    return {"model_type": "falcon", **sizes, "multi_query": True, "parallel_attn": True, "bias": False, **more}


MPT = {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "vocab_size": 50432}
MPT |= {"max_seq_len": 2048, "no_bias": True, "norm_type": "low_precision_layernorm", "learned_pos_emb": True}
MPT |= {"attn_config": {"alibi": True, "attn_impl": "torch", "attn_type": "multihead_attention", "qk_ln": False}}
OPT = {"model_type": "opt", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_dim": 16384}
OPT |= {"vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 4096, "dropout": 0.1}
MOE = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1}
NEOX = llama(44, 6144, 64, 64, 24576, 50432, model_type="gpt_neox", hidden_act="gelu_fast", rotary_pct=0.25)

DEEPSEEK_V3 = llama(61, 7168, 128, 128, 18432, 129280, model_type="deepseek_v3", kv_lora_rank=512, q_lora_rank=1536)
DEEPSEEK_V3 |= {"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
DEEPSEEK_V3 |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048}
DEEPSEEK_V3 |= {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1}
DEEPSEEK_V3 |= {"moe_layer_freq": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "attention_bias": False}
DEEPSEEK_V3 |= {"num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}

# The numbers of parameters that the index files of the weights have at huggingface.co, under the names that are given;
# gpt-neox-20b's is also in Black et al. 2022 (arXiv:2204.06745), bloom's in Le Scao et al. 2022 (2211.05100). The
# configurations are the config.json there, without what changes no size.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "meta-llama/Meta-Llama-3-8B": (8_030_261_248, llama(32, 4096, 32, 8, 14336, 128256, model_type="llama")),
    "mistralai/Mistral-7B-v0.1": (
        7_241_732_096,
        llama(32, 4096, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096),
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        46_702_792_704,
        llama(32, 4096, 32, 8, 14336, 32000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2),
    ),
    "Qwen/Qwen2.5-7B": (
        7_615_616_512,
        llama(28, 3584, 28, 4, 18944, 152064, model_type="qwen2", use_sliding_window=False, sliding_window=131072),
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        llama(24, 2048, 16, 16, 5632, 151936, model_type="qwen2_moe", shared_expert_intermediate_size=5632, **MOE),
    ),
    "EleutherAI/gpt-neox-20b": (20_554_567_680, NEOX),
    "EleutherAI/pythia-6.9b": (6_857_302_016, llama(32, 4096, 32, 32, 16384, 50432, model_type="gpt_neox")),
    "bigcode/starcoder2-15b": (
        15_957_889_024,
        llama(40, 6144, 48, 4, 24576, 49152, model_type="starcoder2", use_bias=True, tie_word_embeddings=False),
    ),
    "bigcode/starcoder2-3b": (
        3_030_371_328,
        llama(30, 3072, 24, 2, 12288, 49152, model_type="starcoder2", use_bias=True, norm_type="layer_norm"),
    ),
    "bigcode/starcoder": (
        15_517_456_384,
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "n_inner": 24576}
        | {"n_positions": 8192, "vocab_size": 49152, "multi_query": True},
    ),
    "EleutherAI/gpt-j-6b": (
        6_050_882_784,
        {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "n_inner": None, "n_positions": 2048}
        | {"vocab_size": 50400, "rotary": True, "rotary_dim": 64, "tie_word_embeddings": False},
    ),
    "microsoft/phi-2": (2_779_683_840, llama(32, 2560, 32, 32, 10240, 51200, model_type="phi")),
    "microsoft/Phi-3-mini-4k-instruct": (
        3_821_079_552,
        llama(32, 3072, 32, 32, 8192, 32064, model_type="phi3", sliding_window=2047),
    ),
    "tiiuae/falcon-7b": (6_921_720_704, falcon(32, 4544, 71, new_decoder_architecture=False)),
    "tiiuae/falcon-40b": (41_303_293_952, falcon(60, 8192, 128, num_kv_heads=8, new_decoder_architecture=True)),
    "mosaicml/mpt-7b": (6_649_286_656, MPT),
    "facebook/opt-6.7b": (6_658_473_984, OPT),
    "bigscience/bloom": (
        176_247_271_424,
        {"model_type": "bloom", "n_layer": 70, "hidden_size": 14336, "n_head": 112, "vocab_size": 250880},
    ),
    "bigscience/bloom-7b1": (
        7_069_016_064,
        {"model_type": "bloom", "n_layer": 30, "n_embed": 4096, "num_attention_heads": 32, "vocab_size": 250880}
        | {"offset_alibi": 100, "seq_length": 2048, "skip_bias_add": True},
    ),
    "google/gemma-7b": (8_537_680_896, llama(28, 3072, 16, 16, 24576, 256000, model_type="gemma", head_dim=256)),
    "google/gemma-2-9b": (
        9_241_705_984,
        llama(42, 3584, 16, 8, 14336, 256000, model_type="gemma2", head_dim=256, sliding_window=4096),
    ),
    "google/gemma-3-1b-pt": (
        999_885_952,
        llama(26, 1152, 4, 1, 6912, 262144, model_type="gemma3_text", head_dim=256, sliding_window=512),
    ),
    "CohereForAI/c4ai-command-r-v01": (
        34_980_831_232,
        llama(40, 8192, 64, 64, 22528, 256000, model_type="cohere", logit_scale=0.0625, use_qk_norm=False),
    ),
    "stabilityai/stablelm-2-1_6b": (
        1_644_515_328,
        llama(24, 2048, 32, 32, 5632, 100352, model_type="stablelm", use_qkv_bias=True),
    ),
    "ibm-granite/granite-3.0-8b-base": (
        8_170_848_256,
        llama(40, 4096, 32, 8, 12800, 49155, model_type="granite", tie_word_embeddings=True, residual_multiplier=0.22),
    ),
    "THUDM/glm-4-9b-hf": (
        9_399_951_360,
        llama(40, 4096, 32, 2, 13696, 151552, model_type="glm", head_dim=128, attention_bias=True),
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        3_075_098_624,
        llama(36, 2048, 16, 4, 11008, 128256, model_type="smollm3", no_rope_layers=[1, 1, 1, 0] * 9),
    ),
    "deepseek-ai/DeepSeek-V3": (671_026_404_352, DEEPSEEK_V3),  # the main model's, as transformers makes it: see below
    "openai-community/gpt2": (
        124_439_808,
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_the_published_parameters(name: str):
    number, config = PUBLISHED[name]
    assert Model.of_config(config, name).parameters == number


# ------------------------------------------------------------------------------------------- transformers' own models

TINY: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "word_embed_proj_dim": 48, "n_positions": 24}
TINY |= dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 80)
TINY |= {"max_position_embeddings": 24, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
TINY |= {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 40, "no_rope_layers": [1, 1], "rotary_dim": 4}
TINY |= {"layer_types": ["full_attention"] * 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY |= {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
TINY |= {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 3, "n_group": 2, "topk_group": 1}
OTHERS = [
    *((kind, {"q_lora_rank": None}) for kind in ("deepseek_v2", "deepseek_v3")),
    *(("deepseek_v3", {"first_k_dense_replace": first}) for first in (0, 2, 3)),
    ("deepseek_v3", {"attention_bias": True}),
    ("deepseek_v2", {"attention_bias": True, "q_lora_rank": None}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("nemotron", {"attention_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}),
    ("gpt_neox", {"attention_bias": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {"enable_bias": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"parallel_attn": False, "bias": True, "alibi": True}),
    ("falcon", {"multi_query": False}),
]


@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in KINDS), *OTHERS], ids=str)
def test_a_model_of_transformers_has_as_many_parameters(kind: str, more: dict[str, Any]):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    its = CONFIG_MAPPING[kind]().to_dict()
    wanted = {"layers": 2, "hidden": 48, "heads": 6, "vocab": 90}
    sizes: dict[str, Any] = {next(name for name in SIZES[of] if name in its): size for of, size in wanted.items()}
    sizes |= {name: number for name, number in TINY.items() if name in its} | more
    if kind in ("falcon", "gpt_bigcode"):  # both have one, unless they say otherwise by another field
        sizes.pop("num_key_value_heads", None)
    config = CONFIG_MAPPING[kind](**sizes)
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    model = Model.of_config(config)
    assert model.parameters == sum(parameter.numel() for parameter in real.parameters())
    assert Model.of_config(config.to_dict()) == model


# ---------------------------------------------------------------------------------------------------------- refusals

LLAMA = PUBLISHED["meta-llama/Meta-Llama-3-8B"][1]
DEEPSEEK_V3_2 = {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048}
GLM_4_5 = llama(92, 5120, 96, 8, 12288, 151552, model_type="glm4_moe", n_routed_experts=160, first_k_dense_replace=3)
NEMOTRON_H = llama(52, 4096, 32, 8, 21504, 131072, model_type="nemotron_h", hybrid_override_pattern="M-M-M-MM-M*-")
QWEN3_NEXT = llama(48, 2048, 16, 2, 5120, 151936, model_type="qwen3_next", linear_num_key_heads=16, num_experts=512)
REFUSED: dict[str, dict[str, Any]] = {
    "model_type 'deepseek_v32' is not read, and with it kv_lora_rank, q_lora_rank, first_k_dense": DEEPSEEK_V3_2,
    "moe_layer_freq=2 of a 'deepseek_v3' is not read, but only 1": {**DEEPSEEK_V3, "moe_layer_freq": 2},
    "mlp_bias=True of a 'deepseek_v3' is not read": {**DEEPSEEK_V3, "mlp_bias": True},
    "quantization_config={'quant_method': 'awq'} of a 'deepseek_v3' is not read, but only fp8": {
        **DEEPSEEK_V3,
        "quantization_config": {"quant_method": "awq"},
    },
    "the configuration of a 'deepseek_v3' has no 'kv_lora_rank'": without("kv_lora_rank", DEEPSEEK_V3),
    "model_type 'glm4_moe' is not read, and with it n_routed_experts, first_k_dense_replace. Those": GLM_4_5,
    "model_type 'nemotron_h' is not read, and with it hybrid_override_pattern. Those that are: llama,": NEMOTRON_H,
    "model_type 'qwen3_next' is not read, and with it linear_num_key_heads, num_experts. Those": QWEN3_NEXT,
    "give its text_config, if": {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
    "the configuration has no 'model_type'": without("model_type", LLAMA),
    "the configuration of a 'gpt2' has none of num_hidden_layers, n_layer, n_layers; give": {"model_type": "gpt2"},
    "has both n_layer=3 and n_layers=4; leave one out": {"model_type": "gpt2", "n_layer": 3, "n_layers": 4},
    "kv_lora_rank=512 of a 'llama' is not read, and may change the model": {**LLAMA, "kv_lora_rank": 512},
    "num_local_experts=8 of a 'llama' is not read": {**LLAMA, "num_local_experts": 8},
    "num_nextn_predict_layers=1 of a 'llama' is not read": {**LLAMA, "num_nextn_predict_layers": 1},
    "quantization_config={'quant_method': 'fp8'} of a 'llama'": {
        **LLAMA,
        "quantization_config": {"quant_method": "fp8"},
    },
    "layer_types=['full_attention', 'linear_attention'] of a 'llama' has layers that are not attention": {
        **LLAMA,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "use_qk_norm=True of a 'cohere' is not read": {
        **PUBLISHED["CohereForAI/c4ai-command-r-v01"][1],
        "use_qk_norm": True,
    },
    "qk_layernorm=True of a 'phi' is not read": {**PUBLISHED["microsoft/phi-2"][1], "qk_layernorm": True},
    "mlp_only_layers=[0] of a 'qwen2_moe'": {**PUBLISHED["Qwen/Qwen1.5-MoE-A2.7B"][1], "mlp_only_layers": [0]},
    "decoder_sparse_step=2 of a 'qwen2_moe' is not read, but only 1": {
        **PUBLISHED["Qwen/Qwen1.5-MoE-A2.7B"][1],
        "decoder_sparse_step": 2,
    },
    "do_layer_norm_before=False of a 'opt' is not read, but only True": {**OPT, "do_layer_norm_before": False},
    "word_embed_proj_dim=512 of a 'opt' differs from hidden_size=4096": {**OPT, "word_embed_proj_dim": 512},
    "no_bias=False of a 'mpt' is not read, but only True": {**MPT, "no_bias": False},
    "attn_config.qk_ln=True of a 'mpt' is not read": {**MPT, "attn_config": {"qk_ln": True}},
    "attn_config.attn_type is 'linear_attention'": {**MPT, "attn_config": {"attn_type": "linear_attention"}},
    "attn_config.attn_type is ['linear_attention']": {**MPT, "attn_config": {"attn_type": ["linear_attention"]}},
    "the configuration of a 'llama' has none of intermediate_size, n_inner": without("intermediate_size", LLAMA),
    "the configuration of a 'qwen2' has no 'num_key_value_heads'": without(
        "num_key_value_heads", PUBLISHED["Qwen/Qwen2.5-7B"][1]
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_read_is_refused_by_name_with_the_way_out(why: str):
    with pytest.raises(ValueError) as error:
        Model.of_config(REFUSED[why])
    assert why in str(error.value)
    assert re.search(r"give the sizes by hand: Model\(layers=|leave one out|it must be one of", str(error.value))


def test_heads_that_are_not_said_are_those_of_the_library():
    """Where transformers does not take hidden_size / num_attention_heads."""
    config = PUBLISHED["google/gemma-7b"][1]
    assert Model.of_config(without("head_dim", config)) == Model.of_config(config)
    grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": 8}
    assert Model.of_config({**MPT, "attn_config": grouped}).kv_heads == 8
    assert Model.of_config(without("num_key_value_heads", LLAMA)).num_kv_heads == 32


def test_what_changes_nothing_is_not_refused():
    more = {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"factor": 8.0}, "torch_dtype": "bfloat16"}
    more |= {"bos_token_id": 1, "pretraining_tp": 1, "quantization_config": None, "num_nextn_predict_layers": 0}
    assert Model.of_config(LLAMA | more) == Model.of_config(LLAMA)


# ------------------------------------------------------------------------------------------------------------ windows


@pytest.mark.parametrize(
    ("name", "more", "window"),
    [
        ("mistralai/Mistral-7B-v0.1", {}, 4096),
        ("mistralai/Mistral-7B-v0.1", {"sliding_window": None}, 0),
        ("Qwen/Qwen2.5-7B", {}, 0),
        ("Qwen/Qwen2.5-7B", {"use_sliding_window": True}, 131072),
        ("google/gemma-2-9b", {"layer_types": ["sliding_attention", "full_attention"] * 21}, 4096),
        ("google/gemma-2-9b", {"layer_types": ["full_attention"] * 42}, 0),
    ],
)
def test_a_window_is_harmless_for_sequences_that_it_holds(name: str, more: dict[str, Any], window: int):
    model = Model.of_config(PUBLISHED[name][1] | more, name)
    assert model.window == window
    assert Plan().refusal(model, 1, 4096) is None
    why = Plan().refusal(model, 1, 2 * 131072)
    assert why == (
        f"a token of {name} attends to {window} tokens in some layers, and sequence is 262144" if window else None
    )
    if window:
        with pytest.raises(PlanError, match="attends to"):
            Plan().check(model, 1, window + 1)


def test_dropout_is_read():
    assert Model.of_config(OPT).dropout
    assert not Model.of_config({**OPT, "dropout": 0.0, "attention_dropout": 0.1}).dropout


# --------------------------------------------------------------------------------------------------------------- files


def test_a_configuration_by_its_path(tmp_path: Path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    model = Model.of_config(LLAMA, "tiny")
    assert Model.of_config(folder) == Model.of_config(folder / "config.json") == model
    assert Model.of_config(str(folder)) == model
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3_2))
    with pytest.raises(ValueError, match=r"config.json: model_type 'deepseek_v32' is not read"):
        Model.of_config(folder)
    with pytest.raises(FileNotFoundError):
        Model.of_config(tmp_path / "none.json")


def test_deepseek_v3_is_the_known_one():
    """Its 671B parameters, of which 37B meet a token (arXiv:2412.19437)."""
    model = Model.of_config(DEEPSEEK_V3, "deepseek-v3")
    assert model == Model.find("deepseek-ai/DeepSeek-V3") and 37.5e9 < model.active_parameters < 37.6e9
