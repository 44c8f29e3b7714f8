"""`run`: one rank's program, on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tplab.checking.typed import Types
from tplab.comm import check_run, no_out_specs
from tplab.cost.cluster import Cluster
from tplab.cost.named import find
from tplab.jax.ranks.context import without_mesh
from tplab.jax.ranks.devices import rank_of_device
from tplab.jax.ranks.program import Compiled, is_shape, program_of
from tplab.jax.tracing.decisions import Asked
from tplab.jax.tracing.trace import decisions_of, trace_of
from tplab.jax.tracing.typed import types_of
from tplab.mesh import Mesh
from tplab.trace.trace import Trace, with_types

_KEPT_FOR_TRACE = 4096  # elements of an argument


class Result:
    """What a run returned. JAX may still be computing: reading a number waits for it, as `jax.block_until_ready` does.

    per_rank   what each rank returned
    value      the results joined according to out_specs: global arrays, each rank's piece on its own device
    trace      everything that was sent: from which rank, to which rank, how large, when
    types      the type of each array along each axis, line by line, if `run` was called with types=True

    `per_rank` and `trace` are computed on first access. If branches or loops depend on data, the trace runs the program
    a second time to see what each rank decides; until then the arguments are kept.
    """

    _types: Callable[[], Types] | None = None

    def __init__(
        self,
        compiled: Compiled,
        outputs: Any,
        asked: Asked,
        arrays: Sequence[Any],
        seed: int,
        cluster: Cluster | None,
        keep_values: int,
    ):
        self._compiled, self._outputs = compiled, outputs
        self._asked: Asked | None = asked
        self._seed, self._cluster, self._keep_values = seed, cluster, keep_values
        # The trace shows only small values, so large ones need not be kept alive for it.
        self._small = [None if is_shape(a) or np.size(a) > _KEPT_FOR_TRACE else a for a in arrays]

    @property
    def value(self) -> Any:
        if self._compiled.program.out_specs is None:
            raise no_out_specs()
        return self._outputs

    @cached_property
    def per_rank(self) -> list[Any]:
        leaves, structure = jax.tree.flatten(self._outputs)
        shapes, mesh = self._compiled.piece_shapes, self._compiled.program.jax_mesh
        columns = [_pieces(leaf, shape, mesh) for leaf, shape in zip(leaves, shapes, strict=True)]
        ranks = self._compiled.program.mesh.ranks
        return [structure.unflatten([column[rank] for column in columns]) for rank in ranks]

    @cached_property
    def trace(self) -> Trace:
        # An argument may have been donated since, to a jitted update with donate_argnums; then its values are gone.
        small = [None if _is_gone(a) else a for a in self._small]
        arguments = [self._compiled.key(self._seed), *small]
        reports = self._asked() if self._asked is not None else None
        trace = trace_of(self._compiled, arguments, reports, self._cluster, self._keep_values)
        self._asked = None  # it keeps the arguments alive
        return trace if self._types is None else with_types(trace, self.types.casts)

    @cached_property
    def types(self) -> Types:
        if self._types is None:
            raise ValueError("run was not asked for types; give types=True")
        return self._types()

    def __repr__(self) -> str:
        program = self._compiled.program
        return f"Result of {program.title} on {program.mesh}: value, per_rank, trace"


def run(
    fn: Callable[..., Any],
    mesh: Mesh,
    *args: Any,
    in_specs: Any = None,
    out_specs: Any = None,
    on: str | None = None,
    cluster: str | Cluster | None = None,
    clock: str | None = None,
    seed: int = 0,
    keep_values: int = 1000,
    types: bool = False,
) -> Result:
    """Run `fn`, the program of one rank, on every rank of `mesh`.

    args        the arguments of `fn`: arrays (JAX's or NumPy's), numbers, any pytree of them. Each rank gets the piece
                that in_specs gives it, or everything. None, strings, functions and other objects are passed unchanged.
                A jax.ShapeDtypeStruct is an array without its numbers: then nothing is run, the trace is the same, and
                the results are shapes too
    in_specs    one P per argument (or a structure of them, or one P for all); without it, every rank gets everything
    out_specs   how the results are joined, for `Result.value`. Results that should be the same on several ranks must
                be so by JAX's types, or it is a ReplicationError: all_reduce's result is, all_gather's is not
    on          "simulated": on GPUs or TPUs if there are as many as ranks, otherwise on CPU devices that JAX simulates.
                "cpu", "gpu" or "tpu": on those. None: "simulated"
    cluster     the modelled clock's figures: a tplab.cost.Cluster or its name: "h100" from data sheets, or a forecast,
                "h100-measured". Without one, a hop takes one unit of time and computing takes none
    clock       "modelled"; None means the same
    seed        each rank's `rank_key()` is derived from it and the rank's number
    keep_values the number of messages whose values the trace keeps (if they have at most 64 elements)
    types       whether to infer the type of each array along each axis, for `Result.types`: replicated, invariant,
                varying or partial (see the page "Types of tensors on ranks"), from the traced program

    `fn` is traced once and compiled for all ranks (one `jax.shard_map` under one `jax.jit`), again for each structure,
    shape and dtype of args; a further call costs a dispatch and returns before the result is ready. What `fn` can read
    besides its arrays (globals, closures, attributes, and what the functions it calls or is given can read) is compared
    at every call, and if anything has changed, `fn` is traced again. If it can read something that cannot be compared,
    such as a random number generator, it is traced at every call. Pass a large NumPy array as an argument rather than a
    global: the comparison reads a global whole.

    Raises ReplicationError, SpecError, ShapeError, MeshError, DeadlockError if a collective is in a branch or loop
    that only some of its ranks may take, and anything that `fn` raises while it is traced.
    """
    check_run(fn, mesh, seed=seed, keep_values=keep_values)
    if clock not in (None, "modelled"):
        if clock == "measured":
            raise ValueError(
                "clock='measured' is for tplab.torch: XLA compiles all of a rank's program into one call, and does "
                "not say when its parts ran.\nThe parts on a modelled clock: clock='modelled', cluster='laptop'. "
                "The call as a whole: time jax.block_until_ready(run(...).value). Inside XLA: jax.profiler.trace"
            )
        raise ValueError(f"clock is {clock!r}; it must be 'modelled'")
    known = None if cluster is None else find(cluster)
    program = program_of(fn, mesh, in_specs, out_specs, on or "simulated")
    with without_mesh(program.jax_mesh.devices.flat, *jax.tree.leaves(args)):
        compiled, arrays = program.compiled(fn, args)
        placed = compiled.place(arrays)
        outputs, asked = decisions_of(compiled).run(compiled, placed, int(seed))
    result = Result(compiled, outputs, asked, placed, int(seed), known, int(keep_values))
    if types:
        result._types = partial(types_of, fn, compiled)
    return result


def _pieces(leaf: Any, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> list[Any]:
    """Each rank's piece of a global array. On CPUs they are moved to one device, so that you can combine them."""
    if is_shape(leaf):
        return [jax.ShapeDtypeStruct(shape, leaf.dtype)] * mesh.size
    rank_of = rank_of_device(mesh)
    pieces: list[Any] = [None] * mesh.size  # None: a rank of another process
    for shard in leaf.addressable_shards:
        pieces[rank_of[shard.device]] = shard.data
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    is_plain = on_cpu and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)  # not random keys
    with jax.default_device(jax.local_devices(backend="cpu")[0] if is_plain else None):
        # Restore the rank's own shape: a scalar was returned as one element, and XLA does not cut empty arrays.
        return [p if p is None else (jnp.asarray(np.asarray(p)) if is_plain else p).reshape(shape) for p in pieces]


def _is_gone(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted()
