"""How much communication is hidden: counted in traces written by hand and in runs, and by formula. Meta tensors too."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.hand_traces import megatron_mlp, overlapped_matmul, ring_all_gather
from tests.simulated_traces import arbitrary_traces
from tplab import Mesh, P, Trace
from tplab.errors import ShapeError
from tplab.torch import (
    GPT,
    AsyncLinear,
    GPTConfig,
    ParallelMLPBlock,
    all_gather,
    all_gather_matmul,
    matmul_reduce_scatter,
    reduce_scatter,
    run,
)
from tplab.torch.layers.overlap import BlockingLinear
from tplab.trace.overlap import Seconds, gather_seconds, overlap, pays_from, scatter_seconds
from tplab.trace.trace import Recorder

ROWS, COLUMNS = P("tp"), P(None, "tp")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


# -------------------------------------------------------------------------------------------------- counted by hand


def test_hops_that_are_longer_than_the_products_beside_them():
    """4 ranks, 3 hops of 12 us, 4 products of 9 us: of 36 us 27 are hidden, which is 3 of the 4 products."""
    found = overlap(overlapped_matmul(4))
    np.testing.assert_allclose(found.communication, 36e-6)
    np.testing.assert_allclose(found.computing, 36e-6)
    np.testing.assert_allclose(found.hidden, 27e-6)
    np.testing.assert_allclose(found.exposed, 9e-6)
    assert found.share == pytest.approx(0.75)
    assert str(found) == "75.0% of the communication is hidden behind computing; 75.0% of what can be hidden"


def test_a_blocking_program_hides_nothing():
    found = overlap(megatron_mlp(Mesh(tp=4), "tp"))
    np.testing.assert_allclose(found.communication, 8e-6)
    assert found.share == found.share_of_possible == 0


def test_what_runs_at_once_counts_once():
    """Two messages on their way together, over two computations that overlap: 1 to 7 and 3 to 9 are at once from 3."""
    recorder = Recorder(Mesh(tp=2))
    for start, end, message in ((1, 5, 0), (2, 7, 1)):
        recorder.add(1, "send", "x", start, end, peer=0, message=message)
        recorder.add(0, "receive", "x", start, end, peer=1, message=message)
    recorder.add(0, "compute", "a", 3, 6)
    recorder.add(0, "compute", "b", 4, 9)
    found = overlap(recorder.trace())
    assert found.communication.tolist() == [6, 0]
    assert found.computing.tolist() == [6, 0]
    assert found.hidden.tolist() == [4, 0]
    assert found.share == pytest.approx(4 / 6)


def test_what_cannot_be_hidden_is_not_asked_for():
    """10 of communication, 4 of computing: no order of them hides more than 4."""
    recorder = Recorder(Mesh(tp=2))
    recorder.add(0, "collective", "all_reduce", 0, 10)
    recorder.add(0, "compute", "a", 0, 2)
    recorder.add(0, "compute", "b", 10, 12)
    found = overlap(recorder.trace())
    assert found.possible.tolist() == [4, 0]
    assert (found.share, found.share_of_possible) == (0.2, 0.5)


def test_without_communication_nothing_is_exposed():
    trace = Trace.from_columns(Mesh(tp=1), rank=[0], kind="compute", op="a", start=[0], end=[1])
    assert overlap(trace).share == overlap(trace).share_of_possible == 1
    assert overlap(ring_all_gather(Mesh(tp=3), "tp")).share == 0  # in steps computing takes no time


@given(arbitrary_traces(min_size=0))
def test_of_any_trace_the_figures_make_sense(trace: Trace):
    found = overlap(trace)
    assert (found.hidden >= 0).all() and (found.hidden <= found.possible).all()
    assert (found.communication <= trace.makespan * (1 + 1e-12)).all()
    np.testing.assert_allclose(found.computing, trace.busy(), atol=1e-12 * max(1, trace.makespan))
    assert 0 <= found.share <= 1 and 0 <= found.share_of_possible <= 1


# --------------------------------------------------------------------------------- by formula, beside runs without data


def makespan(program, x_spec, w_spec, x, weight, num_ranks, cluster):
    return run(program, Mesh(tp=num_ranks), x, weight, in_specs=(x_spec, w_spec), cluster=cluster).trace.makespan


@pytest.mark.parametrize("cluster", ["h100", "laptop", "tpu_v5e"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_the_formulas_are_what_the_modelled_clock_finds(num_ranks, cluster):
    """On meta tensors, which have no numbers: sizes of a real layer, in milliseconds."""
    for tokens, inputs, outputs in ((8192, 8184, 8184 * 3), (16, 96, 48)):
        x, weight = meta(tokens, inputs), meta(outputs, inputs)
        runs = {
            gather_seconds: (ROWS, lambda x, w: all_gather(x, "tp", -1) @ w.T, all_gather_matmul),
            scatter_seconds: (COLUMNS, lambda x, w: reduce_scatter(x @ w.T, "tp", -1), matmul_reduce_scatter),
        }
        for formula, (w_spec, blocking, overlapped) in runs.items():
            found = Seconds(
                makespan(blocking, COLUMNS, w_spec, x, weight, num_ranks, cluster),
                makespan(lambda x, w: overlapped(x, w, "tp"), COLUMNS, w_spec, x, weight, num_ranks, cluster),  # noqa: B023
            )
            want = formula(tokens, inputs, outputs, num_ranks, cluster)
            assert found == pytest.approx(want, rel=1e-12)  # sums of the same times in another order


def test_where_overlap_stops_paying():
    """On 8 modelled H100s. Eight products are launched instead of one, and each reads and writes y again."""
    assert pays_from(8192, 8192, 8, "h100") == 1024
    assert pays_from(4096, 4096, 8, "h100") == 2048
    assert pays_from(1024, 1024, 8, "h100", mode="scatter") is None  # sums take longer than the hops that they hide
    tokens = 1024
    for fewer, is_quicker in ((tokens, True), (tokens // 2, False)):
        blocking, overlapped = gather_seconds(fewer, 8192, 8192, 8, "h100")
        assert (overlapped < blocking) == is_quicker
    with pytest.raises(ValueError, match="mode is 'none'; it must be 'gather' or 'scatter'"):
        pays_from(8, 8, 2, "h100", mode="none")
    with pytest.raises(ShapeError, match="in_features is 10, which 4 ranks cannot share equally;\npad it to 12"):
        gather_seconds(4, 10, 8, 4, "h100")
    with pytest.raises(ValueError, match="dtype is 'int7'; it must be one of float64, float32"):
        gather_seconds(4, 8, 8, 4, "h100", "int7")


@given(
    st.integers(1, 1 << 14), st.integers(1, 512), st.integers(1, 512), st.integers(1, 16),
    st.sampled_from(["h100", "ethernet", "tpu_v5e"]),
)  # fmt: skip
def test_overlap_is_no_quicker_than_its_products_and_its_hops(tokens, inputs, outputs, num_ranks, cluster):
    for seconds in (gather_seconds, scatter_seconds):
        blocking, overlapped = seconds(tokens, inputs * num_ranks, outputs * num_ranks, num_ranks, cluster)
        alone, _ = seconds(tokens, inputs, outputs, 1, cluster)
        assert overlapped >= num_ranks * alone * (1 - 1e-12)
        assert blocking > 0


# ------------------------------------------------------------------------------------------------- width 8192 on H100s


def layers(cls, hidden=4 * 8192):
    """W -> H -> W, forward and backward, as two layers."""

    def program(x):
        with torch.device("meta"):
            up, down = cls(8192, hidden, "tp", mode="gather"), cls(hidden, 8192, "tp", mode="scatter")
        y = down.to(x.dtype)(up.to(x.dtype)(x.requires_grad_()))
        y.sum().backward()
        assert x.grad is not None and x.grad.is_meta
        return y

    return run(program, Mesh(tp=8), meta(8192, 8192), in_specs=(COLUMNS,), out_specs=COLUMNS, cluster="h100")


def test_at_width_8192_all_of_the_layers_communication_is_hidden():
    """tp 8, 8192 tokens. A product takes 75 us, a hop 39: every hop has a longer product beside it."""
    out = layers(AsyncLinear)
    assert out.value.shape == (8192, 8192) and out.value.is_meta
    found = overlap(out.trace)
    assert found.share == pytest.approx(1, abs=1e-9)
    assert found.share_of_possible >= 0.9
    blocking = layers(BlockingLinear).trace
    assert overlap(blocking).share == 0
    assert out.trace.makespan < 0.9 * blocking.makespan


def test_where_hops_are_longer_than_products_the_two_rings_of_a_backward_pass_are_interleaved():
    """H = W: a product takes 22 us, a hop 39. One ring after the other would hide 66 % of the communication."""
    assert overlap(layers(AsyncLinear, hidden=8192).trace).share > 0.75


def test_a_block_made_of_meta_tensors_has_the_trace_of_a_real_one():
    """Small enough to run: the same events at the same times, with and without numbers."""

    def program(x):
        with torch.device(x.device):
            block = ParallelMLPBlock(16, 32, "tp")
        block(x.requires_grad_()).sum().backward()

    def events(x):
        trace = run(program, Mesh(tp=4), x, in_specs=(COLUMNS,), cluster="h100").trace
        return [(e.rank, e.kind, e.op, e.start, e.end, e.bytes, e.shape) for e in trace.events if e.kind != "compute"]

    assert events(torch.randn(4, 16)) == events(meta(4, 16, dtype=torch.float32))


def test_a_gpt_runs_on_meta_tensors():
    """Of 3 billion parameters, on 8 modelled H100s: the communications of two layers, forward and backward."""
    config = GPTConfig(vocab_size=50257, width=10240, num_layers=2, num_heads=80, context=1024)

    def program(ids):
        with torch.device("meta"):
            model = GPT(config)
        model.loss(ids, ids).backward()
        return sum(parameter.numel() for parameter in model.parameters())

    out = run(program, Mesh(tp=8), meta(2, 1024, dtype=torch.long), cluster="h100")
    assert sum(out.per_rank) > 3e9
    whole = [event for event in out.trace.select(rank=0, op="all_reduce").events if event.shape[-1:] == (10240,)]
    assert len(whole) == 2 * 4 + 2  # and one of the embedding, one of the head's input
