import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.zero import elements_sent
from tplab.data.pieces import Pieces
from tplab.data.zero import MIXED_ADAM, StateBytes, bytes_per_parameter, state_bytes
from tplab.torch.data import pieces as on_torch

PICTURE = """\
rank 0   0 1 2 | 0
rank 1   3 4 5 | 1
rank 2   6 7 8 | 2
rank 3   9 . . | ."""
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4).map(tuple)


def test_who_holds_what():
    assert str(Pieces(((2, 5), (3,)), 4)) == PICTURE


@given(SHAPES, st.integers(1, 8))
def test_a_message_holds_every_element_once(shapes, num_ranks):
    """What ranks hold, put in rows and read back, is what there was; what they hold adds up to all elements."""
    pieces = Pieces(shapes, num_ranks)
    wholes = [torch.arange(float(np.prod(shape))).reshape(shape) + 1 for shape in shapes]
    held = [on_torch.held_of(pieces, index, wholes) for index in range(num_ranks)]
    assert [sum(x.numel() for x in own) for own in held] == [pieces.num_held(index) for index in range(num_ranks)]
    rows = torch.cat([on_torch.row_of(pieces, own, torch.float32) for own in held])
    assert rows.numel() == num_ranks * pieces.width
    assert torch.equal(rows, on_torch.message_of(pieces, wholes, rows, torch.float32))
    for own, again in zip(wholes, on_torch.wholes_in(pieces, rows), strict=True):
        assert torch.equal(own, again)
    for index, own in enumerate(held):
        row = rows.view(num_ranks, -1)[index]
        assert all(map(torch.equal, own, on_torch.held_in(pieces, index, row)))


def test_bytes_per_parameter_are_the_papers():
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    giga = [round(7.5 * bytes_per_parameter(stage, 64).total, 1) for stage in range(4)]
    assert giga == [120.0, 31.4, 16.6, 1.9]
    assert [bytes_per_parameter(stage, 4).total for stage in range(4)] == [16, 4 + 12 / 4, 2 + 14 / 4, 16 / 4]
    assert bytes_per_parameter(1, 2, StateBytes(4, 4, 8)) == (4, 4, 4)
    with pytest.raises(ValueError, match="no ZeRO stage 4"):
        bytes_per_parameter(4, 2)


def test_bytes_of_all_ranks_are_those_of_one_device():
    for stage in range(4):
        total = np.sum([state_bytes(stage, [35, 7, 3], 4, index) for index in range(4)], 0)
        divided = [stage >= 3, stage >= 2, stage >= 1]
        assert total.tolist() == [size * 45 * (1 if d else 4) for size, d in zip(MIXED_ADAM, divided)]


def test_elements_sent():
    pieces = [Pieces(((5, 7), (7,)), 4)]  # 42 elements, padded to 44
    assert [elements_sent(stage, pieces) for stage in (1, 2, 3)] == [2 * 33, 2 * 33, 3 * 33]
    assert elements_sent(3, pieces, reshard_after_forward=False) == 2 * 33
    assert elements_sent(0, pieces) == 2 * 3 * 42 // 4
