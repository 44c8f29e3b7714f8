"""The measured memory strip of a rank, beside the predicted one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tplab import Mesh
from tplab.errors import ScheduleError
from tplab.schedules import (
    Costs,
    gpipe,
    interleaved_1f1b,
    measured_costs,
    measured_strip,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_v,
)
from tplab.torch import axis_index, run, train_batch


def held_by(schedule):
    def program():
        stages = {n: nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for n in schedule.placement[axis_index("pp")]}
        x, held = torch.ones(3, 8), []
        train_batch(schedule, stages, [(x, x)] * schedule.num_microbatches, F.mse_loss, held=held)
        return held

    out = run(program, Mesh(pp=schedule.num_ranks))
    return out.per_rank, measured_costs(schedule, out.trace, out.per_rank)


def at(strip, time):
    """What is held at a moment."""
    times, held = strip
    return held[np.searchsorted(times, time, "right") - 1]


@pytest.mark.parametrize("rule", [gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zb_v])
def test_it_is_the_predicted_one(rule):
    schedule = rule(3, 6)
    held, costs = held_by(schedule)
    predicted = simulate(schedule, Costs(activation=costs.activation, input_grad_frees=costs.input_grad_frees))
    for rank in range(3):
        strip, wanted = measured_strip(predicted, rank, held[rank]), predicted.activation_bytes(rank)
        assert (np.diff(strip[0]) >= 0).all() and (strip[0][0], strip[1][0], strip[1][-1]) == (0, 0, 0)
        assert strip[1].max() == predicted.peak_bytes[rank]
        for time in np.unique(np.concatenate([strip[0], wanted[0]])):
            assert at(strip, time) == pytest.approx(at(wanted, time), abs=1e-6)


def test_messages_are_no_moments():
    schedule = one_f_one_b(2, 3)
    held, _ = held_by(schedule)
    times, num_bytes = measured_strip(simulate(schedule), 1, held[1])
    assert times.tolist() == [0, 1, 4, 4, 7, 7, 10]  # F takes its bytes when it begins, B lets go when it ends
    assert (num_bytes > 0).tolist() == [False, True, False, True, False, True, False]


def test_what_is_of_another_schedule_says_so():
    held, _ = held_by(one_f_one_b(2, 3))
    with pytest.raises(ScheduleError, match="ran B0 of stage 0 as action 2 where the schedule has F2 of stage 0"):
        measured_strip(simulate(gpipe(2, 3)), 0, held[0])
    short = [entry for entry in held_by(gpipe(2, 3))[0][1] if entry[0].is_compute][:4]
    with pytest.raises(ScheduleError, match="has 6 actions in the schedule and 4 in `held`"):
        measured_strip(simulate(gpipe(2, 3)), 1, short)
