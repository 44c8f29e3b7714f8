"""Fused attention: the formula at peak rates, the kernels that were measured, and that times behave as times do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fit import attention
from benchmarks.fit.tables import prompts
from tplab.cost import A100, H100, H100_MEASURED, find
from tplab.cost.attention import attention_flops, attention_pairs
from tplab.cost.measured import ring_attention
from tplab.errors import ClusterError

CHIPS = [find(f"{name}-measured").chip for name in ("a100", "h100", "b200")]


@pytest.mark.parametrize("q, k", [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9)])
def test_a_causal_mask_leaves_the_pairs_that_torch_leaves(q: int, k: int):
    assert attention_pairs(q, k, True) == sum(key <= query for query in range(q) for key in range(k))
    assert attention_pairs(q, k, False) == q * k


def test_at_peak_rates_attention_is_a_roofline():
    """2 sequences, 3 heads of 64, 5 queries, 7 keys: FLOPs and bytes by hand."""
    small = replace(H100, flops={"bfloat16": 1e6}, memory_bandwidth=1e12, launch=0.25)
    there = small.attention_seconds(2, 3, 5, 7, 64)
    assert there == pytest.approx(0.25 + 4 * 64 * 2 * 3 * 35 / 1e6)
    assert small.attention_seconds(2, 3, 5, 7, 64, backward=True) == pytest.approx(0.25 + 2.5 * (there - 0.25))
    slow = replace(small, flops={"bfloat16": 1e18}, memory_bandwidth=1e6, launch=0.0)
    numbers = 2 * 64 * (2 * 5 * 3 + 2 * 7 * 1)
    assert slow.attention_seconds(2, 3, 5, 7, 64, kv_heads=1) == pytest.approx(2 * numbers / 1e6)
    assert slow.attention_seconds(2, 3, 5, 7, 64, kv_heads=1, backward=True) == pytest.approx(4 * numbers / 1e6)


@pytest.mark.parametrize("gpu, chip, kernel", [("A100", "a100", None), ("H800", "h100", "flash2")])
def test_kernels_of_2023_take_what_they_were_measured_to_take(gpu: str, chip: str, kernel: str | None):
    """An eighth of the causal attention of 65,536 tokens, forward, and forward and backward.

    The share that is reached backward is the mean of both GPUs', which are 2 % away from it."""
    for passes, ways in (("fwd", (False,)), ("fwd+bwd", (False, True))):
        ideal = {row.ideal for row in ring_attention() if (row.api, row.gpu, row.passes) == ("batch", gpu, passes)}
        found = sum(
            find(f"{chip}-measured").chip.attention_seconds(
                1, 32, 65536, 65536, 128, causal=True, backward=way, kernel=kernel
            )
            / 8
            for way in ways
        )
        assert found == pytest.approx(ideal.pop(), rel=0.03)


def test_a_chip_takes_its_newest_kernels_and_refuses_those_that_were_not_measured():
    shape = 1, 32, 8192, 8192, 128
    chip = H100_MEASURED.chip
    assert chip.attention_seconds(*shape) == chip.attention_seconds(*shape, kernel="flash3")
    assert chip.attention_seconds(*shape, kernel="flash2") > 2 * chip.attention_seconds(*shape, kernel="flash3")
    with pytest.raises(ClusterError, match="named 'flash3' was measured on A100 SXM 80GB; there is 'flash2'"):
        CHIPS[0].attention_seconds(*shape, kernel="flash3")
    assert A100.attention_seconds(*shape, kernel="flash3") == A100.attention_seconds(*shape)  # peak rates have none


@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (16, 64, 20000, 20000))),
    more=st.tuples(*(st.integers(0, most) for most in (4, 4, 300, 300))),
    width=st.integers(1, 256),
    causal=st.booleans(),
    backward=st.booleans(),
)
def test_more_attention_takes_no_less_time(
    sizes: tuple[int, int, int, int], more: tuple[int, ...], width: int, causal: bool, backward: bool
):
    batch, heads, q, k = (size + by for size, by in zip(sizes, more))
    for chip in CHIPS:
        seconds = chip.attention_seconds(*sizes, width, causal=causal, backward=backward)
        assert chip.attention_seconds(batch, heads, q, k, width, causal=causal, backward=backward) >= seconds
        assert chip.attention_seconds(*sizes, width, causal=False, backward=backward) >= seconds
        assert chip.attention_seconds(*sizes, width, causal=causal, backward=True) >= seconds
        assert seconds > attention_flops(*sizes, width, causal, backward) / chip.peak("bfloat16")


def test_the_committed_constants_are_what_the_fit_gives():
    found = attention.found_all()
    for gpu, kernels in found["attention"].items():
        reached = find(f"{gpu}-measured").chip.kernels
        assert reached is not None
        for kernel, stored in zip(kernels, reached.attention, strict=True):
            assert kernel.pop("name") == stored.name
            assert kernel == pytest.approx({name: getattr(stored, name) for name in kernel}, rel=0.02)


def test_long_prompts_are_nearer_than_all():
    for gpu in attention.CHIPS:
        rows = prompts(gpu)
        off = abs(attention.attention_errors(rows, attention.stored(gpu)))
        long = [place for place, row in enumerate(rows) if row.tokens >= 4096]
        assert len(long) > 100 and sorted(off[long])[len(long) // 2] < 0.04
