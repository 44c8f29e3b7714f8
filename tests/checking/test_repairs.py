"""A cause is stated if a run with its repair is right: the search, with runs that are made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tplab.checking.forward import COMBINED
from tplab.checking.repairs import MOST_TRIED, Hypothesis, Repair, is_mended, proven
from tplab.checking.same_model import Finding, Row, SameModel, What
from tplab.torch.checking.mending import _COMBINED


def repair(words: str) -> Repair:
    return Repair("scale", words)


def fault(name: str, *words: str, step: int = 0, what: What = "gradient", others: tuple[str, ...] = ()) -> Finding:
    """A fault with a hypothesis for each of these repairs."""
    hypotheses = tuple(Hypothesis(repair(one), f"because of {one}", f"train.py:{n}") for n, one in enumerate(words))
    return Finding(what, name, step, "twice", 2.0, "train.py:9", others=others, hypotheses=hypotheses)


class Script:
    """A script with faults, each of which one repair mends. runs: the repairs of every run."""

    def __init__(self, **mended_by: str):
        self.mended_by, self.runs = mended_by, list[list[str]]()

    def report(self, *faults: Finding, repairs: Sequence[Repair] = ()) -> SameModel:
        done = {one.words for one in repairs}
        left = [one for one in faults if self.mended_by.get(one.name) not in done]
        return SameModel([Row("gradient", 0, not left, "")], left)

    def judged(self, *faults: Finding) -> SameModel:
        def again(repairs: Sequence[Repair]) -> SameModel:
            self.runs.append([one.words for one in repairs])
            return self.report(*faults, repairs=repairs)

        return proven(self.report(*faults), again)


def test_the_repair_that_works_is_the_cause():
    script = Script(a="two")
    report = script.judged(fault("a", "one", "two", "three"))
    assert report.first is not None and report.verdict == "different"
    assert (report.first.cause, report.first.where) == ("because of two", "train.py:1")
    assert report.first.proof == "it is right in a run with this change: two"
    assert script.runs == [["one"], ["two"]]


def test_where_none_works_the_cause_is_not_known():
    report = Script(a="another").judged(fault("a", *"xyz"))
    assert report.first is not None and (report.first.cause, report.first.proof) == ("", "")
    assert report.first.tried == ("x", "y", "z")
    assert "the cause is not known; these changes were tried and are not enough: x; y; z" in str(report)


def test_of_many_that_do_not_help_two_are_told():
    finding = Finding("gradient", "w", 0, "other", tried=tuple("abcdefg"))
    assert str(finding).endswith("these changes were tried and are not enough: a; b; and 5 more")


def test_a_fault_without_any_repair_says_so():
    assert "the cause is not known" in str(Script().judged(fault("a")))


def test_only_so_many_are_tried():
    script = Script(a="9")
    script.judged(fault("a", *"0123456789"))
    assert len(script.runs) == MOST_TRIED


def test_the_second_fault_is_looked_for_where_the_first_is_repaired():
    script = Script(a="one", b="two")
    report = script.judged(fault("a", "one"), fault("b", "one", "two"))
    assert [one.cause for one in report.findings] == ["because of one", "because of two"]
    assert script.runs == [["one"], ["one", "one"], ["one", "two"]]


def test_a_run_that_fails_proves_nothing():
    report = proven(SameModel([], [fault("a", "one")]), lambda repairs: None)
    assert report.first is not None and report.first.tried == ("one",)


def test_a_repair_that_makes_something_else_wrong_is_none():
    before = SameModel([], [fault("a")])
    right = [Row("gradient", 0, False, "")]
    assert not is_mended(fault("a"), SameModel(right, [fault("b")]), before)  # it was right
    assert not is_mended(fault("a"), SameModel(right, [fault("w", what="weights")]), before)  # and comes first
    assert not is_mended(fault("a"), SameModel(right, [fault("a")]), before)
    assert is_mended(fault("a"), SameModel(right, [fault("p", what="parameters")]), before)
    assert is_mended(fault("a"), SameModel(right, [fault("a", step=1)]), before)
    before.suspects = {"b"}  # it was wrong, too
    assert is_mended(fault("a"), SameModel(right, [fault("b")]), before)


def test_samples_that_are_handed_over_must_make_the_step_right():
    """They are the reference's, so that they themselves are right in any case."""
    samples, before = fault("", what="samples"), SameModel([], [fault("", what="samples")])
    rows = [Row("samples", 0, True, "")]
    assert not is_mended(samples, SameModel(rows, [fault("", what="loss")]), before)
    assert is_mended(samples, SameModel(rows, [fault("", what="loss", step=1)]), before)


def test_a_fault_of_the_log_is_mended_where_the_log_is_right():
    right = [Row("gradient", 0, True, "")]
    for logged in (fault("", what="loss"), fault("", what="log"), fault("accuracy", what="evaluation")):
        before = SameModel(right, [logged])
        assert not is_mended(logged, SameModel(right, [logged]), before)
        assert is_mended(logged, SameModel(right, []), before)


def test_what_is_logged_proves_nothing_of_training():
    right = [Row("gradient", 0, True, "")]
    assert is_mended(fault("a"), SameModel(right, [fault("", what="log")]), SameModel([], [fault("a")]))


WHOLE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda x: x.mean(0),
    "sum": lambda x: x.sum(0),
    "maximum": lambda x: x.max(0),
    "logsumexp": lambda x: np.log(np.exp(x).sum(0)),
    "root of the sum of squares": lambda x: np.linalg.norm(x, axis=0),
    "first rank's value": lambda x: x[0],
    "last rank's value": lambda x: x[-1],
}


@pytest.mark.parametrize("how", COMBINED)
def test_what_ranks_have_of_their_parts_makes_up_what_is_of_the_whole(how: str):
    assert [*COMBINED] == [*_COMBINED]
    x = np.random.default_rng(0).normal(size=(12, 3))
    parts = np.stack([WHOLE[how](part) for part in np.split(x, 4)])
    np.testing.assert_allclose(COMBINED[how](parts), WHOLE[how](x), rtol=1e-12)
    np.testing.assert_allclose(_COMBINED[how](torch.from_numpy(parts)).numpy(), WHOLE[how](x), rtol=1e-12)
