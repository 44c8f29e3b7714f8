"""Overlapped linear layers by formula, beside runs on the modelled clock, of meta tensors."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tplab import Mesh, P
from tplab.cost import find, gather_seconds, pays_from, scatter_seconds
from tplab.cost.overlap import Seconds
from tplab.errors import ShapeError
from tplab.torch import all_gather, all_gather_matmul, matmul_reduce_scatter, reduce_scatter, run

ROWS, COLUMNS = P("tp"), P(None, "tp")


def meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def makespan(program, x_spec, w_spec, x, weight, num_ranks, cluster):
    return run(program, Mesh(tp=num_ranks), x, weight, in_specs=(x_spec, w_spec), cluster=cluster).trace.makespan


@pytest.mark.parametrize("cluster", ["h100", "h100-measured", "laptop", "tpu_v5e"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_the_formulas_are_what_the_modelled_clock_finds(num_ranks, cluster):
    """On meta tensors, which have no numbers: sizes of a real layer, in milliseconds."""
    for tokens, inputs, outputs in ((8192, 8184, 8184 * 3), (16, 96, 48)):
        x, weight = meta(tokens, inputs), meta(outputs, inputs)
        runs = {
            gather_seconds: (ROWS, lambda x, w: all_gather(x, "tp", -1) @ w.T, all_gather_matmul),
            scatter_seconds: (COLUMNS, lambda x, w: reduce_scatter(x @ w.T, "tp", -1), matmul_reduce_scatter),
        }
        for formula, (w_spec, blocking, overlapped) in runs.items():
            found = Seconds(
                makespan(blocking, COLUMNS, w_spec, x, weight, num_ranks, cluster),
                makespan(lambda x, w: overlapped(x, w, "tp"), COLUMNS, w_spec, x, weight, num_ranks, cluster),  # noqa: B023
            )
            want = formula(tokens, inputs, outputs, num_ranks, cluster)
            assert found == pytest.approx(want, rel=1e-12)  # sums of the same times in another order


def test_where_overlap_stops_paying():
    """On 8 modelled H100s. Eight products are launched instead of one, and each reads and writes y again."""
    assert pays_from(8192, 32768, 8, "h100") == 745
    assert pays_from(1024, 1024, 8, "h100", mode="scatter") is None  # sums take longer than the hops that they hide
    for sizes in ((8192, 8192, 8, "h100"), (4096, 4096, 8, "h100"), (8192, 32768, 8, "h100")):
        tokens = pays_from(*sizes)
        assert tokens is not None
        for number, is_quicker in ((tokens, True), (tokens - 1, False), (2 * tokens, True), (tokens // 2, False)):
            blocking, overlapped = gather_seconds(number, *sizes)
            assert (overlapped < blocking) == is_quicker
    h100 = find("h100")
    unhurried = replace(h100, chip=replace(h100.chip, launch=0.0))
    assert pays_from(8192, 32768, 8, unhurried) == 1  # it is the launches that set the limit
    with pytest.raises(ValueError, match="mode is 'none'; it must be one of gather, scatter"):
        pays_from(8, 8, 2, "h100", mode="none")
    with pytest.raises(ShapeError, match="in_features is 10, which 4 ranks cannot share equally;\npad it to 12"):
        gather_seconds(4, 10, 8, 4, "h100")
    with pytest.raises(ValueError, match="dtype is 'int7'; it must be one of float64, float32"):
        gather_seconds(4, 8, 8, 4, "h100", "int7")


@given(
    st.integers(1, 1 << 14),
    st.integers(1, 512),
    st.integers(1, 512),
    st.integers(1, 16),
    st.sampled_from(["h100", "ethernet", "tpu_v5e"]),
)
def test_overlap_is_no_quicker_than_its_products_and_its_hops(tokens, inputs, outputs, num_ranks, cluster):
    for seconds in (gather_seconds, scatter_seconds):
        blocking, overlapped = seconds(tokens, inputs * num_ranks, outputs * num_ranks, num_ranks, cluster)
        alone, _ = seconds(tokens, inputs, outputs, 1, cluster)
        assert overlapped >= num_ranks * alone * (1 - 1e-12)
        assert blocking > 0
