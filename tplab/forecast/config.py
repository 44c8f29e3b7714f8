"""The sizes of a model, from the configuration that a library has of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tplab.models.gpt import GPTConfig


def sizes_of(config: Any, name: str = "") -> dict[str, Any]:
    """The fields of a `tplab.forecast.Model`: see `Model.of_config`."""
    if isinstance(config, GPTConfig):
        return _of_gpt(config, name)
    has: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    kind = has.get("model_type", "")
    if kind == "gpt2":
        return {
            "layers": has["n_layer"],
            "hidden": has["n_embd"],
            "heads": has["n_head"],
            "ffn": has.get("n_inner"),
            "gated": False,
            "vocab": has["vocab_size"],
            "tied": True,
            "positions": has["n_positions"],
            "norm": "layer",
            "bias": True,
            "dropout": has.get("resid_pdrop", 0.0) > 0,
            "name": name or kind,
        }
    if not {"num_hidden_layers", "hidden_size", "intermediate_size"} <= set(has):
        raise ValueError(
            f"the configuration of a {kind or 'model'!r} has no num_hidden_layers, hidden_size and "
            "intermediate_size; write its sizes out: Model(layers=..., hidden=..., ...)"
        )
    experts = has.get("num_experts") or has.get("num_local_experts") or 0
    return {
        "layers": has["num_hidden_layers"],
        "hidden": has["hidden_size"],
        "heads": has["num_attention_heads"],
        "kv_heads": has.get("num_key_value_heads"),
        "head_dim": has.get("head_dim"),
        "ffn": has.get("moe_intermediate_size") or has["intermediate_size"],
        "vocab": has["vocab_size"],
        "tied": bool(has.get("tie_word_embeddings", False)),
        "experts": experts,
        "experts_per_token": has.get("num_experts_per_tok", 0) if experts else 0,
        "shared_ffn": has.get("shared_expert_intermediate_size") or 0,
        "bias": bool(has.get("mlp_bias", False)),
        "qkv_bias": kind.startswith("qwen2") or bool(has.get("attention_bias", False)),
        "qk_norm": kind.startswith("qwen3"),
        "name": name or has.get("_name_or_path") or kind,
    }


def _of_gpt(config: GPTConfig, name: str) -> dict[str, Any]:
    return {
        "layers": config.num_layers,
        "hidden": config.width,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "ffn": config.hidden_width,
        "gated": config.activation == "swiglu",
        "vocab": config.vocab_size,
        "tied": True,
        "positions": config.context,
        "norm": config.norm,
        "bias": config.bias,
        "dropout": config.dropout > 0,
        "name": name or "gpt",
    }
