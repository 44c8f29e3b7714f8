"""A cluster as a file: every figure of its chip, its node and its fabric, with their sources and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tplab.cost.cluster import Cluster
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
