"""A small model of odd sizes, and its training on one device, with which ZeRO must agree on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.frameworks import Framework
from tests.sharded import numbers
from tplab import Mesh, P
from tplab.data.pieces import Pieces

SHAPES = {"up": (5, 7), "bias": (7,), "down": (7, 3)}
SIZES = [35, 7, 21]
BATCH, STEPS = 24, 20  # a batch that 1, 2, 3, 4 and 8 divide
RATE, DECAY = 1e-2, 0.1
BOTH = (P("dp"), P("dp"))

Make = Callable[..., Any]


def start() -> dict[str, np.ndarray]:
    return {name: numbers(*shape, seed=place) for place, (name, shape) in enumerate(SHAPES.items())}


def batch() -> tuple[np.ndarray, np.ndarray]:
    return numbers(BATCH, 5, seed=10), numbers(BATCH, 3, seed=11)


class Model(nn.Module):
    up: nn.Parameter
    bias: nn.Parameter
    down: nn.Parameter
    tied: nn.Parameter

    def __init__(self, state: dict[str, torch.Tensor]):
        super().__init__()
        for name, value in state.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.up + self.bias) @ self.down


def torch_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def torch_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY)


def jax_loss(params: Any, x: Any, y: Any) -> Any:
    import jax.numpy as jnp

    return ((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - y) ** 2).mean()


def jax_adamw() -> Any:
    import optax

    return optax.adamw(RATE, weight_decay=DECAY)


def one_device(steps: int = STEPS) -> dict[str, np.ndarray]:
    """The parameters after this many steps of AdamW, by torch, in float64."""
    model = Model({name: torch.tensor(value) for name, value in start().items()})
    optimizer = torch_adamw(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        torch_loss(model, *map(torch.tensor, batch())).backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def train(fw: Framework, make: Make, num_ranks: int, steps: int = STEPS, mesh: Mesh | None = None) -> Any:
    """The result of a run that trains the same on ranks that share the batch; its value is the parameters. `make`
    makes the optimizer from one of the framework, in torch also from the parameters."""
    program = (_torch_steps if fw.name == "torch" else _jax_steps)(make, steps)
    mesh = mesh or Mesh(dp=num_ranks)
    state, (x, y) = {name: fw.array(value) for name, value in start().items()}, map(fw.array, batch())
    spec = P(mesh.axis_names)
    return fw.lab.run(program, mesh, state, x, y, in_specs=(P(), spec, spec), out_specs=P(), keep_values=0)


def _torch_steps(make: Make, steps: int) -> Callable[..., Any]:
    def program(state: Any, x: Any, y: Any) -> Any:
        model = Model(state)
        optimizer = make(torch_adamw, params=model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            torch_loss(model, x, y).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    return program


def _jax_steps(make: Make, steps: int) -> Callable[..., Any]:
    def program(params: Any, x: Any, y: Any) -> Any:
        import jax
        import optax

        optimizer = make(jax_adamw())

        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            _, grads = optimizer.value_and_grad(jax_loss)(params, x, y)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, steps)[0][0]

    return program


def elements_sent(stage: int, pieces: Iterable[Pieces], *, reshard_after_forward: bool = True) -> int:
    """The elements that each rank sends in a step with the ring algorithm: (R-1)/R of 2 M or 3 M.

    pieces                  of all buckets or units, including their padding, which is also sent; stage 0 has no padding
    reshard_after_forward   stage 3: whether parameters are freed after the forward pass and gathered again
    """
    passes = 3 if stage == 3 and reshard_after_forward else 2
    listed = list(pieces)
    if stage == 0:
        return sum(passes * (p.num_ranks - 1) * sum(p.sizes) // p.num_ranks for p in listed)
    return sum(passes * (p.num_ranks - 1) * p.width for p in listed)
