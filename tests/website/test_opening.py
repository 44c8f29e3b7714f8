"""The programs of the front page: what a reader can change of the first one is what was run."""

from __future__ import annotations

import json
import re

import pytest
import torch

import tplab.torch as tt
from tests.website.test_pages import opened
from tplab import Mesh, P
from website import front, opening
from website.opening import ADD, FIRST, LARGEST, SEND, Opening, Ring, rings
from website.states import Output

NUMBERS = [13, 41, 22, 35, 17, 53, 29, 40]


def returned(ring: Ring) -> list[float]:
    """What the ranks return when they run the program as it is shown."""
    names = {"axis_size": tt.axis_size, "ring_shift": tt.ring_shift}
    exec(compile(ring.source, "ring.py", "exec"), names)
    numbers = torch.tensor(NUMBERS[: ring.ranks], dtype=torch.float32)
    program = names["add_up_around_a_ring"]
    return tt.run(program, Mesh(tp=ring.ranks), numbers, in_specs=P("tp"), out_specs=P("tp")).value.tolist()


@pytest.mark.parametrize("ring", rings(), ids=lambda ring: ring.cell)
def test_each_change_of_the_program_does_what_its_label_says(ring: Ring):
    numbers = NUMBERS[: ring.ranks]
    wanted = {
        0: [sum(numbers)] * ring.ranks,
        SEND: [number * ring.ranks for number in numbers],  # nothing is sent, and each adds up its own
        ADD: [numbers[(rank + ring.shift) % ring.ranks] for rank in range(ring.ranks)],  # R - 1 places are one back
    }
    assert returned(ring) == wanted[ring.without]


def test_the_program_has_six_lines_and_each_choice_is_a_run():
    assert len(FIRST.lines) == 6 and FIRST.lines == LARGEST.lines
    values = {name: [value for value, _ in values] for name, _, values in front.CHOICES}
    cells = {f"ring-{r}-{s}-{w}".replace("--", "-back") for r in values["ranks"] for s in values["shift"]
             for w in values["without"]}  # fmt: skip
    assert cells == {ring.cell for ring in rings()} == json.loads(opened().choices()).keys()
    assert len({ring.source for ring in rings()}) == 5  # where nothing is sent, no direction either


def test_what_ranks_return_is_said_as_it_was():
    def says(values: str) -> str:
        return Opening({FIRST.cell: [Output({"text/plain": values}, {}, None)]}).says(FIRST)

    assert says("[5.0, 5.0]") == "Every rank returns 5."
    assert says("[5.0, 6.0, 5.5]") == "The ranks return 5, 6 and 5.5."


def test_lines_are_marked_where_the_message_names_them():
    text = opening.marked("a\n\nb < c", opening.lines_named("rank 0 at x.py:3, rank 1 at y.py:1", "x.py"))
    assert re.findall(r"<li(.*?)><code>(.*?)</code>", text) == [
        ("", "a"),
        ("", "&#8203;"),
        (" class=marked", "b &lt; c"),
    ]
