"""Groups that are no axis of the mesh are drawn, and named in the words beside a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.widgets.test_page import Page
from tplab import Mesh
from tplab.torch import run
from tplab.widgets import animate, timeline, to_html
from tplab.widgets.score.score import score
from tplab.widgets.score.words import about, sentences


def ring_and_sum(groups: list[list[int]]):
    """Each group passes a tensor on along its ring, then adds up."""

    def program() -> float:
        made: list[Any] = [dist.new_group(group) for group in groups]
        for ranks, group in zip(groups, made, strict=True):
            if dist.get_rank() in ranks:
                x, y, me = torch.full((4,), float(dist.get_rank())), torch.empty(4), ranks.index(dist.get_rank())
                ops = [dist.P2POp(dist.isend, x, ranks[(me + 1) % len(ranks)], group),
                       dist.P2POp(dist.irecv, y, ranks[me - 1], group)]  # fmt: skip
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                dist.all_reduce(y, group=group)
                return float(y[0])
        return 0.0

    return program


GROUPS = {
    "pairs": (4, [[0, 2], [1, 3]], "2 groups of 2 (0,2 ...)", "the other rank in the group"),
    "rings": (8, [[0, 2, 4, 6], [1, 3, 5, 7]], "2 groups of 4 (0,2,4,6 ...)", "the next rank in the group"),
    "threes": (6, [[0, 3, 4], [1, 2, 5]], "2 groups of 3 (0,3,4 ...)", "the next rank in the group"),
    "uneven": (7, [[0, 2, 4, 6], [1, 3, 5]], "ranks 0,2,4,6, ranks 1,3,5", "the next rank in the group"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_messages_among_ranks_that_are_no_axis(name: str, tmp_path: Path):
    size, groups, kind, to = GROUPS[name]
    out = run(ring_and_sum(groups), Mesh(world=size), distributed=True)
    assert out.per_rank == [float(sum(next(g for g in groups if rank in g))) for rank in range(size)]
    of = score(out.trace)
    assert f"over {kind} ·" in about(of)
    ends = "each group" if name == "uneven" else f"a group of {len(groups[0])}"
    assert sentences(of)[1:] == [
        f"every rank sends its own piece to {to}",
        f"all_reduce over {kind}: every rank of {ends} ends with the sum of all their tensors",
    ]
    for card in (animate(out.trace), timeline(out.trace)):
        assert card.picture().startswith(b"\x89PNG")
    assert len(Page(to_html(out.trace, tmp_path / "run.html")).cards) == 2


def test_one_item_serves_all_groups_of_a_kind():
    """As it does for the groups of an axis; groups that share a rank have items of their own."""
    pairs = [[rank, rank + 4] for rank in range(4)]
    of = score(run(ring_and_sum(pairs), Mesh(world=8), distributed=True).trace)
    assert [item.pools for item in of.items if item.op] == [tuple(map(tuple, pairs))]

    def chain() -> None:
        for ranks in ([0, 1], [1, 2]):
            group: Any = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                dist.all_reduce(torch.ones(1), group=group)

    of = score(run(chain, Mesh(world=4), distributed=True).trace)
    assert [item.pools for item in of.items] == [((0, 1),), ((1, 2),)]


def test_a_group_with_a_name_that_no_axis_has():
    """A DeviceMesh of some of the ranks names its group."""

    def program() -> None:
        group: Any = dist.new_group([0, 1, 2], group_desc="mesh_inner")
        if dist.get_rank() < 3:
            x, y, other = torch.ones(1), torch.empty(1), (dist.get_rank() + 1) % 3
            ops = [dist.P2POp(dist.isend, x, other, group), dist.P2POp(dist.irecv, y, (other + 1) % 3, group)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    of = score(run(program, Mesh(world=4), distributed=True).trace)
    assert "over inner ·" in about(of)
    assert sentences(of)[1] == "3 ranks send their own piece to others"
