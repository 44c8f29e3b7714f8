"""Parcels: any Python objects, packed for another process. Their tensors travel as memory, not as text."""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
import torch
from torch.storage import TypedStorage, UntypedStorage

from tplab.spare import scratch_file
from tplab.torch.private import storage_id
from tplab.torch.processes.launcher import receive_fds, send_fds
from tplab.torch.ranks.watcher import Watched

INLINE_UP_TO = 1 << 16  # bytes of tensors; more go through shared memory
_ALIGNMENT = 64  # bytes, as in torch's own allocations: the results of kernels may depend on it


class Parcel:
    """Objects, packed once and sent to as many processes as need it.

    Functions and classes that cannot be imported elsewhere (from a notebook or a closure) are sent as code. All tensors
    are in one piece of shared memory. In a process that opens the parcel, they are its own: memory is copied when a
    process writes to it.

    contents   opened one after another, so that the first can prepare what the second needs
    shared     False: the body also contains the tensors, as for another machine
    """

    def __init__(self, *contents: Any, shared: bool = True):
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        for content in contents:
            pickler.dump(content)
        places, size = [], 0
        for storage in pickler.storages:
            places.append((size, storage.nbytes()))
            size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self.fd: int | None = None
        if shared and size > INLINE_UP_TO:
            self.fd = scratch_file()
            os.ftruncate(self.fd, size)
            memory: Any = mmap.mmap(self.fd, size)
        else:
            memory = bytearray(size)
        for storage, (start, num_bytes) in zip(pickler.storages, places):
            if num_bytes:
                target = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)
                target.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        self.body = pickle.dumps((places, b"" if self.fd is not None else bytes(memory))) + stream.getvalue()

    def send(self, to: Connection) -> None:
        to.send(self.fd is not None)
        if self.fd is not None:
            send_fds(to, [self.fd])
        to.send_bytes(self.body)

    def close(self) -> None:
        """Release this side's hold on the memory. Processes that have received it keep theirs."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def send(to: Connection, content: Any) -> None:
    """Pack an object and send it."""
    with closing(Parcel(content)) as parcel:
        parcel.send(to)


class Received:
    """A parcel that has arrived but is not yet open: opening it imports what its contents need."""

    def __init__(self, body: bytes, memory: mmap.mmap | None = None):
        self._body, self._memory = body, memory

    def open(self) -> Any:
        """The content; the first one of several."""
        return next(self.contents())

    def contents(self) -> Iterator[Any]:
        """All contents, one after another."""
        stream = io.BytesIO(self._body)
        places, inline = pickle.load(stream)
        memory: Any = bytearray(inline) if self._memory is None else self._memory
        storages = []
        for start, num_bytes in places:
            if num_bytes:
                view = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start)
                storages.append(view.untyped_storage())
            else:
                storages.append(UntypedStorage(0))
        unpickler = _Unpickler(stream, storages)
        while stream.tell() < len(self._body):
            yield unpickler.load()


def receive(source: Connection) -> Received | None:
    """The next parcel, or None if the other side is gone."""
    try:
        fds = receive_fds(source, 1) if source.recv() else []
        body = source.recv_bytes()
    except (EOFError, OSError):
        return None
    if not fds:
        return Received(body)
    memory = mmap.mmap(fds[0], 0, access=mmap.ACCESS_COPY)
    os.close(fds[0])
    return Received(body, memory)


class _Pickler(cloudpickle.Pickler):
    """A pickler that puts the memory of tensors in a table, each piece once, so that views remain views. It adds the
    file to each code object."""

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[UntypedStorage] = []
        self._places: dict[int, int] = {}
        self._met: list[UntypedStorage] = []  # kept alive, so that no other storage gets the same address

    def _place(self, storage: UntypedStorage) -> int:
        key = storage_id(storage)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.storages)
            self._met.append(storage)
            self.storages.append(storage if storage.device.type == "cpu" else storage.cpu())
        return place

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, TypedStorage):
            return self._place(obj._untyped_storage), obj.dtype
        if isinstance(obj, UntypedStorage):
            return self._place(obj), torch.uint8  # as torch.load expects it
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        # Since 3.1.3, cloudpickle replaces the file by "<dynamic-code>", but every error has to name the file.
        rebuild, parts, *_ = self.dispatch_table[CodeType](obj)
        return _in_file, (obj.co_filename, rebuild, *parts)


def _in_file(file: str, rebuild: Callable[..., CodeType], *parts: Any) -> CodeType:
    return rebuild(*parts).replace(co_filename=file)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, storages: list[UntypedStorage]):
        super().__init__(stream)
        self._storages = storages

    def persistent_load(self, pid: Any) -> Any:
        place, dtype = pid
        return TypedStorage(wrap_storage=self._storages[place], dtype=dtype, _internal=True)


# --- what cannot be sent ----------------------------------------------------------------------------------------------


@contextmanager
def explained(fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Turn an error in pickling into a TypeError that names what cannot be sent."""
    try:
        yield
    except Exception as error:
        culprit = next((name for name, value in _parts(fn, args) if not _can_be_sent(value)), "the function")
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"on='processes' sends {name} to other processes, and {culprit} cannot be sent: {error};\n"
            f"make it inside {name}, so that every process has its own, or run on='simulated', where nothing is sent"
        ) from error


def _parts(fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """What is sent with a function, by name: its arguments, and the variables that it uses from outside."""
    for place, arg in enumerate(args):
        yield f"argument {place}", arg
    fn = fn.fn if isinstance(fn, Watched) else fn
    if isinstance(fn, FunctionType):
        around = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or ()):
            with suppress(ValueError):  # a variable that has no value yet
                around[name] = cell.cell_contents
        for name, value in around.items():
            yield f"the variable {name!r}", value


def _can_be_sent(value: Any) -> bool:
    try:
        Parcel(value).close()
    except Exception:
        return False
    return True
