"""Watched storages: what is known about each one while it exists, and which have been freed."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from tplab.torch.private import storage_id

Known = TypeVar("Known")


class Storages(Generic[Known]):
    """What is known about storages that exist. Finding those that have been freed takes no scan.

    get(storage)            what is known about it; None if nothing is
    add(storage, known)     watch it from now on, or replace what is known
    gone()                  what was known about those that have been freed since the last call, in that order
    rest()                  what is known about those that are left

    A storage can be freed in any thread at any moment, so the callback only puts it in a queue, which `gone` reads.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watch] = {}  # by the identity of the storage, which another one may get later
        self._freed: deque[_Watch] = deque()

    def get(self, storage: torch.UntypedStorage) -> Known | None:
        watch = self._watched.get(storage_id(storage))
        return None if watch is None or watch() is None else watch.known

    def add(self, storage: torch.UntypedStorage, known: Known) -> None:
        watch = _Watch(storage, self._freed.append)
        watch.place, watch.known = storage_id(storage), known
        self._watched[watch.place] = watch

    def gone(self) -> Iterator[Known]:
        while self._freed:
            watch = self._freed.popleft()
            if self._watched.get(watch.place) is watch:
                del self._watched[watch.place]
            yield watch.known

    def rest(self) -> list[Known]:
        return [watch.known for watch in self._watched.values() if watch() is not None]


class _Watch(weakref.ref[Any]):
    """A weak reference to a storage, and what is known about it."""

    __slots__ = ("known", "place")
    place: int
    known: Any
