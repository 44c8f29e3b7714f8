"""The same GPT-2 by tplab, by torch's DTensor and by jit with shardings: equal numbers, and what each of them sends."""

from functools import partial

import numpy as np
import pytest
import torch

from tplab.jax import shard_params  # isort: skip  # before JAX is used
import jax

import tplab.jax
import tplab.torch
from benchmarks.plain_gpt_jax import plain_logits, plain_loss
from tests.sharded import close, flat
from tests.trace.dtensor import shard_with_dtensor, whole, with_dtensor
from tplab import Mesh, P
from tplab.errors import MeshError, ShapeError
from tplab.jax.private import in_float64
from tplab.jax.tracing.compiled import collectives_in_text
from tplab.models.gpt import GPTConfig, gpt_specs
from tplab.torch.models.plain import PlainGPT
from tplab.trace import Sent, Traffic, traffic_table

NUM_RANKS, BATCH, SEQUENCE = 4, 2, 8
IDS = np.random.default_rng(0).integers(0, 96, (BATCH, SEQUENCE))


def config_for(num_layers=2, vocab_size=96):
    return GPTConfig(vocab_size, 16, num_layers, 4, SEQUENCE)


def whole_state(config):
    """Every parameter of a GPT, in float64."""
    model = lambda: {n: x.double() for n, x in tplab.torch.GPT(config).state_dict().items()}  # noqa: E731
    state = tplab.torch.run(model, Mesh(tp=1)).per_rank[0]
    return {name: x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(len(name)))
            for name, x in state.items()}  # fmt: skip


def plain_in_torch(config, state):
    model = PlainGPT(config).double().load(state)
    loss = model.loss(torch.tensor(IDS), torch.tensor(IDS))
    loss.backward()
    return model, loss.item(), {name: p.grad for name, p in model.named_parameters()}


def ours_in_torch(config, state):
    """Loss, whole gradients and traffic of tplab's GPT."""
    specs = gpt_specs(config)

    def program(ids, *mine):
        model = tplab.torch.GPT(config).double()
        model.load_state_dict(dict(zip(specs, mine)))
        loss = model.loss(ids, ids)
        loss.backward()
        return loss.detach(), [dict(model.named_parameters())[name].grad for name in specs]

    in_specs, out_specs = (P(), *specs.values()), (P(), list(specs.values()))
    arguments = torch.tensor(IDS), *(state[name] for name in specs)
    out = tplab.torch.run(program, Mesh(tp=NUM_RANKS), *arguments, in_specs=in_specs, out_specs=out_specs)
    return out.value[0].item(), dict(zip(specs, out.value[1])), Traffic.of_trace(out.trace)


def by_dtensor(config, state, share_input):
    from torch.distributed.tensor.parallel import loss_parallel

    def program(mesh):
        model = shard_with_dtensor(PlainGPT(config).double().load(state), mesh, share_input=share_input)
        ids = torch.tensor(IDS)
        with loss_parallel():
            loss = model.loss(ids, ids)
            loss.backward()
        return whole(loss).item(), {name: whole(p.grad) for name, p in model.named_parameters()}

    (loss, grads), traffic = with_dtensor(program, NUM_RANKS)
    return loss, grads, traffic


def nested_in_jax(state):
    from tplab.jax.layers.parameters import nested

    return nested({name: jax.numpy.asarray(x.numpy()) for name, x in state.items()})


def in_jax(config, state):
    """Of jit and of ours: loss, whole gradients and traffic."""
    model, mesh = tplab.jax.GPT(config), Mesh(tp=NUM_RANKS)
    params = shard_params(nested_in_jax(state), model.specs, mesh)
    jitted = jax.jit(jax.value_and_grad(partial(plain_loss, config=config))).lower(params, IDS, IDS).compile()
    loss, grads = jitted(params, IDS, IDS)
    of_jit = Traffic.of((c.op, c.count or 0, c.bytes) for c in collectives_in_text(jitted.as_text() or ""))
    program = jax.value_and_grad(model.loss)
    specs = {"in_specs": (model.specs, P(), P()), "out_specs": (P(), model.specs)}
    out = tplab.jax.run(program, mesh, params, IDS, IDS, keep_values=0, **specs)
    return (loss, flat(grads), of_jit), (out.value[0], flat(out.value[1]), Traffic.of_trace(out.trace))


def same(loss, grads, want_loss, want_grads):
    close(float(loss), want_loss, "loss")
    for name, want in want_grads.items():
        if not name.endswith("key.bias"):  # zero but for rounding: softmax does not see it
            close(np.asarray(grads[name]), want.numpy(), name)


ACTIVATION = BATCH * SEQUENCE * 16 * 8 * 2 * 3 // 4  # bytes that a rank sends of one in a ring of 4: 2(R-1)/R, float64
TOKEN = BATCH * SEQUENCE * 8 * 2 * 3 // 4  # of one number a token


@pytest.mark.parametrize("share_input", [True, False])
def test_ours_and_dtensor(share_input):
    """Both compute the same. By itself DTensor sums the gradient of the attention's input three times, one for each of
    query, key and value; given to it as one, as often as we do: four times a layer."""
    config = config_for()
    state = whole_state(config)
    _, want_loss, want_grads = plain_in_torch(config, state)
    loss, grads, ours = ours_in_torch(config, state)
    same(loss, grads, want_loss, want_grads)
    loss, grads, theirs = by_dtensor(config, state, share_input)
    same(loss, grads, want_loss, want_grads)
    assert ours == {"all_reduce": Sent(2 + 2 * 4 + 2, (2 + 2 * 4) * ACTIVATION + 3 * TOKEN)}
    a_layer = 4 if share_input else 6
    # The loss: maximum, sum and the target's logit are three all_reduces, where ours sums the last two in one.
    assert theirs == {"all_reduce": Sent(2 + 2 * a_layer + 3, (2 + 2 * a_layer) * ACTIVATION + 3 * TOKEN)}


def test_a_vocabulary_that_does_not_divide():
    config = config_for(1, 97)
    state = whole_state(config)
    _, want_loss, want_grads = plain_in_torch(config, state)
    loss, grads, _ = by_dtensor(config, state, True)
    same(loss, grads, want_loss, want_grads)


def test_ours_and_jit():
    """Of the unsharded program XLA makes, from the shardings of its parameters alone, what DTensor makes by itself: six
    communications a layer."""
    config = config_for(1)
    state = whole_state(config)
    _, want_loss, want_grads = plain_in_torch(config, state)
    with in_float64():
        (loss, grads, of_jit), (our_loss, our_grads, ours) = in_jax(config, state)
        same(loss, grads, want_loss, want_grads)
        same(our_loss, our_grads, want_loss, want_grads)
    assert ours == {"all_reduce": Sent(2 + 4 + 2, (2 + 4) * ACTIVATION + 3 * TOKEN)}
    assert of_jit == {"all_reduce": Sent(2 + 6 + 3, (2 + 6) * ACTIVATION + 3 * TOKEN)}
    table = traffic_table({"tplab": ours, "jit": of_jit})
    assert table.splitlines()[1].split() == ["all_reduce", "8", "x,", "19,008", "bytes", "11", "x,", "25,152", "bytes"]


def test_plain_logits_are_the_same_in_both():
    config = config_for(1)
    state = whole_state(config)
    model, *_ = plain_in_torch(config, state)
    with in_float64(), torch.no_grad():
        logits = plain_logits(nested_in_jax(state), jax.numpy.asarray(IDS), config)
        close(logits, model(torch.tensor(IDS)).numpy(), "logits")


def test_traffic_adds_up():
    traffic = Traffic.of([("all_reduce", 2, 10), ("all_gather", 1, 5), ("all_reduce", 1, 4)])
    assert traffic == {"all_reduce": Sent(3, 24), "all_gather": Sent(1, 5)}
    assert traffic.total == Sent(4, 29)
    assert repr(traffic) == "1 x all_gather, 5 bytes\n3 x all_reduce, 24 bytes"
    assert repr(Traffic()) == "nothing is sent"
    assert [line.split(maxsplit=1) for line in traffic_table({"one": traffic, "none": Traffic()}).splitlines()] == [
        ["one", "none"],
        ["all_gather", "1 x, 5 bytes     -"],
        ["all_reduce", "3 x, 24 bytes     -"],
        ["together", "4 x, 29 bytes     -"],
    ]


def test_what_cannot_be_is_said():
    with pytest.raises(MeshError, match=r"torch.distributed has a process group already"):
        with_dtensor(lambda mesh: with_dtensor(lambda inner: None, 2), 2)
    assert not torch.distributed.is_initialized()
    config = GPTConfig(96, 16, 1, 4, 8, norm="rms")
    with pytest.raises(ShapeError, match="PlainGPT is for models like GPT-2"):
        PlainGPT(config)
    with pytest.raises(ShapeError, match="plain_logits is for models like GPT-2"):
        plain_logits({}, jax.numpy.asarray(IDS), config)
