"""Runs a program on simulated ranks, and works out what went wrong among them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, TextIO, cast

from tplab.cost.cluster import Cluster
from tplab.errors import CollectiveMismatchError, DeadlockError, TplabError
from tplab.torch.ranks import results, texts
from tplab.torch.ranks.arguments import Arguments, Job
from tplab.torch.ranks.attention import KERNELS_OF_GPUS
from tplab.torch.ranks.chronicle import Chronicle
from tplab.torch.ranks.meeting import Group, Meeting
from tplab.torch.ranks.printing import Kept, beneath, live_output
from tplab.torch.ranks.process_state import More, Own, ProcessState
from tplab.torch.ranks.rank import Lines, current_rank_or_none, enter
from tplab.torch.ranks.simulated import SimulatedRank
from tplab.torch.ranks.turns import Turns
from tplab.torch.ranks.world import World


def run_on_simulated_ranks(
    job: Job, cluster: Cluster | None = None, clock: str = "modelled", more: More | None = None
) -> tuple[list[Any], Chronicle]:
    """Run a program on every rank of a mesh, each in a thread that takes turns. Returns each rank's result and the
    chronicle of the run. `more` is the further per-rank state of a program that uses torch.distributed."""
    mesh, world = job.mesh, World(job, cluster, is_timed=clock == "measured")
    state, around = ProcessState(job.device, more), current_rank_or_none()
    turns = Turns(
        state,
        stuck=lambda: deadlock(ranks, [one for one in turns.others if turns.is_running(one)]),
        told=lambda error, rank: told(error if rank is None else named(error, rank, world, more), ranks, world.lines),
        around=around if isinstance(around, SimulatedRank) else None,
    )
    ranks = [SimulatedRank(rank, world, turns) for rank in mesh.ranks]
    ending = ExitStack()

    def owns(kernels: Own) -> list[Own]:
        stream = beneath(kernels[2])
        if more is not None and more.prints_live:
            out = ending.enter_context(live_output(stream, partial(_writer, world)))
        else:
            kept = Kept(stream, partial(_writer, world), mesh.size)
            ending.callback(kept.show)
            out = cast(TextIO, kept)
        return [state.of_rank(job.seed, rank, kernels, out) for rank in mesh.ranks]

    def program(rank: SimulatedRank, pieces: list[Any]) -> Any:
        enter(rank)
        with world.inherited.state(), more.inside(rank) if more is not None else nullcontext():
            rank.start_watching()
            try:
                return job.fn(*pieces)
            finally:
                rank.stop_watching()

    pieces = Arguments(job, num_here=mesh.size)
    programs = [partial(program, rank, pieces.of(rank.rank)) for rank in ranks]
    del pieces
    chronicle = world.chronicle
    try:
        with ending, KERNELS_OF_GPUS if world.fuses_attention else nullcontext():
            per_rank = [results.without_graph(result) for result in turns.run(programs, owns)]
        if (error := unmet(world.groups.values())) is not None:
            raise error
    except TplabError as error:
        messages = [one for meeting in _open(world.groups.values()) for one in meeting.messages.values()]
        chronicle.failed(f"{type(error).__name__}: {error}", lost=[number for *_, number, _ in messages])
        error.make_trace = lambda: chronicle.trace
        raise
    finally:
        if more is not None and (found := more.named_mesh()) is not None:
            chronicle.recorder.rename(*found)
        ranks.clear()
        world.members.clear()  # frees their contents without waiting for the garbage collector
    return per_rank, chronicle


def _writer(world: World) -> int | None:
    """The rank of this run that the calling thread runs, or None."""
    current = current_rank_or_none()
    return current.rank if isinstance(current, SimulatedRank) and current.world is world else None


# --- what went wrong, worked out from where each rank is --------------------------------------------------------------


def named(error: BaseException, rank: int, world: World, more: More | None) -> BaseException:
    """The error for what a rank raised, with the rank's number and advice."""
    said = "; ".join(filter(None, (str(error), None if more is None else more.advice(error))))
    return texts.raised(rank, error, type(error).__name__, said, world.lines.of(error), world.mesh)


def told(error: BaseException, ranks: Iterable[SimulatedRank], lines: Lines) -> BaseException:
    """A mismatch or a deadlock, after the errors that ranks are still handling: a collective in an `except` or
    `finally` meets no other rank. Any other error as it is."""
    if not isinstance(error, CollectiveMismatchError | DeadlockError):
        return error
    held = [*_held(ranks, lines)]
    found = texts.behind([(rank, said) for rank, said, _ in held], error)
    if held:
        found.__cause__ = held[0][2]
    return found


def _held(ranks: Iterable[SimulatedRank], lines: Lines) -> Iterator[tuple[int, str, BaseException]]:
    """The ranks that wait in a collective while they handle an error: each rank, a sentence about both, the error."""
    caught: dict[int, Any] = sys._current_exceptions()
    for rank in ranks:
        own = caught.get(rank.thread.ident or 0) if rank.thread else None
        own = own[1] if isinstance(own, tuple) else own  # Python 3.11 has (type, error, traceback)
        if own is None or rank.waits_in is None or (line := lines.of(own)) is None:
            continue
        calls = rank.waits_in if isinstance(rank.waits_in, str) else "{0.call} at {0.where}".format(rank.waits_in[0])
        yield rank.rank, texts.while_handling(rank.rank, own, line, calls), own


def unmet(groups: Iterable[Group]) -> CollectiveMismatchError | None:
    """The error for a collective that some of its group never reached, though all ranks have returned."""
    for meeting in _open(groups):
        if meeting.waiting and all(seat.home is not seat and seat.is_daemon for seat in meeting.waiting):
            continue  # daemon threads end with their process
        rank, site = meeting.first
        return texts.unmet(site.call.key, meeting.number, rank, site.where, meeting.absent)
    return None


def _open(groups: Iterable[Group]) -> Iterator[Meeting]:
    return (meeting for group in groups for meeting in group.open.values())


def deadlock(ranks: Iterable[SimulatedRank], others: Iterable[SimulatedRank] = ()) -> DeadlockError:
    """The error that says what every rank waits for, and what the `others` do: threads that ranks have started."""
    members = [*ranks, *others]
    doing = {rank.rank: _doing(rank) for rank in members if rank.home is rank}
    for rank in members:
        if rank.home is not rank and rank.thread is not None:
            doing[rank.rank] += f"\n    its thread {rank.thread.name!r} {_doing(rank)}"
    for rank in members:
        doing[rank.rank] += "".join(f"\n    {text}" for text in rank.raised)
    return texts.deadlock(doing, [rank.waits_in[0].call.op for rank in members if isinstance(rank.waits_in, tuple)])


def _doing(rank: SimulatedRank) -> str:
    if rank.waits_in is None:
        return texts.HAS_RETURNED
    if isinstance(rank.waits_in, str):
        return f"waits in {rank.waits_in}"
    site, meeting = rank.waits_in
    missing = meeting.absent if site.source is None else [site.source]
    return texts.waits_text(site.call.key, site.where, missing, site.source is not None)
