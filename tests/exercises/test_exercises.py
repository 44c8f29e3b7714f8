"""The labs' exercises: right solutions pass in both frameworks, wrong ones are refused with the hint that helps, and an
untouched stub is neither."""

import base64
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tplab import Mesh
from tplab.exercises import first_look, split_a_layer, trials, vocabulary
from tplab.exercises.check import Verdict, grade, not_started
from tplab.exercises.exercise import Exercise
from tplab.exercises.first_look import check_largest, check_total
from tplab.exercises.slopes import weight
from tplab.exercises.split_a_layer import check_backward, check_gated, check_row_linear, finite_differences

PNG = b"\x89PNG\r\n\x1a\n"


def expect(verdict: Verdict, passed: bool, *parts: str) -> None:
    """The verdict is so, and its text has each of these parts."""
    assert verdict.passed is passed, verdict
    for part in parts:
        assert part in verdict.text, verdict


# -------------------------------------------------------------------------------------------------- untouched stubs


def untouched(x):
    """It may have a docstring."""
    # and a comment
    ...  # noqa: PIE790


def half_done(x):
    y = x + 1
    z = ...
    return y, z


def shaped(x):
    return x[..., 0]


def in_place(x):
    best = x.clone()
    best[...] = x
    return best


@pytest.mark.parametrize("fn", [untouched, half_done, lambda x: None, lambda x: ...])
def test_a_stub_is_not_started(fn: Callable[..., Any]):
    assert not_started(fn)
    verdict = check_largest(fn)
    assert verdict.passed is None
    assert verdict.text == "largest: not started. Replace the `...`, then run this cell again."


def test_a_function_that_does_nothing_is_not_told_of_dots():
    def largest(x):
        pass

    text = "largest: not started. The function does nothing yet: write its body, then run this cell again."
    assert check_largest(largest).text == text


@pytest.mark.parametrize(
    "fn", [shaped, in_place, lambda x: x, lambda x: 3, lambda x, i=0: x[..., i], test_a_stub_is_not_started]
)
def test_what_does_something_is_started(fn: Callable[..., Any]):
    assert not not_started(fn)


STUBS = {
    "00_first_look": {"largest"},
    "01_split_a_layer": {"row_linear", "gated"},
}


@pytest.mark.parametrize("name", STUBS)
def test_the_labs_leave_their_exercises_to_the_reader(name: str):
    source = "\n".join(cell.source for cell in build.read_source(name).cells if cell.cell_type == "code")
    assert set(re.findall(r"^def (\w+)\(.*\):.*\n    \.\.\.$", source, re.MULTILINE)) == STUBS[name]
    for stub in STUBS[name]:
        assert f"check_{stub}({stub})" in source


# ------------------------------------------------------------------------------------------------ lab 00: largest


def largest(ops: Any, maximum: Callable[..., Any], too_few: int = 0, shift: int = 1) -> Callable[..., Any]:
    def solution(x):
        best = passing = x
        for _ in range(ops.axis_size("ring") - 1 - too_few):
            passing = ops.ring_shift(passing, "ring", shift)
            best = maximum(best, passing)
        return best

    return solution


def keeps_the_last(x):
    for _ in range(tt.axis_size("ring") - 1):
        x = tt.ring_shift(x, "ring")
    return x


def passes_its_own(x):
    best = x
    for _ in range(tt.axis_size("ring") - 1):
        best = torch.maximum(best, tt.ring_shift(x, "ring"))
    return best


def starts_at_zero(x):
    best = torch.zeros_like(x)
    for _ in range(tt.axis_size("ring") - 1):
        x = tt.ring_shift(x, "ring")
        best = torch.maximum(best, x)
    return best


@pytest.mark.parametrize("shift", [1, -1])
def test_largest(shift: int):
    expect(check_largest(largest(tt, torch.maximum, shift=shift)), True, "result equals the unsharded result")
    expect(check_largest(largest(tj, jnp.maximum, shift=shift), framework="jax"), True)


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (lambda x: x, "own number"),
        (largest(tt, torch.maximum, too_few=1), "R - 1 hops"),
        (starts_at_zero, "The rank's own number is missing"),
        (largest(tt, torch.add), "This is the sum"),
        (keeps_the_last, "arrived last"),
        (passes_its_own, "the number that has just arrived"),
        (lambda x: -x, "It is off by 25."),
    ],
)
def test_largest_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_largest(fn), False, hint, "on rank", "Mesh(ring=4)")


def total_of_ring(x, too_many: int = 0, shift: int = 1):
    passing = total = x
    for _ in range(tt.axis_size("ring") - 1 + too_many):
        passing = tt.ring_shift(passing, "ring", shift)
        total = total + passing
    return total


def never_passes_on(x):
    return sum((tt.ring_shift(x, "ring") for _ in range(tt.axis_size("ring") - 1)), x)


def sums_passed_on(x):
    total = x
    for _ in range(tt.axis_size("ring") - 1):
        total = tt.ring_shift(total, "ring") + x
    return total


@pytest.mark.parametrize("fn", [total_of_ring, sums_passed_on, lambda x: total_of_ring(x, shift=-1)])
def test_the_sum_of_a_ring(fn: Callable[..., Any]):
    expect(check_total(fn), True, "result equals the unsharded result")


def test_the_lab_shows_a_bug_whose_repair_passes():
    source = next(
        cell.source for cell in build.read_source("00_first_look").cells if "def total_of_ring" in cell.source
    )
    names: dict[str, Any] = {"tt": tt}
    exec(source.split("\n\n")[0], names)
    expect(check_total(names["total_of_ring"]), False, "Some numbers are counted more than once", "Mesh(ring=4)")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (lambda x: x, "This is the rank's own number"),
        (lambda x: total_of_ring(x, -1), "The number of the next rank is missing"),
        (lambda x: total_of_ring(x, 1), "Is there one hop too many?"),
        (keeps_the_last, "arrived last"),
        (lambda x: total_of_ring(x, 7 - tt.axis_size("ring") + 1), "These are seven hops, which is right on eight"),
        (never_passes_on, "The same number arrives in every hop"),
        (lambda x: tt.all_reduce(x, "ring"), "`all_reduce` does the work"),
        (lambda x: tt.ring_all_reduce(x, "ring"), "`ring_all_reduce` does the work"),
        (lambda x: tt.all_gather(x, "ring").sum(0, keepdim=True), "`all_gather` does the work"),
        (lambda x: sum(tt.ring_shift(x, "ring", hop) for hop in range(tt.axis_size("ring"))), "is not its neighbour"),
        (lambda x: x.copy_(total_of_ring(x)), "it changes x in place"),
        (lambda x: total_of_ring(x) if tt.axis_index("ring") == 0 else total_of_ring(x) * 0, "It is off by"),
        (lambda x: total_of_ring(x).item(), "result has shape []"),
    ],
)
def test_the_sum_of_a_ring_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_total(fn), False, hint)


def hops(number: int | None) -> Callable[..., Any]:
    """So many, or one more than are needed."""

    def solution(x):
        best = passing = x
        for _ in range(tt.axis_size("ring") if number is None else number):
            passing = tt.ring_shift(passing, "ring")
            best = torch.maximum(best, passing)
        return best

    return solution


def test_seven_hops_are_not_right_on_every_ring():
    """They are on the lab's ring of eight."""
    expect(check_largest(hops(7)), False, "The check uses rings of several lengths", "Mesh(ring=9)")


def test_a_hop_too_many_is_remarked_upon():
    expect(
        check_largest(hops(None)),
        True,
        "On Mesh(ring=4) it sends 128 bytes, where 96 would do: what are the other 32 for?",
    )
    verdict = check_largest(largest(tt, torch.maximum))
    assert "would do" not in verdict.text


def test_a_right_answer_is_shown():
    verdict = check_largest(largest(tt, torch.maximum))
    assert [(panel.title, panel.array.tolist()) for panel in verdict.panels] == [("your result, rank 0", [13])]


# ---------------------------------------------------------------------------------------- lab 01: the bug to repair


def backward(
    ops: Any, tanh: Callable[..., Any], dz: Callable[..., Any], sums: bool = True, more: bool = False
) -> Callable[..., Any]:
    """The lab's backward pass, with a formula for dz of (z, this rank's y, target)."""

    def solution(x, a, b, target):
        y = tanh(x @ a)
        z = ops.all_reduce(y @ b, "tp") if sums else y @ b
        if more:
            ops.all_gather(y, "tp", dim=1)
        error = dz(z, y, target)
        return x.T @ ((error @ b.T) * (1 - y**2)), y.T @ error

    return solution


def as_in_the_tutorials(z, y, target):
    return 2 * (z - tt.all_gather(y, "tp", dim=1))


def test_backward():
    def right(z, y, target):
        return 2 * (z - target)

    expect(check_backward(backward(tt, torch.tanh, right)), True, "da, db equal the unsharded result")
    expect(check_backward(backward(tj, jnp.tanh, right), framework="jax"), True)
    wasteful = check_backward(backward(tt, torch.tanh, right, more=True))
    expect(wasteful, False, "the numbers are right, but on Mesh(tp=3) it sends 1,600 bytes, where 640 would do")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (backward(tt, torch.tanh, as_in_the_tutorials), "compares z with the hidden activation"),
        (backward(tt, torch.tanh, lambda z, y, t: z - t), "half the right value"),
        (backward(tt, torch.tanh, lambda z, y, t: 2 * (t - z)), "The sign is wrong"),
        (backward(tt, torch.tanh, lambda z, y, t: 2 * (z - t), sums=False), "this rank's own term"),
        (backward(tt, torch.tanh, lambda z, y, t: 2 * (z - t) / z.numel()), "the gradient of the mean of all squares"),
        (backward(tt, torch.tanh, lambda z, y, t: tt.all_reduce(2 * (z - t), "tp")), "R times too large"),
        (backward(tt, torch.tanh, lambda z, y, t: 3 * (z - t)), "entries are off"),
    ],
)
def test_backward_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_backward(fn), False, "da is not right yet on rank 0 of Mesh(tp=2)", hint)


def with_dx(first: bool, sums: bool = True, adds: bool = False) -> Callable[..., Any]:
    def solution(x, a, b, target):
        y = torch.tanh(x @ a)
        dz = 2 * (tt.all_reduce(y @ b, "tp") - target)
        du = (dz @ b.T) * (1 - y**2)
        da, db, dx = x.T @ du, y.T @ dz, du @ a.T
        dx = tt.all_reduce(dx, "tp") if sums else dx
        da, db = (tt.all_reduce(grad, "tp") for grad in (da, db)) if adds else (da, db)
        return (dx, da, db) if first else (da, db, dx)

    return solution


@pytest.mark.parametrize("first", [True, False])
def test_backward_may_return_dx_as_well(first: bool):
    """The lab says that its backward pass leaves dx out."""
    expect(check_backward(with_dx(first)), True, "da, db, dx equal the unsharded result")
    expect(check_backward(with_dx(first, sums=False)), False, "dx is not right yet", "only the rank's own term")


def test_added_gradients_of_different_pieces_are_told():
    expect(check_backward(with_dx(first=False, adds=True)), False, "The ranks' pieces of da are added up")

    def f_of_a_weight(x, a, c, b):
        x, a = tt.copy_to(x, "tp"), tt.copy_to(a, "tp")
        return tt.reduce_from((torch.nn.functional.silu(x @ a) * (x @ c)) @ b, "tp")

    expect(check_gated(f_of_a_weight), False, "da is not right yet", "pieces of this gradient are added up")


def test_backward_of_a_layer_as_wide_as_its_output_is_not_enough():
    """The bug runs where hidden and output width agree; elsewhere it cannot even be computed."""
    verdict = check_backward(lambda x, a, b, target: _right_for_two(x, a, b, target))
    expect(verdict, False, "RuntimeError", "Mesh(tp=3)")


def _right_for_two(x, a, b, target):
    if tt.axis_size("tp") == 2:
        return backward(tt, torch.tanh, lambda z, y, t: 2 * (z - t))(x, a, b, target)
    return backward(tt, torch.tanh, as_in_the_tutorials)(x, a, b, target)


def test_the_lab_shows_the_bug():
    """The cell with the bug is what the check refuses, with the hint about y."""
    cells = [cell.source for cell in build.read_source("01_split_a_layer").cells if cell.cell_type == "code"]
    bug = next(source for source in cells if "def backward(" in source).split("\n\n")[0]
    names: dict[str, Any] = {"torch": torch, "tt": tt}
    exec(bug, names)
    expect(check_backward(names["backward"]), False, "compares z with the hidden activation")
    mended = bug.replace('tt.all_gather(y, "tp", dim=1)', "target")
    assert mended != bug
    exec(mended, names)
    verdict = check_backward(names["backward"])
    expect(verdict, True)
    assert "do without" not in verdict.text


# --------------------------------------------------------------------------------------------- lab 01: a bias, once


def row_linear(ops: Any, bias_in: bool = False, bias_out: bool = True, sums: bool = True, index: bool = True):
    def solution(x, w, bias):
        width = w.shape[0]
        start = ops.axis_index("tp") * width if index else 0
        own = jax.lax.dynamic_slice_in_dim(x, start, width, 1) if ops is tj else x[:, start : start + width]
        y = own @ w + bias if bias_in else own @ w
        y = ops.all_reduce(y, "tp") if sums else y
        return y + bias if bias_out else y

    return solution


def bias_cancels(x, w, bias):
    """Right numbers. On two ranks the bias receives dy once, and -dy once."""
    return row_linear(tt, bias_in=True, bias_out=False)(x, w, bias) - (tt.axis_size("tp") - 1) * bias


def f_of_the_rows(x, w, bias):
    return row_linear(tt)(x, tt.copy_to(w, "tp"), bias)


def test_row_linear():
    expect(check_row_linear(row_linear(tt)), True, "y, dw, dbias equal the unsharded result")
    expect(check_row_linear(row_linear(tj), framework="jax"), True)


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (row_linear(tt, bias_in=True, bias_out=False), "the sum has it R times"),
        (row_linear(tt, bias_out=False), "The bias is missing"),
        (row_linear(tt, sums=False), "the sum over the ranks is missing"),
        (row_linear(tt, index=False), "Every rank took the first columns"),
        (lambda x, w, bias: row_linear(tt)(x, w, bias.detach()), "All of it is zero, as if bias were detached"),
        (bias_cancels, "added once and taken off R - 1 times"),
        (f_of_the_rows, "pieces of this gradient are added up"),
        (lambda x, w, bias: tt.all_reduce(x @ w, "tp"), "RuntimeError on rank"),
        (lambda x, w, bias: x.sum(), "y has shape []"),
    ],
)
def test_row_linear_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_row_linear(fn), False, hint, "Mesh(tp=2)")


# --------------------------------------------------------------------------------------------- lab 01: a gated layer


def gated(f_a: bool = True, f_c: bool = True, twice: bool = False, sums: int = 1) -> Callable[..., Any]:
    def solution(x, a, c, b):
        once = tt.copy_to(x, "tp")
        for_a = once if f_a else x
        for_c = tt.copy_to(x, "tp") if twice else once if f_c else x
        z = (torch.nn.functional.silu(for_a @ a) * (for_c @ c)) @ b
        for _ in range(sums):
            z = tt.all_reduce(z, "tp")
        return z

    return solution


def summed_twice_backward(x, a, c, b):
    x = tt.copy_to(tt.copy_to(x, "tp"), "tp")
    return tt.reduce_from((torch.nn.functional.silu(x @ a) * (x @ c)) @ b, "tp")


def test_gated():
    verdict = check_gated(gated())
    expect(verdict, True, "z, dx, da, dc, db equal the unsharded result")
    assert "do without" not in verdict.text
    expect(check_gated(gated(twice=True)), False, "sends 576 bytes, where 384 would do", "Two sums will do")

    def in_jax(x, a, c, b):
        return tj.reduce_from((jax.nn.silu(x @ a) * (x @ c)) @ b, "tp")

    expect(check_gated(in_jax, framework="jax"), True, "z, dx, da, dc, db equal the unsharded result")


@pytest.mark.parametrize(
    ("fn", "hint"),
    [
        (gated(sums=0), "so the sum is missing"),
        (gated(sums=2), "R times too large"),
        (gated(f_a=False, f_c=False), "the rank's own part of dx"),
        (gated(f_c=False), "through a are added up, but x also goes through c"),
        (gated(f_a=False), "through c are added up, but x also goes through a"),
        (lambda x, a, c, b: gated()(x, c, a, b), "silu is applied to x @ c"),
        (summed_twice_backward, "R times too large"),
        (lambda x, a, c, b: tt.all_reduce((x @ a * (x @ c)) @ b, "tp"), "entries are off"),
        (lambda x, a, c, b: tt.all_reduce(x @ a, "tp"), "z has shape [3, 6]"),
    ],
)
def test_gated_gone_wrong(fn: Callable[..., Any], hint: str):
    expect(check_gated(fn), False, hint, "Mesh(tp=2)")


# ------------------------------------------------------------------------------------------------------- the core


def test_the_plain_gradients_of_the_gated_layer_are_slopes():
    """The check's own formulas, against the loss alone."""
    tensors = dict(split_a_layer.GATED.tensors(np.random.default_rng(0), Mesh(tp=2)))
    for name in "xacb":

        def loss(value: np.ndarray, name: str = name) -> float:
            z = split_a_layer.GATED.plain(*{**tensors, name: value}.values())
            return float((z * weight(z)).sum())

        assert np.allclose(
            split_a_layer.GATED.right(f"d{name}", tensors),
            finite_differences(loss, tensors[name]),
            rtol=1e-7,
            atol=1e-7,
        )


def test_finite_differences_of_a_quadratic_are_exact():
    x = np.array([[1.0, -2.0], [0.5, 3.0]])
    assert np.allclose(finite_differences(lambda x: float((x**2).sum()), x), 2 * x, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "exercise",
    [
        split_a_layer.BACKWARD,
        split_a_layer.ROW_LINEAR,
        split_a_layer.GATED,
        first_look.LARGEST,
        vocabulary.TOKEN_LOSS,
        vocabulary.MOST_LIKELY,
    ],
)
def test_known_mistakes_differ_from_what_is_right_and_from_each_other(exercise: Exercise):
    """On some mesh; otherwise a hint would be a guess."""
    trials = [(exercise.tensors(np.random.default_rng(seed), mesh), mesh) for seed, mesh in enumerate(exercise.meshes)]
    for result in exercise.mistakes:
        seen = [exercise.seen(result, tensors, mesh) for tensors, mesh in trials]
        known = [[np.stack([one.want for one in ranks]) for ranks in seen]]
        for hint, wrong in exercise.known(result):
            found = [np.stack([wrong(one) for one in ranks]) for ranks in seen]
            for others in known:
                alike = (a.shape == b.shape and np.allclose(a, b) for a, b in zip(found, others))
                assert not all(alike), hint
            known.append(found)


def test_what_a_rank_raises_is_told_with_its_line():
    def fails(x, w, bias):
        if tt.axis_index("tp") == 1:
            raise ValueError("no rows for me")
        return tt.all_reduce(x[:, : w.shape[0]] @ w, "tp") + bias

    verdict = check_row_linear(fails)
    expect(verdict, False, "row_linear: ValueError on rank 1 of Mesh(tp=2): no rows for me")
    expect(verdict, False, 'in the line: raise ValueError("no rows for me")')


def test_a_deadlock_is_told():
    def leaves(x, w, bias):
        return bias if tt.axis_index("tp") else tt.all_reduce(x[:, : w.shape[0]] @ w, "tp")

    expect(check_row_linear(leaves), False, "rank 1 has returned")


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x, w, bias: print(end=""), "it returned None; is a `return` missing?"),
        (lambda x, w, bias: (x, w), "it must return y, and it returned 2 values"),
    ],
)
def test_a_missing_return_is_told(fn: Callable[..., Any], said: str):
    expect(check_row_linear(fn), False, said)


def test_one_result_of_two_is_told():
    verdict = check_backward(lambda x, a, b, target: a)
    expect(verdict, False, "it must return da, db, and it returned 1 value")
    assert "1 values" not in verdict.text


def test_nan_is_wrong():
    expect(check_row_linear(lambda x, w, bias: torch.full((3, 4), torch.nan)), False, "12 of 12 entries are off")


def test_a_wrong_answer_is_shown():
    data, _ = check_gated(gated(f_a=False, f_c=False))._repr_mimebundle_()
    assert data["text/plain"].startswith("gated: dx is not right yet on rank 0 of Mesh(tp=2).\n")
    assert base64.b64decode(data["image/png"]).startswith(PNG)
    assert check_largest(untouched)._repr_mimebundle_().keys() == {"text/plain"}


def test_a_check_leaves_the_kernels_random_numbers_alone():
    before = torch.get_rng_state()
    check_gated(gated())
    assert torch.equal(before, torch.get_rng_state())


def test_ctrl_c_is_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grade(lambda x: x, first_look.LARGEST)
