"""A small GPT, and one training step of the unsharded model by torch on one rank, to compare every mesh with."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from tests.sharded import close
from tplab import Mesh
from tplab.models.gpt import GPTConfig, gpt_specs, gpt_state
from tplab.models.state import split_state

CONFIG = GPTConfig(32, 16, 2, 4, 12)
IDS = np.random.default_rng(1).integers(0, 32, (8, 13))
X, Y = IDS[:, :-1], IDS[:, 1:]

Grads = dict[str, np.ndarray]


@cache
def whole(config: GPTConfig = CONFIG) -> tuple[float, Grads]:
    """The loss of the initial weights, and every gradient."""
    from tplab.torch import GPT, run

    def program() -> Any:
        model = GPT(config).double()
        model.load_state_dict({name: torch.tensor(x) for name, x in gpt_state(config).items()})
        loss = model.loss(torch.tensor(X), torch.tensor(Y))
        loss.backward()
        return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}  # type: ignore[union-attr]

    return run(program, Mesh(tp=1, ep=1)).per_rank[0]


def check_pieces(per_rank: list[tuple[float, Grads]], mesh: Mesh, config: GPTConfig = CONFIG) -> None:
    """Raise AssertionError if a rank's loss, or its piece of a gradient, is not that of the whole model."""
    loss, grads = whole(config)
    pieces = split_state(grads, gpt_specs(config), mesh)
    seen = set()
    for rank, (got, held) in enumerate(per_rank):
        assert abs(got - loss) < 1e-12
        for name, grad in held.items():
            # the gradient of key's bias is only rounding, since softmax does not depend on it
            close(grad, pieces[rank][name], f"rank {rank}: {name}", tolerance=1e-11, cancelled=1)
        seen |= held.keys()
    assert seen == grads.keys()
