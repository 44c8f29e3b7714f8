"""Attention with its heads over ranks, against the whole one in torch: float64, every gradient, in both frameworks."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework, in_both
from tests.sharded import check, flat, nested, numbers
from tplab import Mesh, P
from tplab.errors import ShapeError

BATCH, SEQUENCE, HEADS, HEAD_WIDTH = 2, 8, 24, 2
OUTSIDE = {None: P(), 1: P(None, "tp")}


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def linear(inputs, outputs, seed, bias):
    state = {"weight": numbers(outputs, inputs, seed=seed) / inputs**0.5}
    return state | ({"bias": numbers(outputs, seed=seed + 1)} if bias else {})


def state_of(width, heads, kv_heads, bias):
    kv_width = width // heads * kv_heads
    sizes = {"query": width, "key": kv_width, "value": kv_width, "output": width}
    return flat({name: linear(width, outputs, 7 * i, bias) for i, (name, outputs) in enumerate(sizes.items())})


def specs_of(bias):
    column = {"weight": P("tp")} | ({"bias": P("tp")} if bias else {})
    row = {"weight": P(None, "tp")} | ({"bias": P()} if bias else {})
    return flat({"query": column, "key": column, "value": column, "output": row})


def dense(heads, kv_heads, causal):
    """Written out, head by head."""

    def attention(state, x):
        tree = nested(state)
        q, k, v = (F.linear(x, tree[n]["weight"], tree[n].get("bias")) for n in ("query", "key", "value"))
        d = q.shape[-1] // heads
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1) if causal else torch.zeros(())
        outputs = []
        for head in range(heads):
            served = head // (heads // kv_heads)
            key, value = (part[..., served * d : (served + 1) * d] for part in (k, v))
            scores = q[..., head * d : (head + 1) * d] @ key.transpose(1, 2) / d**0.5 + mask
            outputs.append(scores.softmax(-1) @ value)
        return F.linear(torch.cat(outputs, -1), tree["output"]["weight"], tree["output"].get("bias"))

    return attention


@pytest.mark.parametrize(
    "fw, mode, num_ranks",
    in_both(
        product(["plain", "sequence"], [1, 2, 3, 4, 8]), [("plain", 1), ("plain", 8), ("sequence", 3), ("sequence", 4)]
    ),
    indirect=["fw"],
)
def test_whole_heads(fw, mode, num_ranks):
    width, sequence_dim = HEADS * HEAD_WIDTH, 1 if mode == "sequence" else None
    make = lambda lab: lab.ParallelSelfAttention(width, HEADS, "tp", sequence_dim=sequence_dim)  # noqa: E731
    x = numbers(BATCH, SEQUENCE if num_ranks != 3 else 6, width)
    outside = OUTSIDE[sequence_dim]
    state, oracle = state_of(width, HEADS, HEADS, True), dense(HEADS, HEADS, True)
    trace = check(fw, Mesh(tp=num_ranks), make, oracle, state, specs_of(True), x, outside, outside)
    if num_ranks > 1 and sequence_dim is None:
        events = trace.select(kind="collective", rank=0).events
        assert [event.op for event in events] == ["all_reduce"] * 2  # not one for each of q, k and v
        assert trace.bytes_sent(rank=0) == 2 * 2 * x.nbytes * (num_ranks - 1) // num_ranks
    if num_ranks > 1 and sequence_dim == 1:
        moved = [e.bytes for e in trace.select(kind="collective", rank=0).events if e.op != "all_reduce"]
        assert moved == [x.nbytes * (num_ranks - 1) // num_ranks] * 4


@pytest.mark.parametrize("batch, tokens", [(0, 6), (2, 0)])
def test_no_tokens_are_a_batch_too(fw, batch, tokens):
    make = lambda lab: lab.ParallelSelfAttention(12, 6, "tp")  # noqa: E731
    x, state, oracle = numbers(batch, tokens, 12), state_of(12, 6, 6, True), dense(6, 6, True)
    check(fw, Mesh(tp=3), make, oracle, state, specs_of(True), x, P(), P())


def check_grouped_heads(name, num_ranks, kv_heads, group, head_width, bias, causal, sequence_dim):
    kv_heads *= num_ranks
    heads = kv_heads * group
    width = heads * head_width

    def make(lab):
        return lab.ParallelSelfAttention(
            width, heads, "tp", num_kv_heads=kv_heads, bias=bias, causal=causal, sequence_dim=sequence_dim
        )

    x, outside = numbers(2, 2 * num_ranks, width), OUTSIDE[sequence_dim]
    state, oracle = state_of(width, heads, kv_heads, bias), dense(heads, kv_heads, causal)
    check(FRAMEWORKS[name](), Mesh(tp=num_ranks), make, oracle, state, specs_of(bias), x, outside, outside)


@settings(max_examples=20)
@given(
    num_ranks=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_width=st.integers(1, 3),
    bias=st.booleans(),
    causal=st.booleans(),
    sequence_dim=st.sampled_from([None, 1]),
)
@example(num_ranks=1, kv_heads=1, group=1, head_width=1, bias=True, causal=True, sequence_dim=None)
def test_grouped_heads_of_any_shape(**shape):
    check_grouped_heads("torch", **shape)


@pytest.mark.parametrize("shape", [(3, 1, 2, 3, True, True, 1), (2, 2, 3, 1, False, False, None)])
def test_grouped_heads_in_jax(shape):
    check_grouped_heads("jax", *shape)


def test_a_part_of_each_head_is_another_function():
    """Sharding through the heads is a known mistake: the softmax is taken of parts of scores."""
    x, state = torch.tensor(numbers(1, 4, 4)), {n: torch.tensor(v) for n, v in state_of(4, 1, 1, False).items()}
    whole = dense(1, 1, True)(state, x)
    halves = [
        dense(1, 1, True)({n: w[:, s] if n.startswith("output") else w[s] for n, w in state.items()}, x)
        for s in (slice(0, 2), slice(2, 4))
    ]
    assert (sum(halves) - whole).abs().max() > 1e-2


def called(fw, layer, x):
    if fw.name == "torch":
        return layer(x)
    import jax

    return layer(layer.init(jax.random.key(0)), x)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda lab: lab.ParallelSelfAttention(12, 6, "tp"), r"num_heads is 6, which .*\npad it to 8, or .* divides 6"),
        (lambda lab: lab.ParallelSelfAttention(12, 5, "tp"), r"width of 12 does not divide into 5 heads; make it 15"),
        (
            lambda lab: lab.ParallelSelfAttention(12, 12, "tp", num_kv_heads=2),
            r"num_kv_heads is 2, which the 4 ranks .* cannot share.*\n"
            r".*repeat the rows of each key and value head 6 times",
        ),
        (
            lambda lab: lab.ParallelSelfAttention(12, 12, "tp", num_kv_heads=5),
            r"num_kv_heads is 5, which does not divide",
        ),
        (lambda lab: lab.ParallelSelfAttention(12, 12, "tp", sequence_dim=0), r"sequence_dim is 0; of x"),
        (lambda lab: lab.ParallelSelfAttention(12, 12, "tp"), r"takes x \[batch, sequence, 12\], but got \[3, 12\]"),
    ],
)
def test_what_is_wrong_is_said(fw, make, message):
    with pytest.raises(ShapeError, match=message):
        fw.lab.run(lambda x: called(fw, make(fw.lab), x), Mesh(tp=4), fw.array(np.ones((3, 12), np.float32)))
