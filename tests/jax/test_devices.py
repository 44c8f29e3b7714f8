"""What importing `tplab.jax` settles for JAX: its CPU devices, unless the user has, and nothing for child processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = """
import os, sys
import tplab.jax
{more}
import jax
from tplab.jax.ranks.devices import _threads
names = ("NPROC", "XLA_FLAGS")
before = [os.environ.get(name) for name in names]
num_devices = len(jax.devices("cpu"))
assert [os.environ.get(name) for name in names] == before
print(num_devices, _threads[0], *before)
"""


def shown(more: str = "", **environment: str) -> str:
    around = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")}
    around.pop("JAX_NUM_CPU_DEVICES", None)
    command = [sys.executable, "-c", SHOW.format(more=more)]
    done = subprocess.run(
        command, env={**around, "JAX_PLATFORMS": "cpu", **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


FOUR = "--xla_force_host_platform_device_count=4"
RUN = """
from tplab import Mesh
from tplab.jax import axis_index, run
assert len(run(lambda: axis_index("tp"), Mesh(tp={size})).per_rank) == {size}
"""


@pytest.mark.parametrize(
    ("environment", "more", "said"),
    [
        ({}, "", "16 48 None None"),
        ({"JAX_NUM_CPU_DEVICES": "4"}, "", "4 12 None None"),
        ({"XLA_FLAGS": FOUR}, "", f"4 12 None {FOUR}"),
        ({"NPROC": "100"}, "", "16 100 100 None"),
        ({}, "tplab.jax.prepare(20)", "20 60 None None"),
        ({"JAX_NUM_CPU_DEVICES": "4"}, RUN.format(size=3), "4 12 None None"),
        ({"JAX_NUM_CPU_DEVICES": "4"}, RUN.format(size=6), "6 18 None None"),
        ({}, "import jax; jax.config.update('jax_num_cpu_devices', 3)", "3 9 None None"),
    ],
    ids=str,
)
def test_the_user_decides_and_child_processes_inherit_nothing(environment, more, said):
    assert shown(more, **environment) == said


def test_xla_has_the_threads_and_the_patience_that_were_arranged():
    """It reads the environment while it makes its client, so that is what it must see then."""
    more = """
import jax
from jax._src import xla_bridge
make, seen = xla_bridge.make_cpu_client, []
registration = xla_bridge._backend_factories["cpu"]
def note(*args, **kwargs):
    seen.append((os.environ["NPROC"], os.environ["XLA_FLAGS"]))
    return registration.factory(*args, **kwargs)
import dataclasses
xla_bridge._backend_factories["cpu"] = dataclasses.replace(registration, factory=note)
jax.devices()
from tplab.jax.private import knows_patience_flag
patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600" if knows_patience_flag() else ""
assert seen == [("48", patience)], seen
"""
    assert shown(more, XLA_FLAGS="").startswith("16 48")
