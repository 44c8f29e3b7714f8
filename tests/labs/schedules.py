"""The paragraph "Which schedule?", which labs 10, 12 and 13 share: its text, and the source of each figure."""

from functools import cache

import torch

import tplab.torch as tt
from tests.labs.entries import Claim, Entry, Given
from tplab import Mesh
from tplab.pipeline import LayerSpec
from tplab.schedules import (
    Costs,
    Schedule,
    Simulation,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)
from tplab.torch.models.plain import PlainBlock

PROFILE = Costs(18.522, 18.086, 9.337, transfer=0.601)
"""ms. Qi et al. 2024 (arXiv:2401.10241), the table of bubble rates: 8 A100s, 24 microbatches."""

RULES = {
    "GPipe": gpipe(8, 24),
    "1F1B": one_f_one_b(8, 24),
    "ZB-H1": zb_h1(8, 24),
    "ZB-H2": zb_h2(8, 24),
    "interleaved, $v = 4$": interleaved_1f1b(8, 24, virtual_stages=4),
    "ZB-V": zb_v(8, 24),
}
ROWS = {
    "GPipe": "1,433 ms | 3 | 336",
    "1F1B": "1,457 ms | 1 | 336",
    "ZB-H1": "1,310 ms | 1.2 | 336",
    "ZB-H2": "1,237 ms | 2.3 | 336",
    "interleaved, $v = 4$": "1,220 ms | 1.2 | 1,488",
    "ZB-V": "1,189 ms | 1.2 | 672",
}

PARAGRAPH = f"""\
## Which schedule?

Qi et al. measured $F = 18.5$, $I = 18.1$, $W = 9.3$ and 0.6 ms for a message, for a GPT on 8 A100s. With these
costs, 24 microbatches and one program per rank:

| | a step, simulated | bytes kept by the fullest rank | messages |
|---|---|---|---|
{chr(10).join(f"| {name} | {row} |" for name, row in ROWS.items())}

The bytes, relative to 1F1B, were counted for equal transformer blocks. A split backward also keeps gradients until W.

With one program per rank, begin with 1F1B and as many microbatches as the batch allows, unless they become too small
to keep a GPU busy. GPipe is hardly faster, and keeps three times as much. If the bubble is still large, ZB-V and
interleaving with $v = 4$ shorten the step most. They keep about a fifth more, and send at least twice as many messages.
"""


def on_profile(schedule: Schedule) -> Simulation:
    return simulate(schedule, PROFILE)


def messages(schedule: Schedule) -> int:
    return sum(event.kind == "send" for event in on_profile(schedule).trace.events)


@cache
def most_kept(name: str) -> float:
    """The counted activations of the fullest rank, for 32 equal blocks on 8 ranks. The layers before and after them, an
    embedding and a sum, keep almost nothing."""
    schedule = RULES[name]
    block = LayerSpec(PlainBlock, tt.GPTConfig(32, 32, 32, num_heads=2, context=16))
    bounds = [0, *range(1 + 32 // schedule.num_stages, 34, 32 // schedule.num_stages)]

    def program() -> None:
        stages = tt.stages_of([LayerSpec(torch.nn.Embedding, 32, 32), *[block] * 32], schedule, bounds=bounds)
        ids = torch.zeros(24, 16, dtype=torch.long)
        tt.train_batch(schedule, stages, tt.split_batch(ids, ids, 24), lambda y, _: y.sum())

    return float(max(tt.run(program, Mesh(pp=8), keep_values=0).trace.peak_bytes))


def relative(name: str) -> float:
    return most_kept(name) / most_kept("1F1B")


def figures(name: str) -> list[float]:
    return [on_profile(RULES[name]).makespan, relative(name), messages(RULES[name])]


def times(name: str) -> float:
    return on_profile(RULES[name]).makespan / on_profile(RULES["1F1B"]).makespan


FAST = "ZB-V", "interleaved, $v = 4$"

WHICH: tuple[Entry, ...] = (
    Claim(
        "Qi et al. measured $F = 18.5$, $I = 18.1$, $W = 9.3$ and 0.6 ms for a message, for a GPT on 8 A100s",
        lambda: [18.522, 18.086, 9.337, 0.601, 8],  # as PROFILE
    ),
    *(Claim(row, lambda name=name: figures(name)) for name, row in ROWS.items()),
    Claim("GPipe is hardly faster, and keeps three times as much", lambda: 0.95 < times("GPipe") < 1),
    Claim(
        "ZB-V and interleaving with $v = 4$ shorten the step most",
        lambda: max(map(times, FAST)) < min(times(name) for name in RULES if name not in FAST),
    ),
    Claim(
        "They keep about a fifth more, and send at least twice as many messages",
        lambda: (
            all(1.15 < relative(name) < 1.25 for name in FAST)
            and min(messages(RULES[name]) for name in FAST) >= 2 * messages(RULES["1F1B"])
        ),
    ),
    Given("bytes kept by the fullest rank"),
)
