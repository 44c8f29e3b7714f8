"""The report of `same_model`: its verdict, its exit code, and its text."""

from __future__ import annotations

from tplab.checking.same_model import Finding, Row, SameModel, cannot_tell, could_not_run, named

FAULT = Finding(
    "gradient", "net.0.weight", 0, "4 times the reference", 4.0, "train.py:31", "it is summed",
    "https://github.com/NVIDIA/Megatron-LM/issues/673", "0.04", "0.01", others=("net.0.bias",),
    lines=("train.py:30", "train.py:31"),
)  # fmt: skip


def test_a_fault_is_said_with_its_line_its_values_and_its_thread():
    rows = [Row("weights", 0, True, "equal"), Row("gradient", 0, False, "2 of 2 are wrong", factor=4.0),
            Row("norm", 0, None, "follows from the gradient")]  # fmt: skip
    report = SameModel(rows, [FAULT], about="train.py on 4 ranks", notes=["float32"])
    assert (report.verdict, report.exit_code, report.first) == ("different", 1, FAULT)
    assert (
        str(report)
        == """\
train.py on 4 ranks: NOT the same model; first wrong in step 0: the gradient of net.0.weight and of 1 other

step 0: the gradient of net.0.weight and of 1 other: 4 times the reference
  at train.py:31
  also see train.py:30
  found 0.04; expected 0.01
  it is summed
  others have met this: https://github.com/NVIDIA/Megatron-LM/issues/673

step 0
  ok   weights   equal
  x 4  gradient  2 of 2 are wrong
  -    norm      follows from the gradient

  compared in step 0: weights, gradient; not compared: samples, dropout, loss, norm, optimizer, parameters,
  buffers, log, evaluation
  float32"""
    )


def test_without_a_fault_it_is_the_same_model():
    report = SameModel([Row("loss", 1, True, "equal")], about="train.py")
    assert (report.verdict, report.exit_code, report.first) == ("same", 0, None)
    assert str(report).startswith(
        "train.py: the same model\n\nstep 1\n  ok  loss  equal\n\n  compared in step 1: loss; not"
    )


def test_what_was_not_seen_is_not_called_the_same():
    assert SameModel([Row("loss", 0, None, "not seen")]).exit_code == 3
    report = cannot_tell("the script never steps", about="train.py")
    assert (report.verdict, report.exit_code) == ("cannot tell", 3)
    assert repr(report) == "SameModel: train.py: cannot tell, because the script never steps"
    assert could_not_run("it fails").exit_code == 2


def test_a_fault_found_before_the_comparison_ended_is_a_fault():
    report = SameModel([], [FAULT], reason="rank 1 ended")
    assert report.exit_code == 1
    assert "nothing further was compared, because rank 1 ended" in str(report)


def test_as_html_a_value_is_not_called_found_twice():
    finding = Finding("loss", "", 0, "twice", got="2", want="1")
    assert "found 2; expected 1" in str(finding)
    assert ">2; expected 1</td>" in SameModel([], [finding])._repr_html_()


def test_as_html_the_fault_is_open_and_text_is_escaped():
    page = SameModel(
        [Row("loss", 0, True, "1 < 2"), Row("gradient", 0, False, "wrong", factor=4.0)], [FAULT]
    )._repr_html_()
    assert "<details open><summary>step 0: the gradient of net.0.weight" in page
    assert "<td style='text-align: left'>train.py:31</td>" in page and f"<a href='{FAULT.thread}'>" in page
    assert "1 &lt; 2" in page and "× 4" in page and "✓" in page


def test_names():
    assert named("ab") == "a, b"
    assert named("abcde") == "a, b, c and 2 others"
