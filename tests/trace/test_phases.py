"""What a trace says of each event beside its times: the pass that it belongs to, and how a collective combines."""

from collections import Counter

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tplab.jax as tj
import tplab.torch as tt
from tplab import Mesh, P
from tplab.trace import Trace

X, W = np.ones((4, 6)), np.linspace(-1, 1, 24).reshape(6, 4)
SPECS = (P(), P(None, "tp"))  # column-parallel: what comes back to x has to be summed


def collectives(trace: Trace) -> Counter[tuple[str, str, str]]:
    events = trace.select(rank=0, kind="collective").events
    return Counter((event.op, event.reduction, event.phase) for event in events)


def torch_step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    y = tt.copy_to(x, "tp") @ w
    tt.all_reduce(y.detach().abs().max(), "tp", "max")
    y.square().sum().backward()
    assert x.grad is not None
    return tt.all_reduce(x.grad.sum(), "tp", "mean")


BOTH_PASSES = {
    ("all_reduce", "max", "forward"): 1,
    ("all_reduce", "sum", "backward"): 1,
    ("all_reduce", "mean", "forward"): 1,
}


@pytest.mark.parametrize("on", ["simulated", "processes"])
def test_torch(on):
    cluster = "h100" if on == "simulated" else None
    trace = tt.run(torch_step, Mesh(tp=2), *map(torch.tensor, (X, W)), in_specs=SPECS, on=on, cluster=cluster).trace
    assert collectives(trace) == BOTH_PASSES
    assert collectives(Trace.from_json(trace.to_json())) == BOTH_PASSES
    products = [event.phase for event in trace.select(rank=0, op="mm").events]
    assert products == (["forward", "backward"] if cluster else [])


def test_messages_of_a_ring_that_run_backwards():
    def gather(x: torch.Tensor) -> None:
        x.requires_grad_()
        torch.stack(tt.ring_all_gather(x, "tp")).square().sum().backward()

    sends = tt.run(gather, Mesh(tp=3), torch.ones(2)).trace.select(rank=0, kind="send").events
    assert Counter(event.phase for event in sends) == {"forward": 2, "backward": 2}


def test_jax():
    def step(x, w):
        def loss(x):
            y = x @ w
            tj.all_reduce(jax.lax.stop_gradient(abs(y).max()), "tp", "max")
            return tj.all_reduce((y**2).sum(), "tp")

        top = tj.all_reduce((x @ w).max(), "tp", "max")
        return jax.grad(loss)(x), top

    trace = tj.run(step, Mesh(tp=2), jnp.array(X), jnp.array(W), in_specs=SPECS, cluster="h100").trace
    found = collectives(trace)
    assert found["all_reduce", "max", "forward"] == 1 and found["all_reduce", "sum", "backward"] == 1, found
    products = [event.phase for event in trace.select(rank=0, op="dot_general").events]
    assert Counter(products) == {"forward": 2, "backward": 1}


def test_what_xla_compiled():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec()))
    w = jax.device_put(W, NamedSharding(mesh, PartitionSpec(None, "tp")))
    trace = tj.trace(jax.jit(jax.grad(lambda x, w: ((x @ w) ** 2).sum())), x, w)
    assert collectives(trace) == {("all_reduce", "sum", "backward"): 1}
    top = tj.trace(jax.jit(lambda x, w: (x @ w).max()), x, w)
    assert collectives(top) == {("all_reduce", "max", "forward"): 1}
