"""Random numbers: torch has one default generator per device in a process, and ranks take turns with it too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Generator(NamedTuple):
    """The default generator of one device."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], object]
    fresh: Callable[[int], Tensor]

    def state(self, seed: int, rank: int) -> Tensor:
        """The state a rank starts with: it depends only on (seed, rank), and differs for every other rank or seed."""
        return self.fresh(int(np.random.SeedSequence(seed, spawn_key=(rank,)).generate_state(1, np.uint64)[0]))


def generators(device: torch.device | None) -> list[Generator]:
    """The default generators that a program on `device` draws from: the CPU's, and the GPU's where there is one."""
    cpu = torch.default_generator
    found = [Generator(cpu.get_state, cpu.set_state, lambda seed: torch.Generator().manual_seed(seed).get_state())]
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        gpu = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]

        def put(state: Tensor) -> None:
            with suppress(RuntimeError):  # an assert in a kernel has broken the GPU: whoever uses it hears of that
                gpu.set_state(state)

        found.append(Generator(gpu.get_state, put, lambda seed: torch.Generator(device).manual_seed(seed).get_state()))
    return found
