"""What torch and Python have one of in a process, and every rank needs for itself: it changes hands with the turn."""

from __future__ import annotations

import sys
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from tplab.torch.ranks.generators import generators


class Own(NamedTuple):
    """What a rank keeps of it while it does not have the turn; or the kernel, while ranks have it.

    draws    the states of torch's default generators
    dtype    torch's default dtype
    stdout   where `print` writes to
    """

    draws: list[Tensor]
    dtype: torch.dtype
    stdout: TextIO


class ProcessState:
    """The state of this process that ranks swap; `device` is where their programs run."""

    def __init__(self, device: torch.device | None):
        self._generators = generators(device)
        self._get_draws = [generator.get for generator in self._generators]

    def take(self) -> Own:
        """As it is now."""
        return Own([get() for get in self._get_draws], torch.get_default_dtype(), sys.stdout)

    def put(self, own: Own) -> None:
        for generator, state in zip(self._generators, own.draws):
            generator.set(state)
        if torch.get_default_dtype() is not own.dtype:
            torch.set_default_dtype(own.dtype)
        sys.stdout = own.stdout

    def of_rank(self, seed: int, rank: int, kernels: Own, stdout: TextIO) -> Own:
        """What a rank begins with: random numbers of its own, all else as the kernel has it."""
        return Own([generator.state(seed, rank) for generator in self._generators], kernels.dtype, stdout)
