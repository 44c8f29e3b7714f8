"""A recording: process groups that pass their calls on to the real groups, and note them."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tplab.torch.distributed.asked import Asked
from tplab.torch.private import c10d_C, graph_task, group_tables
from tplab.torch.ranks.rank import current_rank_or_none
from tplab.torch.record.listener import Heard, Listener
from tplab.torch.record.notes import Notes
from tplab.trace.recorded.rank_file import ANY, FOLDER

FEWEST = 2
"""The smallest group whose calls are noted; a smaller one sends nothing."""


class _IsAnyGroup(type(dist.ProcessGroup)):
    """Lets every process group pass the type checks of torch."""

    def __instancecheck__(cls, group: Any) -> bool:
        return isinstance(group, dist.ProcessGroup)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, dist.ProcessGroup)


class RecordedGroup(dist.ProcessGroup, metaclass=_IsAnyGroup):
    """A process group that replaces torch's own, made with the same arguments.

    real   the group that does everything. This group also has its backends, because torch calls them directly for some
           things. Its C++ code calls the methods here through pybind's trampolines, as for any group written in Python
    """

    notes: Notes

    def __init__(self, store: Any, rank: int, size: int, real: Any = None):
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks torch's shorter form
        self.real: Any = real or dist.ProcessGroup(store, rank, size)
        self._listener: Listener | None = None
        self._coalesced: list[tuple[int, Heard]] | None = None
        self._id = ""
        self.notes.joined(store, rank, size, is_world=not dist.is_initialized())

    @classmethod
    def around(cls, real: Any) -> RecordedGroup:
        """A recorded group around one that torch's C++ code has made."""
        group = cls(real.get_group_store(), real.rank(), real.size(), real)
        for device in real._device_types:
            backend = real._get_backend(device)
            kind = dist.Backend.backend_type_map.get(backend.name(), cls.BackendType.CUSTOM)
            dist.ProcessGroup._register_backend(group, device, kind, backend)
        for name in ("_set_group_name", "_set_group_desc"):
            getattr(dist.ProcessGroup, name)(group, getattr(real, name.removeprefix("_set_")))
        group._id = cls.notes.id_of_new(real.group_name)
        return group

    # --- passed on to both ---------------------------------------------------------------------------------------

    def _set_group_name(self, *args: Any) -> None:
        self.real._set_group_name(*args)
        super()._set_group_name(*args)
        self._id = self.notes.id_of_new(self.group_name)

    @property
    def bound_device_id(self) -> Any:
        return self.real.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:
        self.real.bound_device_id = device
        dist.ProcessGroup.bound_device_id.__set__(self, device)  # type: ignore[attr-defined]

    def get_group_store(self) -> Any:
        return self.real.get_group_store()

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        made = self.real.split_group(*args, **kwargs)
        return None if made is None else type(self).around(made)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).around(self.real.merge_remote_group(*args, **kwargs))

    # --- noted ---------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        """Let all calls until `_end_coalescing` share one work."""
        self.real._start_coalescing(device)
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Any:
        begun, self._coalesced = self._coalesced or [], None
        return self._answer(self.real._end_coalescing(device), begun)

    def _record(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the real group, and note the call."""
        notes, listener = self.notes, self._listener or self._listen()
        heard = listener.hear(method, args, kwargs) if listener is not None else []
        begun = [(notes.begin(self._id, one), one) for one in heard]
        try:
            work = getattr(self.real, method)(*args, **kwargs)
        except BaseException:
            notes.drop(begun)
            raise
        if self._coalesced is not None:
            self._coalesced += begun
            return work
        return self._answer(work, begun)

    def _answer(self, work: Any, begun: list[tuple[int, Heard]]) -> Any:
        """What the program receives for what it has started."""
        if begun and work is None:  # it has already been waited for
            self.notes.end(begun)
        return work if work is None or not begun else Watched(self.notes, begun, work, self._source)

    def _source(self, position: int) -> int:
        """The rank at this position of the group."""
        return ANY if self._listener is None else self._listener.place.group[position]

    def _listen(self) -> Listener | None:
        """A listener, once torch has entered the group in its tables; None if the group is too small."""
        ranks = group_tables().get(self)
        if not ranks or len(ranks) < FEWEST:
            return None
        members = sorted(ranks, key=ranks.__getitem__)
        self._listener = Listener(members[self.real.rank()], members, self.group_name)
        self.notes.meet(self._id, self.group_desc, members)
        return self._listener


def _give(kind: type, names: Iterable[str], call: Callable[..., Any]) -> None:
    """Give a class these methods, each of which is `call(self, name, args, kwargs)`."""
    for name in names:

        def method(self: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            return call(self, name, args, kwargs)

        method.__name__ = name
        setattr(kind, name, method)


def _said_to_both(group: RecordedGroup, name: str, args: Any, kwargs: Any) -> None:
    getattr(group.real, name)(*args)
    getattr(dist.ProcessGroup, name)(group, *args)


_give(RecordedGroup, ("_register_backend", "_set_default_backend", "_set_group_desc"), _said_to_both)
_ASKED = {name for name in {**vars(Asked), **vars(Listener)} if hasattr(dist.ProcessGroup, name)}
_give(RecordedGroup, [name for name in _ASKED if not name.startswith("__")], RecordedGroup._record)


# --- what the program waits for ---------------------------------------------------------------------------------------


class Watched(c10d_C.Work):
    """The work that the program waits for. The real work does everything, and also raises the errors."""

    def __init__(self, notes: Notes, begun: list[tuple[int, Heard]], work: Any, rank_at: Callable[[int], int]):
        super().__init__()
        self._notes, self._begun, self._work, self._rank_at = notes, begun, work, rank_at
        first = begun[0][1]
        self._gpu = first.gpu
        self._tells_its_end = False
        if first.is_async and (first.gpu is not None or first.peer is None):
            with suppress(RuntimeError, NotImplementedError):  # not every backend has futures
                work.get_future().add_done_callback(self._done)
                self._tells_its_end = True

    def _done(self, future: Any) -> None:
        """Called when the work is done, in the thread that has done it."""
        with suppress(Exception):
            future.value()  # raises if it failed
            self._notes.end(self._begun)

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        start = self._notes.now(self._gpu)
        result = self._work.wait(*args, **kwargs)
        self._note_source()
        self._notes.waited(self._begun, start)
        return result

    def synchronize(self) -> None:
        start = self._notes.now(self._gpu)
        self._work.synchronize()
        self._notes.waited(self._begun, start)

    def is_completed(self) -> bool:
        is_completed = self._work.is_completed()
        if is_completed and not self._tells_its_end:
            self._note_source()
            self._notes.end(self._begun)
        return is_completed

    def get_future(self) -> Any:
        """The real future. DistributedDataParallel waits for it in C++, at the end of the backward pass."""
        future = self._work.get_future()
        if graph_task() != -1 and self._gpu is None:
            self._notes.watch_backward(self._begun, future)
        return future

    def _note_source(self) -> None:
        """Note the sender of a message that was accepted from any rank."""
        if self._begun[0][1].peer == ANY:
            with suppress(RuntimeError):
                self._notes.came_from(self._begun[0][0], self._rank_at(self._work._source_rank()))


_AS_THEY_ARE = ("block_current_stream", "is_success", "exception", "source_rank", "_source_rank", "result",
                "get_future_result", "_get_duration", "_get_op_type", "boxed")  # fmt: skip
_give(Watched, _AS_THEY_ARE, lambda work, name, args, kwargs: getattr(work._work, name)())


# --- from start to the end of the process -----------------------------------------------------------------------------


def start(folder: str | Path = FOLDER) -> Recording:
    """From here on, write every collective and message of this process to `folder`, as rank0.jsonl and so on.

    Call it before `init_process_group`, on every rank. The program's results stay the same, to the bit, as do its
    errors. The files are written while the program runs, so after a crash they contain what happened until then.
    `python -m tplab.merge FOLDER` makes one trace of them; with several machines, copy the files into one folder first.
    On simulated ranks it does nothing, because they are always recorded. Raises RuntimeError if process groups or a
    recording already exist.
    """
    if current_rank_or_none() is not None:
        return Recording(None)
    if issubclass(type(c10d.ProcessGroup), type(RecordedGroup)):
        raise RuntimeError("this process is already being recorded; start once, at the top of the script")
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is already initialised, and a recording has to begin before that: call "
            "tplab.torch.record.start above init_process_group, or leave it out and run the script with "
            "torchrun -m tplab.record"
        )
    return Recording(Path(folder))


class Recording:
    """A recording made by `start`. It ends with the process, or with `stop`."""

    def __init__(self, folder: Path | None):
        self._notes = None if folder is None else Notes(folder)
        self._real = c10d.ProcessGroup
        if self._notes is None:
            return
        # torch makes its groups from the class with this name
        c10d.ProcessGroup = type("ProcessGroup", (RecordedGroup,), {"notes": self._notes})  # type: ignore[misc]
        atexit.register(self.stop)

    def stop(self) -> None:
        """Write what is left. Existing groups keep working, but nothing more is noted."""
        if self._notes is not None:
            atexit.unregister(self.stop)
            c10d.ProcessGroup = self._real  # type: ignore[misc]
            self._notes.close()
