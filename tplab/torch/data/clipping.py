"""The norm of all gradients of a model, however its parameters are sharded, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tplab.data.gradients import EPSILON, check_max_norm, check_norm_type, cut_along, root, spec_of, specs_in
from tplab.sharding import P
from tplab.torch.comm.collectives import all_reduce
from tplab.torch.data.parameters import (
    Key,
    Model,
    Named,
    check_dense,
    readable_again,
    text,
    trainable,
    where_gradients_are,
)
from tplab.torch.layers.parameters import axes_of_cuts
from tplab.torch.pipeline.stages import Stages
from tplab.torch.ranks.rank import this_rank

Specs = Mapping[str, P] | Mapping[int, Mapping[str, P]]


@torch.no_grad()
def gradient_norm(parameters: Model, specs: Specs | None = None, *, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as on one device; the same on every rank.

    parameters   a module, `Stages`, or parameters by name, with specs; a parameter without a gradient counts as zeros
    specs        how they are placed on the mesh: {name: P}, as `gpt_specs` returns it; for Stages {stage: {name: P}},
                 with all stages. None: the modules know it, whatever tensors they have been given: tplab's layers, what
                 `parallelize` has sharded, and what ZeRO has cut (`shard_parameters`, or a sharded optimizer after its
                 `reduce_gradients`). Parameters of other modules count as whole on every rank, even if cut
    norm_type    p, above 0, or inf for the largest element

    norm = (sum |g|^p)^(1/p) over every element of the model, each once. Of the ranks that hold copies of a piece, the
    one at position 0 counts it; tied parameters, and stages that several ranks hold, are counted at their first place.
    Gradients of copies must already be equal: average them first.
    cost   an all_reduce of 1 number over the axes that specs, Stages and modules name; none if there is no such axis
    Raises ValueError for bare parameters without specs on a mesh of several ranks: nothing says how they are cut.
    """
    p = check_norm_type(norm_type)
    return _norm(_counted(readable_again(parameters), specs), p)


@torch.no_grad()
def clip_gradients(
    parameters: Model,
    max_norm: float,
    specs: Specs | None = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale every gradient by min(1, max_norm / (norm + 1e-6)), in place. Returns the norm before scaling.

    This is torch.nn.utils.clip_grad_norm_ for a model sharded over a mesh. Every rank scales by the same factor,
    so copies stay equal. See `gradient_norm` for the arguments and the cost.
    With error_if_nonfinite, all ranks raise RuntimeError for an infinite or NaN norm.
    """
    most, p = check_max_norm(max_norm), check_norm_type(norm_type)
    parameters = readable_again(parameters)
    norm = _norm(_counted(parameters, specs), p)
    named = [(key, held) for key, held, _ in where_gradients_are(trainable(parameters), {})]
    if error_if_nonfinite and not norm.is_meta and not bool(norm.isfinite()):
        raise RuntimeError(_not_finite(norm, named))
    scale_to((held for _, held in named), norm, most)
    return norm


def scale_to(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients that together have this norm by min(1, max_norm / (norm + 1e-6)), in place."""
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _norm(counted: tuple[list[Tensor], tuple[str, ...], Tensor], p: float) -> Tensor:
    gradients, axes, like = counted
    norms = [torch.linalg.vector_norm(g, p, dtype=_wide(g)).double() for g in gradients if g.numel()]
    each = torch.stack(norms) if norms else like.new_zeros(1, dtype=torch.float64)
    total = each.amax() if math.isinf(p) else each.pow(p).sum()
    if axes:
        total = all_reduce(total, axes, "max" if math.isinf(p) else "sum")
    return root(total, p).to(torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32)


def _counted(model: Any, specs: Any) -> tuple[list[Tensor], tuple[str, ...], Tensor]:
    """The gradients that this rank counts, the axes over which they are added up, and a tensor like the gradients."""
    mesh, rank = this_rank().mesh, this_rank().rank
    elsewhere: set[Key] = set()
    more: tuple[str, ...] = ()
    if isinstance(model, Stages):
        more, elsewhere = mesh.names(model.axis), _counted_elsewhere(model, mesh.index(rank, model.axis))
        all_specs = [spec for of_stage in specs_in(specs) for spec in specs_in(of_stage)]
    elif isinstance(model, Mapping) and any(isinstance(module, nn.Module) for module in model.values()):
        raise TypeError(
            "these are stages of a pipeline, and nothing says along which axis it runs; give what stages_of returned"
        )
    else:
        all_specs = specs_in(specs)
    named = trainable(model)
    cuts = _known_cuts(model, named, is_told=specs is not None)
    known = {name for _, _, axes in where_gradients_are(named, cuts) for name in axes}
    axes = cut_along(all_specs, mesh, (*more, *known))
    counted = []
    for key, held, own_axes in where_gradients_are(trainable(model, elsewhere), cuts):
        if held.grad is None:
            continue
        if isinstance(key, str):
            spec = spec_of(key, specs, text(key))
        else:
            spec = spec_of(key[1], specs and specs.get(key[0], {}), text(key))
        copies = tuple(name for name in axes if name not in (*spec.axis_names, *own_axes, *more))
        if not copies or mesh.index(rank, copies) == 0:
            counted.append(check_dense(key, held.grad))
    like = max((p for _, p in named), key=lambda p: p.element_size(), default=torch.empty(0))
    return counted, axes, like.detach()


def _known_cuts(model: Any, named: Named, is_told: bool) -> dict[Tensor, tuple[str, ...]]:
    """The axes along which the modules of a model know its parameters to be cut. Raises ValueError if unknown."""
    held, mesh = list(model.values()) if isinstance(model, Mapping) else [model], this_rank().mesh
    modules = [module for module in held if isinstance(module, nn.Module)]
    for key, piece, axes in where_gradients_are(() if modules or is_told else named, {}):
        if piece.grad is not None and any(mesh.axis_size(axis) > 1 for axis in mesh.axis_names if axis not in axes):
            raise ValueError(
                f"nothing says how {text(key)} is placed on {mesh}: give its module, which knows how it is cut, or "
                "specs with a P for each parameter by name, P() for one that every rank holds whole"
            )
    return {p: axes for module in modules for p, axes in axes_of_cuts(module, is_told).items()}


def _counted_elsewhere(stages: Stages, index: int) -> set[Key]:
    """The parameters that are counted under another stage's name, or by an earlier rank."""
    found: set[Key] = {place for tie in stages.tied for place in list(tie)[1:]}
    for stage, module in stages.items():
        first = next(place for place, held in enumerate(stages.placement) if stage in held)
        if first != index:
            found |= {(stage, name) for name, _ in module.named_parameters()}
    return found


def _wide(gradient: Tensor) -> torch.dtype | None:
    """The dtype to add up in: float32 for 16-bit numbers; None for the gradient's own."""
    return torch.float32 if gradient.element_size() < 4 else None


def _not_finite(norm: Tensor, named: Named) -> str:
    here = [text(key) for key, p in named if p.grad is not None and not bool(p.grad.isfinite().all())]
    listed = ", ".join(here[:5]) + (", ..." if len(here) > 5 else "")
    where = f"on this rank the gradient of {listed} is" if here else "the gradients of other ranks are"
    return (
        f"the norm of the gradients is {float(norm)}, so they cannot be clipped: {where} not finite; skip this step, "
        "or leave error_if_nonfinite out"
    )
