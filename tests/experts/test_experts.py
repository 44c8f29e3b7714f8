"""Routing, placement, folding and traffic of experts, in plain NumPy."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab import Mesh
from tplab.errors import MeshError, ShapeError
from tplab.experts import (
    Placement,
    Routing,
    balanced,
    contiguous,
    expected_copies,
    fold,
    rows_between,
    tokens_between,
)

# --- routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers, words",
    [
        ({"experts": 8, "top_k": 9}, "through 9 of 8 experts"),
        ({"experts": 8, "top_k": 0}, "through 0 of 8 experts"),
        ({"experts": 8, "top_k": 2, "groups": 3}, "3 equal groups"),
        ({"experts": 8, "top_k": 2, "groups": 4, "top_groups": 5}, "top_groups=5 of groups=4"),
        ({"experts": 8, "top_k": 3, "groups": 4, "top_groups": 1}, "have only 2"),
        ({"experts": 8, "top_k": 3, "capacity": 0}, "leaves no expert room"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(numbers, words):
    with pytest.raises(ShapeError, match=words):
        Routing(**numbers)


def test_the_room_of_an_expert_is_its_equal_share_times_the_capacity():
    assert Routing(8, 2, capacity=1.0).room(20) == 5
    assert Routing(8, 2, capacity=1.25).room(20) == 7  # 6.25, and no part of a token
    assert Routing(8, 2, capacity=100.0).room(20) == Routing(8, 2).room(20) == 20


def test_choices_that_are_none():
    one = contiguous(5, 1)
    assert rows_between([[0, 2], [2, -1], [-1, -1]], one).tolist() == [[3]]
    with pytest.raises(ShapeError, match="expert 5; there are experts 0 to 4"):
        rows_between([[0, 5]], one)
    with pytest.raises(ShapeError, match="whole numbers"):
        rows_between([[0.5, 1.0]], one)


# --- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "measured, printed",
    [
        (
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        ),
        (
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        ),
    ],
)
def test_the_placement_that_eplb_prints(measured, printed):
    """The example of its README: github.com/deepseek-ai/EPLB d52c72d, MIT."""
    found = balanced(measured, 8, slots=16, groups=4, nodes=2)
    assert [expert for rank in found.slots for expert in rank] == printed


@given(st.data())
def test_a_balanced_placement_holds_every_expert_and_none_twice_on_a_rank(data):
    nodes, per_node = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    groups, size = nodes * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    experts, ranks = groups * size, nodes * per_node
    most = experts * per_node  # each expert on every rank of its node
    slots = data.draw(st.integers(-(-experts // ranks), most // ranks)) * ranks
    measured = data.draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts))
    found = balanced(measured, ranks, slots=slots, groups=groups, nodes=nodes)
    assert found.ranks == ranks and found.experts == experts
    assert all(len(set(rank)) == len(rank) == slots // ranks for rank in found.slots)
    assert found.load_of_ranks(measured).sum() == pytest.approx(sum(measured))
    for holders in found.holders:  # an expert stays in one node
        assert len({rank // per_node for rank in holders}) == 1


def test_balance_is_better_than_neighbours():
    measured = np.random.default_rng(0).zipf(1.5, 64).clip(max=500)
    plain, better = contiguous(64, 8), balanced(measured, 8, slots=80)
    assert better.load_of_ranks(measured).max() < 0.6 * plain.load_of_ranks(measured).max()


def test_placements_that_cannot_be():
    with pytest.raises(ShapeError, match="rank 1 holds expert 2 twice"):
        Placement(((0, 1), (2, 2)))
    with pytest.raises(ShapeError, match="no rank holds expert 1"):
        Placement(((0,), (2,)))
    with pytest.raises(ShapeError, match=r"ranks hold \[2, 1\] experts"):
        Placement(((0, 1), (2,)))
    with pytest.raises(ShapeError, match="at most 8 slots per node"):
        balanced([1.0] * 4, 2, slots=10)
    with pytest.raises(ShapeError, match="as many slots at least"):
        balanced([1.0] * 4, 2, slots=2)


def test_replicas_share_the_tokens_of_an_expert():
    placement = Placement(((0, 1), (0, 2)))
    assert placement.rank_of(np.array([[0], [0], [1], [-1], [0]])).tolist() == [[0], [1], [0], [-1], [0]]
    assert placement.load_of_ranks([10, 3, 4]).tolist() == [8, 9]


# --- folding ----------------------------------------------------------------------------------------------------------


def test_a_mesh_of_two_layouts():
    folded = fold({"dp": 4, "tp": 2}, {"edp": 2, "ep": 4})
    assert folded.mesh == Mesh(edp=2, dp_ep=2, tp=2)
    assert folded.attention == {"dp": ("edp", "dp_ep"), "tp": "tp"}
    assert folded.experts == {"edp": "edp", "ep": ("dp_ep", "tp")}


def test_layouts_that_share_axes_keep_their_names():
    folded = fold({"pp": 2, "dp": 2, "cp": 1, "tp": 2}, {"pp": 2, "ep": 4, "etp": 1})
    assert folded.mesh == Mesh(pp=2, dp=2, tp=2, cp=1, etp=1)
    assert folded.experts == {"pp": "pp", "ep": ("dp", "tp"), "etp": "etp"}


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(SIZES, SIZES)
def test_every_group_of_both_layouts_is_a_group_of_the_mesh(first, second):
    layouts = [{f"{kind}{i}": size for i, size in enumerate(sizes)} for kind, sizes in (("a", first), ("e", second))]
    if math.prod(first) != math.prod(second):
        with pytest.raises(MeshError, match="over the same ranks"):
            fold(*layouts)
        return
    ends = sorted({math.prod(sizes[i:]) for sizes in (first, second) for i in range(len(sizes) + 1)})
    if any(upper % lower for lower, upper in pairwise(ends)):
        with pytest.raises(MeshError, match="does not divide"):
            fold(*layouts)
        return
    folded = fold(*layouts)
    assert folded.mesh.size == math.prod(first)
    for layout, found in zip(layouts, (folded.attention, folded.experts)):
        for name in layout:
            assert Mesh(**layout).groups(name) == folded.mesh.groups(found[name])


# --- traffic ----------------------------------------------------------------------------------------------------------


def test_rows_of_a_table_by_hand():
    """4 tokens, 4 experts, 2 ranks: tokens 0, 1 and experts 0, 1 on rank 0."""
    choices = [[0, 1], [1, 2], [2, 3], [0, -1]]
    assert rows_between(choices, contiguous(4, 2)).tolist() == [[3, 1], [1, 2]]
    assert rows_between(choices, contiguous(4, 2), once=True).tolist() == [[2, 1], [1, 1]]
    assert tokens_between(choices, contiguous(4, 2), nodes=1).tolist() == [[4]]


def test_published_numbers_of_ranks_that_a_token_reaches():
    """256 experts, top 8: combinatorics, to four digits."""
    reached = [expected_copies(Routing(256, 8), ranks) for ranks in (8, 16, 32, 64, 4)]
    assert reached == pytest.approx([5.295, 6.523, 7.267, 7.676, 3.614], abs=5e-4)


@pytest.mark.parametrize("places", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("rule", [Routing(12, 2), Routing(12, 2, groups=6, top_groups=2)])
def test_expected_copies_are_the_mean_over_all_routings(rule, places):
    each = 12 // places
    if rule.groups > 1 and each % rule.group_size and rule.group_size % each:
        with pytest.raises(ShapeError, match="whole groups, or equal parts"):
            expected_copies(rule, places)
        return
    counts = [
        len({expert // each for expert in chosen})
        for groups in combinations(range(rule.groups), rule.top_groups)
        for chosen in combinations([e for e in range(12) if e // rule.group_size in groups], 2)
    ]
    assert expected_copies(rule, places) == pytest.approx(np.mean(counts))


def test_copies_of_deepseeks_routing_are_what_random_tables_have():
    """256 experts, 8 of them from 4 of 8 groups, a group on each of 8 nodes of 8 ranks."""
    rule, rng, tokens = Routing(256, 8, groups=8, top_groups=4), np.random.default_rng(0), 8192
    groups = np.argsort(rng.random((tokens, 8)), 1)[:, :4]
    at = np.argsort(rng.random((tokens, 128)), 1)[:, :8]
    choices = np.take_along_axis(groups, at // 32, 1) * 32 + at % 32
    placement = contiguous(256, 64)
    nodes, ranks = tokens_between(choices, placement, 8), rows_between(choices, placement, once=True)
    # The standard deviation of these means is 0.005 and 0.007.
    assert nodes.sum() / tokens == pytest.approx(expected_copies(rule, 8), abs=0.03)
    assert ranks.sum() / tokens == pytest.approx(expected_copies(rule, 64), abs=0.03)
    assert (nodes.sum() - nodes.trace()) / tokens == pytest.approx(expected_copies(rule, 8) * 7 / 8, abs=0.03)
    assert (
        tokens_between(choices, placement, 8) <= rows_between(choices, placement).reshape(8, 8, 8, 8).sum((1, 3))
    ).all()
