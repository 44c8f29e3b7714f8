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
from tplab.exercises.collectives import check_gather, check_sum_up
from tplab.torch import all_gather, all_reduce, axis_index, axis_size, ring_all_gather, ring_shift, start

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


def test_the_repair_in_jax_passes():
    def sum_up(x):
        R, i = tplab.jax.axis_size("tp"), tplab.jax.axis_index("tp")
        hops = np.arange(R)
        total = add_on(x.reshape(R, -1)[(i - 1 - hops) % R], tplab.jax.ring_shift, tplab.jax.axis_size)
        arrived = pass_on(total, tplab.jax.ring_shift, tplab.jax.axis_size)
        return jnp.stack(arrived)[(i - hops) % R].reshape(x.shape)

    verdict = check_sum_up(sum_up, "jax")
    assert verdict.passed, verdict


def unsorted(x):
    R, i = axis_size("tp"), axis_index("tp")
    return torch.stack(pass_on(add_on(x.reshape(R, -1)[(i - 1 - np.arange(R)) % R]))).reshape(x.shape)


@pytest.mark.parametrize(
    ("sum_up", "hint"),
    [
        (summing(0, 0), "the sum of piece j + 1 is where piece j belongs"),
        (summing(2, 0), "the sum of piece j - 1 is where piece j belongs"),
        (summing(1, 1), "one correction is enough"),
        (unsorted, "in the order in which they arrived"),
        (lambda x: x, "the rank's own tensor"),
        (lambda x: all_reduce(all_reduce(x, "tp"), "tp"), "added up twice"),
    ],
    ids=["the lab's bug", "one too far", "both repairs", "unsorted", "own", "twice"],
)
def test_what_is_wrong_with_an_all_reduce_is_told_and_shown(sum_up: Callable, hint: str):
    verdict = check_sum_up(sum_up)
    assert verdict.passed is False
    assert hint in str(verdict)
    assert picture(verdict).width > 300


def test_what_the_lab_says_of_its_bug():
    """Ones, the grand total and the norm do not show it."""
    x = np.random.default_rng(0).normal(size=(4, 12))
    out = tplab.torch.run(summing(0, 0), tplab.Mesh(tp=4), x, in_specs=tplab.P("tp"), out_specs=tplab.P()).value[0]
    right = torch.tensor(x.sum(0))
    assert not torch.allclose(out, right)
    assert torch.allclose(out.sum(), right.sum())
    assert torch.allclose(out.norm(), right.norm())


# -------------------------------------------------------------------------------------------------------- gather


def both_ways(x):
    R, i = axis_size("tp"), axis_index("tp")
    pieces, up, down = {i: x}, x, x
    for hop in range(1, R // 2 + 1):
        rising = start(ring_shift, up, "tp", 1)
        if hop <= (R - 1) // 2:
            down = start(ring_shift, down, "tp", -1).wait()
            pieces[(i + hop) % R] = down
        up = rising.wait()
        pieces[(i - hop) % R] = up
    return torch.cat([pieces[j] for j in range(R)])


def both_ways_in_jax(x):
    R, i = tplab.jax.axis_size("tp"), tplab.jax.axis_index("tp")
    arrived = tplab.jax.ring_all_gather(x, "tp", "both")
    return jnp.concatenate(arrived)[(i - np.arange(R)) % R]


def in_order(arrived):
    R, i = axis_size("tp"), axis_index("tp")
    return torch.cat([arrived[(i - j) % R] for j in range(R)])


def with_one_message_too_many(x):
    R, i = axis_size("tp"), axis_index("tp")
    pieces, up, down = {i: x}, x, x
    for hop in range(1, R // 2 + 1):
        rising, sinking = start(ring_shift, up, "tp", 1), start(ring_shift, down, "tp", -1)
        up, down = rising.wait(), sinking.wait()
        pieces |= {(i - hop) % R: up, (i + hop) % R: down}
    return torch.cat([pieces[j] for j in range(R)])


def blocking(x):
    R, i = axis_size("tp"), axis_index("tp")
    pieces, up, down = {i: x}, x, x
    for hop in range(1, R // 2 + 1):
        up = ring_shift(up, "tp", 1)
        pieces[(i - hop) % R] = up
        if hop <= (R - 1) // 2:
            down = ring_shift(down, "tp", -1)
            pieces[(i + hop) % R] = down
    return torch.cat([pieces[j] for j in range(R)])


def from_afar(x):
    R, i = axis_size("tp"), axis_index("tp")
    flights = {(i - k) % R: start(ring_shift, x, "tp", k) for k in range(1, R)}
    return torch.cat([x if j == i else flights[j].wait() for j in range(R)])


def both_sides_in_turn(x):
    """i, i - 1, i + 1, i - 2, ..."""
    R = axis_size("tp")
    arrived = ring_all_gather(x, "tp", "both")
    return torch.cat([arrived[(hop + 1) // 2 if hop % 2 else -(hop // 2) % R] for hop in range(R)])


@pytest.mark.parametrize(
    "gather", [both_ways, lambda x: in_order(ring_all_gather(x, "tp", "both"))], ids=["own", "ring"]
)
def test_gathering_both_ways_passes(gather: Callable):
    verdict = check_gather(gather)
    assert verdict.passed, verdict
    assert "every piece comes once" in str(verdict)


def test_gathering_both_ways_in_jax_passes():
    verdict = check_gather(both_ways_in_jax, "jax")
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("gather", "hint", "is_shown"),
    [
        (lambda x: in_order(pass_on(x)), "takes 2 rounds of hops on Mesh(tp=3), where 1 will do", True),
        (blocking, "takes 2 rounds of hops on Mesh(tp=3), where 1 will do", True),
        (with_one_message_too_many, "sends 192 bytes on Mesh(tp=4), where 144 will do", True),
        (lambda x: torch.cat(pass_on(x)), "Put piece j at place j", True),
        (both_sides_in_turn, "Put piece j at place j", True),
        (lambda x: x, "shape", True),
        (lambda x: all_gather(x, "tp"), "all_gather does the work", False),
        (from_afar, "on Mesh(tp=4) rank 0 sends to rank 2, 2 places on", False),
    ],
    ids=["one way", "blocking", "twice", "unsorted", "in turn", "own", "collective", "from afar"],
)
def test_what_is_wrong_with_a_gather_is_told_and_shown(gather: Callable, hint: str, is_shown: bool):
    verdict = check_gather(gather)
    assert verdict.passed is False
    assert hint in str(verdict)
    assert bool(verdict.panels) == is_shown


def test_where_each_piece_came_from_is_counted():
    """On three ranks one way round, rank 0 gets piece 2 in round 1 and piece 1 in round 2, which is marked."""
    yours, nearest = check_gather(lambda x: in_order(pass_on(x))).panels
    assert yours.array.tolist() == [[0, 2, 1], [1, 0, 2], [2, 1, 0]]
    assert nearest.array.tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert yours.wrong is not None and yours.wrong.tolist() == (yours.array == 2).tolist()


def test_an_untouched_stub_is_not_started():
    def gather(x): ...

    verdict = check_gather(gather)
    assert verdict.passed is None
    assert "not started" in str(verdict)


def picture(verdict: Verdict) -> Image.Image:
    bundle = verdict._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    return Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
