"""Lab 27's exercises: solutions pass, and the mistakes that people make get their hints."""

import numpy as np
import pytest

import tplab.torch as tt
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


@pytest.mark.parametrize("fn", [solution, divided_first, twice_mean])
def test_averages_that_are_right(fn):
    assert check_average(fn).passed, check_average(fn)


@pytest.mark.parametrize(
    "fn, words",
    [
        (lambda r, e: (router(r), tt.all_reduce(e, "dp", "mean")), "each of these ranks' losses is a mean"),
        (lambda r, e: (router(r), tt.all_reduce(e, BOTH, "mean")), "ranks that hold different experts"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp")), "added up over their copies, and not divided"),
        (lambda r, e: (router(r), tt.all_reduce(e, "dp", "mean") / tt.axis_size(BOTH)), "once too often"),
        (lambda r, e: (router(r), e / tt.axis_size(BOTH)), "Add up their gradients before you divide"),
        (lambda r, e: (router(r), tt.all_reduce(e, "ep", "mean")), "those along ep"),
        (lambda r, e: (tt.all_reduce(r, "dp", "mean"), solution(r, e)[1]), "the whole router"),
        (lambda r, e: (tt.all_reduce(r, BOTH), solution(r, e)[1]), "router's gradients are added up"),
        (lambda r, e: (r, solution(r, e)[1]), "belongs to all ranks"),
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


def in_place(choices, ranks, experts):
    choices //= experts // ranks
    return rows_sent(choices, ranks, ranks)


@pytest.mark.parametrize(
    "fn, words",
    [
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
