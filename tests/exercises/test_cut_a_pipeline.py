"""Lab 14's exercise: its solution passes, known mistakes get their hint, and nothing raises."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from labs.source import build
from tests.labs.prose import sentences
from tplab.exercises.cut_a_pipeline import SMALL, Trial, check_cut, check_fill, measured_layers
from tplab.pipeline import partition
from tplab.pipeline.partition import LayerSpec

WIDTH = 16


class Residual(nn.Module):
    """What stands for a block here."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.mlp(self.norm(x)))


def cuts(num_layers, ranks):
    return [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), ranks - 1)]


def best_cut(key, in_flight=lambda rank, ranks: ranks - rank):
    """Every cut that fits is tried: the one with the least key(sums of its stages)."""

    def cut(costs, weights, kept, ranks, limit):
        def fits(bounds):
            return all(
                sum(weights[a:b]) + in_flight(rank, ranks) * sum(kept[a:b]) <= limit
                for rank, (a, b) in enumerate(pairwise(bounds))
            )

        legal = [bounds for bounds in cuts(len(costs), ranks) if fits(bounds)] or cuts(len(costs), ranks)
        return min(legal, key=lambda bounds: key([sum(costs[a:b]) for a, b in pairwise(bounds)]))

    return cut


def without_weights(costs, weights, kept, ranks, limit):
    return best_cut(max)(costs, [0] * len(costs), kept, ranks, limit)


MODEL = [LayerSpec(nn.Embedding, 65, WIDTH), *[LayerSpec(Residual)] * 8, LayerSpec(nn.Linear, WIDTH, 65, bias=False)]
IDS = torch.arange(64).reshape(4, 16)


def checked(cut):
    return check_cut(cast(Any, cut), MODEL, IDS)


def test_a_cut_with_a_larger_largest_stage_can_be_faster():
    trial = Trial("lab 14's example", [1, 5, 7, 3, 3, 9], [0] * 6, [0] * 6, 3, float("inf"))
    assert list(trial.best().stage_costs) == [6, 10, 12]
    assert [trial.makespan(bounds) for bounds in ((0, 2, 4, 6), (0, 3, 5, 6))] == [336, 331]
    assert "6, 10, 12 takes 336 steps, and 13, 6, 9 takes 331" in " ".join(sentences("14_cut_a_pipeline"))


def test_what_the_lab_says_of_moving_a_block():
    from tplab.torch import GPTConfig
    from tplab.torch.models.plain import plain_layers

    ids = torch.randint(65, (4, 32), generator=torch.Generator().manual_seed(0))
    measured = measured_layers(plain_layers(GPTConfig(65, 64, 12, num_heads=4, context=32)), ids)
    trial = Trial("GPT", *measured, 4, float("inf"))
    even = trial.best().bounds
    most = max(trial.takes(even))
    moved = trial.within(0.95 * most).bounds
    assert sum(abs(a - b) for a, b in zip(even, moved)) == 2  # a block, past rank 1
    assert round(100 * (1 - max(trial.takes(moved)) / most)) == 16
    assert round(100 * (trial.makespan(moved) / trial.makespan(even) - 1)) == 16
    assert "Here, moving one block saves 16% of the memory for 16% more time." in sentences("14_cut_a_pipeline")


def test_the_right_cut():
    verdict = checked(best_cut(max))
    assert verdict.passed, verdict
    assert "my_cut is right: no cut within the limit has a smaller largest stage." in verdict.text
    assert [panel.title for panel in verdict.panels] == ["yours: share of the limit", "yours: share of the work"]
    assert "ran your model with this cut on 4 ranks. The fullest rank took" in verdict.text
    assert "your cut makes the batch 1." in verdict.text


def test_the_small_models_can_be_checked_in_the_head():
    assert [trial.best().bounds for trial in SMALL] == [
        (0, 1, 2, 4),
        (0, 1, 2, 4),
        (0, 1, 2, 3, 5),
        (0, 2, 7),
        (0, 1, 3, 6),
    ]
    assert [trial.takes(trial.best().bounds) for trial in SMALL] == [[0] * 3, [0] * 3, [0] * 4, [10, 20], [5, 8, 9]]
    assert [trial.best().largest for trial in SMALL] == [6, 9, 4, 7, 3]


@pytest.mark.parametrize(
    "cut, said",
    [
        (
            best_cut(lambda sums: max(sums) - min(sums)),
            "The busiest rank does 53.8% of the work, where 46.2% is possible",
        ),
        (
            best_cut(max, lambda rank, ranks: ranks),
            "rank r of 2 keeps 2 - r microbatches: which ranks have room",
        ),
        (best_cut(max, lambda rank, ranks: rank + 1), "Under 1F1B, rank r of"),
        (
            best_cut(max, lambda rank, ranks: 1),
            "[0, 2, 4, 6] gives rank 0 10 B.\nIts layers' weights take 4 B, with their gradients",
        ),
        (best_cut(max, lambda rank, ranks: 1), "Under 1F1B, rank 0 of 3 keeps 3 microbatches, 6 B."),
        (best_cut(max, lambda rank, ranks: 0), "rank 1 24 B.\nIts layers' weights take 18 B"),
        (best_cut(max, lambda rank, ranks: 0), "rank 1 of 2 keeps 1 microbatch, 6 B."),
        (without_weights, "[0, 1, 7] gives rank 1 24 B.\nIts layers' weights take 18 B"),
        (
            lambda costs, *rest: [0, 2, 3, 4],
            "is within the limit.\nThe busiest rank does 53.8% of the work",
        ),
        (lambda costs, *rest: [0, 1, 4], "it returned [0, 1, 4]; the bounds of 3 stages are [0, ..., 4], 4 rising"),
        (lambda costs, *rest: [0, 1, 1, 4], "4 rising numbers"),
        (lambda costs, *rest: costs.clear(), "it returned None"),
        (lambda costs, *rest: [1 / 0], "ZeroDivisionError"),
    ],
)
def test_known_mistakes_in_the_cut(cut, said: str):
    verdict = checked(cut)
    assert verdict.passed is False and said in verdict.text, verdict


def first_that_fits(costs, weights, kept, ranks, limit):
    """Counts as many microbatches on every rank as on the first, and relies on there being a cut."""
    best = None
    for bounds in cuts(len(costs), ranks):
        pieces = list(pairwise(bounds))
        fits = all(sum(weights[a:b]) + ranks * sum(kept[a:b]) + 5 <= limit for a, b in pieces)
        largest = max(sum(costs[a:b]) for a, b in pieces)
        if fits and (best is None or largest < best[0]):
            best = largest, bounds
    return best[1]  # type: ignore[index]


def test_a_formula_that_counts_too_much_is_told_so():
    verdict = checked(first_that_fits)
    assert verdict.passed is False and "does it count more bytes than a rank takes?" in verdict.text, verdict
    none = checked(lambda *args: None if args[4] < 22 else best_cut(max)(*args))
    assert none.passed is False and "If yours finds none" in none.text, none


def by_the_library(costs, weights, kept, ranks, limit):
    from tplab.pipeline.partition import partition

    return partition(weights, ranks, costs, memory_limit=limit).bounds


def test_what_is_left_behind_and_the_librarys_own():
    assert "`partition` does the work" in checked(by_the_library).text
    sorts = checked(lambda costs, *rest: costs.sort() or best_cut(max)(costs, *rest))
    assert sorts.passed is False and "it changes the lists that it is given" in sorts.text


def test_another_cut_that_is_as_good_is_right_too():
    assert checked(lambda costs, *rest: tuple(best_cut(lambda sums: (max(sums), sums[0]))(costs, *rest))).passed
    assert checked(lambda *args: (bound for bound in best_cut(max)(*args))).passed


def test_an_untouched_stub():
    def my_cut(costs, weights, kept, ranks, limit): ...

    verdict = checked(my_cut)
    assert verdict.passed is None and "not started" in verdict.text


def test_layers_are_measured():
    """FLOPs: a product is 2 of each term, a pointwise operation one an element. 16 bytes a parameter; what is kept."""
    flops, weights, kept = measured_layers(MODEL, IDS)
    x, product = 64 * WIDTH, 2 * 64 * WIDTH * WIDTH
    assert flops[0] == 0 and len(set(flops[1:9])) == 1
    assert product <= flops[1] <= product + 10 * x  # norm, tanh, sum
    assert 2 * 64 * WIDTH * 65 <= flops[9] <= 2 * 64 * WIDTH * 65 + 10 * 64 * 65  # and the loss
    assert weights == [16 * size for size in (65 * 16, *[16 * 16 + 3 * 16] * 8, 16 * 65)]
    # a block keeps the norm's input, two statistics a token, its output, and tanh's
    assert kept[:9] == [0, *[3 * 4 * x + 2 * 64 * 4] * 8]
    assert kept[9] > 4 * x  # the head's input, and what the loss keeps


def moves_layers_until_it_fits(costs, weights, kept, ranks, limit):
    """The best cut without a limit, then layers from a full rank to the next: right for many models."""
    bounds = list(best_cut(max)(costs, weights, kept, ranks, float("inf")))
    for _ in range(100):
        takes = [sum(weights[a:b]) + (ranks - rank) * sum(kept[a:b]) for rank, (a, b) in enumerate(pairwise(bounds))]
        full = [rank for rank in range(ranks) if takes[rank] > limit]
        if not full:
            break
        bounds[full[0] + 1 if full[0] < ranks - 1 else full[0]] += -1 if full[0] < ranks - 1 else 1
    return bounds


def with_empty_stages(costs, weights, kept, ranks, limit):
    """Right but for the stages that it leaves empty."""
    legal = [(0, *inner, len(costs)) for inner in combinations(range(len(costs) + 1), ranks - 1)]
    fitting = [
        bounds
        for bounds in legal
        if all(
            sum(weights[a:b]) + (ranks - rank) * sum(kept[a:b]) <= limit for rank, (a, b) in enumerate(pairwise(bounds))
        )
    ]
    return min(fitting, key=lambda bounds: max(sum(costs[a:b]) for a, b in pairwise(bounds)))


def by_trial(costs, weights, kept, ranks, limit):
    return Trial("", costs, weights, kept, ranks, limit).best().bounds


def reseeds(costs, weights, kept, ranks, limit):
    torch.manual_seed(0)
    return best_cut(max)(costs, weights, kept, ranks, limit)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (moves_layers_until_it_fits, "on 3 ranks of 33 bytes each"),
        (with_empty_stages, "the bounds of 3 stages are [0, ..., 4], 4 rising numbers"),
        (by_trial, "`Trial` does the work"),
        (reseeds, "my_cut: with four layers on 3 ranks, it leaves torch's global generator in another state"),
        (3, "this is an object of type int"),
    ],
)
def test_more_mistakes_in_the_cut(cut, said: str):
    verdict = checked(cut)
    assert verdict.passed is False and said in verdict.text, verdict


# ------------------------------------------------------------------------------------------------------------ fill


def lab(name: str) -> str:
    cells = [cell.source for cell in build.read_source("14_cut_a_pipeline").cells if cell.cell_type == "code"]
    return next(source for source in cells if f"def {name}(" in source)


def mended(share: str = "smallest(costs, ranks)", rest: str = "len(costs) - layer == ranks - len(bounds)") -> Any:
    """The lab's `fill`, with another share, and a rule for the layers that are left."""
    names: dict[str, Any] = {}
    exec(lab("smallest").partition("random = ")[0], names)
    source = lab("fill").replace("sum(costs) / ranks", share)
    was = "filled + cost > share and len(bounds) < ranks"
    assert was in source
    exec(source.replace(was, f"len(bounds) < ranks and (filled + cost > share or {rest})"), names)
    return names["fill"]


def by_partition(costs, ranks):
    return partition(costs, ranks).bounds


def every_cut(costs, ranks):
    return min(cuts(len(costs), ranks), key=lambda bounds: max(sum(costs[a:b]) for a, b in pairwise(bounds)))


def best_fill(key):
    """Every cut is tried: the one with the least key(sums of its stages)."""
    return lambda costs, ranks: min(
        cuts(len(costs), ranks), key=lambda bounds: key([sum(costs[a:b]) for a, b in pairwise(bounds)])
    )


def takes_from_the_list(costs, ranks):
    bounds = every_cut(costs, ranks)
    costs.clear()
    return bounds


def test_fill():
    for right in (mended(), every_cut, lambda *args: np.array(every_cut(*args)), lambda *args: iter(every_cut(*args))):
        verdict = check_fill(right)
        assert verdict.passed and "fill is right" in verdict.text, verdict


@pytest.mark.parametrize(
    ("fill", "said"),
    [
        (mended("sum(costs) / ranks", "False"), "The last stage takes whatever is left"),
        (mended(rest="False"), "Every stage needs a layer"),
        (mended("max(costs)"), "The last stage takes whatever is left"),
        (mended("sum(costs) / ranks"), "The last stage takes whatever is left"),
        (mended("2 * sum(costs) / ranks"), "The largest stage sets the pace"),
        (lambda costs, ranks: [0, *range(1, ranks), len(costs)], "The last stage takes whatever is left"),
        (lambda costs, ranks: [0, *range(len(costs) - ranks + 1, len(costs) + 1)], "The largest stage sets the pace"),
        (lambda costs, ranks: [len(costs) * rank // ranks for rank in range(ranks + 1)], "The largest could have"),
        (lambda costs, ranks: every_cut(costs, 4), "the bounds of 3 stages are"),
        (lambda costs, ranks: every_cut(costs, ranks)[1:-1], "the bounds of 4 stages are"),
        (best_fill(lambda sums: max(sums) - min(sums)), "The largest could have 9"),
        (best_fill(lambda sums: sum(one * one for one in sums)), "The largest could have 9"),
        (takes_from_the_list, "it changes the list"),
        (by_partition, "`partition` does the work"),
        (lambda costs, ranks: costs.missing, "AttributeError"),
        ("fill", "this is an object of type str"),
    ],
)
def test_fill_gone_wrong(fill, said: str):
    verdict = check_fill(fill)
    assert verdict.passed is False and said in verdict.text, verdict


def test_fill_not_started():
    def fill(costs, ranks): ...

    assert check_fill(fill).passed is None
