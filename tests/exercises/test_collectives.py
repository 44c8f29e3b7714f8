"""The checks of lab 02: solutions pass in both frameworks, and each known mistake is told by name."""

import base64
import io
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image

import tplab.jax
import tplab.torch
from tplab.exercises.check import Verdict
from tplab.exercises.collectives import check_sum_up
from tplab.torch import all_reduce, axis_index, axis_size, ppermute, ring_shift

# ---------------------------------------------------------------------------------------------------- all-reduce


def pass_on(x, shift=ring_shift, size=axis_size):
    arrived = [x]
    for _ in range(size("tp") - 1):
        arrived.append(shift(arrived[-1], "tp"))
    return arrived


def add_on(parts, shift=ring_shift, size=axis_size):
    total = parts[0]
    for hop in range(1, size("tp")):
        total = shift(total, "tp") + parts[hop]
    return total


def summing(begin: int, sort: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The lab's all-reduce. Rank j begins with piece j - begin, and takes its own sum for piece j + sort."""

    def sum_up(x):
        R, i = axis_size("tp"), axis_index("tp")
        hops = np.arange(R)
        total = add_on(x.reshape(R, -1)[(i - begin - hops) % R])
        return torch.stack(pass_on(total))[(i + sort - hops) % R].reshape(x.shape)

    return sum_up


@pytest.mark.parametrize(("begin", "sort"), [(1, 0), (0, 1)], ids=["as NCCL", "as Baidu"])
def test_both_repairs_of_the_all_reduce_pass(begin: int, sort: int):
    verdict = check_sum_up(summing(begin, sort))
    assert verdict.passed, verdict


def test_a_program_in_jax_without_the_word_is_told_of_it():
    verdict = check_sum_up(lambda x: tplab.jax.all_reduce(x, "tp"))
    assert verdict.passed is False and 'add "jax" to its arguments' in verdict.text, verdict


def test_a_program_in_torch_is_not_taken_for_one_in_jax():
    verdict = check_sum_up(lambda x: tplab.torch.device_mesh())
    assert verdict.passed is False and "OutsideRunError" in verdict.text and "JAX" not in verdict.text, verdict


def test_the_repair_in_jax_passes():
    def sum_up(x):
        R, i = tplab.jax.axis_size("tp"), tplab.jax.axis_index("tp")
        hops = np.arange(R)
        total = add_on(x.reshape(R, -1)[(i - 1 - hops) % R], tplab.jax.ring_shift, tplab.jax.axis_size)
        arrived = pass_on(total, tplab.jax.ring_shift, tplab.jax.axis_size)
        return jnp.stack(arrived)[(i - hops) % R].reshape(x.shape)

    verdict = check_sum_up(sum_up, "jax")
    assert verdict.passed, verdict


def one_hop_more(x):
    """The lab's bug, and then each finished sum moves on by one place: right, with 2R - 1 messages of one piece."""
    R, i = axis_size("tp"), axis_index("tp")
    hops = np.arange(R)
    total = ring_shift(add_on(x.reshape(R, -1)[(i - hops) % R]), "tp")
    return torch.stack(pass_on(total))[(i - hops) % R].reshape(x.shape)


def unsorted(x):
    R, i = axis_size("tp"), axis_index("tp")
    return torch.stack(pass_on(add_on(x.reshape(R, -1)[(i - 1 - np.arange(R)) % R]))).reshape(x.shape)


def star(x):
    """Sends no more than the ring in total, but rank 0 sends most of it."""
    total = x
    for k in range(1, axis_size("tp")):
        total = total + ppermute(x, "tp", [(k, 0)])
    for k in range(1, axis_size("tp")):
        answer = ppermute(total, "tp", [(0, k)])
        total = answer if axis_index("tp") == k else total
    return total


def in_half_precision(x):
    return summing(1, 0)(x.bfloat16()).to(x.dtype)


@pytest.mark.parametrize(
    ("sum_up", "hint"),
    [
        (summing(0, 0), "the sum of piece j + 1 is where piece j belongs"),
        (summing(2, 0), "the sum of piece j - 1 is where piece j belongs"),
        (summing(1, 1), "one correction is enough"),
        (summing(-1, 0), "the sum of piece j + 2 is where piece j belongs"),
        (summing(2, 1), "the sum of piece j - 2 is where piece j belongs"),
        (unsorted, "in the order in which they arrived"),
        (lambda x: x, "the rank's own tensor"),
        (lambda x: all_reduce(all_reduce(x, "tp"), "tp"), "R times too large, for R ranks along tp"),
    ],
    ids=[
        "the lab's bug",
        "one too far",
        "both repairs",
        "two to the left",
        "two to the right",
        "unsorted",
        "own",
        "twice",
    ],
)
def test_what_is_wrong_with_an_all_reduce_is_told_and_shown(sum_up: Callable, hint: str):
    verdict = check_sum_up(sum_up)
    assert verdict.passed is False
    assert hint in str(verdict)
    assert picture(verdict).width > 300


@pytest.mark.parametrize(
    ("sum_up", "hint"),
    [
        (star, "on Mesh(tp=4) rank 0 sends 288 bytes, where in a ring each sends 144"),
        (one_hop_more, "sends 672 bytes, where 576 would do.\nA rank needs only 2(R - 1) messages of one piece"),
        (in_half_precision, "right for small whole numbers, but not for others"),
    ],
)
def test_an_all_reduce_with_right_numbers_that_is_no_ring(sum_up: Callable, hint: str):
    verdict = check_sum_up(sum_up)
    assert verdict.passed is False and hint in verdict.text, verdict


def test_what_the_lab_says_of_its_bug():
    """Ones, the grand total and the norm do not show it."""
    x = np.random.default_rng(0).normal(size=(4, 12))
    out = tplab.torch.run(summing(0, 0), tplab.Mesh(tp=4), x, in_specs=tplab.P("tp"), out_specs=tplab.P()).value[0]
    right = torch.tensor(x.sum(0))
    assert not torch.allclose(out, right)
    assert torch.allclose(out.sum(), right.sum())
    assert torch.allclose(out.norm(), right.norm())


def picture(verdict: Verdict) -> Image.Image:
    bundle = verdict._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    return Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
