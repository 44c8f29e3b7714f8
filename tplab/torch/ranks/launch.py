"""Running a program on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, TextIO, cast

import torch

from tplab.cost.cluster import Cluster
from tplab.errors import TplabError
from tplab.mesh import Mesh
from tplab.torch.ranks import faults, results
from tplab.torch.ranks.arguments import Arguments
from tplab.torch.ranks.attention import KERNELS_OF_GPUS
from tplab.torch.ranks.chronicle import Chronicle
from tplab.torch.ranks.live_output import live_output
from tplab.torch.ranks.printing import Kept, beneath
from tplab.torch.ranks.process_state import More, Own, ProcessState
from tplab.torch.ranks.rank import current_rank_or_none, enter
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.turns import Turns
from tplab.torch.ranks.world import World


def run_on_simulated_ranks(
    fn: Callable[..., Any],
    mesh: Mesh,
    args: tuple[Any, ...],
    in_specs: Any,
    *,
    cluster: Cluster | None,
    clock: str,
    seed: int,
    keep_values: int,
    device: torch.device | None,
    title: str,
    more: More | None = None,
) -> tuple[list[Any], Chronicle]:
    """Run `fn` on every rank of `mesh`, each a thread that takes turns. Returns each rank's result and what has
    happened. `more` is what each rank has of its own where the program uses torch.distributed."""
    world = World(
        mesh,
        title=title,
        cluster=cluster,
        is_timed=clock == "measured",
        seed=seed,
        keep_values=keep_values,
        device=device,
    )
    state, around = ProcessState(device, more), current_rank_or_none()
    turns = Turns(
        mesh.size,
        state,
        stuck=lambda: faults.deadlock(ranks, [seat.member for seat in turns.others if turns.is_running(seat)]),
        named=lambda rank, error: faults.named(
            rank, error, turns.failure, mesh, world.lines, None if more is None else more.advice(error)
        ),
        told=lambda error: faults.told(error, ranks, world.lines),
        around=around.seat if isinstance(around, SimulatedRank) else None,
    )
    ranks = [SimulatedRank(rank, world, seat) for rank, seat in enumerate(turns.seats)]
    ending = ExitStack()

    def owns(kernels: Own) -> list[Own]:
        stream = beneath(kernels[2])
        if more is not None and more.prints_live:
            out = ending.enter_context(live_output(stream, partial(_writer, world)))
        else:
            kept = Kept(stream, partial(_writer, world), mesh.size)
            ending.callback(kept.show)
            out = cast(TextIO, kept)
        return [state.of_rank(seed, rank, kernels, out) for rank in mesh.ranks]

    def program(rank: SimulatedRank, pieces: list[Any]) -> Any:
        enter(rank)
        with world.inherited(), more.inside(rank) if more is not None else nullcontext():
            rank.start_watching()
            try:
                return fn(*pieces)
            finally:
                rank.stop_watching()

    pieces = Arguments(args, in_specs, mesh, device, num_here=mesh.size)
    programs = [partial(program, rank, pieces.of(rank.rank)) for rank in ranks]
    del pieces
    chronicle = world.chronicle
    try:
        with ending, KERNELS_OF_GPUS if world.fuses_attention else nullcontext():
            per_rank = [results.without_graph(result) for result in turns.run(programs, owns)]
        if (error := faults.unmet(world.groups.values())) is not None:
            raise error
    except TplabError as error:
        for message in faults.not_received(world.groups.values()):
            chronicle.recorder.lost(message)
        error.make_trace = lambda: chronicle.trace
        raise
    finally:
        if more is not None and (found := more.named_mesh()) is not None:
            chronicle.recorder.rename(*found)
        ranks.clear()
        world.members.clear()  # so that what they hold does not wait for the garbage collector
    return per_rank, chronicle


def _writer(world: World) -> int | None:
    """The rank of this run whose program the calling thread runs."""
    current = current_rank_or_none()
    return current.rank if isinstance(current, SimulatedRank) and current.world is world else None
