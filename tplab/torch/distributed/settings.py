"""Process-wide settings that some programs change on each rank: loggers, `print`, the working directory."""

from __future__ import annotations

import builtins
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from tplab.torch.distributed.blocking import taking_turns
from tplab.torch.distributed.replaced import Replaced

_OF_LOGGER = ("level", "handlers", "filters", "propagate", "disabled")
_CHANGES = ("setLevel", "addHandler", "removeHandler", "addFilter", "removeFilter")
_chdir = os.chdir


class Settings:
    """Loggers, `print` and the working directory of all processes of a run; a process is any hashable key.

    `logger.setLevel(logging.INFO if rank == 0 else logging.ERROR)` and the like are meant for one rank only. Libraries
    and all ranks share loggers, so from a logger's first change on, its state is swapped with every turn.
    """

    def __init__(self) -> None:
        self._prints: dict[Any, Any] = {}
        self._folders: dict[Any, str] | None = None  # None until a rank changes its own
        self._loggers: dict[logging.Logger, dict[Any, dict[str, Any]]] = {}
        self._begins: dict[logging.Logger, dict[str, Any]] = {}  # each logger's state before its first change
        self._disabled: dict[Any, int] = {}
        self._kernel: Any = None
        changes = [(logging.Logger, name, self._changing(getattr(logging.Logger, name))) for name in _CHANGES]
        own = (os, "chdir", self._changes_folder), (logging.Logger, "isEnabledFor", _is_enabled)
        self._replaced = Replaced([*own, *changes])

    def enter(self, kernel: Any) -> None:
        """Switch from the notebook, `kernel`, to the ranks."""
        self._kernel = kernel
        self._replaced.put()

    def leave(self) -> None:
        """Switch from the ranks to the notebook. May be called again if Ctrl-C has interrupted it."""
        self._replaced.take_back()
        logging.root.manager._clear_cache()  # type: ignore[attr-defined]

    def take(self, process: Any) -> None:
        """Note the state of this process at the end of its turn."""
        self._prints[process] = builtins.print
        if self._folders is not None:
            with suppress(OSError):  # the process may have removed the folder
                self._folders[process] = os.getcwd()
        for logger, states in self._loggers.items():
            states[process] = _of(logger)
        self._disabled[process] = logging.root.manager.disable

    def put(self, process: Any) -> None:
        """Give `process` the turn; at first it has the notebook's state."""
        kernel = self._kernel
        builtins.print = self._prints.get(process) or self._prints.get(kernel) or builtins.print
        if self._folders is not None:
            with suppress(OSError):
                _chdir(self._folders.get(process) or self._folders[kernel])
        for logger, states in self._loggers.items():
            vars(logger).update(states.get(process) or _copied(self._begins[logger]))
        logging.root.manager.disable = self._disabled.get(process, self._disabled.get(kernel, 0))

    def _changes_folder(self, path: Any) -> None:
        if self._folders is None and taking_turns() is not None:
            self._folders = {self._kernel: os.getcwd()}
        _chdir(path)

    def _changing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def changed(logger: logging.Logger, *args: Any, **kwargs: Any) -> Any:
            if logger not in self._loggers and taking_turns() is not None:
                self._begins[logger], self._loggers[logger] = _copied(_of(logger)), {}
                vars(logger).update(_copied(_of(logger)))
            return method(logger, *args, **kwargs)

        return changed


def _of(logger: logging.Logger) -> dict[str, Any]:
    return {name: getattr(logger, name) for name in _OF_LOGGER}


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: [*value] if isinstance(value, list) else value for name, value in state.items()}


def _is_enabled(logger: logging.Logger, level: int) -> bool:
    """`Logger.isEnabledFor` without Python's cache, which may hold another rank's answer."""
    return not logger.disabled and logger.manager.disable < level and level >= logger.getEffectiveLevel()
