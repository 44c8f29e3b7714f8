"""What is observed of a tensor on ranks: not finite first, then how the pieces make up the whole, and its types."""

import numpy as np
import pytest
import torch
from torch import nn

import tplab.torch as lab
from tests.sharded import numbers
from tplab import Mesh, P
from tplab.checking.observed import every_way, find_spread, observed
from tplab.checking.verdict import Rounding, judge
from tplab.layout import Layout, take
from tplab.torch import check_parallel

MESH, WHOLE = Mesh(dp=2, tp=3), numbers(6, 9)
ROWS = Layout(P("tp"))
CUT = [take(WHOLE, ROWS, MESH, rank) for rank in MESH.ranks]
COPIES = [WHOLE] * 6
NOISE = [numbers(6, 9, seed=rank + 1) for rank in range(6)]
PARTS = [x - sum(NOISE[group]) / 3 + WHOLE / 3 for x, group in zip(NOISE, [slice(0, 3)] * 3 + [slice(3, 6)] * 3)]
NAN = [*COPIES[:4], WHOLE * np.nan, WHOLE]

KINDS = {
    "copies": (COPIES, "equal", 1, (), "R R"),
    "pieces": (CUT, "equal", 1, (), "R V(0)"),
    "twice": ([2 * x for x in CUT], "scaled", 2, (), "R V(0)"),
    "nothing": ([0 * x for x in COPIES], "scaled", 0, (), "R R"),
    "parts": (PARTS, "parts", 1, ("tp",), "R P"),
    "parts of a mean": ([3 * x for x in PARTS], "parts", 3, ("tp",), "R P"),
    "copies that differ": ([*COPIES[:5], WHOLE + 1], "apart", 1, ("dp", "tp"), "V V"),
    "not finite": (NAN, "not finite", 1, (), "V V"),
    "something else": ([WHOLE**2] * 6, "other", 1, (), "V V"),
    "no piece of it": ([x[:, :4] for x in COPIES], "shape", 1, (), "V V"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_and_types(name):
    pieces, kind, factor, axes, types = KINDS[name]
    found = observed(pieces, WHOLE, MESH, 1e-9)
    assert (found.kind, found.axes) == (kind, axes) and found.factor == pytest.approx(factor)
    assert " ".join(map(str, found.types(MESH).values())) == types


def test_not_finite_comes_first():
    for whole in (WHOLE, WHOLE * np.nan):
        assert observed(NAN, whole, MESH, np.inf).ranks == (4,)
        assert not judge(NAN, whole, Layout(), MESH, Rounding("float64", moved=np.inf)).ok
    assert observed(COPIES, WHOLE * np.nan, MESH, np.inf).kind == "not finite"
    assert find_spread(dict(enumerate(NAN)), WHOLE, 6) is None


def test_a_layout_that_is_told_is_the_only_one():
    turned = [*CUT[1:3], CUT[0]] * 2
    assert observed(turned, WHOLE, MESH, 1e-9, ROWS).ranks == (1, 2, 0, 1, 2, 0)
    columns = [take(WHOLE[:, :6], Layout(P(None, "tp")), MESH, rank) for rank in MESH.ranks]
    assert observed(columns, WHOLE[:, :6], MESH, 1e-9, ROWS).kind == "shape"


def test_parts_are_seen_beside_copies_on_ranks_without_a_mesh():
    for pieces, factor, is_partial in ((CUT, 1, False), (PARTS[:3], 1, True), ([x / 2 for x in COPIES], 0.5, False)):
        found = find_spread(dict(enumerate(pieces)), WHOLE, len(pieces))
        assert found is not None and (found.is_partial, found.factor) == (is_partial, pytest.approx(factor))


def test_what_counts_as_rounding_is_measured_for_each_tensor():
    """Of two outputs that are right, one is the small difference of large numbers, which is less exact."""

    class Two(nn.Module):
        def __init__(self, large):
            super().__init__()
            self.layer, self.large, self.minus = nn.Linear(8, 4), nn.Parameter(large + torch.arange(4.0)), large

        def forward(self, x):
            y = self.layer(x)
            return y, y + self.large - self.minus

    class Other(Two):
        def forward(self, x):
            y = lab.all_reduce(self.layer(x) / 3, "tp")
            return y, y + self.large - self.minus

    torch.manual_seed(0)
    for dtype, large in ((torch.float32, 1000), (torch.bfloat16, 20)):
        whole = Two(large).to(dtype)

        def model(whole, dtype=dtype):
            other = Other(whole.minus).to(dtype)
            other.load_state_dict(whole.state_dict())
            return other

        report = check_parallel(model, whole, inputs=(torch.randn(5, 8).to(dtype),), mesh=Mesh(tp=3))
        exact, lossy = report.of("output[0]"), report.of("output[1]")
        assert exact.ok and lossy.ok, report
        assert (lossy.moved or 0) > 3 * (exact.moved or 0) > 0
    near = judge([WHOLE * (1 + 2.0**-50)] * 6, WHOLE, Layout(), MESH, Rounding("float64", moved=2.0**-50))
    assert near.ok and "float64: one in the last place moves the reference by 3.8e-16" in near.words


def stacked(pieces):
    return np.stack(list(pieces))


EVERY = {
    "copies": (stacked(COPIES), [("equal", P(), 1, ())]),
    "pieces": (stacked(CUT), [("equal", P("tp"), 1, ())]),
    "pieces of a mean over ranks": (stacked(3 * x for x in CUT), [("scaled", P("tp"), 3, ())]),
    "parts": (stacked(PARTS), [("parts", P(), 1, ("tp",)), ("parts", P(), 2, ("dp", "tp"))]),
    "parts of a mean": (stacked(3 * x for x in PARTS), [("parts", P(), 3, ("tp",)), ("parts", P(), 6, ("dp", "tp"))]),
    "on one rank of tp": (stacked(WHOLE if rank % 3 == 1 else NOISE[rank] for rank in range(6)),
                          [("apart", P(), 1, ("tp",))]),
    "something else": (stacked([WHOLE**2] * 6), []),
    "no piece of it": (stacked(x[:, :4] for x in COPIES), None),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_every_way(name):
    x, wanted = EVERY[name]
    found = every_way(x, WHOLE, MESH, 1e-6)
    assert wanted == (found if found is None else [(f.kind, f.layout.spec, f.factor, f.axes) for f in found])
    if name == "on one rank of tp" and found:
        assert found[0].ranks == (1, 4)


def test_every_way_knows_the_order_of_axes_and_infinities():
    mesh, mask = Mesh(dp=2, tp=2), np.array([[0.0, -np.inf], [0.0, 0.0]])
    cut = Layout(P(("tp", "dp")))
    pieces = stacked(take(numbers(4, 3), cut, mesh, rank) for rank in range(4))
    found = every_way(pieces, numbers(4, 3), mesh, 0)
    assert found and [(one.kind, one.layout.spec) for one in found] == [("equal", P(("tp", "dp")))]
    assert [one.kind for one in every_way(stacked([mask] * 4), mask, mesh, 1e-6) or ()] == ["equal"]
    assert every_way(stacked([mask * np.nan] * 4), mask, mesh, 1e-6) == []
