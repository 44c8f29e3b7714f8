"""Lab 13's exercises: their solutions pass, known mistakes get their hint, and nothing raises."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from tplab.exercises.pipeline_memory import check_layers, check_most_bytes
from tplab.pipeline.partition import LayerSpec, TiedSpec

WIDTH = 16


class Residual(nn.Module):
    """What stands for a block here."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.mlp(self.norm(x)))


BLOCKS = [LayerSpec(Residual)] * 4


def hidden_head():
    """The lab's bug."""
    words = nn.Embedding(65, WIDTH)
    return [words, *BLOCKS, lambda x: x @ words.weight.T]


def tied(first="words", last="words"):
    head = TiedSpec(last, nn.Embedding, 65, WIDTH, forward=lambda words, x: x @ words.weight.T)
    return [TiedSpec(first, nn.Embedding, 65, WIDTH), *BLOCKS, LayerSpec(nn.LayerNorm, WIDTH), head]


def without_a_norm():
    *layers, _, head = tied()
    return [*layers, head]


def norm_before_the_blocks():
    first, *blocks, norm, head = tied()
    return [first, norm, *blocks, head]


class LastBlock(Residual):
    """A block that ends with the model's norm."""

    def __init__(self):
        super().__init__()
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.last(super().forward(x))


def norm_in_the_last_block():
    *layers, _, _, head = tied()
    return [*layers, LayerSpec(LastBlock), head]


def root_mean_square():
    *layers, _, head = tied()
    return [*layers, LayerSpec(nn.RMSNorm, WIDTH), head]


class Normed(nn.Embedding):
    """An embedding that is also a head with a norm."""

    def logits(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:]) @ self.weight.T


def norm_in_the_head():
    first = TiedSpec("words", Normed, 65, WIDTH)
    return [first, *BLOCKS, TiedSpec("words", Normed, 65, WIDTH, forward=Normed.logits)]


def with_a_bias(bias=True):
    head = TiedSpec("words", nn.Linear, WIDTH, 65, bias=bias)
    return [TiedSpec("words", nn.Embedding, 65, WIDTH), *BLOCKS, LayerSpec(nn.LayerNorm, WIDTH), head]


def head_first():
    """The head's Linear owns the matrix, and the embedding looks up its rows."""
    first = TiedSpec("words", nn.Linear, WIDTH, 65, bias=False, forward=lambda head, ids: head.weight[ids])
    *layers, _ = tied()
    return [first, *layers[1:], TiedSpec("words", nn.Linear, WIDTH, 65, bias=False)]


class BothEnds(nn.Module):
    """Looks up rows for ids, and multiplies for floats."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(65, WIDTH))

    def forward(self, x):
        return x @ self.weight.T if x.is_floating_point() else self.weight[x]


def one_class_for_both_ends():
    return [TiedSpec("words", BothEnds), *tied()[1:-1], TiedSpec("words", BothEnds)]


@pytest.mark.parametrize(
    "layers",
    [
        norm_in_the_last_block,
        root_mean_square,
        norm_in_the_head,
        lambda: with_a_bias(False),
        head_first,
        one_class_for_both_ends,
    ],
)
def test_other_right_lists(layers):
    verdict = check_layers(layers)
    assert verdict.passed, verdict


def hidden_embedding():
    words = nn.Embedding(65, WIDTH)
    return [lambda ids: words(ids), *BLOCKS, LayerSpec(nn.Linear, WIDTH, 65, bias=False)]


def two_matrices():
    return [LayerSpec(nn.Embedding, 65, WIDTH), *BLOCKS, LayerSpec(nn.Linear, WIDTH, 65, bias=False)]


def tied_by_assignment():
    words, head = nn.Embedding(65, WIDTH), nn.Linear(WIDTH, 65, bias=False)
    head.weight = words.weight
    return [words, *BLOCKS, head]


def without_forward():
    return [TiedSpec("words", nn.Embedding, 65, WIDTH), *BLOCKS, TiedSpec("words", nn.Embedding, 65, WIDTH)]


def one_layer_for_both():
    words = nn.Embedding(65, WIDTH)
    *layers, head = tied()
    return [TiedSpec("words", lambda: words), *layers[1:], TiedSpec("words", lambda: words, forward=head.forward)]


def scaled():
    head = TiedSpec("words", nn.Embedding, 65, WIDTH, forward=lambda words, x: x @ words.weight.T / 8)
    return [*tied()[:-1], head]


def nothing_returned():
    tied()


def test_a_tied_head():
    verdict = check_layers(tied)
    assert verdict.passed, verdict
    assert "on 2 and 4 ranks every gradient equals that of one rank" in verdict.text
    assert [panel.title for panel in verdict.panels] == ["gradient, 4 ranks", "gradient, one rank"]


def test_the_bug_is_shown():
    verdict = check_layers(hidden_head)
    assert verdict.passed is False
    first, second = verdict.text.splitlines()
    assert first == "my_layers: on 2 ranks the gradient of layer 0's weight differs from that of one rank."
    assert second.startswith("Layer 5, lambda, computes with a tensor [65, 16] that is not one of its parameters")
    assert [panel.title for panel in verdict.panels] == ["gradient, 2 ranks", "gradient, one rank"]


@pytest.mark.parametrize(
    "layers, said",
    [
        (hidden_embedding, "layer 0, lambda, computes with a tensor [65, 16]"),
        (two_matrices, "the head and the embedding are now two matrices"),
        (lambda: tied("words", "head"), "the head and the embedding are now two matrices"),
        (tied_by_assignment, "Layers 0 and 5 share one tensor [65, 16], but only on a rank that has both"),
        (without_a_norm, "nothing normalises what the head gets.\nWhere has the norm gone"),
        (norm_before_the_blocks, "nothing normalises what the head gets.\nWhere has the norm gone"),
        (with_a_bias, "its head has a bias of 65 numbers"),
        (without_forward, "the last layer is an nn.Embedding, which looks up rows. Its `forward=` says"),
        (one_layer_for_both, "the spec of layer 0 gives one and the same layer each time it is built"),
        (lambda: [*tied()[:3], *tied()[-2:]], "this is another model: 2 layers between the two ends have matrices"),
        (scaled, "this is another model: its logits are 0.125 times the product with the matrix of the embedding"),
        (nothing_returned, "it returned None; is a `return` missing?"),
        (lambda: object(), "TypeError"),
        (lambda: tied()[4:], "in the line: return x + torch.tanh"),
    ],
)
def test_known_mistakes_in_the_layers(layers, said: str):
    verdict = check_layers(cast(Any, layers))
    assert verdict.passed is False and said in verdict.text, verdict


def test_an_untouched_stub():
    verdict = check_layers(cast(Any, lambda: ...))
    assert verdict.passed is None and "not started" in verdict.text


def most_bytes(mistake: str = ""):
    """The solution, or one with a mistake in it."""

    def count(row, stage_bytes):
        kept = most = 0
        own = [stage_bytes[action.stage] for action in row]
        for action, size in zip(row, own):
            if mistake == "first backward" and action.kind != "F":
                return kept  # what is kept before it
            same = {
                "largest": max(own),
                "first": own[0],
                "microbatches": 1,
                "stage 0": stage_bytes[0],
                "largest of all": max(stage_bytes),
                "average": sum(set(own)) / len(set(own)),
                "sum": sum(set(own)),
                "place": stage_bytes[sorted({action.stage for action in row}).index(action.stage)],
            }
            size = same.get(mistake, size)
            frees = mistake != "never frees"
            kept += size if action.kind == "F" else -size * frees
            if mistake != "after backwards" or action.kind == "B":
                most = max(most, kept)
        return kept if mistake == "end" else most

    return count


def each_stage_by_itself(row, stage_bytes):
    rows = [[action for action in row if action.stage == stage] for stage in {action.stage for action in row}]
    return sum(most_bytes()(one, stage_bytes) for one in rows)


def test_the_largest_moments_of_stages_do_not_add_up():
    assert "Do they all come at the same time?" in check_most_bytes(each_stage_by_itself).text


def test_bytes_along_a_row():
    verdict = check_most_bytes(most_bytes())
    assert verdict.passed and "right to the byte" in verdict.text, verdict
    assert [panel.title for panel in verdict.panels] == ["yours, bytes by rank", "what each rank held"]


def test_an_argument_that_is_changed():
    def counts_and_clears(row, stage_bytes):
        most = most_bytes()(row, stage_bytes)
        stage_bytes[0] = 0
        return most

    verdict = check_most_bytes(counts_and_clears)
    assert verdict.passed is False and "it changes its argument stage_bytes" in verdict.text


def test_a_head_without_a_gradient():
    def layers():
        head = TiedSpec("words", nn.Embedding, 65, WIDTH, forward=lambda words, x: x @ words.weight.detach().T)
        return [*tied()[:-1], head]

    verdict = check_layers(layers)
    assert verdict.passed is False and "What cuts the head off" in verdict.text


@pytest.mark.parametrize(
    "mistake, said",
    [
        ("largest", "with the bytes of the rank's largest stage"),
        ("first", "with the bytes of the rank's first stage"),
        ("microbatches", "How many bytes does each of them take?"),
        ("never frees", "A backward lets go of what its forward has kept."),
        ("after backwards", "Look after each forward as well."),
        ("end", "This is what is left at the end of the row."),
        ("first backward", "This is what is kept before the first backward."),
        ("stage 0", "with the bytes of stage 0"),
        ("largest of all", "with the bytes of the largest stage of all"),
        ("average", "with the average of the rank's stages"),
        ("sum", "with the bytes of all the rank's stages together"),
        ("place", "`action.stage` counts the stages of all ranks"),
    ],
)
def test_wrong_bytes(mistake: str, said: str):
    verdict = check_most_bytes(most_bytes(mistake))
    assert verdict.passed is False and said in verdict.text, verdict


def test_bytes_that_are_none():
    assert check_most_bytes(lambda row, stage_bytes: ...).passed is None
    assert "ZeroDivisionError" in check_most_bytes(lambda row, stage_bytes: 1 / 0).text
    assert "return one number of bytes per row" in check_most_bytes(lambda row, stage_bytes: [1, 2]).text
    assert "The stages keep" in check_most_bytes(lambda row, stage_bytes: 7).text


def test_a_cause_is_named_only_if_all_cases_agree():
    def largest_on_two_ranks(row, stage_bytes):
        return most_bytes("largest" if len(row) == 16 else "end")(row, stage_bytes)

    assert "The stages keep" in check_most_bytes(largest_on_two_ranks).text
