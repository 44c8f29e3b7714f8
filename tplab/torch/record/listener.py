"""A listener: the calls of a torch.distributed process group, in the terms of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor

from tplab.torch.distributed.asked import Asked, Put, several
from tplab.torch.ranks.meeting import bytes_sent
from tplab.torch.ranks.rank import Call
from tplab.torch.ranks.values import dtype_name
from tplab.trace.recorded.rank_file import ANY


class Heard(NamedTuple):
    """A collective, or a message.

    peer       the other rank of a message, or ANY; None for a collective
    is_async   whether the program continues while it is in progress
    gpu        the index of the GPU that runs it; None on the CPU
    """

    op: str
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    reduction: str
    peer: int | None
    tag: int
    is_async: bool
    gpu: int | None


class Listener(Asked):
    """Translates one rank's calls of one group. Nothing is sent or written here."""

    def __init__(self, rank: int, ranks: Sequence[int], name: str):
        super().__init__(rank, ranks, name, name)
        self._heard: list[Heard] = []
        self._lock = Lock()

    def hear(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Heard]:
        """What a call of this method of the group asks for; [] for an invalid call, which torch will refuse."""
        with self._lock:
            self._heard = []
            try:
                getattr(self, method)(*args, **kwargs)
            except Exception:
                return []
            return self._heard

    def send(self, tensors: Any, target: int, tag: int = 0) -> None:
        self._message("send", tensors, self.place.group[target], tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> None:
        self._message("receive", tensors, self.place.group[source], tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> None:
        self._message("receive", tensors, ANY, tag)

    def _message(self, op: str, tensors: Any, peer: int, tag: int) -> None:  # type: ignore[override]
        (x,) = several(tensors)
        self._heard.append(Heard(op, x.nbytes, tuple(x.shape), dtype_name(x.dtype), "", peer, tag, True, _gpu(x)))

    def _run(self, call: Call, put: Put, opts: Any, into: Sequence[Tensor], is_taker: bool = True) -> None:
        pieces = [put] if isinstance(put, Tensor) else put
        numel = sum(piece.numel() for piece in pieces)
        shape = tuple(put.shape) if isinstance(put, Tensor) else (numel,)
        numels = call.takes if call.op == "all_gather" and call.takes else (numel,) * len(self.place.group)
        num_bytes = bytes_sent(call, shape, pieces[0].element_size(), numels, self.place.index)
        dtype, is_async = dtype_name(pieces[0].dtype), opts is None or opts.asyncOp
        self._heard.append(Heard(call.op, num_bytes, shape, dtype, call.reduction, None, 0, is_async, _gpu(pieces[0])))

    def _together(self, works: Sequence[Any], opts: Any) -> None:
        """Do nothing: each one has been heard."""


def _gpu(x: Tensor) -> int | None:
    return x.device.index if x.is_cuda else None
