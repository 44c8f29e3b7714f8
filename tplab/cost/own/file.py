"""Files: a cluster with every figure of its chip, its node and its fabric, their sources and errors; and measurements.

Measurements are the tables that nccl-tests print (`all_reduce_perf` and its siblings), as rows to fit a cluster to:

    #  Rank  0 Group  0 Pid   1 on  node-1 device  0 [0x1b] NVIDIA H100 80GB HBM3
    #      size      count   type  redop  root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
       33554432    8388608  float    sum    -1    231.1  145.19  254.08      0    229.9  145.95  255.41      0

The first time, out of place, is used. The lines "# Rank" give the number of ranks and of nodes.
Older versions do not print the name of the collective. It is then taken from the file's name (`all_gather.txt`), or
from redop, which only sums have, and busbw / algbw: 2(R-1)/R for an all_reduce, (R-1)/R for a reduce_scatter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from tplab.cost.cluster import Cluster
from tplab.cost.nccl import MEASURED
from tplab.cost.own.fit import Row
from tplab.errors import ClusterError

FORMAT = "tplab cluster 1"


def save(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster to a file, as JSON."""
    Path(path).write_text(json.dumps({"format": FORMAT, **_plain(cluster)}, indent=1) + "\n", encoding="utf-8")


def load(path: str | Path) -> Cluster:
    """Read a cluster that `save` wrote. Raises ClusterError if the file is anything else."""
    file = Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ClusterError(
                f"{file} is not a cluster: its format is not {FORMAT!r}; python -m tplab.measure writes one"
            )
        return _made(Cluster, found)
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file} is not JSON: {error}; python -m tplab.measure writes a cluster") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ClusterError(f"{file} is not a whole cluster: {error}; measure it again") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def _made(kind: Any, found: Any) -> Any:
    """A value of this type, from what `_plain` made of it. Raises TypeError or KeyError if a part is not there."""
    origin, of = get_origin(kind), [one for one in get_args(kind) if one is not type(None)]
    if origin in (Union, UnionType):
        return None if found is None else _made(of[0], found)
    if origin is tuple:
        return tuple(_made(of[0], one) for one in found)
    if origin is Mapping:
        return {name: _made(of[1], one) for name, one in found.items()}
    if not _has_parts(kind):
        return found
    kinds = get_type_hints(kind)
    for name, part in kinds.items():  # numbers and names may have defaults
        if name not in found and _has_parts(part):
            raise KeyError(name)
    return kind(**{name: _made(kinds[name], one) for name, one in found.items()})


def _has_parts(kind: Any) -> bool:
    """Whether it is a dataclass or a named tuple, or holds some."""
    return is_dataclass(kind) or hasattr(kind, "_fields") or any(map(_has_parts, get_args(kind)))


_RANK = re.compile(r"#\s*Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s+(.*\S)")
_NAMES = {op.replace("all_to_all", "alltoall"): op for op in MEASURED}
_TITLE = re.compile(rf"\b({'|'.join(_NAMES)})(?:_perf)?\b", re.IGNORECASE)
_ROUNDED = 0.03
"""The tolerance for comparing bandwidths: they are printed with two decimals, so small ones are imprecise."""
_DROP = 0.7
"""If more bytes take less than this fraction of the time of fewer bytes, it is noise and not a switch of protocols."""


class Table(NamedTuple):
    """The contents of one table: its rows, and the chip that ran it."""

    rows: tuple[Row, ...]
    chip: str


def read_tables(paths: Iterable[str | Path]) -> list[Table]:
    """One Table per file. Raises ClusterError with the file and line of a noisy or impossible row."""
    return [_read(Path(path)) for path in paths]


def _read(file: Path) -> Table:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror or error}") from None
    ranks: dict[int, str] = {}
    chip, rows, op = "", list[Row](), _op_in(file.stem)
    table = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip()[:1].isdigit()]
    for line in lines:
        if found := _RANK.search(line):
            ranks[int(found[1])], chip = found[2], found[3]
        elif line.lstrip().startswith("#"):
            op = _op_in(line) or op
    if not table:
        raise ClusterError(
            f"{file} has no row of a table of nccl-tests: lines of size, count, type, redop, root, time ..."
        )
    if not ranks:
        raise ClusterError(f'{file}: no line "# Rank" says how many ranks ran; keep the head of the output')
    op = op or _guessed(file, table, len(ranks))
    if op not in MEASURED:
        raise ClusterError(
            f"{file} is of {op or 'a collective that its numbers do not tell'}; give {', '.join(_NAMES)}"
        )
    for number, cells in table:
        rows += _row(cells, f"{file}, line {number}", len(ranks), len(set(ranks.values())), op, rows[-1:])
    return Table(tuple(rows), chip)


def _row(cells: Sequence[str], where: str, R: int, nodes: int, op: str, before: Sequence[Row]) -> list[Row]:
    try:
        size, micros, algbw, busbw = int(cells[0]), *(float(cell) for cell in cells[5:8])
        wrong = cells[8] if len(cells) > 8 else "0"
    except (IndexError, ValueError, TypeError):
        raise ClusterError(f"{where} is not a row of nccl-tests: {' '.join(cells)!r}") from None
    if R == 1 or not size:
        return []
    if wrong not in ("0", "N/A"):
        raise ClusterError(f"{where}: {wrong} elements were wrong, so its time is of no use; leave the file out")
    if not 0 < micros < 1e9:
        raise ClusterError(f"{where}: it took {cells[5]} us, which is not possible")
    rate, factor = size / micros / 1e3, (2 if op == "all_reduce" else 1) * (R - 1) / R
    if not _near(rate, algbw):
        raise ClusterError(f"{where}: {size} bytes in {cells[5]} us are {rate:.2f} GB/s, and algbw says {cells[6]}")
    if not _near(algbw * factor, busbw):
        raise ClusterError(
            f"{where}: over {R} ranks, busbw of an {op} is {factor:.4g} x algbw, {algbw * factor:.2f}, and not "
            f"{cells[7]}"
        )
    for last in before:
        if size > last.bytes and micros / 1e6 < _DROP * last.seconds:
            raise ClusterError(
                f"{where}: {size} bytes took {cells[5]} us, and {last.bytes:.0f} bytes before them "
                f"{last.seconds * 1e6:g}; that is noise. Run it again with more iterations (-n 100), on a quiet machine"
            )
    return [Row(op, R, nodes, float(size), micros / 1e6)]


def _near(value: float, printed: float) -> bool:
    return abs(value - printed) <= 0.011 + _ROUNDED * max(value, printed)


def _op_in(text: str) -> str:
    found = _TITLE.search(text)
    return _NAMES[found[1].lower()] if found else ""


def _guessed(file: Path, table: Sequence[tuple[int, Sequence[str]]], R: int) -> str:
    """The collective of a table that does not name it, inferred from its largest row; "" if that is ambiguous."""
    number, cells = max(table, key=lambda row: int(row[1][0]))
    try:
        ratio = float(cells[7]) / float(cells[6])
    except (IndexError, ValueError, ZeroDivisionError):
        raise ClusterError(f"{file}, line {number} is not a row of nccl-tests: {' '.join(cells)!r}") from None
    sums = cells[3] != "none"
    near = [times for times in (1, 2) if abs(ratio - times * (R - 1) / R) < 0.02]
    return {(1, True): "reduce_scatter", (2, True): "all_reduce"}.get((near[0], sums), "") if near else ""
