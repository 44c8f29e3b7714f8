"""The plain GPT as a list of layers: PlainGPT without positions and with a head of its own; its loss counts tokens."""

import torch
from torch import nn
from torch.nn import functional as F

from tplab import Mesh
from tplab.models.gpt import GPTConfig
from tplab.schedules import one_f_one_b
from tplab.torch import run, stages_of
from tplab.torch.models.plain import PlainGPT, plain_layers, token_loss

CONFIG = GPTConfig(11, 8, num_layers=3, num_heads=2, context=5)
IDS = torch.arange(10).reshape(2, 5)


def test_the_layers_compute_what_plain_gpt_does():
    torch.manual_seed(0)
    model = PlainGPT(CONFIG)
    nn.init.zeros_(model.positions.weight)
    layers = [layer.build() for layer in plain_layers(CONFIG)]
    names = ["embedding", *(f"blocks.{number}" for number in range(3)), "norm", "head"]
    for name, layer in zip(names, layers, strict=True):
        layer.load_state_dict(model.get_submodule(name).state_dict())
    assert torch.equal(nn.Sequential(*layers)(IDS), model(IDS))


def test_they_are_the_stages_of_a_pipeline():
    def program():
        stages = stages_of(plain_layers(CONFIG), one_f_one_b(2, 2), bounds=[0, 3, 6])
        return [type(layer).__name__ for stage in stages.values() for layer in stage.children()]

    assert run(program, Mesh(pp=2)).per_rank == [
        ["Embedding", "PlainBlock", "PlainBlock"],
        ["PlainBlock", "LayerNorm", "Linear"],
    ]


def test_the_loss_is_the_mean_over_the_tokens_that_count():
    logits, targets = torch.randn(2, 5, 11), IDS.clone()
    targets[1, 1:] = -100
    counted = [F.cross_entropy(logits[0, k], targets[0, k]) for k in range(5)]
    counted.append(F.cross_entropy(logits[1, 0], targets[1, 0]))
    torch.testing.assert_close(token_loss(logits, targets), sum(counted) / 6)
