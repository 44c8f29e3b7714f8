"""How much communication is hidden: counted in traces written by hand, and in runs of meta tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.hand_traces import megatron_mlp, overlapped_matmul, ring_all_gather
from tests.simulated_traces import arbitrary_traces
from tplab import Mesh, P, Trace
from tplab.torch import (
    GPT,
    AsyncLinear,
    GPTConfig,
    ParallelMLPBlock,
    run,
)
from tplab.torch.layers.overlap import BlockingLinear
from tplab.trace import Recorder, overlap

COLUMNS = P(None, "tp")


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


# ---------------------------------------------------------------------------------------------- runs without data


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
    """H = W: a product takes 22 us, a hop 39. One ring after the other would hide 66% of the communication."""
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
