"""The usual causes of a fault, in words, and public threads that report the same fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tplab.checking.gaps import near
from tplab.units import plain

GITHUB = "https://github.com/"

THREADS: Mapping[str, str] = {
    "loss": "NVIDIA/Megatron-LM/issues/673",
    "twice": "NVIDIA/Megatron-LM/issues/906",
    "means": "huggingface/transformers/pull/35207",
    "backward": "huggingface/diffusers/issues/11941",
    "experts": "NVIDIA/Megatron-LM/pull/5956",
    "tied": "NVIDIA/Megatron-LM/issues/7452",
    "norm": "pytorch/pytorch/issues/88621",
    "copies in norm": "NVIDIA-NeMo/RL/pull/3788",
    "microbatches": "NVIDIA-NeMo/Automodel/pull/3530",
    "labels": "NVIDIA-NeMo/Automodel/pull/3544",
    "cut off": "huggingface/transformers/issues/48687",
    "strided": "pytorch/pytorch/issues/192920",
    "log": "KellerJordan/modded-nanogpt/issues/2",
}


def thread(key: str) -> str:
    """Return the address of a thread; "" if there is none for this key."""
    return GITHUB + THREADS[key] if key in THREADS else ""


_FORMS = {1: "{}", -1: "1/{}", 0.5: "sqrt({})", -0.5: "1/sqrt({})", 2: "{} squared", -2: "1/{} squared"}
_POWERS = ((1, -1), (2, -2), (0.5, -0.5))
"""A factor is explained by a number of the run before the number's square, and by the square before its root."""


class Sizes:
    """The numbers of a run that may explain a factor: ranks, ranks of a group, microbatches."""

    def __init__(self, ranks: int, groups: Iterable[int], microbatches: int = 1):
        self._counts: dict[int, list[str]] = {}
        for count, words in (
            (ranks, "the number of ranks"),
            *((size, "the number of ranks in a group") for size in groups if size != ranks),
            (microbatches, "the number of microbatches"),
        ):
            self._counts.setdefault(count, []).append(words)
        self._counts.setdefault(ranks * microbatches, ["ranks times microbatches"])
        self._counts = {count: words for count, words in self._counts.items() if count > 1}

    def named(self, factor: float) -> str:
        """Return an explanation of the factor, such as "4 (the number of ranks)", with all explanations that fit
        equally well; "" if no number of the run fits."""
        for powers in _POWERS:
            found = []
            for power in powers:
                for count, words in self._counts.items():
                    if near(factor, count**power):
                        root, are = math.isqrt(count), " or ".join(words)
                        is_whole = power in (0.5, -0.5) and root**2 == count
                        form = _FORMS[2 * power].format(root) if is_whole else _FORMS[power].format(plain(count))
                        found.append(f"{form} ({are})" if power == 1 else f"{form} ({plain(count)} is {are})")
            if found:
                return ", or ".join(found)
        return ""

    def words(self, factor: float | None) -> str:
        """Return the factor as a phrase: 4 (the number of ranks) times the reference's. None: it is just wrong"""
        if factor is None:
            return "not the reference's"
        return f"{self.named(factor) or times(factor)} times the reference's"


def times(factor: float) -> str:
    """Return a factor as text that differs from 1 if the factor does."""
    return f"{factor:.4g}" if abs(factor - 1) > 0.01 else f"{factor:.6g}"
