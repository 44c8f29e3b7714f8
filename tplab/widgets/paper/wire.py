"""The data sent to the browser, in one binary trait: a JSON header and columns of numbers. static/wire.js reads it."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_KINDS = {"i1": "Int8Array", "u1": "Uint8Array", "i2": "Int16Array", "u2": "Uint16Array", "i4": "Int32Array",
          "f4": "Float32Array", "f8": "Float64Array"}  # fmt: skip


def pack(header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    """Pack integers in the smallest type that holds them, or as differences if these take far fewer distinct values.

    Layout before compression (zlib): the header's length (uint32, little-endian), the header as JSON, then the
    columns, each from a multiple of 8. header["columns"] is name -> [kind of array, length, offset, differences?].
    """
    places: dict[str, list[Any]] = {}
    blobs: list[bytes] = []
    offset = 0
    for name, column in columns.items():
        column = column.astype(np.int64) if column.dtype.kind in "iu" else column
        differences = column.dtype.kind == "i" and len(column) > 64 and _has_few_differences(column)
        array = _smallest(np.diff(column, prepend=0) if differences else column)
        blob = array.astype(array.dtype.newbyteorder("<")).tobytes()
        blob += bytes(-len(blob) % 8)
        places[name] = [_KINDS[array.dtype.str[1:]], len(array), offset, int(differences)]
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps({**header, "columns": places}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 4) % 8)
    return zlib.compress(struct.pack("<I", len(text)) + text + b"".join(blobs), 6)


def _has_few_differences(column: np.ndarray) -> bool:
    """Judged by the beginning of the column. The browser adds differences up as 32-bit numbers."""
    some = column[:4096]
    return 4 * len(np.unique(np.diff(some))) < len(np.unique(some)) and np.abs(column).max() < 2**31


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header and the columns that were passed to `pack`."""
    plain = zlib.decompress(data)
    (length,) = struct.unpack_from("<I", plain)
    header = json.loads(plain[4 : 4 + length])
    kinds = {name: kind for kind, name in _KINDS.items()}
    columns = {}
    for name, (kind, count, offset, differences) in header.pop("columns").items():
        array = np.frombuffer(plain, "<" + kinds[kind], count, 4 + length + offset)
        columns[name] = np.cumsum(array) if differences else array
    return header, columns


def _smallest(column: np.ndarray) -> np.ndarray:
    if column.dtype.kind == "f":
        return column
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    for kind in ("i1", "u1", "i2", "u2", "i4"):
        info = np.iinfo(kind)
        if info.min <= low and high <= info.max:
            return column.astype(kind)
    return column.astype("f8")  # exact to 2**53, and JavaScript has no larger whole numbers
