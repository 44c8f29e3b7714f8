"""A GPT-2 of `transformers` as tplab's GPT, and its weights sharded over a mesh.

config = gpt2_config(model.config)
params = gpt2_params(model.state_dict(), config)
params = shard_params(params, GPT(config).specs, Mesh(tp=4))
run(program, Mesh(tp=4), params, ids, in_specs=(GPT(config).specs, P()), ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from tplab.errors import SpecError
from tplab.jax.layers.parameters import Params, nested
from tplab.jax.ranks.devices import jax_mesh
from tplab.jax.ranks.specs import check, spread, to_jax
from tplab.mesh import Mesh
from tplab.models.gpt import GPTConfig
from tplab.models.gpt2 import gpt2_state
from tplab.sharding import P


def gpt2_params(state: Mapping[str, Any], config: GPTConfig) -> Params:
    """The parameters of GPT(config) from the state of a transformers GPT-2: the same model.

    state   "transformer.h.0.attn.c_attn.weight", with or without "transformer." -> torch tensors, NumPy arrays, ...
    See `tplab.models.gpt2.gpt2_state`, whose errors it raises.
    """
    return nested({name: jnp.asarray(x) for name, x in gpt2_state(state, config).items()})


def shard_params(params: Params, specs: Any, mesh: Mesh, *, on: str = "simulated") -> Params:
    """The same parameters, each rank's piece on its own device. `run` and `jax.jit` then use them in place.

    specs   the same structure of P, such as a layer's `specs`, or one P for all
    on      as for `run`

    A dim that does not divide, such as a vocabulary, is padded with zeros at its end (`pad_vocabulary`).
    """
    check(specs, "specs", mesh)
    leaves, structure = jax.tree.flatten(params)
    devices = jax_mesh(mesh, on)
    placed = [
        jax.device_put(_padded(leaf, spec, mesh), NamedSharding(devices, to_jax(spec)))
        for leaf, spec in zip(leaves, spread(specs, params, "specs"), strict=True)
    ]
    return structure.unflatten(placed)


def _padded(leaf: Any, spec: P, mesh: Mesh) -> Any:
    if len(spec) > np.ndim(leaf):
        raise SpecError(f"{spec} has {len(spec)} entries, and the parameter has {np.ndim(leaf)} dims; give one per dim")
    sizes = [0 if entry is None else -np.shape(leaf)[dim] % mesh.axis_size(entry) for dim, entry in enumerate(spec)]
    if not any(sizes):
        return leaf
    return jnp.pad(leaf, [(0, size) for size in sizes] + [(0, 0)] * (np.ndim(leaf) - len(spec)))
