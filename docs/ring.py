"""The program of the README's moving picture and of the site's front page. docs/pictures.py draws it."""

import numpy as np

from tplab import Mesh, P
from tplab.torch import axis_size, ring_shift, run

NUMBERS = np.array([13, 41, 22, 35, 17, 53, 29, 40], "float32")
"""One for each rank: no number of a rank, and no number of bytes."""


def add_up_around_a_ring(x):
    total = x
    for _ in range(axis_size("tp") - 1):
        total = ring_shift(total, "tp")
        total = total + x
    return total


trace = run(add_up_around_a_ring, Mesh(tp=8), NUMBERS, in_specs=P("tp")).trace
