"""A pairwise cover has every pair that its rows have, and not many more rows than that takes."""

from itertools import combinations, product

import pytest

from tests.pairwise import cover, pairs


def met(rows):
    """Every two values in two columns of a row."""
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize("sizes", [(1,), (3,), (4, 3), (5, 2, 23), (8, 3, 11), (4, 2, 5, 2), (3, 3, 3, 3)], ids=str)
def test_every_pair_is_left(sizes):
    columns = [range(size) for size in sizes]
    rows = pairs(*columns)
    assert met(rows) == met(product(*columns)) and len(set(rows)) == len(rows)
    least = 0 if len(sizes) == 1 else max(a * b for a, b in combinations(sizes, 2))
    assert least <= len(rows) <= 1.6 * least + 1


def test_rows_that_are_not_there_are_not_made_up():
    rows = [(a, b, c) for a, b, c in product("ab", range(4), range(3)) if a == "a" or b == 1]
    found = cover(rows)
    assert set(found) <= set(rows) and met(found) == met(rows) and found == cover(rows) and len(found) < len(rows)


def test_values_that_cannot_be_hashed_are_compared_as_text():
    assert len(pairs([[1], [2]], [{}, {1: 2}], [0])) == 4
