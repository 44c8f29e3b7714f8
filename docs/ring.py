"""Draws docs/ring.png, the README's moving picture, from a real run: python docs/ring.py"""

from pathlib import Path

import torch

from tplab import Mesh
from tplab.torch import ring_all_reduce, run
from tplab.widgets.score.score import score
from tplab.widgets.score.still import moving


def all_reduce_around_a_ring():
    return ring_all_reduce(torch.ones(8 * 1024), "tp")


if __name__ == "__main__":
    trace = run(all_reduce_around_a_ring, Mesh(tp=8)).trace
    Path(__file__).with_name("ring.png").write_bytes(moving(score(trace), frames=44))
