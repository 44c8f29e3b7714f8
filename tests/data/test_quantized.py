"""Quantised all_gather and reduce_scatter: against NumPy within the stated bounds, with the stated bytes."""

import gc
import inspect

import numpy as np
import pytest
import torch

import tplab.torch as tt
from tests.data.test_quantization import error_bound
from tests.frameworks import FRAMEWORKS, Framework, on_each_rank
from tplab import Mesh, P
from tplab.data import quantization as reference
from tplab.data.quantization import quantized_bytes
from tplab.errors import MeshError, ShapeError

MESH = Mesh(node=2, gpu=3)
AXIS = ("node", "gpu")
BLOCK = 8
ROUNDING = 1e-5  # of sums in float32, beside the bounds of quantisation


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def normals(mesh, shape, seed=0):
    return [np.random.default_rng(seed + rank).standard_normal(shape).astype(np.float32) for rank in mesh.ranks]


def rounded(x, bits, block=BLOCK):
    return reference.dequantize(reference.quantize(x, bits, block))


def off_by_at_most(x, bits, block=BLOCK):
    return error_bound(reference.quantize(x, bits, block))


def test_their_signatures_say_what_they_return(fw):
    for collective in (fw.lab.quantized_all_gather, fw.lab.quantized_reduce_scatter):
        assert inspect.signature(collective).return_annotation in ("Tensor", "Array")


def test_a_reduction_in_flight_keeps_codes_and_not_the_numbers():
    def program(x):
        handle = tt.start(tt.quantized_reduce_scatter, x, "tp")
        kept = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.shape == (1, 21, 11)]
        return len(kept), handle.wait()

    assert tt.run(program, Mesh(tp=1), torch.ones(21, 11)).per_rank[0][0] == 0


# ------------------------------------------------------------------------------------------------------ all_gather


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("axis, inside", [("gpu", None), (AXIS, None), (AXIS, "gpu"), (AXIS[::-1], "node")])
def test_all_gather_gives_every_rank_the_rounded_shards(fw, axis, inside, bits):
    """To the bit, whether in one level or two: between the levels, codes stay codes. The last block is short."""
    xs = normals(MESH, (2, 5))
    program = lambda x: fw.lab.quantized_all_gather(x, axis, 1, bits=bits, block=BLOCK, inside=inside)  # noqa: E731
    for rank, y in enumerate(on_each_rank(fw, program, MESH, xs)):
        shards = [rounded(xs[other], bits) for other in MESH.group(rank, axis)]
        np.testing.assert_array_equal(y, np.concatenate(shards, 1))


def test_started_is_the_same(fw):
    xs = normals(MESH, (6, 5))

    def program(x):
        gathered = fw.lab.start(fw.lab.quantized_all_gather, x, AXIS, block=BLOCK)
        reduced = fw.lab.start(fw.lab.quantized_reduce_scatter, x, AXIS, 0, "mean", block=BLOCK, inside="gpu")
        return gathered.wait(), reduced.wait()

    def blocking(x):
        reduced = fw.lab.quantized_reduce_scatter(x, AXIS, 0, "mean", block=BLOCK, inside="gpu")
        return fw.lab.quantized_all_gather(x, AXIS, block=BLOCK), reduced

    for ones, others in zip(on_each_rank(fw, program, MESH, xs), on_each_rank(fw, blocking, MESH, xs)):
        np.testing.assert_array_equal(ones[0], others[0])
        np.testing.assert_array_equal(ones[1], others[1])


# -------------------------------------------------------------------------------------------------- reduce_scatter


def pieces_for(xs, group, index, dim):
    """What each rank of the group has for the one at `index`."""
    return [np.split(xs[rank], len(group), dim)[index] for rank in group]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_one_level_adds_up_what_each_rank_rounded(fw, op):
    xs = normals(MESH, (3, 12, 2))
    axes = ["gpu", AXIS]
    program = lambda x: [fw.lab.quantized_reduce_scatter(x, axis, 1, op, block=BLOCK) for axis in axes]  # noqa: E731
    for rank, got in enumerate(on_each_rank(fw, program, MESH, xs)):
        for axis, y in zip(axes, got):
            group = MESH.group(rank, axis)
            pieces = pieces_for(xs, group, MESH.index(rank, axis), 1)
            divisor = len(group) if op == "mean" else 1
            np.testing.assert_allclose(y, sum(rounded(x, 4) for x in pieces) / divisor, atol=ROUNDING)
            bound = sum(off_by_at_most(x, 4) for x in pieces) / divisor + ROUNDING
            assert np.all(np.abs(y - sum(pieces) / divisor) <= bound)


@pytest.mark.parametrize("axis, inside", [(AXIS, "gpu"), (AXIS[::-1], "gpu"), (AXIS, "node")])
def test_two_levels_give_every_rank_its_own_piece(fw, axis, inside):
    """Each node's sum is off by what its ranks have rounded, and is rounded once more on its way to the other nodes."""
    xs = normals(MESH, (12, 3))
    program = lambda x: fw.lab.quantized_reduce_scatter(x, axis, bits=8, block=4, inside=inside)  # noqa: E731
    across = next(name for name in AXIS if name != inside)
    for rank, y in enumerate(on_each_rank(fw, program, MESH, xs)):
        index, want, bound = MESH.index(rank, axis), 0.0, ROUNDING
        for node in MESH.group(rank, across):
            group = MESH.group(node, inside)
            pieces = [np.split(xs[other], MESH.size)[index] for other in group]
            node_sum = sum(rounded(x, 8, 4) for x in pieces)
            want = want + sum(pieces)
            bound = bound + sum(off_by_at_most(x, 8, 4) for x in pieces) + off_by_at_most(node_sum, 8, 4) * 1.001
        assert np.all(np.abs(y - want) <= bound)


@pytest.mark.parametrize("inside", [None, "gpu"])
def test_without_bits_they_are_the_plain_ones(fw, inside):
    xs = [x.round() for x in normals(MESH, (6, 4))]

    def program(x):
        plain = fw.lab.all_gather(x, AXIS, 1), fw.lab.reduce_scatter(x, AXIS)
        gathered = fw.lab.quantized_all_gather(x, AXIS, 1, bits=None, inside=inside)
        return gathered, fw.lab.quantized_reduce_scatter(x, AXIS, bits=None, inside=inside), *plain

    for gathered, reduced, plain_gathered, plain_reduced in on_each_rank(fw, program, MESH, xs):
        np.testing.assert_array_equal(gathered, plain_gathered)
        np.testing.assert_array_equal(reduced, plain_reduced)


@pytest.mark.parametrize("inside", [None, "gpu"])
@pytest.mark.parametrize("bits", [8, None])
def test_nothing_stays_nothing(fw, bits, inside):
    def program(x):
        gathered = fw.lab.quantized_all_gather(x, AXIS, 0, bits=bits, inside=inside)
        return gathered, fw.lab.quantized_reduce_scatter(x, AXIS, bits=bits, inside=inside)

    for gathered, reduced in on_each_rank(fw, program, MESH, normals(MESH, (6, 0))):
        assert gathered.shape == (36, 0) and reduced.shape == (1, 0)


# ----------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("bits, block", [(8, 16), (4, None), (None, 16)])
def test_bytes_are_counted_to_the_last_one(fw, bits, block):
    """A shard of 35 elements; scales are listed apart, by their dtype. O = 2 nodes of I = 3 ranks."""
    n = 35
    x = fw.array(np.zeros((6, 7 * 6, 5), np.float32))

    def program(x):
        y = fw.lab.quantized_all_gather(x[0, :7], AXIS, bits=bits, block=block, inside="gpu")
        z = fw.lab.quantized_reduce_scatter(x[0], AXIS, bits=bits, block=block, inside="gpu")
        return y, z

    trace = fw.lab.run(program, MESH, x, in_specs=P(AXIS), keep_values=0).trace
    codes, scales = (4 * n, 0) if bits is None else quantized_bytes(n, bits, block)
    for axis, times in (("node", 1), ("gpu", 2 * 2)):  # O - 1, and (I - 1) O
        for rank in MESH.ranks:
            sent = {"codes": 0, "scales": 0}
            for event in trace.select(kind="collective", rank=rank, axis=axis).events:
                sent["scales" if bits and event.dtype == "float32" else "codes"] += event.bytes
            assert sent == {"codes": 2 * times * codes, "scales": 2 * times * scales}


# ------------------------------------------------------------------------------------------------------- gradients


def caller(lab, is_begun):
    """Calls a collective, or `start` and `wait` in its place."""
    start = lambda op, x, *args, **kwargs: lab.start(op, x, *args, **kwargs).wait()  # noqa: E731
    return start if is_begun else lambda op, x, *args, **kwargs: op(x, *args, **kwargs)


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("inside", [None, "gpu"])
def test_gradients_are_those_of_the_plain_ones(fw, inside, is_begun):
    xs, weights = normals(MESH, (6, 2)), normals(MESH, (36, 2), 10)
    do = caller(fw.lab, is_begun)

    def program(x, w):
        quantized = {"bits": 4, "block": BLOCK, "inside": inside}
        index = fw.lab.axis_index(AXIS)
        loss = lambda x: (do(fw.lab.quantized_all_gather, x, AXIS, **quantized) * w).sum()  # noqa: E731
        plain = lambda x: (fw.lab.all_gather(x, AXIS) * w).sum()  # noqa: E731
        reduced = lambda x: do(fw.lab.quantized_reduce_scatter, x, AXIS, 0, "mean", **quantized)  # noqa: E731
        total = lambda x: (reduced(x) * (1 + index)).sum()  # noqa: E731
        plain_total = lambda x: (fw.lab.reduce_scatter(x, AXIS, 0, "mean") * (1 + index)).sum()  # noqa: E731
        return [fw.gradients(fn, x)[0] for fn in (loss, plain, total, plain_total)]

    for gathered, plain, reduced, plain_reduced in on_each_rank(fw, program, MESH, xs, weights):
        np.testing.assert_allclose(gathered, plain, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(reduced, plain_reduced, rtol=1e-6)
        assert np.abs(reduced).min() > 0


# --------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (lambda do, lab, x: do(lab.quantized_all_gather, x, AXIS, inside=AXIS), MeshError, r"inside must name some of"),
        (
            lambda do, lab, x: do(lab.quantized_all_gather, x, "node", inside="gpu"),
            MeshError,
            r"inside is 'gpu', and axis",
        ),
        (
            lambda do, lab, x: do(lab.quantized_reduce_scatter, x, "gpu"),
            ShapeError,
            r"dim 0 has size 4, which the 3 ranks",
        ),
        (
            lambda do, lab, x: do(lab.quantized_reduce_scatter, x, "node", 0, "max"),
            ValueError,
            r"op is 'max'; .* sum, mean",
        ),
        (
            lambda do, lab, x: do(lab.quantized_all_gather, x, "node", bits=3),
            ValueError,
            r"bits is 3; it must be 8 or 4",
        ),
    ],
)
def test_what_is_wrong_is_said(fw, wrong, error, message, is_begun):
    do = caller(fw.lab, is_begun)
    with pytest.raises((error, RuntimeError), match=message) as info:
        fw.lab.run(lambda x: wrong(do, fw.lab, x), MESH, fw.array(np.zeros((4, 10), np.float32)))
    assert isinstance(info.value.__cause__ or info.value, error)
