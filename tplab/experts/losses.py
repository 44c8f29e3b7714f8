"""Losses of a router: one balances the choices of experts, the other keeps scores from growing.

With p [T, E] the scores of T tokens as probabilities, and f_e the fraction of the T k choices that fall on expert e:

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

from tplab.errors import ShapeError, one_of
from tplab.mesh import Axis

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
