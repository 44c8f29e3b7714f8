"""Draws docs/train.png and train-dark.png, the README's first picture, from a real run: python docs/pictures.py"""

import base64
from pathlib import Path

from tplab.torch import launch
from tplab.widgets import timeline
from tplab.widgets.paper.dark import darkened

FOLDER = Path(__file__).parent

if __name__ == "__main__":
    trace = launch(FOLDER / "train.py", ranks=8, cluster="h100").trace
    card = timeline(trace)
    picture = base64.b64decode(card._repr_mimebundle_()[0]["image/png"])
    (FOLDER / "train.png").write_bytes(picture)
    (FOLDER / "train-dark.png").write_bytes(darkened(picture))
