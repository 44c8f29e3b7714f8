"""Cutting again: whether a model is right once a fused weight, cut in one piece, is cut part by part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations, islice, product

import numpy as np

from tplab.checking.proofs import Trial
from tplab.layout import MOST_PARTS, Layout
from tplab.mesh import Mesh

MOST_TRIES = 24  # forward passes


def recuts(
    whole: Mapping[str, np.ndarray], layouts: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[dict[str, int], Trial]]:
    """Yield trials, with the number of parts into which they cut weights, by module pattern: {"h.*.attn.c_attn": 3}.

    whole      the parameters, by the reference's names
    """
    groups: dict[str, list[str]] = {}
    for name, layout in layouts.items():
        if len(layout.split_dims) == 1 and not layout.parts and _in_parts(whole[name], layout, mesh):
            groups.setdefault(modules_like(name), []).append(name)
    kinds = (patterns for size in (1, 2) for patterns in combinations(groups, size))
    counts = range(MOST_PARTS, 1, -1)
    ways = (dict(zip(some, each)) for some in kinds for each in product(counts, repeat=len(some)))
    for cuts in islice(ways, MOST_TRIES):
        held = {
            name: (_in_parts(whole[name], layouts[name], mesh).get(count, layouts[name]), whole[name])
            for pattern, count in cuts.items()
            for name in groups[pattern]
        }
        yield cuts, Trial("", "fused weights cut part by part", {"parameters": held})


def modules_like(name: str) -> str:
    """Return the module of a parameter, with a star for each number: h.*.attn.c_attn"""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name.rpartition(".")[0])


def _in_parts(whole: np.ndarray, layout: Layout, mesh: Mesh) -> dict[int, Layout]:
    """Return the layouts with the same spec in which several parts are fused, by their number."""
    (dim,) = layout.split_dims
    size, num_ranks = whole.shape[dim], mesh.axis_size(layout.spec[dim])
    fitting = [count for count in range(2, MOST_PARTS + 1) if size % (count * num_ranks) == 0]
    return {count: Layout(layout.spec, (size // count,) * count) for count in fitting}
