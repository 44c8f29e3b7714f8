"""`train` on a GPU: simulated ranks that share one, processes that torchrun starts, and JAX on its own devices."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tplab.jax
import tplab.torch
from tplab import Mesh
from tplab.data.text import Text
from tplab.models.gpt import GPTConfig
from tplab.training.recipe import Recipe

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU here: train was NOT tested on one", allow_module_level=True)

CONFIG = GPTConfig(32, 16, 2, 2, 8)
TEXT = Text(np.random.default_rng(0).integers(0, 32, 500).astype(np.uint8).tobytes())


def losses(mesh: Mesh, zero: int, **where) -> list[float]:
    recipe = Recipe(3, 4, zero=zero, warmup=1, evaluate_every=2)
    return tplab.torch.train(CONFIG, TEXT, mesh, recipe, show=lambda progress: None, **where).losses


@pytest.mark.parametrize(("mesh", "zero"), [(Mesh(dp=2, pp=2, tp=2), 1), (Mesh(dp=2), 0), (Mesh(dp=2), 3)], ids=str)
def test_simulated_ranks_train_on_one_gpu(tmp_path, mesh, zero):
    on_gpu = losses(mesh, zero, device="cuda", folder=tmp_path)
    np.testing.assert_allclose(on_gpu, losses(Mesh(tp=1), 0), rtol=1e-5)  # float32, in another order
    again = losses(mesh, zero, device="cuda", folder=tmp_path, resume=True)
    assert again == []  # a checkpoint of all steps was read


SCRIPT = """
import torch
from tests.gpu.test_train import losses
from tplab import Mesh
print("losses", *losses(Mesh(tp=1), 3), torch.cuda.max_memory_allocated() > 0)
"""


def test_under_torchrun(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    where = ["--standalone", "--local-addr", "127.0.0.1"]  # port 0 would hang: the worker looks for its store there
    command = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node=1", str(script)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("losses")]
    *found, used = line.split()[1:]
    assert used == "True"
    np.testing.assert_allclose([float(x) for x in found], losses(Mesh(tp=1), 0), rtol=1e-5)


def test_jax_trains_on_its_gpu():
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU here")
    recipe = Recipe(3, 4, warmup=1)
    found = tplab.jax.train(CONFIG, TEXT, Mesh(tp=1), recipe, show=lambda progress: None, on="gpu").losses
    np.testing.assert_allclose(found, losses(Mesh(tp=1), 0), rtol=1e-4)
