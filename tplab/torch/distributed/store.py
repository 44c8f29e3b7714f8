"""The stores of torch.distributed, through which ranks exchange values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tplab.torch.ranks.simulated import SimulatedRank


class Made(NamedTuple):
    """A group as its first rank made it: that rank, the group's ranks, and the line. `came`: the ranks that made it."""

    rank: int
    ranks: list[int]
    where: str
    came: set[int]


class Shared:
    """What all ranks of a run share in one store, and in the stores that the program makes, by address.

    groups   the groups that ranks have made, by the number of calls of init_process_group before, and by name
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[int, str], Made] = {}
        self.store = dist.HashStore()
        self.arrived: set[Any] = set()  # at a barrier
        self.others: defaultdict[Any, Shared] = defaultdict(Shared)


class Store(dist.Store):
    """One rank's access to the values that all ranks of a run share. While a rank waits for a key, others continue."""

    def __init__(self, shared: Shared, member: SimulatedRank):
        super().__init__()
        self._shared, self._member = shared.store, member

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._shared.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        if not (are_there := self._shared.check([*keys])):
            self._member.here().looked_in_vain(repr(keys), "check of the store")
        return are_there

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        while block and not self._shared.queue_len(key):
            what = f"the store, for something in the queue {key!r},"
            self._member.here().wait_until(lambda: self._shared.queue_len(key) > 0, what)
        return self._shared.queue_pop(key, block)

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises DistStoreError, as torch does, if the program gives a timeout and no rank can set the keys."""
        seconds = None if timeout is None or timeout >= _DEFAULT_TIMEOUT else timeout.total_seconds()
        what = f"the store, for {', '.join(map(repr, keys))},"
        are_there = partial(self._shared.check, [*keys])
        if not self._member.here().wait_until(are_there, what, seconds, gives_up=seconds is not None):
            raise dist.DistStoreError(f"wait timeout after {1000 * (seconds or 0):.0f}ms, keys: {', '.join(keys)}")

    def set_timeout(self, timeout: timedelta) -> None:
        """A deadlock is detected at once, so there is no timeout."""

    def clone(self) -> Store:
        return self


def _passed_on(name: str, wakes: bool) -> Callable[..., Any]:
    def method(self: Store, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self._shared, name)(*args, **kwargs)
        if wakes:  # a rank may wait for this
            self._member.here().look()
        return found

    return method


for _name in ("set", "add", "append", "compare_set", "multi_set", "queue_push"):
    setattr(Store, _name, _passed_on(_name, wakes=True))
for _name in ("delete_key", "num_keys", "list_keys", "queue_len"):
    setattr(Store, _name, _passed_on(_name, wakes=False))
for _name, _its in (("deleteKey", "delete_key"), ("getNumKeys", "num_keys")):
    setattr(Store, _name, getattr(Store, _its))  # a PrefixStore calls them by their C++ names


class PrefixStore(dist.PrefixStore):
    """A part of a store, with the operations that torch's own version only has for C++ stores."""

    def __init__(self, prefix: str, store: Any):
        super().__init__(prefix, store)
        self._prefix, self._store = f"{prefix}/", store

    def list_keys(self) -> list[str]:
        return [key.removeprefix(self._prefix) for key in self._store.list_keys() if key.startswith(self._prefix)]

    def queue_push(self, key: str, value: Any) -> None:
        self._store.queue_push(self._prefix + key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._prefix + key, block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._prefix + key)


class TCPStore(Store):
    """A store that the program makes: one for all ranks that give the same address. There are no connections."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *_: Any, **__: Any
    ):
        member, others = _of_this_rank()
        self.host, self.port = host_name, port or _FIRST_PORT + len(others)
        super().__init__(others[self.host, self.port], member)


class FileStore(Store):
    """The same, by file name; no file is written."""

    def __init__(self, file_name: str, world_size: int = -1):
        member, others = _of_this_rank()
        self.path = file_name
        super().__init__(others[file_name], member)


_FIRST_PORT = 30000
_DEFAULT_TIMEOUT = timedelta(minutes=5)
"""The timeout of torch's stores, which their C++ code passes on."""


def _of_this_rank() -> tuple[SimulatedRank, defaultdict[Any, Shared]]:
    groups: Any = c10d._world
    return groups.member, groups.shared.others
