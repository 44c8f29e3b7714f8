"""A process group of torch.distributed whose members are simulated ranks.

torch.distributed calls the methods of `Asked` by name. Each of them passes its tensors to the running rank, as tplab's
own collectives do, and writes the result into the tensors that the program gave.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tplab.torch.distributed.asked import Asked, Put, check_contiguous, factor_of, flat, in_memory, several
from tplab.torch.distributed.seen import seen_by_modes
from tplab.torch.distributed.work import Several, Started, Taken, Work, on_one_stream
from tplab.torch.private import no_dispatch
from tplab.torch.ranks.outcomes import own
from tplab.torch.ranks.rank import Call
from tplab.torch.ranks.simulated import SimulatedRank

_DEFAULT_SECONDS = 1800.0
"""torch's own timeout of half an hour."""
_FAILED = "failed"


@seen_by_modes
class Group(Asked, dist.ProcessGroup):
    """Some ranks of a run, as a process group. A rank's number in it is its position in `ranks`.

    unfinished   what was started but not yet waited for, oldest first
    """

    def __init__(self, member: SimulatedRank, ranks: Sequence[int], name: str, label: str, backend: str, store: Any):
        Asked.__init__(self, member.rank, ranks, name, label)
        dist.ProcessGroup.__init__(self, self.place.index, len(ranks))  # type: ignore[call-arg]  # the stub lacks it
        self.member, self.backend, self.store = member, backend, store
        # what torch reads of a backend that it does not know
        unsupported = dict.fromkeys(("supports_splitting", "supports_coalescing", "supports_time_estimate"), False)
        self._backend = SimpleNamespace(name=lambda: backend, options=None, **unsupported)
        self.unfinished: deque[Started] = deque()
        self.num_monitored = 0

    # --- what torch.distributed needs of a group -----------------------------------------------------------------

    @property
    def group_name(self) -> str:
        return self.name_

    @property
    def group_desc(self) -> str:
        return self.label

    bound_device_id = None  # type: ignore[assignment]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Any) -> SimpleNamespace:
        return self._backend

    get_backend = _get_backend

    def getBackendName(self) -> str:
        """For torch's C++ code, which would look for connections under the names of its own backends."""
        return "simulated"

    def _get_backend_name(self) -> str:
        return self.backend

    def get_group_store(self) -> Any:
        return self.store

    def size(self) -> int:
        return len(self.place.group)

    def rank(self) -> int:
        return self.place.index

    def shutdown(self) -> None:
        """There are no connections to close."""

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """A deadlock is detected at once, so there is no timeout."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: calls are counted anyway."""

    def _start_coalescing(self, device: Any) -> None:
        """Let everything started before `_end_coalescing` be waited for as one."""
        self._num_before = len(self.unfinished)

    def _end_coalescing(self, device: Any) -> Work:
        return self.unfinished[-1] if len(self.unfinished) > self._num_before else Taken()

    def __repr__(self) -> str:
        return f"Group {self.label!r} of ranks {', '.join(map(str, self.place.group))}, simulated"

    def __reduce__(self) -> Any:
        raise TypeError("a process group cannot be copied or pickled; create it on each rank")

    def __deepcopy__(self, memo: Any) -> Group:
        return self

    # --- rare collectives ----------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, **given: Any) -> Work:
        """Sparse tensors are added up as gloo does: every rank gets the indices and values of all ranks.

        Raises TypeError for tensors and reductions that gloo does not support.
        """
        if (x := several(tensors)[0]).layout is torch.strided:
            return super().allreduce(tensors, opts, **given)
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if x.layout is not torch.sparse_coo or getattr(op, "op", op) != dist.ReduceOp.SUM:
            raise TypeError(f"all_reduce of a tensor with the layout {x.layout} can only add up sparse_coo tensors")
        with no_dispatch(), torch.no_grad():
            whole = x.coalesce()
            indices = torch.cat(self._gathered(whole.indices().t().contiguous())).t()
            values = torch.cat(self._gathered(whole.values()))
            x.copy_(torch.sparse_coo_tensor(indices, values, x.shape, check_invariants=False).coalesce())
        return Taken(x)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have arrived. If the program gives a timeout of its own and they cannot all arrive in
        time, rank 0 names the missing ones; no rank waits for the timeout itself if nothing can change any more.

        Raises RuntimeError in torch's words.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if seconds is not None and seconds < _DEFAULT_SECONDS:
            self._meet_within(seconds, wait_all_ranks)
        super().monitored_barrier()

    def _meet_within(self, seconds: float, names_all: bool) -> None:
        position, here, said = self.rank(), self.member.here(), f"[Rank {self.rank()}]: "
        if seconds <= 0:
            raise RuntimeError(f"{said}Rank {position} timed out in monitoredBarrier after 0 ms.")
        number, self.num_monitored = self.num_monitored, self.num_monitored + 1
        groups: Any = c10d._world
        come: set[Any] = groups.shared.others["monitored_barrier", self.name_, number].arrived
        come.add(position)
        here.look()
        what = f"monitored_barrier({self.label!r})"
        here.wait_until(lambda: len(come) == self.size() or _FAILED in come, what, seconds, gives_up=True)
        missing = [other for other in range(self.size()) if other not in come]
        if missing and position == 0:
            come.add(_FAILED)
            here.look()
            named = f"Ranks {', '.join(map(str, missing))}" if names_all and missing[1:] else f"Rank {missing[0]}"
            raise RuntimeError(f"{said}{named} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms")
        if missing:
            raise RuntimeError(
                f"{said}Rank {position} successfully reached monitoredBarrier, but received errors while waiting for "
                "send/recv from rank 0. Please check rank 0 logs for faulty rank."
            )

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which may differ only in dim 0."""
        sizes = [torch.empty(1, dtype=torch.int64, device=x.device) for _ in range(self.size())]
        self.allgather([sizes], [torch.tensor([len(x)], device=x.device)]).wait()
        found = [x.new_empty(int(size), *x.shape[1:]) for size in sizes]
        self.allgather([found], [x]).wait()
        return found

    # --- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, target: int, tag: int = 0) -> Work:
        """Start a message. `dist.send` waits for it at once, until the receiver has said that it will take the
        message."""
        x = self._to_pass_on("send", tensors)
        call = self._message("send", target, tag)
        return Started(self.member, self._begun(call, _dense(x)), x, None, [x])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        return self.receive(self._to_pass_on("recv", tensors), source, tag)

    def receive(self, x: Tensor, source: int, tag: int) -> Work:
        call = self._message("receive", source, tag)
        return Started(self.member, self._begun(call, _dense(x)), x, lambda y: self._deal("recv", [x], y), [x], source)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return AnyMessage(self, self._to_pass_on("recv", tensors), tag)

    def _to_pass_on(self, op: str, tensors: Any) -> Tensor:
        """The tensor of a message. If it is not contiguous, gloo refuses it and nccl sends its memory."""
        (x,) = several(tensors)
        if "nccl" in self.backend:
            return in_memory(op, x, elementwise=True)
        check_contiguous(op, x)
        return x

    # --- running -------------------------------------------------------------------------------------------------

    def _run(self, call: Call, put: Put, opts: Any, into: Sequence[Tensor], is_taker: bool = True) -> Work:
        return self._carry(call, put, opts, lambda y: self._deal(call.op, into, y) if is_taker else None, into)

    def _carry(self, call: Call, put: Put, opts: Any, take: Callable[[Tensor], None], into: Sequence[Tensor]) -> Work:
        """Run the collective, or start it if the program will wait for it. `take` writes the result into `into`."""
        x = _dense(put) if isinstance(put, Tensor) else _joined(put)
        if call.reduction == "sum" and (factor := factor_of(opts)) is not None:
            with no_dispatch():
                x = (x * factor).to(x.dtype)
        if opts is None or opts.asyncOp:
            return Started(self.member, self._begun(call, x), x, take, into, queue=self.unfinished)
        with on_one_stream(self.member, x):
            result = self.member.here().do(call, x, is_lent=True)
            while self.unfinished:  # everything started earlier is done too
                self.unfinished[0].wait()
            with no_dispatch():
                take(result)
        return Taken()

    def _begun(self, call: Call, x: Tensor) -> Any:
        with on_one_stream(self.member, x):
            return self.member.here().begin(call, x)

    def _together(self, works: Sequence[Work], opts: Any) -> Work:
        if not works:
            return Taken()
        if opts is not None and not opts.asyncOp:
            works[-1].wait()
        return Several(works)


class AnyMessage(Started):
    """The next message from any rank of the group."""

    def __init__(self, group: Group, x: Tensor, tag: int):
        super().__init__(group.member, None, x, None, [x])
        self._group, self._tag = group, tag

    def _finish(self) -> None:
        if self._source < 0:
            group = self._group
            others = [other for other in range(group.size()) if other != group.rank()]
            calls = [group._message("receive", other, self._tag) for other in others]
            self._source = group.place.group.index(group.member.here().first_to_send(calls))
            group.receive(self._x, self._source, self._tag).wait()
            self.is_done = True

    def is_completed(self) -> bool:
        return self.is_done


def _dense(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces, concatenated; this is not an operation of the program."""
    with no_dispatch():
        return torch.cat([flat(piece) for piece in pieces]) if len(pieces) > 1 else own(flat(pieces[0]))
