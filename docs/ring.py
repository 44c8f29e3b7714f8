"""The program of the README's moving picture and of the site's front page. docs/pictures.py draws it."""

import torch

from tplab.torch import axis_index, axis_size, ring_shift

NUMBERS = [13.0, 41.0, 22.0, 35.0, 17.0, 53.0, 29.0, 40.0]
"""One for each rank: no number of a rank, and no number of bytes."""


def add_up_around_a_ring():
    x = torch.tensor(NUMBERS[axis_index("tp")])
    total = x
    for _ in range(axis_size("tp") - 1):
        total = ring_shift(total, "tp") + x
    return total
