"""What a recipe says of a step: its learning rate, and what else is done."""

import pytest

from tplab import Mesh
from tplab.training.recipe import Recipe, with_all_axes


def test_the_rate_warms_up_and_falls_along_a_cosine():
    recipe = Recipe(110, learning_rate=2.0, warmup=10, final=0.1)
    assert [recipe.rate(step) for step in (0, 4, 9)] == [0.2, 1.0, 2.0]
    assert recipe.rate(10) == 2.0
    assert recipe.rate(60) == pytest.approx(1.1)  # half way
    assert recipe.rate(110) == pytest.approx(0.2)
    rates = [recipe.rate(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert Recipe(5, warmup=0).rate(0) == Recipe().learning_rate


def test_what_is_done_after_which_step():
    recipe = Recipe(10, evaluate_every=4, save_every=3)
    assert [step for step in range(10) if recipe.evaluates(step)] == [3, 7, 9]
    assert [step for step in range(10) if recipe.saves(step)] == [2, 5, 8, 9]
    assert not any(map(Recipe(10).evaluates, range(10)))
    assert Recipe(10).saves(9)
    with pytest.raises(ValueError, match="save_every is 0"):
        Recipe(save_every=0)
    with pytest.raises(ValueError, match="zero"):
        Recipe(zero=4)


def test_axes_that_are_left_out_have_one_rank():
    assert with_all_axes(Mesh(tp=2, dp=3)) == Mesh(pp=1, tp=2, dp=3)
    assert with_all_axes(Mesh(dp=2, pp=2, tp=2)) == Mesh(dp=2, pp=2, tp=2)
    with pytest.raises(ValueError, match="an axis of the mesh"):
        with_all_axes(Mesh(cp=2))
