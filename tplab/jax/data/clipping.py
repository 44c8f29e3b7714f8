"""The norm of all gradients of a model, however its parameters are sharded, and clipping by it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tplab.data.gradients import EPSILON, check_max_norm, check_norm_type, cut_along, root
from tplab.errors import SpecError
from tplab.jax.comm.collectives import all_reduce, axis_index
from tplab.jax.pipeline.copies import once
from tplab.jax.pipeline.stages import Stages
from tplab.jax.ranks.context import this_mesh, varying_axes
from tplab.jax.ranks.specs import check, spread
from tplab.sharding import P


def gradient_norm(gradients: Any, specs: Any = None, *, norm_type: float = 2.0) -> Array:
    """The norm of all gradients together, as on one device, the same on every rank.

    gradients    a pytree of arrays, or `Stages`
    specs        how they are sharded: a pytree of P of the same structure, such as `GPT.specs`, in which one P may
                 cover a whole subtree. None: every rank holds them whole. Stages need none
    norm_type    p, above 0, or inf for the largest element

    norm = (sum |g|^p)^(1/p) over every element of the model, each once. A piece that several ranks hold is counted by
    the one at position 0; tied parameters, and stages that several ranks hold, are counted at their first place.
    Gradients of copies must already be equal: average them first.
    cost   an all_reduce of 1 number over the axes that specs (and Stages) name; none if these name no axis
    Raises SpecError if JAX's types say that an array differs along an axis that its spec does not name, or the
    reverse.
    """
    p = check_norm_type(norm_type)
    mesh = this_mesh()
    each = _pieces(gradients, specs)
    axes = cut_along((spec for _, spec in each), mesh)
    wide = jnp.result_type(jnp.float32, *(x.dtype for x, _ in each))
    total = jnp.zeros((), jnp.finfo(wide).dtype)
    for x, spec in each:
        magnitude = jnp.abs(x.astype(jnp.result_type(jnp.float32, x.dtype)))
        part = magnitude.max(initial=0) if math.isinf(p) else (magnitude**p).sum()
        copies = tuple(name for name in axes if name not in spec.axis_names)
        if copies:
            part = jnp.where(axis_index(copies) == 0, part, 0)
        total = jnp.maximum(total, part) if math.isinf(p) else total + part
    if axes:
        total = all_reduce(total, axes, "max" if math.isinf(p) else "sum")
    return root(total, p)


def clip_gradients(gradients: Any, max_norm: float, specs: Any = None, *, norm_type: float = 2.0) -> tuple[Any, Array]:
    """The gradients, scaled by min(1, max_norm / (norm + 1e-6)), and their norm before that.

    This is torch.nn.utils.clip_grad_norm_ for a model that is sharded over a mesh. Every rank scales by the same
    factor, so copies stay equal. See `gradient_norm` for the arguments and the cost.
    """
    most, norm = check_max_norm(max_norm), gradient_norm(gradients, specs, norm_type=norm_type)
    return scale_to(gradients, norm, most), norm


def scale_to(gradients: Any, norm: Array, max_norm: float) -> Any:
    """Gradients with this norm, scaled by min(1, max_norm / (norm + 1e-6))."""
    factor = jnp.minimum(max_norm / (norm + EPSILON), 1)
    return jax.tree.map(lambda x: (x * factor).astype(x.dtype), gradients)


def _pieces(gradients: Any, specs: Any) -> list[tuple[Array, P]]:
    """Every array, with the axes along which ranks hold different elements of it."""
    if isinstance(gradients, Stages):
        flat = once(gradients.flat, gradients.blueprints)
        each = [(f" of Stages, {kind.dtype}", x, P(kind.axes)) for kind, x in flat.items()]
    else:
        leaves = jax.tree_util.tree_flatten_with_path(gradients)[0]
        check(specs, "specs", this_mesh())
        lie = spread(specs, gradients, "specs")
        each = [(f" {jax.tree_util.keystr(path)}", x, spec) for (path, x), spec in zip(leaves, lie)]
    for name, x, spec in each:
        _check_types(name, x, spec)
    return [(x, spec) for _, x, spec in each]


def _check_types(name: str, x: Array, spec: P) -> None:
    differs, named = varying_axes(x), set(spec.axis_names)
    if more := sorted(differs - named):
        raise SpecError(
            f"the gradient{name} differs along {', '.join(map(repr, more))} by JAX's types, and {spec} says that the "
            "ranks there hold copies; average it first, or say in specs along which axes it is cut"
        )
    if less := sorted(named - differs):
        raise SpecError(
            f"the gradient{name} is the same along {', '.join(map(repr, less))} by JAX's types, and {spec} says that "
            "it is cut there; name in specs only the axes along which ranks hold other elements"
        )
