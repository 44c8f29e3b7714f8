"""Block quantisation: what comes back, and that torch and JAX give the bits that NumPy gives."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.frameworks import FRAMEWORKS, Framework
from tplab.data import quantization as reference
from tplab.data.quantization import LEVELS, SMALLEST, Quantized, block_size, quantized_bytes

BITS = pytest.mark.parametrize("bits", [8, 4])
BLOCKS = (None, 1, 7, 64)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def check_same_bits(fw, x, bits, block):
    """`fw` gives the codes and scales of the reference, and the same numbers back."""
    want, got = reference.quantize(x, bits, block), fw.lab.quantize(fw.array(x), bits, block)
    assert (got.shape, got.bits, got.block) == (x.shape, bits, block)
    for ours, theirs in ((got.codes, want.codes), (got.scales, want.scales)):
        assert fw.numpy(ours).dtype == theirs.dtype
        np.testing.assert_array_equal(fw.numpy(ours), theirs)  # NaN is equal to NaN here
    back = fw.numpy(fw.lab.dequantize(got))
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back, reference.dequantize(want))


@BITS
@given(x=arrays(np.float32, st.integers(0, 40), elements=FINITE), block=st.sampled_from(BLOCKS))
def test_no_element_is_off_by_more_than_half_a_step_of_its_block(bits, x, block):
    quantized = reference.quantize(x, bits, block)
    apart = np.abs(reference.dequantize(quantized).astype(np.float64) - x)
    assert np.all(apart <= error_bound(quantized))


@BITS
@given(x=arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)), block=st.sampled_from(BLOCKS))
def test_torch_gives_the_bits_of_numpy(bits, x, block):
    check_same_bits(FRAMEWORKS["torch"](), x, bits, block)


@BITS
@settings(max_examples=15)  # of one shape: JAX compiles each operation for every shape
@given(x=arrays(np.float32, 17, elements=st.floats(width=32)))
def test_jax_gives_the_bits_of_numpy(bits, x):
    check_same_bits(FRAMEWORKS["jax"](), x, bits, 7)


@BITS
def test_jax_gives_the_same_bits_where_all_is_compiled_as_one(bits):
    import jax

    x = (np.random.default_rng(0).standard_normal(1000) * 10.0 ** np.arange(-40, 37).repeat(13)[:1000]).astype("f4")
    want = reference.quantize(x, bits, 64)
    got = jax.jit(lambda x: FRAMEWORKS["jax"]().lab.quantize(x, bits, 64))(x)
    np.testing.assert_array_equal(np.asarray(got.codes), want.codes)
    np.testing.assert_array_equal(np.asarray(got.scales), want.scales)


@BITS
def test_numbers_by_hand(fw, bits):
    """The largest of a block takes the largest code, and halves go to the even one."""
    level = reference.LEVELS[bits]
    x = np.array([[level, -level, 0.5], [1.5, 2.4, 0.0], [3 * level, 3, -1.4]], np.float32)
    quantized = fw.lab.quantize(fw.array(x), bits, 3)
    np.testing.assert_allclose(fw.numpy(quantized.scales), [1, 2.4 / level, 3], rtol=1e-6)
    second = [round(1.5 * level / 2.4) * 2.4 / level, 2.4, 0]
    want = [[level, -level, 0], second, [3 * level, 3, 0]]
    np.testing.assert_allclose(fw.numpy(fw.lab.dequantize(quantized)), want, rtol=1e-6)


def test_an_outlier_spoils_its_own_block_only(fw):
    x = np.tile(np.linspace(-1, 1, 8, dtype=np.float32), 4)
    x[3] = 1000
    back = {block: fw.lab.dequantize(fw.lab.quantize(fw.array(x), 8, block)) for block in (None, 8)}
    apart = {block: np.abs(fw.numpy(y) - x) for block, y in back.items()}
    assert apart[None][8:].max() > 0.9  # the step is 7.9: all others come back as 0
    assert apart[8][8:].max() < 1 / 254 * 1.001


@BITS
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_an_overflow_stays_visible(fw, bits, wrong):
    x = np.arange(10, dtype=np.float32)
    x[5] = wrong
    back = fw.numpy(fw.lab.dequantize(fw.lab.quantize(fw.array(x), bits, 4)))
    assert np.isnan(back).tolist() == [False] * 4 + [True] * 4 + [False] * 2


def test_zeros_and_nothing(fw):
    for shape, block in (((2, 3), 4), ((0, 3), 4), ((0, 3), None)):
        x = np.zeros(shape, np.float32)
        np.testing.assert_array_equal(fw.numpy(fw.lab.dequantize(fw.lab.quantize(fw.array(x), 4, block))), x)


@pytest.mark.parametrize("n, block", [(10, 4), (10, None), (9, 3), (1, 256), (0, 4)])
@BITS
def test_bytes_are_those_of_the_buffers(fw, n, block, bits):
    quantized = fw.lab.quantize(fw.array(np.ones(n, np.float32)), bits, block)
    counted = quantized_bytes(n, bits, block)
    assert quantized.num_bytes == counted == (fw.numpy(quantized.codes).nbytes, fw.numpy(quantized.scales).nbytes)
    assert counted.codes == -(-n * bits // 8)
    assert counted.scales == 4 * (-(-n // block) if block else min(n, 1))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_floats_are_computed_in_float32(fw, dtype):
    if (fw.name, dtype) == ("jax", "float64"):
        pytest.skip("JAX makes float32 of it by itself")
    given = fw.array(np.linspace(-3, 3, 32).astype(dtype))
    want = reference.quantize(np.asarray(fw.numpy(given), np.float32), 8, 16)
    got = fw.lab.quantize(given, 8, 16)
    np.testing.assert_array_equal(fw.numpy(got.codes), want.codes)
    np.testing.assert_array_equal(fw.numpy(got.scales), want.scales)


@pytest.mark.parametrize(
    "bits, block, error, message",
    [
        (3, 4, ValueError, r"bits is 3; it must be 8 or 4"),
        (8, 0, ValueError, r"block is 0; a scale needs 1 element at least, or None"),
        (8, 2.0, TypeError, r"block must be a whole number, not 2\.0"),
    ],
)
def test_what_is_wrong_is_said(fw, bits, block, error, message):
    with pytest.raises(error, match=message):
        fw.lab.quantize(fw.array(np.ones(4, np.float32)), bits, block)
    with pytest.raises(error, match=message):
        reference.quantize(np.ones(4, np.float32), bits, block)


def test_whole_numbers_are_refused(fw):
    with pytest.raises(TypeError, match=r"quantize takes floating-point numbers, not (torch.)?int32; convert"):
        fw.lab.quantize(fw.array(np.ones(4, np.int32)))


def error_bound(quantized: Quantized) -> np.ndarray:
    """How far off each element may be, [...]: half a step of its block, plus float32 rounding (2**-15 of a step).

    A block whose scale is 0 holds numbers below 127 * 2.4e-38, which all come back as 0.
    """
    n = math.prod(quantized.shape)
    scales = np.asarray(quantized.scales, np.float64)
    bound = np.where(scales == 0, LEVELS[quantized.bits] * float(SMALLEST), scales * (0.5 + 2.0**-15))
    return np.repeat(bound, block_size(n, quantized.block))[:n].reshape(quantized.shape)
