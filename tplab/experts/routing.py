"""How a router chooses: the rule for both frameworks, and the table of its choices.

A router scores each token against every expert. The k best-scored experts compute the token, and their results are
added up with weights derived from the scores:

    s = softmax(x @ router.T)  or  sigmoid(x @ router.T)       [T, E]
    chosen = the k largest of s + bias                          [T, k], of the best groups alone if groups are limited
    w = s[chosen]  (/ sum over the k)  * scale                  [T, k]: the bias chooses and does not weight
    y = sum_j w_j expert_chosen_j(x)

softmax, then k of them: Shazeer et al. 2017 and Switch (Fedus et al. 2021). sigmoid, groups and bias: DeepSeek-V3
(arXiv:2412.19437, section 2.1.2).
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from tplab.errors import ShapeError, one_of

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """The rule by which a router chooses `top_k` of `experts`.

    score        "softmax" over all experts, or "sigmoid" of each by itself
    groups       the number of groups of neighbouring experts, of which only `top_groups` are considered: those with the
                 highest sum of scores of their two best experts
    normalized   whether a token's weights add up to 1. Weights of dropped choices are left out, so that recorded
                 choices have the same weights when they are replayed. (Megatron normalizes all k, and then drops)
    scale        the factor of the weights
    capacity     None: no token is dropped. Otherwise each expert takes at most `room(T)` of a rank's T tokens: first
                 the tokens' best choices, then their second ones, each in order. A choice that finds no room is
                 dropped, and adds nothing

    Raises ShapeError for numbers that do not fit each other.
    """

    experts: int
    top_k: int
    _: KW_ONLY
    score: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    normalized: bool = True
    scale: float = 1.0
    capacity: float | None = None

    def __post_init__(self) -> None:
        one_of("score", self.score, SCORES)
        if not 1 <= self.top_k <= self.experts:
            raise ShapeError(f"a token cannot go through {self.top_k} of {self.experts} experts")
        if self.groups < 1 or self.experts % self.groups:
            raise ShapeError(
                f"{self.experts} experts cannot be {self.groups} equal groups; groups must divide the experts"
            )
        if not 1 <= self.top_groups <= self.groups:
            raise ShapeError(f"top_groups={self.top_groups} of groups={self.groups} is impossible; it is 1 to groups")
        available = self.experts // self.groups * self.top_groups
        if self.top_k > available:
            raise ShapeError(
                f"a token goes through {self.top_k} experts, and {self.top_groups} of {self.groups} groups have only "
                f"{available}; allow more groups, or choose fewer experts"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ShapeError(f"capacity={self.capacity} leaves no expert room; 1.0 is what equal loads need")

    @property
    def group_size(self) -> int:
        return self.experts // self.groups

    def room(self, tokens: int) -> int:
        """How many of a rank's `tokens` one expert takes: ceil(capacity T k / E), or all of them."""
        if self.capacity is None:
            return tokens
        return min(tokens, math.ceil(self.capacity * tokens * self.top_k / self.experts))


def table_of(choices: Any, experts: int) -> np.ndarray:
    """Choices as a checked table [T, k] of expert numbers, -1 where one was dropped. Raises ShapeError."""
    table = np.asarray(choices)
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
        raise ShapeError(f"choices are whole numbers [tokens, k], not {table.dtype} {list(table.shape)}")
    if table.size and not -1 <= table.min() <= table.max() < experts:
        wrong = table.min() if table.min() < -1 else table.max()
        raise ShapeError(
            f"choices name expert {wrong}; there are experts 0 to {experts - 1}, and -1 is a dropped choice"
        )
    return table
