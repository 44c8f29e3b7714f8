"""The names of parameters, whichever module a script calls first."""

from torch import nn

from tplab.torch.checking.names import Names


def test_a_parameter_met_in_a_part_first_is_not_tied():
    """FSDP2's blocks are called, and optimizers ask the whole model."""
    names, first, last = Names(), nn.Linear(2, 2), nn.Linear(2, 2)
    names.note(block := nn.Sequential(first))
    assert names.of(first.weight) == "0.weight"
    names.note(nn.Sequential(block, last))
    assert names.of(last.bias) == "1.bias"
    assert names.shared() == {}


def test_a_parameter_in_two_places_of_one_module_is_tied():
    names, first, last = Names(), nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    names.note(nn.Sequential(first, last))
    assert names.of(last.weight) == "0.weight"
    assert names.shared() == {"1.weight": "0.weight"}
