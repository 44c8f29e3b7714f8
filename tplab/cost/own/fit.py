"""Constants of your own cluster, fitted to measurements on it, and the errors of their predictions.

The fit is of logarithms of constants to logarithms of times. Errors are cross-validated: those of rows left out of the
fit, a third of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tplab.cost.chip import Chip
from tplab.cost.cluster import Cluster
from tplab.cost.fabric import Error, Fabric, Fitted
from tplab.cost.link import Link
from tplab.cost.nccl import MEASURED, Nccl, Ratios
from tplab.errors import ClusterError

T = TypeVar("T")
OPS = (*MEASURED, "hop", "matmul", "copy")
PLAIN = Ratios(
    ll128=1.0, ll=1.0, copy=0.0, start=1.0, peer_hop=1.0, peer_ll=1.0, peer_large=0.0, peer=1.0, peer_ramp=1.0
)
"""One protocol for all sizes: for gloo, or for NCCL if few sizes were measured."""
_SWITCHES = [2.0**20 * size for size in (0.5, 1.1, 2.2, 4.5, 9.0)]
_MANY = 24
"""The number of rows of one node from which NCCL's protocols can be told apart."""
_FEW = 4
"""The number of constants of a fit, and so the fewest rows that determine them."""


class Row(NamedTuple):
    """One measurement.

    op        one of NCCL's measured collectives; "hop", a message from one rank to the next; "matmul"; "copy", within
              a chip's memory
    ranks     how many took part, in how many `nodes`
    bytes     of the whole tensor; for an all_to_all, of each rank's input; for a copy, read and written; for a matmul,
              its FLOPs
    dtype     of a matmul
    """

    op: str
    ranks: int
    nodes: int
    bytes: float
    seconds: float
    dtype: str = ""


class Own(NamedTuple):
    """A fitted cluster, and the seconds that it predicts for each row."""

    cluster: Cluster
    predicted: tuple[float, ...]


def fit_cluster(name: str, rows: Sequence[Row], base: Cluster, source: str) -> Own:
    """The cluster whose constants fit the rows best.

    base     supplies what was not measured: the chip, the link within a node, the data sheet of the network cards. If
             it is a measured cluster, collectives have NCCL's protocols; from a data sheet they have one, as with gloo
    source   who measured it, on what, when
    Raises ClusterError if there are too few rows, or if they disagree so much that no constants fit.
    """
    for row in rows:
        if row.op not in OPS or not 0 < row.seconds < np.inf or not row.bytes >= 0:
            raise ClusterError(f"{row} cannot have been measured; give seconds and bytes of one of {', '.join(OPS)}")
    one = [row for row in rows if row.op in MEASURED and row.nodes == 1]
    several = [row for row in rows if row.op in MEASURED and row.nodes > 1]
    errors: dict[str, Error] = {}
    chip, inner, ratios = base.chip, base.inner_link, base.fitted.nccl.ratios if base.fitted else None
    if copies := [row for row in rows if row.op == "copy"]:
        reached = max(row.bytes / row.seconds for row in copies)
        chip = replace(chip, memory_bandwidth=reached, source=f"{chip.source}; memory: {source}")
    if matmuls := [row for row in rows if row.op == "matmul"]:
        chip, errors["matmuls"] = _held_out(matmuls, lambda some: _chip(chip, some, source), _chip_seconds)
    if hops := [row for row in rows if row.op == "hop" and row.nodes == 1]:
        inner, errors["hops"] = _held_out(hops, lambda some: _link(some, source), _link_seconds)
    plain = _one({"start": 0.0, "hop": inner.latency, "ramp": 0.0, "bandwidth": inner.bandwidth})
    found = base.fitted.nccl if base.fitted else plain
    if one:
        found, errors["collectives"] = _held_out(one, lambda some: _nccl(some, ratios), _taken)
        inner = (
            inner if hops else Link("as its collectives send", found.message_latency, found.message_bandwidth, source)
        )
    cluster = Cluster(name, chip, inner, fitted=Fitted(found, errors, source))
    if several:
        size = max(row.ranks // row.nodes for row in several)
        outer = base.outer_link or Link("the network as measured", 0.0, 1e12, source)
        cluster = replace(cluster, node_size=size, outer_link=outer, fabric=Fabric("your network"))
        fabric, error = _held_out(several, lambda some: _fabric(cluster, some, source), _between(cluster))
        cluster = replace(cluster, fabric=replace(fabric, error=error))
    if not rows or not (errors or several):
        raise ClusterError("nothing was measured; give rows of collectives, hops or matmuls")
    return Own(cluster, tuple(predicted(cluster, row) for row in rows))


def predicted(cluster: Cluster, row: Row) -> float:
    """The seconds that a cluster predicts for a row."""
    if row.op in ("matmul", "copy"):
        return _chip_seconds(cluster.chip, row)
    size = cluster.node_size or row.ranks
    if row.op == "hop":
        return cluster.link(0, size if row.nodes > 1 else 1).seconds(row.bytes)
    each = row.ranks // row.nodes
    ranks = [node * size + rank for node in range(row.nodes) for rank in range(each)]
    return cluster.collective_seconds(row.op, row.bytes, ranks)


# -------------------------------------------------------------------------------------------------------------- fitting


def _held_out(
    rows: Sequence[Row], fit: Callable[[Sequence[Row]], T], seconds: Callable[[T, Row], float]
) -> tuple[T, Error]:
    """The fit to all rows, and its cross-validated error: a third of the rows left out at a time, or one if few."""
    parts = 3 if len(rows) >= 3 * _FEW else len(rows)
    off = list[float]()
    for part in range(parts):
        some = [row for place, row in enumerate(rows) if place % parts != part]
        made = fit(some or rows)
        off += [abs(seconds(made, row) / row.seconds - 1) for place, row in enumerate(rows) if place % parts == part]
    return fit(rows), Error(round(float(np.median(off)), 3), round(float(np.quantile(off, 0.9)), 3))


def _fit(
    begin: Mapping[str, float],
    make: Callable[[dict[str, float]], T],
    seconds: Callable[[T, Row], float],
    rows: Sequence[Row],
    shares: Sequence[str] = (),
) -> tuple[float, T]:
    """(the loss, what `make` makes of the constants with which it takes about as many seconds as were measured)."""
    measured = np.log([row.seconds for row in rows])

    def made(theta: Array) -> T:
        return make(dict(zip(begin, np.exp(theta).tolist())))

    def residuals(theta: Array) -> Array:
        one = made(theta)
        return np.log(np.maximum([seconds(one, row) for row in rows], 1e-12)) - measured

    kept = [place for place, name in enumerate(begin) if name in shares]
    loss, theta = least(residuals, np.log(list(begin.values())), 0.1, shares=kept)
    return loss, made(theta)


def _taken(nccl: Nccl, row: Row) -> float:
    return nccl.taken(row.op, row.bytes, row.ranks).seconds


def _one(of: Mapping[str, float]) -> Nccl:
    """One protocol for all sizes."""
    return Nccl(**of, middle=0.0, wait=0.0, switch=0.0, in_switch=0.0, peer_copy=0.0, ratios=PLAIN)


def _nccl(rows: Sequence[Row], ratios: Ratios | None) -> Nccl:
    """Collectives of one node: with NCCL's protocols if there are enough rows to tell them apart, else with one."""
    quick, most = min(row.seconds for row in rows), max(row.bytes / row.seconds for row in rows)
    begin = {"start": quick / 2, "hop": quick / 8, "ramp": 1e-9, "bandwidth": most}
    if ratios is None or len(rows) < _MANY:
        peers = [row for row in rows if row.op == "all_to_all"]
        rings = [row for row in rows if row.op != "all_to_all"] or peers
        _, found = _fit(begin, _one, _taken, rings)
        if not peers or peers is rings:
            return found
        return _fit({"peer": 1.0}, lambda of: replace(found, ratios=PLAIN._replace(**of)), _taken, peers)[1]
    begin |= {"middle": quick / 4, "wait": quick / 2, "in_switch": most, "peer_copy": 0.35}
    known: Ratios = ratios
    tried = [_fit(begin, lambda of, at=at: Nccl(**of, switch=at, ratios=known), _taken, rows) for at in _SWITCHES]
    return min(tried, key=lambda trial: trial[0])[1]


def _between(cluster: Cluster) -> Callable[[Fabric, Row], float]:
    return lambda fabric, row: predicted(replace(cluster, fabric=fabric), row)


def _fabric(cluster: Cluster, rows: Sequence[Row], source: str) -> Fabric:
    """The network. `near` is set to `hop`, because rows with one size of node cannot tell them apart."""
    rings, peers = ([row for row in rows if (row.op == "all_to_all") == flag] for flag in (False, True))
    assert cluster.outer_link is not None
    card, quick = cluster.outer_link.bandwidth, min(row.seconds for row in rows)
    begin = {
        "reached": min(0.9, max(row.bytes / row.seconds for row in rows) / card),
        "hop": quick / 8,
        "tree": quick / 4,
    }
    if len({row.nodes for row in rings}) > 1:
        begin["fall"] = 0.1

    def ring(of: dict[str, float]) -> Fabric:
        more: dict[str, Any] = of | {"near": of["hop"], "by_peers": of["reached"], "begin": of["hop"]}
        return Fabric("your network", **more, source=source)

    priced = _between(cluster)
    found = _fit(begin, ring, priced, rings, ["reached"])[1] if rings else ring(begin)
    if peers:
        of_peers = {"by_peers": found.by_peers, "begin": quick / 2, "peer": quick / 8}
        return _fit(of_peers, lambda of: replace(found, **of), priced, peers, ["by_peers"])[1]
    return found


def _link(rows: Sequence[Row], source: str) -> Link:
    begin = {"latency": min(row.seconds for row in rows), "bandwidth": max(row.bytes / row.seconds for row in rows)}
    return _fit(begin, lambda of: Link("from rank to rank", **of, source=source), _link_seconds, rows)[1]


def _link_seconds(link: Link, row: Row) -> float:
    return link.seconds(row.bytes)


def _chip_seconds(chip: Chip, row: Row) -> float:
    return chip.seconds(row.bytes, 0.0, row.dtype) if row.op == "matmul" else chip.seconds(0.0, row.bytes)


def _chip(chip: Chip, rows: Sequence[Row], source: str) -> Chip:
    """The chip with the rates that matmuls reach, and the time to launch one."""
    begin = {"launch": min(row.seconds for row in rows) / 2}
    for dtype in sorted({row.dtype for row in rows}):
        begin[dtype] = max(row.bytes / row.seconds for row in rows if row.dtype == dtype)
    about = f"{chip.source}; rates: {source}"

    def made(of: dict[str, float]) -> Chip:
        launch = of.pop("launch")
        return replace(chip, flops={**chip.flops, **of}, launch=launch, source=about, kernels=None)

    return _fit(begin, made, _chip_seconds, rows)[1]


# --- least squares ----------------------------------------------------------------------------------------------------


Array = np.ndarray[Any, np.dtype[np.float64]]


def least(
    residuals: Callable[[Array], Array], begin: Array, scale: float, steps: int = 40, shares: Sequence[int] = ()
) -> tuple[float, Array]:
    """The Levenberg-Marquardt method with the loss 2 (sqrt(1 + (r/scale)^2) - 1). Returns the loss and its minimum.

    Parameters are logarithms. None moves by more than 6; those in `shares` stay at 1 or below.
    """
    theta, damping = begin.copy(), 1e-2
    most = begin + 6
    most[list(shares)] = 0

    def loss(r: Array) -> float:
        return float(2 * (np.sqrt(1 + (r / scale) ** 2) - 1).sum())

    r = residuals(theta)
    now = loss(r)
    for _ in range(steps):
        jacobian = np.empty((len(r), len(theta)))
        for place in range(len(theta)):
            moved = theta.copy()
            moved[place] += 1e-4
            jacobian[:, place] = (residuals(moved) - r) / 1e-4
        weight = 1 / np.sqrt(1 + (r / scale) ** 2)
        normal, gradient = (jacobian.T * weight) @ jacobian, (jacobian.T * weight) @ r
        before = now
        for _ in range(8):
            by = damping * (np.diag(normal) + 1e-6)
            tried = np.clip(theta - np.linalg.solve(normal + np.diag(by), gradient), begin - 6, most)
            other = residuals(tried)
            if loss(other) < now:
                theta, r, now, damping = tried, other, loss(other), damping / 4
                break
            damping *= 4
        if before - now < 1e-5 * before:
            break
    return now, theta
