"""The devices that ranks run on: accelerators if the mesh fits on them, otherwise CPU devices that JAX simulates.

Some settings must be fixed before JAX is first used, and cannot be changed later. So importing `tplab.jax` fixes them:
the number of CPU devices, how many threads serve them, and how long ranks may wait for each other. With one thread per
core, which is XLA's default, a few programs in flight on a small machine starve each other; and when a rank has waited
for 40 seconds, XLA ends the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from tplab.errors import MeshError
from tplab.jax.private import at_first_use, knows_patience_flag
from tplab.mesh import Mesh

NUM_CPU_DEVICES = 16
"""The default number of CPU devices; an unused device costs nothing."""

_MOST_CPU_DEVICES = 1024  # that tplab requests; with 2,048 the first message takes 15 seconds

# A device may run two programs at once, one of which waits for devices that still run the other; each holds a thread.
# With 2 threads per device nothing has starved, with 1.5 everything has; 3 make a product 5% slower.
_THREADS_A_DEVICE = 3

_PATIENCE = "xla_cpu_collective_call_terminate_timeout_seconds"
_PATIENCE_SECONDS = 600  # long enough for a rank that computes; short enough to notice one that never comes

_threads = [os.cpu_count() or 1]  # XLA's default, until we request more


def prepare(num_devices: int = NUM_CPU_DEVICES) -> None:
    """Let JAX have at least `num_devices` CPU devices. You only need this for a mesh of more than 16 ranks.

    Call it before JAX is first used (before the first array is made). Raises MeshError if it comes too late and there
    are fewer, and for more than 1,024.
    """
    if num_devices > _MOST_CPU_DEVICES:
        raise MeshError(_too_few(num_devices, "cpu"))
    if not _arrange(max(num_devices, _arranged())) and len(jax.devices("cpu")) < num_devices:
        raise MeshError(_too_few(num_devices, "cpu"))


def _arrange(num_devices: int) -> bool:
    """Make JAX create this many CPU devices. Returns False if it has already created its devices."""
    try:
        jax.config.update("jax_num_cpu_devices", -1)  # JAX objects only to a change, so make one
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        return False
    return True


def _arranged() -> int:
    """How many CPU devices JAX will create, by its settings; 0 or less if they do not say."""
    flag = re.search(r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(jax.config.jax_num_cpu_devices, int(flag[1]) if flag else 0)  # type: ignore[attr-defined]


@contextmanager
def _threads_and_patience() -> Iterator[None]:
    """A context with the environment for XLA's CPU client, which reads these settings only from there, when created."""
    before = {name: os.environ.get(name) for name in ("NPROC", "XLA_FLAGS")}
    num_threads = max(_THREADS_A_DEVICE * _arranged(), os.cpu_count() or 1, int(before["NPROC"] or 0))
    _threads[0], flags = num_threads, before["XLA_FLAGS"] or ""
    os.environ["NPROC"] = str(num_threads)
    if knows_patience_flag() and _PATIENCE not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_PATIENCE}={_PATIENCE_SECONDS}".strip()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@lru_cache(maxsize=64)
def jax_mesh(mesh: Mesh, on: str = "simulated") -> jax.sharding.Mesh:
    """The mesh as JAX's own: rank r is `jax_mesh(mesh).devices.flat[r]`.

    on   "simulated": accelerators if there are enough, otherwise CPU devices. Or a platform: "cpu", "gpu", "tpu"
    """
    devices = _devices(mesh.size, on)
    # Auto: the compiler chooses shardings around shard_map. (By default JAX makes axes Explicit.)
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return jax.make_mesh(tuple(mesh.shape.values()), mesh.axis_names, axis_types=types, devices=devices)


def _devices(count: int, on: str) -> Sequence[Any]:
    if on == "processes":
        raise ValueError(
            "on='processes' is for tplab.torch; in JAX, start the script once on each host, call "
            "jax.distributed.initialize() before anything else, and run uses the devices of all of them"
        )
    if on == "simulated":
        # This works if JAX is used for the first time, and has no effect otherwise.
        _arrange(max(count if count <= _MOST_CPU_DEVICES else 1, _arranged()))
        default = jax.devices()
        if default[0].platform != "cpu" and len(default) >= count:
            return _of_every_process(default, count)
    platform = "cpu" if on == "simulated" else on
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(
            f"on is {on!r}, and JAX knows no such devices here ({error}); it must be 'simulated', 'cpu', 'gpu' or 'tpu'"
        ) from error
    if len(devices) < count:
        raise MeshError(_too_few(count, platform))
    return _of_every_process(devices, count)


def _of_every_process(devices: Sequence[Any], count: int) -> list[Any]:
    """The first `count` devices; with several processes, the same number of each, in their order."""
    num_processes = jax.process_count()
    share, left = divmod(count, num_processes)
    if left:
        raise MeshError(
            f"the mesh has {count} ranks, and JAX runs on {num_processes} processes, which cannot share them equally; "
            f"use a mesh whose size {num_processes} divides"
        )
    own = [[device for device in devices if device.process_index == process] for process in range(num_processes)]
    return [device for group in own for device in group[:share]]


def needs_pacing(mesh: jax.sharding.Mesh) -> bool:
    """Whether one call must end before the next may start, because too few threads serve the devices of `mesh`."""
    cpu = mesh.devices.flat[0].platform == "cpu"
    return cpu and mesh.size > 1 and _threads[0] < _THREADS_A_DEVICE * mesh.size


def rank_of_device(mesh: jax.sharding.Mesh) -> dict[Any, int]:
    return {device: rank for rank, device in enumerate(np.ravel(mesh.devices))}


def _too_few(count: int, platform: str) -> str:
    have = len(jax.devices(platform))
    if platform != "cpu":
        return f"the mesh has {count} ranks, and JAX {have} {platform} devices; use a smaller mesh, or on='cpu'"
    if count > _MOST_CPU_DEVICES:
        return (
            f"the mesh has {count:,} ranks, and tplab has JAX simulate at most {_MOST_CPU_DEVICES:,} CPU devices, each "
            "of which has threads of its own; use a smaller mesh"
        )
    return (
        f"the mesh has {count} ranks, and JAX made {have} CPU devices when it was first used; their number is fixed "
        f"from then on.\nRestart the kernel, and let its first lines be\n"
        f"    import tplab.jax\n    tplab.jax.prepare({count})"
    )


at_first_use(_threads_and_patience)
if _arranged() < 1:  # otherwise the user has set the number
    _arrange(NUM_CPU_DEVICES)
