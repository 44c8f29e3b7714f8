"""Run a learner's function on a mesh: every rank's results and gradients, and the damage that it leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tplab.exercises.damage import Untouched
from tplab.exercises.exercise import Exercise, Framework, Tensors
from tplab.exercises.slopes import weight
from tplab.mesh import Mesh
from tplab.sharding import P, split
from tplab.trace.trace import Trace


@dataclass(frozen=True)
class Trial:
    """One run: each rank's results by name, its trace, and the damage that the function did, if any."""

    found: list[dict[str, np.ndarray]]
    trace: Trace
    damage: str


def trials(
    framework: Framework, fn: Callable[..., Any], exercise: Exercise, mesh: Mesh, tensors: Tensors
) -> Iterator[Trial]:
    """Yield a trial with the results, then one with the gradients, so that a wrong result is reported as such."""
    specs = tuple(exercise.specs[key] for key in tensors)
    right = {name: exercise.right(name, tensors) for name in (*exercise.results, *exercise.also)}
    damage: list[str] = []
    followed: list[weakref.ref[Any]] = []  # the arguments that require gradients; autograd's graph keeps them alive

    def forward(*args: Any) -> tuple[Any, ...]:
        before = Untouched(dict(zip(tensors, args)), gradients=True) if framework == "torch" else None
        followed.extend(weakref.ref(arg) for arg in args if getattr(arg, "requires_grad", False))
        returned = fn(*args)
        if before and (harm := before.damage()):
            damage.append(harm)
        results = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        also, num = exercise.also, len(exercise.results)
        if got := _strange(returned, results, len(also), num, framework):
            raise TypeError(f"it must return {', '.join(exercise.results)}, and it returned {got}")
        first = [tuple(split(right[name], spec, mesh)[0].shape) for name, spec in also.items()]
        if len(results) > num and [tuple(result.shape) for result in results[: len(also)]] == first:
            results = results[len(also) :] + results[: len(also)]
        return results

    forward.__name__ = exercise.name  # the title of its trace
    found, trace = _run(framework, forward, mesh, tensors, specs, [*exercise.results, *exercise.also])
    yield Trial(found, trace, next(iter(damage), ""))
    if exercise.gradients:
        chosen = [place for place, key in enumerate(tensors) if key in exercise.gradients]
        weights = {f"weight of {key}": weight(right[key]) for key in exercise.results}
        names = [f"d{key}" for key in tensors if key in exercise.gradients]
        if framework == "torch":
            program = _torch_gradient(forward, chosen, len(weights), [*tensors], damage)
        else:
            program = _jax_gradient(forward, chosen, len(weights))
        program.__name__ = exercise.name
        found, trace = _run(
            framework, program, mesh, {**weights, **tensors}, (*exercise.results.values(), *specs), names
        )
        if _are_alive(followed):
            damage.append(KEPT)
        yield Trial(found, trace, next(iter(damage), ""))


KEPT = (
    "it keeps a tensor in a variable that outlives the call, and with it all that the backward pass needs.\n"
    "After many steps, the memory is full. Keep a copy without its history, tensor.detach(), or nothing."
)


def _are_alive(tensors: list[weakref.ref[Any]]) -> bool:
    """Whether one of these tensors is still alive after garbage collection."""
    if any(tensor() is not None for tensor in tensors):
        gc.collect()
    return any(tensor() is not None for tensor in tensors)


def _strange(returned: Any, results: tuple[Any, ...], num_also: int, num: int, framework: Framework) -> str:
    """The returned value, in words, if the exercise does not ask for it; "" if it does."""
    if returned is None or any(result is None for result in results):
        return "None; is a `return` missing?"
    if len(results) not in (num, num + num_also):
        return "1 value" if len(results) == 1 else f"{len(results)} values"
    if num == 1 and not num_also and isinstance(returned, tuple | list):
        return f"a {type(returned).__name__} with it; return the tensor itself"
    if framework == "torch" and any(isinstance(result, np.ndarray) for result in results):
        return "a NumPy array; leave it a tensor"
    return ""


def run_of(framework: Framework) -> Callable[..., Any]:
    """The framework's `run`."""
    if framework == "torch":
        from tplab.torch import run
    else:
        from tplab.jax import run
    return run


def share_of_work(
    framework: Framework, fn: Callable[..., Any], specs: Mapping[str, P], tensors: Tensors, axis: str, num_ranks: int
) -> float:
    """The FLOPs of the busiest of `num_ranks` ranks, relative to those of one rank alone with the same tensors."""
    arrays, in_specs = arrays_for(framework, tensors), tuple(specs[key] for key in tensors)
    most = []
    for mesh in (Mesh(**{axis: num_ranks}), Mesh(**{axis: 1})):
        trace = run_of(framework)(fn, mesh, *arrays, in_specs=in_specs, cluster="h100", keep_values=0).trace
        most.append(max(trace.select(rank=rank, kind="compute").column("flops").sum() for rank in mesh.ranks))
    return float(most[0] / max(most[1], 1))


def arrays_for(framework: Framework, tensors: Tensors) -> list[np.ndarray]:
    """The tensors as arrays; JAX computes in float32, and ids stay integers."""
    is_narrowed = [framework == "jax" and array.dtype.kind == "f" for array in tensors.values()]
    return [array.astype(np.float32) if is_so else array for array, is_so in zip(tensors.values(), is_narrowed)]


def _run(
    framework: Framework,
    program: Callable[..., Any],
    mesh: Mesh,
    tensors: Tensors,
    specs: tuple[P, ...],
    names: list[str],
) -> tuple[list[dict[str, np.ndarray]], Trace]:
    out = run_of(framework)(program, mesh, *arrays_for(framework, tensors), in_specs=specs)
    plain = ([one.detach() if hasattr(one, "detach") else one for one in results] for results in out.per_rank)
    return [dict(zip(names, map(np.asarray, results))) for results in plain], out.trace


def _torch_gradient(
    forward: Callable[..., Any], chosen: list[int], num_weights: int, names: list[str], damage: list[str]
) -> Callable[..., Any]:
    def program(*args: Any) -> list[Any]:
        import torch

        weights, leaves = args[:num_weights], list(args[num_weights:])
        before = Untouched(dict(zip(names, leaves)))  # a backward pass can do harm too
        for place in chosen:
            leaves[place].requires_grad_()
        loss = torch.stack([(y * w).sum() for y, w in zip(forward(*leaves), weights)]).sum()
        if not loss.requires_grad:
            raise TypeError(
                "the result is right, but it has no gradient: something cuts it off from the arguments, such as "
                "`detach()`, `.data`, `torch.no_grad()` or NumPy"
            )
        loss.backward()
        if harm := before.damage():
            damage.append(harm)
        grads = [leaves[place].grad for place in chosen]
        return [torch.zeros_like(leaves[place]) if grad is None else grad for place, grad in zip(chosen, grads)]

    return program


def _jax_gradient(forward: Callable[..., Any], chosen: list[int], num_weights: int) -> Callable[..., Any]:
    def program(*args: Any) -> Any:
        import jax

        weights, leaves = args[:num_weights], args[num_weights:]
        return jax.grad(lambda *xs: sum((y * w).sum() for y, w in zip(forward(*xs), weights)), tuple(chosen))(*leaves)

    return program
