"""One tile of attention in torch: its own kernel and the plain equations; rows that see nothing; lower precision."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.sequence.counted import buffer_bytes, kept_bytes
from tests.sharded import close
from tplab import Mesh, P
from tplab.sequence import AttentionMask, Tile, TokenLayout, tiles_of
from tplab.torch import gather_attention, head_attention, ring_attention, run, saved_tensors
from tplab.torch.layers import attention_tile
from tplab.torch.layers.attention_tile import attend, attend_backward

MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=5),
    AttentionMask(documents=(3, 14, 7)),
    AttentionMask(causal=False, documents=(13, 11)),
]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_the_plain_equations_are_the_kernel(layout, mask, monkeypatch: pytest.MonkeyPatch):
    """Tile by tile, with more blocks of rows than one; both also where rows of the box see nothing."""
    tiles = [tile for row in tiles_of(TokenLayout(layout, 24, 3), mask) for tile in row if tile.entries]
    q, k, v, do = drawn(2, 4, 8, 6), drawn(2, 2, 8, 6, seed=1), drawn(2, 2, 8, 6, seed=2), drawn(2, 4, 8, 6, seed=3)
    monkeypatch.setattr(attention_tile, "ROWS", 3)
    for tile in tiles:
        found = []
        for kernel in ("cpu", "none"):
            monkeypatch.setattr(attention_tile, "_kernel_for", lambda *_, kernel=kernel: kernel)
            o, lse = attend(q, k, v, tile, 0.3)
            whole_o, whole_lse = drawn(2, 4, 8, 6, seed=4), drawn(2, 4, 8, seed=5) + 3
            found.append((o, lse.exp(), *attend_backward(do, q, k, v, whole_o, whole_lse, tile, 0.3)))
        for ours, theirs in zip(*found, strict=True):
            close(ours, theirs)
            assert ours.isfinite().all()


@pytest.fixture
def gpu_kernels():
    """The two operations that torch has for GPUs, on the CPU: the plain equations, from the arguments as torch's schema
    names them. What differs from a GPU is checked in tests/gpu."""
    aten = torch.ops.aten
    names = [[argument.name for argument in op.default._schema.arguments] for op in (
        aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward)]  # fmt: skip

    def tile_of(about: dict[str, Any]) -> Tile:
        rows, columns = slice(0, about["query"].shape[2]), slice(0, about["key"].shape[2])
        assert not about["dropout_p"] and about["query"].shape[-1] % 8 == 0
        return Tile(0, "causal" if about["is_causal"] else "full", rows, columns, np.array([]), np.array([]), 1)

    def forward(*args, scale):
        about: dict[str, Any] = dict(zip(names[0], (*args, 0.0, False)[: len(names[0]) - 1], strict=False))
        q, k, v = about["query"], about["key"], about["value"]
        o, lse = attention_tile._attend(q, k, v, tile_of(about), scale)
        nothing = torch.empty(0, dtype=torch.int64)
        return o, lse, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing

    def backward(*args, scale):
        about: dict[str, Any] = dict(zip(names[1], args, strict=False))
        assert about["logsumexp"].is_contiguous()
        do, q, k, v, o, lse = (about[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp"))
        assert (about["max_q"], about["max_k"]) == (q.shape[2], k.shape[2])
        return attention_tile._attend_backward(do, q, k, v, o, lse, tile_of(about), scale)

    home = torch.library.Library("aten", "IMPL")
    home.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    home.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    yield
    home._destroy()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_what_the_kernels_of_gpus_are_given(layout, gpu_kernels, monkeypatch: pytest.MonkeyPatch):
    """Each tile that needs no mask: by the plain equations, and by torch's operations for GPUs over them."""
    tiles = [tile for row in tiles_of(TokenLayout(layout, 24, 3), AttentionMask()) for tile in row if tile.entries]
    q, k, v, do = drawn(2, 4, 8, 16), drawn(2, 2, 8, 16, seed=1), drawn(2, 2, 8, 16, seed=2), drawn(2, 4, 8, 16, seed=3)
    o, lse = drawn(2, 4, 8, 16, seed=4), drawn(2, 4, 8, seed=5) + 3
    for tile in tiles:
        found = []
        for kernel in ("gpu", "none"):
            monkeypatch.setattr(attention_tile, "_kernel_for", lambda *_, kernel=kernel: kernel)
            found.append((*attend(q, k, v, tile, 0.3), *attend_backward(do, q, k, v, o, lse, tile, 0.3)))
        for ours, theirs in zip(*found, strict=True):
            close(ours, theirs)


def test_a_row_that_sees_nothing_is_nothing():
    """Its log-sum-exp is -inf, not the 0 that torch's kernel gives, and its output 0."""
    hand = Tile(1, "masked", slice(0, 3), slice(0, 2), np.array([0, 1, 1]), np.array([1, 1, 2]), 2)
    q, k = drawn(1, 1, 4, 2), drawn(1, 1, 4, 2, seed=1)
    o, lse = attend(q, k, k, hand, 1.0)
    assert lse[0, 0].isinf().tolist() == [False, True, False]
    assert o[0, 0, 1].tolist() == [0, 0]
    close(o[0, 0, [0, 2]], k[0, 0, [0, 1]])  # each of these rows sees one key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attention", [ring_attention, gather_attention, head_attention])
def test_lower_precision_keeps_its_dtype_and_sums_in_float32(attention, dtype):
    """As close to float64 as one rank is: a few roundings of the inputs' dtype, however many ranks add up."""
    x = [drawn(1, 8, 32, 8, seed=seed).to(dtype) for seed in range(4)]

    def program(q, k, v, c):
        for leaf in (q, k, v):
            leaf.requires_grad_()
        o = attention(q, k, v, "cp", layout="zigzag")
        return (o.detach(), *torch.autograd.grad((o * c).sum(), (q, k, v)))

    spec = P(None, None, "cp")
    layout = TokenLayout("zigzag", 32, 8)
    arranged = [layout.arrange(leaf, 2) for leaf in x]
    got = run(program, Mesh(cp=8), *arranged, in_specs=(spec,) * 4, out_specs=(spec,) * 4).value
    want = run(program, Mesh(cp=1), *(leaf.double() for leaf in x), in_specs=(spec,) * 4, out_specs=(spec,) * 4).value
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == dtype
        close(layout.restore(ours, 2).double(), theirs, tolerance=6 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("attention", [ring_attention, gather_attention, head_attention])
def test_q_k_v_o_and_lse_are_all_that_is_kept(attention, layout, num_ranks):
    """To the byte; heads and zigzag also keep in which order they have put the tokens, 8 bytes for each, twice."""

    def program(q, k, v):
        for leaf in (q, k, v):
            leaf.requires_grad_()
        return saved_tensors(lambda: attention(q, k, v, "cp", layout=layout)).bytes

    heads, kv_heads, size, width = 8, 4, 64, 16
    x = [torch.randn(2, h, size, width) for h in (heads, kv_heads, kv_heads)]
    kept = run(program, Mesh(cp=num_ranks), *x, in_specs=(P(None, None, "cp"),) * 3).per_rank
    want = kept_bytes(size, num_ranks, heads, kv_heads, width, itemsize=4, batch=2)
    reordered = attention is head_attention and layout == "zigzag"
    assert kept == [want + 2 * 8 * size * reordered] * num_ranks


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("scheme", ["ring", "gather", "head"])
def test_a_ring_holds_two_pieces_and_a_gather_all(scheme, num_ranks):
    """Bytes while the kernel runs: what is kept, the buffers, and for a second tile its result. 1 % for small tensors.
    On simulated ranks what was brought to a collective stays until all have results: the last goes without."""
    attention = {"ring": ring_attention, "gather": gather_attention, "head": head_attention}[scheme]
    sizes = size, _, heads, kv_heads, width = 512, num_ranks, 16, 8, 32

    def program(q, k, v):
        for leaf in (q, k, v):
            leaf.requires_grad_()
        attention(q, k, v, "cp", causal=False).sum()

    x = [torch.randn(1, h, size, width) for h in (heads, kv_heads, kv_heads)]
    out = run(program, Mesh(cp=num_ranks), *x, in_specs=(P(None, None, "cp"),) * 3, count_memory=True)
    most = min(max(held.totals[row] for row, op in enumerate(held.ops) if "flash" in op) for held in out.memory)
    result = 4 * heads * size // num_ranks * (width + 1) if scheme != "head" else 0
    want = kept_bytes(*sizes, itemsize=4) + buffer_bytes(scheme, *sizes, itemsize=4) + result
    assert most == pytest.approx(want, rel=0.01)
