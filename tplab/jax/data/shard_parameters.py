"""ZeRO stage 3: every rank keeps its own part of the parameters, and layers are whole only while they run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from tplab.jax.data.pieces import Gather, Reduce, gather_rows, reduce_rows
from tplab.jax.data.unit import About
from tplab.mesh import Axis


def shard_parameters(
    model: Any,
    axis: Axis = "dp",
    *,
    op: str = "mean",
    reshard_after_forward: bool | Axis = True,
    prefetch: bool = True,
    replicate_axis: Axis | None = None,
    compute_dtype: Any = None,
    reduce_dtype: Any = None,
    gather: Gather | None = None,
    reduce: Reduce | None = None,
) -> ShardedLayer | ShardedLayers:
    """Divide the parameters of `model` over the R ranks of `axis` (ZeRO stage 3, also called FSDP).

        layer = shard_parameters(layer, "dp")
        pieces = layer.shard(params)                  # in a rank's program: this rank's piece of each parameter
        y = layer(pieces, x)                          # gathers them, and runs the layer
        grads = jax.grad(loss_of(layer))(pieces)      # pieces too, and so are the optimizer's states

    model   a layer, called as layer(params, *args), or any such function; or a list of them, which run one after
            another: each is a unit, whose parameters are sent together

        before the forward pass    all_gather: they are whole
        after it                   they are freed: they are not kept for the backward pass
        before the backward pass   all_gather again, once the gradient of the output is ready
        after it                   reduce_scatter: each rank gets its piece of the gradients

    op                     how gradients are combined: "mean" or "sum"
    reshard_after_forward  False keeps the whole parameters from the forward to the backward pass. An axis that is a
                           part of `axis`: each rank keeps a second piece, cut over the ranks of that axis, and the
                           second gather runs only among them (ZeRO++'s hpZ)
    prefetch               for a list of layers: whether the next layer's parameters may be sent while one runs. Other
                           layers are gathered when their input is ready
    replicate_axis         the axis along which pieces have copies (hybrid sharding): gradients are all_reduced along it
    compute_dtype          of the whole parameters: for example bfloat16, with pieces in float32
    reduce_dtype           the dtype in which gradients are sent; by default, that of the whole parameters
    gather, reduce         the collectives, as in `tplab.jax.data.pieces`; None: all_gather, reduce_scatter

    states    16/R bytes per parameter with Adam, besides the whole units
    sent      3(R-1)/R of the parameters by each rank; 2(R-1)/R without reshard_after_forward
    If two units share a parameter, give its pieces to both: the gradients from both are added up. The backward pass
    gathers a unit when the gradient of its output is ready. On CPUs XLA drops the barriers that enforce this, merges
    the two gathers of a unit, and keeps the first result; in a `lax.scan` over layers it does not.
    Rajbhandari et al. 2020, section 5.3; Zhao et al. 2023, "PyTorch FSDP" (arXiv:2304.11277).
    """
    send = gather or gather_rows, reduce or reduce_rows
    about = About(axis, op, reshard_after_forward, replicate_axis, compute_dtype, reduce_dtype, *send)
    if isinstance(model, Sequence):
        layers = (ShardedLayer(layer, replace(about, unit=unit)) for unit, layer in enumerate(model))
        return ShardedLayers(tuple(layers), prefetch)
    return ShardedLayer(model, about)


@dataclass(frozen=True)
class ShardedLayer:
    """A layer whose parameters are pieces.

    init(key)        the layer's parameters, as this rank's pieces
    shard(params)    this rank's pieces of whole parameters
    gather(pieces)   the whole parameters, the same on every rank; no gradient flows through it
    """

    layer: Any
    about: About

    @property
    def __signature__(self) -> inspect.Signature:
        """The layer's own signature, so that a caller can see whether it takes a random key."""
        return inspect.signature(self.layer)

    def init(self, key: Any) -> Any:
        return self.shard(self.layer.init(key)) if hasattr(self.layer, "init") else []

    def shard(self, params: Any) -> Any:
        return jax.tree.map(self.about.shard, params)

    def gather(self, pieces: Any) -> Any:
        return self.about.gathered(pieces)

    def axes_of_mean_gradients(self) -> tuple[str, ...]:
        """The axes over which its gradients are already the mean."""
        return self.about.names() if self.about.op == "mean" else ()

    def __call__(self, pieces: Any, *args: Any, **kwargs: Any) -> Any:
        return self.about.run(self.layer, pieces, *args, after=(args, kwargs), **kwargs)


@dataclass(frozen=True)
class ShardedLayers:
    """Layers that run one after another, each a unit. A layer without `init` is a function without parameters."""

    layers: tuple[ShardedLayer, ...]
    prefetch: bool = True

    def init(self, key: Any) -> list[Any]:
        return [layer.init(k) for layer, k in zip(self.layers, jax.random.split(key, len(self.layers)))]

    def shard(self, params: Sequence[Any]) -> list[Any]:
        return [layer.shard(p) for layer, p in zip(self.layers, params, strict=True)]

    def gather(self, pieces: Sequence[Any]) -> list[Any]:
        return [layer.gather(p) for layer, p in zip(self.layers, pieces, strict=True)]

    def axes_of_mean_gradients(self) -> tuple[str, ...]:
        return self.layers[0].axes_of_mean_gradients() if self.layers else ()

    def __call__(self, pieces: Sequence[Any], x: Any) -> Any:
        before = x
        for layer, held in zip(self.layers, pieces, strict=True):
            if jax.tree.leaves(held):
                after = before if self.prefetch else x
                before, x = x, layer.about.run(layer.layer, held, x, after=after)
            else:
                x = layer.layer(x)
        return x
