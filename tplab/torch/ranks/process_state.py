"""State that torch and Python have once per process, but every rank needs for itself: it is swapped with every turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

Own = tuple[list[Tensor], torch.dtype, TextIO, Any]
"""What a rank keeps while it does not have the turn, and the kernel while ranks have it: the states of torch's default
generators, torch's default dtype, sys.stdout, and the further state of a distributed program. A plain tuple, because
each turn makes one."""


def generators(device: torch.device | None) -> list[torch.Generator]:
    """The default generators that a program on `device` draws from: the CPU's, and the GPU's where there is one."""
    if device is None or device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def first_state(generator: torch.Generator, seed: int, rank: int) -> Tensor:
    """The state that a rank starts with: it depends only on (seed, rank), and differs for every other pair."""
    number = int(np.random.SeedSequence(seed, spawn_key=(rank,)).generate_state(1, np.uint64)[0])
    return torch.Generator(generator.device).manual_seed(number).get_state()


def put_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        with suppress(RuntimeError):  # an assert in a kernel has broken the GPU: the next use raises that
            generator.set_state(state)


RUN_ID = "tplab, simulated"
"""TORCHELASTIC_RUN_ID in the environment of simulated ranks, which other threads see while a rank has its turn."""


More = Any
"""The further state of each rank in a distributed program, which it would find in a process of its own:
`distributed.process.Processes`."""


class ProcessState:
    """The process state that ranks swap; `device` is where their programs run."""

    def __init__(self, device: torch.device | None, more: More | None = None):
        self._more = more
        self._generators = generators(device)
        self._is_one = len(self._generators) == 1  # as on a machine without a GPU; tested at every turn
        self._get, self._set = torch.default_generator.get_state, torch.default_generator.set_state

    def take(self) -> Own:
        """The current state."""
        more = None if self._more is None else self._more.take()
        draws = [self._get()] if self._is_one else [generator.get_state() for generator in self._generators]
        return draws, torch.get_default_dtype(), sys.stdout, more

    def put(self, own: Own) -> None:
        draws, dtype, sys.stdout, more = own
        if self._more is not None:
            self._more.put(more)
        if self._is_one:
            self._set(draws[0])
        else:
            put_states(self._generators, draws)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)

    def of_rank(self, seed: int, rank: int, kernels: Own, stdout: TextIO) -> Own:
        """What a rank begins with: its own random numbers, and everything else as in the kernel."""
        more = None if self._more is None else self._more.ranks[rank]
        return [first_state(generator, seed, rank) for generator in self._generators], kernels[1], stdout, more
