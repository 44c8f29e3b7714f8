"""Pipeline schedules as data: the rules that make them, their text and picture, checks, simulation and bounds."""

from collections.abc import Callable

from tplab.schedules.action import Action
from tplab.schedules.auto import auto_schedule
from tplab.schedules.bounds import Bounds, lower_bounds
from tplab.schedules.check import Fault, check, faults, program
from tplab.schedules.communication import to_csv, with_communication, with_optimizer_step
from tplab.schedules.costs import Costs
from tplab.schedules.measured import Comparison, compare, measured_costs, measured_strip
from tplab.schedules.placement import Placement, linear, two_way, v_shape, wave, wrapped
from tplab.schedules.rules.stamp import Block, v_block, v_half, v_min
from tplab.schedules.rules.streams import chimera, dualpipe, dualpipe_v, hanayo, zb_v
from tplab.schedules.rules.turns import (
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    looped_bfs,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from tplab.schedules.schedule import Schedule
from tplab.schedules.simulate import simulate
from tplab.schedules.simulation import Idle, Simulation

RULES: dict[str, Callable[..., Schedule]] = {
    rule.__name__: rule
    for rule in (
        naive,
        gpipe,
        one_f_one_b,
        interleaved_1f1b,
        looped_bfs,
        zb_h1,
        zb_h2,
        interleaved_zb,
        zb_v,
        v_half,
        v_min,
        dualpipe,
        dualpipe_v,
        chimera,
        hanayo,
    )
}
"""Every rule by name: `RULES["gpipe"](ranks=4, microbatches=8)`."""

__all__ = [
    "RULES",
    "Action",
    "Block",
    "Bounds",
    "Comparison",
    "Costs",
    "Fault",
    "Idle",
    "Placement",
    "Schedule",
    "Simulation",
    "auto_schedule",
    "check",
    "chimera",
    "compare",
    "dualpipe",
    "dualpipe_v",
    "faults",
    "gpipe",
    "hanayo",
    "interleaved_1f1b",
    "interleaved_zb",
    "linear",
    "looped_bfs",
    "lower_bounds",
    "measured_costs",
    "measured_strip",
    "naive",
    "one_f_one_b",
    "program",
    "simulate",
    "to_csv",
    "two_way",
    "v_block",
    "v_half",
    "v_min",
    "v_shape",
    "wave",
    "with_communication",
    "with_optimizer_step",
    "wrapped",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
