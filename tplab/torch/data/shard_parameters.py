"""ZeRO stage 3: every rank keeps its own part of the parameters, and layers are whole only while they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from tplab.mesh import Axis
from tplab.torch.data.group import About, Group, Sites
from tplab.torch.data.pieces import Gather, Reduce, gather_rows, reduce_rows, row_of, wholes_in
from tplab.torch.data.unit import Model, Unit
from tplab.torch.ranks.rank import prepares

Module = TypeVar("Module", bound=nn.Module)


@prepares
def shard_parameters(
    model: Module,
    axis: Axis = "dp",
    *,
    units: Sequence[nn.Module] | None = None,
    op: str = "mean",
    reshard_after_forward: bool | Axis = True,
    prefetch: bool = True,
    replicate_axis: Axis | None = None,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> Module:
    """Divide the parameters of `model`, in place, over the R ranks of `axis` (ZeRO stage 3, also called FSDP).

        model = shard_parameters(model, "dp")
        optimizer = torch.optim.AdamW(model.parameters())      # over this rank's pieces
        model.loss(x, y).backward()                            # each rank's own part of the batch
        optimizer.step()

    Every parameter keeps its name and its place, and becomes this rank's piece [ceil(n/R)]. A unit is a layer whose
    parameters travel together:

        before its forward pass    all_gather: they are whole
        after it                   they are freed
        before its backward pass   all_gather again
        as its backward pass ends  reduce_scatter: each rank gets its piece of the gradients, in `.grad`

    units                  modules that are units, in the order of the forward pass: by default the members of every
                           nn.Sequential and nn.ModuleList (not of those inside other members). All other parameters,
                           and those that several units share, form a unit that is whole from the beginning of the
                           model's forward pass to its end
    op                     how gradients are combined: "mean" or "sum"
    reshard_after_forward  False keeps the whole parameters from the forward to the backward pass. An axis that is a
                           part of `axis`: its ranks share a second piece, for the second gather (ZeRO++'s hpZ)
    prefetch               whether the next unit's parameters and the last one's gradients travel while one computes:
                           one more unit is then whole
    replicate_axis         the axis along which pieces have copies (hybrid sharding): gradients are all_reduced along it
    compute_dtype          the dtype of whole parameters: bfloat16, if the pieces are float32
    reduce_dtype           the dtype in which gradients travel; by default, that of the whole parameters
    gather, reduce         functions that send, as in `tplab.torch.data.pieces`; None: all_gather, reduce_scatter

    states    16/R bytes per parameter with Adam, besides the units that are whole
    sent      3(R-1)/R of the parameters by each rank; 2(R-1)/R without reshard_after_forward
    Frozen parameters are gathered too, but send no gradients. A layer under torch.utils.checkpoint is gathered once
    more. Whole parameters that autocast converts are kept: use compute_dtype instead. `no_sync` adds up the gradients
    of several microbatches before they are sent.
    Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277).
    """
    send = gather or gather_rows, reduce or reduce_rows
    about = About(axis, op, reshard_after_forward, replicate_axis, compute_dtype, reduce_dtype, *send, prefetch)
    modules = [unit for unit in (_layers(model) if units is None else units) if unit is not model]
    _check_units(model, modules)
    owners = _owners(model, modules)
    sharded = Model(about)
    names = {module: f"unit {name}" for name, module in model.named_modules()}
    names[model] = "the rest of the model" if modules else "the model"
    for module in [model, *modules]:
        groups = _groups([sites for sites, owner in owners if owner is module], about, names[module])
        sharded.units.append(Unit(module, groups, sharded))
    setattr(model, _SHARDED, sharded)
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward passes of a model that `shard_parameters` has cut add up gradients and send nothing.

        for x, y in microbatches[:-1]:
            with no_sync(model):
                loss(model(x), y).backward()
        x, y = microbatches[-1]
        loss(model(x), y).backward()         # sends the sums, also for units that it does not reach

    sent      each rank sends (R-1)/R of the parameters less for each backward pass inside. Gathers stay as they are
    memory    from the first of these passes to the one that sends, every rank keeps the whole gradient, in reduce_dtype
              or else the dtype of whole parameters: in float32 4 bytes per parameter, instead of 4/R
    The `.grad` of pieces does not change until then, so clip and step after a backward pass outside. Until then
    `zero_grad` does not drop what is kept, as in FSDP; an exception inside the block does.
    Raises ValueError for a model that has not been cut.
    """
    unsent = sharded_model(model).about.unsent
    before, unsent.is_paused = unsent.is_paused, True
    try:
        yield
    except BaseException:
        unsent.messages.clear()
        raise
    finally:
        unsent.is_paused = before


_SHARDED = "_sharded_by_tplab"


def sharded_model(model: nn.Module) -> Model:
    """The sharded form of a model, from `shard_parameters`. Raises ValueError if the model has not been cut."""
    found = getattr(model, _SHARDED, None)
    if found is None:
        raise ValueError(
            f"this {type(model).__name__} has not been cut by shard_parameters; give the module that it was called with"
        )
    return found


def _layers(module: nn.Module) -> list[nn.Module]:
    """The members of every list of layers in a module, except lists inside members."""
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return [member for member in module if any(True for _ in member.parameters())]
    return [layer for child in module.children() for layer in _layers(child)]


def _check_units(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise ValueError if a unit is not part of the model, or has no forward pass of its own."""
    inside = set(model.modules())
    for number, unit in enumerate(units):
        if unit not in inside:
            raise ValueError(f"unit {number}, {type(unit).__name__}, is not in the model; give modules of the model")
        if isinstance(unit, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"unit {number} is a {type(unit).__name__}, which has no forward pass; give its members as units"
            )
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"the model is a {type(model).__name__}, which has no forward pass; give the module that runs its members"
        )


def _owners(model: nn.Module, units: Sequence[nn.Module]) -> list[tuple[Sites, nn.Module]]:
    """Where each parameter is, and the unit that gathers it: the innermost around all its places, or the model."""
    around: dict[nn.Module, list[nn.Module]] = {}
    for unit in sorted(units, key=lambda unit: sum(1 for _ in unit.modules())):  # the inner ones first
        for module in unit.modules():
            around.setdefault(module, []).append(unit)
    inside = {unit: set(unit.modules()) for unit in units}

    def home(module: nn.Module) -> nn.Module:
        """The innermost unit around a module, or the model if the units that have it are not nested."""
        chain = around.get(module, [])
        is_nested = all(inner in inside[outer] for inner, outer in pairwise(chain))
        return chain[0] if chain and is_nested else model

    sites: dict[Tensor, Sites] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                sites.setdefault(parameter, []).append((module, name))
    found = []
    for places in sites.values():
        homes = {home(module) for module, _ in places}
        found.append((places, homes.pop() if len(homes) == 1 else model))
    return found


def _groups(sites: Sequence[Sites], about: About, unit: str) -> list[Group]:
    """The parameters grouped by message."""
    kinds: dict[tuple[torch.dtype, bool], list[Sites]] = {}
    for places in sites:
        module, name = places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(places)
    return [Group(members, about, unit) for members in kinds.values()]


# --- the whole state --------------------------------------------------------------------------------------------------


@torch.no_grad()
def gather_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model that `shard_parameters` has cut: name -> whole tensor, the same on every rank.

        state = gather_state(model)            # called by all ranks
        if axis_index("dp") == 0:
            torch.save(state, "model.pt")      # the unsharded model's load_state_dict takes it

    It is a snapshot in the dtype of the pieces, even if they travel in another one: a later step does not change it.
    sent      (R-1)/R of the parameters by each rank
    Raises ValueError for a model that has not been cut.
    """
    wholes: dict[Tensor, Tensor] = {}
    for unit in sharded_model(model).units:
        for group in unit.groups:
            row = row_of(group.pieces, group.shards, group.shards[0].dtype)
            message = gather_rows(row, group.about.axis).read()
            wholes.update(zip(group.shards, wholes_in(group.pieces, message)))
    state = model.state_dict(keep_vars=True)
    return {name: wholes[x].clone() if x in wholes else x.detach().clone() for name, x in state.items()}
