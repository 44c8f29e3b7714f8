"""Lab 00: whole tensors and pieces, small and large."""

import re
from typing import Any

import torch

import tplab.torch as tt
from tests.labs.entries import Claim
from tests.labs.model import SHEET
from tests.labs.prose import printed
from tplab import Mesh, P


def micros() -> list[float]:
    """The printed µs: of eight numbers as a whole and in pieces, then of a matrix as a whole and in pieces."""
    return [float(found.replace(",", "")) for found in re.findall(r"bytes in +([\d,]+) µs", printed("00_first_look"))]


def in_total(ranks: int) -> int:
    """The number of tensors that all ranks send."""
    return ranks * (ranks - 1)


def whole(x: Any) -> Any:
    total = x
    for _ in range(tt.axis_size("ring") - 1):
        total = tt.ring_shift(total, "ring") + x
    return total


def pieces(x: Any) -> Any:
    return tt.ring_all_reduce(x, "ring")


def additions(program: Any) -> int:
    """The number of additions on one of eight ranks."""
    tensors = torch.empty(64, device="meta")
    trace = tt.run(program, Mesh(ring=8), tensors, in_specs=P("ring"), cluster=SHEET).trace
    return sum(event.op == "add" for event in trace.select(rank=0, kind="compute").events)


CLAIMS = (
    Claim("each addition takes 5 µs to start on the GPU", lambda: [1e6 * SHEET.chip.launch]),
    Claim("each message 1.9 µs before its first byte arrives", lambda: [1e6 * SHEET.inner_link.latency]),
    Claim("Both ways add seven times", lambda: additions(whole) == additions(pieces) == 7),
    Claim(
        "twice as many ranks send more than four times as many bytes",
        lambda: all(in_total(2 * ranks) > 4 * in_total(ranks) for ranks in range(2, 100)),
    ),
    Claim("seven steps are faster than fourteen", lambda: micros()[0] < micros()[1]),
    Claim("in pieces, it takes less than a third of the time", lambda: micros()[3] < micros()[2] / 3),
)
