"""Draws docs/ring.png and ring-dark.png, the README's moving picture, from a real run: python docs/ring.py"""

from pathlib import Path

import torch

from tplab import Mesh
from tplab.torch import axis_index, axis_size, ring_shift, run
from tplab.widgets.paper.dark import darkened
from tplab.widgets.score.score import score
from tplab.widgets.score.still import moving

NUMBERS = [13.0, 41.0, 22.0, 35.0, 17.0, 53.0, 29.0, 40.0]
"""One for each rank: no number of a rank, and no number of bytes."""


def add_up_around_a_ring():
    x = torch.tensor(NUMBERS[axis_index("tp")])
    total = x
    for _ in range(axis_size("tp") - 1):
        total = ring_shift(total, "tp") + x
    return total


if __name__ == "__main__":
    trace = run(add_up_around_a_ring, Mesh(tp=8)).trace
    picture = moving(score(trace), frames=44)
    Path(__file__).with_name("ring.png").write_bytes(picture)
    Path(__file__).with_name("ring-dark.png").write_bytes(darkened(picture))
