"""The whole state of a model whose parameters ZeRO stage 3 has cut, to save or inspect it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tplab.torch.data.pieces import gather_rows, row_of, wholes_in
from tplab.torch.data.shard_parameters import sharded_model


@torch.no_grad()
def gather_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model that `shard_parameters` has cut: name -> whole tensor, the same on every rank.

        state = gather_state(model)            # called by all ranks
        if axis_index("dp") == 0:
            torch.save(state, "model.pt")      # the unsharded model's load_state_dict takes it

    It is a snapshot in the dtype of the pieces, even if they travel in another one: a later step does not change it.
    sent      (R-1)/R of the parameters by each rank
    Raises ValueError for a model that has not been cut.
    """
    wholes: dict[Tensor, Tensor] = {}
    for unit in sharded_model(model).units:
        for group in unit.groups:
            row = row_of(group.pieces, group.shards, group.shards[0].dtype)
            message = gather_rows(row, group.about.axis).read()
            wholes.update(zip(group.shards, wholes_in(group.pieces, message)))
    state = model.state_dict(keep_vars=True)
    return {name: wholes[x].clone() if x in wholes else x.detach().clone() for name, x in state.items()}
