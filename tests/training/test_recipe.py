"""What a recipe says of a step: its learning rate, and what else is done."""

from typing import Any

import pytest

from tests.training.test_train import TRAIN
from tplab import Mesh
from tplab.data.text import Text
from tplab.errors import ShapeError
from tplab.experts import Routing
from tplab.models.gpt import GPTConfig, GPTExperts
from tplab.sequence import TokenLayout
from tplab.training.recipe import Recipe, batch_axes, context_axis, data_axes, with_all_axes


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
        with_all_axes(Mesh(sp=2))
    sparse = GPTConfig(8, 4, 1, 1, 8, experts=GPTExperts(Routing(2, 1), 4))
    assert with_all_axes(Mesh(tp=2), sparse) == Mesh(dp=1, pp=1, ep=1, tp=2)
    assert (data_axes(Mesh(cp=2, ep=2)), batch_axes(Mesh(cp=2, ep=2))) == (("ep", "cp"), ("ep",))


def test_tokens_are_shared_along_the_context_axis():
    mesh = Mesh(dp=2, cp=4, tp=2)
    assert (context_axis(mesh), data_axes(mesh)) == ("cp", ("dp", "cp"))
    assert Recipe().tokens_on(mesh, 64) == TokenLayout("zigzag", 64, 4)
    with pytest.raises(ShapeError, match="the number of tokens is 60, which 8 pieces"):
        Recipe().tokens_on(mesh, 60)
    assert (context_axis(Mesh(dp=2)), data_axes(Mesh(dp=2))) == (None, ("dp",))
    assert Recipe().tokens_on(Mesh(dp=2), 7) == TokenLayout("contiguous", 7, 1)
    wrong: dict[str, Any] = {"layout": "stripes", "scheme": "head_ring"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} is '{value}'; it must be one of"):
            Recipe(**{name: value})


@pytest.mark.parametrize("framework", TRAIN)
@pytest.mark.parametrize(
    ("config", "mesh", "said"),
    [
        (GPTConfig(7, 8, 1, 4, 8), Mesh(tp=3), "num_heads is 4, which the 3 ranks"),
        (GPTConfig(7, 8, 1, 4, 8, num_kv_heads=1), Mesh(tp=2), "num_kv_heads is 1, which the 2 ranks"),
        (GPTConfig(7, 8, 1, 4, 8, hidden=5), Mesh(tp=2), "hidden is 5, which the 2 ranks"),
        (GPTConfig(7, 8, 1, 4, 8, experts=GPTExperts(Routing(4, 1), 5)), Mesh(tp=2), "hidden is 5"),
        (GPTConfig(7, 8, 1, 4, 8, experts=GPTExperts(Routing(4, 1), 4, shared=3)), Mesh(tp=2), "hidden is 3"),
        (GPTConfig(7, 8, 1, 4, 8, experts=GPTExperts(Routing(5, 1), 4)), Mesh(ep=2), "experts is 5"),
    ],
)
def test_what_ranks_cannot_share_is_said_before_they_run(framework: str, config: GPTConfig, mesh: Mesh, said: str):
    with pytest.raises(ShapeError, match=said):
        TRAIN[framework](config, Text(bytes(100)), mesh, Recipe(1, 4), show=lambda progress: None)
