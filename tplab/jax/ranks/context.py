"""The context of a rank's program while JAX traces it: the mesh, and the random key of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType

from tplab.errors import MeshError, OutsideRunError
from tplab.jax.private import devices_around, pvary, varying_axes_of, without_devices
from tplab.mesh import Mesh

_root_key: ContextVar[Any] = ContextVar("tplab_root_key", default=None)


def this_mesh() -> Mesh:
    """The mesh of the `run`, or of the `jax.shard_map`, that is being traced. Raises OutsideRunError."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        raise OutsideRunError(
            "there are no ranks here: collectives, axis_index and axis_size work only inside a function that "
            "tplab.jax.run runs on a mesh; call run(function, Mesh(tp=4), ...)"
        )
    return Mesh(**{name: mesh.shape[name] for name in mesh.axis_names if name in mesh.manual_axes})


@contextmanager
def random_key(key: Any) -> Iterator[None]:
    """A context in which `rank_key` derives its keys from this one."""
    token = _root_key.set(key)
    try:
        yield
    finally:
        _root_key.reset(token)


def run_key() -> Any:
    """The random key of the `run`, from its seed: the same on every rank. Raises OutsideRunError."""
    key = _root_key.get()
    if key is None:
        raise OutsideRunError(
            "there is a random key only inside a function that tplab.jax.run runs, which has a seed; in a shard_map of "
            "your own, pass keys in, and fold axis_index into one that should differ from rank to rank"
        )
    return key


def rank_key() -> Any:
    """This rank's own random key, derived from the seed of the `run` and the rank's number; it differs between ranks.

    Split it for further numbers, like any JAX key: `a, b = jax.random.split(rank_key())`. Every call returns the same.
    """
    names = this_mesh().axis_names
    return jax.random.fold_in(run_key(), jax.lax.axis_index(names))


def varying_axes(x: Any) -> frozenset[str]:
    """The axes along which JAX's types say that `x` may differ from rank to rank."""
    return varying_axes_of(jax.typeof(x))


def vary(x: Any, names: tuple[str, ...]) -> Any:
    """`x`, declared to differ along axes: its values stay, and its gradient becomes the sum over the axes' ranks."""
    missing = tuple(name for name in names if name not in varying_axes(x))
    return pvary(x, missing) if missing else x


@contextmanager
def without_mesh(devices: Iterable[Any], *arrays: Any) -> Iterator[None]:
    """A context without the mesh of `jax.set_mesh`, because a run has its own mesh of these devices. Raises MeshError
    if JAX cannot do that."""
    around = jax.sharding.get_abstract_mesh()
    if around.manual_axes:
        raise MeshError(
            f"run was called in the program of a rank, on {this_mesh()}. In JAX all ranks are one compiled program, "
            "and one of them cannot have ranks of its own: call the function itself, on a mesh that has the axes of "
            "both runs, or use tplab.torch, where a rank can call run"
        )
    others = devices_around()
    if not around.axis_names and not others:
        yield
        return
    if any(isinstance(array, Tracer) for array in (*arrays, jnp.zeros(()))):
        if AxisType.Explicit in around.axis_types:
            raise MeshError(
                "run was called inside jit or grad under a mesh of jax.set_mesh with Explicit axes, and JAX does not "
                "go from that mesh to another while it traces: leave the mesh first, `with jax.set_mesh(...)` around "
                "the rest"
            )
        if others and others != (own := tuple(devices)):
            raise MeshError(
                "run was called inside jit or grad under a mesh of jax.set_mesh, and on other devices than that mesh "
                f"has ({len(own)}, and {len(others)} there); JAX compiles all of a jit for the same devices. Leave the "
                "mesh first, `with jax.set_mesh(...)` around the rest, or give both the same devices"
            )
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            yield
        return
    with jax.sharding.use_abstract_mesh(_NO_MESH), without_devices():
        yield


_NO_MESH = AbstractMesh((), ())
