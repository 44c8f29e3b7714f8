"""Logs what each rank's operations make, so that all values can be typed once the ranks are done."""

from __future__ import annotations

import inspect
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tplab.checking.source import statement
from tplab.checking.steps import Frame, Step
from tplab.torch.private import base_of, local_of, no_dispatch, phase, pytree
from tplab.torch.ranks.meter import tensors_in, traits_of
from tplab.torch.ranks.program import outwards
from tplab.torch.ranks.rank import Call, Rank, this_rank
from tplab.torch.ranks.storages import Storages
from tplab.torch.ranks.watcher import Listener, is_fake, is_wrapper, watcher
from tplab.torch.watching.steps import Operands, operands_of, steps_of

Key = tuple[Any, ...]
"""Identifies a value among all values of a rank, and its counterparts on other ranks."""


class Gradient(NamedTuple):
    """A parameter and its gradient, at the line of an optimizer's step, or (not `is_used`) as left at the end."""

    name: str
    parameter: int
    gradient: int
    stack: tuple[Frame, ...]
    is_used: bool = True


class Log:
    """What one rank has done.

    steps       in order; their values have numbers
    keys        of each value; digests: of its data, by key
    others      statements that assign something other than a tensor
    arguments, results   (name, value)
    gradients   those that an optimizer was given, and those left at the end
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.keys: dict[int, Key] = {}
        self.digests: dict[Key, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.others: set[Frame] = set()
        self.arguments: list[tuple[str, int]] = []
        self.results: list[tuple[str, int]] = []
        self.gradients: list[Gradient] = []


def digest_of(x: Tensor) -> int | None:
    """A number that is the same for tensors with the same bits, and almost never for others; None if `x` has no
    data."""
    if x.device.type == "meta" or x.layout is not torch.strided:
        return None
    if is_wrapper(type(x)) or (x.numel() and not x.untyped_storage().nbytes()):
        return None  # it has no memory, or has freed it, as FSDP does with gathered weights
    plain = x.detach().resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    # a copy, because memory that NumPy refers to cannot be resized, which FSDP does
    return zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data) if plain.numel() else 0


def named(fn: Callable[..., Any], args: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments, each with a name: "x", "layers[0]", "model.weight"."""
    try:
        names = list(inspect.signature(fn).bind(*args).arguments)
    except (TypeError, ValueError):
        names = []
    names = names if len(names) == len(args) else [f"argument {place}" for place in range(len(args))]
    found: list[tuple[str, Tensor]] = []
    for name, arg in zip(names, args, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(arg)[0]:
            if isinstance(leaf, nn.Module):
                found += [(f"{name}.{inner}", x) for inner, x in leaf.named_parameters()]
            elif isinstance(leaf, Tensor):
                found.append((name + pytree.keystr(path), leaf))
    return found


class Follower(Listener):
    """Logs in `heard` what a rank's program does, from its arguments to its end.

    A value is a view of some memory: autograd makes new tensors of what it has saved, so memory and shape identify a
    tensor. A write makes a new value.
    """

    def __init__(self, rank: Rank, fn: Callable[..., Any], args: Sequence[Any]):
        self.heard = Log()
        self._rank, self._given = rank, named(fn, args)
        self._numbers: Storages[dict[Any, int]] = Storages()
        self._counts: Counter[Key] = Counter()
        self._num = 0
        self._parameters: dict[int, tuple[str, Tensor, int]] = {}
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._began: dict[int, tuple[Frame, ...]] = {}
        self._lines: dict[FrameType, Frame] = {}
        self._is_paused = False

    def __enter__(self) -> Self:
        self._rank.types = self
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._steps(optimizer)),
            register_optimizer_step_post_hook(lambda *_: self._steps(None)),
            register_module_parameter_registration_hook(self._register),
        ]
        with no_dispatch():
            for name, x in self._given:
                number = self._new(x, ("argument", name))
                self.heard.arguments.append((name, number))
                self._note_parameter(name, x, number)
        self._given.clear()
        watcher().add(self)
        return self

    def __exit__(self, *error: Any) -> None:
        watcher().remove(self)
        self._rank.types = None
        for hook in self._hooks:
            hook.remove()
        self._numbers, self._parameters, self._lines = Storages(), {}, {}

    # --- listening ---------------------------------------------------------------------------------------------------

    def ends_with(self, result: Any) -> None:
        with no_dispatch():
            for path, x in pytree.tree_flatten_with_path(result)[0]:
                if isinstance(x, Tensor):
                    self.heard.results.append((pytree.keystr(path), self._number(local_of(x))))
            self._gradients(())

    def _register(self, module: nn.Module, name: str, x: Tensor | None) -> None:
        if x is not None and this_rank() is self._rank:
            self._names[id(x)] = weakref.ref(x), f"{type(module).__name__}.{name}"

    def _name_of(self, x: Tensor) -> str:
        """The program's name of a parameter: "LayerNorm.weight [8]"."""
        known, name = self._names.get(id(x), (None, ""))
        return f"{name if known is not None and known() is x else 'a parameter'} {list(x.shape)}"

    def _note_parameter(self, name: str, x: Tensor, number: int) -> None:
        if x.requires_grad and x.is_leaf and not is_wrapper(type(x)):  # a DTensor keeps account of its own copies
            self._parameters[id(x)] = name, x, number

    def _steps(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note the gradients as an optimizer's step begins. What the step computes from them is not followed."""
        if this_rank() is not self._rank:
            return
        if optimizer is not None:
            with no_dispatch():
                for x in [x for group in optimizer.param_groups for x in group["params"]]:
                    if id(x) not in self._parameters:
                        number = self._number(local_of(x))
                        self._note_parameter(self._name_of(x), x, number)
                self._gradients(self._stack())
        self._is_paused = optimizer is not None

    def _gradients(self, stack: tuple[Frame, ...]) -> None:
        """Note each parameter's gradient, with the line that made it if `stack` is empty."""
        made = {step.output: step.stack for step in self.heard.steps}
        done = {(one.name, one.gradient) for one in self.heard.gradients}
        for name, x, number in self._parameters.values():
            gradient = None if x.grad is None else self._number(local_of(x.grad))
            if gradient is not None and (name, gradient) not in done:
                lines = stack or made.get(gradient, ())
                self.heard.gradients.append(Gradient(name, number, gradient, lines, bool(stack)))
                key = ("gradient", self.heard.keys[number], len(self.heard.gradients))
                self.heard.keys[-gradient] = key
                if x.grad is not None and (digest := digest_of(local_of(x.grad))) is not None:
                    self.heard.digests[key] = digest

    # --- operations ----------------------------------------------------------------------------------------------

    def takes_whole(self, func: Any, args: Any) -> bool:
        return False

    def starts(self, func: Any, args: Any, kwargs: Any) -> tuple[Operands, list[int]] | None:
        if self._is_paused:
            return None
        operands = operands_of(func, args, kwargs)
        return operands, [self._number(x) for _, x in operands]

    def ended(self, func: Any, args: Any, kwargs: Any, result: Any, note: tuple[Operands, list[int]] | None) -> None:
        if note is None or any(is_fake(type(x)) for x in tensors_in(result)):
            return  # or DTensor works out the shape of a result
        (operands, numbers), stack = note, self._stack()
        for place, x in reversed([*enumerate(tensors_in(result))]):  # a norm's statistics before its result
            if not is_wrapper(type(x)):
                steps = steps_of(func, args, kwargs, operands, x, place)
                self._take(steps, numbers, x, stack, traits_of(func).writes)

    def met(self, call: Call, x: Tensor, y: Tensor, note: Any) -> None:
        """Log a collective that has made y of x."""
        (dim, to), axes = call.dims, self._axes(call.place.group)
        if call.row.takes == "root" and "dim" not in call.about:
            dim = None  # a list of tensors, which need not be pieces of one
        self._cast(call.op, x, y, reduction=call.reduction, axes=axes, dim=dim, to=to)

    def cast(self, op: str, group: Sequence[int], x: Tensor, y: Tensor, **about: Any) -> None:
        """Log that a cast between the ranks of `group` has made y of x."""
        self._cast(op, x, y, axes=self._axes(group), **about)

    def began(self, exchange: Any) -> None:
        """Note the line that made something invariant, for its gradient."""
        self._began[id(exchange)] = self._stack()

    def gradient(self, exchange: Any, group: Sequence[int], dy: Tensor) -> None:
        """Log the gradient that comes back to something invariant."""
        self._cast("gradient", dy, dy, axes=self._axes(group), stack=self._began.get(id(exchange), self._stack()))

    def carried(self, x: Tensor, y: Tensor) -> None:
        """Note that y, which the program holds, now has the contents of x. A sending rank may have nothing like it, so
        this is not counted among the copies that all ranks make."""
        with no_dispatch():
            known = self._numbers.get(y.untyped_storage()) or {}
            was = self.heard.keys.get(known.get(_place_of(y), -1), ())
            step = Step("copy", "linear", (0,), shapes=(tuple(x.shape),), shape=tuple(y.shape))
            step.how = "linear" if x.shape == y.shape else "reshape"
            step.dims = (tuple(range(y.dim())),)
            self._take([step], [self._number(x, ("received", was))], y, self._stack(), True, ("carried", was))

    def _cast(self, op: str, x: Tensor, y: Tensor, stack: tuple[Frame, ...] | None = None, **about: Any) -> None:
        with no_dispatch():
            shapes, number = (tuple(x.shape),), self._number(x)
            step = Step(op, "cast", (0,), shapes=shapes, shape=tuple(y.shape), **about)
            self._take([step], [number], y, self._stack() if stack is None else stack, False)

    def _take(
        self, steps: list[Step], numbers: list[int], x: Tensor, stack: Any, writes: bool, key: Key | None = None
    ) -> None:
        """Log steps, each of which takes the result of the one before; the last one makes x."""
        before: tuple[int, ...] = ()
        shape: tuple[tuple[int, ...], ...] = ()
        for step in steps:
            step.inputs = (*before, *(numbers[index] for index in step.inputs))
            step.shapes = (*shape, *step.shapes)
            step.stack, step.phase = stack, phase()
            if step is steps[-1]:
                key = key or (stack[:1], step.op, step.phase)
                self._counts[key] += 1
                self._new(x, (*key, self._counts[key]), step, writes)
            else:
                self._num += 1
                step.output = self._num
                before, shape = (step.output,), (step.shape,)
                self.heard.steps.append(step)

    # --- values --------------------------------------------------------------------------------------------------

    def _new(self, x: Tensor, key: Key, step: Step | None = None, writes: bool = False) -> int:
        """The number of a new value, held by x and made by `step`."""
        self._num += 1
        number = self._num
        if step is not None:
            step.output = number
            self.heard.steps.append(step)
        self.heard.keys[number], self.heard.shapes[number] = key, tuple(x.shape)
        if (digest := digest_of(x)) is not None:
            self.heard.digests[key] = digest
        storage = x.untyped_storage()
        known = self._numbers.get(storage)
        if known is None:
            self._numbers.add(storage, known := {})
        place = _place_of(x)
        if (writes and base_of(x) is not None) or (writes and len(known) > 1):
            self._written(known, place, x, number)
        known[place] = number
        return number

    def _written(self, known: dict[Any, int], place: Any, x: Tensor, number: int) -> None:
        """Update other views of memory that was written to through x: they are copies of x, or hold x and something
        else."""
        is_whole = x.numel() * x.element_size() == x.untyped_storage().nbytes()
        for other, old in [*known.items()]:
            if other == place:
                continue
            if is_whole and other[1] == place[1]:
                known[other] = number
                continue
            self._num += 1
            shape = self.heard.shapes.get(old, ())
            takes = (number,) if is_whole else (old, number)
            dims = tuple((None,) * len(self.heard.shapes[one]) for one in takes)
            same = self.heard.shapes.get(old) == self.heard.shapes[number]
            if is_whole and same:
                dims = (tuple(range(len(shape))),)
            step = Step("copy", "linear", takes, self._num, dims=dims, shape=shape, stack=self._stack(), phase=phase())
            step.is_aside = True
            self.heard.steps.append(step)
            self.heard.shapes[self._num], known[other] = shape, self._num

    def _number(self, x: Tensor, key: Key | None = None) -> int:
        """The number of the value that a tensor holds; a new one if the value has not been seen."""
        known = self._numbers.get(x.untyped_storage())
        if known is not None and (found := known.get(_place_of(x))) is not None:
            return found
        if known:  # a view that autograd has made of a saved tensor
            for place, number in known.items():
                if place[0] == x.storage_offset() and np.prod(place[1]) == x.numel():
                    step = Step("view", "reshape", (0,), shapes=(self.heard.shapes[number],), shape=tuple(x.shape))
                    self._take([step], [number], x, self._stack(), False)
                    return self._num
        stack = self._stack()
        step = Step("found", "made", shape=tuple(x.shape))
        self._take([step], [], x, stack, False, key)
        self._note_parameter(self._name_of(x), x, self._num)
        return self._num

    def _axes(self, group: Sequence[int]) -> tuple[str, ...]:
        """The axes of the mesh along which the ranks of a group differ."""
        mesh, here = self._rank.mesh, self._rank.rank
        return tuple(n for n in mesh.axis_names if mesh.shape[n] > 1 and set(mesh.group(here, n)) <= set(group))

    def _stack(self) -> tuple[Frame, ...]:
        """The running lines of the program, innermost first."""
        lines = self._rank.lines
        frames = filter(lines.is_program, outwards(lines.frame()))
        found: dict[FrameType, Frame] = {frame: (frame.f_code.co_filename, frame.f_lineno) for frame in frames}
        for frame, line in self._lines.items():
            first, name = statement(*line)
            is_over = frame in found and statement(*found[frame])[0] != first and name in frame.f_locals
            if is_over and not isinstance(frame.f_locals[name], Tensor):
                self.heard.others.add((line[0], first))
        self._lines = found
        return tuple(found.values())


def _place_of(x: Tensor) -> Any:
    return x.storage_offset(), tuple(x.shape), x.stride(), x.dtype
