"""ZeRO in numbers: the bytes that each rank keeps from step to step, and the elements that it sends in a step.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5 and 7
(arXiv:1910.02054). M parameters on R ranks, in bytes per parameter and elements sent per rank, times (R-1)/R:

    stage   divided over the ranks           bytes kept       sent                                        total
    0       nothing: data parallelism        16               all_reduce of gradients                     2 M
    1       states of the optimizer          4 + 12/R         reduce_scatter of gradients,                2 M
                                                              all_gather of parameters
    2       ... and gradients                2 + 14/R         the same, while the backward pass runs      2 M
    3       ... and parameters               16/R             all_gather forward and again backward,      3 M
                                                              reduce_scatter of gradients

The 16 bytes are for mixed precision with Adam: a parameter and its gradient in bfloat16 (2 + 2), and the optimizer's
copy of the parameter, the momentum and the variance in float32 (4 + 4 + 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tplab.sharding import cut

STAGES = (0, 1, 2, 3)


class StateBytes(NamedTuple):
    """Bytes kept from step to step, by kind."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


MIXED_ADAM = StateBytes(2, 2, 12)
"""Bytes per parameter: bfloat16 parameters and gradients; float32 master copy, momentum and variance."""


def bytes_per_parameter(stage: int, num_ranks: int, each: StateBytes = MIXED_ADAM) -> StateBytes:
    """The bytes that each of `num_ranks` ranks keeps per parameter of the whole model, by kind.

    each   the bytes of one parameter on one device
    Raises ValueError for an unknown stage.
    """
    _check_stage(stage)
    divided = [num_ranks if stage >= first else 1 for first in (3, 2, 1)]
    return StateBytes(*(size / parts for size, parts in zip(each, divided)))


def state_bytes(
    stage: int, sizes: Iterable[int], num_ranks: int, index: int, each: StateBytes = MIXED_ADAM
) -> StateBytes:
    """The exact bytes for parameters of these sizes, on the rank at position `index`.

    If R does not divide a size, the first ranks hold ceil(size / R) elements, and the last ones hold less.
    """
    _check_stage(stage)
    sizes = list(sizes)
    whole = sum(sizes)
    held = sum(len(cut(size, num_ranks, "ceil")[index]) for size in sizes)
    return StateBytes(*(size * (held if stage >= first else whole) for size, first in zip(each, (3, 2, 1))))


def _check_stage(stage: int) -> None:
    if stage not in STAGES:
        raise ValueError(f"there is no ZeRO stage {stage!r}; stages are 0 (nothing is divided), 1, 2 and 3")
