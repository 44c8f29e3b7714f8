"""Mixtures of experts over ranks: which expert a token goes to, which rank holds it, and what travels."""

from tplab.experts.folding import Folded, fold
from tplab.experts.losses import BALANCE
from tplab.experts.placement import Placement, balanced, contiguous
from tplab.experts.routing import Routing, loads
from tplab.experts.traffic import expected_copies, rows_between, tokens_between

__all__ = [
    "BALANCE",
    "Folded",
    "Placement",
    "Routing",
    "balanced",
    "contiguous",
    "expected_copies",
    "fold",
    "loads",
    "rows_between",
    "tokens_between",
]
