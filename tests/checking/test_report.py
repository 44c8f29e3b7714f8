"""The report: what comes first, what is folded, what to do; from rows alone, as both frameworks' checks make them."""

from __future__ import annotations

import numpy as np
import pytest

from tplab import Mesh, P
from tplab.checking.comparison import Comparison
from tplab.checking.report import ParallelReport, Row, folded, in_backward_order, where_it_begins
from tplab.checking.verdict import Rounding
from tplab.layout import Layout


def row(
    kind: str, name: str, words: str = "", mistake: str = "", axes: tuple[str, ...] = (), error: float = 0.5
) -> Row:
    """A row, right where there are no words for what is wrong."""
    return Row(kind, name, (2,), "copies", not words, error if words else 0.0, 1e-6, words or "ok", mistake, axes)


PART = ("each rank's part", "partial", ("tp",))


def follows(*rows: Row) -> dict[str, str]:
    return {one.title: one.follows for one in folded(rows) if not one.ok}


@pytest.mark.parametrize(
    ("error", "ok", "words"),
    [
        (0.0, True, "the loss gap is 0"),
        (1e-9, True, "the loss gap is 1e-09, rounding"),
        (1e-3, False, "the loss gap is 0.001, not rounding"),
        (0.5, True, "each rank has its part of the loss"),
    ],
)
def test_a_loss_gap_in_words(error, ok, words):
    loss = Row("loss", "loss", (), "copies", ok, error, 1e-6, "")
    assert ParallelReport([loss]).summary().endswith(f"; {words}")


def test_gradients_are_in_backward_order_and_all_else_stays():
    rows = [row("output", "y"), *(row("gradient", name) for name in ("a", "input 0", "b", "c")), row("parameter", "a")]
    names = [one.name for one in in_backward_order(rows, ["c", "b", "a"])]
    assert names == ["y", "c", "b", "a", "input 0", "a"]


def test_what_is_behind_a_wrong_gradient_follows_from_it():
    found = follows(
        row("gradient", "head"),
        row("gradient", "down"),
        row("gradient", "norm", *PART),
        row("gradient", "qkv", "off"),
        row("gradient", "embedding", "off"),
        row("parameter", "norm", "off"),
        row("parameter", "embedding", "off"),
    )
    first = "gradient of norm"
    assert found == {
        first: "", "gradient of qkv": first, "gradient of embedding": first, "after the step: norm": first,
        "after the step: embedding": first,
    }  # fmt: skip


def test_a_gradient_before_which_all_is_right_again_begins_anew():
    zero = Row("gradient", "key.bias", (2,), "copies", True, 0.0, 1e-6, "zero up to rounding, as in the reference")
    found = follows(
        row("gradient", "a", "off"),
        zero,
        row("gradient", "b", "off"),
        row("gradient", "c"),
        row("gradient", "d", "off"),
        row("gradient", "tied.weight", "one weight", "tied"),
        row("parameter", "e", "off"),
        row("dropout", "f", "off"),
    )
    assert found == {
        "gradient of a": "", "gradient of b": "gradient of a", "gradient of d": "", "gradient of tied.weight": "",
        "after the step: e": "", "dropout: f": "",
    }  # fmt: skip


def test_a_wrong_output_makes_all_gradients_wrong():
    rows = [row("output", "y", "off"), row("loss", "loss", "off"), row("gradient", "a", "off"), row("gradient", "b"),
            row("gradient", "c", "off"), row("gradient", "qkv", "in one piece", "fused")]  # fmt: skip
    behind, fused, module = ["loss", "gradient of a", "gradient of c"], rows[-1], row("activation", "mlp", "off")
    assert follows(*rows[:-1]) == {"y": "", **dict.fromkeys(behind, "y")}
    inside = follows(module, *rows[:-1])
    assert inside == {"output of mlp": "", **dict.fromkeys(["y", *behind], "output of mlp")}
    # With the weight cut in parts all is right: so nothing else is the reason.
    found = follows(module, *rows)
    assert found == {fused.title: "", **dict.fromkeys(["output of mlp", "y", *behind], fused.title)}
    assert follows(row("value", "a", "off"), row("output", "y", "off"))["y"] == "value of a"


def test_where_gradients_begin_to_be_wrong():
    right, wrong, behind = row("gradient", "a"), row("gradient", "b", *PART), row("gradient", "c", "off")
    note = where_it_begins(folded([right, wrong, behind]))
    assert note.endswith("gradients are right up to a and wrong from b on: look at what is between the two")
    for rows in (
        [wrong, behind],
        [right],
        [right, wrong, row("gradient", "c")],
        [row("output", "y", "off"), right, wrong],
    ):
        assert where_it_begins(folded(rows)) == ""
    assert where_it_begins(folded([right, row("gradient", "b", "2 times", "scaled"), behind])) == ""


def test_what_follows_is_folded():
    names = [f"w{index}" for index in range(6)]
    rows = folded([row("loss", "loss"), *(row("gradient", name, f"{name} is <off>") for name in names)])
    report = ParallelReport(rows, mesh="Mesh(tp=2)")
    assert str(report).splitlines() == [
        "6 of 7 wrong on Mesh(tp=2): 6 gradients; the loss gap is 0",
        "  gradient of w0  w0 is <off>",
        "                  and 5 gradients that may follow from it: w1, w2, w3, w4, ...",
    ]
    assert report.table().count("WRONG") == 6
    shown, behind, right = report._repr_html_().split("<table>")[1:]
    assert "w0 is &lt;off&gt;" in shown and "w1 is" not in shown
    assert "<details><summary>5 gradients that may follow from it</summary>" in shown
    assert (
        all(f"{name} is" in behind for name in names[1:])
        and "<details><summary>what is right: 1 loss</summary>" in behind
    )
    assert "✓" in right
    assert ParallelReport([row("loss", "loss")])._repr_html_().count("<details") == 1


def test_a_bias_that_is_all_that_is_wrong_is_named_by_its_name():
    mesh, whole = Mesh(tp=2), np.random.default_rng(0).normal(size=(5, 3))
    bias = np.array([1.0, -2.0, 0.5])
    for times, words in ((1, "is added 2 times"), (-1, "is not added"), (0.5, "is added 1.5 times")):
        for name, said in (("bias", "its bias"), ("out.bias", "out.bias")):
            comparison = Comparison(mesh, Rounding("float64"), {name: Layout()}, [P()])
            comparison.addends = {"other": np.ones(3), name: bias, "long": np.ones(5)}
            told = [{"output": {"y": whole + times * bias}, "loss": {}}] * 2
            comparison.compare_outputs(told, {"output": {"y": whole}, "loss": {}})
            (found,) = comparison.rows
            assert found.words == f"{said} {words}" and found.mistake == "bias"
