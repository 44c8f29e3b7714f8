"""One pipeline in every framework, for tests: stages of two linear layers of different widths, and the plain answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tplab import Mesh
from tplab.schedules import Schedule

State = dict[str, np.ndarray]
Batch = list[tuple[np.ndarray, np.ndarray]]
HIDDEN, TOKENS = 5, 3


def widths(num_stages: int) -> list[int]:
    """The widths of the tensors between stages, different at every cut."""
    return [3 + number % 3 for number in range(num_stages + 1)]


def weights(num_stages: int) -> list[State]:
    """The weights of each stage: y = tanh(x w1 + b1) w2 + b2."""
    made, random = [], np.random.default_rng(7)
    for a, b in zip(widths(num_stages), widths(num_stages)[1:]):
        shapes = {"w1": (a, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, b), "b2": (b,)}
        made.append({name: random.normal(size=shape) for name, shape in shapes.items()})
    return made


def batch(num_stages: int, num_microbatches: int, size: int = 2) -> Batch:
    random, ends = np.random.default_rng(8), widths(num_stages)
    return [
        (random.normal(size=(size, TOKENS, ends[0])), random.normal(size=(size, TOKENS, ends[-1])))
        for _ in range(num_microbatches)
    ]


def plain(num_stages: int, microbatches: Batch) -> tuple[float, list[State]]:
    """The mean loss, and the gradient of every weight: one microbatch after another, by hand."""
    stages, loss, count = weights(num_stages), 0.0, len(microbatches)
    grads = [{name: np.zeros_like(w) for name, w in stage.items()} for stage in stages]
    for x, target in microbatches:
        kept = []
        for w in stages:
            hidden = np.tanh(x @ w["w1"] + w["b1"])
            kept.append((x, hidden))
            x = hidden @ w["w2"] + w["b2"]
        loss += ((x - target) ** 2).mean() / count
        dy = 2 * (x - target) / x.size / count
        for w, grad, (x, hidden) in zip(stages[::-1], grads[::-1], kept[::-1]):
            dh = dy @ w["w2"].T * (1 - hidden**2)
            grad["w2"] += np.einsum("bth,btd->hd", hidden, dy)
            grad["b2"] += dy.sum((0, 1))
            grad["w1"] += np.einsum("btd,bth->dh", x, dh)
            grad["b1"] += dh.sum((0, 1))
            dy = dh @ w["w1"].T
    return loss, grads


def run_torch(
    schedule: Schedule,
    microbatches: Batch | Callable[[int], Batch],
    mesh: Mesh | None = None,
    on: str = "simulated",
    evaluates: bool = False,
    **options: Any,
) -> tuple[list[Any], Any]:
    """(Each rank's loss and gradients of its stages, the result of the run).

    microbatches   of all ranks; or position along "dp" -> those of the ranks at this position
    evaluates      whether the batch only runs forward, so that there are no gradients
    """
    import torch
    from torch import nn

    from tplab.torch import axis_index, evaluate_batch, run, train_batch

    class Layers(nn.Module):
        def __init__(self, state: State):
            super().__init__()
            for name, value in state.items():
                self.register_parameter(name, nn.Parameter(torch.tensor(value)))

        def forward(self, x):
            w1, b1, w2, b2 = (self.get_parameter(name) for name in ("w1", "b1", "w2", "b2"))
            return torch.tanh(x @ w1 + b1) @ w2 + b2

    def program():
        index = axis_index("pp")
        stages = {n: Layers(weights(schedule.num_stages)[n]) for n in schedule.placement[index]}
        own = microbatches(axis_index("dp")) if callable(microbatches) else microbatches
        given = [(torch.tensor(x), torch.tensor(y)) for x, y in own]
        execute = evaluate_batch if evaluates else train_batch
        loss = execute(schedule, stages, given, nn.functional.mse_loss, **options)
        grads = {n: {k: p.grad for k, p in stage.named_parameters()} for n, stage in stages.items()}
        return loss, {n: {k: g for k, g in held.items() if g is not None} for n, held in grads.items()}

    out = run(program, mesh or Mesh(pp=schedule.num_ranks), on=on)
    results = [(float(loss), {n: {k: g.numpy() for k, g in grads.items()} for n, grads in held.items()})
               for loss, held in out.per_rank]  # fmt: skip
    return results, out


def run_jax(
    schedule: Schedule,
    microbatches: Batch | Callable[[int], Batch],
    mesh: Mesh | None = None,
    evaluates: bool = False,
    **options: Any,
) -> tuple[list[Any], Any]:
    """The same in JAX. All ranks run one program, which takes the microbatches as arrays."""
    import jax.numpy as jnp

    from tplab import P
    from tplab.jax import evaluate_batch, run, stages_of, train_batch
    from tplab.jax.private import in_float64

    class Layers:
        """A stage. Stages of equal widths are the same program."""

        def __init__(self, state: State):
            self.state = state

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Layers)

        __hash__ = None  # type: ignore[assignment]

        def init(self, key: Any) -> Any:
            return {name: jnp.asarray(value) for name, value in self.state.items()}

        def __call__(self, params: Any, x: Any) -> Any:
            return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    def mean_squares(y: Any, target: Any) -> Any:
        return ((y - target) ** 2).mean()

    stages, bounds = weights(schedule.num_stages), range(schedule.num_stages + 1)
    mesh = mesh or Mesh(pp=schedule.num_ranks)
    own = [microbatches(i) for i in range(mesh.shape["dp"])] if callable(microbatches) else [microbatches]
    xs, ys = (np.stack([[pair[side] for pair in one] for one in own]) for side in (0, 1))

    def program(xs: Any, ys: Any) -> Any:
        held = stages_of([Layers(state) for state in stages], schedule, bounds=bounds)
        given = list(zip(xs[0], ys[0]))
        if evaluates:
            return evaluate_batch(schedule, held, given, mean_squares, **options), [[{}]] * schedule.num_stages
        loss, grads = train_batch(schedule, held, given, mean_squares, **options)
        return loss, [grads[stage] for stage in range(schedule.num_stages)]

    with in_float64():
        out = run(program, mesh, xs, ys, in_specs=P("dp") if callable(microbatches) else P(), keep_values=0)
        placement = schedule.placement * len(own)
        results = [
            (float(loss), {n: {k: np.asarray(g) for k, g in grads[n][0].items()} for n in held})
            for (loss, grads), held in zip(out.per_rank, placement)
        ]
    return results, out


EXECUTORS: dict[str, Callable[..., Any]] = {"torch": run_torch, "jax": run_jax}
"""framework -> its executor of schedules: (schedule, microbatches) -> (each rank's results, the Result)."""


def check(results: Sequence[Any], schedule: Schedule, microbatches: Batch, tolerance: float = 1e-12) -> None:
    """Raise AssertionError if a rank's loss or gradients are not those of plain accumulation."""
    loss, grads = plain(schedule.num_stages, microbatches)
    seen = set()
    for rank, (got, held) in enumerate(results):
        assert abs(got - loss) <= tolerance * abs(loss), f"rank {rank}: loss {got}, not {loss}"
        for stage, found in held.items():
            seen.add(stage)
            for name, want in grads[stage].items():
                error = np.abs(found[name] - want).max() / np.abs(want).max()
                assert error <= tolerance, f"rank {rank}, stage {stage}: gradient of {name} is off by {error:.2g}"
    assert seen == set(range(schedule.num_stages))
