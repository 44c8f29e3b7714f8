"""A cluster as a file: every figure of its chip, its node and its fabric, with their sources and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tplab.cost.chip import Chip
from tplab.cost.cluster import Cluster
from tplab.cost.fabric import Error, Fabric
from tplab.cost.fitted import Fitted
from tplab.cost.kernels import Attention, Kernels, Tiles
from tplab.cost.link import Link
from tplab.cost.nccl import Nccl, Ratios
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
        return _cluster(found)
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{file} is not JSON: {error}; python -m tplab.measure writes a cluster") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ClusterError(f"{file} is not a whole cluster: {error}; measure it again") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, (Error, Ratios, Tiles)):
        return _plain(value._asdict())
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def _cluster(found: dict[str, Any]) -> Cluster:
    chip, fitted, fabric = found["chip"], found["fitted"], found["fabric"]
    if chip["kernels"] is not None:
        kernels = chip["kernels"]
        tiles = {name: kernels[name] and Tiles(**kernels[name]) for name in ("wide", "narrow")}
        chip["kernels"] = Kernels(
            **kernels | tiles | {"attention": tuple(Attention(**one) for one in kernels["attention"])}
        )
    if fitted is not None:
        nccl = Nccl(**fitted["nccl"] | {"ratios": Ratios(**fitted["nccl"]["ratios"])})
        errors = {name: Error(**error) for name, error in fitted["errors"].items()}
        fitted = Fitted(**fitted | {"nccl": nccl, "errors": errors})
    if fabric is not None:
        fabric = Fabric(**fabric | {"error": fabric["error"] and Error(**fabric["error"])})
    links: dict[str, Any] = {name: found[name] and Link(**found[name]) for name in ("inner_link", "outer_link")}
    return Cluster(**found | links | {"chip": Chip(**chip), "fitted": fitted, "fabric": fabric})
