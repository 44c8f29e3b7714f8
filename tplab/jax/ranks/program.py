"""A rank's program, compiled: one `shard_map` under one `jit`, for each kind of arguments that it is called with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from tplab.errors import SpecError
from tplab.jax.ranks.context import random_key, vary
from tplab.jax.ranks.devices import jax_mesh, needs_pacing
from tplab.jax.ranks.outside import Outside
from tplab.jax.ranks.specs import check, check_results, is_spec, spec_of_each, to_jax
from tplab.mesh import Mesh
from tplab.sharding import check_spec

_programs: weakref.WeakKeyDictionary[Any, dict[Any, Program]] = weakref.WeakKeyDictionary()
_KEPT_PER_FUNCTION = 32


def program_of(fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, on: str) -> Program:
    """The compiled form of `fn` for these specs: the one of an earlier call, unless it would do something else now.

    It lives as long as `fn`. Another function is another program, also one of the same name and text.
    """
    key: tuple[Any, ...] = (mesh, _hashable(in_specs), _hashable(out_specs), on)
    anchor = fn
    if isinstance(fn, MethodType):  # made anew at each access; the function it is made of is what stays
        anchor, key = fn.__func__, (*key, id(fn.__self__))  # whether it is the same object, Outside tells
    try:
        known = _programs.setdefault(anchor, {})
    except TypeError:  # cannot be a key: compiled for this call alone
        return Program(fn, mesh, in_specs, out_specs, on)
    program = known.get(key)
    if program is None or not program.outside.unchanged(fn):
        known.pop(key, None)
        if len(known) >= _KEPT_PER_FUNCTION:
            del known[next(iter(known))]
        program = known[key] = Program(fn, mesh, in_specs, out_specs, on)
    return program


class Program:
    """`fn` on a mesh, with specs, and what was compiled of it: one `Compiled` a structure, shapes and dtypes."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, on: str):
        self.mesh, self.in_specs, self.out_specs = mesh, in_specs, out_specs
        check(in_specs, "in_specs", mesh)
        check(out_specs, "out_specs", mesh)
        self.jax_mesh = jax_mesh(mesh, on)
        self.outside = Outside(fn)
        self.title = getattr(fn, "__name__", type(fn).__name__).replace("<lambda>", "lambda")
        self._compiled: dict[Any, Compiled] = {}

    def compiled(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Compiled, list[Any]]:
        """What to call for `args`, and the arrays to call it with."""
        leaves, structure = jax.tree.flatten(args)
        key = (structure, jax.config.jax_enable_x64, *map(_kind, leaves))  # type: ignore[attr-defined]
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = Compiled(self, fn, args)
            self.outside = Outside(fn)  # once more: what fn changed itself is no reason to trace it again
        return found, [leaf for leaf in leaves if _is_array(leaf)]


class Compiled:
    """A program for arguments of one structure, whose arrays have one shape and dtype each.

    jaxpr          what JAX traced: the whole program, the ranks' own inside its `shard_map`
    structure      that of the results
    piece_shapes   for each array of the result, the shape that a rank returns
    """

    def __init__(self, program: Program, fn: Callable[..., Any], args: tuple[Any, ...]):
        self.program = program
        leaves, structure = jax.tree.flatten(args)
        specs = spec_of_each(program.in_specs, args)
        self.in_specs = []
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
        self.jitted = jax.jit(self._mapped(fn, leaves, structure))
        try:
            traced = self.jitted.trace(self.key(0), *self.place(list(filter(_is_array, leaves))))
        except _UNKNOWN_YET as error:
            error.add_note(_ONE_TRACE_FOR_ALL)
            raise
        self.jaxpr, self.structure = traced.jaxpr, jax.tree.structure(traced.out_info)
        self._shapes = jax.tree.map(lambda about: jax.ShapeDtypeStruct(about.shape, about.dtype), traced.out_info)

    def _mapped(self, fn: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> Callable[..., Any]:
        """The program of all ranks: a function of the random key and the arrays among `leaves`."""
        program = self.program
        fixed = [None if _is_array(leaf) else leaf for leaf in leaves]  # strings, functions: part of the program
        places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]
        reference = _weak(fn)  # what is kept for fn must not keep fn alive

        def one_rank(key: Any, *given: Any) -> Any:
            arrays = list(given)
            if any(0 in np.shape(array) for array in arrays):
                # XLA makes constants of what is empty, and fails where all of a program's arguments were
                _, *arrays = lax.optimization_barrier((jax.random.key_data(key), *arrays))
            arguments = list(fixed)
            for place, array in zip(places, arrays, strict=True):
                arguments[place] = array
            with random_key(key):
                result = jax.tree.map(_array, reference()(*structure.unflatten(arguments)))
            self.piece_shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(result)]
            if program.out_specs is None:
                return jax.tree.map(lambda leaf: _stackable(leaf, program.mesh.axis_names), result)
            check_results(result, program.out_specs, program.mesh)
            return result

        one_rank.__name__ = program.title
        stacked = PartitionSpec(program.mesh.axis_names)
        return jax.shard_map(
            one_rank,
            mesh=program.jax_mesh,
            in_specs=(PartitionSpec(), *map(to_jax, self.in_specs)),
            out_specs=stacked if program.out_specs is None else to_jax(program.out_specs),
        )

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays, each where its spec wants it. One that lies there already is taken as it is."""
        return [_placed(array, sharding) for array, sharding in zip(arrays, self._shardings, strict=True)]

    def __call__(self, placed: Sequence[Any], seed: int, form: Callable[..., Any] | None = None) -> Any:
        """Run it, or another form of `jitted`, on arrays that `place` gave. Returns the global arrays without waiting
        for them; only their shapes, and nothing is run, where there are only shapes of the arguments."""
        if any(map(is_shape, placed)):
            return self._shapes
        results = (form or self.jitted)(self.key(seed), *placed)
        return jax.block_until_ready(results) if self._paced else results

    def key(self, seed: int) -> Any:
        """The random key of a run, from which each rank's is derived."""
        return _root_key(seed, self._whole)


_UNKNOWN_YET = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_ONE_TRACE_FOR_ALL = (
    "tplab.jax.run traces the program once for all ranks, so a value that differs from rank to rank (axis_index) or "
    "comes from an argument is not known while it does: Python's if, while and range cannot ask for it. Use jnp.where, "
    "jax.lax.cond or jax.lax.fori_loop; or tplab.torch, where every rank runs the Python itself."
)


def _placed(array: Any, sharding: NamedSharding) -> Any:
    if isinstance(array, jax.Array):
        if isinstance(array, Tracer) or array.sharding == sharding:
            return array
        if sharding.is_fully_addressable or not array.is_fully_addressable:
            return jax.device_put(array, sharding)
        array = np.asarray(array)  # device_put does not reach devices of other processes
    if not isinstance(array, np.ndarray):
        return array  # a number: jit knows best
    # A copy, because JAX may use NumPy's memory as it is, and would see what is written there until it has run.
    own = np.array(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])


def _stackable(leaf: Any, axes: tuple[str, ...]) -> Any:
    """A rank's result as a piece of an array that holds all ranks' results, one behind the other along dim 0."""
    return vary(leaf if leaf.ndim else leaf.reshape(1), axes)


def is_shape(leaf: Any) -> bool:
    """Whether it stands for an array of which there is only the shape."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _is_array(leaf: Any) -> bool:
    return is_shape(leaf) or isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)


def _kind(leaf: Any) -> Any:
    """What a program is compiled for: shape and dtype of an array; a number's type; anything else itself."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # an array of random keys has none
    if isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, False
    if isinstance(leaf, int | float | complex):
        return type(leaf)
    try:
        hash(leaf)
    except TypeError:
        return _Same(leaf)
    return type(leaf), leaf


class _Same:
    """A key that equals only itself for the same object, which it keeps."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _hashable(specs: Any) -> Any:
    """The specs as a key."""
    if specs is None or is_spec(specs):
        return specs
    leaves, structure = jax.tree.flatten(specs, is_leaf=lambda node: node is None or is_spec(node))
    return structure, tuple(leaves)


def _weak(fn: Callable[..., Any]) -> Callable[[], Any]:
    try:
        return weakref.WeakMethod(fn) if isinstance(fn, MethodType) else weakref.ref(fn)
    except TypeError:
        return lambda: fn


@lru_cache(maxsize=256)
def _sharding(mesh: jax.sharding.Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec)


@lru_cache(maxsize=64)
def _root_key(seed: int, everywhere: NamedSharding) -> Any:
    if everywhere.is_fully_addressable:
        return jax.device_put(jax.random.key(seed), everywhere)
    return jax.jit(jax.random.key, out_shardings=everywhere)(seed)
