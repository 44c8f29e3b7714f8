"""How a router chooses: the rule for both frameworks, the table of its choices, and what its losses count.

A router scores each token against every expert. The k best-scored experts compute the token, and their results are
added up with weights derived from the scores:

    s = softmax(x @ router.T)  or  sigmoid(x @ router.T)       [T, E]
    chosen = the k largest of s + bias                          [T, k], of the best groups alone if groups are limited
    w = s[chosen]  (/ sum over the k)  * scale                  [T, k]: the bias chooses and does not weight
    y = sum_j w_j expert_chosen_j(x)

softmax, then k of them: Shazeer et al. 2017 and Switch (Fedus et al. 2021). sigmoid, groups and bias: DeepSeek-V3
(arXiv:2412.19437, section 2.1.2).

One loss balances the choices, another keeps scores from growing. With p [T, E] the scores of T tokens as probabilities,
and f_e the fraction of the T k choices that fall on expert e:

    balance   E * sum_e f_e mean_t(p_te)        1 if all are chosen equally; no gradient goes through f
    z         mean_t (log sum_e exp z_te)^2     of the logits z

Balance: Fedus et al. 2021 (arXiv:2101.03961), section 2.2; z: Zoph et al. 2022 (arXiv:2202.08906). What has to be
balanced depends on which tokens f counts:

    "microbatch"   the tokens of this rank, or of the ranks that share its sequences: each microbatch by itself
    "sequence"     each sequence by itself, and the mean of that
    "global"       the tokens of all ranks together (Qiu et al. 2025, arXiv:2501.11873). f needs an
                   all_reduce of E numbers, and the mean of the ranks' losses is then the loss of the whole batch
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from tplab.errors import ShapeError, one_of
from tplab.mesh import Axis

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


BALANCE = ("microbatch", "sequence", "global")


def check_balance(
    over: str, tokens: int, sequence: int | None, axis: Axis | None, sequence_axis: Axis | None
) -> tuple[int, Axis | None]:
    """How many tokens of a rank are counted together, and with those of which other ranks. Raises ValueError and
    ShapeError."""
    one_of("over", over, BALANCE)
    if over == "global":
        if axis is None or sequence_axis is not None:
            raise ValueError(
                "a balance over the global batch counts the choices of all ranks: give axis, along which these are, "
                "and no sequence_axis"
            )
        return tokens, axis
    if axis is not None:
        raise ValueError(
            f"a balance over each {over} does not count the choices of all ranks along {axis!r}: leave out axis, or "
            'give over="global"; if ranks share each sequence, give sequence_axis, along which they do'
        )
    if over == "microbatch":
        return tokens, sequence_axis
    if sequence is None or sequence < 1 or tokens % sequence:
        raise ShapeError(f"{tokens} tokens are no whole number of sequences of {sequence}; give sequence, their length")
    return sequence, sequence_axis
