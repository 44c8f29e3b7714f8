"""Layers that are made only where they live: what is built, the same model on any mesh, and the published partition."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tplab import Mesh
from tplab.errors import ScheduleError, ShapeError
from tplab.pipeline.partition import LayerSpec, TiedSpec, layer_names, ties
from tplab.schedules import chimera, gpipe, interleaved_1f1b, one_f_one_b, zb_v
from tplab.torch import ColumnParallelLinear, RowParallelLinear, num_parameters, run, stages_of, train_batch
from tplab.torch.pipeline.stages import cut

WIDTH, VOCABULARY, HEADS = 768, 65, 12


class Block(nn.Module):
    """GPT-lite's: heads without biases, everything else with."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(width, width // HEADS, bias=False) for _ in range(3 * HEADS))
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def gpt_lite(embedding):
    """16 layers: embedding, 12 blocks, norm, head, and a reshape."""
    blocks = [LayerSpec(Block, WIDTH)] * 12
    head = LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)
    return [embedding, *blocks, LayerSpec(nn.LayerNorm, WIDTH), head, flat]


def flat(x):
    return x.flatten(0, 1)


def test_the_printed_partition_of_gpt_lite():
    """As the blog printed it, from real layers: which leaves the embeddings out, since they hide in a lambda."""
    made = cut(gpt_lite(lambda ids: ids), 4)
    assert [(layers.start, layers.stop) for layers in made.stages] == [(0, 4), (4, 7), (7, 10), (10, 16)]
    assert made.stage_weights == [21_256_704] * 3 + [21_308_160]
    assert made.weights == (0, *[7_085_568] * 12, 1536, 49_920, 0)
    assert made.names[:2] == ("lambda", "Block") and made.names[-1] == "flat"


def test_counted_embeddings_make_the_first_stage_the_largest():
    made = cut(gpt_lite(LayerSpec(nn.Embedding, VOCABULARY + 200, WIDTH)), 4)
    assert made.bounds == (0, 4, 7, 10, 16)
    assert made.stage_weights[0] - made.stage_weights[1] == (VOCABULARY + 200) * WIDTH


def test_counting_takes_no_memory():
    sizes = num_parameters([LayerSpec(nn.Linear, 1_000_000, 1_000_000), nn.Linear(2, 3), flat])
    assert sizes == [10**12 + 10**6, 9, 0]


def test_methods_of_partition():
    layers = gpt_lite(lambda ids: ids)
    assert cut(layers, 4, "uniform").bounds == (0, 4, 8, 12, 16)
    assert cut(layers, 4, "type:block").stage_costs == [3, 3, 3, 3]
    assert cut(layers, 2, [1.0] * 8 + [3.0] * 8).bounds == (0, 11, 16)
    assert cut(layers, 2, bounds=[0, 5, 16]).bounds == (0, 5, 16)
    with pytest.raises(ScheduleError, match="do not cut 16 layers into 2 stages"):
        cut(layers, 2, bounds=[0, 5])
    with pytest.raises(ShapeError, match="16 layers cannot make 17 stages of a layer each; use at most 16 stages"):
        cut(layers, 17)


def test_a_stage_may_be_empty_and_prints_no_layers():
    made = cut([LayerSpec(nn.Linear, 2, 2)] * 3, 3, bounds=[0, 2, 2, 3])
    assert str(made) == (
        "stage 0  rank 0  layers [0, 2)      12 parameters  Linear to Linear\n"
        "stage 1  rank 1  layers none         0 parameters\n"
        "stage 2  rank 2  layers [2, 3)       6 parameters  Linear to Linear"
    )


class Built(nn.Linear):
    """Says when it is made with memory."""

    made: list[int] = []

    def __init__(self, width):
        super().__init__(width, width)
        if self.weight.device.type != "meta":
            self.made.append(self.weight.nbytes)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_memory_of_construction_falls_with_the_stages(ranks):
    layers = [LayerSpec(Built, 32)] * 8

    def program():
        Built.made = []
        stages = stages_of(layers, gpipe(ranks, 1))
        return len(Built.made), sum(p.nbytes for p in stages.parameters())

    found = run(program, Mesh(pp=ranks)).per_rank
    assert found == [(8 // ranks, 8 // ranks * (32 * 32 + 32) * 4)] * ranks


def weights_of(schedule, layers, mesh=None):
    """Layer -> its parameters, and which ranks hold it."""

    def program():
        stages = stages_of(layers, schedule)
        bounds = stages.partition.bounds
        return {
            bounds[n] + place: [p.detach() for p in layer.parameters()]
            for n, stage in stages.items()
            for place, layer in enumerate(stage.children())
        }

    return run(program, mesh or Mesh(pp=schedule.num_ranks), seed=5).per_rank


def test_the_same_model_on_any_mesh():
    layers = [TiedSpec("t", nn.Linear, 4, 4), *[LayerSpec(nn.Linear, 4, 4)] * 6, TiedSpec("t", nn.Linear, 4, 4)]
    (whole,) = weights_of(gpipe(1, 1), layers)
    assert not torch.equal(whole[1][0], whole[2][0])  # two layers of one spec are two layers
    assert torch.equal(whole[0][0], whole[7][0])  # tied ones begin alike
    meshes = [(s, None) for s in (gpipe(4, 2), zb_v(2, 2), interleaved_1f1b(2, 2), chimera(4, 4))]
    for schedule, mesh in [*meshes, (gpipe(2, 2), Mesh(dp=2, pp=2))]:
        seen = set()
        for held in weights_of(schedule, layers, mesh):
            for place, parameters in held.items():
                seen.add(place)
                assert all(map(torch.equal, parameters, whole[place])), (schedule, place)
        assert seen == set(range(8))


def test_tensor_parallel_layers_in_stages():
    """Data x pipeline x tensor: 2 x 2 x 2, against one rank."""
    x, y = torch.randn(8, 5, 6, dtype=torch.float64), torch.randn(8, 5, 6, dtype=torch.float64)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = ColumnParallelLinear(6, 8, "tp"), RowParallelLinear(8, 6, "tp")
            self.double()

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    def program(x, y):
        from tplab.torch import all_gather, axis_index

        index = axis_index("dp")
        schedule = one_f_one_b(pp, 2)
        stages = stages_of([LayerSpec(Pair)] * 2, schedule)
        size = 8 // dp // 2
        batch = [(x[at : at + size], y[at : at + size]) for at in (index * 2 * size, index * 2 * size + size)]
        loss = train_batch(schedule, stages, batch, F.mse_loss, data_axis="dp")
        grads = {}
        for n, stage in stages.items():
            for place, layer in enumerate(stage.children()):
                grads[stages.partition.bounds[n] + place] = all_gather(layer.up.weight.grad, "tp")  # type: ignore
        return loss, grads

    dp = pp = 1
    (want,) = run(program, Mesh(dp=1, pp=1, tp=1), x, y).per_rank
    dp = pp = 2
    for loss, grads in run(program, Mesh(dp=2, pp=2, tp=2), x, y).per_rank:
        assert loss == pytest.approx(want[0])
        for place, grad in grads.items():
            torch.testing.assert_close(grad, want[1][place], rtol=1e-12, atol=1e-15)


def test_specs():
    spec = LayerSpec(nn.Linear, 2, 3, bias=False)
    assert repr(spec) == "LayerSpec(Linear, 2, 3, bias=False)"
    assert spec == LayerSpec(nn.Linear, 2, 3, bias=False) != LayerSpec(nn.Linear, 2, 3)
    assert hash(spec) == hash(LayerSpec(nn.Linear, 2, 3, bias=False))
    assert spec != TiedSpec("k", nn.Linear, 2, 3, bias=False)
    assert spec.build().weight.shape == (3, 2)
    assert layer_names([spec, flat, nn.ReLU(), lambda x: x]) == ["Linear", "flat", "ReLU", "lambda"]
    assert ties([TiedSpec("a", nn.ReLU), spec, TiedSpec("a", nn.ReLU)]) == {"a": [0, 2]}
    with pytest.raises(TypeError, match="cannot be called"):
        LayerSpec(nn.Linear(2, 2).weight)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="is for 2 ranks, but axis 'pp' has 3"):
        run(lambda: stages_of([spec] * 4, gpipe(2, 1)), Mesh(pp=3))
