"""Sources: has one of the user's modules been edited since processes that may have imported it were started?"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import tplab


class Sources:
    """The files of the user's own modules, and when they were written.

    A warm process has already imported what it needed. When the user then edits a module and reloads it here, the
    process would still use the old one.
    """

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        installed = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._installed = (*installed, sys.prefix, sys.base_prefix, str(Path(tplab.__file__).parent))
        self._written: dict[str, float] = {}
        self.have_changed()

    def have_changed(self) -> bool:
        """Whether a file is newer than at the last call; files first seen now are noted."""
        changed = False
        for module in list(sys.modules.values()):
            file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
            if not isinstance(file, str) or module.__name__ == "__main__" or file.startswith(self._installed):
                continue
            try:
                written = os.stat(file).st_mtime
            except OSError:
                continue
            changed |= self._written.setdefault(file, written) != written
            self._written[file] = written
        return changed
