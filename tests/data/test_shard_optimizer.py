"""ZeRO stages 1 and 2 beside one device: parameters, what is sent, and the bytes of real buffers."""

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.data.zero import (
    BOTH,
    RATE,
    SHAPES,
    SIZES,
    Model,
    batch,
    elements_sent,
    jax_adamw,
    jax_loss,
    one_device,
    start,
    torch_adamw,
    torch_loss,
    train,
)
from tests.frameworks import FRAMEWORKS, Framework, gathers_alike, in_both
from tests.sharded import close, double, numbers
from tplab import Mesh, P
from tplab.data.pieces import Pieces
from tplab.data.zero import StateBytes, state_bytes
from tplab.errors import MeshError, RankError
from tplab.pipeline import LayerSpec
from tplab.schedules import one_f_one_b

ALL = tuple(SHAPES.values())


@pytest.fixture
def fw(request) -> Framework:
    return FRAMEWORKS[request.param]()


@pytest.mark.parametrize(
    ("fw", "stage", "num_ranks"),
    in_both([(s, n) for s in (1, 2) for n in (1, 2, 3, 4, 8)], [(1, 3), (2, 4)]),
    indirect=["fw"],
)
def test_twenty_steps_are_those_of_one_device(fw, stage, num_ranks):
    """And each step sends 2 M elements, times (R-1)/R, from each rank."""
    shard = fw.lab.shard_optimizer if stage == 1 else fw.lab.shard_gradients
    # torch puts the last two parameters into one message; the first is larger than a bucket
    options = {"bucket_bytes": 28 * 8} if fw.name == "torch" else {}
    with double(fw):
        out = train(fw, partial(shard, axis="dp", **options), num_ranks)
        for name, want in one_device().items():
            close(fw.numpy(out.value[name]), want, name)
        buckets = [Pieces((shape,), num_ranks) for shape in ALL]  # padded one by one, also in one message
        for rank in range(num_ranks if fw.name == "torch" else 0):  # of JAX see below: reading 20 steps takes time
            assert out.trace.bytes_sent(rank) == 20 * 8 * elements_sent(stage, buckets)


@pytest.mark.parametrize(("fw", "stage"), in_both([(1,), (2,)], [(1,), (2,)]), indirect=["fw"])
def test_pieces_inside_a_node_and_copies_across(fw, stage):
    """Gradients are combined along both axes; only parts of them cross the nodes."""
    shard = fw.lab.shard_optimizer if stage == 1 else fw.lab.shard_gradients
    with double(fw):
        make = partial(shard, axis="gpu", replicate_axis="node")
        out = train(fw, make, 6, steps=3, mesh=Mesh(node=2, gpu=3))
        for name, want in one_device(3).items():
            close(fw.numpy(out.value[name]), want, name)
    width = Pieces(ALL, 3).width
    assert out.trace.bytes_sent(0, axis="gpu") == 3 * 8 * 2 * width * (1 + gathers_alike(fw)[1])
    assert out.trace.bytes_sent(0, axis="node") == 3 * 8 * width  # an all_reduce over 2 ranks: 2 (2-1)/2


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stage", [1, 2])
def test_bytes_of_states_in_mixed_precision(stage, num_ranks):
    """bfloat16 parameters and gradients; float32 copy, momentum and variance. To the byte, on every rank."""
    import tplab.torch as lab

    shard = {1: lab.shard_optimizer, 2: lab.shard_gradients}[stage]

    def program(state, x, y):
        model = Model(state).bfloat16()
        optimizer = shard(torch_adamw, model.parameters(), "dp", master_dtype=torch.float32)
        for step in range(2):
            torch_loss(model, x.bfloat16(), y.bfloat16()).backward()
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        return optimizer.num_bytes(), [s.dtype for s in optimizer.param_groups[0]["params"]]

    state = {name: torch.tensor(value) for name, value in start().items()}
    out = lab.run(program, Mesh(dp=num_ranks), state, *map(torch.tensor, batch()), in_specs=(P(), *BOTH))
    for index, (counted, dtypes) in enumerate(out.per_rank):
        want = state_bytes(stage, SIZES, num_ranks, index)
        padding = 2 * (Pieces(ALL, num_ranks).width - Pieces(ALL, num_ranks).num_held(index)) if stage == 2 else 0
        assert counted == (want.parameters, want.gradients + padding, want.optimizer)
        assert set(dtypes) == {torch.float32}


def test_without_a_copy_pieces_are_memory_of_the_parameters():
    import tplab.torch as lab

    def program(state, x, y):
        model = Model(state)
        optimizer = lab.shard_optimizer(torch_adamw, model.parameters(), "dp")
        torch_loss(model, x, y).backward()
        optimizer.step()
        return optimizer.num_bytes()

    state = {name: torch.tensor(value) for name, value in start().items()}
    out = lab.run(program, Mesh(dp=4), state, *map(torch.tensor, batch()), in_specs=(P(), *BOTH))
    for index, counted in enumerate(out.per_rank):  # the gradients have been handed over and are the pieces' own
        assert counted == state_bytes(1, SIZES, 4, index, StateBytes(8, 0, 16))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", ["loaded", "replaced"])
def test_pieces_that_are_not_memory_of_the_parameters_follow_them(stage, how):
    """A checkpoint is loaded after the optimizer was made: into channels_last weights, and in place of their memory."""
    import tplab.torch as lab

    shard = lab.shard_optimizer if stage == 1 else lab.shard_gradients

    def program():
        layer = nn.Conv2d(3, 4, 3, bias=False)
        if how == "loaded":
            layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = shard(partial(torch.optim.SGD, lr=0.5), layer.parameters(), "dp")
        for value in (5.0, 7.0):
            state = torch.full_like(layer.weight, value)
            if how == "loaded":
                layer.load_state_dict({"weight": state})
            else:
                layer.weight.data = state
            layer(torch.ones(1, 3, 3, 3)).sum().backward()
            optimizer.step()
            assert (layer.weight == value - 0.5).all()

    lab.run(program, Mesh(dp=2))


@pytest.mark.parametrize("fw", FRAMEWORKS, indirect=True)
@pytest.mark.parametrize("stage", [1, 2])
def test_bfloat16_follows_a_float32_copy(fw, stage):
    """bfloat16 has 8 bits: the parameters are the float32 copy, rounded (2^-8), and the copy strays from training in
    float64 by the error of bfloat16 gradients, of which AdamW makes steps of at most lr: 20 * lr if all were wrong."""
    import jax.numpy as jnp
    import optax

    wide, narrow = {"torch": (torch.float32, torch.bfloat16), "jax": (jnp.float32, jnp.bfloat16)}[fw.name]
    shard = {1: fw.lab.shard_optimizer, 2: fw.lab.shard_gradients}[stage]

    def of_torch(state, x, y):
        model = Model(state).to(narrow)
        optimizer = shard(torch_adamw, model.parameters(), "dp", master_dtype=wide)
        for _ in range(20):
            optimizer.zero_grad()
            torch_loss(model, x.to(narrow), y.to(narrow)).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    def of_jax(params, x, y):
        import jax

        optimizer = shard(jax_adamw(), "dp", master_dtype=wide)
        params = {name: p.astype(narrow) for name, p in params.items()}

        def step(carry, _):
            params, state = carry
            _, grads = optimizer.value_and_grad(jax_loss)(params, x.astype(narrow), y.astype(narrow))
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), None, 20)[0][0]

    state = {name: fw.array(value.astype(np.float32)) for name, value in start().items()}
    x, y = (fw.array(a.astype(np.float32)) for a in batch())
    program = of_torch if fw.name == "torch" else of_jax
    out = fw.lab.run(program, Mesh(dp=3), state, x, y, in_specs=(P(), *BOTH), out_specs=P())
    for name, want in one_device().items():
        got = fw.numpy(out.value[name]).astype(np.float64)
        off = np.abs(got - want) - 2**-8 * np.abs(want)
        assert off.max() < 0.25 * 20 * 1e-2  # found: 0.17 of it at most
        moved = np.abs(want - start()[name]).max()
        assert moved > 0.15  # so that standing still is not within the bound


def test_it_is_an_optimizer_of_torch():
    """Groups keep their options, a scheduler changes the rate, and a state that is loaded goes on to the last bit."""
    import tplab.torch as lab

    def program(state, x, y):
        model = Model(state)
        groups = [{"params": [model.up, model.down]}, {"params": [model.bias], "weight_decay": 0.0, "lr": 0.5}]
        optimizer = lab.shard_optimizer(torch_adamw, groups, "dp")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        saved: Any = None
        for step in range(4):
            if step == 2:
                saved = (
                    deepcopy(optimizer.state_dict()),
                    {name: p.detach().clone() for name, p in model.named_parameters()},
                )
            optimizer.zero_grad()
            torch_loss(model, x, y).backward()
            optimizer.step()
            scheduler.step()
        again = Model(saved[1])
        groups = [{"params": [again.up, again.down]}, {"params": [again.bias], "weight_decay": 0.0}]
        other = lab.shard_optimizer(torch_adamw, groups, "dp")
        other.load_state_dict(saved[0])
        for step in range(2):
            for group, base in zip(other.param_groups, (1e-2, 0.5)):
                group["lr"] = base * 0.5 ** (2 + step)
            torch_loss(again, x, y).backward()
            other.step()
            other.zero_grad()
        same = [torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters())]
        rates = [group["lr"] for group in optimizer.param_groups]
        return isinstance(optimizer, torch.optim.Optimizer), rates, same, model.bias.detach()

    state = {name: torch.tensor(value) for name, value in start().items()}
    out = lab.run(program, Mesh(dp=3), state, *map(torch.tensor, batch()), in_specs=(P(), *BOTH))
    is_one, rates, same, bias = out.per_rank[0]
    assert is_one and all(same)
    assert rates == [1e-2 / 16, 0.5 / 16]
    assert np.abs(bias.numpy() - start()["bias"]).max() > 0.5  # the bias has the larger rate


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_end_with_the_step(stage):
    """Whoever clears them, if anybody does: no step sees those of the step before."""
    import tplab.torch as lab

    shard = {1: lab.shard_optimizer, 2: lab.shard_gradients}[stage]

    def program(state, x, y, clear):
        model = Model(state)
        optimizer = shard(partial(torch.optim.SGD, lr=RATE), model.parameters(), "dp")
        for _ in range(3):
            if clear != "nobody":
                {"model": model, "optimizer": optimizer}[clear].zero_grad()
            torch_loss(model, x, y).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    state = {name: torch.tensor(value) for name, value in start().items()}
    specs = (P(), *BOTH)
    given = state, *map(torch.tensor, batch())
    model, optimizer, nobody = (
        lab.run(partial(program, clear=clear), Mesh(dp=2), *given, in_specs=specs).per_rank[0]
        for clear in ("model", "optimizer", "nobody")
    )
    assert all(map(torch.equal, model, optimizer)) and all(map(torch.equal, nobody, optimizer))


def test_a_group_that_comes_later_is_refused():
    import tplab.torch as lab

    def program():
        optimizer = lab.shard_optimizer(torch_adamw, [torch.nn.Parameter(torch.ones(3))], "dp")
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})

    with pytest.raises(RankError, match=r"add_param_group: .* cut .*; make a new optimizer of all groups"):
        lab.run(program, Mesh(dp=2))


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (lambda net: (torch_adamw, net), "Linear"),
        (lambda net: (net, torch_adamw), "function"),
        (lambda net: (torch_adamw(net.parameters()), net.parameters()), "AdamW"),
        (lambda net: (torch_adamw, net.named_parameters()), "tuple"),
        (lambda net: (torch_adamw, torch.nn.Sequential(net)), "Linear"),
    ],
)
def test_other_arguments_are_refused_in_words(arguments, kind):
    import tplab.torch as lab

    with pytest.raises(RankError, match=rf"parameters or groups of them, as in .* given an object of type {kind}"):
        lab.run(lambda: lab.shard_optimizer(*arguments(torch.nn.Linear(2, 2))), Mesh(dp=2))


def test_a_list_of_parameters_may_be_a_module():
    import tplab.torch as lab

    def program():
        held = torch.nn.ParameterList([torch.ones(3), torch.ones(2, 2)])
        optimizer = lab.shard_optimizer(torch_adamw, held)
        return sum(p.numel() for group in optimizer.inner.param_groups for p in group["params"])

    assert lab.run(program, Mesh(dp=2)).per_rank == [4, 3]


def test_a_state_has_the_master_copy():
    """Steps that bfloat16 would round away are in the copy: what is loaded goes on to the last bit. A state without
    one begins with the parameters that are there."""
    import tplab.torch as lab

    def program(state, x, y):
        def made():
            model = Model(state).bfloat16()
            make = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
            return model, lab.shard_optimizer(make, model.parameters(), "dp", master_dtype=torch.float32)

        def steps(model, optimizer):
            for _ in range(2):
                torch_loss(model, x.bfloat16(), y.bfloat16()).backward()
                optimizer.step()
            return [piece.detach().clone() for piece in optimizer.param_groups[0]["params"]]

        model, optimizer = made()
        steps(model, optimizer)
        with torch.no_grad():
            model.up.add_(1)  # far from where a new optimizer begins
        saved = deepcopy((model.state_dict(), optimizer.state_dict()))
        went_on = steps(model, optimizer)

        again, other = made()
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        resumed = steps(again, other)

        plain, fresh = made()
        plain.load_state_dict(saved[0])
        fresh.load_state_dict({"state": {}, "param_groups": saved[1]["param_groups"]})
        fresh.step()  # without gradients, which count as zeros: parameters stay
        same = [torch.equal(p, saved[0][name]) for name, p in plain.named_parameters()]
        return went_on, resumed, same

    state = {name: torch.tensor(value) for name, value in start().items()}
    out = lab.run(program, Mesh(dp=3), state, *map(torch.tensor, batch()), in_specs=(P(), *BOTH))
    for went_on, resumed, same in out.per_rank:
        assert all(map(torch.equal, went_on, resumed))
        assert any(not torch.equal(piece, piece.bfloat16().float()) for piece in went_on)
        assert all(same)


def test_a_master_copy_follows_what_the_program_writes():
    """An EMA, a loaded checkpoint, a clamp. What is not written keeps the bits that the parameters' dtype has not."""
    import tplab.torch as lab

    def program():
        weight = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        optimizer = lab.shard_optimizer(partial(torch.optim.SGD, lr=1.0), [weight], "dp", master_dtype=torch.float32)
        small = torch.full((6,), 2.0**-10, dtype=torch.bfloat16)  # too small for a bfloat16 near 1
        weight.grad = small.clone()
        optimizer.step()
        with torch.no_grad():
            weight[::2] = 5
        weight.grad = torch.zeros_like(small)
        optimizer.step()
        (piece,) = optimizer.param_groups[0]["params"]
        return weight.detach().tolist(), piece.detach().tolist()

    weights, pieces = zip(*lab.run(program, Mesh(dp=2)).per_rank, strict=True)
    assert list(weights) == [[5, 1] * 3] * 2
    assert [x for piece in pieces for x in piece] == [5, 1 - 2**-10] * 3


@pytest.mark.parametrize("stage", ["shard_optimizer", "shard_gradients"])
def test_pieces_of_experts_are_no_copies(stage):
    import tplab.torch as lab

    def program(axis):
        layer = lab.ColumnParallelLinear(4, 8, "tp")
        sgd = partial(torch.optim.SGD, lr=0.1)
        if axis:
            getattr(lab, stage)(sgd, [{"params": list(layer.parameters()), "axis": axis}], ("dp", "tp"))
        else:
            getattr(lab, stage)(sgd, layer.parameters(), ("dp", "tp"))

    with pytest.raises(RankError, match=r"a parameter \(4, 4\) is cut along 'tp': its ranks hold different pieces"):
        lab.run(lambda: program(None), Mesh(dp=2, tp=2))
    lab.run(lambda: program("dp"), Mesh(dp=2, tp=2))
    lab.run(lambda: program(None), Mesh(dp=2, tp=1))  # one rank holds it all


@pytest.mark.parametrize("fw", FRAMEWORKS, indirect=True)
def test_clipping_sees_the_whole_gradient_in_pieces(fw):
    """`reduce_gradients` gives this rank's part of the mean gradient: squares added over ranks are those of all."""

    def of_torch(state, x, y):
        model = Model(state)
        optimizer = fw.lab.shard_optimizer(torch_adamw, model.parameters(), "dp")
        torch_loss(model, x, y).backward()
        optimizer.reduce_gradients()
        own = sum((p.grad**2).sum() for p in optimizer.param_groups[0]["params"])
        optimizer.step()  # does not reduce again
        return fw.lab.all_reduce(own, "dp")

    def of_jax(params, x, y):
        import jax

        optimizer = fw.lab.shard_optimizer(jax_adamw(), "dp")
        _, grads = optimizer.value_and_grad(jax_loss)(params, x, y)
        pieces = optimizer.reduce_gradients(grads)
        return fw.lab.all_reduce(sum((g**2).sum() for g in jax.tree.leaves(pieces)), "dp")

    with double(fw):
        program = of_torch if fw.name == "torch" else of_jax
        state, (x, y) = {name: fw.array(value) for name, value in start().items()}, map(fw.array, batch())
        squares = fw.lab.run(program, Mesh(dp=4), state, x, y, in_specs=(P(), *BOTH)).per_rank[3]
    model = Model({name: torch.tensor(value) for name, value in start().items()})
    torch_loss(model, *map(torch.tensor, batch())).backward()
    whole = [p.grad for p in model.parameters() if p.grad is not None]
    close(fw.numpy(squares), np.sum([(grad**2).sum().item() for grad in whole]))


@pytest.mark.parametrize(("stage", "num_unused"), [(1, 0), (2, 0), (2, 1)])
def test_copies_of_a_pipeline(stage, num_unused):
    """train_batch calls hooks outside of any backward pass; what a stage does not use leaves in the step."""
    import tplab.torch as lab

    shard = {1: lab.shard_optimizer, 2: lab.shard_gradients}[stage]
    spec = LayerSpec(nn.Linear, 4, 4, dtype=torch.float64)

    def program(x, y):
        schedule = one_f_one_b(2, 2)
        stages = lab.stages_of([spec] * 4, schedule)
        if num_unused:
            unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
            stages[lab.axis_index("pp")].register_parameter("unused", unused)
        make = partial(torch.optim.SGD, lr=RATE, momentum=0.9)
        optimizer = shard(make, stages.parameters(), "dp", bucket_bytes=200)
        for _ in range(2):
            optimizer.zero_grad()
            lab.train_batch(schedule, stages, lab.split_batch(x, y, 2), nn.functional.mse_loss)
            optimizer.step()
        return [p.detach() for p in stages.parameters()]

    x, y = torch.tensor(numbers(8, 4)), torch.tensor(numbers(8, 4, seed=1))
    got = lab.run(program, Mesh(dp=2, pp=2), x, y, in_specs=P("dp")).per_rank
    want = lab.run(program, Mesh(dp=1, pp=2), x, y).per_rank
    for rank, parameters in enumerate(got):
        for parameter, expected in zip(parameters, want[rank % 2], strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-15)
    assert len(got[0]) == 4 + num_unused


def test_frozen_and_tied_parameters():
    import tplab.torch as lab

    def program(state, x, y):
        model = Model(state)
        model.bias.requires_grad_(False)
        model.tied = model.up
        optimizer = lab.shard_optimizer(torch_adamw, [model.up, model.bias, model.tied, model.down], "dp")
        torch_loss(model, x, y).backward()
        optimizer.step()
        return len(optimizer.param_groups[0]["params"]), model.bias.detach()

    state = {name: torch.tensor(value) for name, value in start().items()}
    out = lab.run(program, Mesh(dp=2), state, *map(torch.tensor, batch()), in_specs=(P(), *BOTH))
    assert out.per_rank[0][0] == 2
    assert torch.equal(out.per_rank[1][1], state["bias"])


def test_jax_adds_up_gradients_by_itself():
    """With jax.grad of replicated parameters an all_reduce comes first: 3 M are sent, and the step is the same. What it
    gives is the mean only if the losses' mean was differentiated, which is for the program to say."""
    import jax
    import optax

    import tplab.jax as lab

    def program(params, x, y, **says):
        optimizer = lab.shard_optimizer(jax_adamw(), "dp", **says)
        mean = lambda *args: lab.all_reduce(jax_loss(*args), "dp", "mean")  # noqa: E731
        updates, _ = optimizer.update(jax.grad(mean)(params, x, y), optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    with double(FRAMEWORKS["jax"]()):
        state, (x, y) = start(), batch()
        with pytest.raises(
            ValueError, match=r"\['bias'\] is the same on every rank of 'dp'.*: is_reduced=True; or make"
        ):
            lab.run(program, Mesh(dp=3), state, x, y, in_specs=(P(), *BOTH), out_specs=P())
        says_so = partial(program, is_reduced=True)
        out = lab.run(says_so, Mesh(dp=3), state, x, y, in_specs=(P(), *BOTH), out_specs=P())
        for name, want in one_device(1).items():
            close(out.value[name], want, name)
    assert out.trace.bytes_sent(0, op="all_reduce") > 0
    if gathers_alike(FRAMEWORKS["jax"]())[0] == "all_gather":
        assert out.trace.bytes_sent(0, op="all_gather") == 8 * 2 * Pieces(ALL, 3).width
    assert out.trace.bytes_sent(0, op="reduce_scatter") == 0


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize(
    ("axis", "copies", "options", "message"),
    [
        (("ep", "dp"), (), {}, r"cut along all of axis=\('ep', 'dp'\) have no copies"),
        ("dp", "dp", {"replicate_axis": "ep"}, "added up along replicate_axis='ep'"),
        (("ep", "dp"), "tp", {}, r"'tp' is a part of axis=\('ep', 'dp'\)"),
    ],
)
def test_experts_have_copies_along_some_axes(name, axis, copies, options, message):
    """`copies` are the axes along which ranks hold copies of them; in JAX, a spec names the others."""
    if name == "jax" and copies == "tp":
        return  # a spec cannot say that
    fw = FRAMEWORKS[name]()
    cut = tuple(name for name in ("ep", "dp") if name not in copies)

    def of_torch():
        groups = [{"params": [torch.nn.Parameter(torch.ones(4))], "axis": copies}]
        fw.lab.shard_optimizer(torch_adamw, groups, axis, **options)

    def of_jax():
        return fw.lab.shard_optimizer(jax_adamw(), axis, specs=P(cut), **options).init(fw.array(np.ones(4)))

    with pytest.raises((MeshError, RankError), match=message):
        fw.lab.run(of_torch if name == "torch" else of_jax, Mesh(dp=2, ep=2, tp=2))


def test_jax_types_and_is_reduced_must_agree():
    import jax

    import tplab.jax as lab

    def program(params, x, y):
        optimizer = lab.shard_optimizer(jax_adamw(), "dp", is_reduced=True)
        return optimizer.reduce_gradients(optimizer.value_and_grad(jax_loss)(params, x, y)[1])

    def added_up_over_nodes(params, x, y):
        optimizer = lab.shard_optimizer(jax_adamw(), "dp", replicate_axis="node")
        own = jax.tree.map(lambda p: lab.copy_to(p, "dp"), params)
        return optimizer.reduce_gradients(jax.grad(jax_loss)(own, x, y))

    state, (x, y) = start(), batch()
    with pytest.raises(ValueError, match=r"\['bias'\] differs along 'dp' by JAX's types, .* leave is_reduced out"):
        lab.run(program, Mesh(dp=2), state, x, y, in_specs=(P(), *BOTH))
    both = P(("node", "dp"))
    with pytest.raises(ValueError, match=r"\['bias'\] is the same on every rank of 'node'"):
        lab.run(added_up_over_nodes, Mesh(node=2, dp=2), state, x, y, in_specs=(P(), both, both))


@pytest.mark.parametrize("stage", [1, 2])
def test_whole_gradients_are_let_go_in_stage_2(stage):
    """Of 8 layers, a bucket each: stage 1 has all whole gradients at the end of the backward pass; stage 2 has two at
    most, one that fills and one on its way (its gradient, its message, the message begun), and pieces of the others."""
    import tplab.torch as lab

    width, depth, num_ranks = 64, 8, 4
    layer_bytes = 4 * width * width
    shard = {1: lab.shard_optimizer, 2: lab.shard_gradients}[stage]

    def program():
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(depth)))
        shard(torch_adamw, model.parameters(), "dp", bucket_bytes=layer_bytes)
        loss = model(torch.ones(1, width)).sum()
        with lab.LiveBytes() as live:
            loss.backward()
        return live.peak, live.now()

    peak, after = lab.run(program, Mesh(dp=num_ranks)).per_rank[0]
    whole, pieces = depth * layer_bytes, depth * layer_bytes // num_ranks
    if stage == 1:
        assert whole <= after <= peak < whole + layer_bytes
    else:
        assert after == pieces
        assert peak < pieces + 4 * layer_bytes
