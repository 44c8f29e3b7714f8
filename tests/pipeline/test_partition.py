"""Partition: no partition is better, for every placement and under memory limits; the figures that were published."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab.errors import ShapeError
from tplab.pipeline.partition import Partition, partition
from tplab.schedules import linear, two_way, v_shape, wave, wrapped

PLACEMENTS = [linear(1), linear(2), linear(3), linear(4), wrapped(2, 2), wrapped(3, 2), wrapped(2, 3), wrapped(1, 2)]
PLACEMENTS += [v_shape(1), v_shape(2), v_shape(3), wave(2, 3)]


def best(costs, placement, memory=None, limits=None):
    """The least largest share, by looking at every partition there is; None where none fits."""
    stages, found = sum(map(len, placement)), []
    for inner in combinations(range(1, len(costs)), stages - 1):
        pieces = list(pairwise((0, *inner, len(costs))))

        def shares(amounts, pieces=pieces):
            return [sum(sum(amounts[slice(*pieces[stage])]) for stage in held) for held in placement]

        if (
            memory is None
            or limits is None
            or all(shares(memory[rank])[rank] <= limits[rank] for rank in range(len(placement)))
        ):
            found.append(max(shares(costs)))
    return min(found, default=None)


@given(placement=st.sampled_from(PLACEMENTS), costs=st.lists(st.integers(0, 9), min_size=6, max_size=10))
def test_nothing_is_better(placement, costs):
    made = partition(costs, sum(map(len, placement)), placement=placement)
    assert made.largest == best(costs, placement)
    assert made.bounds[0] == 0
    assert made.bounds[-1] == len(costs)
    assert all(a < b for a, b in pairwise(made.bounds))


@given(
    placement=st.sampled_from(PLACEMENTS),
    layers=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 5)), min_size=6, max_size=9),
    limit=st.integers(3, 25),
)
def test_nothing_is_better_under_a_memory_limit(placement, layers, limit):
    costs = [layer[0] for layer in layers]
    # the first ranks keep more activations: what a layer takes depends on where it is
    memory = [[layer[1] + (len(placement) - rank) * layer[2] for layer in layers] for rank in range(len(placement))]
    limits = [limit + rank for rank in range(len(placement))]
    wanted = best(costs, placement, memory, limits)
    parts = sum(map(len, placement))
    if wanted is None:
        with pytest.raises(ShapeError, match="take more ranks or allow more"):
            partition(costs, parts, placement=placement, memory=memory, memory_limit=limits)
    else:
        made = partition(costs, parts, placement=placement, memory=memory, memory_limit=limits)
        assert made.largest == wanted
        for rank, held in enumerate(placement):
            assert sum(sum(memory[rank][layer] for layer in made.stages[stage]) for stage in held) <= limits[rank]


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=9))
def test_measured_times_need_not_be_whole(times):
    made = partition([1] * len(times), 4, times)
    assert made.largest == pytest.approx(best(times, linear(4)), rel=1e-12)


def test_the_counterexample_to_min_of_max_minus_min():
    made = partition([1, 4, 2, 2, 2], 4)
    assert made.largest == 4
    assert made.stage_costs == [1, 4, 2, 4]


def test_the_most_even_of_the_best():
    assert partition([1] * 10, 4).stage_costs == [2, 2, 3, 3]
    assert partition([7, 1, 1, 1, 1, 1, 1], 3).stage_costs == [7, 3, 3]


@pytest.mark.parametrize(
    "ends, placement, largest",
    [((1, 1), wrapped(1, 16), 7 * 28 + 2), ((2, 3), wrapped(4, 4), 7 * 8 + 3), ((2, 3), wave(4, 3), 7 * 8 + 3)],
    ids=["one rank", "four stages per rank", "a wave"],
)
def test_many_layers_alike(ends, placement, largest):
    """Blocks between an embedding and a head: 28 on one rank; 32 on four, of which each has eight."""
    costs = [ends[0], *[7] * (28 if len(placement) == 1 else 32), ends[1]]
    made = partition(costs, sum(map(len, placement)), placement=placement)
    assert made.largest == largest


def test_one_rank_cuts_evenly_within_its_memory():
    assert partition([9, 1, 1, 1, 1, 1, 1], 3, placement=wrapped(1, 3)).bounds == (0, 2, 4, 7)
    with pytest.raises(ShapeError, match=r"no partition into 3 stages keeps every rank within its memory of 14;"):
        partition([9, 1, 1, 1, 1, 1, 1], 3, placement=wrapped(1, 3), memory_limit=14)


BLOCK, WIDTH, VOCABULARY = 7_085_568, 768, 65
GPT_LITE = [0, *[BLOCK] * 12, 2 * WIDTH, WIDTH * VOCABULARY, 0]  # 16 layers; the embeddings, in a lambda, count 0


def test_the_printed_partition_of_gpt_lite():
    made = partition(GPT_LITE, 4)
    assert [(layers.start, layers.stop) for layers in made.stages] == [(0, 4), (4, 7), (7, 10), (10, 16)]
    assert made.stage_weights == [21_256_704] * 3 + [21_308_160]
    assert (
        str(made)
        == """\
stage 0  rank 0  layers [0, 4)      21,256,704 parameters
stage 1  rank 1  layers [4, 7)      21,256,704 parameters
stage 2  rank 2  layers [7, 10)     21,256,704 parameters
stage 3  rank 3  layers [10, 16)    21,308,160 parameters"""
    )


def test_its_embeddings_make_the_first_stage_the_largest():
    embeddings = (VOCABULARY + 200) * WIDTH
    counted = partition([embeddings, *GPT_LITE[1:]], 4)
    assert counted.bounds == (0, 4, 7, 10, 16)
    assert counted.stage_weights.index(counted.largest) == 0
    assert counted.largest - counted.stage_weights[1] == embeddings


def test_methods():
    names = ["Embedding", *["Block", "Norm"] * 4, "Head"]
    weights = [100, *[10, 1] * 4, 50]
    assert partition(weights, 2).bounds == (0, 1, 10)
    uniform = partition(weights, 2, "uniform")
    assert uniform.bounds == (0, 5, 10)
    blocks = partition(weights, 2, "type:block", names=names)
    assert blocks.stage_costs == [2, 2]
    assert str(blocks).splitlines()[0].endswith("121 parameters  block 2  Embedding to Block")
    measured = partition(weights, 2, [0, 0, 0, 0, 0, 0, 0, 0, 1.5, 1.5])
    assert measured.bounds == (0, 9, 10)
    assert (measured.stage_of(8), measured.stage_of(9)) == (0, 1)
    assert isinstance(measured, Partition)


def test_a_rank_with_two_stages_counts_both():
    weights = [50, *[7] * 14, 38]
    folded, looped = partition(weights, 8, placement=v_shape(4)), partition(weights, 8, placement=wrapped(4, 2))
    assert folded.rank_costs[0] >= 88  # on the V the first rank has the embedding and the head
    assert looped.largest < folded.largest
    assert sum(folded.rank_costs) == sum(looped.rank_costs) == sum(weights)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (([1, 2], 3), "at most 2"),
        (([1, 2, 3], 2, "weight"), "'uniform', 'type:regex'"),
        (([1, 2, 3], 2, "type:Block"), "pass names="),
        (([1, 2, 3], 2, [1.0, 2.0]), "2 measured costs for 3 layers"),
        (([1, -2, 3], 2), "finite, 0 or more"),
    ],
)
def test_what_cannot_be_partitioned_says_why(arguments, words):
    with pytest.raises(ShapeError, match=words):
        partition(*arguments)


def test_bad_options_say_why():
    with pytest.raises(ShapeError, match="the names are A, B"):
        partition([1, 2], 2, "type:C", names=["A", "B"])
    with pytest.raises(ShapeError, match="1 names for 2 layers"):
        partition([1, 2], 2, names=["A"])
    with pytest.raises(ShapeError, match="4 stages and parts is 2"):
        partition([1, 2, 3, 4], 2, placement=v_shape(2))
    with pytest.raises(ShapeError, match="linear, wrapped, V or wave"):
        partition([1, 2, 3, 4], 4, placement=two_way(2))
    with pytest.raises(ShapeError, match="memory has shape"):
        partition([1, 2], 2, memory=[1], memory_limit=1)
