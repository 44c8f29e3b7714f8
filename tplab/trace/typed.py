"""A trace whose events say what they do to the types of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tplab.trace.columns import NUMBERS, STORED
from tplab.trace.trace import Trace


def with_types(trace: Trace, casts: Mapping[tuple[str, str, str], str]) -> Trace:
    """The same trace, with `Event.types` for what communicates: "tp: P → I".

    casts   (line, operation, phase) -> text
    """
    columns: dict[str, Any] = {name: trace.column(name) if name in NUMBERS else trace.codes(name) for name in STORED}
    tables = [columns[name] for name in ("where", "op", "phase")]
    keys = zip(*([table[code] for code in codes.tolist()] for table, codes in tables), strict=True)
    columns["types"] = [casts.get(key, "") for key in keys]
    return Trace.from_columns(trace.mesh, values=trace.values, **columns, **trace.about())
