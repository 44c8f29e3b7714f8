"""Microbatches: cuts a batch into the pairs that a pipeline expects, in any framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tplab.errors import ScheduleError, ShapeError
from tplab.sharding import cut, share


def split_batch(inputs: Any, targets: Any, num_microbatches: int) -> list[tuple[Any, Any]]:
    """A batch as microbatches for `train_batch`: pairs of equal slices along dim 0, of tensors or tuples of tensors.

    Raises ShapeError if the batch cannot be cut into equal slices: the mean of the microbatches' means would not be the
    mean of the batch. Raises TypeError for anything but a tensor or a tuple of tensors.
    """
    sides = [x if isinstance(x, tuple) else (x,) for x in (inputs, targets)]
    for what, side in zip(("inputs", "targets"), sides):
        for x in side:
            if not getattr(x, "shape", ()):
                raise TypeError(
                    f"split_batch cuts tensors along dim 0, and the {what} have {_kind(x)}; give a tensor, or a tuple "
                    "of tensors"
                )
    sizes = {x.shape[0] for side in sides for x in side}
    if len(sizes) != 1:
        raise ShapeError(f"inputs and targets have batches of {', '.join(map(str, sorted(sizes)))}; they must agree")
    (size,) = sizes
    share(size, num_microbatches, "the batch has size", sharers="microbatches")

    def part(given: Any, piece: range) -> Any:
        if isinstance(given, tuple):
            return tuple(x[piece.start : piece.stop] for x in given)
        return given[piece.start : piece.stop]

    return [(part(inputs, piece), part(targets, piece)) for piece in cut(size, num_microbatches, "equal")]


def check_microbatches(microbatches: Sequence[Any], expected: int) -> Sequence[tuple[Any, Any]]:
    """Return the pairs. Raises ScheduleError unless there is one for each microbatch of the schedule."""
    if len(microbatches) != expected:
        raise ScheduleError(
            f"the schedule has {expected} microbatches, but {len(microbatches)} were given; "
            f"split_batch(x, y, {expected}) makes as many of a batch"
        )
    for number, pair in enumerate(microbatches):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ScheduleError(
                f"microbatch {number} is a {type(pair).__name__}; it must be a pair (input, target), as split_batch "
                "gives them"
            )
    return microbatches


def _kind(x: Any) -> str:
    return "a tensor without dims" if hasattr(x, "shape") else f"an object of type {type(x).__name__}"
