"""The names of parameters, whichever module a script calls first."""

from torch import nn

from tplab.torch.checking.names import Names


def test_a_parameter_met_in_a_part_first_is_not_tied():
    """FSDP2's blocks are called, and optimizers ask the whole model."""
    names, block = Names(), nn.Sequential(nn.Linear(2, 2))
    names.note(block)
    assert names.of(block[0].weight) == "0.weight"
    names.note(whole := nn.Sequential(block, nn.Linear(2, 2)))
    assert names.of(whole[1].bias) == "1.bias"
    assert names.shared() == {}


def test_a_parameter_in_two_places_of_one_module_is_tied():
    names, model = Names(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    names.note(model)
    assert names.of(model[1].weight) == "0.weight"
    assert names.shared() == {"1.weight": "0.weight"}
