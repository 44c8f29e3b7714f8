"""Checkpoints of a rank's stages and optimizer: the part that it writes, and what it reads, from any mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tplab.models.gpt import GPTConfig, gpt_parameters
from tplab.torch.comm.collectives import barrier
from tplab.torch.layers.parameters import piece_of
from tplab.torch.ranks.rank import this_rank
from tplab.torch.training.gpt_stages import box_of
from tplab.torch.training.optimizer import Optimizer
from tplab.training import checkpoint
from tplab.training.checkpoint import STATES, Owned, Part


def save(folder: str | Path, step: int, optimizer: Optimizer, config: GPTConfig) -> None:
    """Write the model and the optimizer after `step` steps. All ranks call it."""
    rank = this_rank()
    owned: dict[str, Owned] = {}
    specs = gpt_parameters(config)
    copies = tuple(name for name in ("dp", "ep", "cp", "tp") if name in rank.mesh.axis_names)
    for piece in optimizer.pieces:
        about = specs[piece.name]
        unlike = {*optimizer.cut_along, *about.spec.axis_names}
        is_writer = all(rank.place(name).index == 0 for name in copies if name not in unlike)
        if piece.is_counted and is_writer and len(piece.held):
            part = Part.of(about.shape, *box_of(about), piece.held)
            owned[f"model.{piece.name}"] = Owned(part, _numpy(piece.own))
            for kind in STATES:
                owned[f"{kind}.{piece.name}"] = Owned(part, _numpy(optimizer.states(piece)[kind]))
    if rank.rank == 0:
        checkpoint.begin(folder, step)
    barrier()
    checkpoint.write(checkpoint.partial_path(folder, step), rank.rank, rank.mesh.size, owned)
    barrier()
    if rank.rank == 0:
        checkpoint.finish(checkpoint.partial_path(folder, step), step, rank.mesh.size, config)
    barrier()


@torch.no_grad()
def load(folder: str | Path, step: int, optimizer: Optimizer, config: GPTConfig) -> None:
    """Load into this rank's stages and optimizer a checkpoint after `step` steps, from any mesh. `beginning` has
    already compared it with its checksums."""
    wanted = {piece.name for piece in optimizer.pieces}
    names = [f"{kind}.{name}" for name in wanted for kind in ("model", *STATES)]
    arrays = checkpoint.load(folder, step, names, is_checked=True)
    specs = gpt_parameters(config)
    for piece in optimizer.pieces:
        wholes = {kind: torch.from_numpy(arrays[f"{kind}.{piece.name}"]) for kind in ("model", *STATES)}
        here = {kind: piece_of(whole, specs[piece.name].spec) for kind, whole in wholes.items()}
        if piece.whole is not None:
            piece.whole.copy_(here["model"])
        states = optimizer.states(piece)
        states["step"].fill_(step)
        for kind, x in {"model": piece.own, **{kind: states[kind] for kind in STATES}}.items():
            x.copy_(here[kind].reshape(-1)[piece.held.start : piece.held.stop].view_as(x))


def _numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
