"""`run`: one rank's program, on every rank of a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any
from warnings import warn

import numpy as np
import torch

from tplab import spare
from tplab.checking.typed import Types
from tplab.comm import check_run, no_out_specs
from tplab.cost.cluster import Cluster
from tplab.cost.named import THIS_LAPTOP, find
from tplab.errors import CrossedOrderWarning, MeshError
from tplab.mesh import Mesh
from tplab.torch.ranks import results
from tplab.torch.ranks.arguments import Job
from tplab.torch.ranks.launch import run_on_simulated_ranks
from tplab.torch.ranks.process_state import RUN_ID, More
from tplab.torch.ranks.rank import current_rank_or_none
from tplab.torch.ranks.watcher import Watched
from tplab.torch.watching.follower import Follower
from tplab.torch.watching.memory import KindsOfMemory, memory_of
from tplab.torch.watching.typed import types_in
from tplab.trace.memory import Memory
from tplab.trace.trace import Trace, with_types

_TORCHRUNS = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""The environment variables that torchrun sets in the processes that it starts."""


class Result:
    """What a run returned.

    per_rank   what each rank returned
    value      the results joined as out_specs says; where ranks hold copies, one of them
    trace      everything that was sent: from which rank, to which rank, how large, when
    memory     what each rank held at every moment, by kind, if `run` was asked to count it
    peaks      the most bytes of tensors that each rank held at once, if memory was counted
    mapped     a sentence with the lines of the program that asked for cuda and got the CPU; None if none did
    types      what each tensor is along each axis, line by line, if `run` was asked for types
    warnings   what may hang on GPUs though it runs here: collectives that ranks issue in opposite orders
    """

    peaks: list[int] | None = None
    warnings: Sequence[str] = ()
    _memory: Memory | None = None
    _types: Types | None = None

    def __init__(
        self, per_rank: list[Any], trace: Callable[[], Trace], mesh: Mesh, out_specs: Any, mapped: str | None = None
    ):
        self.per_rank, self.mesh, self.mapped = per_rank, mesh, mapped
        self._make_trace = trace
        self._has_value = out_specs is not None
        self._value = results.whole(per_rank, out_specs, mesh) if self._has_value else None

    @cached_property
    def trace(self) -> Trace:
        trace = self._make_trace()  # from what was recorded, when it is first read
        return trace if self._types is None else with_types(trace, self._types.casts)

    @property
    def memory(self) -> Memory:
        if self._memory is None:
            raise ValueError("run was not asked to count memory; give count_memory=True")
        return self._memory

    @property
    def types(self) -> Types:
        if self._types is None:
            raise ValueError("run was not asked for types; give types=True")
        return self._types

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._memory, self.peaks = memory, memory.peaks

    @property
    def value(self) -> Any:
        if not self._has_value:
            raise no_out_specs()
        return self._value

    def __repr__(self) -> str:
        also = f"; {self.mapped}" if self.mapped else ""
        return f"Result of {self.trace.title or 'a program'} on {self.trace.mesh}: value, per_rank, trace{also}"


def run(
    fn: Callable[..., Any],
    mesh: Mesh,
    *args: Any,
    in_specs: Any = None,
    out_specs: Any = None,
    on: str | None = None,
    cluster: str | Cluster | None = None,
    clock: str | None = None,
    seed: int = 0,
    keep_values: int = 1000,
    device: str | torch.device | None = None,
    distributed: bool | More = False,
    count_memory: bool = False,
    types: bool = False,
) -> Result:
    """Run `fn`, the program of one rank, on every rank of `mesh`.

    args        the arguments of `fn`. Each rank gets its own memory: the piece that in_specs gives it, or everything.
                NumPy arrays become tensors; a tensor that requires grad is a leaf that requires grad on every rank
    in_specs    one P per argument (or a structure of them, or one P for all); without it, every rank gets everything
    out_specs   how the results are joined, for `Result.value`. Results that should be the same on several ranks are
                checked: ReplicationError names the ranks that differ
    on          "simulated": ranks in this process that take turns; runs in several threads run one at a time.
                "processes": one process per rank, through torch.distributed. None: under torchrun, the processes that
                it has started are the ranks; otherwise ranks are simulated
    cluster     the figures of the modelled clock: a tplab.cost.Cluster or its name: "h100" from data sheets, or a
                forecast, "h100-measured". Without one, a hop takes one unit of time and computing takes none. On
                processes everything is real, and a cluster is refused. On a GPU's cluster, scaled_dot_product_attention
                is the kernel that a GPU runs. Where tplab makes or shards a model (stages_of, parallelize,
                shard_parameters), that takes no time: a step begins after it. Make other models outside `fn`
    clock       "modelled", or "measured": the ranks' own computing is timed on this machine, and messages that are not
                real are modelled (on `cluster`, or this laptop). None: measured on processes, otherwise modelled
    seed        every rank draws from a torch generator of its own, derived from (seed, rank); the caller's is untouched
    keep_values the number of messages whose values the trace keeps (if they have at most 64 elements)
    device      where the arguments and the simulated ranks' generators are: "cuda" to share one GPU; "meta" for tensors
                without numbers, for which the modelled clock counts what real ones of any size would cost. With
                distributed, "cpu" maps every mention of cuda in the program to the CPU: see Result.mapped
    distributed whether `fn` is a program for torch.distributed, which is then initialised with the mesh as its world;
                `tplab.torch.device_mesh()` is the mesh as a DeviceMesh. Environment variables such as RANK, sys.argv,
                and Python's and NumPy's random numbers are each rank's own, as are modules that it imports first
    count_memory  whether to follow each rank's tensors, for `Result.memory`: the bytes of parameters, gradients,
                optimizer states and activations after every operation. This slows down the run, and measured times with
                it. With device="meta" it counts what real tensors of these shapes would take, in addition to those that
                the program makes on another device. Not for programs with torch.func.grad or vjp, which torch refuses
                while saved tensors are followed

    types       whether to work out what each tensor is along each axis, for `Result.types`: replicated, invariant,
                varying or partial (see the page "Types of tensors on ranks"). The program then runs a second time, with
                another seed and other numbers in its arguments, so that nothing looks the same by chance. Only on
                simulated ranks; each operation takes several times as long

    The same program with the same seed gives the same bits, events and modelled times, however often it is run.
    All ranks share tensors that `fn` reads from its surroundings instead of its arguments. torch's default dtype and
    sys.stdout are each rank's own; Python's and NumPy's generators are not. Simulated ranks compute with as many
    threads as the caller (`torch.set_num_threads`): several are faster for large tensors, one is enough for small ones.

    Raises RankError (a rank raised; its own error is the cause), CollectiveMismatchError, DeadlockError,
    ReplicationError, SpecError, ShapeError. Ctrl-C ends all ranks.
    """
    check_run(fn, mesh, seed=seed, keep_values=keep_values)
    place = None if device is None else _place(device)
    is_launched = launched_by_torchrun()
    is_simulated = _is_simulated(on, is_launched)
    clock = _clock(clock, cluster, is_simulated)
    if distributed and not is_simulated:
        raise ValueError(
            "distributed=True is for simulated ranks; processes have torch.distributed anyway: leave it out, or run "
            "on='simulated'"
        )
    title = getattr(fn, "__name__", type(fn).__name__).replace("<lambda>", "lambda")
    if types and (count_memory or not is_simulated):
        raise ValueError("types=True is for simulated ranks, and not beside count_memory=True; ask in two runs")
    is_meta = place is not None and place.type == "meta"
    listener = partial(KindsOfMemory, is_meta=is_meta) if count_memory else Follower if types else None
    program = fn if listener is None else Watched(fn, listener)
    job = Job(program, mesh, args, in_specs, seed, keep_values, place, title)
    known = None
    if is_simulated:
        _check_size(mesh, MOST_SIMULATED, "simulated ranks, each of which is a thread")
        known = find(cluster) if cluster is not None else THIS_LAPTOP if clock == "measured" else None
        more = _processes(mesh, seed) if distributed is True else distributed or None
        if more is not None and place is not None and place.type == "cpu":
            more.map_cuda()
        with spare.returned():
            per_rank, chronicle = run_on_simulated_ranks(job, known, clock, more)
        mapped = more.mapped if more is not None else None
        make_trace, times, may_hang = (lambda: chronicle.trace), chronicle.times, chronicle.warnings
        for text in may_hang:
            warn(text, CrossedOrderWarning, stacklevel=2)
    else:
        per_rank, make_trace = _on_processes(mesh, is_launched)(job)
        mapped, times, may_hang = None, np.asarray, ()
    returned, heard = zip(*per_rank, strict=True) if isinstance(program, Watched) else (per_rank, [])
    out = Result([*returned], make_trace, mesh, out_specs, mapped)
    out.warnings = may_hang
    if types:
        more = _processes(mesh, seed + 1) if distributed is True else None
        why_not = "" if distributed in (True, False) else "a script runs once"
        out._types = types_in(job._replace(fn=fn), heard, more, why_not)
    if count_memory:
        in_steps = is_simulated and known is None
        out.memory = memory_of(heard, mesh, times, title=title, clock=clock, cluster=known, in_steps=in_steps)
    return out


def _on_processes(mesh: Mesh, is_launched: bool) -> Callable[..., tuple[list[Any], Callable[[], Trace]]]:
    """The function that runs a program on processes: those that torchrun has started, or new ones."""
    from tplab.torch import processes  # it needs cloudpickle, which simulated ranks do not

    if is_launched:
        return processes.run_under_torchrun
    _check_size(mesh, MOST_PROCESSES, "processes on this machine")
    return processes.run_on_processes


def launched_by_torchrun() -> bool:
    """Whether torchrun has started this process as one of the ranks, and the caller is not a simulated rank in it."""
    is_simulated = current_rank_or_none() is not None or os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID
    return os.environ.keys() >= _TORCHRUNS and not is_simulated


def _processes(mesh: Mesh, seed: int) -> More:
    from tplab.torch.distributed.process import Processes  # torch.distributed takes time to import

    return Processes(mesh, seed)


def _place(device: str | torch.device) -> torch.device:
    """The device, with its number if it has one. Raises ValueError if torch cannot use it here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"device {str(device)!r} does not work here ({why}); leave it out, or give 'cpu'") from None


def _is_simulated(on: str | None, is_launched: bool) -> bool:
    """Whether ranks are simulated. Raises ValueError if the caller and the environment disagree."""
    if on not in (None, "simulated", "processes"):
        raise ValueError(f"on is {on!r}; it must be 'simulated', 'processes', or None to leave it to run")
    if is_launched and on == "simulated":
        raise ValueError(
            f"on='simulated', but torchrun has started this process as one of {os.environ['WORLD_SIZE']} ranks; leave "
            "`on` out to run on those, or start the script with python instead of torchrun"
        )
    return on == "simulated" or (on is None and not is_launched)


def _clock(clock: str | None, cluster: str | Cluster | None, is_simulated: bool) -> str:
    """The clock to use. Raises ValueError for an unknown one, and for a modelled clock of real processes."""
    if clock not in (None, "modelled", "measured"):
        raise ValueError(f"clock is {clock!r}; it must be 'modelled', 'measured', or None to leave it to run")
    if is_simulated:
        return clock or "modelled"
    for name, given in (("clock", clock), ("cluster", cluster)):
        if given not in (None, "measured"):
            raise ValueError(
                f"{name}={given!r} is for simulated ranks: processes send real messages, and their time is measured; "
                f"leave {name} out, or run on='simulated'"
            )
    return "measured"


MOST_SIMULATED, MOST_PROCESSES = 1 << 12, 1 << 8


def _check_size(mesh: Mesh, most: int, what: str) -> None:
    if mesh.size > most:
        raise MeshError(f"{mesh} has {mesh.size:,} ranks, and run takes at most {most:,} {what}; take a smaller mesh")
