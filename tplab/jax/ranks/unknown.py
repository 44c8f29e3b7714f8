"""Errors of programs that need values unknown during tracing: a number for an `if`, a shape, a slice."""

from __future__ import annotations

import linecache
import os
import re
from pathlib import Path
from traceback import walk_tb

import jax

from tplab.lines import line_text


def explain(error: Exception) -> None:
    """Add a note with the remedy and the line to an error that JAX raised while it traced, differentiated or compiled a
    program, if the cause is how `run` works, or where it runs."""
    if asks_for_numbers(error):
        error.add_note("\n".join(filter(None, (_place(error) + _ONE_TRACE_FOR_ALL, _instead(error)))))
    elif isinstance(error, TypeError) and "forward-mode" in str(error):
        error.add_note(_place(error) + _NO_FORWARD_MODE)
    elif isinstance(error, TypeError) and re.search("manual (axis types|axes) do not match", str(error)):
        error.add_note(_VARYING)
    elif isinstance(error, NotImplementedError) and not str(error):
        error.add_note(_place(error) + _NO_TYPES)
    elif "ragged-all-to-all" in str(error):
        error.add_note(_NOT_ON_CPUS)


def asks_for_numbers(error: Exception) -> bool:
    """Whether an error says that a value must be known during tracing. For shapes and slices JAX raises Python's own
    errors, which show the tracer that was given instead of a number."""
    return isinstance(error, _UNKNOWN_YET) or (isinstance(error, TypeError | IndexError) and "Tracer" in str(error))


def _instead(error: Exception) -> str:
    """What to write instead of the cause of this error."""
    said, of_python = str(error), isinstance(error, TypeError | IndexError) and not isinstance(error, _UNKNOWN_YET)
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return _INSTEAD["bool"]
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return _INSTEAD["mask"]
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return _INSTEAD["numpy"]
    if isinstance(error, jax.errors.TracerIntegerConversionError):
        return _INSTEAD["index"]
    if of_python and said.startswith(("Slice", "Array slice")):
        return _INSTEAD["slice"]
    if (of_python and said.startswith("Shapes")) or "jnp.arange" in said or "jnp.repeat" in said:
        return _INSTEAD["shape"]
    if of_python or "size argument" in said or "jnp.unique" in said:  # JAX's message says what to do
        return ""
    return _INSTEAD["number"]


_INSTEAD = {
    "bool": "Python's if, while, and, or, not, assert, min and max decide while the program is traced. Use jnp.where "
    "to choose between results, jax.lax.cond to compute only one of them, jax.lax.while_loop to repeat.",
    "mask": "How many elements a mask picks is not known. Use jnp.where(mask, x, 0), which keeps the shape.",
    "numpy": "NumPy computes while the program is traced. Use jax.numpy in the program, and NumPy on what run returns.",
    "index": "Python's range, and an index into a list, need a number. Use jax.lax.fori_loop to repeat; "
    "jnp.stack(items)[index], or jax.lax.switch, to choose.",
    "slice": "Use jax.lax.dynamic_slice_in_dim(x, start, size), where start may be such a value and size is known.",
    "shape": "Arrays have the same shape on every rank, and it must be known. Use axis_size, and jnp.where for what "
    "differs between ranks.",
    "number": "float, int, item and tolist need a number. Keep the array, which works wherever jax.numpy computes, and "
    "read numbers from what run returns.",
}
_ONE_TRACE_FOR_ALL = (
    "tplab.jax.run traces the program once for all ranks, so a value that differs from rank to rank (axis_index), or "
    "that is computed from an argument, is not known yet. In tplab.torch every rank runs the Python itself."
)
_NO_FORWARD_MODE = (
    "what is differentiated forwards here defines only its backward pass: parameters that shard_parameters has "
    "divided, for instance, are gathered again in it. Use jax.grad or jax.vjp; a Hessian-vector product is the "
    "gradient of jnp.vdot(jax.grad(loss)(params), direction)."
)
_VARYING = (
    "`run` keeps JAX's types of what may differ on ranks: zeros become that by jax.lax.pcast(x, axis, to='varying'). "
    "A program that was written without them can be traced as it is: tplab.jax.trace(jax.shard_map(program, mesh=mesh, "
    "in_specs=..., out_specs=..., check_vma=False), *args)."
)
_NO_TYPES = (
    "JAX has no types for this, as for a sum over axis_index_groups. Give the mesh an axis for the ranks of a group."
)
_NOT_ON_CPUS = (
    "XLA for CPUs has no ragged_all_to_all. Given shapes (jax.ShapeDtypeStruct), `run` compiles nothing, and its trace "
    "counts rows as if they were spread evenly. To run it on CPUs, send a fixed number of rows, with all_to_all."
)
_UNKNOWN_YET = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def _place(error: Exception) -> str:
    """The line of the user's program that raised it, with its text; "" if there is none."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    # All frames below `run` are the program's, except those of JAX, tplab and installed packages.
    below = next((i + 1 for i, frame in reversed(list(enumerate(frames))) if frame[0] == _CALLER), 0)
    own = [
        frame for frame in frames[below:]
        if not frame[0].startswith(_TPLAB) and _INSTALLED.isdisjoint(Path(frame[0]).parts)
    ]  # fmt: skip
    if not own:
        return ""
    text = linecache.getline(*own[-1]).strip()
    return f"{line_text(*own[-1])}{f', `{text}`' if text else ''}: "


_TPLAB = str(Path(__file__).resolve().parents[2]) + os.sep
_CALLER = str(Path(__file__).with_name("program.py"))
_INSTALLED = {"site-packages", "dist-packages"}
