"""The programs of the front page, run when the site is made: a small program in every variant that a reader can choose,
two ranks that wait for each other, a script with DDP, and a script in which the doctor finds a mistake."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat

from tplab.widgets.page import json_in_page
from website.cards import data_of
from website.making import making
from website.states import Output

DOCS = Path(__file__).parent.parent / "docs"
RING = (DOCS / "ring.py").read_text(encoding="utf8")
PROGRAM = re.findall(r"^def .*?^    return .*?$", RING, re.MULTILINE | re.DOTALL)[0].splitlines()
"""The program of docs/ring.py, line by line."""
RANKS = (2, 4, 8)
SHIFTS = (1, -1)
SEND = next(number for number, line in enumerate(PROGRAM, 1) if "ring_shift" in line)
ADD = SEND + 1
LEFT_OUT = (0, SEND, ADD)  # 0: no line

HANG = """\
import torch
import torch.distributed as dist

dist.init_process_group()
x = torch.ones(1_000_000)
if dist.get_rank() == 0:
    dist.send(x, dst=1)
    dist.recv(x, src=1)
else:
    dist.send(x, dst=0)
    dist.recv(x, src=0)"""

SUM = """\
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 16).chunk(ranks)[rank]
model(x).square().mean().backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
optimizer.step()"""

_BEGIN = f"""\
import json
import re
import tempfile
from pathlib import Path

import numpy as np
from IPython.display import Pretty, display

import tplab.torch as tt
from tplab import Mesh, P
from tplab.errors import DeadlockError
from tplab.widgets import animate, timeline

NUMBERS = np.array({re.findall(r"np.array[(](.*?)[)]", RING)[0]})
FOLDER = Path(tempfile.mkdtemp())

def ring(source, ranks):
    names = {{"axis_size": tt.axis_size, "ring_shift": tt.ring_shift}}
    exec(compile(source, "ring.py", "exec"), names)
    out = tt.run(names["add_up_around_a_ring"], Mesh(tp=ranks), NUMBERS[:ranks], in_specs=P("tp"), out_specs=P("tp"))
    display(Pretty(json.dumps(out.value.tolist())))
    return animate(out.trace)

def script(name, source):
    (FOLDER / name).write_text(source)
    return FOLDER / name"""


@dataclass(frozen=True)
class Ring:
    """A variant of the program: on this many ranks, in this direction, without this line."""

    ranks: int
    shift: int
    without: int

    @property
    def cell(self) -> str:
        return f"ring-{self.ranks}-{self.shift}-{self.without}".replace("--", "-back")

    @property
    def lines(self) -> list[str]:
        """The program as the reader sees it."""
        to = "" if self.shift == 1 else f", {self.shift}"
        return [line.replace('"tp")', f'"tp"{to})') if "ring_shift" in line else line for line in PROGRAM]

    @property
    def source(self) -> str:
        """The program as it runs. A line that is left out is empty, so that the others keep their numbers."""
        return "\n".join("" if at == self.without else line for at, line in enumerate(self.lines, 1))


FIRST, LARGEST = Ring(4, 1, 0), Ring(8, 1, 0)
"""The first variant on the front page, and the one in the README's picture."""


def rings() -> list[Ring]:
    return [Ring(*choice) for choice in itertools.product(RANKS, SHIFTS, LEFT_OUT)]


def book() -> nbformat.NotebookNode:
    """The notebook that runs all programs."""
    train = (DOCS / "train.py").read_text(encoding="utf8")
    hang = f"""\
try:
    tt.launch(script("hang.py", {HANG!r}), ranks=2)
except DeadlockError as error:
    display(Pretty(str(error)))"""
    ddp = f'timeline(tt.launch(script("train.py", {train!r}), ranks=8, cluster="h100").trace)'
    doctor = f'Pretty(str(tt.same_model(script("train.py", {SUM!r}), ranks=4).first))'
    sources = {"begin": _BEGIN, **{ring.cell: f"ring({ring.source!r}, {ring.ranks})" for ring in rings()}}
    sources |= {"hang": hang, "ddp": ddp, "doctor": doctor}
    cells = [nbformat.v4.new_code_cell(source, id=cell) for cell, source in sources.items()]
    return nbformat.v4.new_notebook(cells=cells)


class Opening:
    """The outputs of the notebook's cells."""

    def __init__(self, shown: Mapping[str, Sequence[Output]]):
        self._shown = shown

    @property
    def picture(self) -> tuple[Output, str]:
        """The animated picture of the unchanged program."""
        return self._picture(FIRST)

    @property
    def largest(self) -> tuple[Output, str]:
        """The same on eight ranks."""
        return self._picture(LARGEST)

    @property
    def ddp(self) -> tuple[Output, str]:
        return self._shown["ddp"][-1], _making("ddp")

    @property
    def deadlock(self) -> str:
        return self._text("hang")

    @property
    def finding(self) -> str:
        return self._text("doctor")

    def choices(self) -> str:
        """The runs as JSON, by cell: the lines, the one that is left out, the results in words, and the widget."""
        return json_in_page(dict(self._choices()))

    def _choices(self) -> Iterator[tuple[str, object]]:
        for ring in rings():
            widget = data_of(*self._picture(ring))
            yield ring.cell, {"lines": ring.lines, "without": ring.without, "says": self.says(ring), "widget": widget}

    def says(self, ring: Ring) -> str:
        """The ranks' results in words, read from the output of the run."""
        values = [f"{value:g}" for value in json.loads(self._shown[ring.cell][0].data["text/plain"])]
        if len({*values}) == 1:
            return f"Every rank returns {values[0]}."
        return f"The ranks return {', '.join(values[:-1])} and {values[-1]}."

    def _picture(self, ring: Ring) -> tuple[Output, str]:
        return self._shown[ring.cell][-1], _making(ring.cell)

    def _text(self, cell: str) -> str:
        return self._shown[cell][-1].data["text/plain"]


def _making(cell: str) -> str:
    """The cell that makes the output of a cell, which only needs names of the first cell."""
    sources = {one.id: one.source for one in book().cells}
    return making([sources["begin"], sources[cell]])


def marked(source: str, lines: set[int]) -> str:
    """A program as HTML, one element per line, with these lines marked."""
    rows = (
        f"<li{' class=marked' * (number in lines)}><code>{html.escape(line) or '&#8203;'}</code></li>"
        for number, line in enumerate(source.splitlines(), 1)
    )
    return f'<ol class="program">{"".join(rows)}</ol>'


def lines_named(text: str, file: str) -> set[int]:
    """The lines of a file that a message names."""
    return {int(number) for number in re.findall(rf"{re.escape(file)}:(\d+)", text)}
