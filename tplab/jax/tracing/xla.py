"""`trace`: the trace of any function that XLA has compiled, with the collectives that `jit` inserted for its shardings.

The compiled module is the program of every rank: the partitioner has cut the arrays, and has inserted, merged and moved
collectives. Its instructions become tasks (`unroll`), one per fusion, with loops of known length written out. They run
on the modelled clock, and a group of ranks is named after the axes of the mesh along which it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tplab.cost.cluster import Cluster
from tplab.cost.named import find
from tplab.jax.tracing.flow import Flow
from tplab.jax.tracing.hlo import Module
from tplab.jax.tracing.lowered import compiled_for
from tplab.jax.tracing.trace import recorded
from tplab.jax.tracing.unroll import Options, Unroll
from tplab.trace.recorder import Recorder
from tplab.trace.trace import Trace


def trace(
    fn: Callable[..., Any],
    *args: Any,
    cluster: str | Cluster | None = None,
    branch: int | None = None,
    trips: int | None = None,
    accelerator: bool = False,
    **kwargs: Any,
) -> Trace:
    """What every rank would do in `fn(*args, **kwargs)`, as XLA compiled it. Nothing is run.

        trace(jax.jit(train_step), params, batch, cluster="h100")

    fn           any function of JAX arrays, jitted or not (jax.jit, pmap, nnx.jit, eqx.filter_jit); `shard_map`, `scan`
                 and the rest may be inside
    args         arrays, or jax.ShapeDtypeStructs with shardings, and anything else that `fn` takes
    cluster      the modelled clock's figures, as in `run`
    branch       which branch of a `lax.cond` or `lax.switch` to follow: 0 is the one for False. Without it a branch is
                 followed only if all of them send the same: the one with the most to compute
    trips        the assumed number of iterations of a loop whose length only the running program knows
    accelerator  on CPUs: send what GPUs and TPUs would send. A sum of which each rank keeps a piece is a reduce_scatter
                 there, and bfloat16 is sent as such, while on CPUs it is sent as float32

    Ranks are numbered as the devices of the mesh. The mesh is the one that the arguments, the results or the function
    itself are sharded over; of several it is the one with the most axes, and without any its one axis is "devices". XLA
    compiles for the devices of that mesh. On the modelled clock, what is sent and what is computed overlap wherever the
    data flow allows it, as in `run`; in the order in which XLA runs them they may overlap less. There a product has the
    dtype of its operands in your program, also where XLA for CPUs makes them float32, and what is read or updated in
    part takes the time of that part.
    Raises TraceError where only the running program knows what is sent.
    """
    known = None if cluster is None else find(cluster)
    program = compiled_for(fn, args, kwargs)
    options = Options(branch, trips, accelerator)
    return unrolled(program.module, Recorder(program.mesh, program.title, "jax"), known, options)


def unrolled(
    module: Module, recorder: Recorder, cluster: Cluster | None = None, options: Options | None = None
) -> Trace:
    """The trace of a compiled module. Its ranks are those of the recorder's mesh."""
    program = Unroll(Flow(module, recorder.mesh), recorder.chunk, options or Options())
    program.run(module.entry, [])
    return recorded(recorder, program.tasks, set(range(len(program.tasks))), cluster, record=0)
