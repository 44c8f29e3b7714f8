"""docs/formulas.md: what it says is what tplab's code counts, and its formulas give the same."""

import pytest

from tplab.forecast import MODELS, Model
from website import formulas

ALL = [one for part in formulas.SHEET.values() for one in part]


def test_the_page_is_what_the_code_writes():
    assert formulas.PAGE.read_text(encoding="utf8") == formulas.page(), "run python -m website.formulas"


@pytest.mark.parametrize("one", ALL, ids=[one.what for one in ALL])
def test_each_formula_gives_what_tplab_counts(one: formulas.Formula):
    # Rounded up to whole tokens, or the limit of a long sequence; all others are equal.
    tolerance = {"tokens": 1e-3, "%": 1e-3}.get(one.unit, 1e-9)
    assert one.by_tplab() == pytest.approx(one.by_hand, rel=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_flops_of_a_token_hold_for_every_model(name: str):
    """Also where heads together are wider than the model, and where a token uses some of the experts only."""
    model = Model.find(name)
    by_hand = 6 * model.active_parameters + 12 * model.layers * model.attention_width * 4096
    assert "6 N_u + 12 L w s" in formulas.PAGE.read_text(encoding="utf8") and model.flops_per_token(4096) == by_hand
