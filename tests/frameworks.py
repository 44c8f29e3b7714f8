"""Both frameworks behind one small interface, so that a single test compares both with one NumPy oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from tplab import Mesh, P


class Framework(Protocol):
    """The functions of a framework that tests need, besides tplab's own names, which are in `lab`."""

    name: str
    lab: Any

    def array(self, values: Any) -> Any: ...
    def numpy(self, x: Any) -> np.ndarray: ...
    def tanh(self, x: Any) -> Any: ...
    def gradients(self, loss: Callable[..., Any], *xs: Any) -> list[Any]:
        """d loss / d x for each x, computed inside a rank's program."""
        ...


class Torch:
    name = "torch"

    def __init__(self) -> None:
        import torch

        import tplab.torch

        self.lab, self._torch = tplab.torch, torch

    def array(self, values: Any) -> Any:
        return self._torch.as_tensor(np.asarray(values))

    def numpy(self, x: Any) -> np.ndarray:
        return (x.float() if x.dtype is self._torch.bfloat16 else x).detach().numpy()

    def tanh(self, x: Any) -> Any:
        return x.tanh()

    def gradients(self, loss: Callable[..., Any], *xs: Any) -> list[Any]:
        xs = tuple(x.detach().requires_grad_() for x in xs)
        return list(self._torch.autograd.grad(loss(*xs), xs))


class Jax:
    name = "jax"

    def __init__(self) -> None:
        import tplab.jax  # isort: skip  # before JAX is used
        import jax

        self.lab, self._jax = tplab.jax, jax

    def array(self, values: Any) -> Any:
        return self._jax.numpy.asarray(values)

    def numpy(self, x: Any) -> np.ndarray:
        x = np.asarray(x)
        return x.astype(np.float32) if x.dtype.kind == "V" else x

    def tanh(self, x: Any) -> Any:
        return self._jax.numpy.tanh(x)

    def gradients(self, loss: Callable[..., Any], *xs: Any) -> list[Any]:
        return list(self._jax.grad(loss, argnums=tuple(range(len(xs))))(*xs))


FRAMEWORKS: dict[str, Callable[[], Framework]] = {"torch": Torch, "jax": Jax}


def gathers_alike(fw: Framework) -> tuple[str, int]:
    """(The collective that gives every rank all pieces, typed as equal on all ranks; its bytes relative to those of an
    all_gather). Before 0.10, JAX has this type only for sums: the pieces are added up, each in its place.
    """
    if fw.name == "jax":
        import jax

        if jax.__version_info__ < (0, 10):
            return "all_reduce", 2
    return "all_gather", 1


def in_both(of_torch: Iterable[Any], of_jax: Iterable[Any]) -> list[Any]:
    """Cases for `@pytest.mark.parametrize("fw, ...", ..., indirect=["fw"])`: all for torch, which runs eagerly, and
    fewer for JAX, which compiles each one."""
    return [(name, *case) for name, cases in (("torch", of_torch), ("jax", of_jax)) for case in cases]


def on_each_rank(
    fw: Framework, program: Callable[..., Any], mesh: Mesh, *per_rank: Sequence[np.ndarray], shared: Sequence[Any] = ()
) -> list[Any]:
    """Run `program(x, ..., shared...)`, in which each rank has its own x. Return the ranks' results as NumPy arrays.

    per_rank   for each argument one array per rank
    shared     arguments that all ranks have
    """
    stacked = [fw.array(np.stack(list(xs))) for xs in per_rank]
    everything = [fw.array(x) for x in shared]

    def unpacked(*args: Any) -> Any:
        return program(*(x[0] for x in args[: len(stacked)]), *args[len(stacked) :])

    specs = (P(mesh.axis_names),) * len(stacked) + (P(),) * len(everything)
    results = fw.lab.run(unpacked, mesh, *stacked, *everything, in_specs=specs).per_rank
    return [_as_numpy(fw, result) for result in results]


def _as_numpy(fw: Framework, result: Any) -> Any:
    if isinstance(result, tuple | list):
        return type(result)(_as_numpy(fw, item) for item in result)
    if isinstance(result, dict):
        return {key: _as_numpy(fw, item) for key, item in result.items()}
    return fw.numpy(result) if hasattr(result, "dtype") else result
