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


def trace_of(schedule, batches=1):
    def program():
        stages = {n: nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for n in schedule.placement[axis_index("pp")]}
        for size in range(3, 3 + batches):
            x = torch.ones(size, 8)
            train_batch(schedule, stages, [(x, x)] * schedule.num_microbatches, F.mse_loss)

    return run(program, Mesh(pp=schedule.num_ranks)).trace


def at(strip, time):
    """What is held at a moment."""
    times, held = strip
    return held[np.searchsorted(times, time, "right") - 1]


@pytest.mark.parametrize("rule", [gpipe, one_f_one_b, interleaved_1f1b, zb_h1, zb_v])
def test_it_is_the_predicted_one(rule):
    schedule = rule(3, 6)
    trace = trace_of(schedule)
    costs = measured_costs(schedule, trace)
    predicted = simulate(schedule, Costs(activation=costs.activation, input_grad_frees=costs.input_grad_frees))
    for rank in range(3):
        strip, wanted = measured_strip(predicted, rank, trace), predicted.activation_bytes(rank)
        assert (np.diff(strip[0]) >= 0).all() and (strip[0][0], strip[1][0], strip[1][-1]) == (0, 0, 0)
        assert strip[1].max() == predicted.peak_bytes[rank] == trace.peak_bytes[rank]
        for time in np.unique(np.concatenate([strip[0], wanted[0]])):
            assert at(strip, time) == pytest.approx(at(wanted, time), abs=1e-6)


def test_messages_are_no_moments():
    schedule = one_f_one_b(2, 3)
    times, num_bytes = measured_strip(simulate(schedule), 1, trace_of(schedule))
    assert times.tolist() == [0, 1, 4, 4, 7, 7, 10]  # F takes its bytes when it begins, B lets go when it ends
    assert (num_bytes > 0).tolist() == [False, True, False, True, False, True, False]


def test_each_batch_has_its_own():
    schedule = gpipe(2, 3)
    trace = trace_of(schedule, batches=2)
    first, second = (measured_strip(simulate(schedule), 0, trace, batch=batch)[1] for batch in (0, 1))
    assert (second * 3 == first * 4).all() and first.max() > 0


def test_what_is_of_another_schedule_says_so():
    trace, other = trace_of(one_f_one_b(2, 3)), simulate(gpipe(2, 3))
    with pytest.raises(ScheduleError, match=r"rank 0 ran B0 of stage 0 where the schedule has F2 of stage 0"):
        measured_strip(other, 0, trace)
    with pytest.raises(ScheduleError, match=r"does not say what its ranks held; it must be of a run of train_batch"):
        measured_strip(other, 0, other.trace)
    assert measured_costs(other.schedule, other.trace).activation == 1.0  # as it is counted in microbatches
