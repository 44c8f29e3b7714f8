"""An optimizer whose states are divided over ranks: ZeRO's first two stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tplab.data.pieces import OPS, Pieces, check_copies, data_axes
from tplab.errors import one_of
from tplab.jax.comm.collectives import axis_size
from tplab.jax.comm.derivatives import with_backward
from tplab.jax.data.average import check_own, check_reduced
from tplab.jax.data.pieces import (
    Gather,
    Reduce,
    gather_copies,
    held_of,
    message_of,
    pieces_of,
    reduce_rows,
    reduced_row,
    row_of,
    wholes_in,
)
from tplab.jax.ranks.context import this_mesh, vary, varying_axes
from tplab.jax.ranks.specs import check, spread
from tplab.mesh import Axis


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientPieces:
    """This rank's part of the gradient, combined over the ranks: a piece [width] for each parameter, as in `tree`."""

    tree: Any


@dataclass(frozen=True)
class ShardedOptimizer:
    """An optax optimizer over this rank's pieces of the parameters: `init` and `update` as in optax, called in a rank's
    program. States are pieces [width], and numbers that are the same on all ranks.

        specs = jax.tree.map(lambda x: P("dp") if x.ndim else P(), state)      # for a state that leaves the program

    value_and_grad(loss)      like jax.value_and_grad, but gradients are this rank's own (stage 1; JAX would otherwise
                              add them up), or are reduce-scattered during the backward pass (stage 2: GradientPieces)
    reduce_gradients(grads)   the first part of `update`: GradientPieces, so that you can clip or inspect them
    """

    inner: Any
    axis: Axis
    op: str
    replicate_axis: Axis | None
    master_dtype: Any
    reduce_dtype: Any
    gather: Gather
    reduce: Reduce
    specs: Any = None
    during_backward: bool = False
    is_reduced: bool = False

    def __post_init__(self) -> None:
        one_of("op", self.op, OPS)

    def init(self, params: Any) -> dict[str, Any]:
        """The states of this rank's pieces; with a master dtype, also its copy of the parameters."""
        pieces = self._pieces(params)
        state = {"states": self.inner.init(pieces)}
        return state if self.master_dtype is None else state | {"master": pieces}

    def update(self, grads: Any, state: dict[str, Any], params: Any) -> tuple[Any, dict[str, Any]]:
        """(updates to add to params, the same on every rank; the new state). Every rank gets all updates."""
        reduced = grads if isinstance(grads, GradientPieces) else self.reduce_gradients(grads)
        pieces = state["master"] if self.master_dtype is not None else self._pieces(params)
        own = jax.tree.map(lambda g, p: g.astype(p.dtype), reduced.tree, pieces)
        updates, states = self.inner.update(own, state["states"], pieces)
        cuttings = self._cuttings(params)
        if self.master_dtype is None:
            return jax.tree.map(lambda c, u: c.whole(u), cuttings, updates), {"states": states}
        master = jax.tree.map(lambda p, u: p + u, pieces, updates)
        wide = self.master_dtype
        updates = jax.tree.map(
            lambda c, m, p: c.whole(m.astype(p.dtype)).astype(wide) - p.astype(wide), cuttings, master, params
        )
        return updates, {"states": states, "master": master}

    def reduce_gradients(self, grads: Any) -> GradientPieces:
        """This rank's piece of each gradient; with is_reduced they are only cut."""
        cuttings = self._cuttings(grads)
        if self.is_reduced:
            check_reduced(grads, self.names, self.specs)
            return GradientPieces(jax.tree.map(lambda c, g: c.cut(g), cuttings, grads))
        check_own(grads, self.names, ": is_reduced=True")
        return GradientPieces(jax.tree.map(lambda c, g: c.reduced(g), cuttings, grads))

    def value_and_grad(self, loss: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        """Like jax.value_and_grad(loss), with respect to the parameters, which come first."""
        if self.during_backward:
            return self._value_and_pieces(loss, has_aux)

        def value_and_own_grad(params: Any, *args: Any, **kwargs: Any) -> Any:
            own = jax.tree.map(lambda p: vary(p, self.names), params)
            return jax.value_and_grad(loss, has_aux=has_aux)(own, *args, **kwargs)

        return value_and_own_grad

    def _value_and_pieces(self, loss: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        def value_and_grad(params: Any, *args: Any, **kwargs: Any) -> Any:
            cuttings = self._cuttings(params)

            def of_pieces(pieces: Any) -> Any:
                return loss(jax.tree.map(_cut_behind, cuttings, params, pieces), *args, **kwargs)

            def nothing(cutting: Cutting, p: Array) -> Array:  # with the type of a piece of the gradient
                piece = jnp.zeros(cutting.pieces.width, self.reduce_dtype or p.dtype)
                return vary(piece, (*cutting.axis, *varying_axes(p)))

            value, grads = jax.value_and_grad(of_pieces, has_aux=has_aux)(jax.tree.map(nothing, cuttings, params))
            return value, GradientPieces(grads)

        return value_and_grad

    @property
    def names(self) -> tuple[str, ...]:
        return data_axes(this_mesh(), self.axis, self.replicate_axis)

    def _pieces(self, params: Any) -> Any:
        wide = self.master_dtype
        return jax.tree.map(lambda c, p: c.cut(p.astype(wide or p.dtype)), self._cuttings(params), params)

    def _cuttings(self, params: Any) -> Any:
        """How each parameter is cut. One that is already cut along some of the axes is cut along the others."""
        leaves, structure = jax.tree.flatten(params)
        mesh, replicated = this_mesh(), self.replicate_axis
        check(self.specs, "specs", mesh)
        lie = spread(self.specs, params, "specs")
        copies = [tuple(a for a in mesh.names(self.axis) if a not in spec.axis_names) for spec in lie]
        for axis, spec in zip(copies, lie, strict=True):
            is_cut = replicated is not None and not {*spec.axis_names}.isdisjoint(mesh.names(replicated))
            check_copies(mesh, self.axis, axis, replicated if is_cut else None)
        return structure.unflatten(
            Cutting(pieces_of([leaf], axis), axis, self) for leaf, axis in zip(leaves, copies, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Cutting:
    """How one parameter is cut into pieces along `axis`, along which it is replicated."""

    pieces: Pieces
    axis: tuple[str, ...]
    about: ShardedOptimizer

    def cut(self, whole: Array) -> Array:
        """[...]   ->   this rank's piece [width]"""
        return held_of(self.pieces, [whole], self.axis)[0]

    def whole(self, piece: Array) -> Array:
        """The reverse: every rank's piece is sent to all."""
        return wholes_in(self.pieces, self.about.gather(row_of([piece], piece.dtype), self.axis).wait())[0]

    def reduced(self, grad: Array) -> Array:
        """grad [...], each rank's own   ->   the piece [width] of the sum or mean"""
        about, message = self.about, message_of(self.pieces, [grad], self.about.reduce_dtype)
        row = reduced_row(about.reduce(message, self.axis, about.op), about.replicate_axis, about.op)
        others = axis_size(about.axis) // axis_size(self.axis)  # ranks with other experts count too
        return row / others if about.op == "mean" and others > 1 else row


def _cut_behind(cutting: Cutting, whole: Array, piece: Array) -> Array:
    """The whole parameter. Its gradient is combined, cut and passed to `piece` as soon as the backward pass has it."""
    return with_backward(_whole, _combined, [whole, piece], cutting)[0]


def _whole(members: list[Array], cutting: Cutting) -> list[Array]:
    return [vary(members[0], cutting.about.names)]


def _combined(grads: list[Array], axes: list[tuple[str, ...]], cutting: Cutting) -> list[Any]:
    return [None, cutting.reduced(grads[0])]


# --- stage 1 ----------------------------------------------------------------------------------------------------------


def shard_optimizer(
    optimizer: Any,
    axis: Axis = "dp",
    *,
    op: str = "mean",
    replicate_axis: Axis | None = None,
    master_dtype: Any = None,
    reduce_dtype: Any = None,
    is_reduced: bool = False,
    specs: Any = None,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> ShardedOptimizer:
    """Divide the states of an optimizer over the R ranks of `axis`, which hold copies of the model (ZeRO stage 1).

        optimizer = shard_optimizer(optax.adamw(1e-3), "dp")
        state = optimizer.init(params)
        value, grads = optimizer.value_and_grad(loss)(params, x, y)      # each rank's own gradient
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    `update` combines the gradients, so that each rank gets its piece [ceil(n/R)] of each parameter's gradient [n]; it
    computes the updates of the pieces; and it gathers them, so that every rank can update the whole parameters.

    optimizer       an optax optimizer. It must be elementwise, as sgd, adam and adamw are: it never sees a whole
                    matrix, so clip_by_global_norm would see the norm of a part
    op              how gradients are combined: "mean" or "sum"
    replicate_axis  the axis along which pieces have copies: gradients are combined along it too
    master_dtype    of the pieces: float32 keeps a precise copy of bfloat16 parameters
    reduce_dtype    the dtype in which gradients are sent; by default, their own
    is_reduced      whether the gradients have already been combined: by `average_gradients`, or by JAX, which adds up
                    the result of jax.grad for parameters that are the same on every rank. Then nothing is sent for
                    them, and `op` is not applied: differentiate the mean of the losses, all_reduce(loss, "dp", "mean")
    specs           how the parameters are sharded, as for `clip_gradients`. Experts that are cut along some of the axes
                    have copies along the others, which divide them; means are over all. None: all are replicated
    gather, reduce  the collectives: functions as in `tplab.jax.data.pieces`, or None for all_gather and reduce_scatter

    states    4 + 12/R bytes per parameter with Adam and master_dtype=float32, instead of 16 on each of R ranks
    sent      reduce_scatter and all_gather: 2(R-1)/R of the parameters by each rank, the same as an all_reduce of the
              gradients; one message for each parameter. With is_reduced, that all_reduce comes first, and it is
              3(R-1)/R in total
    `update` raises ValueError for gradients that JAX has added up, unless is_reduced is set.
    Rajbhandari et al. 2020, section 5.1.
    """
    return ShardedOptimizer(
        optimizer,
        axis,
        op,
        replicate_axis,
        master_dtype,
        reduce_dtype,
        gather or gather_copies,
        reduce or reduce_rows,
        specs,
        is_reduced=is_reduced,
    )


# --- stage 2 ----------------------------------------------------------------------------------------------------------


def shard_gradients(
    optimizer: Any,
    axis: Axis = "dp",
    *,
    op: str = "mean",
    replicate_axis: Axis | None = None,
    master_dtype: Any = None,
    reduce_dtype: Any = None,
    specs: Any = None,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> ShardedOptimizer:
    """Divide the states of an optimizer and the gradients over the R ranks of `axis` (ZeRO stage 2).

        optimizer = shard_gradients(optax.adamw(1e-3), "dp")
        state = optimizer.init(params)
        value, grads = optimizer.value_and_grad(loss)(params, x, y)      # this rank's part of the gradients
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    This is like `shard_optimizer`, but the backward pass itself combines gradients: `value_and_grad` returns this
    rank's piece [ceil(n/R)] of each, and a parameter's reduce_scatter depends only on its gradient. The compiler
    decides when it runs, and so how many whole gradients exist at once.

    states    2 + 14/R bytes per parameter with Adam and master_dtype=float32
    sent      2(R-1)/R of the parameters by each rank; with k backward passes before a step, each sends its gradients:
              k+1 times (R-1)/R, where stage 1 adds them up first and sends twice (R-1)/R
    The other arguments are those of `shard_optimizer`. Rajbhandari et al. 2020, section 5.2.
    """
    first = shard_optimizer(
        optimizer,
        axis,
        op=op,
        replicate_axis=replicate_axis,
        master_dtype=master_dtype,
        reduce_dtype=reduce_dtype,
        specs=specs,
        gather=gather,
        reduce=reduce,
    )
    return replace(first, during_backward=True)
