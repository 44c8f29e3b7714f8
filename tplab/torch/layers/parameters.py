"""How parameters are initialised: the whole model's are drawn, and each rank keeps its piece.

So a model made with one seed is the same on every mesh, to the last bit, and data-parallel copies agree. On the
modelled clock this takes no time, because it is not part of a step. As meta tensors, under `torch.device("meta")`,
parameters have shapes and no numbers, and a model of any size is made at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tplab.mesh import Axis
from tplab.pipeline.checks import mean_already
from tplab.sharding import P, held_by
from tplab.torch.layers.draws import next_generator
from tplab.torch.private import no_dispatch
from tplab.torch.ranks.rank import this_rank

Draw = Callable[..., Tensor]
"""torch.rand or torch.randn"""
CUTS, _MEANS = "_cuts_by_tplab", "_means_by_tplab"
"""The attributes for what is noted in a module and, for one that is later used without it, in the parameter."""


class Layer(nn.Module):
    """A module that shows the arguments with which it was made: those without a default as they are, others by name."""

    def extra_repr(self) -> str:
        shown = []
        for name, about in self._arguments().items():
            if hasattr(self, name):
                value = getattr(self, name)
                value = value is not None if name == "bias" else value
                shown.append(repr(value) if about.default is about.empty else f"{name}={value!r}")
        return ", ".join(shown)

    def _arguments(self) -> Mapping[str, inspect.Parameter]:
        """Those of the first class whose arguments without a default are all attributes: a subclass may have others."""
        for cls in type(self).__mro__:
            arguments = inspect.signature(cls).parameters
            needed = [name for name, about in arguments.items() if about.default is about.empty]
            if needed and all(hasattr(self, name) for name in needed):
                return arguments
        return {}


def drawn_uniform(shape: Sequence[int], spec: P, bound: float) -> Tensor:
    """This rank's piece of numbers spread evenly over [-bound, bound]."""
    return drawn_piece(shape, lambda whole: piece_of(whole * (2 * bound) - bound, spec), torch.rand)


def drawn_normal(shape: Sequence[int], spec: P, deviation: float) -> Tensor:
    """This rank's piece of normal numbers."""
    return drawn_piece(shape, lambda whole: piece_of(whole * deviation, spec), torch.randn)


def drawn_piece(shape: Sequence[int], keep: Callable[[Tensor], Tensor], draw: Draw) -> Tensor:
    """`keep` of a whole parameter's initial numbers, on the device where parameters are made."""
    device = torch.empty(0).device
    with no_dispatch():  # not an operation of the program
        generator = next_generator()
        if device.type == "meta":
            return keep(torch.empty(tuple(shape)))
        return keep(draw(tuple(shape), generator=generator, device="cpu")).to(device)


def piece_of(whole: Tensor, spec: P) -> Tensor:
    """This rank's piece. A dim that does not divide is cut into pieces of ceil(n / R); the last ones are smaller."""
    rank, piece = this_rank(), whole
    for dim, held in enumerate(held_by(whole.shape, spec, rank.mesh, rank.rank)):
        piece = piece.narrow(dim, held.start, len(held))
    return piece.clone(memory_format=torch.contiguous_format)


def note_cuts(module: nn.Module, axis: Axis, *names: str) -> None:
    """Note in a module that the ranks of `axis` hold the other pieces of these parameters of its own, which may already
    be pieces. Copies of the module inherit the note, whatever tensors they are given."""
    cuts: dict[str, tuple[Axis, ...]] = vars(module).setdefault(CUTS, {})
    for name in names:
        cuts[name] = (*cuts.get(name, ()), axis)
        if (piece := module._parameters.get(name)) is not None:
            vars(piece)[CUTS] = cuts[name]


def cuts_of(parameter: Tensor) -> tuple[str, ...]:
    """The axes along which ranks hold other pieces of a parameter, if its module noted them in this very tensor."""
    return tuple(name for axis in vars(parameter).get(CUTS, ()) for name in this_rank().mesh.names(axis))


def note_mean(module: nn.Module, axes: Sequence[str], name: str) -> None:
    """Note in a module that the backward pass itself averages the gradient of this parameter over these axes."""
    vars(module).setdefault(_MEANS, {})[name] = tuple(axes)
    vars(module._parameters[name])[_MEANS] = tuple(axes)


def axes_of_cuts(model: nn.Module, is_told: bool) -> dict[Tensor, tuple[str, ...]]:
    """The axes along which ranks hold other pieces of a model's parameters, as noted in its modules.

    Raises ValueError if a module no longer has its piece, for example because torch.nn.utils.parametrize makes it of
    other parameters, unless `is_told`: the caller has specs.
    """
    found: dict[Tensor, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        cuts: dict[str, tuple[Axis, ...]] = vars(module).get(CUTS, {})
        for name, axes in cuts.items():
            piece = module._parameters.get(name)
            if piece is None and not is_told and getattr(module, name, None) is not None:
                raise ValueError(
                    f"{name!r} of {type(module).__name__} {path!r} is a piece of a parameter, and is now computed "
                    "from other parameters, whose cuts are unknown: give specs, {name: P}"
                )
            if piece is not None:
                names = (name for axis in axes for name in this_rank().mesh.names(axis))
                found[piece] = tuple(dict.fromkeys((*found.get(piece, ()), *names)))
    return found


def copies_in(modules: Sequence[nn.Module], axis: Axis, are_averaged: bool = True) -> Callable[[Tensor], Axis]:
    """The part of `axis` along which ranks hold copies of a parameter: all of it, unless one of these modules or the
    parameter itself says that it is cut along some of the axes; () if it is cut along all of them.

    Raises ValueError if gradients are to be averaged along `axis`, and one is already the mean there.
    """
    names = this_rank().mesh.names(axis)
    for path, module in (found for model in modules if are_averaged for found in model.named_modules()):
        for name, axes in vars(module).get(_MEANS, {}).items():
            piece, both = module._parameters.get(name), [axis for axis in axes if axis in names]
            if both and piece is not None and piece.requires_grad:
                raise mean_already(f"{name!r} of {type(module).__name__} {path!r}", both)
    known = {p: axes for module in modules for p, axes in axes_of_cuts(module, is_told=True).items()}

    def copies(parameter: Tensor) -> Axis:
        both = [axis for axis in vars(parameter).get(_MEANS, ()) if axis in names]
        if both and are_averaged and parameter.requires_grad:
            raise mean_already(f"a parameter {tuple(parameter.shape)}", both)
        cut = known.get(parameter) or cuts_of(parameter)
        return axis if set(cut).isdisjoint(names) else tuple(name for name in names if name not in cut)

    return copies
