"""Ranks swap the state of Python's random generator as memory: it is all that `getstate` tells."""

from __future__ import annotations

import random

import pytest

from tplab.torch.private import PythonRandom, python_random


@pytest.mark.parametrize("num_draws", [0, 1, 623, 624, 1000])
@pytest.mark.parametrize("has_gauss", [False, True])
def test_the_state_of_a_generator(num_draws: int, has_gauss: bool):
    one, other = random.Random(1), random.Random(2)
    for _ in range(num_draws):
        one.getrandbits(32)
    if has_gauss:
        one.gauss()  # it draws two, and keeps one for the next call
    state, kept = one.getstate(), PythonRandom(one).get()
    one.random()
    one.gauss()
    PythonRandom(other).set(kept)
    assert other.getstate() == state
    PythonRandom(one).set(kept)
    assert [one.gauss(), one.random()] == [other.gauss(), other.random()]


def test_it_is_the_one_behind_the_functions_of_random():
    state = python_random.get()
    numbers = [random.random(), random.gauss(0, 1)]
    python_random.set(state)
    assert [random.random(), random.gauss(0, 1)] == numbers
