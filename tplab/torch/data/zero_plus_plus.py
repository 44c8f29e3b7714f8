"""ZeRO++: a ZeRO stage-3 step that sends a quarter of the bytes across nodes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tplab.data.zero_plus_plus import ZeroPlusPlus
from tplab.mesh import Axis
from tplab.torch.comm.collectives import Handle, start
from tplab.torch.data.pieces import gather_rows
from tplab.torch.data.quantized import quantized_all_gather, quantized_reduce_scatter


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
    weight_bits     qwZ: gathered parameters travel as codes of 8 or 4 bits; None: as they are
    secondary       hpZ: each rank keeps a second piece, and the backward pass gathers inside the node, unrounded
    gradient_bits   qgZ: gradients travel as codes of 4 or 8 bits; None: as they are
    block           elements that share a scale

    sent      for M parameters of 2 bytes, 3 M across nodes becomes 0.75 M; `tplab.data.zero_plus_plus.step_bytes` has
              each pass, and the bytes of the scales
    memory    hpZ: 1 / (ranks of a node) of the parameters, in the dtype in which they travel
    Wang et al. 2023, arXiv:2306.10209.
    """
    options = ZeroPlusPlus(inside, weight_bits, secondary, gradient_bits, block)

    def gather(row: Tensor, axis: Axis) -> Handle:
        if axis == inside:
            return gather_rows(row, axis)
        return start(quantized_all_gather, row, axis, bits=options.weight_bits, block=options.block, inside=inside)

    def reduce(message: Tensor, axis: Axis, op: str) -> Handle:
        how = {"bits": options.gradient_bits, "block": options.block, "inside": inside}
        return start(quantized_reduce_scatter, message, axis, 0, op, **how)

    return {"gather": gather, "reduce": reduce, "reshard_after_forward": inside if secondary else True}
