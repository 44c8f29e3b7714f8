"""Cutting again: whether a model is right once a fused weight, cut in one piece, is cut part by part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product

import torch
from torch import Tensor

from tplab.layout import MOST_PARTS, Layout, take
from tplab.mesh import Mesh
from tplab.torch.ranks.rank import this_rank

MOST_TRIES = 24  # forward passes

Cuts = dict[str, int]
"""Module pattern -> into how many parts its weight is cut: {"h.*.attn.c_attn": 3}."""


@torch.no_grad()
def better_cuts(
    mine: Mapping[str, Tensor], whole: Mapping[str, Tensor], layouts: Mapping[str, Layout], is_right: Callable[[], bool]
) -> Cuts | None:
    """The cuts with which all outputs are right, found by trying; None where none of the first few helps.

    mine, whole   this rank's parameters, and the whole ones, by the reference's names; mine are put back afterwards
    is_right      whether the model's outputs are right, asked of all ranks together
    """
    mesh, rank = this_rank().mesh, this_rank().rank
    groups = _fusable(whole, layouts, mesh)
    for tries, cuts in enumerate(_choices(groups)):
        if tries == MOST_TRIES:
            break
        names = [name for pattern in cuts for name in groups[pattern]]
        kept = {name: mine[name].clone() for name in names}
        for pattern, count in cuts.items():
            for name in groups[pattern]:
                mine[name].copy_(take(whole[name], _in_parts(whole[name], layouts[name], count), mesh, rank))
        found = is_right()
        for name, value in kept.items():
            mine[name].copy_(value)
        if found:
            return cuts
    return None


def modules_like(name: str) -> str:
    """The module of a parameter, with a star for each number: h.*.attn.c_attn"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name.rpartition(".")[0])


def _fusable(whole: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, list[str]]:
    """Parameters that are cut along one dim in one piece, and might hold parts, by the modules that are alike."""
    found: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        if len(layout.split_dims) == 1 and not layout.parts and _counts(whole[name], layout, mesh):
            found.setdefault(modules_like(name), []).append(name)
    return found


def _choices(groups: Mapping[str, list[str]]) -> Iterator[Cuts]:
    """One kind of module in parts, then two."""
    for size in (1, 2):
        for patterns in combinations(groups, size):
            for counts in product(range(MOST_PARTS, 1, -1), repeat=size):
                yield dict(zip(patterns, counts))


def _counts(whole: Tensor, layout: Layout, mesh: Mesh) -> list[int]:
    (dim,) = layout.split_dims
    num_ranks = mesh.axis_size(layout.spec[dim])
    return [count for count in range(2, MOST_PARTS + 1) if whole.shape[dim] % (count * num_ranks) == 0]


def _in_parts(whole: Tensor, layout: Layout, count: int) -> Layout:
    (dim,) = layout.split_dims
    size = whole.shape[dim]
    mesh = this_rank().mesh
    if size % (count * mesh.axis_size(layout.spec[dim])):
        return layout
    return Layout(layout.spec, (size // count,) * count)
