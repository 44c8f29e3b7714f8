"""The table of collectives: what a row says fits together, and is all that ranks need to know of a collective."""

import pytest
import torch

from tplab import Mesh, cost
from tplab.comm import ROWS, Row
from tplab.cost.algorithms import ALGORITHMS
from tplab.torch import axis_index, run
from tplab.torch.comm.autograd import do
from tplab.torch.ranks.rank import this_rank
from tplab.widgets.score import words
from tplab.widgets.score.score import score


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.transposed], ids=lambda row: row.name)
def test_a_transposed_collective_gets_all_its_parameters(row):
    op, *names = row.transposed
    assert len(names) == len(ROWS[op].params + ROWS[op].hidden)
    assert set(names) <= {*row.params, "op", "sizes"}
    assert ROWS[op].transposed[:1] == (row.name,) or ROWS[op].type == "I"


def test_every_row_of_a_group_is_priced():
    assert {name for name, row in ROWS.items() if "one" not in (row.takes, row.gives)} <= set(cost.OPS) <= set(ROWS)


def test_a_row_and_its_price_are_all_that_simulated_ranks_need(monkeypatch):
    """A made-up collective: a reduce_scatter by another name."""
    about = {"params": ("dim", "op"), "hidden": ("sizes",), "transposed": ("all_gather", "dim")}
    monkeypatch.setitem(ROWS, "deal", Row("deal", "all", "pieces", True, words="{group} deal the {result}", **about))
    monkeypatch.setitem(ALGORITHMS, "deal", ALGORITHMS["reduce_scatter"])

    def program():
        x = (torch.arange(6.0) * (axis_index("tp") + 1)).requires_grad_()
        y = do(this_rank().call("deal", "tp", (0, "sum", (1, 2, 3))), x)
        y.square().sum().backward()
        return y.detach(), x.grad

    out = run(program, Mesh(tp=3))
    total = 6 * torch.arange(6.0)
    for (y, dx), piece in zip(out.per_rank, total.split([1, 2, 3]), strict=True):
        assert torch.equal(y, piece) and torch.equal(dx, 2 * total)
    dealt = [event for event in out.trace.events if event.op == "deal" and event.kind == "collective"]
    assert [(event.bytes, event.contributors, event.part) for event in dealt] == [
        (20, (0, 1, 2), (0, 3)),
        (16, (0, 1, 2), (1, 3)),
        (12, (0, 1, 2), (2, 3)),
    ]
    assert words.sentences(score(out.trace))[1].startswith("deal over tp: the 3 deal the sum")
    assert cost.collective("deal", 24, 3, "h100").seconds == cost.collective("reduce_scatter", 24, 3, "h100").seconds
