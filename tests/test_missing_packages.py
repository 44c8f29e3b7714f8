"""Without torch, or without JAX, the half of tplab that needs it says what to install; the other half works."""

import subprocess
import sys

import pytest


def imported(module: str, *, without: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules['{without}'] = None\nimport {module}"
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["tplab.torch", "tplab.torch.layers.linear"])
def test_without_torch(module: str):
    last = imported(module, without="torch").stderr.splitlines()[-1]
    assert last == (
        "tplab.errors.MissingPackageError: tplab.torch needs torch, which is not installed; "
        "to install it: pip install 'tplab[torch]'"
    )


@pytest.mark.parametrize("module", ["tplab.jax", "tplab.jax.layers.linear"])
def test_without_jax(module: str):
    last = imported(module, without="jax").stderr.splitlines()[-1]
    assert last == (
        "tplab.errors.MissingPackageError: tplab.jax needs jax, which is not installed; "
        "to install it: pip install 'tplab[jax]'"
    )


@pytest.mark.parametrize("module, without", [("tplab.jax", "torch"), ("tplab.torch", "jax")])
def test_one_half_works_without_the_other(module: str, without: str):
    assert imported(module, without=without).stderr == ""
