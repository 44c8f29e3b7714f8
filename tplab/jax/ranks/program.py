"""A rank's program, compiled: one `shard_map` under one `jit`, for each kind of arguments."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from tplab import spare
from tplab.errors import SpecError
from tplab.jax.private import moved, own_copy, retracing, trace_context
from tplab.jax.ranks.context import random_key, vary
from tplab.jax.ranks.devices import jax_mesh, needs_pacing
from tplab.jax.ranks.equal import equal
from tplab.jax.ranks.outside import Outside, roots_in
from tplab.jax.ranks.specs import check, check_results, is_spec, spec_of_each, to_jax
from tplab.jax.ranks.unknown import explain
from tplab.mesh import Mesh
from tplab.sharding import check_spec

_programs: weakref.WeakKeyDictionary[Any, dict[Any, Program]] = weakref.WeakKeyDictionary()
_KEPT = 16  # programs per function, and compiled forms per program

_ALONE = "alone"  # the key for a program that calls only functions that it defines


def program_of(fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, on: str) -> Program:
    """`fn` on a mesh with these specs, cached across calls.

    It lives as long as `fn`. Another function is another program, even with the same name and source.
    """
    key = (mesh, _hashable(in_specs), _hashable(out_specs), on)
    try:
        known = _programs.setdefault(fn.__func__ if isinstance(fn, MethodType) else fn, {})
    except TypeError:  # it cannot be a key, so it is compiled for this call only
        return Program(fn, mesh, in_specs, out_specs, on)
    program = known.get(key) or Program(fn, mesh, in_specs, out_specs, on)
    _keep(known, key, program)
    return program


class Program:
    """`fn` on a mesh, with specs, and its compiled forms."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, on: str):
        self.mesh, self.in_specs, self.out_specs = mesh, in_specs, out_specs
        check(in_specs, "in_specs", mesh)
        check(out_specs, "out_specs", mesh)
        self.jax_mesh = jax_mesh(mesh, on)
        self.title = getattr(fn, "__name__", type(fn).__name__).replace("<lambda>", "lambda")
        self._known: dict[Any, _Known] = {}

    def compiled(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Compiled, list[Any]]:
        """The compiled form for `args`, and the arrays to call it with.

        A compiled form is reused if everything that `fn` can read, outside and in the arguments, is unchanged.
        Otherwise `fn` is traced; if the result is a known program after all, its compiled form is still reused.
        """
        leaves, structure = jax.tree.flatten(args)
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        kind = structure, trace_context(), *map(_kind, leaves)
        outside = Outside([fn, *roots_in(structure), *(leaf for leaf in leaves if not _is_array(leaf))])
        key = kind, outside.values if outside.is_known else object()
        known = self._known.get(key)
        if known is None or not outside.same_as(known.outside):
            known = self._traced(fn, args, kind, outside)
        _keep(self._known, key, known)
        return known.compiled, arrays

    def _traced(self, fn: Callable[..., Any], args: tuple[Any, ...], kind: Any, outside: Outside) -> _Known:
        # JAX caches traces of loop bodies, and of functions under jit and checkpoint, by the function alone. That is
        # correct only as long as nothing has changed: within one token.
        is_alone = outside.is_known and len(outside.codes) == 1
        tokens = (known.token for known in self._known.values() if outside.same_as(known.outside))
        token = _ALONE if is_alone else next(tokens, object())
        with retracing(token):
            made = Compiled(self, fn, args)
        for_gradients = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        for (other, _), known in self._known.items():
            # Equal programs have the same lines if they consist of the same functions.
            if other == kind and known.outside.codes == outside.codes and known.compiled.equals(made, for_gradients):
                made = known.compiled
        return _Known(outside, token, made)


class _Known(NamedTuple):
    """A compiled form, the outside state that it is valid for, and the token under which JAX traced it."""

    outside: Outside
    token: object
    compiled: Compiled


def _keep(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Store it as the newest entry; the oldest is dropped if there are too many."""
    known.pop(key, None)
    known[key] = value
    if len(known) > _KEPT:
        del known[next(iter(known))]


def _names(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """For each array among the arguments, the name of its parameter; "" if it is only part of one."""
    try:
        names = list(inspect.signature(fn).bind(*args).arguments)
    except (TypeError, ValueError):
        names = []
    names = names if len(names) == len(args) else [""] * len(args)
    return [
        name if leaf is arg else ""
        for name, arg in zip(names, args, strict=True)
        for leaf in jax.tree.leaves(arg)
        if _is_array(leaf)
    ]


class Compiled:
    """A program for arguments of one structure, whose arrays have one shape and dtype each.

    jaxpr          the traced whole program, with the ranks' program inside its `shard_map`
    structure      of the results
    piece_shapes   for each array of the result, the shape that a rank returns
    names          for the random key ("") and each array among the arguments: its name if it is a parameter, else ""
    """

    def __init__(self, program: Program, fn: Callable[..., Any], args: tuple[Any, ...]):
        self.program = program
        leaves, structure = jax.tree.flatten(args)
        specs = spec_of_each(program.in_specs, args)
        self.in_specs = []
        self.names = ["", *_names(fn, args)]
        for leaf, spec in zip(leaves, specs, strict=True):
            if _is_array(leaf):
                check_spec(np.shape(leaf), spec, program.mesh)
                self.in_specs.append(spec)
            elif spec.axis_names:
                raise SpecError(f"in_specs splits a {type(leaf).__name__} as {spec}; only arrays can be split")
        self._shardings = [_sharding(program.jax_mesh, to_jax(spec)) for spec in self.in_specs]
        self._whole = _sharding(program.jax_mesh, PartitionSpec())
        self._paced = needs_pacing(program.jax_mesh)
        self.piece_shapes: list[tuple[int, ...]] = []
        try:
            self._trace(jax.jit(self._mapped(fn, leaves, structure)), filter(_is_array, leaves))
        except Exception as error:
            explain(error)
            raise

    def equals(self, other: Compiled, for_gradients: bool) -> bool:
        """Whether both are the same program, and their results have one structure."""
        return self.structure == other.structure and equal(self.jaxpr, other.jaxpr, for_gradients)

    def _trace(self, function: Any, arrays: Iterable[Any]) -> None:
        arguments = self.key(0), *self.place(list(arrays))
        traced = function.trace(*arguments)
        constants = Constants()
        self.jaxpr, self.structure = constants.owned_by(traced.jaxpr), jax.tree.structure(traced.out_info)
        self._shapes = jax.tree.map(lambda about: jax.ShapeDtypeStruct(about.shape, about.dtype), traced.out_info)
        # From here on we run what was traced, and do not call `fn` again, because it may read something else by then.
        call = jaxpr_as_fun(constants.owned_by(jax.make_jaxpr(function)(*arguments)))

        def called(*arguments: Any) -> Any:
            return self.structure.unflatten(call(*arguments))

        called.__name__ = self.program.title
        self.jitted = jax.jit(called)
        self._has_run: set[Callable[..., Any]] = set()

    def _mapped(self, fn: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> Callable[..., Any]:
        """The program of all ranks: a function of the random key and the arrays among `leaves`."""
        program = self.program
        places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]

        def one_rank(key: Any, *given: Any) -> Any:
            # XLA turns empty arrays into constants, and fails if all arguments of a program are empty. Each has its own
            # barrier, because the results of one differ between ranks, by JAX's types, if any of its operands does.
            arrays = [x if np.size(x) else lax.optimization_barrier((jax.random.key_data(key), x))[1] for x in given]
            arguments = list(leaves)  # strings, functions: part of the program
            for place, array in zip(places, arrays, strict=True):
                arguments[place] = array
            with random_key(key):
                result = jax.tree.map(_array, fn(*structure.unflatten(arguments)))
            self.piece_shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(result)]
            if program.out_specs is None:  # all ranks' results are concatenated along dim 0
                return jax.tree.map(
                    lambda leaf: vary(leaf if leaf.ndim else leaf.reshape(1), program.mesh.axis_names), result
                )
            check_results(result, program.out_specs, program.mesh)
            return result

        one_rank.__name__ = program.title
        if inspect.isfunction(fn):
            one_rank.__wrapped__ = fn  # so that JAX's messages name the program's own line
        stacked = PartitionSpec(program.mesh.axis_names)
        return jax.shard_map(
            one_rank,
            mesh=program.jax_mesh,
            in_specs=(PartitionSpec(), *map(to_jax, self.in_specs)),
            out_specs=stacked if program.out_specs is None else to_jax(program.out_specs),
        )

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays, each placed according to its spec. An array that is already in place is used as it is."""
        return [_placed(array, sharding) for array, sharding in zip(arrays, self._shardings, strict=True)]

    def __call__(self, placed: Sequence[Any], seed: int, form: Callable[..., Any] | None = None) -> Any:
        """Run it, or another form of `jitted`, on arrays that `place` returned. Returns the global arrays without
        waiting for them. If the arguments are only shapes, nothing is run, and it returns shapes."""
        if any(map(is_shape, placed)):
            return self._shapes
        function = form or self.jitted
        with nullcontext() if function in self._has_run else spare.returned():  # XLA compiles at the first call
            try:
                results = function(self.key(seed), *placed)
            except (TypeError, jax.errors.JaxRuntimeError) as error:  # cannot be differentiated or compiled
                explain(error)
                raise
        self._has_run.add(function)
        return jax.block_until_ready(results) if self._paced else results

    def key(self, seed: int) -> Any:
        """The random key of a run, from which each rank's is derived."""
        return _root_key(seed, self._whole)


def _placed(array: Any, sharding: NamedSharding) -> Any:
    if isinstance(array, jax.Array):
        if isinstance(array, Tracer) or array.sharding == sharding:
            return array
        if sharding.is_fully_addressable or not array.is_fully_addressable:
            return moved(array, sharding)
        array = np.asarray(array)  # device_put does not reach devices of other processes
    if not isinstance(array, np.ndarray):
        return array  # a number: jit places it
    # Make a copy, because JAX may use NumPy's memory directly, and would see later writes to it until it has run.
    own = np.array(array, jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")))
    return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])


def is_shape(leaf: Any) -> bool:
    """Whether it represents an array by its shape."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _array(leaf: Any) -> Any:
    """A leaf of a rank's result."""
    if isinstance(leaf, jax.Array):
        return leaf
    if not isinstance(leaf, np.ndarray | np.generic | int | float | complex) and not hasattr(leaf, "__array__"):
        raise TypeError(
            f"the program returned {leaf!r}, of type {type(leaf).__name__}; a compiled program returns arrays, numbers "
            "and None, in tuples, lists and dicts of any depth"
        )
    return jnp.asarray(leaf)


def _is_array(leaf: Any) -> bool:
    return is_shape(leaf) or isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)


def _kind(leaf: Any) -> Any:
    """What a program is compiled for: an array's shape and dtype; the type of a number, or of anything else."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # an array of random keys has none
    if isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, False
    return type(leaf)


def _hashable(specs: Any) -> Any:
    """The specs in a hashable form."""
    if specs is None or is_spec(specs):
        return specs
    leaves, structure = jax.tree.flatten(specs, is_leaf=lambda node: node is None or is_spec(node))
    return structure, tuple(leaves)


@lru_cache(maxsize=256)
def _sharding(mesh: jax.sharding.Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)


@lru_cache(maxsize=64)
def _root_key(seed: int, everywhere: NamedSharding) -> Any:
    if everywhere.is_fully_addressable:
        return jax.device_put(_key_of(seed), everywhere)
    return jax.jit(lambda: _key_of(seed), out_shardings=everywhere)()


def _key_of(seed: int) -> Any:
    """A key uses 32 bits of a number; the other bits are folded in."""
    key, rest = jax.random.key(seed % 2**32), seed >> 32
    while rest:
        key, rest = jax.random.fold_in(key, rest % 2**32), rest >> 32
    return key


# --- constants, as they were when the program was traced --------------------------------------------------------------
# JAX refers to a NumPy array that a program reads by its memory, which the owner may write to later. A program is
# traced once, but it is compiled, compared and read for its trace afterwards. So it needs its own copies of constants.


class Constants:
    """Gives jaxprs their own copies of constants. Objects that several jaxprs share stay shared."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (what has this id, what replaces it)

    def owned_by(self, value: Any) -> Any:
        """A jaxpr, open or closed, with copies of every array that its owner may write to; the same object if there is
        none. Also accepts a tuple or list of jaxprs, a constant, and any other parameter of an equation.
        """
        if isinstance(value, tuple | list):
            items = self._each(value)
            return value if items is None else type(value)(items) if type(value) in (tuple, list) else value
        if id(value) not in self._made:
            self._made[id(value)] = value, self._replaced(value)
        return self._made[id(value)][1]

    def _each(self, values: Sequence[Any]) -> list[Any] | None:
        """The replacements of these values; None if none is replaced."""
        items = [self.owned_by(value) for value in values]
        return None if all(new is old for new, old in zip(items, values, strict=True)) else items

    def _replaced(self, value: Any) -> Any:
        if hasattr(value, "jaxpr") and value.jaxpr is not value:  # a closed one, before JAX 0.11
            jaxpr, consts = self.owned_by(value.jaxpr), self._each(value.consts)
            unchanged = jaxpr is value.jaxpr and consts is None
            return value if unchanged else value.replace(jaxpr=jaxpr, consts=consts or value.consts)
        if hasattr(value, "eqns"):
            parts = [name for name in ("eqns", "outvars", "consts") if hasattr(value, name)]
            changes = {name: new for name in parts if (new := self._each(getattr(value, name))) is not None}
            return value.replace(**changes, debug_info=value.debug_info) if changes else value
        if hasattr(value, "primitive") and hasattr(value, "params"):
            invars, params = self._each(value.invars), self._each(list(value.params.values()))
            named = value.params if params is None else dict(zip(value.params, params, strict=True))
            return value if named is value.params and invars is None else value.replace(invars=invars, params=named)
        if isinstance(value, Literal):
            number = own_copy(value.val)
            return value if number is value.val else Literal(number, value.aval)
        return own_copy(value)
