"""Which kernels attention may use, for each rank; and attention of GPUs, on the CPU.

torch keeps what `sdpa_kernel` chooses once per process, for C++. So a rank that chooses takes its choice along at every
turn from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import attention
from torch.nn.attention import SDPBackend

from tplab.torch.private import attention_kernels, put_attention_kernels

_ON_CPU = {SDPBackend.FLASH_ATTENTION, SDPBackend.MATH}
_choose: Any = attention._sdpa_kernel


class Kernels:
    """What each rank has chosen, while ranks run. Nothing is read or set until the first of them chooses.

    note   to be called where GPUs are mapped to the CPU, and a rank asks for kernels that only GPUs have: it gets the
           CPU's flash attention
    """

    def __init__(self) -> None:
        self.note: Callable[[], None] | None = None
        self._notebooks: tuple[bool, ...] = ()
        self._chosen: dict[Any, tuple[bool, ...]] = {}
        self._process: Any = None

    def enter(self) -> None:
        """From the notebook to the ranks."""
        self._notebooks = attention_kernels()
        attention._sdpa_kernel = self._choose

    def leave(self) -> None:
        """From the ranks to the notebook. It may be called again if Ctrl-C has ended it."""
        attention._sdpa_kernel = _choose
        put_attention_kernels(self._notebooks)

    def turn(self, process: Any) -> None:
        """From now on `process` has the turn."""
        self._process = process
        if self._chosen:
            put_attention_kernels(self._chosen.get(process, self._notebooks))

    def _choose(self, backends: Iterable[SDPBackend], set_priority: bool = False) -> None:
        backends = [*backends]
        if self.note is not None and backends and not _ON_CPU & {*backends}:
            self.note()
            backends.append(SDPBackend.FLASH_ATTENTION)
        _choose(backends, set_priority)
        self._chosen[self._process] = attention_kernels()


def flex_attention_on_cpu(module: Any) -> list[tuple[Any, str, Any]]:
    """torch's flex_attention, whose module this is, refuses gradients on the CPU, where a compiled one has none. Here
    nothing is compiled, and what runs instead has them. Nor does it warn programs that have asked for compiling."""
    warn_once = getattr(module, "_warn_once", None)

    def warn(warning_id: str, *args: Any, **about: Any) -> None:
        if warn_once is not None and warning_id != "flex_attention_performance":
            warn_once(warning_id, *args, **about)

    changes = [("_validate_device", lambda query, key, value: None), ("_warn_once", warn)]
    return [(module, name, value) for name, value in changes if hasattr(module, name)]
