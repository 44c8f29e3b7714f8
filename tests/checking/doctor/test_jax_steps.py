"""The JAX steps that judge `tplab.jax.same_model`: each is as wrong as it says, and right once it is repaired."""

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import tplab.jax  # noqa: F401  # before JAX is used
from tests.checking.doctor import jax_steps
from tests.checking.doctor.jax_steps import RIGHT_STEPS, WRONG_STEPS, RightStep, WrongStep, mlp_data
from tests.checking.doctor.proven import proven_of_each, source_of


def mesh_of(row: WrongStep | RightStep, *, alone: bool = False) -> Mesh:
    names, sizes = zip(*row.axes)
    shape = [1] * len(sizes) if alone else sizes
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), names)


def shown(row: WrongStep, *, alone: bool, repaired: bool) -> tuple[dict[str, Any], Any]:
    """All that the step returns, and the value of it that shows the mistake."""
    out = found = jax.device_get(row.make(mesh_of(row, alone=alone), repaired)(*row.data()))
    for name in row.output:
        found = found[name]
    return out, found


def texts_of(row: WrongStep | RightStep) -> Iterator[str]:
    yield from map(source_of, (jax_steps, mesh_of, shown))
    yield str(row)


@proven_of_each(WRONG_STEPS, str, texts_of)
def test_wrong_as_claimed(row: WrongStep):
    _, found = shown(row, alone=False, repaired=False)
    _, right = shown(row, alone=True, repaired=False)
    assert np.linalg.norm(found - right) > 1e-2 * np.linalg.norm(right)
    if not isinstance(row.factor, str):
        np.testing.assert_allclose(found, row.factor * right, rtol=1e-4, atol=1e-6)


@proven_of_each(WRONG_STEPS, str, texts_of)
def test_right_when_repaired(row: WrongStep):
    found, _ = shown(row, alone=False, repaired=True)
    right, _ = shown(row, alone=True, repaired=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), found, right)


@proven_of_each(RIGHT_STEPS, str, texts_of)
def test_right_as_claimed(row: RightStep):
    found = jax.device_get(row.make(mesh_of(row))(*mlp_data()))
    right = jax.device_get(row.make(mesh_of(row, alone=True))(*mlp_data()))

    def close(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=row.tolerance, atol=row.tolerance / 10)

    jax.tree.map(close, found, right)


@pytest.mark.parametrize("row", WRONG_STEPS, ids=str)
def test_lines_are_there(row: WrongStep):
    assert row.line in inspect.getsource(jax_steps)
