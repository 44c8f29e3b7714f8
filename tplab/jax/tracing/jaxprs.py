"""Reading jaxprs: what an equation calls, and the line it comes from."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import jax

from tplab.jax.private import scan_sizes
from tplab.lines import line_text

Place = TypeVar("Place", bound=Hashable)

_CALLS = {
    "jit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "tplab_linear",
    "tplab_quantized_all_gather", "tplab_quantized_reduce_scatter", "tplab_unit", "tplab_unit_tangent",
}  # fmt: skip

LAYOUTS = {"reshape", "transpose", "squeeze", "expand_dims", "copy", "pvary", "pcast"}
"""Primitives whose result has the values of their operand, in another layout or of another type."""


UNIT = "tplab.unit"
"""The beginning of the named scope of what a layer in a list sends; the layer's number follows."""


def called(eqn: Any) -> Any:
    """The jaxpr, open or closed, that an equation calls with its own operands, as jit, remat and custom gradients do.
    None if it calls none, or not exactly once."""
    if eqn.primitive.name not in _CALLS:
        return None
    return eqn.params["call_jaxpr"] if "call_jaxpr" in eqn.params else eqn.params.get("jaxpr")


def opened(inner: Any) -> tuple[Any, list[Any]]:
    """A jaxpr, open or closed, as (open jaxpr, its constants)."""
    return (inner.jaxpr, list(inner.consts)) if hasattr(inner, "consts") else (inner, [])


def loop_parts(eqn: Any, operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The operands of a scan: constants, carry, rows; or of a while: its condition's constants, its body's, carry."""
    is_scan, params = eqn.primitive.name == "scan", eqn.params
    first, second = scan_sizes(params) if is_scan else (params["cond_nconsts"], params["body_nconsts"])
    return operands[:first], operands[first : first + second], operands[first + second :]


def product_dims(numbers: Any, ndims: Sequence[int]) -> tuple[tuple[int | None, ...], ...]:
    """Where the dims of both operands of a product are in its result; None: they are summed. The batch dims come first,
    then the free dims of the left operand, then those of the right."""
    contracting, batch = numbers
    free = count(len(batch[0]))
    at = [
        {dim: n for n, dim in enumerate(shared)} | dict.fromkeys(summed) for summed, shared in zip(contracting, batch)
    ]
    return tuple(
        tuple(known[dim] if dim in known else next(free) for dim in range(ndim)) for known, ndim in zip(at, ndims)
    )


def folded(
    inner: Any,
    inputs: Sequence[Any],
    visit: Callable[[Any, list[Any], Callable[[Any], Any]], Iterable[Any]],
    given: Callable[[Any, Any], Any] = lambda value, aval: value,
) -> list[Any]:
    """Interpret a jaxpr, open or closed, with any values in place of arrays. Returns its outputs. `visit` receives an
    equation, its operands and a function that reads other atoms, and returns its results; `given` makes a value of a
    constant or literal."""
    jaxpr, consts = opened(inner)
    here = {variable: given(value, variable.aval) for variable, value in zip(jaxpr.constvars, consts, strict=True)}
    here.update(zip(jaxpr.invars, inputs, strict=True))
    return followed(jaxpr.eqns, here, jaxpr.outvars, visit, given)


def followed(
    eqns: Iterable[Any],
    here: dict[Any, Any],
    outputs: Iterable[Any],
    visit: Callable[..., Iterable[Any]],
    given: Callable[[Any, Any], Any] = lambda value, aval: value,
) -> list[Any]:
    """The same for some equations, from the values of variables in `here`, to which theirs are added."""

    def read(atom: Any) -> Any:
        return given(atom.val, atom.aval) if hasattr(atom, "val") else here[atom]

    for eqn in eqns:
        here.update(zip(eqn.outvars, visit(eqn, [read(atom) for atom in eqn.invars], read), strict=True))
    return [read(atom) for atom in outputs]


def reached(starts: Iterable[Place], following: Callable[[Place], Iterable[Place]]) -> Iterator[Place]:
    """Everything that can be reached from `starts`, once each, the nearest first. What follows a place is asked for
    after it has been used."""
    pending, seen = list(starts), set[Place]()
    for place in pending:
        if place not in seen:
            seen.add(place)
            yield place
            pending += following(place)


def inside(eqn: Any) -> Iterator[Any]:
    """The open jaxprs among an equation's parameters: those it calls, branches, bodies of loops, their conditions."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield opened(item)[0]


def equations_of(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """Every equation with its jaxpr, including nested ones."""
    for eqn in jaxpr.eqns:
        yield eqn, jaxpr
        for inner in inside(eqn):
            yield from equations_of(inner)


def is_transposed(eqn: Any) -> bool:
    """Whether an equation belongs to a backward pass: JAX makes these by transposition, and names their scope so."""
    return "transpose(" in str(eqn.source_info.name_stack)


def written(eqn: Any, line: str) -> str:
    """The line of a collective, and the unit that is sent if one line sends many units."""
    units = re.findall(rf"{UNIT}(\d+)", str(eqn.source_info.name_stack))
    return f"{line}, for unit {units[-1]}" if units else line


def line_of(eqn: Any, jaxpr: Any) -> str | None:
    """The line of the user's program that an equation of `jaxpr` comes from; None inside JAX's own functions.

    These are located by the line that calls them, because JAX may have cached their jaxprs from another call.
    """
    frames = frames_of(eqn, jaxpr)
    return line_text(*frames[0]) if frames else None


def line_outside(eqn: Any, jaxpr: Any, helpers: Collection[tuple[str, int]] = ()) -> str | None:
    """The same, outside of installed packages and of helpers, which are functions of the user's, by file and first
    line. A helper that JAX itself calls, such as a function that is differentiated or mapped, has no line outside."""
    if not (frames := own_frames(frames_of(eqn, jaxpr))):
        return None
    listed = [frame for frame in eqn.source_info.traceback.frames if not frame.file_name.endswith(_TREES)]
    place = next(n for n, frame in enumerate(listed) if (frame.file_name, frame.line_num) == frames[0])
    while (listed[place].file_name, listed[place].function_start_line) in helpers:
        above = listed[place + 1 : place + 2]
        if not above or (above[0].file_name, above[0].line_num) not in frames:
            break
        place += 1
    return line_text(listed[place].file_name, listed[place].line_num)


def frames_of(eqn: Any, jaxpr: Any) -> tuple[tuple[str, int], ...]:
    """The lines of the user's program that an equation of `jaxpr` comes from, each a file and a line, the innermost
    first, up to the function that tplab was given."""
    traceback = eqn.source_info.traceback
    if traceback is None or (jaxpr.debug_info.func_filename or "").startswith(_JAX):
        return ()
    found = []
    for frame in traceback.frames:
        if frame.file_name in _BEGINNINGS:
            break
        if not frame.file_name.startswith(_NOT_THE_PROGRAM):
            found.append((frame.file_name, frame.line_num))
    return tuple(found)


def line_of_frames(frames: Sequence[tuple[str, int]]) -> str:
    """The line of the user's program among frames, each a file and a line, the innermost first: the first that is not
    in an installed package or, if all are, the innermost that is not in this folder. "" if there is none."""
    outside = [frame for frame in frames if not frame[0].startswith(_NOT_THE_PROGRAM)]
    found = own_frames(outside) or [frame for frame in frames if not frame[0].startswith(_TRACING)]
    return line_text(*found[0]) if found else ""


def own_frames(frames: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The frames that are not in an installed package, such as optax; all frames if all of them are."""
    own = [
        frame for frame in frames
        if not _INSTALLED.intersection(Path(frame[0]).parts) and not frame[0].startswith(_STANDARD_LIBRARY)
    ]  # fmt: skip
    return tuple(own or frames)


_TREES = tuple(os.path.join("jax", "_src", name) for name in ("tree.py", "tree_util.py", "traceback_util.py"))
"""Files in which JAX only maps a function over arrays."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = {"site-packages", "dist-packages"}
_JAX = str(Path(str(jax.__file__)).parent) + os.sep
_HERE = Path(__file__).resolve().parents[1]
_BEGINNINGS = {
    str(_HERE / "ranks" / "program.py"),
    *(str(_HERE / "checking" / f"{name}.py") for name in ("tape", "same_model")),
}
"""Files of tplab that call the program."""
_TRACING = str(_HERE / "tracing") + os.sep
"""JAX 0.7 gives this file for recomputed equations, because their gradient is made when tplab traces the program."""
_NOT_THE_PROGRAM = (_JAX, str(Path(__file__).resolve().parents[2]) + os.sep)
