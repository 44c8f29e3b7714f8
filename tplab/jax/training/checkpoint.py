"""Checkpoints of stages and optimizer: this process holds all ranks, and writes the file of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tplab.jax.pipeline.stages import Stages
from tplab.jax.training.gpt_stages import GPTPacking
from tplab.jax.training.optimizer import Optimizer
from tplab.models.gpt import gpt_parameters
from tplab.models.state import split_state
from tplab.sharding import held_by
from tplab.training import checkpoint
from tplab.training.checkpoint import STATES, Owned, Part

Arrays = dict[str, np.ndarray]


def save(folder: str | Path, step: int, stages: Stages, state: Any, packing: GPTPacking, optimizer: Optimizer) -> None:
    """Write the model and the optimizer after `step` steps; of copies, the lowest rank's."""
    mesh, about = packing.mesh, gpt_parameters(packing.config, packing.axis)
    kinds: dict[str, Arrays] = {"model": packing.unpack(stages)}
    kinds |= dict(zip(STATES, map(packing.unpack, optimizer.moments_in(state)), strict=True))
    pieces = {kind: split_state(arrays, packing.specs, packing.cut) for kind, arrays in kinds.items()}
    written = set()
    partial = checkpoint.begin(folder, step)
    for rank in mesh.ranks:
        owned: dict[str, Owned] = {}
        for name in packing.names_on(rank):
            shape, spec, *_ = about[name]
            start = tuple(held.start for held in held_by(shape, spec, mesh, rank))
            if (name, start) not in written:
                written.add((name, start))
                for kind in kinds:
                    piece = pieces[kind][packing.position(rank)][name]
                    owned[f"{kind}.{name}"] = Owned(Part.of(shape, start, piece.shape), piece)
        checkpoint.write(partial, rank, mesh.size, owned)
    checkpoint.finish(partial, step, mesh.size, packing.config)


def load(folder: str | Path, step: int, packing: GPTPacking, optimizer: Optimizer) -> tuple[Stages, Any]:
    """The stages and the optimizer's states that were saved after `step` steps, on any mesh. `beginning` has already
    verified the checksums."""
    arrays = checkpoint.load(folder, step, is_checked=True)
    kinds = ("model", *STATES)
    stages, *moments = (packing.pack({name: arrays[f"{kind}.{name}"] for name in packing.specs}) for kind in kinds)
    return stages, optimizer.state_of(step, *moments)
