"""The cells of a row, and the cluster that a row or a command describes: its name, its network, its nodes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from tplab.cost import NAMED, Cluster, find
from tplab.cost.data_sheets import A100_40GB
from tplab.cost.named import CARDS
from tplab.errors import ClusterError, near

EMPTY = ("nan", "n/a", "<na>", "null", "none", "-")
"""Texts of a cell without a value. For `recompute`, "none" is a value."""


def plain(column: str) -> str:
    """The canonical form of a column's name: " GPUs" -> "gpus"."""
    return column.strip().lower()


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The cells of a row as text, including empty ones."""
    return {plain(name): str(cell).strip() for name, cell in row.items() if name and cell is not None}


def says(column: str, cell: str) -> bool:
    """Whether a cell has a value."""
    return bool(cell) and (cell.lower() not in EMPTY or (column, cell.lower()) == ("recompute", "none"))


def whole(name: str, text: str) -> int:
    most = 10**9 if name in ("batch", "sequence") else 10**6
    try:
        number = float(text)
        if number == int(number) and number <= most:
            return int(number)
    except (ValueError, OverflowError):  # not a number; infinity
        pass
    raise ValueError(f"{name} is {text!r}; it must be a whole number, {most:,} at most")


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be a number") from None


def switch(name: str, text: str) -> bool:
    for value, words in {True: ("true", "1", "1.0", "yes", "on"), False: ("false", "0", "0.0", "no", "off")}.items():
        if text.lower() in words:
            return value
    raise ValueError(f"{name} is {text!r}; it must be true or false")


def fields_of(kind: Any, given: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a dataclass of numbers, switches and names, such as a Model or a Plan, that a row gives."""
    read: dict[str, Callable[..., Any]] = {"int": whole, "float": number, "bool": switch, "str": lambda _, text: text}
    types = {one.name: str(one.type).removesuffix(" | None") for one in fields(kind)}
    return {name: read[type](name, given[name]) for name, type in types.items() if name in given}


USUAL = "h100-measured"
"""The default cluster."""

COLUMNS = {
    "cluster": (
        "NAME",
        "{}: forecasts, where the name says measured; else data sheets. Or a .json file",
    ),
    "fabric": ("NAME", f"the network between nodes: {', '.join(CARDS)}, or a .json file"),
    "gpus_per_node": ("N", "GPUs of a node"),
    "cards": ("N", "network cards of a node"),
    "oversubscription": ("X", "by how much the network between nodes is too small for all cards at once"),
}
"""The columns of rows, and flags, that describe a cluster: name -> help."""


def cluster_of(given: Mapping[str, str], exactly: bool = False) -> tuple[str, Cluster]:
    """(what is assumed, the cluster that the columns in `COLUMNS` describe).

    In a table "h100" means "h100-measured", and an unknown name that contains a chip's, such as "dgx-h100", means the
    measured cluster of this chip. `exactly`: names mean what they mean to `find`, so "h100" is the data sheet.
    """
    note, cluster = _named(given.get("cluster", ""), exactly)
    if "fabric" in given:
        fabric = given["fabric"]
        cluster = find(cluster, fabric if fabric.endswith(".json") else _plain(fabric))
    changes: dict[str, Any] = {name: whole(name, given[name]) for name in ("gpus_per_node", "cards") if name in given}
    if "oversubscription" in given:
        changes["oversubscription"] = number("oversubscription", given["oversubscription"])
    per_node = changes.pop("gpus_per_node", cluster.node_size)
    if per_node != cluster.node_size:
        if cluster.outer_link is None:
            raise ClusterError(f"cluster {cluster.name!r} is one node, so it has no gpus_per_node={per_node}")
        changes["node_size"] = per_node
    return note, replace(cluster, **changes) if changes else cluster


def _named(name: str, exactly: bool) -> tuple[str, Cluster]:
    if name.endswith(".json"):
        return "", find(name)
    plain = _plain(name)
    spelled = plain.removesuffix("-80gb").removesuffix("-sxm")
    known = {one.replace("_", "-"): cluster for one, cluster in NAMED.items()}
    if not name:
        return ("" if exactly else f"no cluster is named, so this is {USUAL}; "), NAMED[USUAL]
    if exactly:
        if plain not in known:
            raise ClusterError(f"no cluster is named {name!r}{near(plain, NAMED)}")
        return "", known[plain]
    if f"{spelled}-measured" in known:
        return f"cluster {name} is taken as {spelled}-measured; ", known[f"{spelled}-measured"]
    if spelled in known:
        return "", known[spelled]
    chip = next((word for word in re.split("[^a-z0-9]+", plain) if f"{word}-measured" in known), "")
    if not chip:
        raise ClusterError(f"no cluster is named {name!r}{near(plain, NAMED)}")
    cluster, memory = known[f"{chip}-measured"], re.search(r"(\d+)gb", plain)
    note = f"cluster {name.lower()} was not measured, so this is {cluster.name}"
    if memory:
        sheet = (
            A100_40GB if (chip, memory[1]) == ("a100", "40") else replace(cluster.chip, memory=float(memory[1]) * 1e9)
        )
        cluster = replace(cluster, chip=replace(sheet, launch=cluster.chip.launch, kernels=cluster.chip.kernels))
        note += f" with {memory[1]} GB"
    return f"{note}; ", cluster


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


def check_dtype(cluster: Cluster, dtype: str) -> None:
    """Raise ClusterError if the cluster's chip has no figure for computing in this dtype."""
    if dtype not in cluster.chip.flops:
        known = ", ".join(cluster.chip.flops)
        raise ClusterError(f"cluster {cluster.name!r} has no speed in {dtype}, only in {known}; take another cluster")


def add_flags(parser: argparse.ArgumentParser, usual: str = "") -> None:
    """Add a flag for each of `COLUMNS`: --cluster, --fabric, --gpus-per-node, ... With a `usual` cluster, which plans
    are searched on, those that have no bfloat16 are not listed."""
    named = [name for name, one in NAMED.items() if not usual or "bfloat16" in one.chip.flops]
    for name, (metavar, text) in COLUMNS.items():
        also = f" (default: {usual})" if usual and name == "cluster" else ""
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text.format(", ".join(named)) + also)


def flagged(given: argparse.Namespace, usual: str = "") -> Cluster:
    """The cluster of these flags. Raises ClusterError or ValueError."""
    cells = {name: value for name in COLUMNS if (value := getattr(given, name)) is not None}
    if "cluster" not in cells and not usual:
        raise ClusterError(f"--{next(iter(cells)).replace('_', '-')} says how a cluster is; give --cluster, too")
    return cluster_of({"cluster": usual} | cells, exactly=True)[1]
