"""Cutting again: whether a model is right once a fused weight, cut in one piece, is cut part by part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations, islice, product

import numpy as np

from tplab.checking.tried import Trial
from tplab.layout import MOST_PARTS, Layout
from tplab.mesh import Mesh

MOST_TRIES = 24  # forward passes


def recuts(
    whole: Mapping[str, np.ndarray], layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[dict[str, int], Trial]]:
    """Yield trials, with the number of parts into which they cut weights, by module pattern: {"h.*.attn.c_attn": 3}.

    whole      the parameters, by the reference's names
    """
    groups = _fusable(whole, layouts, mesh)
    for cuts in islice(_choices(groups), MOST_TRIES):
        held = {
            name: (_in_parts(whole[name], layouts[name], count, mesh), whole[name])
            for pattern, count in cuts.items()
            for name in groups[pattern]
        }
        yield cuts, Trial("", "fused weights cut part by part", {"parameters": held})


def modules_like(name: str) -> str:
    """Return the module of a parameter, with a star for each number: h.*.attn.c_attn"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name.rpartition(".")[0])


def _fusable(whole: Mapping[str, np.ndarray], layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, list[str]]:
    """Return the parameters that are cut along one dim in one piece and may hold several parts, by similar modules."""
    found: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        if len(layout.split_dims) == 1 and not layout.parts and _counts(whole[name], layout, mesh):
            found.setdefault(modules_like(name), []).append(name)
    return found


def _choices(groups: Mapping[str, list[str]]) -> Iterator[dict[str, int]]:
    """Yield the choices: one kind of module cut in parts, then two."""
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
