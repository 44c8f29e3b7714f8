"""Batches of text: the same ones however many ranks share them."""

import numpy as np
import pytest

from tplab.data.text import Text, python_source
from tplab.errors import ShapeError

TEXT = Text(bytes(range(200)))


def test_targets_are_the_next_bytes_and_none_is_held_out():
    for step in range(20):
        ids, targets = TEXT.batch(step, 4, 16)
        assert ids.shape == targets.shape == (4, 16)
        assert ids.dtype == np.int64
        np.testing.assert_array_equal(targets, ids + 1)
        assert targets.max() < TEXT.num_trained == 180
    ids, targets = TEXT.held_out(3, 8)
    assert ids.min() == 180
    assert targets.max() == 199


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_ranks_together_have_the_same_batch(num_ranks):
    whole = TEXT.batch(5, 6, 8, seed=3)
    shares = [TEXT.batch(5, 6, 8, 3, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    for side in (0, 1):
        np.testing.assert_array_equal(np.concatenate([share[side] for share in shares]), whole[side])
    held = [TEXT.held_out(6, 8, rank=r, num_ranks=num_ranks)[0] for r in range(num_ranks)]
    np.testing.assert_array_equal(np.concatenate(held), TEXT.held_out(6, 8)[0])


def test_steps_and_seeds_have_other_batches():
    first = TEXT.batch(0, 4, 8)[0]
    assert (first == TEXT.batch(0, 4, 8)[0]).all()
    assert (first != TEXT.batch(1, 4, 8)[0]).any()
    assert (first != TEXT.batch(0, 4, 8, seed=1)[0]).any()


def test_every_byte_can_be_met():
    ids = {int(x) for step in range(300) for x in TEXT.batch(step, 4, 8)[1].flat}
    assert ids == set(range(1, 180))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="batch has size 6"):
        TEXT.batch(0, 6, 8, num_ranks=4)
    with pytest.raises(ShapeError, match="rows of 20 bytes and the one that follows need a text of more than 20"):
        TEXT.held_out(2, 20)
    with pytest.raises(ValueError, match="held_out is 1"):
        Text(b"abc", held_out=1)


def test_python_source_is_python():
    source = python_source()
    assert source == python_source()
    assert len(source) > 500_000
    assert b"def " in source
    assert str(Text(b"x" * 100)) == "Text of 100 bytes, of which the last 10 are held out"
