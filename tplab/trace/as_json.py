"""A trace's columns as JSON text, and back: every column, every value, to the last bit."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tplab.errors import MeshError, TraceError
from tplab.mesh import Mesh
from tplab.trace.columns import ABOUT, STORED, Column, Words

_FORMAT = "tplab trace 1"


def dump(mesh: Mesh, columns: Mapping[str, Column], values: Mapping[int, np.ndarray], about: Mapping[str, Any]) -> str:
    """The trace as text. A column of numbers is one list; one of words is their table, and an index for each event."""
    listed = {
        name: {"table": given.table, "codes": given.codes.tolist()} if isinstance(given, Words) else given.tolist()
        for name, given in columns.items()
    }
    # Values as bytes: JSON has no NaN, no infinity and no complex numbers.
    kept = {
        row: {"dtype": array.dtype.str, "shape": array.shape, "base64": base64.b64encode(array.tobytes()).decode()}
        for row, array in values.items()
    }
    return json.dumps({"format": _FORMAT, "mesh": dict(mesh.shape), **about, "columns": listed, "values": kept})


def load(text: str) -> dict[str, Any]:
    """The arguments of `Trace.from_columns`, from what `dump` wrote. Raises TraceError if it is something else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_a_trace(str(error)) from None
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise _not_a_trace(f"it does not say {_FORMAT!r}")
    if missing := [name for name in ("mesh", "columns", "values") if not isinstance(data.get(name), dict)]:
        raise _not_a_trace(f"{missing[0]!r} is missing, or is no object")
    shape, columns, values = data.pop("mesh"), data.pop("columns"), data.pop("values")
    if unknown := [name for name in data if name not in ABOUT] + [name for name in columns if name not in STORED]:
        raise _not_a_trace(f"it has a field {unknown[0]!r}")
    try:
        mesh = Mesh(**shape)
    except MeshError as error:
        raise _not_a_trace(str(error)) from None
    made = {name: _column(name, given) for name, given in columns.items()}
    return {"mesh": mesh, "values": {_row(row): _array(given) for row, given in values.items()}, **made, **data}


def _column(name: str, given: Any) -> Any:
    if isinstance(given, list):
        return given
    if not isinstance(given, dict) or not all(isinstance(given.get(part), list) for part in ("table", "codes")):
        raise _not_a_trace(f"column {name!r} is no list, and no table with codes")
    if not all(type(code) is int and 0 <= code < len(given["table"]) for code in given["codes"]):
        raise _not_a_trace(f"column {name!r} has codes that are no places in its table of {len(given['table'])}")
    table = [tuple(value) if isinstance(value, list) else value for value in given["table"]]
    return table, np.array(given["codes"], np.int32)


def _row(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise _not_a_trace(f"values are kept by the number of their event, and {text!r} is none")
    return int(text)


def _array(given: Any) -> np.ndarray:
    """A value that was kept. Only dtypes of numbers are accepted: nothing that NumPy would have to evaluate."""
    try:
        if not re.fullmatch("[<>|=]?[biufc][0-9]{1,2}", given["dtype"]):
            raise ValueError(f"dtype {given['dtype']!r} is not one of numbers")
        return np.frombuffer(base64.b64decode(given["base64"]), given["dtype"]).reshape(given["shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _not_a_trace(f"a value is damaged: {error}") from None


def _not_a_trace(why: str) -> TraceError:
    return TraceError(f"this is not a trace that to_json wrote: {why}")
