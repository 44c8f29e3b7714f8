"""Compare a sharded layer with the unsharded one: output and every gradient, in float64, in both frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tests.frameworks import Framework
from tplab import Mesh, P

State = Mapping[str, np.ndarray]
Oracle = Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]

# Sums differ only in their order: a few roundings of float64 (2e-16) on sums of a few hundred products.
TOLERANCE = 1e-12
ROUNDINGS = 1e-14
WHOLE = P()


@contextmanager
def double(fw: Framework) -> Iterator[None]:
    """Inside, JAX computes in float64. Torch does so for float64 arguments."""
    if fw.name == "torch":
        yield
        return
    from tplab.jax.private import in_float64

    with in_float64():
        yield


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def close(got: Any, want: Any, what: str = "", tolerance: float = TOLERANCE, cancelled: float = 0) -> None:
    """Equal up to rounding, relative to the largest element.

    cancelled   the largest of the numbers that `want` is a small difference of, whose roundings remain in it
    """
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    error, largest = np.abs(got - want).max(initial=0), np.abs(want).max(initial=0)
    assert error <= tolerance * largest + ROUNDINGS * cancelled, f"{what} is off by {error:.2g}, of {largest:.2g}"


def whole(oracle: Oracle, state: State, x: np.ndarray, c: np.ndarray) -> tuple[Any, Any, dict[str, Any]]:
    """y, dx and the gradient of each parameter of the loss sum(y * c), by torch on one rank."""
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in state.items()}
    x_ = torch.tensor(x, requires_grad=x.dtype.kind == "f")
    y = oracle(tensors, x_)
    (y * torch.tensor(c)).sum().backward()
    grads = {n: np.zeros(t.shape) if t.grad is None else t.grad.numpy() for n, t in tensors.items()}
    return y.detach().numpy(), None if x_.grad is None else x_.grad.numpy(), grads


def sharded(
    fw: Framework,
    mesh: Mesh,
    make: Callable[[Any], Any],
    state: State,
    specs: Mapping[str, P],
    x: np.ndarray,
    c: np.ndarray,
    x_spec: P = WHOLE,
    y_spec: P = WHOLE,
) -> tuple[tuple[Any, Any, dict[str, Any]], Any]:
    """The same by the layer that `make` makes with the framework's names, and the trace. It has no values, for which
    JAX would run the program again, step by step. `run` checks that copies on different ranks agree.
    """
    has_dx = x.dtype.kind == "f"
    program = _torch_program(fw, make, has_dx) if fw.name == "torch" else _jax_program(fw, make, has_dx)
    specs = dict(specs)
    args = {name: fw.array(value) for name, value in state.items()}, fw.array(x), fw.array(c)
    out_specs = (y_spec, *((x_spec,) if has_dx else ()), specs)
    out = fw.lab.run(program, mesh, *args, in_specs=(specs, x_spec, y_spec), out_specs=out_specs, keep_values=0)
    y, *dx, grads = out.value
    return (fw.numpy(y), fw.numpy(dx[0]) if dx else None, {n: fw.numpy(g) for n, g in grads.items()}), out.trace


def _torch_program(fw: Framework, make: Callable[[Any], Any], has_dx: bool) -> Callable[..., Any]:
    def program(state: dict[str, torch.Tensor], x: torch.Tensor, c: torch.Tensor) -> Any:
        layer = make(fw.lab).double()
        layer.load_state_dict(state)
        x.requires_grad_(has_dx)
        y = layer(x)
        (y * c).sum().backward()
        grads = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in layer.named_parameters()}
        return (y, x.grad, grads) if has_dx else (y, grads)

    return program


def _jax_program(fw: Framework, make: Callable[[Any], Any], has_dx: bool) -> Callable[..., Any]:
    import jax

    def program(state: dict[str, Any], x: Any, c: Any) -> Any:
        layer = make(fw.lab)

        def loss(state: dict[str, Any], x: Any) -> Any:
            y = layer(nested(state), x)
            return (y * c).sum(), y

        (_, y), grads = jax.value_and_grad(loss, (0, 1) if has_dx else 0, has_aux=True)(state, x)
        return (y, grads[1], grads[0]) if has_dx else (y, grads)

    return program


def check(
    fw: Framework,
    mesh: Mesh,
    make: Callable[[Any], Any],
    oracle: Oracle,
    state: State,
    specs: Mapping[str, P],
    x: np.ndarray,
    x_spec: P = WHOLE,
    y_spec: P = WHOLE,
) -> Any:
    """Raise AssertionError if the sharded layer and the whole one differ. Return the trace."""
    with double(fw):
        with torch.no_grad():
            shape = oracle({n: torch.tensor(v) for n, v in state.items()}, torch.tensor(x)).shape
        c = numbers(*shape, seed=99)
        want_y, want_dx, want_grads = whole(oracle, state, x, c)
        (y, dx, grads), trace = sharded(fw, mesh, make, state, specs, x, c, x_spec, y_spec)
        close(y, want_y, "y")
        if dx is not None:
            close(dx, want_dx, "dx")
        assert grads.keys() == want_grads.keys()
        # Softmax does not depend on the bias of key, and hardly on queries of a single narrow head: there, numbers like
        # those of the other gradients cancel (to 5e-6 and less, with roundings of up to 5e-16).
        largest = max(np.abs(want).max(initial=0) for want in want_grads.values())
        for name, want in want_grads.items():
            close(grads[name], want, f"gradient of {name}", cancelled=largest)
        return trace


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """{"up.weight": w} -> {"up": {"weight": w}}"""
    tree: dict[str, Any] = {}
    for name, value in state.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"up": {"weight": w}} -> {"up.weight": w}"""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found
