"""The exercises of labs 22 and 23: solutions pass, and the mistakes that people make get their hints."""

from typing import Any

import numpy as np
import pytest
import torch

import tplab.torch as tt
from labs.source import build
from tplab.exercises.balance_of_experts import check_choose, check_update
from tplab.exercises.experts import check_average, check_rows_sent

BOTH = ("dp", "ep")


def router(gradient):
    return tt.all_reduce(gradient, BOTH, "mean")


def solution(r, e):
    return router(r), tt.all_reduce(e, "dp") / (tt.axis_size("dp") * tt.axis_size("ep"))


def divided_first(r, e):
    return router(r), tt.all_reduce(e / tt.axis_size(BOTH), "dp")


def twice_mean(r, e):
    return router(r), tt.all_reduce(e, "dp", "mean") / tt.axis_size("ep")


def gathered(e):
    """The experts of all ranks come to every rank, which keeps its own."""
    every = tt.all_gather(e[None], BOTH).reshape(tt.axis_size("dp"), tt.axis_size("ep"), *e.shape)
    return every[:, tt.axis_index("ep")].sum(0) / tt.axis_size(BOTH)


@pytest.mark.parametrize("fn", [solution, divided_first, twice_mean])
def test_averages_that_are_right(fn):
    assert check_average(fn).passed, check_average(fn)


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda r, e: (router(r), tt.all_reduce(e, "dp", "mean")), "each of these ranks' losses is a mean"),
        (lambda r, e: (router(r), tt.all_reduce(e, BOTH, "mean")), "ranks that hold different experts"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp", "mean") * tt.axis_size("ep")), "Divide it by them"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp")), "added up over their copies, and not divided"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp", "mean") / tt.axis_size(BOTH)), "once too often"),
        (lambda r, e: (router(r), e / tt.axis_size(BOTH)), "Add up their gradients before you divide"),
        (lambda r, e: (router(r), tt.all_reduce(e, "ep", "mean")), "those along ep"),
        (lambda r, e: (tt.all_reduce(r, "dp", "mean"), solution(r, e)[1]), "the whole router"),
        (lambda r, e: (tt.all_reduce(r, BOTH), solution(r, e)[1]), "router's gradients are added up"),
        (lambda r, e: (r, solution(r, e)[1]), "belongs to all ranks"),
        (lambda r, e: (router(r) / tt.axis_size("ep"), solution(r, e)[1]), "once more"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp", "mean") / tt.axis_size("dp")), "along dp twice"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp", "mean") / (2 * tt.axis_size("ep"))), "entries are off"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp", "mean") / 2), "How many ranks share the experts here?"),
        (lambda r, e: (router(r), gathered(e)), "the numbers are right, but on Mesh(dp=3, ep=2) it sends"),
        (lambda r, e: (tt.all_gather(r[None], BOTH).mean(0), solution(r, e)[1]), "the numbers are right, but"),
    ],
)
def test_averages_that_are_wrong(fn, words):
    verdict = check_average(fn)
    assert not verdict.passed and words in verdict.text, verdict


def rows_sent(choices, ranks, experts):
    each, here = len(choices) // ranks, experts // ranks
    found = [0] * ranks
    for token, chosen in enumerate(choices):
        found[token // each] += len({int(expert) // here for expert in chosen} - {token // each})
    return found


def by_arrays(choices, ranks, experts):
    goes = (choices[:, None] // (experts // ranks) == np.arange(ranks)[None, :, None]).any(2)
    goes = goes.reshape(ranks, -1, ranks).sum(1)
    return goes.sum(1) - goes.diagonal()


@pytest.mark.parametrize("fn", [rows_sent, by_arrays])
def test_counts_that_are_right(fn):
    assert check_rows_sent(fn).passed, check_rows_sent(fn)


def _of(choices, ranks, experts, once, own, arriving=False):
    each, here = len(choices) // ranks, experts // ranks
    found = [0] * ranks
    for token, chosen in enumerate(choices):
        targets = [int(expert) // here for expert in chosen]
        for target in set(targets) if once else targets:
            if own or target != token // each:
                found[target if arriving else token // each] += 1
    return found


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda c, r, e: _of(c, r, e, False, False), "sent once to a rank that has several"),
        (lambda c, r, e: _of(c, r, e, True, True), "stay where they are"),
        (lambda c, r, e: _of(c, r, e, True, False, True), "arrive at each rank"),
        (lambda c, r, e: _of(c, r, e, False, True), "including those of experts on the token's own rank"),
        (lambda c, r, e: _of(c, r, int(c.max()) + 1, True, False), "is wrong for 6 tokens"),
        (lambda c, r, e: (x for x in range(r)), "a list, an array or a tensor of 2 numbers"),
        (lambda c, r, e: 3, "one number for each of the 2 ranks"),
        (lambda c, r, e: [c[0, 0].item()] * r, "is wrong for 4 tokens"),
    ],
)
def test_counts_that_are_wrong(fn, words):
    verdict = check_rows_sent(fn)
    assert not verdict.passed and words in verdict.text, verdict


def test_the_librarys_own_count_is_no_answer():
    def lazy(choices, ranks, experts):
        from tplab.experts import contiguous, rows_between

        table = rows_between(choices, contiguous(experts, ranks), once=True)
        return table.sum(1) - table.diagonal()

    assert "rows_between" in check_rows_sent(lazy).text and not check_rows_sent(lazy).passed


def two_experts_per_rank(choices, ranks, experts):
    return rows_sent(choices // 2, ranks, ranks)


def two_experts_of_existing_ranks(choices, ranks, experts):
    own = np.arange(len(choices))[:, None] // (len(choices) // ranks)
    goes = [((choices // 2 == rank).any(1) & (own[:, 0] != rank)) for rank in range(ranks)]
    return np.sum(goes, 0).reshape(ranks, -1).sum(1)


def in_place(choices, ranks, experts):
    choices //= experts // ranks
    return rows_sent(choices, ranks, ranks)


def distinct_sets(choices, ranks, experts):
    """How many different sets of destinations the tokens of each rank have."""
    of = np.split(choices // (experts // ranks), ranks)
    return [len({frozenset(token.tolist()) - {rank} for token in own} - {frozenset()}) for rank, own in enumerate(of)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda c, r, e: 2 * by_arrays(c, r, e),
        lambda c, r, e: [len(c) // r * (r - 1)] * r,
        lambda c, r, e: by_arrays(c, r, e)[::-1],
        distinct_sets,
        lambda c, r, e: [len(c)] * r,
    ],
)
def test_numbers_that_a_mistake_explains_in_one_case_only_get_no_cause(fn):
    found = check_rows_sent(fn)
    case, numbers = found.text.splitlines()
    assert not found.passed and "is wrong for" in case and "these numbers are right: [" in numbers, found


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda c, r, e: rows_sent(c[:, :1], r, e), "the first choice of each token alone"),
        (lambda c, r, e: rows_sent(c // r * (e // r), r, e), "is wrong for"),
        (lambda c, r, e: _by_token(c // r, r), "It divides by the number of ranks"),
        (lambda c, r, e: np.minimum(1, _tokens(c // (e // r), r)).reshape(r, -1).sum(1), "counts tokens that leave"),
        (lambda c, r, e: _ranks(c // (e // r), r), "It counts ranks"),
    ],
)
def test_counts_whose_mistake_explains_every_case(fn, words):
    verdict = check_rows_sent(fn)
    assert not verdict.passed and words in verdict.text, verdict


def _tokens(goes, ranks):
    own = np.arange(len(goes)) // (len(goes) // ranks)
    return np.array([len(set(token.tolist()) - {rank}) for token, rank in zip(goes, own)])


def _by_token(goes, ranks):
    return _tokens(goes, ranks).reshape(ranks, -1).sum(1)


def _ranks(goes, ranks):
    return [len(set(own.flatten().tolist()) - {rank}) for rank, own in enumerate(np.split(goes, ranks))]


@pytest.mark.parametrize(
    "fn, words",
    [
        (two_experts_of_existing_ranks, "for 4 tokens, 2 ranks and 8 experts"),
        (lambda c, r, e: [torch.rand(1), rows_sent(c, r, e)][1], "torch's global generator"),
        (lambda c, r, e: rows_sent(c % r * (e // r), r, e), "neighbouring experts share a rank"),
        (lambda c, r, e: rows_sent(np.concatenate([c[rank::r] for rank in range(r)]), r, e), "neighbouring tokens"),
        (two_experts_per_rank, "for 4 tokens, 2 ranks and 8 experts"),
        (in_place, "changes its argument `choices` in place"),
    ],
)
def test_counts_that_are_right_by_accident(fn, words):
    verdict = check_rows_sent(fn)
    assert not verdict.passed and words in verdict.text, verdict


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda r, e: (router(r), tt.all_reduce(e, "dp") / tt.axis_size("ep")), "ranks along ep alone"),
        (lambda r, e: (router(r), e / tt.axis_size("ep")), "divide by all ranks"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp") / 8), "of Mesh(dp=3, ep=2)"),
    ],
)
def test_more_averages_that_are_wrong(fn, words):
    verdict = check_average(fn)
    assert not verdict.passed and words in verdict.text, verdict


def update(bias, counts, rate):
    return bias + rate * (counts.double().mean() - counts).sign()


def by_where(bias, counts, rate):
    mean = counts.sum() / len(counts)
    return bias + rate * (counts < mean) - rate * (counts > mean)


def in_single_precision(bias, counts, rate):
    return (bias + rate * (counts.float().mean() - counts).sign()).float()


def test_without_pictures_a_refusal_says_no_shapes_of_them():
    data, _ = check_rows_sent(lambda choices, ranks, experts: [7] * ranks)._repr_mimebundle_()
    numbers = "For the choices [[0, 1], [2, 3], [2, 0], [3, 2]], these numbers are right: [1, 1]. Yours are [7, 7]."
    assert data["text/plain"] == f"<lambda> is wrong for 4 tokens, 2 ranks and 4 experts.\n{numbers}"


@pytest.mark.parametrize("fn", [update, by_where, in_single_precision])
def test_updates_that_are_right(fn):
    assert check_update(fn).passed, check_update(fn)


def _gap(counts):
    return counts.double().mean() - counts


def add_in_place(bias, counts, rate):
    bias += rate * _gap(counts).sign()
    return bias


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda b, c, r: b - r * _gap(c).sign(), "chosen more still"),
        (lambda b, c, r: b + r * _gap(c), "grows with the excess"),
        (lambda b, c, r: b + r * _gap(c) / c.double().mean(), "grows with the relative excess"),
        (lambda b, c, r: r * _gap(c).sign(), "only the change"),
        (lambda b, c, r: b + r * (c.double().median() - c).sign(), "the lower of the two in the middle"),
        (lambda b, c, r: b + r * (1 / len(c) - c).sign(), "1/E is a share"),
        (lambda b, c, r: update(b, c, r) - update(b, c, r).mean(), "Its mean may change"),
        (lambda b, c, r: b + r * (np.median(c) - c).sign(), "not with the median"),
        (lambda b, c, r: b + torch.where(_gap(c) >= 0, r, -r), "needs no change"),
        (lambda b, c, r: b + torch.where(_gap(c) > 0, r, -r), "needs no change"),
        (lambda b, c, r: b + r * (_gap(c) > 0), "must get a lower bias too"),
        (lambda b, c, r: b - r * (_gap(c) < 0), "must get a higher bias too"),
        (lambda b, c, r: b + r * (c == c.min()), "Only the expert with the smallest load"),
        (lambda b, c, r: b + _gap(c).sign(), "the length of the step"),
        (lambda b, c, r: b * (1 + r * _gap(c).sign()), "The bias is multiplied"),
        (lambda b, c, r: (b + r * _gap(c).sign()).sum(), "of shape []"),
        (add_in_place, "in place"),
        (lambda b, c, r: print(end=""), "returns None"),
        (lambda b, c, r: tt.balanced_bias(b, c, r), "`balanced_bias` does the work"),
        (lambda b, c, r: b + 0.01 * _gap(c).sign(), "is wrong for counts [4, 4, 0, 11, 1]"),
        (lambda b, c, r: b + 2 * r * _gap(c).sign(), "the length of the step"),
        (lambda b, c, r: b.clone(), "The bias has not changed"),
        (lambda b, c, r: b + r * (c.sum() // len(c) - c).sign(), "it has been rounded down"),
        (lambda b, c, r: b + r * (c.half().mean().double() - c).sign(), "is wrong for counts [4097, 4098, 4096, 4097]"),
        (lambda b, c, r: b + r * (c.half().mean().double() - c).sign(), "These numbers are right"),
        (lambda b, c, r: b + r * (c == c.min()) - r * (c == c.max()), "All others need a step too"),
        (lambda b, c, r: update(b, c, r).tolist(), "it returns a list. Return a plain tensor"),
        (lambda b, c, r: update(b, c, r).numpy(), "it returns a ndarray. Return a plain tensor"),
        (lambda b, c, r: torch.nn.Parameter(update(b, c, r)), "it returns a tensor with requires_grad"),
        (lambda b, c, r: b + (c.double().mean() - c).clamp(-r, r), "the length of the step is not `rate`"),
        (lambda b, c, r: update(b, tt.all_reduce(c, "ep"), r), "`counts` are those of all ranks already"),
        (lambda b, c, r: [torch.rand(1), update(b, c, r)][1], "torch's global generator"),
        (lambda b, c, r: b + r * (4 - c).sign(), "is wrong for counts [7, 1, 5, 40, 6, 1]"),
    ],
)
def test_updates_that_are_wrong(fn, words):
    verdict = check_update(fn)
    assert verdict.passed is False and words in verdict.text, verdict


def choose(scores, bias, k):
    choices = (scores + bias).topk(k).indices
    weights = scores.gather(1, choices)
    return choices, weights / weights.sum(1, keepdim=True)


def in_another_order(scores, bias, k):
    choices, weights = choose(scores, bias, k)
    return choices.flip(1), weights.flip(1)


def in_single_precision_too(scores, bias, k):
    choices, weights = choose(scores.float(), bias.float(), k)
    return choices.int(), weights


def in_numpy(scores, bias, k):
    choices = np.argsort(-(scores.numpy() + bias.numpy()), 1)[:, :k]
    weights = np.take_along_axis(scores.numpy(), choices, 1)
    return choices, weights / weights.sum(1, keepdims=True)


def test_the_bug_of_lab_23_is_told():
    cells = [cell.source for cell in build.read_source("23_balance_of_experts").cells]
    names: dict[str, Any] = {}
    exec(next(source for source in cells if source.startswith("def choose")), names)
    verdict = check_choose(names["choose"])
    assert verdict.passed is False and "The bias is in the weights. It only selects" in verdict.text, verdict


@pytest.mark.parametrize("fn", [choose, in_another_order, in_single_precision_too])
def test_choices_that_are_right(fn):
    assert check_choose(fn).passed, check_choose(fn)


def _weighted(weights):
    def fn(scores, bias, k):
        choices = (scores + bias).topk(k).indices
        return choices, weights(scores, bias, choices)

    return fn


def _share(x):
    return x / x.sum(1, keepdim=True)


def _chosen_by(order):
    def fn(scores, bias, k):
        choices = order(scores, bias).topk(k).indices
        return choices, _share(scores.gather(1, choices))

    return fn


@pytest.mark.parametrize(
    "fn, words",
    [
        (_chosen_by(lambda s, b: s), "by the scores alone"),
        (_chosen_by(lambda s, b: -s - b), "lowest sums"),
        (_chosen_by(lambda s, b: s - b), "subtracts the bias"),
        (_chosen_by(lambda s, b: s * b), "multiplies scores and bias"),
        (_weighted(lambda s, b, c: _share((s + b).gather(1, c))), "The bias is in the weights. It only selects"),
        (_weighted(lambda s, b, c: (s + b).gather(1, c)), "The bias is in the weights, and they do not add up"),
        (_weighted(lambda s, b, c: s.gather(1, c)), "do not add up to 1"),
        (_weighted(lambda s, b, c: _share(s).gather(1, c)), "over all experts"),
        (_weighted(lambda s, b, c: s.gather(1, c).softmax(1)), "a softmax of the chosen scores"),
        (_weighted(lambda s, b, c: torch.full(c.shape, 1 / c.shape[1])), "All weights are equal"),
        (_weighted(lambda s, b, c: _share(s.gather(1, c).sort().values)), "weights wrongly"),
        (lambda s, b, k: choose(s, b, k)[0], "Return two tensors"),
        (lambda s, b, k: choose(s, b, 1), "have shape [9, 1], and not [9, 2]"),
        (lambda s, b, k: ((s + b).topk(k).indices, _share(s.topk(k).values)), "the k highest scores"),
        (_weighted(lambda s, b, c: s.gather(1, c) / s.gather(1, c).sum(0)), "over the tokens"),
        (_weighted(lambda s, b, c: _share(s + b).gather(1, c)), "The bias is in the weights"),
        (_weighted(lambda s, b, c: (s + b).softmax(1).gather(1, c)), "The bias is in the weights"),
        (lambda s, b, k: choose(s, b, k)[::-1], "First the choices, then their weights"),
        (_chosen_by(lambda s, b: s.softmax(1) + b), "Add it to the scores themselves"),
        (_chosen_by(lambda s, b: s * (1 + b)), "multiplies the scores by 1 + bias"),
        (lambda s, b, k: (choose(s, b, k)[0], choose(s, b, k)[1].flip(1)), "in another order than the choices"),
        (in_numpy, "its choices are a ndarray"),
        (lambda s, b, k: (choose(s, b, k)[0].double(), choose(s, b, k)[1]), "its choices are torch.float64"),
        (_weighted(lambda s, b, c: _share(s.gather(1, c)).detach()), "no gradient goes through them"),
        (torch.no_grad()(lambda s, b, k: choose(s, b, k)), "no gradient goes through them"),
        (_weighted(lambda s, b, c: s.gather(1, c) / s.gather(1, c).sum(1, True).detach()), "a wrong gradient goes"),
        (_weighted(lambda s, b, c: _share((s + b - b.detach()).gather(1, c))), "a gradient reaches the bias"),
        (lambda s, b, k: [torch.rand(1), choose(s, b, k)][1], "torch's global generator"),
        (lambda s, b, k: choose(s.add_(0.1), b, k), "in place"),
    ],
)
def test_choices_that_are_wrong(fn, words):
    verdict = check_choose(fn)
    assert verdict.passed is False and words in verdict.text, verdict
