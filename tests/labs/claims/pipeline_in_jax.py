"""Lab 12: the cost of ticks in lock-step."""

import re

from tests.labs.entries import Claim, Given
from tests.labs.prose import printed
from tests.labs.schedules import PROFILE, RULES, WHICH
from tplab.schedules import simulate


def longer() -> list[float]:
    """How many times as long 1F1B takes in lock-step: for each printed number of ranks, steps over those of GPipe.

    Without lock-step, 1F1B takes as long as GPipe.
    """
    rows = re.findall(r"(GPipe|1F1B) +\d+ ticks, (\d+) steps", printed("12_pipeline_in_jax"))
    gpipe, one_f_one_b = ([int(steps) for name, steps in rows if name == which] for which in ("GPipe", "1F1B"))
    assert len(gpipe) == len(one_f_one_b) == 3
    return [b / a for a, b in zip(gpipe, one_f_one_b)]


THREE = "1F1B", "GPipe", "ZB-H1"


def in_lockstep(name: str) -> float:
    return simulate(RULES[name], PROFILE, lockstep=True).makespan


CLAIMS = (
    *WHICH,
    Claim(
        "1F1B takes 1,666 ms, GPipe 1,460 ms, and ZB-H1 1,496 ms",
        lambda: [1, *map(in_lockstep, THREE)],
    ),
    Claim("begin with GPipe, the fastest of these three", lambda: min(THREE, key=in_lockstep) == "GPipe"),
    Given("A tick is over when its slowest rank is done"),
    Claim("1F1B takes about a quarter longer", lambda: all(1.2 < times < 1.3 for times in longer())),
    Given("each tick takes as long as its slowest rank"),
)
