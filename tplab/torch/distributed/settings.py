"""Process-wide settings that some programs change on each rank: loggers and the working directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any

from tplab.torch.distributed.replaced import Replaced, on_ranks

_OF_LOGGER = ("level", "handlers", "filters", "propagate", "disabled")
_CHANGES = ("setLevel", "addHandler", "removeHandler", "addFilter", "removeFilter")
_chdir = os.chdir
Met = tuple[Any, str, Callable[[Any, Any], Any]]
"""A slot whose module has been imported: the object, the attribute, and what makes a rank's first value of it."""


class _Folder:
    """The working directory, as an attribute. The process may have removed the folder."""

    @property
    def path(self) -> str | None:
        with suppress(OSError):
            return os.getcwd()
        return None

    @path.setter
    def path(self, path: str | None) -> None:
        with suppress(OSError):
            if path is not None:
                _chdir(path)


class Settings(Replaced):
    """Loggers and the working directory of all ranks of a run.

    `logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)` and the like are meant for one rank only. Libraries
    and all ranks share loggers, so a logger's first change, or the folder's, adds it to `slots`, which ranks swap.
    """

    def __init__(self, slots: list[Met]) -> None:
        self._slots, self._has = slots, set[Any]()
        changes = [on_ranks(logging.Logger, name)(self._changes) for name in _CHANGES]
        super().__init__(
            [on_ranks(os, "chdir")(self._changes_folder), (logging.Logger, "isEnabledFor", _is_enabled), *changes]
        )

    def take_back(self) -> None:
        super().take_back()
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]

    def _changes_folder(self, rank: Any, own: Any, path: Any) -> None:
        self._swap(_FOLDER, "path")
        own(path)

    def _changes(self, rank: Any, own: Any, logger: logging.Logger, *args: Any, **kwargs: Any) -> Any:
        self._swap(logger, *_OF_LOGGER)
        return own(logger, *args, **kwargs)

    def _swap(self, home: Any, *names: str) -> None:
        """From here on, every rank has its own values of these attributes."""
        if home not in self._has:
            self._has.add(home)
            for name in names:
                found = getattr(home, name)
                self._slots.append((home, name, lambda *_, found=found: copy(found)))
                setattr(home, name, copy(found))


_FOLDER = _Folder()


def _is_enabled(logger: logging.Logger, level: int) -> bool:
    """`Logger.isEnabledFor` without Python's cache, which may hold another rank's answer."""
    return not logger.disabled and logger.manager.disable < level and level >= logger.getEffectiveLevel()
