"""A recording: from `start` until the process ends, what it sends through torch.distributed is written down."""

from __future__ import annotations

import atexit
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tplab.torch.ranks.rank import current_rank_or_none
from tplab.torch.record.group import RecordedGroup
from tplab.torch.record.notes import Notes
from tplab.trace.recorded.rank_file import FOLDER


def start(folder: str | Path = FOLDER) -> Recording:
    """From here on, write every collective and message of this process to `folder`, as rank0.jsonl and so on.

    Call it before `init_process_group`, on every rank. What the program computes stays the same, to the bit, and so do
    its errors. The files are written while the program runs, so a crash leaves what happened until then.
    `python -m tplab.merge FOLDER` makes one trace of them; with several machines, copy the files into one folder first.
    On simulated ranks it does nothing: they are recorded anyway. Raises RuntimeError if process groups or a recording
    already exist.
    """
    if current_rank_or_none() is not None:
        return Recording(None)
    if issubclass(type(c10d.ProcessGroup), type(RecordedGroup)):
        raise RuntimeError("this process is being recorded already; start once, at the top of the script")
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised already, and a recording has to begin before that: call "
            "tplab.torch.record.start above init_process_group, or leave it out and run the script with "
            "torchrun -m tplab.record"
        )
    return Recording(Path(folder))


class Recording:
    """The recording that `start` began. It ends with the process, or with `stop`."""

    def __init__(self, folder: Path | None):
        self._notes = None if folder is None else Notes(folder)
        self._real = c10d.ProcessGroup
        if self._notes is None:
            return
        # torch makes its groups from the class of this name
        c10d.ProcessGroup = type("ProcessGroup", (RecordedGroup,), {"notes": self._notes})  # type: ignore[misc]
        atexit.register(self.stop)

    def stop(self) -> None:
        """Write what is left. Existing groups go on, but nothing more is noted."""
        if self._notes is not None:
            atexit.unregister(self.stop)
            c10d.ProcessGroup = self._real  # type: ignore[misc]
            self._notes.close()
