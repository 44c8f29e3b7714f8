"""A function of sharded arrays, compiled: its HLO module, and the mesh whose ranks run it."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import GetAttrKey, SequenceKey

from tplab import spare
from tplab.errors import TraceError
from tplab.jax.private import as_written, changed, kept_of, out_shardings_of
from tplab.jax.ranks.unknown import explain
from tplab.jax.tracing.asked import Ask, Asked
from tplab.jax.tracing.hlo import Module
from tplab.jax.tracing.jaxprs import equations_of
from tplab.mesh import Mesh


class Lowered(NamedTuple):
    """title   the function's name
    names   JAX's names of arguments -> the user's, if they differ
    asked   the requests for shardings, if the program is `numbered`
    traced  the traced program; None if JAX does not return it
    """

    title: str
    module: Module
    mesh: Mesh
    names: dict[str, str]
    asked: Asked
    traced: Any

    def compiled_with(self, specs: Mapping[Ask, Sequence[Any]]) -> Module:
        """The module of the same program with other requested specs. Raises ValueError if that is impossible."""
        asked = Asked(self.traced.jaxpr, out_shardings_of(self.traced), specs)
        with _hushed():
            return Module(_compiled(_numbered(self.traced, asked).lower()).as_text() or "")


def compiled_for(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], *, numbered: bool = False) -> Lowered:
    """Compile `fn(*args, **kwargs)`. `numbered`: with the number of its equation in the name of each instruction.
    Raises TraceError inside a function that JAX traces."""
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
    if is_filtered := type(fn).__module__.startswith("equinox"):
        fn = getattr(fn, "__wrapped__", fn)  # filter_jit traces arrays and uses the rest as it is, as we do
    jaxpr, traced, asked = None, None, Asked(None)
    if hasattr(fn, "as_text"):
        compiled = fn
    else:
        with as_written() if numbered else nullcontext():
            if not hasattr(fn, "lower"):
                traced = _jitted(fn, args, kwargs, is_filtered)
            elif hasattr(fn, "trace"):
                traced = fn.trace(*args, **kwargs)
            traced = getattr(traced, "traced", traced)  # Flax's is wrapped
            jaxpr = getattr(traced, "jaxpr", None)
            if type(fn).__name__ == "PmapFunction":  # until JAX 0.7 it could only be lowered
                jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
            asked = Asked(jaxpr if numbered else None, out_shardings_of(traced))
            compiled = _compiled(fn.lower(*args, **kwargs) if traced is None else _numbered(traced, asked).lower())
    compiled = getattr(compiled, "compiled", compiled)  # Equinox's is wrapped
    module = Module(compiled.as_text() or "")
    mesh = _mesh(_meshes(leaves, compiled, jaxpr), module.num_ranks)
    title = module.name
    if not hasattr(fn, "as_text"):
        named = getattr(fn, "func", fn)  # that of a partial
        title = getattr(named, "__name__", type(named).__name__).replace("<lambda>", "lambda")
    return Lowered(title, module, mesh, _names(fn, args, kwargs, kept_of(compiled)), asked, traced)


def _numbered(traced: Any, asked: Asked) -> Any:
    """The traced program, with the numbers of `asked` if there are any."""
    if asked.numbered is None:
        return traced
    return changed(traced, jaxpr=asked.numbered, out_shardings=asked.results)


def _compiled(lowered: Any) -> Any:
    with spare.returned():
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            explain(error)
            raise


@contextmanager
def _hushed() -> Iterator[None]:
    """Silence XLA's warnings on standard error, which would include those about shardings that only tplab tries."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# --- a function that is not jitted -----------------------------------------------------------------------------------


def _jitted(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], is_filtered: bool) -> Any:
    """`fn` under `jit`. Arguments that are not arrays, such as the activation of an Equinox layer, may be used as they
    are; then only the arrays among the results count. `is_filtered`: numbers are always used as they are."""
    found, tree = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    if all(_is_array(leaf) or (isinstance(leaf, _NUMBERS) and not is_filtered) for _, leaf in found):
        return jax.jit(fn).trace(*args, **kwargs)
    names = [_name(fn, path) for path, _ in found]

    @wraps(fn)
    def program(arrays: dict[str, Any]) -> Any:
        leaves = [arrays.get(name, leaf) for name, (_, leaf) in zip(names, found, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return [leaf for leaf in jax.tree.leaves(fn(*args, **kwargs)) if _is_array(leaf)]

    del program.__wrapped__  # its arguments are its own
    return jax.jit(program).trace({name: leaf for name, (_, leaf) in zip(names, found, strict=True) if _is_array(leaf)})


_NUMBERS = bool, int, float, complex


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _name(fn: Callable[..., Any], path: Any) -> str:
    """The name of an argument for the user: "model.layers[0].weight"."""
    _, first, *rest = path  # the first key says whether it is passed by position or by name
    name = getattr(first, "key", None)
    if name is None:
        try:
            name = list(inspect.signature(fn).parameters)[first.idx]
        except (TypeError, ValueError, IndexError):
            name = f"args[{first.idx}]"
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _names(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], kept: Sequence[int]) -> dict[str, str]:
    """JAX's name -> the user's: of a pmap's arguments ("flat_args[0]"); of all if some are Refs ("Arg_0": the first one
    `kept`); of Flax NNX's parameters, in lists ("model.states[0][1]"); of fields whose keys are strings ("modelw")."""
    found, _ = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    dotted = [tuple(GetAttrKey(key) if isinstance(key, str) else key for key in path) for path, _ in found]
    names = {_name(fn, path): _name(fn, other) for (path, _), other in zip(found, dotted)}
    names |= {f"flat_args[{number}]": _name(fn, path) for number, path in enumerate(dotted)}
    arrays = [path for path, leaf in found if _is_array(leaf) or isinstance(leaf, _NUMBERS)]
    names |= {f"Arg_{number}": _name(fn, arrays[place]) for number, place in enumerate(kept) if place < len(arrays)}
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return names
    listed = {_name(fn, (None, SequenceKey(place))): arg for place, arg in enumerate(args)} | kwargs
    for name, arg in listed.items():
        if isinstance(arg, nnx.Pytree):
            for number, (path, _) in enumerate(nnx.to_flat_state(nnx.state(arg))):
                text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
                names[f"{name}.states[0][{number}]"] = f"{name}{text}"
    return names


# --- the mesh --------------------------------------------------------------------------------------------------------


def _meshes(leaves: Sequence[Any], compiled: Any, jaxpr: Any) -> Iterator[dict[Any, int]]:
    """Axis -> size, for the meshes of the arguments and results, and for those that the function itself uses."""
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    for name in ("input_shardings", "output_shardings"):
        with suppress(AttributeError, ValueError):  # of a pmap until JAX 0.7; of results, where arguments are Refs
            shardings += jax.tree.leaves(getattr(compiled, name))
    for eqn, _ in equations_of(jaxpr.jaxpr) if jaxpr is not None else ():
        if eqn.primitive.name == "shard_map":
            yield dict(eqn.params["mesh"].shape)
        elif eqn.primitive.name == "xla_pmap":
            yield {eqn.params["axis_name"]: eqn.params["global_axis_size"]}
        shardings.append(eqn.params.get("sharding"))
    yield from (dict(sharding.mesh.shape) for sharding in shardings if isinstance(sharding, NamedSharding))
    yield dict(jax.sharding.get_abstract_mesh().shape)


def _mesh(meshes: Iterator[dict[Any, int]], num_ranks: int) -> Mesh:
    """The mesh with the most axes among those with the program's number of ranks, or all devices along one axis."""
    shapes = [shape for shape in meshes if shape and math.prod(shape.values()) == num_ranks]
    shape = max(shapes, key=lambda shape: sum(size > 1 for size in shape.values()), default={"devices": num_ranks})
    named: dict[str, int] = {}
    for name, size in shape.items():
        text = re.sub(r"\W|^(?=\d)", "_", str(name))
        if text == "_internal_pmap_axis_name" or not isinstance(name, str):  # a pmap without axis_name
            text = "devices"
        named[text if text not in named else f"{text}_{len(named)}"] = size
    return Mesh(**named)
