"""The checks of lab 18: solutions pass in both frameworks, and each known mistake is told by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jax import numpy as jnp

import tplab.jax as tj
import tplab.torch as tt
from labs.source import build
from tests.exercises.test_exercises import expect
from tplab.exercises.quantised_communication import check_add_up, check_reduce_twice

BOTH = ("node", "gpu")


def in_the_lab(start: str) -> dict[str, Any]:
    """The names that the cell which begins so defines."""
    cells = [cell.source for cell in build.read_source("18_quantised_communication").cells if cell.cell_type == "code"]
    names: dict[str, Any] = {"tt": tt, "torch": torch}
    exec(next(source for source in cells if source.startswith(start)), names)
    return names


# -------------------------------------------------------------------------------------------------------------- add_up


def codes_of(x, scale):
    return (x / scale).round().to(torch.int8)


def repaired(x):
    scale = x.abs().max() / 7
    codes, scales = tt.all_to_all(codes_of(x, scale), "dp"), tt.all_gather(scale.reshape(1), "dp")
    return (codes * scales[:, None]).sum(0, keepdim=True)


def a_scale_for_each_row(x):
    scales = x.abs().amax(1, keepdim=True) / 7
    return (tt.all_to_all(codes_of(x, scales), "dp") * tt.all_to_all(scales, "dp")).sum(0, keepdim=True)


def in_jax(x):
    scale = jnp.abs(x).max() / 7
    codes = tj.all_to_all(jnp.round(x / scale).astype(jnp.int8), "dp")
    return (codes * tj.all_gather(scale.reshape(1), "dp")[:, None]).sum(0, keepdims=True)


def test_the_labs_bug_is_told():
    expect(check_add_up(in_the_lab("def add_up")["add_up"]), False, "times this rank's scale", "dp=2")


def with_float32_scales(x):
    """The scale in float32, and the sum in another order."""
    scale = (x.abs().max() / 7).float()
    codes, scales = tt.all_to_all(codes_of(x, scale), "dp"), tt.all_gather(scale.reshape(1), "dp")
    return (codes.flip(0) * scales.flip(0)[:, None]).double().sum(0, keepdim=True)


def half(x):
    return tt.all_to_all(x.half(), "dp").to(x.dtype).sum(0, keepdim=True)


def of_one_row(which):
    """The scale of one row for all rows of the rank."""

    def add_up(x):
        scale = x[which()].abs().max() / 7
        codes, scales = tt.all_to_all(codes_of(x, scale), "dp"), tt.all_gather(scale.reshape(1), "dp")
        return (codes * scales[:, None]).sum(0, keepdim=True)

    return add_up


def of_the_first_row_in_eight_bits(x):
    """Codes of 8 bits leave room for rows that are up to 18 times as large as the first, and no more."""
    scale = x[0].abs().max() / 7
    codes = (x / scale).round().clamp(-127, 127).to(torch.int8)
    codes, scales = tt.all_to_all(codes, "dp"), tt.all_gather(scale.reshape(1), "dp")
    return (codes * scales[:, None]).sum(0, keepdim=True)


def around_a_ring(largest_code):
    """What the lab warns of: every hop turns codes into numbers, adds, and rounds the sum."""

    def add_up(x):
        ranks, index = tt.axis_size("dp"), tt.axis_index("dp")
        total = x[(index - 1) % ranks]
        for hop in range(2, ranks + 1):
            scale = total.abs().max() / largest_code
            codes, scale = tt.ring_shift(codes_of(total, scale), "dp"), tt.ring_shift(scale.reshape(1), "dp")
            total = codes * scale + x[(index - hop) % ranks]
        return total[None]

    return add_up


def own_row_unrounded(x):
    """In 8 bits, and a rank's own numbers are added as they are."""
    scale, index = x.abs().max() / 127, tt.axis_index("dp")
    codes, scales = tt.all_to_all(codes_of(x, scale), "dp"), tt.all_gather(scale.reshape(1), "dp")
    numbers = codes * scales[:, None]
    numbers[index] = x[index]
    return numbers.sum(0, keepdim=True)


def common_scale(x):
    scale = tt.all_reduce(x.abs().max() / 7, "dp", "max")
    return tt.reduce_scatter(codes_of(x, scale), "dp") * scale


@pytest.mark.parametrize("fn", [repaired, a_scale_for_each_row, with_float32_scales])
def test_repairs_pass(fn: Callable):
    expect(check_add_up(fn), True, "total equals the unsharded result", "of codes and scales")


def in_eight_bits(x):
    scale = x.abs().max() / 127
    codes, scales = tt.all_to_all(codes_of(x, scale), "dp"), tt.all_gather(scale.reshape(1), "dp")
    return (codes * scales[:, None]).sum(0, keepdim=True)


def in_blocks(x):
    blocks = x.reshape(len(x), -1, 8)
    scales = blocks.abs().amax(2, keepdim=True) / 7
    codes = codes_of(blocks, scales)
    return (tt.all_to_all(codes, "dp") * tt.all_to_all(scales, "dp")).sum(0).reshape(1, -1)


@pytest.mark.parametrize("fn", [in_eight_bits, in_blocks, own_row_unrounded])
def test_codes_of_another_kind_pass(fn: Callable):
    expect(check_add_up(fn), True, "for numbers between two codes", "bytes of codes and scales")


def with_scales_in_the_message(x):
    """The scale's own four bytes behind each row of codes."""
    scale = x.abs().max() / 7
    own = scale.reshape(1, 1).view(torch.int8).expand(len(x), -1)
    given = tt.all_to_all(torch.cat([codes_of(x, scale), own], 1), "dp")
    return (given[:, :-4] * given[:, -4:].contiguous().view(torch.float32)).sum(0, keepdim=True)


def by_einsum(x):
    scale = x.abs().max() / 7
    codes, scales = tt.all_to_all(codes_of(x, scale), "dp"), tt.all_gather(scale.reshape(1), "dp")
    return torch.einsum("rn,r->n", codes.float(), scales)[None]


def two_in_a_byte(x):
    scale = x.abs().max() / 7
    codes = codes_of(x, scale).int() + 8
    pairs = tt.all_to_all((codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8), "dp").int()
    given = torch.stack([pairs // 16 - 8, pairs % 16 - 8], -1).flatten(1)
    return (given * tt.all_gather(scale.reshape(1), "dp")[:, None]).sum(0, keepdim=True)


@pytest.mark.parametrize("fn", [with_scales_in_the_message, by_einsum, two_in_a_byte])
def test_other_peoples_right_answers_in_float32(fn: Callable):
    expect(check_add_up(fn), True, "total equals the unsharded result")


def cut_off(x):
    """A code of 8 does not fit into 4 bits: the largest number is cut to 7/8."""
    scale = x.abs().max() / 8
    codes = (x / scale).round().clamp(-8, 7).to(torch.int8)
    codes, scales = tt.all_to_all(codes, "dp"), tt.all_gather(scale.reshape(1), "dp")
    return (codes * scales[:, None]).sum(0, keepdim=True)


def to_everyone(x):
    scale = x.abs().max() / 7
    codes, scales = tt.all_gather(codes_of(x, scale)[None], "dp"), tt.all_gather(scale.reshape(1), "dp")
    return (codes[:, tt.axis_index("dp")] * scales[:, None]).sum(0, keepdim=True)


def without_abs(per_row=False, clamped=False):
    """The scale of the largest positive number: a row of negative ones then has codes that no byte holds."""

    def add_up(x):
        scales = (x.amax(1, keepdim=True) if per_row else x.max().expand(len(x), 1)) / 7
        codes = (x / scales).round()
        codes = (codes.clamp(-7, 7) if clamped else codes).to(torch.int8)
        return (tt.all_to_all(codes, "dp") * tt.all_to_all(scales.contiguous(), "dp")).sum(0, keepdim=True)

    return add_up


def times_own_scale_before_adding(x):
    scale = x.abs().max() / 7
    return (tt.all_to_all(codes_of(x, scale), "dp") * scale).sum(0, keepdim=True)


def rounded_floats_of_blocks(x):
    blocks = x.reshape(len(x), -1, 8)
    scales = blocks.abs().amax(2, keepdim=True) / 7
    return tt.reduce_scatter(((blocks / scales).round() * scales).reshape(x.shape), "dp")


def rounded_to_the_largest(x):
    """Each rank's own scale travels, and then all codes are rounded to the largest one."""
    scale = x.abs().max() / 7
    codes, scales = tt.all_to_all(codes_of(x, scale), "dp"), tt.all_gather(scale.reshape(1), "dp")
    return (codes * scales[:, None] / scales.max()).round().sum(0, keepdim=True) * scales.max()


def shared_levels(x):
    levels = 127 // tt.axis_size("dp")
    scale = tt.all_reduce(x.abs().max(), "dp", "max") / levels
    return tt.reduce_scatter(codes_of(x, scale), "dp") * scale


def leaves_double(x):
    torch.set_default_dtype(torch.float64)
    return repaired(x)


def toward_zero(x):
    scale = x.abs().max() / 7
    codes, scales = tt.all_to_all((x / scale).to(torch.int8), "dp"), tt.all_gather(scale.reshape(1), "dp")
    return (codes * scales[:, None]).sum(0, keepdim=True)


def with_a_zero_point(x):
    low = x.min()
    scale = (x.max() - low) / 15
    codes = tt.all_to_all(((x - low) / scale).round().to(torch.uint8), "dp")
    scales, lows = (tt.all_gather(one.reshape(1, 1), "dp") for one in (scale, low))
    return (codes * scales + lows).sum(0, keepdim=True)


def test_codes_with_a_zero_point_pass():
    expect(check_add_up(with_a_zero_point), True, "no sum is off by more than half of all ranks' scales")


def down_to_one(x):
    scale = x.abs().max()
    codes, scales = tt.all_to_all(codes_of(x, scale), "dp"), tt.all_gather(scale.reshape(1, 1), "dp")
    return (codes * scales).sum(0, keepdim=True)


def test_a_repair_in_jax_passes():
    expect(check_add_up(in_jax, "jax"), True)


def mean_scale(x):
    scale = x.abs().max() / 7
    return tt.reduce_scatter(codes_of(x, scale), "dp") * tt.all_reduce(scale, "dp", "mean")


def largest_scale(x):
    scale = x.abs().max() / 7
    return tt.reduce_scatter(codes_of(x, scale), "dp") * tt.all_reduce(scale, "dp", "max")


def only_codes(x):
    return tt.reduce_scatter(codes_of(x, x.abs().max() / 7), "dp").to(x.dtype)


@pytest.mark.parametrize(
    "fn, hint",
    [
        (mean_scale, "times the mean of all scales"),
        (largest_scale, "times the largest scale"),
        (only_codes, "These are sums of codes. A code times"),
        (half, "These are sums of numbers in half precision"),
        (toward_zero, "Which code is the nearest?"),
        (down_to_one, "These codes are -1, 0 and 1"),
        (lambda x: tt.quantized_reduce_scatter(x, "dp", bits=4), "`quantized_reduce_scatter` does the work"),
        (common_scale, "one common scale, the largest. Such codes can be added, so this is close"),
        (rounded_to_the_largest, "These are sums of codes that have one common scale"),
        (shared_levels, "or do ranks share a scale?"),
        (cut_off, "Is the largest one cut off?"),
        (without_abs(), "Is the largest one cut off?"),
        (without_abs(per_row=True), "Is the largest one cut off?"),
        (without_abs(clamped=True), "Is the largest one cut off?"),
        (times_own_scale_before_adding, "Multiply each rank's codes by that rank's scale, and then add"),
        (rounded_floats_of_blocks, "Codes of a byte each, and scales, take 120 at most"),
        (lambda x: tt.all_to_all(x.bfloat16(), "dp").float().sum(0, keepdim=True), "Codes of a byte each, and"),
        (to_everyone, "Each rank gets rows that are for others"),
        (lambda x: repaired(x) / tt.axis_size("dp"), "Is it divided by R once too often?"),
        (lambda x: repaired(x) * torch.nan, "entries are off"),
        (leaves_double, "it leaves torch's default dtype changed"),
        (of_one_row(lambda: 0), "entries are off"),
        (of_one_row(lambda: -1), "entries are off"),
        (of_one_row(lambda: tt.axis_index("dp")), "entries are off"),
        (of_the_first_row_in_eight_bits, "entries are off"),
        (around_a_ring(7), "Are sums rounded again on their way,"),
        (around_a_ring(127), "Are sums rounded again on their way,"),
        (lambda x: repaired(x.div_(1)) + 0 * x.zero_()[:1], "it changes x in place"),
        (lambda x: tt.all_to_all(x.float(), "dp").sum(0, keepdim=True), "and scales, take 120 at most"),
        (lambda x: x[:1], "entries are off"),
        (lambda x: tt.reduce_scatter(x, "dp"), "Send the codes"),
    ],
)
def test_what_is_wrong_with_a_sum_is_told(fn: Callable, hint: str):
    expect(check_add_up(fn), False, hint)


# -------------------------------------------------------------------------------------------------------- reduce_twice


def solution(x):
    nodes, gpus = tt.axis_size("node"), tt.axis_size("gpu")
    rows = x.reshape(nodes, gpus, -1).transpose(0, 1).flatten(0, 1)
    return tt.reduce_scatter(tt.reduce_scatter(rows, "gpu"), "node")


def with_sizes_swapped(x):
    nodes, gpus = tt.axis_size("node"), tt.axis_size("gpu")
    rows = x.reshape(gpus, nodes, -1).transpose(0, 1).flatten(0, 1)
    return tt.reduce_scatter(tt.reduce_scatter(rows, "gpu"), "node")


def node_first(x):
    rows = x.reshape(tt.axis_size("node"), tt.axis_size("gpu"), -1).transpose(0, 1).flatten(0, 1)
    return tt.reduce_scatter(tt.reduce_scatter(rows, "node"), "gpu")


def sums_for_all(x):
    """Every GPU gets its node's sums for all ranks, and drops most of them."""
    own = slice(tt.axis_index("gpu"), None, tt.axis_size("gpu"))
    return tt.reduce_scatter(tt.all_reduce(x, "gpu")[own], "node")


def all_reduced(x):
    """Every node gets the sums of all nodes, and each of its GPUs takes one."""
    nodes, gpus = tt.axis_size("node"), tt.axis_size("gpu")
    rows = x.reshape(nodes, gpus, -1).transpose(0, 1).flatten(0, 1)
    return tt.all_reduce(tt.reduce_scatter(rows, "gpu"), "node")[tt.axis_index("node")][None]


def solution_in_jax(x):
    nodes, gpus = tj.axis_size("node"), tj.axis_size("gpu")
    rows = x.reshape(nodes, gpus, -1).swapaxes(0, 1).reshape(x.shape)
    return tj.reduce_scatter(tj.reduce_scatter(rows, "gpu"), "node")


def test_an_untouched_stub_is_not_started():
    assert check_reduce_twice(in_the_lab("def reduce_twice")["reduce_twice"]).passed is None


def test_solutions_pass():
    expect(check_reduce_twice(solution), True, "Only sums of a node cross")
    expect(check_reduce_twice(solution_in_jax, "jax"), True)


@pytest.mark.parametrize(
    "fn, hint",
    [
        (
            lambda x: tt.reduce_scatter(tt.reduce_scatter(x, "gpu"), "node"),
            "Inside the node, the first rows go to gpu 0",
        ),
        (node_first, 'In this order of the rows, "gpu" comes before "node".'),
        (with_sizes_swapped, "Which of the two sizes comes first in `reshape`?"),
        (lambda x: tt.reduce_scatter(tt.reduce_scatter(x, "node"), "gpu"), "Which of the two levels should come first"),
        (lambda x: tt.reduce_scatter(x, BOTH), "It begins with all ranks at once"),
        (lambda x: tt.quantized_reduce_scatter(x, BOTH, bits=None, inside="gpu"), "does the work"),
        (lambda x: x[tt.axis_index(BOTH)][None], "nothing is added"),
        (sums_for_all, "one row for each node"),
        (all_reduced, "Which of its sums does another node need?"),
        (lambda x: solution(x.double()).to(x.dtype), "It sends 8 bytes per number, and those of x take 4"),
        (lambda x: solution(x) / tt.axis_size("node") / tt.axis_size("gpu"), "Is it divided by R once too often?"),
        (lambda x: solution(x.bfloat16()).to(x.dtype), "they lose digits on their way"),
    ],
)
def test_what_is_wrong_on_two_levels_is_told(fn: Callable, hint: str):
    expect(check_reduce_twice(fn), False, hint)
