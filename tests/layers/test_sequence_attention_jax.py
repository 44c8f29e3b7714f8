"""What only JAX's attention over ranks has: one program in which ranks take different branches, and a compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import tplab.jax as tj
from tests.layers.test_sequence_attention import allowed, drawn
from tests.sequence.counted import kept_bytes
from tests.sharded import numbers
from tplab import Mesh, P
from tplab.jax.layers.attention_tile import BANDS, bands_of
from tplab.sequence import LAYOUTS, AttentionMask, Tile, TokenLayout, attention_bytes, tiles_of

RANKS, TOKENS, HEADS, KV_HEADS, WIDTH = 4, 32, 4, 2, 8
SPEC = P(None, None, "cp")


def step(layout: Any, **about: Any) -> Any:
    """The program of a rank: forward and backward."""

    def program(q: Any, k: Any, v: Any, do: Any) -> Any:
        o, gradients = jax.vjp(lambda q, k, v: tj.ring_attention(q, k, v, "cp", layout=layout, **about), q, k, v)
        return (o, *gradients(do))

    return program


def shapes(dtype: Any = jnp.float32) -> list[Any]:
    return [jax.ShapeDtypeStruct((1, heads, TOKENS, WIDTH), dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def in_bands(tile: Tile, size: int) -> int:
    """How many scores of a tile of size x size are computed: of each quarter of the rows, those from the first to the
    last quarter of the columns in which a score is needed; of a full tile, those and no others."""
    needed = np.zeros((size, size), bool)
    for row, begin, end in zip(range(size)[tile.queries], tile.begins, tile.ends, strict=True):
        needed[row, tile.keys.start + begin : tile.keys.start + end] = True
    if tile.kind == "full":
        return int(needed.sum())
    quarter = size // BANDS
    blocks = np.asarray(needed.reshape(BANDS, quarter, BANDS, quarter).any((1, 3)))
    return sum(int(np.ptp(np.flatnonzero(row)) + 1) * quarter**2 for row in blocks if row.any())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_computes_the_bands_of_its_own_tiles_and_no_others(layout):
    trace = tj.run(
        step(layout), Mesh(cp=RANKS), *shapes(), in_specs=SPEC, out_specs=SPEC, cluster="h100", keep_values=0
    ).trace
    for rank, tiles in enumerate(tiles_of(TokenLayout(layout, TOKENS, RANKS), AttentionMask())):
        scores = sum(in_bands(tile, TOKENS // RANKS) for tile in tiles)
        for phase, products in (("forward", 2), ("backward", 5)):
            events = trace.select(kind="compute", op="dot_general", rank=rank).events
            flops = sum(event.flops for event in events if event.phase == phase)
            assert flops == products * 2 * scores * HEADS * WIDTH
        square = (TOKENS // RANKS) ** 2
        own = square * (1 + 1 / BANDS) / 2  # the tile of a rank's own keys, and in striped each tile, is a triangle
        assert scores == own + {"contiguous": rank * square, "zigzag": (RANKS - 1) * square / 2,
                                "striped": (RANKS - 1) * own}[layout]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mask", [AttentionMask(), AttentionMask(window=200), AttentionMask(documents=(100, 924)), AttentionMask(False)]
)
def test_the_scores_computed_are_little_more_than_those_needed(layout, mask):
    """Under a causal mask 1 + 1/4 times as many at most (and those of a diagonal, in striped), so ranks are balanced as
    the loads say. Else each edge of what the mask leaves costs at most a quarter of the columns."""
    size = 256
    for tiles in tiles_of(TokenLayout(layout, 4 * size, 4), mask):
        for tile in tiles:
            boxes = [band.box for band in bands_of(tile, size, size, size)]
            computed = sum((box.bottom - box.top) * (box.right - box.left) for box in boxes)
            assert tile.entries <= computed <= tile.entries + size**2 / 2
            assert computed <= 1.26 * tile.entries or mask != AttentionMask()


@settings(max_examples=150, deadline=None)
@given(case=drawn((1, 8), (1, 9)))
def test_bands_have_each_score_of_a_tile_once(case):
    """And no other score is seen, whatever the mask, the layout and the ranks that exchange heads."""
    group, each = case.mesh.axis_size("heads") if case.scheme == "head_ring" else 1, case.tokens.num_tokens
    size = each // case.tokens.num_ranks * group
    for tile in (tile for row in tiles_of(case.tokens, case.mask, group) for tile in row):
        want, got = np.zeros((2, size, size), int)
        for row, begin, end in zip(range(size)[tile.queries], tile.begins, tile.ends, strict=True):
            want[row, tile.keys.start + begin : tile.keys.start + end] = 1
        for (top, bottom, left, right, is_full), begins, ends in bands_of(tile, size, size, size // group):
            assert 0 < bottom - top <= size // group
            columns = np.arange(right - left)
            seen = (begins[:, None] <= columns) & (columns < ends[:, None])
            got[top:bottom, left:right] += is_full or seen
        assert (got == want).all()


def test_a_hop_that_no_rank_needs_is_left_out_by_the_compiler():
    """In a window of 5 tokens, with 8 on each rank, nobody sees further than to the rank before it."""
    trace = tj.run(
        step("contiguous", window=5), Mesh(cp=RANKS), *shapes(), in_specs=SPEC, out_specs=SPEC, keep_values=0
    ).trace
    all_hops = attention_bytes("ring", TOKENS, RANKS, HEADS, KV_HEADS, WIDTH, itemsize=4)
    one_hop = all_hops.forward // (RANKS - 1)
    assert trace.bytes_sent(rank=0) == sum(all_hops) - 2 * (RANKS - 2) * one_hop


@pytest.mark.parametrize("scheme", ["ring", "gather", "head", "head_ring"])
def test_what_is_kept_is_q_k_v_o_and_lse(scheme):
    attention, found = getattr(tj, f"{scheme}_attention"), []
    mesh, axes = (Mesh(ring=2, u=2), ("u", "ring")) if scheme == "head_ring" else (Mesh(cp=2), ("cp",))

    def program(q: Any, k: Any, v: Any) -> Any:
        found.append(tj.saved_tensors(lambda _, *qkv: attention(*qkv, *axes, layout="zigzag"), None, q, k, v))
        return q

    tj.run(program, mesh, *shapes()[:3], in_specs=P(None, None, mesh.axis_names))
    assert found[0].bytes == kept_bytes(TOKENS, mesh.size, HEADS, KV_HEADS, WIDTH, itemsize=4)


def test_gradients_of_bfloat16_travel_home_in_float32():
    xs = [numbers(*x.shape, seed=seed) for seed, x in enumerate(shapes())]
    layout = TokenLayout("zigzag", TOKENS, RANKS)
    out = tj.run(
        step("zigzag"), Mesh(cp=RANKS), *(jnp.asarray(layout.arrange(x, 2), jnp.bfloat16) for x in xs),
        in_specs=SPEC, out_specs=SPEC,
    )  # fmt: skip
    hops = {(e.phase, e.dtype) for e in out.trace.select(kind="send").events}
    assert hops == {("forward", "bfloat16"), ("backward", "bfloat16"), ("backward", "float32")}
    q, k, v, do = (jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in xs)

    def whole(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bhmd,bhtd->bhmt", q, jnp.repeat(k, HEADS // KV_HEADS, 1)) * WIDTH**-0.5
        shares = jax.nn.softmax(jnp.where(allowed(AttentionMask(), TOKENS), scores, -jnp.inf), -1)
        return jnp.einsum("bhmt,bhtd->bhmd", shares, jnp.repeat(v, HEADS // KV_HEADS, 1))

    o, gradients = jax.vjp(whole, q, k, v)
    for got, want in zip(out.value, (o, *gradients(do)), strict=True):
        got, want = layout.restore(np.asarray(got.astype(jnp.float32)), 2), np.asarray(want)
        assert got.dtype == want.dtype
        # o is rounded to 8 bits, and D is made of it; everything else is float32
        np.testing.assert_allclose(got, want, atol=2**-7 * np.abs(want).max())
