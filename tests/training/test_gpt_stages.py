"""A GPT as a list of layers: on any mesh of data, pipeline and tensor parallelism gradients are those of one rank."""

from typing import Any

import numpy as np
import pytest
import torch

import tplab.jax  # before JAX is used
import tplab.torch
from tests.training.models import CONFIG, X, Y, check_pieces, whole
from tplab import Mesh, P
from tplab.jax.pipeline.stages import Stages
from tplab.jax.private import in_float64
from tplab.jax.training.gpt_stages import GPTPacking, blueprints_on
from tplab.models.gpt import GPTConfig, gpt_layer_name, gpt_parameters, gpt_state
from tplab.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v
from tplab.torch.training.gpt_stages import held_of, load_whole

MESHES = {
    "2x2x2": (Mesh(dp=2, pp=2, tp=2), one_f_one_b(2, 2), True),
    "tp slowest": (Mesh(tp=2, pp=2, dp=2), zb_h1(2, 2), True),
    "pipeline of 4": (Mesh(pp=4, dp=2, tp=1), gpipe(4, 4), False),
    "two stages per rank": (Mesh(dp=1, pp=2, tp=4), zb_v(2, 2), False),
    "no pipeline": (Mesh(dp=4, pp=1, tp=2), gpipe(1, 1), True),
}


@pytest.mark.parametrize("name", MESHES)
def test_torch_on_any_mesh(name):
    mesh, schedule, sequence_parallel = MESHES[name]
    lab, every = tplab.torch, 1 if name == "2x2x2" else None

    def program():
        stages = lab.stages_of(lab.gpt_layers(CONFIG, sequence_parallel=sequence_parallel), schedule)
        for parameter in stages.parameters():
            parameter.data = parameter.data.double()
        load_whole(stages, CONFIG, gpt_state(CONFIG))
        size = len(X) // mesh.shape["dp"]
        own = slice(size * lab.axis_index("dp"), size * (lab.axis_index("dp") + 1))
        batch = lab.split_batch(torch.tensor(X[own]), torch.tensor(Y[own]), schedule.num_microbatches)
        loss = lab.train_batch(schedule, stages, batch, loss_of(lab), data_axis="dp", checkpoint_every=every)
        grads: Any = {name: [p.grad for p in held] for name, held in held_of(stages, CONFIG).items()}
        assert all(torch.equal(grad[0], other) for grad in grads.values() for other in grad)  # tied
        return loss.item(), {name: grad[0].numpy() for name, grad in grads.items()}

    check_pieces(lab.run(program, mesh).per_rank, mesh)


@pytest.mark.parametrize("name", ["2x2x2", "two stages per rank"])
def test_jax_on_any_mesh(name):
    mesh, schedule, sequence_parallel = MESHES[name]
    lab, every = tplab.jax, 1 if name == "2x2x2" else None
    with in_float64():
        layers = lab.gpt_layers(CONFIG, sequence_parallel=sequence_parallel)
        packing = GPTPacking(blueprints_on(mesh, layers, schedule), CONFIG, mesh)
        stages = packing.pack(gpt_state(CONFIG))

        def step(stages, x, y):
            batch = lab.split_batch(x, y, schedule.num_microbatches)
            return lab.train_batch(schedule, stages, batch, loss_of(lab), data_axis="dp", checkpoint_every=every)

        specs = (stages.specs, P("dp"), P("dp")), (P(), stages.specs)
        loss, grads = lab.run(step, mesh, stages, X, Y, in_specs=specs[0], out_specs=specs[1]).value
        check_pieces([(float(loss), packing.unpack(grads))], Mesh(tp=1))


def loss_of(lab):
    return lambda logits, ids: lab.vocab_parallel_cross_entropy(logits, ids, "tp", CONFIG.vocab_size)


@pytest.mark.parametrize("schedule", [one_f_one_b(2, 2), interleaved_1f1b(2, 2), zb_v(2, 2)], ids=lambda s: s.name)
@pytest.mark.parametrize("mesh", [Mesh(dp=2, pp=2, tp=2), Mesh(tp=3, pp=2)], ids=str)
def test_packing_changes_no_bit(schedule, mesh):
    """Also of 32 words on 3 ranks, of which the last has fewer."""
    config = GPTConfig(32, 12, 3, 3, 12, norm="rms", activation="swiglu", bias=False)
    state = {name: x.astype(np.float32) for name, x in gpt_state(config).items()}
    packing = GPTPacking(blueprints_on(mesh, tplab.jax.gpt_layers(config), schedule), config, mesh)
    packed = packing.pack(state)
    assert isinstance(packed, Stages)
    found = packing.unpack(packed)
    assert found.keys() == state.keys()
    for name, x in state.items():
        np.testing.assert_array_equal(found[name], x)


def test_layers_begin_as_the_whole_model_does():
    """The same deviations, and tied weights that are equal, whichever ranks they are on."""
    lab = tplab.torch
    config = GPTConfig(512, 64, 3, 4, 64)

    def program():
        stages = lab.stages_of(lab.gpt_layers(config), one_f_one_b(2, 2))
        return {name: [p.detach() for p in held] for name, held in held_of(stages, config).items()}

    first, last = lab.run(program, Mesh(pp=2, tp=1)).per_rank
    assert torch.equal(first["embedding.weight"][0], last["embedding.weight"][0])
    found = first | last
    for name, [x] in found.items():
        about = gpt_parameters(config)[name]
        assert x.shape == about.shape
        assert x.std().item() == pytest.approx(about.deviation, rel=0.1)
    assert found.keys() == gpt_parameters(config).keys()
    assert not torch.equal(found["blocks.0.mlp.up.weight"][0], found["blocks.1.mlp.up.weight"][0])


def test_names():
    assert gpt_layer_name(CONFIG, 0, "positions.weight") == "positions.weight"
    assert gpt_layer_name(CONFIG, 1, "norm_1.weight") == "blocks.0.norm_1.weight"
    assert gpt_layer_name(CONFIG, 2, "mlp.up.bias") == "blocks.1.mlp.up.bias"
    assert gpt_layer_name(CONFIG, 3, "norm.weight") == "norm.weight"


def test_first_weights_depend_on_the_seed_alone():
    again, other = gpt_state(CONFIG), gpt_state(CONFIG, seed=1)
    for name, x in gpt_state(CONFIG).items():
        about = gpt_parameters(CONFIG)[name]
        np.testing.assert_array_equal(x, again[name])
        assert (x == other[name]).all() == (about.deviation == 0)
    assert whole()[0] == pytest.approx(np.log(32), rel=0.01)  # nothing is known yet
