"""Ring attention on the modelled clock: when a hop is hidden by its tile, and how far from rings measured on 8 GPUs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tplab import Mesh, P
from tplab.cost import Chip, Cluster, Link, find
from tplab.cost.measured import ring_attention as measured
from tplab.sequence import LayoutName, tokens_to_hide_hop
from tplab.torch import ring_attention, run

HEADS, KV_HEADS, WIDTH = 32, 8, 128
LAYOUT: dict[str, LayoutName] = {"ring": "contiguous", "zigzag": "zigzag", "stripe": "striped"}


def traced(tokens: int, layout: LayoutName, cluster: Cluster, heads: Sequence[int], has_backward: bool) -> Any:
    """The trace of 8 ranks with so many tokens each, in bfloat16: shapes alone, so that no memory is needed."""

    def program(q: Any, k: Any, v: Any) -> None:
        for x in (q, k, v):
            x.requires_grad_(has_backward)
        o = ring_attention(q, k, v, "cp", layout=layout)
        if has_backward:
            o.backward(torch.empty_like(o))

    shapes = [(1, count, 8 * tokens, WIDTH) for count in (heads[0], heads[1], heads[1])]
    x = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes]
    return run(program, Mesh(cp=8), *x, in_specs=(P(None, None, "cp"),) * 3, cluster=cluster, keep_values=0).trace


# ------------------------------------------------------------------------------------------------- when a hop is hidden


@pytest.mark.parametrize("bandwidth", [450e9, 50e9])
@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("has_backward", [False, True])
def test_from_how_many_tokens_a_hop_is_hidden(kv_heads: int, bandwidth: float, has_backward: bool):
    """On a cluster of peaks alone, as the formula has them: 5 % more tokens and no rank waits, but for the last hop of
    dk and dv, which has no tile beside it; 5 % fewer, and ranks wait."""
    chip = Chip("peaks", {"bfloat16": 989e12, "float32": 1e30}, memory_bandwidth=1e30, memory=1e30)
    cluster = Cluster("peaks", chip, Link("link", latency=0.0, bandwidth=bandwidth))
    enough = tokens_to_hide_hop(989e12, bandwidth, HEADS, kv_heads, backward=has_backward)
    waited = {}
    for share in (0.95, 1.05):
        tokens = round(share * enough / 2) * 2
        trace = traced(tokens, "zigzag", cluster, (HEADS, kv_heads), has_backward)
        home = tokens * 2 * kv_heads * WIDTH * 4 / bandwidth if has_backward else 0.0
        waited[share] = [trace.makespan - home - computing(trace, rank) for rank in range(8)]
    assert min(waited[0.95]) > 0.02 * enough * 2 * kv_heads * WIDTH * 2 / bandwidth
    assert max(waited[1.05]) < 1e-9


def computing(trace: Any, rank: int) -> float:
    return sum(event.duration for event in trace.select(rank=rank, kind="compute").events)


# --------------------------------------------------------------------------------------- beside what others measured


def cluster_of(gpu: str, flops: float) -> Cluster:
    """8 A100, or 8 H800 (an H100 with NVLinks of 400 GB/s, both directions together), where kernels of flash attention
    reach so many FLOP/s; memory and links as on the data sheets."""
    cluster = find("a100" if gpu == "A100" else "h100")
    assert cluster.inner_link
    link = cluster.inner_link if gpu == "A100" else replace(cluster.inner_link, bandwidth=200e9)
    chip = replace(cluster.chip, flops={**cluster.chip.flops, "bfloat16": flops})
    return replace(cluster, chip=chip, inner_link=link)


@cache
def efficiencies(gpu: str, passes: str) -> dict[str, tuple[float, float]]:
    """variant -> its efficiency, measured and modelled. The kernels' FLOP/s are those of the ideal."""
    rows = [row for row in measured() if (row.api, row.gpu, row.passes) == ("batch", gpu, passes)]
    has_backward = passes == "fwd+bwd"
    flops = 8 * 2 * 8192**2 * HEADS * WIDTH * (3.5 if has_backward else 1)
    found = {}
    for row in rows:
        cluster = cluster_of(gpu, flops / row.ideal)
        trace = traced(8192, LAYOUT[row.variant], cluster, (HEADS, KV_HEADS), has_backward)
        found[row.variant] = row.efficiency, row.ideal / trace.makespan
    return found


@pytest.mark.parametrize("gpu", ["A100", "H800"])
@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
def test_a_plain_ring_is_as_slow_as_it_was_measured(gpu: str, passes: str):
    """Half of a causal ring is idle: within 3 points of the rows. Balanced rings are modelled faster than measured, by
    up to 20 points: what they lose is lost in kernels, which are modelled alike for tiles of any size."""
    found = efficiencies(gpu, passes)
    was, is_modelled = found["ring"]
    assert is_modelled == pytest.approx(was, abs=0.03)
    for kind in (0, 1):
        assert found["zigzag"][kind] > found["stripe"][kind] > found["ring"][kind]
    assert all(modelled >= was for variant, (was, modelled) in found.items() if variant != "ring")
