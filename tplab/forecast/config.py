"""The sizes of a model, from a library's configuration. A field that cannot be read is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tplab.errors import one_of
from tplab.models.gpt import GPTConfig

_LAYER_NORM = {"norm": "layer", "gated": False}
_GPT = {**_LAYER_NORM, "bias": True}

KINDS: Mapping[str, Mapping[str, Any]] = {
    **{kind: {} for kind in ("llama", "mistral", "mixtral", "granite", "phi3")},
    "smollm3": {"tied": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 128},
    "qwen2_moe": {"qkv_bias": True, "shared_gate": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": {"tied": True, "head_dim": 256},
    "gemma2": {"tied": True, "head_dim": 256, "norms": 4},
    "gemma3_text": {"tied": True, "head_dim": 256, "norms": 4, "qk_norm": True},
    "glm": {"qkv_bias": True, "head_dim": 128},
    "glm4": {"qkv_bias": True, "head_dim": 128, "norms": 4},
    "cohere": {"tied": True, "norms": 1},  # its norms subtract means, and have no bias: as many numbers as RMSNorm
    "stablelm": {"norm": "layer"},
    "nemotron": _LAYER_NORM,
    "starcoder2": {**_GPT, "tied": True},
    "gpt_neox": {**_LAYER_NORM, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "phi": {**_GPT, "norms": 1, "head_bias": True},
    **{kind: {**_LAYER_NORM, "mlp_bias": True, "norms": 1, "head_bias": True} for kind in ("gptj", "codegen")},
    **{kind: {**_GPT, "tied": True} for kind in ("gpt2", "gpt_bigcode", "opt")},
    "bloom": {**_GPT, "tied": True, "end_norms": 2},
    "falcon": {**_LAYER_NORM, "tied": True},
    "mpt": {"gated": False, "tied": True},  # as cohere
    **{kind: {} for kind in ("deepseek_v2", "deepseek_v3")},
}
"""The `model_type`s that are read, and the fields of a Model that each implies."""
FOUR_TIMES = ("gpt2", "gpt_bigcode", "gptj", "codegen", "bloom", "falcon", "mpt")
"""The kinds whose MLP has 4 h features by default; the configuration of others must say it."""
SHARE_KEYS = ("mistral", "mixtral", "qwen", "gemma", "glm", "smollm", "starcoder2", "stablelm")
"""Prefixes of the kinds that by default have fewer key and value heads than query heads. Their number must be given."""

SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}
MORE = {
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "kv_channels"),
    "tied": ("tie_word_embeddings",),
}
"""Field of a Model -> its names in configurations. `SIZES` are required."""

BIASES = {
    "attention_bias": ("qkv_bias", "output_bias"),
    "use_qkv_bias": ("qkv_bias",),
    "qkv_bias": ("qkv_bias",),
    "mlp_bias": ("mlp_bias",),
    **dict.fromkeys(("use_bias", "enable_bias", "bias"), ("bias",)),
}
"""Field of a configuration -> the linear layers to which it gives a bias."""

DROPOUT = ("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout")

ONLY: Mapping[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "do_layer_norm_before": (True,),
    "layer_norm_elementwise_affine": (True,),
    "embedding_fraction": (1.0,),
    "mlp_type": ("default",),
    "norm_type": ("layer_norm", "layernorm", "low_precision_layernorm"),
    "no_bias": (True,),
}
"""The only values that are accepted for these fields."""

HARMLESS = re.compile(
    # names, and what a generation or a classifier would need
    r"architectures|auto_map|_name_or_path|model_type|transformers_version|tokenizer_\w+|task_specific_params|prefix"
    r"|finetuning_task|summary_\w+|id2label|label2id|num_labels|problem_type|\w*_token_ids?|use_cache|cache_\w+"
    r"|(max|min)_length|do_sample|early_stopping|num_beams|num_beam_groups|num_return_sequences|temperature|top_[kp]"
    r"|typical_p|\w+_penalty|\w*no_repeat_ngram_size|return_dict\w*|output_\w+|is_decoder|remove_invalid_values"
    # the longest sequence, for rotary or biased positions, which are not learned
    r"|max_position_embeddings|original_max_position_embeddings|n_ctx|n_positions|max_seq_len|seq_length"
    r"|model_max_length|rope_\w+|rotary\w*|partial_rotary_factor|no_rope_\w+|(offset_)?alibi\w*|max_window_layers"
    r"|_?sliding_window_pattern"
    # elementwise operations, or how another program computes the same
    r"|\w*(activation|activation_function|hidden_act)|\w*(eps|epsilon)|\w*(dropout|pdrop)"
    r"|\w*(scale|scaling|multiplier|softcapping)|scale_attn_\w+|query_pre_attn_scalar|clip_qkv"
    r"|\w*(init\w*_range|init_std|init_device|init_config)|(torch_)?dtype|use_bfloat16|pretraining_tp|slow_but_exact"
    r"|\w*softmax_in_fp32|masked_softmax_fusion|bias_dropout_fusion|skip_bias_add\w*|reorder_and_upcast_attn"
    r"|apply_residual_connection_post_layernorm|use_parallel_residual|_?attn_impl\w*|use_flash_attn|verbose"
    r"|pad_key_length|pre_allocate_kv_cache|validate_runner_input|inference_runner|max_(batch_size|sequence_length)"
    r"|gradient_checkpointing|chunk_size_feed_forward|router_\w+|norm_topk_prob|unsloth_\w+"
    r"|routed_scaling_factor|scoring_func|topk_method|aux_loss_alpha|seq_aux|ep_size"
)
"""Names of fields that change neither a model's sizes nor its matmuls."""


def sizes_of(config: Any, name: str = "") -> dict[str, Any]:
    """The fields of a `tplab.forecast.Model`: see `Model.of_config`."""
    if isinstance(config, GPTConfig):
        return _of_gpt(config, name)
    if isinstance(config, str | Path):
        path = Path(config, "config.json") if Path(config).is_dir() else Path(config)
        try:
            return sizes_of(_read(path), name or path.resolve().parent.name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    fields = _Fields(config if isinstance(config, Mapping) else config.to_dict())
    kind = fields.kind
    if not kind:
        raise ValueError(f"the configuration has no 'model_type'; {_WAY_OUT}")
    if kind not in KINDS:
        fields.refuse_kind()
    found = {of: fields.need(*names) for of, names in SIZES.items()}
    if kind not in FOUR_TIMES:
        fields.need(*MORE["ffn"])
    if kind.startswith(SHARE_KEYS) and "num_key_value_heads" not in fields.given:
        fields.need("num_key_value_heads")
    found |= KINDS[kind]
    found |= {of: value for of, names in MORE.items() if (value := fields.first(*names)) is not None}
    _biases(fields, found)
    found["dropout"] = any(fields.first(one) for one in DROPOUT)
    own = {"falcon": _falcon, "mpt": _mpt, "opt": _opt, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek}
    found |= own[kind](fields, found) if kind in own else {}
    if kind == "stablelm" and fields.first("use_parallel_residual"):
        found["norms"] = 1
    if kind in ("gpt2", "gpt_bigcode"):
        found["positions"] = fields.need("n_positions", "max_position_embeddings")
    if kind == "gpt_bigcode" and fields.first("multi_query") is not False:
        found["kv_heads"] = 1
    if kind in ("mixtral", "qwen2_moe", "qwen3_moe"):
        found["experts"] = fields.need("num_experts", "num_local_experts")
        found["experts_per_token"] = fields.need("num_experts_per_tok")
        found["ffn"] = fields.need("moe_intermediate_size") if kind != "mixtral" else found["ffn"]
    if kind == "qwen2_moe":
        found["shared_ffn"] = fields.need("shared_expert_intermediate_size")
    _window(fields, found)
    fields.check()
    return found | {"name": name or fields.first("_name_or_path") or kind}


_WAY_OUT = "give the sizes by hand: Model(layers=..., hidden=..., heads=..., ffn=..., vocab=...), or columns of a table"


class _Fields:
    """A configuration's fields, and which of them were read."""

    def __init__(self, has: Mapping[str, Any], kind: str = "", prefix: str = ""):
        self.given, self._prefix, self._read = has, prefix, set[str]()
        self.kind = kind or str(has.get("model_type") or "")

    def first(self, *names: str) -> Any:
        """The value of a field by any of its names; None if there is none."""
        found = {name: self.given[name] for name in names if self.given.get(name) is not None}
        self._read |= set(names)
        values = list(found.values())
        if any(value != values[0] for value in values):
            both = " and ".join(f"{self._prefix}{name}={value!r}" for name, value in found.items())
            raise ValueError(f"the configuration of a {self.kind!r} has both {both}; leave one out")
        return values[0] if values else None

    def need(self, *names: str) -> Any:
        found = self.first(*names)
        if found is None:
            what = f"has no {names[0]!r}" if len(names) == 1 else f"has none of {', '.join(names)}"
            raise ValueError(f"the configuration of a {self.kind!r} {what}; {_WAY_OUT}")
        return found

    def refuse(self, name: str, why: str) -> NoReturn:
        value = repr(self.given.get(name))
        value = value if len(value) < 60 else f"{value[:56]} ..."
        raise ValueError(f"{self._prefix}{name}={value} of a {self.kind!r} {why}; {_WAY_OUT}")

    def refuse_kind(self) -> NoReturn:
        self._read |= {*(name for names in (*SIZES.values(), *MORE.values()) for name in names), *BIASES}
        left = self._unread()
        also = f", and with it {', '.join(left[:8])}{', ...' * (len(left) > 8)}" if left else ""
        inner = "; give its text_config, if that is of one of them" if "text_config" in self.given else ""
        raise ValueError(
            f"model_type {self.kind!r} is not read{also}. Those that are: {', '.join(KINDS)}{inner}. If a Model has "
            f"all that matters, {_WAY_OUT}"
        )

    def _unread(self) -> list[str]:
        """The fields that have a value and were not read."""
        return [
            name for name in self.given if self.given[name] and not (name in self._read or HARMLESS.fullmatch(name))
        ]

    def check(self) -> None:
        """Raise ValueError for the first field that has a value and was not read."""
        for name, values in ONLY.items():
            if self.given.get(name) is not None and self.first(name) not in values:
                self.refuse(name, f"is not read, but only {' or '.join(map(repr, values))}")
        for name in self._unread():
            self.refuse(name, "is not read, and may change the model")


def _biases(fields: _Fields, found: dict[str, Any]) -> None:
    for name, layers in BIASES.items():
        value = fields.first(name)
        if value is not None:
            where = layers[:1] if fields.kind in ("glm", "glm4") else layers  # theirs: query, key and value
            found |= dict.fromkeys(where, bool(value))
    parts = ("qkv_bias", "output_bias", "mlp_bias")
    if all(found.get(part) for part in parts):
        found |= {"bias": True} | dict.fromkeys(parts, False)


def _window(fields: _Fields, found: dict[str, Any]) -> None:
    """How many tokens a token attends to. A list of layers says which of them have a window."""
    window, layers = fields.first("sliding_window") or 0, fields.first("layer_types")
    is_used = fields.first("use_sliding_window")
    if is_used is False or (is_used is None and fields.kind.startswith(("qwen", "smollm"))):
        window = 0
    if layers is not None:
        if not set(layers) <= {"full_attention", "sliding_attention"}:
            fields.refuse("layer_types", "has layers that are not attention")
        window = window if "sliding_attention" in layers else 0
    found["window"] = window


def _falcon(fields: _Fields, found: Mapping[str, Any]) -> dict[str, Any]:
    """Key and value heads, and norms: one per layer if attention and MLP share it."""
    kv_heads, norms = fields.first("num_kv_heads"), fields.first("num_ln_in_parallel_attn")
    has_one = fields.first("multi_query") is not False  # the default is left out
    is_parallel = fields.first("parallel_attn") is not False
    if fields.first("new_decoder_architecture"):
        return {"kv_heads": kv_heads, "norms": norms or 2}
    return {"kv_heads": 1 if has_one else found["heads"], "norms": norms or 1 if is_parallel else 2}


def _mpt(fields: _Fields, found: Mapping[str, Any]) -> dict[str, Any]:
    ratio = fields.need("expansion_ratio")
    attention = _Fields(fields.first("attn_config") or {}, fields.kind, "attn_config.")
    kind, kv_heads = attention.first("attn_type") or "multihead_attention", attention.first("kv_n_heads")
    shared = {"multihead_attention": found["heads"], "multiquery_attention": 1, "grouped_query_attention": kv_heads}
    one_of("attn_config.attn_type", kind, shared)
    is_learned = fields.first("learned_pos_emb") and attention.first("alibi") is False
    attention.check()
    positions = fields.need("max_seq_len") if is_learned else 0
    return {"ffn": int(ratio * found["hidden"]), "kv_heads": shared[kind], "positions": positions}


def _opt(fields: _Fields, found: Mapping[str, Any]) -> dict[str, Any]:
    if (fields.first("word_embed_proj_dim") or found["hidden"]) != found["hidden"]:
        fields.refuse("word_embed_proj_dim", f"differs from hidden_size={found['hidden']}, which is not read")
    return {"positions": fields.need("max_position_embeddings") + 2}  # the first two are never used


def _deepseek(fields: _Fields, found: Mapping[str, Any]) -> dict[str, Any]:
    """Latents, and experts after dense layers. The multi-token prediction module (num_nextn_predict_layers) is left
    out, as in transformers. Weights stored in 8 bit count as usual."""
    if (fields.first("quantization_config") or {}).get("quant_method", "fp8") != "fp8":
        fields.refuse("quantization_config", "is not read, but only fp8")
    if found.get("mlp_bias"):
        fields.refuse("mlp_bias", "is not read: experts have none")
    _ = fields.first("num_nextn_predict_layers"), fields.first("qk_head_dim")
    rope, dense = fields.need("qk_rope_head_dim"), min(fields.need("first_k_dense_replace"), found["layers"])
    head, q_rank, greedy = fields.need("qk_nope_head_dim"), fields.first("q_lora_rank"), fields.first("topk_method")
    ffn, groups, top = fields.need("moe_intermediate_size"), fields.first("n_group"), fields.first("topk_group")
    groups = 1 if greedy == "greedy" else groups or 1
    experts = {"experts": fields.need("n_routed_experts"), "experts_per_token": fields.need("num_experts_per_tok")}
    experts |= {"groups": groups, "top_groups": min(groups, top or groups)}
    experts |= {"ffn": ffn, "shared_ffn": ffn * (fields.first("n_shared_experts") or 0)}
    experts |= {"dense_layers": dense, "dense_ffn": found["ffn"] if dense else None}
    latent = {"q_rank": q_rank or 0, "kv_rank": fields.need("kv_lora_rank"), "value_dim": fields.need("v_head_dim")}
    latent |= {"head_dim": head + rope, "rope_dim": rope, "kv_heads": found["heads"]}
    return latent | (experts if dense < found["layers"] else {})


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("it is not the configuration of a model: it has no names")
    return config


def _of_gpt(config: GPTConfig, name: str) -> dict[str, Any]:
    return _of_experts(config) | {
        "layers": config.num_layers,
        "hidden": config.width,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "gated": config.activation == "swiglu",
        "vocab": config.vocab_size,
        "tied": True,
        "positions": config.context,
        "norm": config.norm,
        "bias": config.bias,
        "dropout": config.dropout > 0,
        "name": name or "gpt",
    }


def _of_experts(config: GPTConfig) -> dict[str, Any]:
    """The MLPs of a GPT: those of its experts, and of the blocks before them."""
    has = [config.experts_in(block) for block in range(config.num_layers)]
    experts = next(filter(None, has), None)
    if experts is None:
        return {"ffn": config.hidden_width}
    first, rule = has.index(experts), experts.routing
    if not all(has[first:]):
        raise ValueError(f"experts of blocks {experts.blocks} are not read, but only those of all blocks from some on")
    if experts.bias_rate:
        raise ValueError(f"bias_rate={experts.bias_rate} is not read: a Model's routers have no bias; take 0")
    about = {"experts": rule.experts, "experts_per_token": rule.top_k, "groups": rule.groups}
    about |= {"top_groups": rule.top_groups, "ffn": experts.hidden, "shared_ffn": experts.shared}
    return about | ({"dense_layers": first, "dense_ffn": config.hidden_width} if first else {})
