"""Training with sequences shared along "cp": the losses and the weights of one device, in both frameworks."""

import shutil
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.test_train import TRAIN
from tplab import Mesh
from tplab.data.text import Text
from tplab.errors import ShapeError
from tplab.jax.private import in_float64
from tplab.models.gpt import GPTConfig
from tplab.training.recipe import Recipe

CONFIG = GPTConfig(32, 16, 2, 4, 16, num_kv_heads=2)
TEXT = Text(np.random.default_rng(0).integers(0, 32, 500).astype(np.uint8).tobytes())


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with in_float64():
        yield
    torch.set_default_dtype(before)


def trained(framework: str, mesh: Mesh, steps: int = 3, folder: Any = None, **recipe: Any) -> Any:
    how = {"batch_size": 4, "warmup": 2, "clip": 0.5, "evaluate_every": steps, **recipe}
    again = folder is not None and any(folder.iterdir())
    where: dict[str, Any] = {"folder": folder, "resume": again}
    return TRAIN[framework](CONFIG, TEXT, mesh, Recipe(steps, **how), show=lambda progress: None, **where)


@cache
def on_one_device(steps: int) -> Any:
    return trained("torch", Mesh(tp=1), steps)


def same(got: Any, steps: int) -> None:
    want = on_one_device(steps)
    np.testing.assert_allclose(got.losses, want.losses[got.first :], rtol=1e-10)
    np.testing.assert_allclose(got.held_out[steps], want.held_out[steps], rtol=1e-10)
    for name, x in want.state.items():
        # AdamW divides the gradient of key's bias, which is nothing but roundings, by their size and 1e-8
        np.testing.assert_allclose(got.state[name], x, atol=1e-8, err_msg=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", TRAIN)
def test_ten_steps_on_three_dimensions(framework: str):
    same(trained(framework, Mesh(dp=2, cp=2, tp=2), 10), 10)


@pytest.mark.parametrize(
    ("framework", "mesh", "how"),
    [
        ("torch", Mesh(cp=4), {"layout": "striped", "zero": 0}),
        ("torch", Mesh(cp=2, dp=2), {"scheme": "head", "zero": 2}),
        ("torch", Mesh(pp=2, cp=2, tp=2), {"checkpoint_every": 1}),
        ("torch", Mesh(tp=2, dp=2, cp=2), {"sequence_parallel": True, "scheme": "gather", "zero": 3}),
        ("jax", Mesh(cp=2, pp=2, dp=2), {"scheme": "gather", "layout": "striped", "zero": 0, "checkpoint_every": 1}),
        ("jax", Mesh(tp=2, cp=2, dp=2), {"sequence_parallel": True, "zero": 3, "layout": "contiguous"}),
        ("jax", Mesh(cp=2), {"scheme": "head", "zero": 2}),
    ],
    ids=str,
)
def test_every_way_of_sharing_trains_the_same(framework: str, mesh: Mesh, how: dict[str, Any]):
    same(trained(framework, mesh, **how), 3)


@pytest.mark.timeout(300)
def test_checkpoints_go_from_mesh_to_mesh(tmp_path):
    """ZeRO divides over both axes; whoever loads it has neither."""
    trained("torch", Mesh(dp=2, cp=2), folder=tmp_path, save_every=1)
    shutil.rmtree(tmp_path / "step-00000003")
    shutil.rmtree(tmp_path / "step-00000002")
    trained("jax", Mesh(cp=4), 2, tmp_path, zero=3)
    got = trained("torch", Mesh(tp=2), folder=tmp_path)
    assert got.first == 2
    same(got, 3)


def test_what_ranks_cannot_share_is_refused():
    for train in TRAIN:
        with pytest.raises(ShapeError, match="the number of tokens is 16, which 6 pieces"):
            trained(train, Mesh(cp=3))
    with pytest.raises(ValueError, match=r"(?s)scheme='ring' on pipelines of 2 ranks.*take scheme='gather' or 'head'"):
        trained("jax", Mesh(cp=2, pp=2))
