"""A trace as JSON text, and back: every column, every value, to the last bit."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tplab.errors import TraceError
from tplab.mesh import Mesh
from tplab.trace.columns import NUMBERS, STORED

if TYPE_CHECKING:
    from tplab.trace.trace import Trace

_FORMAT = "tplab trace 1"


def dump(trace: Trace) -> str:
    """The trace as text: numbers a list a column; of other columns the table, and for each event its place in it."""
    columns: dict[str, Any] = {}
    for name in STORED:
        if name in NUMBERS:
            columns[name] = trace.column(name).tolist()
        else:
            table, codes = trace.codes(name)
            columns[name] = {"table": table, "codes": codes.tolist()}
    # Values as bytes: JSON has no NaN, no infinity and no complex numbers.
    values = {
        row: {"dtype": array.dtype.str, "shape": array.shape, "base64": base64.b64encode(array.tobytes()).decode()}
        for row, array in trace.values.items()
    }
    mesh = dict(trace.mesh.shape)
    return json.dumps({"format": _FORMAT, "mesh": mesh, **trace.about(), "columns": columns, "values": values})


def load(text: str) -> Trace:
    """The trace that `dump` wrote. Raises TraceError where it is something else."""
    from tplab.trace.trace import Trace

    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"this is no trace that to_json wrote: {error}") from None
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise TraceError(f"this is no trace that to_json wrote: it does not say {_FORMAT!r}")
    columns = data.pop("columns")
    for name, stored in columns.items():
        if isinstance(stored, dict):
            columns[name] = ([_tuples(value) for value in stored["table"]], np.array(stored["codes"], np.int32))
    values = {
        int(row): np.frombuffer(base64.b64decode(kept["base64"]), kept["dtype"]).reshape(kept["shape"])
        for row, kept in data.pop("values").items()
    }
    return Trace.from_columns(Mesh(**data.pop("mesh")), values=values, **columns, **data)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
