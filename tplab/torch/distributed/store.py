"""The store of torch.distributed, in which ranks leave values for one another."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tplab.torch.ranks.simulated import SimulatedRank


class Store(dist.Store):
    """One rank's way to the values that all ranks of a run share. A rank that waits for a key lets the others go on."""

    def __init__(self, values: dict[str, bytes], member: SimulatedRank):
        super().__init__()
        self._values, self._member = values, member

    def set(self, key: str, value: Any) -> None:
        self._values[key] = _as_bytes(value)
        self._member.here().look()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def append(self, key: str, value: Any) -> None:
        self.set(key, self._values.get(key, b"") + _as_bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        found = self._values.get(key)
        if found == _as_bytes(expected) or (found is None and not _as_bytes(expected)):
            self.set(key, desired)
            return _as_bytes(desired)
        return found if found is not None else _as_bytes(expected)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    deleteKey, getNumKeys = delete_key, num_keys  # a PrefixStore calls them by their names in C++

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = ", ".join(map(repr, keys))
        self._member.here().wait_until(lambda: self.check(keys), f"the store, for {names},")

    def set_timeout(self, timeout: timedelta) -> None:
        """A deadlock is seen at once, so no time is waited."""

    def clone(self) -> Store:
        return self


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
