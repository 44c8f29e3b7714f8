"""Fused kernels of experts, and DeepEP: what there is to do, counted by hand, and how far off the rows are."""

import numpy as np
import pytest

from benchmarks.fit import experts as fit
from tplab.errors import ShapeError
from tplab.experts import Routing
from tplab.forecast import experts_seconds, message_seconds
from tplab.forecast.experts import Fused, Messages, Work, constants, sent, work_of

RULE = Routing(8, 2)
QWEN = Routing(128, 8)


def test_equal_loads_by_hand():
    """96 choices on 8 experts: 12 rows each, padded to 64. A rank has 2 experts of 3 x 4 x 5 weights."""
    assert work_of(48, 4, 5, RULE, 4, 0.0) == Work(2 * 60, 2 * 128 * 60, 24 * (8 + 15), 48 * 4, 2)
    assert work_of(1, 4, 5, RULE, 4, 0.0).experts == 1  # 2 choices, on experts of two ranks
    assert work_of(3, 4, 5, RULE, 1, 0.0).rows == 6 * (8 + 15)


@pytest.mark.parametrize("tokens", [1, 2, 7, 60, 4000])
@pytest.mark.parametrize("ep", [1, 2, 16])
def test_a_skew_gives_the_fullest_rank_more_and_no_expert_too_much(tokens: int, ep: int):
    found = [work_of(tokens, 1, 1, QWEN, ep, skew) for skew in (0.0, 1.01, 1.2)]
    rows = [work.rows / 5 for work in found]
    assert all(8 * tokens / ep <= row + 1 and row <= min(8, 128 / ep) * tokens for row in rows)
    assert all(work.experts <= min(128 / ep, row) for work, row in zip(found, rows))
    if ep == 1:
        np.testing.assert_allclose(rows, 8 * tokens)
    elif tokens >= 60:
        assert rows[0] < rows[1] < rows[2]


def test_a_kernel_takes_longer_for_more_work():
    one = experts_seconds("h100-measured", 4096, 2048, 768, QWEN, ep=8)
    assert one < experts_seconds("h100-measured", 4096, 2048, 768, QWEN, ep=8, skew=1.2)
    assert one < experts_seconds("h100-measured", 4096, 2048, 768, QWEN, ep=4)
    assert one < experts_seconds("h100-measured", 8192, 2048, 768, QWEN, ep=8)
    first, second = (
        experts_seconds("h100-measured", 64, 2048, 768, QWEN, dtype="fp8_block", kernel=kernel)
        for kernel in (None, "vllm_triton")
    )
    assert first != second


def test_with_eight_experts_eight_multiprocessors_send():
    assert sent("h100-measured", Routing(8, 2), "low_latency") == (1.75, 8)
    assert sent("h100-measured", Routing(160, 6), "low_latency") == (5.25, 80)
    assert sent("h100-measured", Routing(256, 8), "normal")[0] == pytest.approx(7 / 8 * 5.295, abs=1e-3)
    few, many = (message_seconds("h100-measured", 128, 7168, Routing(e, 8), "low_latency")[0] for e in (8, 128))
    assert few > 2 * many


@pytest.mark.parametrize(
    ("what", "kind", "rows"), [("fused", Fused, fit.fused()), ("messages", Messages, fit.messages())]
)
def test_the_constants_are_as_near_as_the_page_says(what, kind, rows):
    """They have seen these rows, so they are nearer than the errors of rows that were left out, or as near."""
    for of, chip, group, name, count, half, most in constants()["errors"]:
        if of == what and group != "all":
            some = [row for row in rows if (row.chip, row.kind, row.name) == (chip, group, name)]
            off = np.abs(fit.off(kind, kind(*constants()[what][chip][group][name]), some))
            assert len(some) == count
            assert np.median(off) < half + 0.01 and np.quantile(off, 0.9) < most + 0.02
    pooled = [error for error in constants()["errors"] if error[0] == what and error[2] == "all"]
    assert len(pooled) == 2 and all(half < 0.12 and most < 0.36 for *_, half, most in pooled)


def test_a_fit_finds_what_is_stored():
    rows = [row for row in fit.messages() if (row.chip, row.kind, row.name) == ("H100", "low_latency", "combine")]
    stored = Messages(*constants()["messages"]["H100"]["low_latency"]["combine"])
    np.testing.assert_allclose(
        fit.off(Messages, fit.fit(Messages, rows), rows), fit.off(Messages, stored, rows), atol=1e-3
    )


def test_what_was_not_measured_is_said():
    with pytest.raises(ValueError, match="no fused kernels were measured on A100 with 'bfloat16'; there are H100: bf"):
        experts_seconds("a100-measured", 8, 2048, 768, QWEN)
    with pytest.raises(ValueError, match="no fused kernels were measured on H100 with 'nvfp4'"):
        experts_seconds("h100-measured", 8, 2048, 768, QWEN, dtype="nvfp4")
    with pytest.raises(ValueError, match="kernel is 'deepgemm'"):
        experts_seconds("h100-measured", 8, 2048, 768, QWEN, kernel="deepgemm")
    with pytest.raises(ValueError, match="no messages kernels were measured on H100 with 'fast'"):
        message_seconds("h100-measured", 8, 2048, QWEN, "fast")
    with pytest.raises(ShapeError, match="the number of experts is 128, which the 3 ranks"):
        experts_seconds("h100-measured", 8, 2048, 768, QWEN, ep=3)
    with pytest.raises(ShapeError, match="there are 0 tokens"):
        experts_seconds("h100-measured", 0, 2048, 768, QWEN)
    with pytest.raises(ShapeError, match="there are 0 tokens"):
        message_seconds("h100-measured", 0, 2048, QWEN)
    with pytest.raises(ValueError, match="skew is -1"):
        experts_seconds("h100-measured", 8, 2048, 768, QWEN, skew=-1.0)
    with pytest.raises(ValueError, match="multiprocessors"):
        message_seconds("h100", 8, 2048, QWEN, "low_latency")


def test_a_skew_of_one_lies_between_its_neighbours():
    below, at, above = (work_of(4000, 1, 1, QWEN, 4, skew).rows for skew in (0.99, 1.0, 1.01))
    assert below <= at <= above


@pytest.mark.parametrize(("rows", "model"), [(fit.fused(), (1, 3)), (fit.messages(), (1, 2, 3))])
def test_a_model_is_in_one_third(rows, model):
    """A model: hidden features and the routing, or what follows from it."""
    some = [row for row in rows if (row.chip, row.kind, row.name) == (rows[0].chip, rows[0].kind, rows[0].name)]
    pairs = {(tuple(row.given[n] for n in model), part) for row, part in zip(some, fit.parts(some).tolist())}
    assert len(pairs) == len({of for of, _ in pairs}) and {part for _, part in pairs} == {0, 1, 2}
