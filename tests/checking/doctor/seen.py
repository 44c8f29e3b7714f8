"""What a script's ranks had at each step, seen without the doctor: torch's hooks around `Optimizer.step`, and print."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tplab import Mesh
from tplab.torch import launch
from tplab.torch.ranks.rank import this_rank


@dataclass
class Step:
    """What one rank had when an optimizer stepped: tensors in the order of the optimizer's parameters."""

    before: list[Tensor]
    gradients: list[Tensor | None]
    rates: list[float]
    after: list[Tensor] = field(default_factory=list)


@dataclass
class Seen:
    """A run of a script: the steps of each rank, the lines that they printed, and each buffer at the end, by rank."""

    steps: list[list[Step]]
    printed: str
    buffers: dict[str, list[Tensor]]

    def gradient(self, index: int, rank: int = 0, step: int = 0) -> Tensor:
        """The gradient that parameter `index` had on one rank when the optimizer stepped; zeros where it had none."""
        at = self.steps[rank][step]
        found = at.gradients[index]
        return torch.zeros_like(at.before[index]) if found is None else found

    def gradients(self, rank: int = 0, step: int = 0) -> Tensor:
        """All gradients of a rank, flat."""
        return torch.cat([self.gradient(i, rank, step).flatten() for i in range(len(self.steps[rank][step].before))])

    def update(self, rank: int = 0, step: int = 0) -> Tensor:
        """What the step added to the parameters of a rank, flat."""
        at = self.steps[rank][step]
        return torch.cat([(new - old).flatten() for new, old in zip(at.after, at.before, strict=True)])

    def weights(self, rank: int = 0, step: int = 0) -> Tensor:
        """The parameters of a rank before the step, flat."""
        return torch.cat([value.flatten() for value in self.steps[rank][step].before])

    def logged(self, label: str, number: int = 0) -> Tensor:
        """The number printed after `label`, for the `number`-th time."""
        found = re.findall(rf"{re.escape(label)}\W*?([-+]?\d[\d.]*(?:[eE][-+]?\d+)?)", self.printed)
        return torch.tensor(float(found[number]), dtype=torch.float64)


def see(script: Path, mesh: Mesh, args: str = "") -> Seen:
    """Run a script on simulated ranks and note what its optimizers see."""
    steps: list[list[Step]] = [[] for _ in mesh.ranks]

    def begin(optimizer: Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        grads = [None if p.grad is None else _local(p.grad) for p in params]
        steps[this_rank().rank].append(Step([_local(p) for p in params], grads, [group["lr"] for group in groups]))

    def end(optimizer: Optimizer, *_: object) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        steps[this_rank().rank][-1].after = [_local(p) for p in params]

    owners: dict[str, list[tuple[int, nn.Module]]] = {}

    def note(module: nn.Module, name: str, buffer: Tensor) -> None:
        owners.setdefault(name, []).append((this_rank().rank, module))

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    hooks = (*hooks, register_module_buffer_registration_hook(note))
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            launch(script, shlex.split(args), mesh=mesh)
    finally:
        for hook in hooks:
            hook.remove()
    buffers = {}
    for name, found in owners.items():
        buffers[name] = [getattr(module, name) for _, module in sorted(found, key=lambda one: one[0])]
    return Seen(steps, out.getvalue(), buffers)


def _local(tensor: Tensor) -> Tensor:
    """A copy of what this rank holds of a tensor."""
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()  # type: ignore[operator]
