"""Buckets hold every gradient once, in the order of a backward pass."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab.data.gradients import Gradient, buckets_of

GRADIENTS = st.lists(st.builds(Gradient, st.integers(0, 9), st.just(4), st.sampled_from(["float32", "bfloat16"])))
LIMITS = st.one_of(st.none(), st.integers(0, 80), st.just(float("inf")))


@given(GRADIENTS, LIMITS)
def test_every_gradient_is_in_one_bucket(gradients, limit):
    buckets = buckets_of(gradients, limit)
    assert sorted(index for bucket in buckets for index in bucket.indices) == list(range(len(gradients)))
    for bucket in buckets:
        begin = 0
        for piece in bucket.pieces:  # one behind the other, with nothing between
            assert (piece.begin, piece.size) == (begin, gradients[piece.index].size)
            assert gradients[piece.index].kind == bucket.kind
            begin += piece.size
        assert bucket.size == begin


@given(GRADIENTS, LIMITS)
def test_buckets_leave_in_the_order_of_the_backward_pass(gradients, limit):
    buckets = buckets_of(gradients, limit)
    last = [bucket.indices[-1] for bucket in buckets]
    assert last == sorted(last, reverse=True)
    assert all(list(bucket.indices) == sorted(bucket.indices, reverse=True) for bucket in buckets)


@given(GRADIENTS, st.integers(0, 80))
def test_a_bucket_is_full_where_the_next_gradient_does_not_fit(gradients, limit):
    by_kind: dict = {}
    for bucket in buckets_of(gradients, limit):
        sizes = [gradients[index].num_bytes for index in bucket.indices]
        assert sum(sizes) <= limit or len(sizes) == 1
        by_kind.setdefault(bucket.kind, []).append(sizes)
    for buckets in by_kind.values():
        for sizes, following in pairwise(buckets):
            assert sum(sizes) + following[0] > limit


@given(GRADIENTS)
def test_without_a_limit_there_is_a_bucket_per_gradient_or_per_kind(gradients):
    assert [bucket.indices for bucket in buckets_of(gradients)] == [(i,) for i in reversed(range(len(gradients)))]
    assert len(buckets_of(gradients, float("inf"))) == len({gradient.kind for gradient in gradients})


def test_the_example_of_the_docstring():
    gradients = [Gradient(size, 4, "float32") for size in (2, 2, 1, 1, 1, 1)]
    assert [bucket.indices for bucket in buckets_of(gradients, 12)] == [(5, 4, 3), (2, 1), (0,)]


@pytest.mark.parametrize("wrong", [-1, float("nan"), "25 MB"])
def test_an_impossible_size_is_refused(wrong):
    with pytest.raises(ValueError, match=r"bucket_bytes is .*the most bytes that a bucket holds"):
        buckets_of([], wrong)
