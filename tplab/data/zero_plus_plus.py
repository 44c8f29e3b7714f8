"""ZeRO++ in numbers: what each rank of a ZeRO stage-3 step sends across nodes and inside them, and what it keeps.

M parameters of 2 bytes on O nodes of I ranks: each rank holds M / (O I). A step gathers them for the forward pass and
again for the backward pass, and reduce-scatters gradients. With two levels, each node sends, times (O-1)/O:

                                                           forward   backward   gradients      total
    ZeRO stage 3                                                 M          M           M        3 M
    qwZ  weights are sent as codes of 8 bits                   M/2        M/2           M        2 M
    hpZ  each rank keeps a second piece, 1/I of all              M          0           M        2 M
    qgZ  gradients are sent as codes of 4 bits                   M          M         M/4     2.25 M
    all three                                                  M/2          0         M/4     0.75 M

and 4 bytes of scale for each block of codes. The second piece is cut from the parameters that the forward pass gathers.
The ranks of a node together hold all of them, so the backward pass gathers inside the node, over fast links, uncoded.

Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (arXiv:2306.10209),
section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tplab.data.quantization import QuantizedBytes, check_quantization, quantized_bytes
from tplab.mesh import Axis


@dataclass(frozen=True)
class ZeroPlusPlus:
    """Which of ZeRO++'s savings a stage-3 step uses.

    inside          the part of the axis whose ranks share a node
    weight_bits     qwZ: gathered parameters are sent as codes of 8 or 4 bits; None: unquantised
    secondary       hpZ: each rank keeps a second piece, and the backward pass gathers only inside the node
    gradient_bits   qgZ: gradients are sent as codes of 4 or 8 bits; None: unquantised
    block           elements that share a scale
    """

    inside: Axis
    weight_bits: int | None = 8
    secondary: bool = True
    gradient_bits: int | None = 4
    block: int | None = 256

    def __post_init__(self):
        for bits in (self.weight_bits, self.gradient_bits):
            if bits is not None:
                check_quantization(bits, self.block)


SAVINGS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO-3": {"weight_bits": None, "secondary": False, "gradient_bits": None},
    "qwZ: 8-bit weights": {"weight_bits": 8, "secondary": False, "gradient_bits": None},
    "hpZ: second pieces": {"weight_bits": None, "secondary": True, "gradient_bits": None},
    "qgZ: 4-bit gradients": {"weight_bits": None, "secondary": False, "gradient_bits": 4},
    "ZeRO++": {"weight_bits": 8, "secondary": True, "gradient_bits": 4},
}
"""The rows of the table above, as options of ZeroPlusPlus: plain ZeRO stage 3, each saving alone, and all three."""


class LevelBytes(NamedTuple):
    """Bytes that one rank sends to other nodes, and inside its own."""

    across: QuantizedBytes
    inside: QuantizedBytes


class StepBytes(NamedTuple):
    """Bytes that one rank sends in the three passes of a stage-3 step."""

    forward: LevelBytes
    backward: LevelBytes
    gradients: LevelBytes

    @property
    def across(self) -> QuantizedBytes:
        """Bytes that the rank sends to other nodes in the whole step."""
        return QuantizedBytes(sum(one.across.codes for one in self), sum(one.across.scales for one in self))

    @property
    def inside(self) -> QuantizedBytes:
        """Bytes that the rank sends inside its node in the whole step."""
        return QuantizedBytes(sum(one.inside.codes for one in self), sum(one.inside.scales for one in self))


def step_bytes(
    num_elements: int, num_across: int, num_inside: int, options: ZeroPlusPlus, itemsize: int = 2
) -> StepBytes:
    """The exact bytes that each rank sends in a step of one section (a layer whose parameters are sent together).

    num_elements             in a rank's row of the section: M / (O I), and padding
    num_across, num_inside   O nodes of I ranks
    itemsize                 bytes of an unquantised element; these bytes are counted as codes
    """
    weights = _row(num_elements, options.weight_bits, options.block, itemsize)
    gradients = _row(num_elements, options.gradient_bits, options.block, itemsize)
    plain = _row(num_elements, None, None, itemsize)
    num_others = (num_inside - 1) * num_across  # rows that a rank passes on inside its node

    def sent(row: QuantizedBytes) -> LevelBytes:
        return LevelBytes(row.times(num_across - 1), row.times(num_others))

    backward = LevelBytes(QuantizedBytes(0, 0), plain.times(num_others)) if options.secondary else sent(weights)
    return StepBytes(sent(weights), backward, sent(gradients))


def secondary_bytes(num_elements: int, num_across: int, options: ZeroPlusPlus, itemsize: int = 2) -> int:
    """The bytes that hpZ keeps on each rank from the forward to the backward pass: M / I elements, unquantised."""
    return num_across * num_elements * itemsize if options.secondary else 0


def options_over(
    start: Callable[..., Any], gather_rows: Any, all_gather: Any, reduce_scatter: Any
) -> Callable[..., dict[str, Any]]:
    """A framework's `zero_plus_plus`, over its quantised collectives, and `gather_rows`, which sends rows unchanged."""

    def zero_plus_plus(
        inside: Axis,
        *,
        weight_bits: int | None = 8,
        secondary: bool = True,
        gradient_bits: int | None = 4,
        block: int | None = 256,
    ) -> dict[str, Any]:
        """The options of `shard_parameters` for ZeRO++: its `gather`, `reduce` and `reshard_after_forward`.

            shard_parameters(model, ("node", "gpu"), **zero_plus_plus(inside="gpu"))

        inside          the part of the axis whose ranks share a node
        weight_bits     qwZ: gathered parameters are sent as codes of 8 or 4 bits; None: unquantised
        secondary       hpZ: each rank keeps a second piece, and the backward pass gathers inside the node, unquantised
        gradient_bits   qgZ: gradients are sent as codes of 4 or 8 bits; None: unquantised
        block           elements that share a scale

        sent      for M parameters of 2 bytes, 3 M across nodes becomes 0.75 M; `tplab.data.zero_plus_plus.step_bytes`
                  has each pass, and the bytes of the scales
        memory    hpZ: 1 / (ranks of a node) of the parameters, in the dtype in which they are sent
        Wang et al. 2023, arXiv:2306.10209.
        """
        options = ZeroPlusPlus(inside, weight_bits, secondary, gradient_bits, block)

        def gather(row: Any, axis: Axis) -> Any:
            if axis == inside:
                return gather_rows(row, axis)
            return start(all_gather, row, axis, bits=options.weight_bits, block=options.block, inside=inside)

        def reduce(message: Any, axis: Axis, op: str) -> Any:
            how = {"bits": options.gradient_bits, "block": options.block, "inside": inside}
            return start(reduce_scatter, message, axis, 0, op, **how)

        return {"gather": gather, "reduce": reduce, "reshard_after_forward": inside if secondary else True}

    return zero_plus_plus


def _row(num_elements: int, bits: int | None, block: int | None, itemsize: int) -> QuantizedBytes:
    return QuantizedBytes(num_elements * itemsize, 0) if bits is None else quantized_bytes(num_elements, bits, block)
