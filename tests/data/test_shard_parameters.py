"""ZeRO stage 3 beside one device: parameters, what is sent, the bytes of real buffers, and torch's own FSDP2."""

from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tplab.jax as on_jax
import tplab.torch as lab
from tests.data.zero import DECAY, RATE, elements_sent, jax_adamw, torch_adamw
from tests.frameworks import FRAMEWORKS, Framework
from tests.sharded import close, double, numbers
from tplab import Mesh, P
from tplab.data.pieces import Pieces
from tplab.data.zero import StateBytes, state_bytes
from tplab.errors import MeshError, RankError
from tplab.schedules import one_f_one_b
from tplab.trace.overlap import overlap
from tplab.trace.traffic import Traffic

FIRST, BLOCK, LAST = ((5, 7), (7,)), ((7, 7), (7,)), ((7, 3), (3,))
UNITS = (FIRST, BLOCK, BLOCK, LAST)
SIZES = [int(np.prod(shape)) for unit in UNITS for shape in unit]
X, Y = numbers(24, 5, seed=1), numbers(24, 3, seed=2)
STEPS = 20


def start() -> list[dict[str, np.ndarray]]:
    return [
        {"weight": numbers(*weight, seed=7 * place), "bias": numbers(*bias, seed=7 * place + 1)}
        for place, (weight, bias) in enumerate(UNITS)
    ]


class Layer(nn.Module):
    def __init__(self, state: dict[str, np.ndarray]):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.tensor(state[name])) for name in ("weight", "bias"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.bias)


def model() -> nn.Sequential:
    return nn.Sequential(*map(Layer, start()))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    ((net(x) - y) ** 2).mean().backward()
    optimizer.step()


def one_device(steps: int = STEPS, net: nn.Module | None = None) -> list[np.ndarray]:
    net = model() if net is None else net
    optimizer = torch_adamw(net.parameters())
    for _ in range(steps):
        step(net, optimizer, torch.tensor(X), torch.tensor(Y))
    return [p.detach().numpy() for p in net.parameters()]


def whole(parameters: Any, shapes: Any, axis: Any) -> list[torch.Tensor]:
    """All pieces put together."""
    return [lab.all_gather(p.detach(), axis).view(shape) for p, shape in zip(parameters, shapes)]


def jax_layer(params: Any, x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.tanh(x @ params["weight"] + params["bias"])


def jax_steps(net: Any, pieces: Any, x: Any, y: Any, steps: int) -> Any:
    import jax
    import optax

    optimizer = jax_adamw()

    def one(carry: Any, _: Any) -> Any:
        pieces, state = carry
        grads = jax.grad(lambda p: ((net(p, x) - y) ** 2).mean())(pieces)
        updates, state = optimizer.update(grads, state, pieces)
        return (optax.apply_updates(pieces, updates), state), None

    return jax.lax.scan(one, (pieces, optimizer.init(pieces)), None, steps)[0][0]


def train(fw: Framework, mesh: Mesh, steps: int, **options: Any) -> tuple[list[np.ndarray], Any]:
    """The parameters that ranks have trained together, and a function that gives the trace."""
    names, axis = mesh.axis_names, options.get("axis", "dp")
    if fw.name == "torch":

        def program(x: torch.Tensor, y: torch.Tensor) -> Any:
            net = lab.shard_parameters(model(), **options)
            optimizer = torch_adamw(net.parameters())
            for _ in range(steps):
                step(net, optimizer, x, y)
            return [p.detach() for p in net.parameters()]

        out = lab.run(program, mesh, X, Y, in_specs=P(names))
        shapes = [shape for unit in UNITS for shape in unit]
        held = [out.per_rank[rank] for rank in mesh.group(0, axis)]
        found = [torch.cat([h[place] for h in held]).view(shape).numpy() for place, shape in enumerate(shapes)]
        return found, lambda: out.trace
    net = on_jax.shard_parameters([jax_layer] * len(UNITS), **options)
    spec = P(axis)
    params = [{name: fw.array(value) for name, value in state.items()} for state in start()]
    out = on_jax.run(
        lambda p, x, y: jax_steps(net, net.shard(p), x, y, steps),
        mesh,
        params,
        fw.array(X),
        fw.array(Y),
        in_specs=(P(), P(names), P(names)),
        out_specs=spec,
        keep_values=0,
    )
    wholes = on_jax.run(net.gather, mesh, out.value, in_specs=spec).per_rank[-1]
    return [np.asarray(state[name]) for state in wholes for name in ("weight", "bias")], lambda: out.trace


def sent(num_ranks: int, passes: tuple[int, ...]) -> int:
    """Elements, where each unit's message travels so often."""
    return sum((num_ranks - 1) * n * Pieces(unit, num_ranks).width for n, unit in zip(passes, UNITS))


@pytest.mark.parametrize(("name", "num_ranks"), [*(("torch", n) for n in (1, 2, 3, 4, 8)), ("jax", 3)])
def test_twenty_steps_are_those_of_one_device(name, num_ranks):
    """And each sends three times the parameters, but that nothing needs the first unit's again: its input has no
    gradient."""
    fw = FRAMEWORKS[name]()
    with double(fw):
        found, trace = train(fw, Mesh(dp=num_ranks), STEPS)
        for got, want in zip(found, one_device(), strict=True):
            close(got, want)
        if name == "torch":  # reading 20 steps of JAX takes time, and two say the same below
            assert trace().bytes_sent(num_ranks - 1) == STEPS * 8 * sent(num_ranks, (2, 3, 3, 3))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_whole_parameters_that_are_kept_are_not_sent_again(name):
    fw = FRAMEWORKS[name]()
    with double(fw):
        found, trace = train(fw, Mesh(dp=4), 2, reshard_after_forward=False)
        for got, want in zip(found, one_device(2), strict=True):
            close(got, want)
        assert trace().bytes_sent(0) == 2 * 8 * sent(4, (2, 2, 2, 2))
        assert sent(4, (2, 2, 2, 2)) == elements_sent(3, [Pieces(u, 4) for u in UNITS], reshard_after_forward=False)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_volume_is_three_times_the_parameters(name):
    """Where the input has a gradient too, as that of every layer but the first."""
    fw = FRAMEWORKS[name]()

    def of_torch(x, y):
        net = lab.shard_parameters(model())
        ((net(x.requires_grad_()) - y) ** 2).mean().backward()
        return x.grad, [p.grad for p in net.parameters()]

    def of_jax(x, y):
        import jax

        net: Any = on_jax.shard_parameters([jax_layer] * len(UNITS))
        pieces = net.shard([{n: fw.array(v) for n, v in state.items()} for state in start()])
        return jax.grad(lambda x, p: ((net(p, x) - y) ** 2).mean(), (0, 1))(x, pieces)

    with double(fw):
        program = of_torch if name == "torch" else of_jax
        out = fw.lab.run(program, Mesh(dp=3), fw.array(X), fw.array(Y), in_specs=P("dp"), keep_values=0)
        assert out.trace.bytes_sent(1) == 8 * elements_sent(3, [Pieces(unit, 3) for unit in UNITS])


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_pieces_inside_a_node_and_copies_across(name):
    fw = FRAMEWORKS[name]()
    with double(fw):
        found, trace = train(fw, Mesh(node=2, gpu=3), 2, axis="gpu", replicate_axis="node")
        for got, want in zip(found, one_device(2), strict=True):
            close(got, want)
        assert trace().bytes_sent(0, axis="gpu") == 2 * 8 * sent(3, (2, 3, 3, 3))
        width = sum(Pieces(unit, 3).width for unit in UNITS)
        assert trace().bytes_sent(0, axis="node") == 2 * 8 * width  # all_reduce over 2 ranks: 2 (2-1)/2


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_second_pieces_keep_the_second_gather_inside_the_node(name):
    fw = FRAMEWORKS[name]()
    mesh = Mesh(node=2, gpu=2)
    with double(fw):
        found, trace = train(fw, mesh, 2, axis=("node", "gpu"), reshard_after_forward="gpu")
        for got, want in zip(found, one_device(2), strict=True):
            close(got, want)
        assert trace().bytes_sent(0, axis=("node", "gpu")) == 2 * 8 * sent(4, (2, 2, 2, 2))
        inside = sum(2 * Pieces(unit, 4).width for unit in UNITS[1:])  # half of each message, to one other rank
        assert trace().bytes_sent(0, axis="gpu") == 2 * 8 * inside


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_bytes_of_states_in_mixed_precision(num_ranks):
    """float32 pieces, gradients and averages, computed with in bfloat16: 16 bytes per parameter, of a rank's part."""

    def program(x, y):
        net = lab.shard_parameters(model().float(), compute_dtype=torch.bfloat16)
        optimizer = torch_adamw(net.parameters())
        optimizer.zero_grad()
        loss = ((net(x.bfloat16()) - y.bfloat16()) ** 2).mean()
        loss.backward()
        optimizer.step()
        parameters = list(net.parameters())
        states = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
        return [sum(x.nbytes for x in kind) for kind in (parameters, gradients(net), states)]

    out = lab.run(program, Mesh(dp=num_ranks), X, Y, in_specs=P("dp"))
    for index, counted in enumerate(out.per_rank):
        assert tuple(counted) == state_bytes(3, SIZES, num_ranks, index, StateBytes(4, 4, 8))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_bfloat16_strays_by_its_rounding(name):
    """The pieces stay float32; AdamW makes steps of at most lr from gradients that bfloat16 (2^-8) has rounded. After
    20 steps parameters have moved by up to 20 lr, and stray by less than a quarter of that."""
    fw = FRAMEWORKS[name]()
    narrow: Any = {"torch": torch.bfloat16, "jax": "bfloat16"}[name]
    states = [{n: v.astype(np.float32) for n, v in state.items()} for state in start()]

    def of_torch(x, y):
        net = lab.shard_parameters(nn.Sequential(*map(Layer, states)), compute_dtype=narrow, reduce_dtype=torch.float32)
        optimizer = torch_adamw(net.parameters())
        for _ in range(STEPS):
            step(net, optimizer, x.bfloat16(), y)
        return whole(net.parameters(), [shape for unit in UNITS for shape in unit], "dp")

    def of_jax(x, y):
        import jax

        net: Any = on_jax.shard_parameters([jax_layer] * len(UNITS), compute_dtype=narrow, reduce_dtype="float32")
        pieces = net.shard([{n: fw.array(v) for n, v in state.items()} for state in states])
        trained = net.gather(jax_steps(net, pieces, x.astype(narrow), y, STEPS))
        return [state[n] for state in trained for n in ("weight", "bias")] + jax.tree.leaves(pieces)[:0]

    program = of_torch if name == "torch" else of_jax
    inputs = (fw.array(a.astype(np.float32)) for a in (X, Y))
    out = fw.lab.run(program, Mesh(dp=3), *inputs, in_specs=P("dp"))
    for got, want, begin in zip(out.per_rank[2], one_device(), (v for s in start() for v in s.values()), strict=True):
        assert np.abs(fw.numpy(got) - want).max() < STEPS * RATE / 4
        assert np.abs(want - begin).max() > STEPS * RATE / 2  # so that standing still is not within the bound


# ----------------------------------------------------------------------------------------------- other people's models


class Tied(nn.Module):
    """A word's vector at both ends, a frozen layer, a layer that two blocks share, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(11, 7)
        shared = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), shared) for _ in range(3))
        self.blocks[1].get_submodule("1").requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.words.weight
        self.checkpoints = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * self.scale
        for block in self.blocks:
            again = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            x = x + again
        return self.head(x)


IDS = np.random.default_rng(0).integers(0, 11, (12, 5))


def tied_loss(net: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("options", [{}, {"prefetch": False}, {"reshard_after_forward": False}])
def test_tied_frozen_and_shared_parameters(options, checkpoints):
    """In two microbatches, whose gradients add up; evaluation in between gathers what it needs."""

    def train(net: Any, ids: torch.Tensor, params: Any) -> torch.Tensor:
        net.checkpoints = checkpoints
        optimizer = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY)
        for _ in range(3):
            optimizer.zero_grad()
            for part in ids.chunk(2):
                tied_loss(net, part).backward()
            optimizer.step()
            with torch.no_grad():
                net(ids)
        return net(ids)

    def program(ids):
        net = lab.shard_parameters(Tied().double(), **options)
        logits = train(net, ids, (p for p in net.parameters() if p.requires_grad))
        return logits, len(list(net.parameters())), {name for name, _ in net.named_parameters()}

    alone = Tied().double()
    names = {name for name, _ in alone.named_parameters()}
    halves = torch.tensor(IDS).view(3, 2, 2, 5).transpose(0, 1).reshape(12, 5)  # what ranks' halves are together
    want = train(alone, halves, (p for p in alone.parameters() if p.requires_grad))
    out = lab.run(program, Mesh(dp=3), IDS, in_specs=P("dp"))
    got = torch.cat([logits for logits, *_ in out.per_rank])
    want = want.view(2, 3, 2, 5, 11).transpose(0, 1).reshape(12, 5, 11)
    close(got.detach().numpy(), want.detach().numpy())
    assert all(found == names and number == len(names) for _, number, found in out.per_rank)


class Headed(nn.Module):
    """The words' vectors are read first and last, but the backward pass needs them only for what was last."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.words.weight.T


def test_what_the_backward_pass_needs_first_is_not_gathered_at_its_end():
    """Each unit twice, also where the graph is used twice."""

    def program(ids, times):
        net = lab.shard_parameters(Headed())
        loss = tied_loss(net, ids)
        for left in reversed(range(times)):
            loss.backward(retain_graph=left > 0)

    for times in (1, 2):
        out = lab.run(program, Mesh(dp=3), IDS, times, in_specs=(P("dp"), None))
        message = 2 * 4 * sum(Pieces((shape,), 3).width for shape in ((12, 6), *[(6, 6)] * 3))
        assert Traffic.of_trace(out.trace)["all_gather"].bytes == (1 + times) * message


class Skipping(nn.Sequential):
    """Layers, of which a call may leave some out."""

    without: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self):
            x = x if place in self.without else layer(x)
        return x


def in_two_parts(net: Skipping, x: Any, y: Any, first: Any) -> None:
    """A backward pass inside of `first`, and one of other samples, without a layer."""
    net.without = ()
    with first:
        ((net(x[::2]) - y[::2]) ** 2).mean().backward()
    net.without = (2,)
    ((net(x[1::2]) - y[1::2]) ** 2).mean().backward()


@pytest.mark.parametrize("mesh", [Mesh(dp=3), Mesh(dp=2, node=2)], ids=str)
def test_gradients_of_microbatches_are_sent_once(mesh):
    """Also those of the layer that the last of them leaves out. Until then every rank keeps them whole."""

    def program(x, y):
        copies: Any = {"replicate_axis": "node"} if "node" in mesh.axis_names else {}
        net = lab.shard_parameters(Skipping(*map(Layer, start())), **copies)
        optimizer, kept = torch_adamw(net.parameters()), []

        @contextmanager
        def counted():
            with lab.LiveBytes() as live, lab.no_sync(net):
                yield
                kept.append(live.now())
            assert gradients(net) == [None] * len(SIZES)

        for _ in range(3):
            optimizer.zero_grad()
            in_two_parts(net, x, y, counted())
            optimizer.step()
        return [p.detach() for p in net.parameters()], kept

    out, num_ranks = lab.run(program, mesh, X, Y, in_specs=P(mesh.axis_names)), mesh.axis_size("dp")
    alone = Skipping(*map(Layer, start()))
    optimizer = torch_adamw(alone.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        in_two_parts(alone, torch.tensor(X), torch.tensor(Y), nullcontext())
        optimizer.step()
    for place, want in enumerate(alone.parameters()):
        found = torch.cat([out.per_rank[rank][0][place] for rank in mesh.group(0, "dp")])
        close(found.view(want.shape).numpy(), want.detach().numpy())
    width = 8 * sum(Pieces(unit, num_ranks).width for unit in UNITS)
    assert out.per_rank[0][1] == [num_ranks * width] * 3
    traffic = Traffic.of_trace(out.trace)
    assert traffic["reduce_scatter"].bytes == 3 * (num_ranks - 1) * width
    assert "all_reduce" not in traffic or traffic["all_reduce"].bytes == 3 * width  # of 2 nodes: 2 (2-1)/2


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


def test_after_a_backward_pass_that_failed_the_next_one_sends_everything():
    def program(x, y, fails):
        net = lab.shard_parameters(Skipping(*map(Layer, start())))
        if fails:
            with lab.no_sync(net):
                ((net(x) - y) ** 2).mean().backward()
            y_late = Fails.apply(net[0](x))
            for layer in list(net)[1:]:
                y_late = layer(y_late)
            loss = y_late.sum()
            with pytest.raises(ArithmeticError):
                loss.backward()
            net.zero_grad()
            with pytest.raises(KeyError), lab.no_sync(net):
                raise KeyError
        in_two_parts(net, x, y, lab.no_sync(net))
        return gradients(net)

    clean, failed = (
        lab.run(program, Mesh(dp=3), X, Y, fails, in_specs=(P("dp"), P("dp"), None)) for fails in (False, True)
    )
    for want, found in zip(clean.per_rank, failed.per_rank, strict=True):
        assert all(map(torch.equal, want, found))


def test_what_an_exception_interrupts_is_not_added_to_the_next_batch():
    def program(x, y, fails):
        net = lab.shard_parameters(Skipping(*map(Layer, start())))
        if fails:
            with suppress(KeyError), lab.no_sync(net):
                ((net(x) - y) ** 2).mean().backward()
                raise KeyError
        ((net(x) - y) ** 2).mean().backward()
        return gradients(net)

    clean, failed = (
        lab.run(program, Mesh(dp=3), X, Y, fails, in_specs=(P("dp"), P("dp"), None)) for fails in (False, True)
    )
    for want, found in zip(clean.per_rank, failed.per_rank, strict=True):
        assert all(map(torch.equal, want, found))


def test_no_sync_may_be_nested_and_adds_to_gradients_that_were_there():
    def program(x, y, is_nested):
        net = lab.shard_parameters(Skipping(*map(Layer, start())))
        with lab.no_sync(net):
            with lab.no_sync(net) if is_nested else nullcontext():
                pass
            ((net(x) - y) ** 2).mean().backward()
        assert gradients(net) == [None] * len(SIZES)
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        net.without = (2,)
        ((net(x) - y) ** 2).mean().backward()
        return gradients(net)

    nested, plain = (
        lab.run(program, Mesh(dp=3), X, Y, way, in_specs=(P("dp"), P("dp"), None)) for way in (True, False)
    )
    alone = Skipping(*map(Layer, start()))
    for without in ((), (2,)):
        alone.without = without
        ((alone(torch.tensor(X)) - torch.tensor(Y)) ** 2).mean().backward()
    for rank in range(3):
        assert all(map(torch.equal, nested.per_rank[rank], plain.per_rank[rank]))
    for place, want in enumerate(alone.parameters()):
        assert want.grad is not None
        found = torch.cat([rank[place] for rank in nested.per_rank])[: want.numel()]
        close(found.view(want.shape).numpy(), 1 + want.grad.numpy())


def test_in_jax_gradients_of_whole_parameters_are_sent_once():
    """What the documentation says instead of `no_sync`: gather once, add up, and cut the mean."""
    import jax

    def program(x, y):
        net: Any = on_jax.shard_parameters([jax_layer] * len(UNITS))
        pieces = net.shard([{n: jax.numpy.asarray(v) for n, v in state.items()} for state in start()])

        def loss(wholes, x, y):
            for whole in wholes:
                x = jax_layer(whole, x)
            return ((x - y) ** 2).mean()

        wholes, total = net.gather(pieces), None
        for part in (slice(0, None, 2), slice(1, None, 2)):
            grads = jax.grad(loss)(wholes, x[part], y[part])
            total = grads if total is None else jax.tree.map(jax.numpy.add, total, grads)
        return net.shard(on_jax.average_gradients(total, "dp"))

    with double(FRAMEWORKS["jax"]()):
        out = on_jax.run(program, Mesh(dp=3), X, Y, in_specs=P("dp"), out_specs=P("dp"), keep_values=0)
        assert "reduce_scatter" not in Traffic.of_trace(out.trace)
        alone = model()
        for part in (slice(0, None, 2), slice(1, None, 2)):
            ((alone(torch.tensor(X[part])) - torch.tensor(Y[part])) ** 2).mean().backward()
        pieces = [state[name] for state in out.value for name in ("weight", "bias")]
        for want, sharded in zip(alone.parameters(), pieces, strict=True):
            assert want.grad is not None
            close(np.asarray(sharded.piece)[: want.numel()].reshape(want.shape), want.grad.numpy())


class Extractor(nn.Module):
    """Layers that run without gradients between others that learn."""

    def __init__(self, num_frozen: int, first: int):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(5, 5).double() for _ in range(5))
        self.frozen = range(first, first + num_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            with torch.set_grad_enabled(place not in self.frozen):
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("secondary", [False, True])
@pytest.mark.parametrize(("num_frozen", "first"), [(2, 0), (2, 1)])
def test_a_layer_after_one_without_gradients_learns(num_frozen, first, secondary):
    """What is prefetched while a no_grad layer runs is gathered once, and has its gradient all the same."""

    def program(x, prefetch):
        about: Any = {"axis": ("node", "gpu"), "reshard_after_forward": "gpu"} if secondary else {"axis": "gpu"}
        net = lab.shard_parameters(Extractor(num_frozen, first), prefetch=prefetch, **about)
        net(x).square().mean().backward()
        return gradients(net)

    x = numbers(12, 5)
    alone = Extractor(num_frozen, first)
    alone(torch.tensor(x)).square().mean().backward()
    mesh = Mesh(node=2, gpu=2) if secondary else Mesh(gpu=2)
    outs = [lab.run(program, mesh, x, prefetch, in_specs=(P(mesh.axis_names), None)) for prefetch in (True, False)]
    for out in outs:
        for place, parameter in enumerate(alone.parameters()):
            held = [grads[place] for grads in out.per_rank]
            assert (held[0] is None) == (parameter.grad is None)
            if parameter.grad is not None:
                close(torch.cat(held).view(parameter.shape).numpy(), parameter.grad.numpy())
    assert outs[0].trace.bytes_sent(0) == outs[1].trace.bytes_sent(0)


def test_an_error_in_a_layer_leaves_pieces_behind():
    def program(x):
        net = lab.shard_parameters(model())
        with pytest.raises(RuntimeError):
            net(x[:, :2])
        return net(x), next(net.parameters()).shape

    out = lab.run(program, Mesh(dp=2), X)
    assert out.per_rank[0][1] == (18,)
    close(out.per_rank[0][0].detach().numpy(), model()(torch.tensor(X)).detach().numpy())


@pytest.mark.parametrize(
    ("make", "units", "message"),
    [
        (model, lambda net: [nn.Linear(2, 2)], "unit 0, Linear, is not in the model"),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), lambda net: None, "the model is a ModuleList, which has no forward"),
        (lambda: nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), list, "unit 0 is a ModuleList, which has no forward"),
    ],
)
def test_what_is_no_unit(make, units, message):
    def program():
        net = make()
        lab.shard_parameters(net, units=units(net))

    with pytest.raises(Exception, match=message):
        lab.run(program, Mesh(dp=2))


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize(
    ("shard", "options", "message"),
    [
        ("parameters", {"reshard_after_forward": "tp"}, "reshard_after_forward is 'tp', and axis is 'dp': .* part of"),
        ("parameters", {"reshard_after_forward": ("dp", "tp")}, "must name axes that are part of"),
        ("parameters", {"replicate_axis": "dp"}, "replicate_axis is 'dp', and axis is 'dp': .* not in axis"),
        ("optimizer", {"axis": ("dp", "tp"), "replicate_axis": "tp"}, r"replicate_axis is 'tp', and axis is \('dp'"),
        ("gradients", {"replicate_axis": ("tp", "dp")}, "not in axis"),
        *((each, {"op": "max"}, "op is 'max'; it must be one of sum, mean")
          for each in ("parameters", "optimizer", "gradients")),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(name, shard, options, message):
    fw = FRAMEWORKS[name]()
    fn = getattr(fw.lab, f"shard_{shard}")

    def of_torch(x, y):
        if shard == "parameters":
            fn(model(), **options)
        else:
            fn(torch_adamw, model().parameters(), **options)

    def of_jax(x, y):
        params = {n: fw.array(v) for n, v in start()[0].items()}
        if shard == "parameters":
            net = fn(jax_layer, **options)
            return net(net.shard(params), x)
        return fn(jax_adamw(), **options).value_and_grad(lambda p: jax_layer(p, x).sum())(params)[0]

    program = of_torch if name == "torch" else of_jax
    with pytest.raises((MeshError, RankError, ValueError), match=message):
        fw.lab.run(program, Mesh(dp=2, tp=2), fw.array(X), fw.array(Y), in_specs=P(("dp", "tp")))


# ------------------------------------------------------------------------------- what is combined is not combined again

ALREADY = "shard_parameters makes its gradient the mean over 'gpu' in the backward pass, so nothing is left to average"


def averages(net: nn.Module, how: str, axis: Any) -> None:
    """One backward pass of a rank's part of the batch, and the mean over some axes in one of three ways."""
    rank, ranks = lab.axis_index(("node", "gpu")), lab.axis_size(("node", "gpu"))
    x, y = (torch.tensor(each).chunk(ranks)[rank] for each in (X, Y))
    if how == "train_batch":
        pairs = lab.split_batch(x, y, 2)
        lab.train_batch(one_f_one_b(1, 2), net, pairs, lambda out, y: ((out - y) ** 2).mean(), data_axis=axis)
        return
    if how == "data_parallel":
        lab.data_parallel(net, axis)
    ((net(x) - y) ** 2).mean().backward()
    if how == "average_gradients":
        lab.average_gradients(net, axis)


@pytest.mark.parametrize("how", ["train_batch", "data_parallel", "average_gradients"])
def test_a_mean_over_other_axes_is_right_and_a_second_one_over_the_same_is_refused(how):
    """Before, the second one divided gradients by the number of ranks once more."""
    net = model()
    right = torch.autograd.grad(((net(torch.tensor(X)) - torch.tensor(Y)) ** 2).mean(), list(net.parameters()))

    def program(axis: Any) -> list[torch.Tensor]:
        mine = lab.shard_parameters(model(), "gpu")
        averages(mine, how, axis)
        return whole([p.grad for p in mine.parameters()], [grad.shape for grad in right], "gpu")

    mesh = Mesh(node=2, gpu=2, pp=1)
    for grad, expected in zip(lab.run(lambda: program("node"), mesh).per_rank[1], right, strict=True):
        close(grad, expected.numpy())
    with pytest.raises(RankError, match=ALREADY):
        lab.run(lambda: program(("node", "gpu")), Mesh(node=1, gpu=2, pp=1))


def test_in_a_pipeline_in_jax_too():
    import jax.numpy as jnp

    def program(average: bool, op: str, x: Any, w: Any) -> Any:
        layer = on_jax.shard_parameters(lambda w, x: jnp.tanh(x @ w), "dp", op=op)
        stage, pairs = (layer, layer.shard(w)), on_jax.split_batch(x, x, 2)
        about = {"data_axis": "dp", "average": average}
        return layer.gather(on_jax.train_batch(one_f_one_b(1, 2), stage, pairs, lambda y, _: (y**2).mean(), **about)[1])

    def run(average: bool, op: str = "mean") -> Any:
        args, specs = (numbers(4, 3, seed=1), numbers(3, 3, seed=2)), (P("dp"), P())
        fn, mesh = lambda x, w: program(average, op, x, w)[None], Mesh(dp=2, pp=1)
        return on_jax.run(fn, mesh, *args, in_specs=specs, out_specs=P(("dp", "pp"))).value[0]

    with pytest.raises(ValueError, match="a ShardedLayer: shard_parameters makes its gradient the mean over 'dp'"):
        run(True)
    np.testing.assert_allclose(run(True, "sum"), run(False), rtol=1e-6)


def test_a_layer_in_jax_may_have_mean_axes_of_its_own():
    class Norm:
        mean_axes = (-1,)

        def __call__(self, w: Any, x: Any) -> Any:
            return (x - x.mean(self.mean_axes, keepdims=True)) @ w

    def program(x: Any, w: Any) -> Any:
        pairs = on_jax.split_batch(x, x, 2)
        return on_jax.train_batch(one_f_one_b(1, 2), (Norm(), w), pairs, lambda y, _: (y**2).mean(), data_axis="dp")[0]

    x, w = numbers(4, 3, seed=1), numbers(3, 3, seed=2)
    out = on_jax.run(program, Mesh(dp=2, pp=1), x, w, in_specs=(P("dp"), P()), out_specs=P())
    np.testing.assert_allclose(out.value, (((x - x.mean(-1, keepdims=True)) @ w) ** 2).mean(), rtol=1e-5)


@pytest.mark.parametrize("mine", ["parameters", "gradients"])
@pytest.mark.parametrize("other", ["optimizer", "gradients"])
def test_a_sharded_optimizer_does_not_take_what_the_backward_pass_combines(mine, other):
    """Before, it mixed up the pieces of shard_parameters, and found no gradient after those of shard_gradients."""

    def program():
        net = model()
        if mine == "parameters":
            lab.shard_parameters(net, "dp")
        else:
            lab.shard_gradients(torch_adamw, net.parameters(), "dp")
        getattr(lab, f"shard_{other}")(torch_adamw, net.parameters(), "dp")

    with pytest.raises(RankError, match=r"the gradient of this parameter \[\d.*\] is combined during the backward"):
        lab.run(program, Mesh(dp=2))


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_a_sharded_optimizer_along_another_axis_shares_the_states_of_pieces(shard):
    """Pieces within a node, and their states over nodes: the gradients of each are combined once."""

    def program(x, y):
        net = lab.shard_parameters(model(), "gpu")
        optimizer = getattr(lab, f"shard_{shard}")(torch_adamw, net.parameters(), "node")
        for _ in range(STEPS):
            step(net, optimizer, x, y)
        return list(lab.gather_state(net).values())

    specs = P(("node", "gpu")), P(("node", "gpu"))
    for held in lab.run(program, Mesh(node=2, gpu=2), torch.tensor(X), torch.tensor(Y), in_specs=specs).per_rank:
        for got, expected in zip(held, one_device(), strict=True):
            close(got.detach().numpy(), expected)


@pytest.mark.parametrize("how", ["data_parallel", "average_gradients", "train_batch"])
def test_what_is_frozen_has_no_mean(how):
    """A frozen model that is cut, and a layer after it that is trained: its gradients are averaged as usual."""

    def net() -> nn.Sequential:
        made = model()
        made[0].requires_grad_(False)
        return made

    right = net()
    ((right(torch.tensor(X)) - torch.tensor(Y)) ** 2).mean().backward()
    *_, expected = [p.grad for p in right.parameters() if p.grad is not None]

    def program():
        made = net()
        lab.shard_parameters(made[0], "gpu")
        averages(made, how, ("node", "gpu"))
        return [p.grad for p in made.parameters()][-1]

    for grad in lab.run(program, Mesh(node=2, gpu=2, pp=1)).per_rank:
        close(grad, expected.numpy())


def test_what_is_noted_in_modules_does_not_meet_their_own_attributes():
    def program():
        net = model()
        for name in ("cuts", "means"):
            setattr(net[0], name, torch.ones(3))
        lab.shard_parameters(net, "gpu")
        averages(net, "average_gradients", "node")
        return lab.gradient_norm(net)

    norms = lab.run(program, Mesh(node=2, gpu=2)).per_rank
    net = model()
    ((net(torch.tensor(X)) - torch.tensor(Y)) ** 2).mean().backward()
    close(norms[0], lab.run(lambda: lab.gradient_norm(net), Mesh(dp=1)).per_rank[0].numpy())


# ----------------------------------------------------------------------------------------------------- memory and time

WIDTH, DEPTH = 64, 8
LAYER_BYTES = 4 * WIDTH * WIDTH


def test_the_whole_state_is_gathered():
    """Bit for bit, with tied, frozen and uneven parameters, also where they travel as bfloat16; a snapshot."""

    def program():
        net = lab.shard_parameters(Tied(), compute_dtype=torch.bfloat16)
        state = lab.gather_state(net)
        with torch.no_grad():
            net.scale.add_(1)
        return state

    def uncut():
        return lab.gather_state(nn.Linear(2, 2))

    want = Tied().state_dict()
    for state in lab.run(program, Mesh(dp=3)).per_rank:
        assert list(state) == list(want)
        for name, x in want.items():
            assert torch.equal(state[name], x), name
    with pytest.raises(RankError, match="this Linear has not been cut by shard_parameters; give the module that it"):
        lab.run(uncut, Mesh(dp=1))


def test_a_pipeline_that_recomputes_gathers_once_more():
    """Forward, forward again, and backward, where the first layer's weight is not needed: nothing else is gathered."""

    def program():
        stage = lab.shard_parameters(deep())
        x = torch.ones(4, WIDTH)
        batch = lab.split_batch(x, x, 2)
        lab.train_batch(one_f_one_b(1, 2), stage, batch, lambda y, _: y.sum(), average=False, checkpoint_every=1)

    traffic = Traffic.of_trace(lab.run(program, Mesh(dp=4, pp=1)).trace)
    assert traffic["all_gather"].bytes == 2 * (3 * DEPTH - 1) * LAYER_BYTES * 3 // 4


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


@pytest.mark.parametrize(
    ("options", "whole_layers"),
    [({"prefetch": False}, 2), ({}, 3), ({"reshard_after_forward": False}, DEPTH)],
)
def test_few_layers_are_whole_at_once(options, whole_layers):
    """Beside the pieces' gradients: the layer that runs, the next one, and a whole gradient, also in its message."""

    def program():
        net = lab.shard_parameters(deep(), **options)
        x = torch.ones(1, WIDTH)
        with lab.LiveBytes() as live:
            net(x).sum().backward()
        return live.peak

    peak = lab.run(program, Mesh(dp=4)).per_rank[0]
    pieces = DEPTH * LAYER_BYTES / 4
    assert peak < pieces + (whole_layers + 3) * LAYER_BYTES
    if whole_layers == DEPTH:
        assert peak > DEPTH * LAYER_BYTES


def test_jax_keeps_no_whole_layers():
    """What XLA plans for, without and with whole parameters from the forward to the backward pass: in a loop over the
    layers, since XLA for CPUs drops the barrier that keeps two equal gathers apart elsewhere."""
    import jax
    import jax.numpy as jnp

    def planned(**options: Any) -> float:
        net: Any = on_jax.shard_parameters(lambda w, x: jnp.tanh(x @ w), **options)

        def gradient(pieces, x):
            def loss(pieces):
                return jax.lax.scan(lambda x, piece: (net(piece, x), None), x, pieces)[0].sum()

            return jax.grad(loss)(pieces)

        one = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        piece = on_jax.run(net.shard, Mesh(dp=4), one, out_specs=P("dp")).value
        pieces = jax.tree.map(lambda p: jax.ShapeDtypeStruct((DEPTH, *p.shape), p.dtype), piece)
        spec = jax.sharding.PartitionSpec
        mesh = jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
        step = jax.shard_map(gradient, mesh=mesh, in_specs=(spec(None, "dp"), spec("dp")), out_specs=spec(None, "dp"))
        return on_jax.temporary_bytes(step, pieces, jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)) / LAYER_BYTES

    assert planned() < 6
    assert planned(reshard_after_forward=False) > DEPTH


def test_prefetch_hides_what_is_sent_behind_computing():
    """On shapes alone: 8 layers of 8,192, 16,384 tokens per rank, 8 H100s in a node. A layer's forward pass takes
    longer than its message, so all is hidden but the first gather, the last layer's second one and the last reduce."""

    def program(prefetch):
        net = nn.Sequential(*(nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(DEPTH)))
        lab.shard_parameters(net, prefetch=prefetch)
        net(torch.empty(16384, 8192, dtype=torch.bfloat16, requires_grad=True)).sum().backward()

    def on_meta(prefetch):
        with torch.device("meta"):
            program(prefetch)

    found = [overlap(lab.run(on_meta, Mesh(dp=8), p, cluster="h100", device="meta").trace) for p in (False, True)]
    assert found[0].share < 0.1
    assert found[1].share > 0.8


# ---------------------------------------------------------------------------------------------------------- torch's own


def gradients(net: nn.Module) -> list[Any]:
    return [p.grad for p in net.parameters()]


def test_beside_ddp_and_fsdp2():
    """The same model and numbers. FSDP2 sends what stage 3 sends, and gathers the first layer again, though nothing
    needs it; DDP sends gradients once, all_reduced, after it has compared and broadcast the parameters."""

    def ours(x, y):
        net = lab.shard_parameters(deep().double())
        ((net(x) - y) ** 2).mean().backward()
        return torch.cat([lab.all_gather(grad, "dp") for grad in gradients(net)])

    def fsdp(x, y):
        from torch.distributed.fsdp import fully_shard

        net = deep().double()
        for layer in net:
            fully_shard(layer, mesh=lab.device_mesh()["dp"])
        fully_shard(net, mesh=lab.device_mesh()["dp"])
        ((net(x) - y) ** 2).mean().backward()
        return torch.cat([grad.full_tensor().flatten() for grad in gradients(net)])

    def ddp(x, y):
        net = nn.parallel.DistributedDataParallel(deep().double())
        ((net(x) - y) ** 2).mean().backward()
        return torch.cat([grad.flatten() for grad in gradients(net)])

    x, y = numbers(8, WIDTH), numbers(8, WIDTH, seed=1)
    results = [lab.run(fn, Mesh(dp=4), x, y, in_specs=P("dp"), distributed=fn is not ours) for fn in (ours, fsdp, ddp)]
    want = deep().double()
    ((want(torch.tensor(x)) - torch.tensor(y)) ** 2).mean().backward()
    for out in results:
        close(out.per_rank[1].numpy(), torch.cat([grad.flatten() for grad in gradients(want)]))
    of_ours, of_fsdp, of_ddp = (Traffic.of_trace(out.trace) for out in results)
    message = 3 * WIDTH * WIDTH // 4 * 8  # bytes that a rank sends of one layer
    looks = DEPTH * message  # the gradients, gathered to be compared
    assert of_ours["reduce_scatter"].bytes == of_fsdp["reduce_scatter"].bytes == DEPTH * message
    assert of_ours["all_gather"].bytes - looks == (2 * DEPTH - 1) * message
    assert of_fsdp["all_gather"].bytes - looks == 2 * DEPTH * message
    assert of_ddp["all_reduce"].bytes == 2 * DEPTH * message


FORWARD_OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"op": "sum"},
    "kept": {"reshard_after_forward": False},
    "second pieces": {"mesh": Mesh(node=2, dp=2), "axis": ("node", "dp"), "reshard_after_forward": "dp"},
    "copies": {"mesh": Mesh(node=2, dp=2), "replicate_axis": "node"},
}


@pytest.mark.parametrize(("name", "in_scan"), [*((name, False) for name in FORWARD_OPTIONS), ("kept", True)])
def test_in_jax_forward_mode_and_second_derivatives(name: str, in_scan: bool):
    """jax.jvp, alone and under vmap; Hessian-vector products made in three ways. All ranks have the same data, so
    gradients that are averaged are those of one device, and a product of pieces, of which each rank has a part, counts
    1/R."""
    import jax
    import jax.numpy as jnp

    from tplab.jax.ranks.context import vary

    options = dict(FORWARD_OPTIONS[name])
    mesh, axis = options.pop("mesh", Mesh(dp=3)), options.pop("axis", "dp")
    gain = mesh.size if options.get("op") == "sum" else 1
    shapes = {"w": (5, 5), "b": (5,)}
    p, dp = ({n: numbers(*s, seed=seed).astype(np.float32) for n, s in shapes.items()} for seed in (1, 9))
    x, dx = (numbers(4, 5, seed=seed).astype(np.float32) for seed in (2, 3))

    def layer(p: Any, x: Any) -> tuple[Any, Any]:
        return jnp.tanh(x @ p["w"] + p["b"]), jnp.argmax(x, 1)

    def derivatives(unit: Any, pieces: Any, tangents: Any, x: Any, dx: Any, dot: Any) -> list[Any]:
        def model(pieces: Any, x: Any) -> Any:
            if not in_scan:
                return unit(pieces, x)[0]
            return jax.lax.scan(lambda x, _: (unit(pieces, x)[0], None), x, None, length=2)[0]

        loss = lambda pieces: (model(pieces, x) ** 2).sum()  # noqa: E731
        along = lambda f: lambda pieces: jax.jvp(f, (pieces,), (tangents,))[1]  # noqa: E731
        per_input = jax.vmap(lambda dx: jax.jvp(lambda x: model(pieces, x), (x,), (dx,))[1])
        return [
            jax.jvp(model, (pieces, x), (tangents, dx)),
            per_input(jnp.stack([dx, -2 * dx])),
            along(along(loss))(pieces),
            jax.vmap(lambda s: jax.grad(lambda q: s * loss(q))(pieces))(jnp.array([1.0, 2.0])),
            jax.grad(loss)(pieces),
            along(jax.grad(loss))(pieces),
            jax.grad(along(loss))(pieces),
            jax.grad(lambda pieces: dot(jax.grad(loss)(pieces), tangents))(pieces),
        ]

    def program(p: Any, dp: Any) -> list[Any]:
        unit = on_jax.shard_parameters(layer, axis, **options)
        pieces, tangents = unit.shard(p), unit.shard(dp)

        def dot(a: Any, b: Any) -> Any:  # of pieces: each has a copy on as many ranks as there are nodes
            terms = [jnp.vdot(one, other) for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
            return on_jax.all_reduce(sum(terms), axis)

        *values, mapped, one, two, three, four = derivatives(
            unit, pieces, tangents, vary(x, mesh.axis_names), vary(dx, mesh.axis_names), dot
        )
        each = [unit.gather(jax.tree.map(lambda leaf: leaf[place], mapped)) for place in (0, 1)]  # noqa: B023
        return [*values, each, *(unit.gather(grads) for grads in (one, two, three, four))]

    def dot(a: Any, b: Any) -> Any:
        return sum(jnp.vdot(a[name], b[name]) for name in a)

    want = derivatives(layer, p, dp, x, dx, dot)
    want[3] = [jax.tree.map(lambda leaf: leaf[place], want[3]) for place in (0, 1)]  # noqa: B023
    want[3:7] = jax.tree.map(lambda leaf: gain * leaf, want[3:7])
    want[7] = jax.tree.map(lambda leaf: gain * gain / mesh.size * leaf, want[7])
    got = on_jax.run(program, mesh, p, dp).per_rank
    for rank in got:
        pairs = zip(jax.tree.leaves(rank), jax.tree.leaves(want), strict=True)
        for one, other in pairs:  # float32, some twenty sums; a tenth of it is the smallest mistake
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * float(np.abs(other).max()))
