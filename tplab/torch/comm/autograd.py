"""Collectives under autograd: each one, and the collective of its backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tplab.comm import EXTREMES, ROWS
from tplab.mesh import Axis
from tplab.torch.private import forward_level, no_dispatch, transform
from tplab.torch.ranks.outcomes import own
from tplab.torch.ranks.rank import Call, Pending, this_rank


class Plan(NamedTuple):
    """A collective about to be run on `x`."""

    call: Call
    x: Tensor


def do(call: Call, x: Tensor) -> Tensor:
    """Run the collective and wait for it. If this pass is one of a pair, the other one goes on meanwhile."""
    rank = this_rank()
    if rank.pair is not None and x.is_floating_point() and transform() is None:
        pending = start_on(call, x)
        rank.pair.let_go_on()
        return pending.wait()
    if _is_followed(x):
        return _Blocking.apply(x, _Exchange(call))  # type: ignore[return-value]
    return rank.do(call, x)


def start_on(call: Call, x: Tensor) -> Pending:
    """Start the collective; the handle's `wait` returns the result."""
    if not _is_followed(x):
        return this_rank().begin(call, x)
    if transform() is not None:  # tensors of a transform cannot wait outside it
        return Landed(do(call, x))
    return _Flight(call, x)


def varying(x: Tensor, axis: Axis) -> Tensor:
    """Return the same replicated x for per-rank use: its gradient is the sum of the ranks' gradients."""
    check_no_forward_mode()
    y: Tensor = _Varying.apply(x, axis) if torch.is_grad_enabled() else x.detach()  # type: ignore[assignment]
    if (types := (rank := this_rank()).types) is not None:
        types.cast("copy_to", rank.place(axis).group, x, y)
    return y


def _is_followed(x: Tensor) -> bool:
    if forward_level() >= 0:
        check_no_forward_mode()
    return (x.requires_grad and torch.is_grad_enabled()) or transform() is not None


def check_no_forward_mode() -> None:
    """Raise NotImplementedError inside forward-mode differentiation."""
    if forward_level() >= 0:
        raise NotImplementedError(
            "collectives have no forward-mode derivatives (torch.func.jvp, jacfwd, hessian, linearize, forward_ad): "
            "torch counts their levels for the whole process, in which simulated ranks take turns; take torch.func.vjp "
            "or jacrev, and jacrev(jacrev(f)) for second derivatives"
        )


# --- nodes of the graph ----------------------------------------------------------------------------------------------


class _Exchange:
    """One collective, forward and backward: the state that its graph nodes share.

    It holds no tensor of the graph, because the graph would then keep itself alive; `sent` is a copy.
    """

    __slots__ = ("call", "gradient", "pending", "sent", "sizes")

    def __init__(self, call: Call):
        self.call = call
        self.pending: Pending | None = None
        self.sizes: tuple[int, ...] | None = None
        self.sent: Tensor | None = None
        self.gradient: Tensor | Pending | None = None

    @property
    def keeps(self) -> bool:
        """Whether the gradient needs x and y: for max and min it goes to the ranks that hold the extreme."""
        return self.call.reduction in EXTREMES


class _Blocking(torch.autograd.Function):
    """Forward: the collective. Backward: its transpose, itself differentiable."""

    @staticmethod
    def forward(x: Tensor, exchange: _Exchange) -> Tensor:
        pending = this_rank().begin(exchange.call, x)
        y = pending.wait()
        exchange.sizes = pending.sizes
        if (types := this_rank().types) is not None:
            types.began(exchange)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Exchange], output: Tensor) -> None:
        x, ctx.exchange = inputs
        if ctx.exchange.keeps:
            ctx.save_for_backward(x, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, exchange: _Exchange) -> tuple[Tensor, int]:
        """One collective for the whole batch, with the batch dim first."""
        one = _Exchange(_batched(exchange.call))
        y = _Blocking.apply(x.movedim(in_dims[0], 0), one)
        exchange.sizes = one.sizes
        return y, 0  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call = ctx.exchange.call
        if (types := this_rank().types) is not None and call.row.type == "I":
            types.gradient(ctx.exchange, call.place.group, grads[0])
        x, y = ctx.saved_tensors or (None, None)
        dx = _transposed(call, grads[0], x, y, ctx.exchange.sizes)
        return (_received(call, do(*dx)) if isinstance(dx, Plan) else dx), None


class _Flight(Pending):
    """A differentiable collective between its start and its wait.

    In the graph it is two nodes, joined by a token, which the backward pass reaches in reverse order. At `wait` the
    gradient arrives and its collective starts; at `start` that collective is waited for. Whatever the backward pass
    computes between the two overlaps with it, as in the forward pass. The gradient passes between the nodes outside the
    graph, in the exchange; under create_graph it has a graph of its own, with two nodes of the same kind.
    """

    def __init__(self, call: Call, x: Tensor):
        self.exchange = _Exchange(call)
        self.token: Tensor | None = _Start.apply(x, self.exchange)  # type: ignore[assignment]
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            self.result = _Wait.apply(self.token, self.exchange)  # type: ignore[assignment]
            self.token = None
        return self.result  # type: ignore[return-value]


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.pending = this_rank().begin(exchange.call, x)
        if exchange.keeps:
            exchange.sent = own(x)
        return token(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        exchange = ctx.exchange
        gradient, exchange.gradient = exchange.gradient, None
        if isinstance(gradient, Pending) and (pair := this_rank().pair) is not None:
            pair.let_go_on()
        return (_received(exchange.call, gradient.wait()) if isinstance(gradient, Pending) else gradient), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        assert exchange.pending is not None
        y = exchange.pending.wait()
        exchange.sizes, exchange.pending = exchange.pending.sizes, None
        ctx.exchange = exchange
        if exchange.keeps:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        exchange, (y,) = ctx.exchange, ctx.saved_tensors or (None,)
        dx = _transposed(exchange.call, grads[0], exchange.sent, y, exchange.sizes)
        exchange.gradient = start_on(*dx) if isinstance(dx, Plan) else dx
        return token(grads[0]), None


def token(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor that joins the two nodes; making it is not an operation of the program."""
    with no_dispatch():
        return like.new_zeros((), dtype=dtype)


class Landed(Pending):
    """A collective that is done."""

    def __init__(self, result: Tensor):
        self.result = result

    def wait(self) -> Tensor:
        return self.result


class _Varying(torch.autograd.Function):
    """Forward: the same x. Backward: the sum of the ranks' gradients, which is replicated again."""

    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Axis], output: Tensor) -> None:
        _, ctx.axis = inputs

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, axis: Axis) -> tuple[Tensor, int]:
        return _Varying.apply(x, axis), in_dims[0]  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _summed(grads[0], ctx.axis), None


# --- how the gradient flows back --------------------------------------------------------------------------------------


def _transposed(
    call: Call, dy: Tensor, x: Tensor | None, y: Tensor | None, sizes: tuple[int, ...] | None
) -> Tensor | Plan:
    """dx, or the plan of the collective that computes it, as given by the collective's row; from the forward pass it
    may need x, y, and each rank's size along `dim`."""
    row, reduction = call.row, call.reduction
    if row.takes == "one":
        return _sent_back(call, dy)
    if not row.transposed:
        dy = _used_by_each(call, dy)
    if reduction == "mean":
        dy = dy / len(call.place.group)
    if row.transposed:
        op, *names = row.transposed
        about = {**call.about, "op": "sum", "sizes": sizes}
        params = tuple(about[name] for name in names)
        back = Plan(this_rank().call(op, call.axis, params, splits=call.takes, takes=call.splits), dy)
        if reduction not in EXTREMES:
            return back
        assert x is not None and y is not None
        return _shared(call, _received(call, do(*back)), x == do(back.call, y.detach()))
    if reduction in EXTREMES:
        return _shared(call, dy, x == y)
    if row.takes == "root" and call.place.index != call.root:
        return dy.masked_fill(torch.tensor(True, device=dy.device), 0)
    return dy


def _sent_back(call: Call, dy: Tensor) -> Plan:
    """The collective that sends the gradient back the way the message came."""
    (param,) = call.params
    back = -param if call.op == "ring_shift" else tuple((target, source) for source, target in param)
    peers = call.peers
    return Plan(this_rank().call(call.op, call.axis, (back,), lambda place, _: (peers[1], peers[0])), dy)  # type: ignore


def _batched(call: Call) -> Call:
    """The same collective with a batch dim in front of all others."""
    if call.splits is not None:
        raise NotImplementedError(f"vmap of {call.op} with sizes: pieces of different sizes are cut along dim 0 alone")
    params = tuple(param + 1 if name.endswith("dim") else param for name, param in call.about.items())
    return this_rank().call(call.op, call.axis, params, lambda *_: call.peers)  # type: ignore[arg-type]


def _received(call: Call, dx: Tensor) -> Tensor:
    """The result of a backward pass's collective; if it is replicated, it is each rank's own from here on."""
    (op, *_) = call.row.transposed or ("",)
    return _used_by_each(call, dx) if op and ROWS[op].type == "I" else dx


def _used_by_each(call: Call, dy: Tensor) -> Tensor:
    """The gradient of a replicated tensor, which is replicated too, as each rank's own from here on: a second backward
    pass adds up what each rank does with it."""
    return varying(dy, call.axis) if _is_followed(dy) else dy


def _shared(call: Call, dy: Tensor, holds: Tensor) -> Tensor:
    """dy for the ranks that hold the extreme, in equal shares."""
    share = holds.to(dy.dtype)
    return dy * share / _summed(share, call.axis)


def _summed(x: Tensor, axis: Axis) -> Tensor:
    return do(this_rank().call("all_reduce", axis, ("sum",)), x)
