"""Draws docs/ring.png and ring-dark.png, the README's moving picture, from a real run: python docs/ring.py"""

from pathlib import Path

import torch

from tplab import Mesh
from tplab.torch import ring_all_reduce, run
from tplab.widgets.paper.dark import darkened
from tplab.widgets.score.score import score
from tplab.widgets.score.still import moving


def all_reduce_around_a_ring():
    x = torch.ones(8 * 1024)
    return ring_all_reduce(x, "tp")


if __name__ == "__main__":
    trace = run(all_reduce_around_a_ring, Mesh(tp=8)).trace
    picture = moving(score(trace), frames=44)
    Path(__file__).with_name("ring.png").write_bytes(picture)
    Path(__file__).with_name("ring-dark.png").write_bytes(darkened(picture))
