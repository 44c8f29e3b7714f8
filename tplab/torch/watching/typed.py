"""Types in torch: the logs of all ranks, typed once the ranks are done.

Rules say what type each operation makes of its operands' types, and the ranks' values are compared at each operation: a
value that differs is not replicated, whatever a rule says. Values may be equal by chance, such as zeros and ones. So
the program runs twice, with another seed and other numbers in its arguments. Where no rule says so, a value counts as
replicated only if it is the same on all ranks in both runs and differs between the runs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tplab.checking.source import beginning
from tplab.checking.steps import Frame
from tplab.checking.typed import OnAxes, Typed, Types, Typing, lines_of, of_spec
from tplab.errors import TplabError
from tplab.mesh import Mesh
from tplab.torch.private import pytree
from tplab.torch.ranks.arguments import Job, entries_of, spread
from tplab.torch.ranks.launch import run_on_simulated_ranks
from tplab.torch.ranks.process_state import More
from tplab.torch.ranks.watcher import Watched
from tplab.torch.watching.follower import Follower, Log


def perturbed(args: Sequence[Any], seed: int) -> list[Any]:
    """Copies of arguments with other numbers in floating-point tensors, where the same tensor stays the same."""
    draw = torch.Generator().manual_seed(seed)
    memo: dict[int, Tensor] = {}

    @torch.no_grad()
    def moved(x: Tensor) -> Tensor:
        noise = 0.1 * torch.randn(x.shape, generator=draw, dtype=torch.float32)
        return (x + noise.to(x.dtype).to(x.device)).requires_grad_(x.requires_grad)

    def other(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            leaf = torch.from_numpy(leaf.copy())
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if id(leaf) not in memo:
                memo[id(leaf)] = moved(leaf)
            return memo[id(leaf)]
        if isinstance(leaf, nn.Module):
            leaf = copy.deepcopy(leaf)
            with torch.no_grad():
                for x in leaf.parameters():
                    x.copy_(moved(x))
        return leaf

    return [pytree.tree_map(other, arg) for arg in args]


def types_in(job: Job, logs: Sequence[Log], more: More | None, why_not: str = "") -> Types:
    """The types of a program, from its ranks' logs. The program runs a second time here, with the seed after `seed`,
    unless `why_not` says why it cannot."""
    again, others = list[Any](), perturbed(job.args, job.seed)
    other = job._replace(fn=Watched(job.fn, Follower), args=others, seed=job.seed + 1, keep_values=0, title="")
    try:
        if not why_not:
            again, _ = run_on_simulated_ranks(other, more=more)
    except TplabError as error:
        why_not = str(error).partition("\n")[0]
    return types_of(job, logs, [log for _, log in again], why_not)


def types_of(job: Job, logs: Sequence[Log], again: Sequence[Log], why_not: str = "") -> Types:
    """The types of a program, from its ranks' logs of two runs. `again` may be empty; `why_not` then says why."""
    fn, mesh = job.fn, job.mesh
    axes = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    given = _given(job.args, job.in_specs, axes)
    lines: dict[Frame, list[Typed]] = {}
    casts: dict[tuple[str, str, str], list[str]] = {}
    faults, found = [], []
    for rank, log in enumerate(logs):
        typing = Typing(axes, lambda value, axis, rank=rank: _looks_equal(value, axis, rank, mesh, logs, again))
        for (_, number), types in zip(log.arguments, given, strict=False):
            typing.give(number, log.shapes[number], types)
        for step in log.steps:
            typing.take(step)
        for one in log.gradients:
            typing.gradient(one.name, one.parameter, one.gradient, one.stack, one.is_used)
        for frame, made in lines_of(log.steps, typing).items():
            if frame in log.others:
                continue
            known = lines.setdefault(frame, [])
            known += [one for one in made if str(one) not in map(str, known)]
        for key, texts in typing.casts.items():
            casts[key] = list(dict.fromkeys([*casts.get(key, ()), *texts]))
        faults += [fault for fault in typing.faults if fault not in faults]
        found.append((typing, log))
    typing, log = found[0]
    title = f"{getattr(fn, '__name__', 'program').replace('<lambda>', 'lambda')} on {mesh}"
    left = {one.name: one for one in log.gradients}
    return Types(
        title,
        lines,
        [typing.of(number, name) for name, number in log.arguments],
        [typing.of(number, name) for name, number in log.results],
        faults,
        [typing.of(one.gradient, one.name) for one in left.values()],
        beginning(fn),
        f"it could not be run a second time ({why_not}), so tensors may look the same by chance" if why_not else "",
        casts,
    )


def _given(args: Sequence[Any], in_specs: Any, axes: Sequence[str]) -> list[OnAxes]:
    """The types of the tensors among the arguments, in order, as their specs say."""
    found: list[OnAxes] = []
    for arg, entry in zip(args, entries_of(in_specs, len(args)), strict=True):
        for leaf, spec in zip(pytree.tree_leaves(arg), spread(entry, arg, "in_specs"), strict=True):
            count = len([*leaf.named_parameters()]) if isinstance(leaf, nn.Module) else 1
            if isinstance(leaf, nn.Module | Tensor | np.ndarray):
                found += [of_spec(spec, axes)] * count
    return found


def _looks_equal(
    value: int, axis: str, rank: int, mesh: Mesh, logs: Sequence[Log], again: Sequence[Log]
) -> bool | None:
    """Whether a value is the same on all ranks of an axis; None if that is unknown or may be chance."""
    key = logs[rank].keys.get(value)
    if key is None or (mine := logs[rank].digests.get(key)) is None:
        return None
    group = mesh.group(rank, axis)
    first = {logs[other].digests.get(key) for other in group}
    second = {again[other].digests.get(key) for other in group} if again else {mine}
    if None in first or None in second:
        return None
    if len(first) > 1 or len(second) > 1:
        return False
    return True if again and first != second else None
