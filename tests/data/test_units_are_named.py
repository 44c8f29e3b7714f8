"""What a unit of ZeRO stage 3 sends says which unit it is for, though one line of the program runs all units."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tplab.jax as tj
import tplab.torch as tt
from tplab import Mesh, P

BACK_AND_FORTH = [
    ("all_gather", "forward", 0),
    ("all_gather", "forward", 1),
    ("all_gather", "forward", 2),
    ("all_gather", "backward", 2),
    ("all_gather", "backward", 1),
    ("reduce_scatter", "backward", 2),
    ("reduce_scatter", "backward", 1),
    ("reduce_scatter", "backward", 0),
]


def sent(trace):
    found = [(e.op, e.phase, e.where.split(", for unit ")) for e in trace.select(kind="collective", rank=1).events]
    assert len({line for *_, (line, _) in found}) == 1  # they are written on one line
    return sorted((op, phase, int(unit)) for op, phase, (_, unit) in found)


@pytest.mark.parametrize("on", ["simulated", "processes"])
def test_in_torch(on):
    def program(x):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        tt.shard_parameters(model, "dp")(x).sum().backward()

    trace = tt.run(program, Mesh(dp=2), torch.ones(4, 8), in_specs=P("dp"), on=on).trace
    assert sent(trace) == sorted(BACK_AND_FORTH)


def test_in_jax():
    def program(x, weights):
        layers = tj.shard_parameters([lambda w, x: x @ w.T] * 3, "dp")
        return jax.grad(lambda pieces: (layers(pieces, x) ** 2).mean())(layers.shard(weights))

    weights = [np.ones((8, 8), np.float32)] * 3
    trace = tj.run(program, Mesh(dp=2), np.ones((4, 8), np.float32), weights, in_specs=(P("dp"), P())).trace
    assert sent(trace) == sorted(BACK_AND_FORTH)


def test_parameters_outside_units():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.layers(x) * self.scale

    def program(x, model):
        tt.shard_parameters(model(), "dp")(x)

    def names(model):
        trace = tt.run(program, Mesh(dp=2), torch.ones(2, 4), model).trace
        return [e.where.split(", for ")[1] for e in trace.select(kind="collective", rank=0).events]

    assert names(Scaled) == ["the rest of the model", "unit layers.0", "unit layers.1"]
    assert names(lambda: nn.Linear(4, 4)) == ["the model"]
