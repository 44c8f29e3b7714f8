"""Norms of whole and of sharded features, against torch's own: float64, every gradient, in both frameworks."""

import pytest
import torch
from torch.nn import functional as F

from tests.frameworks import FRAMEWORKS, Framework
from tests.sharded import check, numbers
from tplab import Mesh, P
from tplab.errors import ShapeError

WIDTH, SEQUENCE = 24, 8


@pytest.fixture(params=FRAMEWORKS)
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


def layer_norm(state, x):
    return F.layer_norm(x, (x.shape[-1],), state["weight"], state["bias"], 1e-5)


def rms_norm(state, x):
    return F.rms_norm(x, (x.shape[-1],), state["weight"], 1e-6)


def state_of(kind, width=WIDTH):
    return {"weight": numbers(width, seed=1)} | ({"bias": numbers(width, seed=2)} if kind == "LayerNorm" else {})


ORACLES = {"LayerNorm": layer_norm, "RMSNorm": rms_norm}
X = numbers(2, SEQUENCE, WIDTH) * 3 + 5  # a mean that is not zero


@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_are_summed_under_sequence_parallelism(fw, kind, num_ranks):
    """Megatron-LM #443 and #1446. run checks that the ranks agree, and this that they are right."""
    state = state_of(kind)
    specs = {name: P() for name in state}
    make = lambda lab: getattr(lab, kind)(WIDTH, sequence_axis="tp")  # noqa: E731
    check(fw, Mesh(tp=num_ranks), make, ORACLES[kind], state, specs, X, P(None, "tp"), P(None, "tp"))
    make = lambda lab: getattr(lab, kind)(WIDTH)  # noqa: E731
    trace = check(fw, Mesh(tp=num_ranks), make, ORACLES[kind], state, specs, X)
    assert trace.bytes_sent() == 0


@pytest.mark.parametrize("kind, sums", [("LayerNorm", 2), ("RMSNorm", 1)])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_sharded_features_are_normalised_as_a_whole(fw, kind, sums, num_ranks):
    state = state_of(kind)
    specs = {name: P("tp") for name in state}
    make = lambda lab: getattr(lab, "Parallel" + kind)(WIDTH, "tp")  # noqa: E731
    features = P(None, None, "tp")
    trace = check(fw, Mesh(tp=num_ranks), make, ORACLES[kind], state, specs, X, features, features)
    if num_ranks > 1:  # forward and backward, one number per token each
        events = trace.select(kind="collective", rank=0).events
        assert [event.op for event in events] == ["all_reduce"] * 2 * sums
        assert {event.shape for event in events} == {(2, SEQUENCE, 1)}


@pytest.mark.parametrize("kind", ORACLES)
def test_statistics_of_16_bit_numbers_are_computed_in_32_bits(fw, kind):
    """As torch does: otherwise a row whose mean is far from zero is off by more than rounding its result costs."""
    narrow = torch.tensor(numbers(4, 4096) * 3 + 20).bfloat16()
    exact = ORACLES[kind]({"weight": torch.ones(4096), "bias": torch.zeros(4096)}, narrow.float()).numpy()
    x = narrow if fw.name == "torch" else fw.array(narrow.float().numpy()).astype("bfloat16")

    def norm(layer, x):
        if fw.name == "torch":
            return layer.bfloat16()(x).float()
        return layer({name: p.astype("bfloat16") for name, p in layer.init().items()}, x).astype("float32")

    def program(whole, piece):
        layers = getattr(fw.lab, kind)(4096), getattr(fw.lab, "Parallel" + kind)(4096, "tp")
        return norm(layers[0], whole), norm(layers[1], piece)

    specs = P(), P(None, "tp")
    for got in fw.lab.run(program, Mesh(tp=2), x, x, in_specs=specs, out_specs=specs).value:
        assert abs(fw.numpy(got) - exact).max() <= abs(exact).max() * 2**-8  # half a unit of bfloat16's 8 digits


def test_statistics_of_a_piece_would_be_wrong():
    """The test above can fail: norms of the pieces are another function."""
    fw = FRAMEWORKS["torch"]()
    make = lambda lab: lab.LayerNorm(WIDTH // 2)  # noqa: E731
    features = P(None, None, "tp")
    with pytest.raises(AssertionError, match="y is off by"):
        check(
            fw,
            Mesh(tp=2),
            make,
            layer_norm,
            state_of("LayerNorm"),
            {"weight": P("tp"), "bias": P("tp")},
            X,
            features,
            features,
        )


def called(fw, layer, x):
    return layer(x) if fw.name == "torch" else layer(layer.init(), x)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda lab: lab.LayerNorm(16), r"LayerNorm takes x \[..., 16\], but got \[2, 4\]; ParallelLayerNorm and"),
        (lambda lab: lab.RMSNorm(5), r"RMSNorm takes x \[..., 5\], but got \[2, 4\](\n|$)"),
        (
            lambda lab: lab.ParallelLayerNorm(4, "tp"),
            r"takes x \[..., 1\], but got \[2, 4\] of 4 features over all ranks;",
        ),
        (lambda lab: lab.ParallelRMSNorm(6, "tp"), r"width is 6, which the 4 ranks of axis .*;\npad it to 8"),
    ],
)
def test_what_is_wrong_is_said(fw, make, message):
    with pytest.raises(ShapeError, match=message):
        fw.lab.run(lambda x: called(fw, make(fw.lab), x), Mesh(tp=4), fw.array(numbers(2, 4).astype("float32")))
