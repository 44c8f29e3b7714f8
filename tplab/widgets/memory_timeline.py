"""`memory_timeline(out.memory)`: what each rank holds in memory over time, by kind, beside a prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import traitlets

from tplab.mesh import Mesh
from tplab.trace.memory import KINDS, Memory
from tplab.units import bytes_text
from tplab.widgets.paper.card import Card, script
from tplab.widgets.paper.scene import Scene, packed
from tplab.widgets.paper.shown import check_shown
from tplab.widgets.paper.still import still
from tplab.widgets.paper.wire import pack
from tplab.widgets.stacks import drawing

Predicted = drawing.Predicted | Sequence[drawing.Predicted]
"""kind -> bytes, the same on every rank; or one such mapping for each rank."""


class MemoryTimeline(Card):
    """The card of `memory_timeline`. `rank` is the rank that is shown."""

    _esm = script("stacks")
    kept = ("rank",)
    scene = traitlets.Bytes().tag(sync=True)
    rank = traitlets.Int(0).tag(sync=True)

    def __init__(
        self,
        memories: Mapping[str, Memory],
        predicted: Mapping[str, Sequence[drawing.Predicted]],
        title: str,
        rank: int,
    ):
        self.memories, self.predicted, self.title = dict(memories), dict(predicted), title
        self.mesh = next(iter(self.memories.values())).mesh
        self.of = drawing.picture(self.memories, self.predicted)
        self.about = _about(next(iter(self.memories.values())))
        self.scene_of_ranks = self._draw(self.of)
        self.scene_of_ranks.narrow = self._draw(drawing.picture(self.memories, self.predicted, drawing.NARROW))
        self._legend = drawing.legend(self.of)
        header, columns = packed([self.scene_of_ranks], self._legend)
        header |= {
            "title": title,
            "about": self.about,
            "ranks": [_rank_text(self.mesh, rank) for rank in self.mesh.ranks],
            "says": [self.says(rank) for rank in self.mesh.ranks],
        }
        super().__init__(rank=rank, scene=pack(header, columns))
        self.sentence = f"{title}: {self.says(rank)}"

    @traitlets.validate("rank")
    def _check_rank(self, proposal: Any) -> int:
        self.mesh.check_rank(proposal["value"])
        return proposal["value"]

    def says(self, rank: int) -> str:
        """The peaks of a rank, in a sentence."""
        if len(self.memories) == 1:
            (memory,) = self.memories.values()
            held = memory[rank]
            where = held.where[held.peak_row]
            return f"rank {rank} holds at most {bytes_text(held.peak)}{f', at {where}' if where else ''}."
        peaks = [f"{bytes_text(memory[rank].peak)} ({title})" for title, memory in self.memories.items()]
        return f"rank {rank} holds at most {', '.join(peaks)}."

    def picture(self) -> bytes:
        says, note = f"R{self.says(self.rank)[1:]}", f"rank {self.rank}"
        return still(
            self.title, says, [self.scene_of_ranks], self.rank, about=self.about, legend=self._legend, note=note
        )

    def _draw(self, picture: drawing.Picture) -> Scene:
        return drawing.draw(picture, [*self.memories.values()], self.predicted)


def memory_timeline(
    memory: Memory | Mapping[str, Memory],
    predicted: Predicted | Mapping[str, Predicted] | None = None,
    *,
    title: str = "Memory of each rank",
    rank: int = 0,
) -> MemoryTimeline:
    """Show what a rank holds in memory at every moment of a run, as one stacked area per kind. You can switch ranks.

        out = run(step, Mesh(dp=4), x, count_memory=True)
        memory_timeline(out.memory, state_bytes(1, sizes, 4, 0, each)._asdict())

    memory     the memory counted by `run`; or several of these by title, to show side by side on one scale
    predicted  kind -> bytes, with kinds from `tplab.trace.memory.KINDS`: their sum is a dashed line. Or a list of such
               mappings, one per rank. For several runs, {title: either of these}
    rank       the rank to show first
    Times are those of the run's clock. If computing takes no time on it, the axis counts operations instead.
    Raises ValueError if the meshes differ in size, or if a prediction has an unknown run or kind, the wrong number of
    ranks, or an amount that is negative or not finite.
    """
    memories = dict(memory) if isinstance(memory, Mapping) else {"": memory}
    check_shown(memories.values(), Memory)
    if not memories:
        raise ValueError("there is no memory to draw; give at least one run's, as {'a title': out.memory}")
    sizes = {len(one) for one in memories.values()}
    if len(sizes) > 1:
        raise ValueError(f"one rank is shown of all runs, and they have {sorted(sizes)} ranks; give runs of equal size")
    given: Mapping[str, Any] = {} if predicted is None else {"": predicted} if isinstance(memory, Memory) else predicted  # type: ignore[dict-item]
    if unknown := [name for name in given if name not in memories]:
        raise ValueError(f"there is a prediction of {unknown[0]!r}, which is no run; runs are {', '.join(memories)}")
    return MemoryTimeline(memories, {name: _per_rank(one, *sizes) for name, one in given.items()}, title, rank)


def _per_rank(predicted: Any, num_ranks: int) -> list[drawing.Predicted]:
    listed = [predicted] * num_ranks if isinstance(predicted, Mapping) else list(predicted)
    if len(listed) != num_ranks:
        raise ValueError(f"predicted is of {len(listed)} ranks, and the run has {num_ranks}; give one for each")
    for kinds in listed:
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"predicted has {unknown[0]!r}; kinds of memory are {', '.join(KINDS)}")
        if wrong := [f"{bytes} of {kind}" for kind, bytes in kinds.items() if not 0 <= bytes < inf]:
            raise ValueError(f"predicted has {wrong[0]}; give bytes, a number from 0 upwards")
    return listed


def _about(memory: Memory) -> str:
    if memory.unit == "steps":
        return "by operation"
    return f"{memory.clock} time{f' on {memory.cluster}' if memory.cluster else ''}"


def _rank_text(mesh: Mesh, rank: int) -> str:
    """ "rank 3: dp 1, tp 1"."""
    if len(mesh.shape) == 1:
        return f"rank {rank}"
    return f"rank {rank}: {', '.join(f'{axis} {mesh.index(rank, axis)}' for axis in mesh.axis_names)}"
