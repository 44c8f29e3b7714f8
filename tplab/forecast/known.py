"""The sizes of well-known models, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
    return {**sizes, **more}


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048) -> dict[str, Any]:
    about = {"norm": "layer", "bias": True, "tied": True, "gated": False, "dropout": True}
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "positions": positions, **about}


def _mpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return _gpt(layers, hidden, heads, 50368) | {"dropout": False}


_DEEPSEEK_V3 = {"experts": 256, "experts_per_token": 8, "groups": 8, "top_groups": 4, "shared_ffn": 2048}
_DEEPSEEK_V3 |= {"dense_layers": 3, "dense_ffn": 18432, "q_rank": 1536, "kv_rank": 512}
_DEEPSEEK_V3 |= {"head_dim": 192, "rope_dim": 64, "value_dim": 128}

SIZES: Mapping[str, Mapping[str, Any]] = {
    # Touvron et al. 2023 (arXiv:2302.13971, 2307.09288), Grattafiori et al. 2024 (2407.21783), and their config.json
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "llama3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, tied=True, head_dim=64),
    "llama3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, tied=True, head_dim=128),
    # Qwen team 2024, 2025 (arXiv:2412.15115, 2505.09388); Jiang et al. 2023, 2024 (2310.06825, 2401.04088)
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, qkv_bias=True),
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, 152064, qkv_bias=True),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064, qkv_bias=True),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151936, qk_norm=True),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151936, head_dim=128, qk_norm=True),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 768, 151936, head_dim=128, qk_norm=True, experts=128, experts_per_token=8),
    "qwen3-235b-a22b": _llama(
        94, 4096, 64, 4, 1536, 151936, head_dim=128, qk_norm=True, experts=128, experts_per_token=8
    ),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, experts=8, experts_per_token=2),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, 32768, experts=8, experts_per_token=2),
    # DeepSeek-AI 2024 (arXiv:2412.19437), and its config.json; without the multi-token prediction module
    "deepseek-v3": _llama(61, 7168, 128, 128, 2048, 129280, **_DEEPSEEK_V3),
    # Hugging Face's ultra-scale playbook
    "playbook-1b": _llama(16, 2048, 32, 32, 8192, 131072, tied=True),
    "playbook-3b": _llama(28, 3072, 32, 32, 8192, 131072, tied=True),
    "playbook-8b": _llama(32, 4096, 32, 32, 14336, 131072),
    "playbook-80b": _llama(80, 8192, 64, 64, 28672, 131072),
    # Radford et al. 2019; Brown et al. 2020 (arXiv:2005.14165)
    "gpt2": _gpt(12, 768, 12, 50257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 50257, 1024),
    "gpt3-175b": _gpt(96, 12288, 96, 50257),
    # Narayanan et al. 2021 (arXiv:2104.04473), table 1; Korthikanti et al. 2022 (2205.05198), table 3
    "megatron-1.7b": _gpt(24, 2304, 24),
    "megatron-3.6b": _gpt(30, 3072, 32),
    "megatron-7.5b": _gpt(36, 4096, 32),
    "megatron-18b": _gpt(40, 6144, 48),
    "megatron-22b": _gpt(48, 6144, 64),
    "megatron-39b": _gpt(48, 8192, 64),
    "megatron-76b": _gpt(60, 10240, 80),
    "megatron-145b": _gpt(80, 12288, 96),
    "megatron-175b": _gpt(96, 12288, 96),
    "megatron-310b": _gpt(96, 16384, 128),
    "megatron-530b": _gpt(105, 20480, 128),
    "megatron-1t": _gpt(128, 25600, 160),
    # mosaicml/llm-foundry, commit 061f2c7, scripts/train/yamls/pretrain: one learned position per token
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
}
"""Name -> the fields of a `tplab.forecast.Model`."""
