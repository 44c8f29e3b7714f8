"""A function of sharded arrays, compiled: its HLO module, and the mesh whose ranks run it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from tplab.errors import TraceError
from tplab.jax.tracing.hlo import Module
from tplab.jax.tracing.jaxprs import equations_of
from tplab.mesh import Mesh


class Lowered(NamedTuple):
    """title   the function's name"""

    title: str
    module: Module
    mesh: Mesh


def compiled_for(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Lowered:
    """What XLA makes of `fn(*args, **kwargs)`. Raises TraceError inside a function that JAX traces."""
    leaves = jax.tree.leaves((args, kwargs))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise TraceError(
            "trace was called inside jit, grad or another transformation, where arguments are not arrays yet; call it "
            "outside, with the whole function: trace(jax.jit(step), params, batch)"
        )
    if not callable(fn):
        raise TypeError(
            f"trace takes a function and its arguments: trace(step, params, batch), not {type(fn).__name__}"
        )
    if hasattr(fn, "as_text") and (args or kwargs):
        raise TypeError("this function is compiled already, for arguments of its own: trace(compiled), without any")
    jaxpr = None
    if hasattr(fn, "as_text"):
        compiled = fn
    elif hasattr(fn, "lower"):
        traced = fn.trace(*args, **kwargs) if hasattr(fn, "trace") else None
        jaxpr = getattr(traced, "jaxpr", None)
        compiled = (fn.lower(*args, **kwargs) if traced is None else traced.lower()).compile()
    else:
        traced = _jitted(fn, args, kwargs)
        jaxpr, compiled = traced.jaxpr, traced.lower().compile()
    compiled = getattr(compiled, "compiled", compiled)  # Equinox's is wrapped
    module = Module(compiled.as_text() or "")
    return Lowered(_title(fn), module, _mesh(_meshes(leaves, compiled, jaxpr), module.num_ranks))


def _title(fn: Any) -> str:
    fn = getattr(fn, "func", fn)  # of a partial
    return getattr(fn, "__name__", type(fn).__name__).replace("<lambda>", "lambda")


# --- a function that nobody has jitted -------------------------------------------------------------------------------


def _jitted(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`fn` as `jit` traces it. What is no array among its arguments, such as the activation of an Equinox layer, it may
    use as it is; then of its results, too, only arrays count."""
    found, tree = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    if all(_is_array(leaf) or isinstance(leaf, bool | int | float | complex) for _, leaf in found):
        return jax.jit(fn).trace(*args, **kwargs)
    names = [_name(fn, path) for path, _ in found]

    @wraps(fn)
    def program(arrays: dict[str, Any]) -> Any:
        leaves = [arrays.get(name, leaf) for name, (_, leaf) in zip(names, found, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return [leaf for leaf in jax.tree.leaves(fn(*args, **kwargs)) if _is_array(leaf)]

    del program.__wrapped__  # its arguments are its own
    return jax.jit(program).trace({name: leaf for name, (_, leaf) in zip(names, found, strict=True) if _is_array(leaf)})


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _name(fn: Callable[..., Any], path: Any) -> str:
    """An argument as the reader knows it: "model.layers[0].weight"."""
    _, first, *rest = path  # the first key says whether it is passed by place or by name
    name = getattr(first, "key", None)
    if name is None:
        try:
            name = list(inspect.signature(fn).parameters)[first.idx]
        except (TypeError, ValueError, IndexError):
            name = f"args[{first.idx}]"
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


# --- the mesh --------------------------------------------------------------------------------------------------------


def _meshes(leaves: Sequence[Any], compiled: Any, jaxpr: Any) -> Iterator[Any]:
    """JAX's meshes of the arguments and results, and those that the function names itself."""
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    shardings += jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    if jaxpr is not None:
        for eqn, _ in equations_of(jaxpr.jaxpr):
            if eqn.primitive.name == "shard_map":
                yield eqn.params["mesh"]
            shardings.append(eqn.params.get("sharding"))
    yield from (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    yield jax.sharding.get_abstract_mesh()


def _mesh(meshes: Iterator[Any], num_ranks: int) -> Mesh:
    """The mesh with the most axes, of those that have as many ranks as the program; else all devices along one axis."""
    shapes = [dict(mesh.shape) for mesh in meshes if mesh.size == num_ranks]
    shape = max(shapes, key=lambda shape: sum(size > 1 for size in shape.values()), default={})
    shape = shape or {"devices": num_ranks}
    named: dict[str, int] = {}
    for name, size in shape.items():
        text = re.sub(r"\W|^(?=\d)", "_", str(name))
        if text == "_internal_pmap_axis_name" or not isinstance(name, str):  # a pmap without axis_name
            text = "devices"
        named[text if text not in named else f"{text}_{len(named)}"] = size
    return Mesh(**named)
