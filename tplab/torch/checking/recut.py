"""Cutting again: whether a model is right once a fused weight, cut in one piece, is cut part by part."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, islice, product

import numpy as np

from tplab.layout import MOST_PARTS, Layout
from tplab.mesh import Mesh

MOST_TRIES = 24  # forward passes

Cuts = dict[str, int]
"""Module pattern -> into how many parts its weight is cut: {"h.*.attn.c_attn": 3}."""

Pieces = Mapping[str, tuple[Layout, np.ndarray]]
"""A parameter's name -> how it is laid out, and the whole of it."""


def better_cuts(
    whole: Mapping[str, np.ndarray], layouts: Mapping[str, Layout], mesh: Mesh, is_right: Callable[[Pieces], bool]
) -> Cuts | None:
    """The cuts with which all outputs are right, found by trying; None where none of the first few helps.

    whole      the parameters, by the reference's names
    is_right   whether the model's outputs are right once these parameters are laid out this way
    """
    groups = _fusable(whole, layouts, mesh)
    for cuts in islice(_choices(groups), MOST_TRIES):
        if is_right(
            {
                name: (_in_parts(whole[name], layouts[name], count, mesh), whole[name])
                for pattern, count in cuts.items()
                for name in groups[pattern]
            }
        ):
            return cuts
    return None


def modules_like(name: str) -> str:
    """The module of a parameter, with a star for each number: h.*.attn.c_attn"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name.rpartition(".")[0])


def _fusable(whole: Mapping[str, np.ndarray], layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, list[str]]:
    """The parameters that are cut along one dim in one piece and might hold parts, by modules that are alike."""
    found: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        if len(layout.split_dims) == 1 and not layout.parts and _counts(whole[name], layout, mesh):
            found.setdefault(modules_like(name), []).append(name)
    return found


def _choices(groups: Mapping[str, list[str]]) -> Iterator[Cuts]:
    """The choices: one kind of module cut in parts, then two."""
    for size in (1, 2):
        for patterns in combinations(groups, size):
            for counts in product(range(MOST_PARTS, 1, -1), repeat=size):
                yield dict(zip(patterns, counts))


def _counts(whole: np.ndarray, layout: Layout, mesh: Mesh) -> list[int]:
    (dim,) = layout.split_dims
    num_ranks = mesh.axis_size(layout.spec[dim])
    return [count for count in range(2, MOST_PARTS + 1) if whole.shape[dim] % (count * num_ranks) == 0]


def _in_parts(whole: np.ndarray, layout: Layout, count: int, mesh: Mesh) -> Layout:
    (dim,) = layout.split_dims
    size = whole.shape[dim]
    if size % (count * mesh.axis_size(layout.spec[dim])):
        return layout
    return Layout(layout.spec, (size // count,) * count)
