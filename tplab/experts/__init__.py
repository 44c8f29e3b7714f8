"""Mixtures of experts over ranks: which expert a token goes to, which rank holds it, and what travels."""

from tplab.experts.folding import Folded, fold
from tplab.experts.placement import Placement, balanced, contiguous, expected_copies, rows_between, tokens_between
from tplab.experts.routing import Routing

__all__ = [
    "Folded",
    "Placement",
    "Routing",
    "balanced",
    "contiguous",
    "expected_copies",
    "fold",
    "rows_between",
    "tokens_between",
]
