"""Draws the README's pictures, for light and for dark paper, from real runs: python docs/pictures.py"""

import runpy
from pathlib import Path

from tplab.torch import launch
from tplab.widgets import timeline
from tplab.widgets.paper.apng import darkened
from tplab.widgets.score.score import score
from tplab.widgets.score.still import moving

FOLDER = Path(__file__).parent


def write(name: str, picture: bytes) -> None:
    (FOLDER / f"{name}.png").write_bytes(picture)
    (FOLDER / f"{name}-dark.png").write_bytes(darkened(picture))


if __name__ == "__main__":
    write("ring", moving(score(runpy.run_path(str(FOLDER / "ring.py"))["trace"]), frames=44))
    write("train", timeline(launch(FOLDER / "train.py", ranks=8, cluster="h100").trace).picture())
