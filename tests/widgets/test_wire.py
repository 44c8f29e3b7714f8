"""What is packed for the browser comes out as it was, in fewer bytes where numbers follow one another."""

from __future__ import annotations

import numpy as np

from tplab.widgets.paper.wire import pack, unpack

RANDOM = np.random.default_rng(0)
COLUMNS = {
    "up": np.arange(0, 60_000, 3),
    "down": np.arange(60_000, 0, -2, dtype=np.int32),
    "small, down": np.repeat(np.arange(255, 0, -1, dtype=np.uint8), 9),
    "around": np.tile(np.arange(64, dtype=np.int8), 100),
    "large": np.arange(2**33, 2**33 + 5000),
    "in no order": RANDOM.integers(0, 10**6, 5000),
    "floats": RANDOM.random(100),
    "few": np.array([7, -1]),
    "none": np.zeros(0, int),
}


def test_every_column_comes_out_as_it_was():
    header, columns = unpack(pack({"title": "a thing"}, COLUMNS))
    assert header == {"title": "a thing"} and columns.keys() == COLUMNS.keys()
    for name, column in COLUMNS.items():
        np.testing.assert_array_equal(columns[name], column)


def test_numbers_that_follow_one_another_take_hardly_any_bytes():
    assert len(pack({}, {"up": COLUMNS["up"]})) < 400
    assert len(pack({}, {"in no order": COLUMNS["in no order"]})) > 10_000
