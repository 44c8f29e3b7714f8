"""The gradient of every collective, compared with the same sums and slices on one rank; and all that autograd can do.

In float64 to 1e-12: the sums are the same ones, in another order at most.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pairwise import pairs
from tplab import Mesh, P
from tplab.errors import CollectiveMismatchError, DeadlockError, RankError
from tplab.torch import (
    AsyncLinear,
    all_gather,
    all_gather_matmul,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    blocking_weight,
    broadcast,
    copy_to,
    gather,
    gather_from,
    matmul_reduce_scatter,
    ppermute,
    reduce,
    reduce_from,
    reduce_scatter,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_shift,
    run,
    scatter,
    scatter_to,
    start,
)

RANKS = [1, 2, 3, 4]
TOLERANCE = 1e-12


def close(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE if a.numel() else True)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# What each collective is, of all ranks' tensors at once: [x of each rank] -> [y of each rank].
Dense = Callable[[list[Tensor]], list[Tensor]]
Collective = Callable[[Tensor], Tensor]


def perm_of(num_ranks: int) -> list[tuple[int, int]]:
    return [(0, num_ranks - 1), *([(1, 0)] if num_ranks > 2 else [])]


def varying(R: int) -> dict[str, tuple[Any, tuple, Dense]]:
    """Each rank's gradient is what its own use contributed."""
    source = {b: a for a, b in perm_of(R)}

    def pieces(xs, dim):
        return [torch.stack(xs).sum(0).chunk(R, dim)[i] for i in range(R)]

    def alone(y, root):
        return [y if i == root else torch.zeros_like(y) for i in range(R)]

    return {
        "all_gather": (all_gather, (), lambda xs: [torch.cat(xs)] * R),
        "all_gather 1": (all_gather, (1,), lambda xs: [torch.cat(xs, 1)] * R),
        "reduce_scatter": (reduce_scatter, (), lambda xs: pieces(xs, 0)),
        "reduce_scatter 1": (reduce_scatter, (-1,), lambda xs: pieces(xs, 1)),
        "reduce_scatter mean": (reduce_scatter, (0, "mean"), lambda xs: [p / R for p in pieces(xs, 0)]),
        "reduce_scatter max": (reduce_scatter, (0, "max"), lambda xs: list(torch.stack(xs).amax(0).chunk(R))),
        "reduce_scatter min": (reduce_scatter, (1, "min"), lambda xs: list(torch.stack(xs).amin(0).chunk(R, 1))),
        "all_to_all": (all_to_all, (), lambda xs: [torch.cat([x.chunk(R)[i] for x in xs]) for i in range(R)]),
        "all_to_all 01": (all_to_all, (0, 1), lambda xs: [torch.cat([x.chunk(R)[i] for x in xs], 1) for i in range(R)]),
        "reduce": (reduce, (R - 1,), lambda xs: alone(torch.stack(xs).sum(0), R - 1)),
        "reduce mean": (reduce, (0, "mean"), lambda xs: alone(torch.stack(xs).mean(0), 0)),
        "reduce max": (reduce, (R - 1, "max"), lambda xs: alone(torch.stack(xs).amax(0), R - 1)),
        "gather": (gather, (R - 1, 1), lambda xs: alone(torch.cat(xs, 1), R - 1)),
        "scatter": (scatter, (R - 1,), lambda xs: list(xs[-1].chunk(R))),
        "scatter 1": (scatter, (0, 1), lambda xs: list(xs[0].chunk(R, 1))),
        "ppermute": (
            ppermute, (perm_of(R),),
            lambda xs: [xs[source[i]] if i in source else torch.zeros_like(xs[i]) for i in range(R)],
        ),
        "ring_shift": (ring_shift, (), lambda xs: [xs[i - 1] for i in range(R)]),
        "ring_shift -2": (ring_shift, (-2,), lambda xs: [xs[(i + 2) % R] for i in range(R)]),
    }  # fmt: skip


def replicated(R: int) -> dict[str, tuple[Any, tuple, Dense]]:
    """Every rank holds the same, and the same gradient of it."""
    return {
        "all_reduce": (all_reduce, (), lambda xs: [torch.stack(xs).sum(0)] * R),
        "all_reduce mean": (all_reduce, ("mean",), lambda xs: [torch.stack(xs).mean(0)] * R),
        "all_reduce max": (all_reduce, ("max",), lambda xs: [torch.stack(xs).amax(0)] * R),
        "all_reduce min": (all_reduce, ("min",), lambda xs: [torch.stack(xs).amin(0)] * R),
        "broadcast": (broadcast, (R - 1,), lambda xs: [xs[-1]] * R),
    }


def inputs(R: int) -> list[Tensor]:
    return [numbers(R * 2, R * 3, seed=rank) for rank in range(R)]


def weighted(y: Tensor, seed: int) -> Tensor:
    """Some loss of y that is not linear in it."""
    return (y.sin() * numbers(*y.shape, seed=100 + seed)).sum()


def run_blocking(collective: Any, args: tuple, x: Tensor) -> Tensor:
    return collective(x, "tp", *args)


def run_asynchronous(collective: Any, args: tuple, x: Tensor) -> Tensor:
    return start(collective, x, "tp", *args).wait()


MODES = {"blocking": run_blocking, "asynchronous": run_asynchronous}


@pytest.mark.parametrize("R, mode, name", pairs([*RANKS, 8], MODES, [*varying(2), *replicated(2)]))
def test_gradients_are_those_of_the_whole(R: int, mode: str, name: str):
    is_varying = name in varying(R)
    collective, args, dense = (varying(R) | replicated(R))[name]

    def program() -> tuple[Tensor, Tensor | None]:
        x = inputs(R)[axis_index("tp")].requires_grad_()
        y = MODES[mode](collective, args, x)
        weighted(y, axis_index("tp") if is_varying else 0).backward()
        return y, x.grad

    xs = [x.requires_grad_() for x in inputs(R)]
    ys = dense(xs)
    losses = [weighted(y, rank if is_varying else 0) for rank, y in enumerate(ys)]
    total = torch.stack(losses).sum() if is_varying else losses[0]
    wanted = torch.autograd.grad(total, xs, materialize_grads=True)
    for rank, (y, dx) in enumerate(run(program, Mesh(tp=R)).per_rank):
        assert close(y, ys[rank].detach())
        assert close(dx, wanted[rank]), rank


@pytest.mark.parametrize(
    "R, mode, name", pairs([1, 3], MODES, [*varying(2), *(name for name in replicated(2) if name != "broadcast")])
)
def test_second_derivatives_are_those_of_the_whole(R: int, mode: str, name: str):
    is_varying = name in varying(R)
    collective, args, dense = (varying(R) | replicated(R))[name]

    def program() -> Tensor | None:
        rank = axis_index("tp") if is_varying else 0
        x = inputs(R)[axis_index("tp")].requires_grad_()
        loss = weighted(MODES[mode](collective, args, x.exp()), rank)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        if not is_varying:  # a loss that all ranks share, of gradients that they do not
            dx = all_reduce(dx, "tp")
        weighted(dx, rank).backward()
        return x.grad

    xs = [x.requires_grad_() for x in inputs(R)]
    losses = [weighted(y, rank if is_varying else 0) for rank, y in enumerate(dense([x.exp() for x in xs]))]
    total = torch.stack(losses).sum() if is_varying else losses[0]
    dxs = torch.autograd.grad(total, xs, create_graph=True, materialize_grads=True)
    if is_varying:
        torch.stack([weighted(dx, rank) for rank, dx in enumerate(dxs)]).sum().backward()
    else:
        weighted(torch.stack(dxs).sum(0), 0).backward()
    for dx, x in zip(run(program, Mesh(tp=R)).per_rank, xs, strict=True):
        zero = torch.zeros_like(x)  # no rank sent to this one: nothing depends on its x
        assert close(zero if dx is None else dx, zero if x.grad is None else x.grad)


@pytest.mark.parametrize(
    "name",
    [
        "all_gather",
        "reduce_scatter",
        "ring_shift",
        "all_to_all",
        "ppermute",
        "all_reduce max",
        "reduce",
        "gather",
        "scatter",
    ],
)
def test_gradients_equal_finite_differences(name: str):
    """Not against another autograd: against the difference quotient of what the ranks return."""
    R, step = 3, 1e-6
    collective, args, _ = (varying(R) | replicated(R))[name]
    is_varying = name in varying(R)

    def loss_and_gradient(xs: list[Tensor]) -> tuple[float, list[Tensor]]:
        def program() -> tuple[Tensor, Tensor | None]:
            x = xs[axis_index("tp")].clone().requires_grad_()
            loss = weighted(collective(x, "tp", *args), axis_index("tp") if is_varying else 0)
            loss.backward()
            return loss, x.grad

        out = run(program, Mesh(tp=R)).per_rank
        losses = [loss.item() for loss, _ in out]
        return sum(losses) if is_varying else losses[0], [dx for _, dx in out]

    xs = inputs(R)
    _, gradients = loss_and_gradient(xs)
    for rank in range(R):
        direction = numbers(*xs[rank].shape, seed=7)
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * direction if place == rank else x for place, x in enumerate(xs)]
            ends.append(loss_and_gradient(moved)[0])
        quotient = (ends[0] - ends[1]) / (2 * step)
        assert quotient == pytest.approx(
            (gradients[rank] * direction).sum().item(), abs=1e-7
        )  # step^2 and rounding / step


def test_a_mesh_of_several_axes():
    mesh = Mesh(dp=2, tp=3)

    def program() -> Tensor | None:
        x = numbers(6, 2, seed=axis_index(("dp", "tp"))).requires_grad_()
        y = all_gather(reduce_scatter(x, ("tp", "dp")).tanh(), "dp", 1)
        weighted(y, axis_index(("dp", "tp"))).backward()
        return x.grad

    xs = [numbers(6, 2, seed=rank).requires_grad_() for rank in range(6)]
    total = torch.stack(xs).sum(0).tanh()
    piece = {(dp, tp): total[tp * 2 + dp : tp * 2 + dp + 1] for dp in range(2) for tp in range(3)}
    whole = [torch.cat([piece[0, tp], piece[1, tp]], 1) for tp in range(3)]
    torch.stack([weighted(whole[rank % 3], rank) for rank in range(6)]).sum().backward()
    for dx, x in zip(run(program, mesh).per_rank, xs, strict=True):
        assert x.grad is not None
        assert close(dx, x.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("collective", [all_gather, gather])
def test_uneven_pieces(mode: str, collective: Any):
    sizes, args = [2, 0, 5], (1,) if collective is all_gather else (1, 1)

    def program() -> tuple[Tensor | None, Tensor | None]:
        rank = axis_index("tp")
        x = numbers(2, sizes[rank], seed=rank).requires_grad_()
        y = MODES[mode](collective, args, x)
        (dx,) = torch.autograd.grad(weighted(y, rank), x, create_graph=True)
        weighted(dx, rank).backward()
        return dx, x.grad

    xs = [numbers(2, size, seed=rank).requires_grad_() for rank, size in enumerate(sizes)]
    losses = [weighted(torch.cat(xs, 1), rank) for rank in range(3)]
    total = torch.stack(losses).sum() if collective is all_gather else losses[1]
    dxs = torch.autograd.grad(total, xs, create_graph=True)
    torch.stack([weighted(dx, rank) for rank, dx in enumerate(dxs)]).sum().backward()
    for rank, (dx, second) in enumerate(run(program, Mesh(tp=3)).per_rank):
        assert close(dx, dxs[rank].detach())
        assert close(second, xs[rank].grad)  # type: ignore


def test_messages_of_different_shapes():
    def program() -> Tensor | None:
        rank = axis_index("tp")
        x = numbers(rank + 1, 2, seed=rank).requires_grad_()
        weighted(ring_shift(x, "tp"), rank).backward()
        return x.grad

    for rank, dx in enumerate(run(program, Mesh(tp=3)).per_rank):
        x = numbers(rank + 1, 2, seed=rank).requires_grad_()
        weighted(x, (rank + 1) % 3).backward()
        assert x.grad is not None
        assert close(dx, x.grad)


def test_equals_share_the_gradient_of_an_extreme():
    def program() -> tuple:
        x = torch.tensor([[5.0, 1.0], [5.0, 3.0], [2.0, 3.0]])[axis_index("tp")].requires_grad_()
        all_reduce(x, "tp", "max").sum().backward()
        first, x.grad = x.grad, None
        reduce_scatter(x.repeat(3), "tp", op="max").sum().backward()
        return first, x.grad

    out = run(program, Mesh(tp=3)).per_rank
    assert [first.tolist() for first, _ in out] == [[0.5, 0], [0.5, 0.5], [0, 0.5]]
    assert [(second / 3).tolist() for _, second in out] == [[0.5, 0], [0.5, 0.5], [0, 0.5]]


def test_what_is_written_between_start_and_wait_does_not_reach_the_gradient():
    """The gradient of an extreme looks at what was sent, not at what the sender has made of it since."""

    def program() -> Tensor | None:
        leaf = torch.tensor([1.0, 5.0] if axis_index("tp") == 0 else [4.0, 2.0]).requires_grad_()
        x = leaf * 1
        flight = start(all_reduce, x, "tp", op="max")
        with torch.no_grad():
            x.fill_(4.0)
        flight.wait().sum().backward()
        return leaf.grad

    assert [dx.tolist() for dx in run(program, Mesh(tp=2)).per_rank] == [[0, 1], [1, 0]]


# --- regions, and a layer made of them --------------------------------------------------------------------------------


@pytest.mark.parametrize("R", RANKS)
def test_copy_to_and_reduce_from_are_conjugate(R: int):
    def program() -> tuple:
        rank = axis_index("tp")
        x = numbers(3, seed=0).requires_grad_()
        y = copy_to(x, "tp")
        assert torch.equal(y, x)
        weighted(y, rank).backward()
        z = numbers(3, seed=rank).requires_grad_()
        total = reduce_from(z, "tp")
        weighted(total, 0).backward()
        return x.grad, total, z.grad

    x = numbers(3, seed=0).requires_grad_()
    torch.stack([weighted(x, rank) for rank in range(R)]).sum().backward()
    total = torch.stack([numbers(3, seed=rank) for rank in range(R)]).sum(0).requires_grad_()
    weighted(total, 0).backward()
    assert x.grad is not None and total.grad is not None
    for dx, y, dz in run(program, Mesh(tp=R)).per_rank:
        assert close(dx, x.grad)
        assert close(y, total.detach())
        assert close(dz, total.grad)


def mlp(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    x, a, b = (t.requires_grad_() for t in (x, a, b))
    y = reduce_from((copy_to(x, "tp") @ a).tanh() @ b, "tp")
    loss = y.square().sum()
    dx, da, db = torch.autograd.grad(loss, (x, a, b), create_graph=True)
    (all_reduce(da.square().sum() + db.square().sum(), "tp") + dx.square().sum()).backward()
    return y, dx, da, db, x.grad, a.grad, b.grad  # type: ignore


@pytest.mark.parametrize("R", RANKS)
def test_a_sharded_layer_has_the_gradients_of_the_whole_one_and_their_gradients(R: int):
    x, a, b = numbers(5, 3, seed=1), numbers(3, 12, seed=2), numbers(12, 4, seed=3)
    columns, rows = P(None, "tp"), P("tp", None)
    specs = (P(), columns, rows)
    out = run(mlp, Mesh(tp=R), x, a, b, in_specs=specs, out_specs=(P(), P(), columns, rows, P(), columns, rows))
    wanted = run(mlp, Mesh(tp=1), x, a, b).per_rank[0]
    for got, expected in zip(out.value, wanted, strict=True):
        # gradients of gradients: sums of some hundred products of size 10 to 1000
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11)


# --- what autograd can do besides -------------------------------------------------------------------------------------


def deep(x: Tensor, w: Tensor) -> Tensor:
    y = all_gather((x @ w).tanh(), "tp")
    return ring_shift(reduce_scatter(y, "tp") * start(ring_shift, x, "tp", -1).wait(), "tp")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_inside_a_checkpoint(use_reentrant: bool):
    def program(checkpointed: bool) -> tuple:
        rank = axis_index("tp")
        x, w = numbers(2, 2, seed=rank).requires_grad_(), numbers(2, 2, seed=9).requires_grad_()
        y = x * 2
        for _ in range(2):
            y = checkpoint(deep, y, w, use_reentrant=use_reentrant) if checkpointed else deep(y, w)
        weighted(y, rank).backward()  # type: ignore
        return x.grad, w.grad

    plain = run(program, Mesh(tp=3), False).per_rank
    recomputed = run(program, Mesh(tp=3), True).per_rank
    for (a, b), (c, d) in zip(plain, recomputed, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_a_checkpoint_draws_its_dropout_again_as_it_was():
    def program(checkpointed: bool) -> Tensor | None:
        def layer(x: Tensor) -> Tensor:
            return all_reduce(nn.functional.dropout(x, 0.5), "tp") * torch.rand(64)

        x = torch.ones(64).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        ring_shift(torch.ones(1), "tp")
        y.sum().backward()  # type: ignore
        return x.grad

    plain, recomputed = (run(program, Mesh(tp=2), flag).per_rank for flag in (False, True))
    assert all(map(torch.equal, plain, recomputed))


def test_hooks_see_the_gradient_and_may_communicate():
    """What data parallelism does: a hook on each parameter averages its gradient, inside the backward pass."""

    def program() -> tuple:
        rank, seen = axis_index("dp"), []
        model = nn.Linear(3, 2).double()
        with torch.no_grad():
            model.weight.copy_(numbers(2, 3, seed=1))
            model.bias.zero_()
        for p in model.parameters():
            p.register_hook(lambda g: all_reduce(g, "dp", "mean"))
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        y = model(numbers(4, 3, seed=rank))
        z = ring_shift(y, "dp")
        z.register_hook(lambda g: seen.append(g.clone()))
        z.square().sum().backward()
        return model.weight.grad, len(seen), seen[0].shape

    w = numbers(2, 3, seed=1).requires_grad_()
    torch.stack([(numbers(4, 3, seed=rank) @ w.t()).square().sum() for rank in range(3)]).mean().backward()
    assert w.grad is not None
    for gradient, count, shape in run(program, Mesh(dp=3)).per_rank:
        assert close(gradient, w.grad)
        assert (count, shape) == (3, (4, 2))


def test_backward_may_be_run_twice_over_a_kept_graph():
    def program(name: str) -> Tensor | None:
        x = numbers(3, seed=axis_index("tp")).requires_grad_()
        y = MODES[name](ring_shift, (), x * 2)
        loss = weighted(y, axis_index("tp"))
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    once = run(lambda: program("blocking"), Mesh(tp=3)).per_rank
    for name in MODES:
        assert all(map(torch.equal, run(program, Mesh(tp=3), name).per_rank, once))


def test_a_backward_pass_that_meets_many_flights_in_another_order_on_each_rank():
    """Collectives of the backward pass run in the order of the graph, which is the same on all ranks."""

    def program() -> Tensor | None:
        x = numbers(4, 2, seed=axis_index("tp")).requires_grad_()
        flights = [
            start(op, x * (k + 1), "tp") for k, op in enumerate([ring_shift, all_gather, ring_shift, all_gather])
        ]
        landed = [flight.wait().sum(0) for flight in flights]
        weighted(torch.stack(landed), axis_index("tp")).backward()
        return x.grad

    xs = [numbers(4, 2, seed=rank).requires_grad_() for rank in range(3)]
    for rank in range(3):
        rows = [xs[rank - 1], torch.cat([x * 2 for x in xs]), xs[rank - 1] * 3, torch.cat([x * 4 for x in xs])]
        weighted(torch.stack([row.sum(0) for row in rows]), rank).backward()
    for dx, x in zip(run(program, Mesh(tp=3)).per_rank, xs, strict=True):
        assert x.grad is not None
        assert close(dx, x.grad)


def test_no_graph_is_made_where_none_is_wanted():
    def program() -> list[bool]:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            inside = [all_reduce(x, "tp"), start(ring_shift, x, "tp").wait(), copy_to(x, "tp")]
        return [y.requires_grad for y in inside] + [ring_shift(x.detach(), "tp").requires_grad]

    assert run(program, Mesh(tp=2)).per_rank == [[False] * 4] * 2


def test_results_carry_no_graph_and_can_be_used_outside():
    out = run(lambda x: {"y": [ring_shift(x * 2, "tp")], "n": 3}, Mesh(tp=2), torch.ones(2, requires_grad=True))
    assert not out.per_rank[0]["y"][0].requires_grad
    assert out.per_rank[0]["n"] == 3


def rings(x: Tensor, direction: Any) -> list[Tensor]:
    """Of x [3, n, m] on 3 ranks, by rings: every rank's x, this rank's part of the sum, the whole sum."""
    gathered = ring_all_gather(x, "tp", direction)
    if direction == "split":
        gathered = [torch.cat(halves, -1) for halves in zip(gathered[:3], gathered[3:], strict=True)]
    return [*gathered, ring_reduce_scatter(list(x), "tp", direction), ring_all_reduce(x, "tp", direction)]


def rings_by_collectives(x: Tensor, direction: Any) -> list[Tensor]:
    i, k, half = axis_index("tp"), torch.arange(3), 2 if direction == "split" else 3
    whole = all_gather(x[None], "tp")
    gathered = torch.cat([whole[(i - k) % 3][..., :half], whole[(i + k) % 3][..., half:]], -1)
    parts = torch.cat([x[(i - 1 - k) % 3][..., :half], x[(k - i - 1) % 3][..., half:]], -1)
    return [*gathered, reduce_scatter(parts, "tp")[0], all_gather(reduce_scatter(x, "tp"), "tp")]


@pytest.mark.parametrize("direction", ["both", "split"])
def test_second_derivatives_of_rings(direction: str):
    def program(results: Any) -> Tensor:
        rank = axis_index("tp")
        x = numbers(3, 2, 3, seed=rank).requires_grad_()
        loss = torch.stack([weighted(y, rank + k) for k, y in enumerate(results(x.exp(), direction))]).sum()
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(weighted(dx, rank), x)[0]

    want = run(program, Mesh(tp=3), rings_by_collectives).per_rank
    for got, expected in zip(run(program, Mesh(tp=3), rings).per_rank, want, strict=True):
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11)  # sums of some hundred products of size 1 to 100


GATHERED = lambda x, w, dim: all_gather(x, "tp", dim) @ w.T  # noqa: E731
SCATTERED = lambda x, w, dim: reduce_scatter(x @ w.T, "tp", dim)  # noqa: E731


@pytest.mark.parametrize("is_linear", [True, False])
@pytest.mark.parametrize(
    "overlapped, blocking, dim, direction",
    [
        (all_gather_matmul, GATHERED, -1, "split"),
        (all_gather_matmul, GATHERED, 0, "up"),
        (matmul_reduce_scatter, SCATTERED, -1, "both"),
        (matmul_reduce_scatter, SCATTERED, 1, "down"),
    ],
)
def test_second_derivatives_of_overlapped_products(overlapped: Any, blocking: Any, dim: int, direction: str, is_linear):
    """As those of one collective and one product. Of a loss that is linear in y, dy needs no gradient, and dx does."""
    inputs = 2 if overlapped is all_gather_matmul and dim == -1 else 6

    def program(is_overlapped: bool) -> tuple:
        rank = axis_index("tp")
        x = numbers(3, 6, inputs, seed=rank).requires_grad_()
        w = numbers(6, 6, seed=9 + rank).requires_grad_()
        y = overlapped(x.exp(), w, "tp", dim=dim, direction=direction) if is_overlapped else blocking(x.exp(), w, dim)
        loss = y.sum() if is_linear else weighted(y, rank)
        dx, dw = torch.autograd.grad(loss, (x, w), create_graph=True)
        (weighted(dx, rank) + weighted(dw, rank)).backward()
        return x.grad, w.grad

    want = run(program, Mesh(tp=3), False).per_rank
    for got, expected in zip(run(program, Mesh(tp=3), True).per_rank, want, strict=True):
        # sums of some hundred products of size 10 to 1000
        assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-11) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("mode, direction", [("gather", "split"), ("scatter", "both")])
def test_second_derivatives_of_an_overlapped_layer(mode: Any, direction: Any):
    def program(is_overlapped: bool) -> tuple:
        rank, num_ranks = axis_index("tp"), axis_size("tp")
        layer = AsyncLinear(9, 6, "tp", mode=mode, direction=direction).double()
        x = numbers(4, 3, seed=rank).requires_grad_(mode == "gather")  # or it is data
        if is_overlapped:
            y = layer(x)
        else:
            stacked = all_gather(layer.weight, "tp").reshape(num_ranks, num_ranks, 2, 3)
            dim = 0 if mode == "gather" else 1
            w = blocking_weight(stacked, mode, direction).chunk(num_ranks, dim)[rank]
            y = (GATHERED if mode == "gather" else SCATTERED)(x, w, -1) + layer.bias  # type: ignore
        wanted = [t for t in (x, layer.weight) if t.requires_grad]
        grads = torch.autograd.grad(weighted(y, rank), wanted, create_graph=True)
        torch.stack([weighted(grad, rank) for grad in grads]).sum().backward()
        return *(t.grad for t in wanted), layer.bias.grad  # type: ignore

    want = run(program, Mesh(tp=3), False).per_rank
    for got, expected in zip(run(program, Mesh(tp=3), True).per_rank, want, strict=True):
        # sums of some hundred products of size 10 to 1000
        assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-11) for a, b in zip(got, expected, strict=True))


def test_third_derivatives_through_a_started_collective():
    """x enters in two ways, as itself and through the collective: (12 x^2 + 1)' = 24 x."""

    def program() -> Tensor:
        x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)  # the same on both ranks
        y = start(ring_shift, x**2, "tp").wait()
        loss = (y**2 + x**2 / 2).sum()
        for _ in range(2):
            (dx,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = dx.sum()
        return torch.autograd.grad(loss, x)[0]

    assert [d.tolist() for d in run(program, Mesh(tp=2)).per_rank] == [[24, 48]] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_pass_on_some_ranks_only_is_named(mode: str):
    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        y = MODES[mode](all_gather, (), x).sum()
        if axis_index("tp") != 1:
            y.backward()  # the line that waits

    with pytest.raises(DeadlockError) as caught:
        run(program, Mesh(tp=3))
    line = program.__code__.co_firstlineno + 4
    assert f"rank 0 waits in reduce_scatter(x, 'tp', 0, 'sum') at test_gradients.py:{line} for rank 1" in str(
        caught.value
    )
    assert "rank 1 has returned" in str(caught.value)


def test_a_tensor_that_needs_a_gradient_on_some_ranks_only_is_named():
    def program() -> None:
        x = torch.ones(2, requires_grad=axis_index("tp") == 0)
        w = torch.ones(2, requires_grad=True)
        y = all_gather(x, "tp").sum() * w
        y.sum().backward()
        all_reduce(w.grad, "tp")  # type: ignore

    with pytest.raises(CollectiveMismatchError, match=r"rank 0: reduce_scatter.*\n  rank 1: all_reduce"):
        run(program, Mesh(tp=2))


def test_half_precision_gradients_stay_in_half_precision():
    def program() -> list:
        x = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
        for y in (all_reduce(x, "tp", "mean"), reduce_scatter(x, "tp"), all_reduce(x, "tp", "max")):
            y.sum().backward()
        return [x.grad.dtype, x.grad.tolist()]  # type: ignore

    assert run(program, Mesh(tp=2)).per_rank == [[torch.bfloat16, [2.0] * 4]] * 2


def test_complex_gradients():
    def program() -> Tensor | None:
        x = torch.complex(numbers(2, seed=axis_index("tp")), numbers(2, seed=5)).requires_grad_()
        (all_gather(ring_shift(x, "tp"), "tp") * (1 + axis_index("tp"))).abs().sum().backward()
        return x.grad

    for rank, dx in enumerate(run(program, Mesh(tp=2)).per_rank):
        x = torch.complex(numbers(2, seed=rank), numbers(2, seed=5)).requires_grad_()
        (x.abs().sum() * 3).backward()
        assert x.grad is not None
        assert close(dx, x.grad)


@pytest.mark.parametrize("name", [*varying(2), *replicated(2)])
def test_a_batch_by_vmap_is_one_collective(name: str):
    collective, args, _ = (varying(3) | replicated(3))[name]

    def program(is_batched: bool) -> tuple[Tensor, Tensor]:
        x = torch.stack([numbers(6, 9, seed=10 * axis_index("tp") + k) for k in range(2)], 1).requires_grad_()
        one = lambda x: collective(x * 2, "tp", *args)  # noqa: E731
        y = torch.func.vmap(one, 1, 1)(x) if is_batched else torch.stack([one(part) for part in x.unbind(1)], 1)
        weighted(y, 0).backward()
        assert x.grad is not None
        return y.detach(), x.grad

    batched, one_by_one = run(program, Mesh(tp=3), True), run(program, Mesh(tp=3), False)
    for got, want in zip(batched.per_rank, one_by_one.per_rank, strict=True):
        assert all(map(close, got, want))
    count = lambda out: len(out.trace.select(kind="collective")) + len(out.trace.select(kind="send"))  # noqa: E731
    assert 2 * count(batched) == count(one_by_one) > 0


@pytest.mark.parametrize("name", [*varying(2), *replicated(2)])
def test_a_batch_by_vmap_without_gradients(name: str):
    collective, args, _ = (varying(3) | replicated(3))[name]

    def program() -> None:
        x = torch.stack([numbers(6, 9, seed=10 * axis_index("tp") + k) for k in range(2)], 1)
        one = lambda x: collective(x, "tp", *args)  # noqa: E731
        with torch.no_grad():
            assert close(torch.func.vmap(one, 1, 1)(x), torch.stack([one(part) for part in x.unbind(1)], 1))

    run(program, Mesh(tp=3))


def test_hessians_by_torch_func():
    """jacrev(jacrev(loss)), which batches the second backward pass, against one second derivative after the other."""

    def program() -> tuple[Tensor, Tensor]:
        rank = axis_index("tp")

        def loss(x: Tensor) -> Tensor:
            y = all_gather(reduce_scatter(x.sin(), "tp") + scatter_to(copy_to(x, "tp").exp(), "tp", 0), "tp")
            z = all_reduce(x.cos(), "tp") * gather_from(ring_shift(x, "tp")[:2], "tp", 0)
            return (y.exp() * z + start(ring_shift, x, "tp").wait()).sum() * (rank + 1)

        x = numbers(6, seed=rank)
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        rows = [torch.autograd.grad(dx[k], leaf, retain_graph=True)[0] for k in range(6)]
        return torch.func.jacrev(torch.func.jacrev(loss))(x), torch.stack(rows)

    for got, want in run(program, Mesh(tp=3)).per_rank:
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-11)  # sums of some dozen numbers of size 1 to 1000


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # torch's own use of it
@pytest.mark.parametrize(
    "function",
    [
        lambda x: all_reduce(x, "tp"),
        lambda x: start(ring_shift, x, "tp").wait(),
        lambda x: copy_to(x, "tp"),
        lambda x: scatter_to(x, "tp"),
        lambda x: gather_from(x, "tp"),
        lambda x: all_gather_matmul(x, torch.ones(2, 4), "tp"),
    ],
)
def test_forward_mode_is_refused_in_words(function: Collective):
    def by_func() -> None:
        x = torch.ones(2, 2)
        torch.func.jvp(function, (x,), (x,))

    def by_dual_numbers() -> None:
        with torch.autograd.forward_ad.dual_level():
            function(torch.autograd.forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2)))

    for program in (by_func, by_dual_numbers):
        with pytest.raises(RankError, match=r"no forward-mode derivatives .*; take torch.func.vjp or jacrev"):
            run(program, Mesh(tp=2))


def test_functional_gradients():
    """torch.func differentiates what ranks say to each other as torch.autograd does."""

    def program() -> tuple:
        rank = axis_index("tp")
        x = numbers(axis_size("tp") * 2, seed=rank)

        def loss(x: Tensor) -> Tensor:
            flight = start(ring_shift, x, "tp")
            return weighted(all_gather(reduce_scatter(x.sin(), "tp"), "tp") * flight.wait(), rank)

        leaf = x.clone().requires_grad_()
        loss(leaf).backward()
        return torch.func.grad(loss)(x), leaf.grad

    for functional, plain in run(program, Mesh(tp=3)).per_rank:
        assert close(functional, plain)
