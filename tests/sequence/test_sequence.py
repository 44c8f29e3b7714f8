"""Tokens over ranks: positions, masks, tiles, loads and bytes, against brute force and the figures others found."""

from itertools import product

import numpy as np
import pytest

from tests.sequence.counted import kept_bytes, next_tokens
from tplab.errors import ShapeError
from tplab.sequence import (
    LAYOUTS,
    AttentionMask,
    TokenLayout,
    attention_bytes,
    efficiency,
    load,
    tiles_of,
    tokens_to_hide_hop,
)

CAUSAL = AttentionMask()
MASKS = [
    CAUSAL,
    AttentionMask(causal=False),
    AttentionMask(window=5),
    AttentionMask(causal=False, window=3),
    AttentionMask(documents=(5, 1, 12, 6)),
    AttentionMask(causal=False, documents=(17, 7)),
    AttentionMask(window=2, documents=(10, 14)),
]


def allowed(mask, size):
    """Written out, one score after the other: [S, S]."""
    document = np.repeat(range(len(mask.documents or [size])), mask.documents or [size])
    return np.array(
        [
            [
                (j <= i or not mask.causal)
                and (mask.window is None or abs(i - j) < mask.window)
                and document[i] == document[j]
                for j in range(size)
            ]
            for i in range(size)
        ]
    )


# ------------------------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("name", "picture"),
    [
        ("contiguous", "rank 0   0 1 2 3\nrank 1   4 5 6 7"),
        ("zigzag", "rank 0   0 1 6 7\nrank 1   2 3 4 5"),
        ("striped", "rank 0   0 2 4 6\nrank 1   1 3 5 7"),
    ],
)
def test_layouts_by_hand(name, picture):
    assert str(TokenLayout(name, 8, 2)) == picture


@pytest.mark.parametrize(("name", "num_ranks"), [*product(LAYOUTS, [1, 2, 3, 4, 8])])
def test_what_is_arranged_is_restored(name, num_ranks):
    layout = TokenLayout(name, 48, num_ranks)
    ids = np.random.default_rng(0).integers(0, 99, (2, 48, 3))
    arranged = layout.arrange(ids, 1)
    for rank, piece in enumerate(np.split(arranged, num_ranks, 1)):
        assert (piece == ids[:, layout.positions[rank]]).all()
    assert (layout.restore(arranged, -2) == ids).all()
    assert (np.diff(layout.positions) > 0).all()


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("contiguous", 10, "the number of tokens is 10, which 4 ranks cannot share equally;\npad it to 12"),
        ("striped", 10, "the number of tokens is 10, which 4 ranks cannot share equally;\npad it to 12"),
        ("zigzag", 12, r"is 12, which 8 pieces \(two for each rank\) cannot share equally;\npad it to 16"),
    ],
)
def test_tokens_that_ranks_cannot_share(name, tokens, message):
    with pytest.raises(ShapeError, match=message):
        TokenLayout(name, tokens, 4)
    with pytest.raises(ValueError, match="layout is 'zigzug'; it must be one of contiguous, zigzag, striped"):
        TokenLayout("zigzug", 8, 2)  # type: ignore
    with pytest.raises(ShapeError, match=r"dim 1 of \[3, 4\] is not a sequence of 8 tokens"):
        TokenLayout(name, 8, 1).arrange(np.zeros((3, 4)))


def test_labels_are_those_of_the_whole_sequence():
    ids = np.arange(10, 18)[None]
    assert next_tokens(ids).tolist() == [[11, 12, 13, 14, 15, 16, 17, -100]]
    assert next_tokens(ids, (3, 5)).tolist() == [[11, 12, -100, 14, 15, 16, 17, -100]]
    layout = TokenLayout("zigzag", 8, 2)
    assert layout.arrange(next_tokens(ids)).tolist() == [[11, 12, 17, -100, 13, 14, 15, 16]]


# -------------------------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize(("name", "num_ranks", "mask"), [*product(LAYOUTS, [1, 2, 3, 4], MASKS)])
def test_every_score_is_in_one_tile_of_its_kind(name, num_ranks, mask):
    """What tiles say, put together on S x S, is the mask; in each group of ranks that exchange heads too."""
    layout, want = TokenLayout(name, 24, num_ranks), allowed(mask, 24)
    for group in (1, num_ranks):
        held, got = layout.shared_positions(group), np.zeros((24, 24), int)
        for rank, row in enumerate(tiles_of(layout, mask, group)):
            for step, tile in enumerate(row):
                assert tile.source == (rank - step) % len(held)
                queries, keys = held[rank][tile.queries], held[tile.source][tile.keys]
                inside = _inside(tile)
                got[np.ix_(queries, keys)] += inside
                assert tile.entries == inside.sum() == want[np.ix_(held[rank], held[tile.source])].sum()
        assert (got == want).all()


def _inside(tile):
    """[rows, columns] of the box: by its kind where that says it, else by its columns."""
    shape = len(tile.begins), tile.keys.stop - tile.keys.start
    if tile.kind in ("full", "skipped"):
        return np.ones(shape, bool)
    if tile.kind == "causal":
        return np.tri(*shape, dtype=bool)
    columns = np.arange(shape[1])
    return (columns >= tile.begins[:, None]) & (columns < tile.ends[:, None])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_causal_mask_needs_no_mask(name):
    """Every tile is skipped, full, or a triangle, which kernels compute without a mask; most are smaller than n x n."""
    rows = tiles_of(TokenLayout(name, 64, 4), CAUSAL)
    assert {tile.kind for row in rows for tile in row} <= {"skipped", "full", "causal"}
    if name == "zigzag":
        assert {(t.queries.stop - t.queries.start, t.keys.stop - t.keys.start) for row in rows for t in row[1:]} == {
            (16, 8),  # the keys of an earlier rank: all queries see its first piece
            (8, 16),  # the keys of a later rank: the second piece sees all of them
        }


@pytest.mark.parametrize(("num_ranks", "share"), [(2, 66.7), (4, 57.1), (8, 53.3), (16, 51.6)])
def test_a_contiguous_causal_ring_is_half_idle(num_ranks, share):
    layout = TokenLayout("contiguous", 4096 * num_ranks, num_ranks)
    assert 100 * efficiency(layout, CAUSAL) == pytest.approx(share, abs=0.05)
    assert efficiency(TokenLayout("zigzag", 64 * num_ranks, num_ranks), CAUSAL) == 1
    assert efficiency(layout, AttentionMask(causal=False)) == 1


def test_stripes_are_a_diagonal_apart():
    striped = TokenLayout("striped", 256, 8)
    assert efficiency(striped, CAUSAL) == pytest.approx((32 + 1 / 8) / 33)
    assert f"{efficiency(striped, CAUSAL):.2%}" == "97.35%"
    assert set(load(striped, CAUSAL).flat) == {32 * 33 // 2, 32 * 31 // 2}


def test_a_window_leaves_little_to_do():
    """Of a contiguous ring with a window of n tokens, each rank has its own tile and that of the rank before it."""
    scores = load(TokenLayout("contiguous", 64, 4), AttentionMask(window=16))
    assert (scores > 0).tolist() == [[True, False, False, False]] + [[True, True, False, False]] * 3


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": 2.5}, "window is 2.5; give a whole number"),
        ({"window": True}, "window is True; give a whole number"),
        ({"documents": (4.0, 4.0)}, r"documents are \(4.0, 4.0\); give their lengths in tokens"),
        ({"documents": None}, "documents are None; give their lengths in tokens"),
        ({"documents": (3, 0)}, "each must be 1 or more"),
        ({"documents": (3, 4)}, r"documents \(3, 4\) have 7 tokens, and the sequence has 8"),
    ],
)
def test_masks_that_cannot_be(about, message):
    with pytest.raises(ShapeError, match=message):
        load(TokenLayout("contiguous", 8, 2), AttentionMask(**about))


def test_positions_begin_again_with_each_document():
    mask = AttentionMask(documents=(3, 5))
    assert mask.in_document(np.array([0, 2, 3, 7]), 8).tolist() == [0, 2, 0, 4]


# -------------------------------------------------------------------------------------------------------------- bytes

LLAMA = {"num_tokens": 8192, "num_ranks": 8, "num_heads": 32, "num_kv_heads": 8, "head_width": 128}


def test_bytes_of_an_attention_of_llama():
    assert attention_bytes("ring", **LLAMA) == (29_360_128, 96_468_992)
    assert attention_bytes("gather", **LLAMA) == (29_360_128, 58_720_256)
    assert attention_bytes("head", **LLAMA) == (18_350_080, 18_350_080)
    assert attention_bytes("head_ring", **LLAMA, head_ranks=2).forward == 23_068_672
    assert attention_bytes("head_ring", **LLAMA, head_ranks=4).forward == 19_922_944


def test_both_at_once_lie_between_the_two():
    assert attention_bytes("head_ring", **LLAMA, head_ranks=1) == attention_bytes("ring", **LLAMA)
    assert attention_bytes("head_ring", **LLAMA, head_ranks=8) == attention_bytes("head", **LLAMA)
    assert attention_bytes("ring", **LLAMA | {"num_ranks": 1}) == (0, 0)


@pytest.mark.parametrize(("name", "num_ranks"), [*product(LAYOUTS, [2, 4, 8])])
def test_ranks_that_exchange_heads_order_their_tokens_alike(name, num_ranks):
    """So one order serves every group of neighbours, and one program all ranks."""
    layout = TokenLayout(name, 48, num_ranks)
    for group in (2, num_ranks):
        held = layout.positions.reshape(num_ranks // group, -1)
        assert (held[:, layout.exchanged(group)] == layout.shared_positions(group)).all()


def test_heads_that_ranks_cannot_share():
    with pytest.raises(ShapeError, match="num_kv_heads is 8, which 16 ranks that exchange heads cannot share"):
        attention_bytes("head", **LLAMA | {"num_ranks": 16})
    with pytest.raises(ShapeError, match="the number of ranks is 8, which 3 ranks that exchange heads"):
        attention_bytes("head_ring", **LLAMA, head_ranks=3)


def test_bytes_kept():
    """q and o, k and v, in bf16; one float32 for each query and head."""
    assert kept_bytes(**LLAMA) == 1024 * (2 * 32 * 128 * 2 + 2 * 8 * 128 * 2 + 32 * 4)


@pytest.mark.parametrize(
    ("kv_heads", "bandwidth", "tokens"), [(8, 450e9, 1099), (8, 50e9, 9890), (32, 450e9, 4396), (32, 50e9, 39560)]
)
def test_tokens_that_hide_a_hop(kv_heads, bandwidth, tokens):
    """H100, on NVLink and over one card of 400 Gb/s; backward, gradients in float32 take 1.2 times as many."""
    assert tokens_to_hide_hop(989e12, bandwidth, 32, kv_heads) == tokens
    assert tokens_to_hide_hop(989e12, bandwidth, 32, kv_heads, backward=True) == pytest.approx(1.2 * tokens, abs=1)
    assert tokens_to_hide_hop(989e12, bandwidth, 32, kv_heads, computed=1) == pytest.approx(tokens / 2, abs=1)
