"""Tables of plans: each row of a CSV file is forecast, and written out with what was found."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tplab.cost import NAMED, Cluster, find
from tplab.errors import ClusterError, TplabError
from tplab.forecast.forecast import Forecast, forecast
from tplab.forecast.model import MODELS, Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack, find_stack

ANSWERS = (
    "seconds",
    "tokens_per_second_per_gpu",
    "mfu",
    "memory_gb",
    "memory_gb_by_rank",
    "memory_gib",
    "fits",
    "low",
    "high",
    "why",
)
"""The columns that are added. A GB is 1e9 bytes, and a GiB 2^30, as allocators count them."""

QUESTIONS = {
    *("cluster", "stack", "gpus", "gpus_per_node", "batch", "sequence", "model"),
    *(field.name for kind in (Model, Plan) for field in fields(kind) if field.name != "name"),
}
"""The columns that are read."""

CLUSTERS = (*(name for name, one in NAMED.items() if not name.endswith("-measured") and "bfloat16" in one.chip.flops),)
"""The names of clusters whose chips compute in bfloat16. Of those that were measured, the measured one is meant."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}

RECOMPUTE = {**dict.fromkeys(("true", "1", "yes", "on"), "full"), **dict.fromkeys(("false", "0", "no", "off"), "none")}
"""What tables write for a recomputation that they do not name."""

EMPTY = ("nan", "n/a", "<na>", "null", "none", "-")
"""What tables write for a cell without a value. "none" is one of `recompute`."""


def forecast_file(path: str | Path, out: str | Path) -> list[dict[str, str]]:
    """Forecast the rows of a CSV file, and write them to another one with the columns of `ANSWERS`."""
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write a mark at the beginning
        reader = csv.DictReader(line for line in file if not line.startswith("#"))
        columns, rows = list(reader.fieldnames or ()), list(reader)
    if not rows:
        raise ValueError(f"{path} has no rows; it needs a line with the names of columns, and one for each plan")
    done = list(forecast_rows(rows))
    with open(out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [*columns, *(name for name in ANSWERS if name not in columns)], extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows(done)
    return done


def unread(columns: Iterable[str]) -> list[str]:
    """A sentence for each column that is not read, with the one that may be meant."""
    found = list[str]()
    for name in columns:
        if _plain(name) not in QUESTIONS and name not in ANSWERS:
            near = difflib.get_close_matches(name, QUESTIONS, 1, 0.8)
            found.append(f"the column {name!r} is not read" + (f"; did you mean {near[0]!r}?" if near else ""))
    return found


def forecast_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """The rows with their answers. A row that cannot be forecast says why, in its column `why`.

    model          a name, or empty, with layers, hidden, heads, kv_heads, ffn, gated, vocab, tied (experts,
                   experts_per_token, head_dim and others of `Model` are understood too). Beside a name they replace it
    cluster        "h100", "a100" and "b200" are the measured ones, as "h100-measured" is; "h200" is an h100 with its
                   own memory; "b300" and "tpu_v5e" are data sheets, as "laptop" and "ethernet" are, which have dtype
                   float32 only.
                   Of another name that says one of these chips, as "dgx-h100", the measured one, and `why` says so
    stack          one of tplab.forecast.stacks; of an unknown one, Megatron's figures are taken, and `why` says so
    gpus, gpus_per_node, dp, tp, pp, cp, ep     dp is what is left of gpus if it is empty; other axes are 1
    microbatch, batch (sequences in a step), sequence, zero, schedule, virtual, sequence_parallel, recompute,
    attention, dtype, grad_dtype, overlap       empty: the stack's default, or that of `Plan`
    """
    for row in rows:
        try:
            answers = _answers(*forecast_row(row))
        except (TplabError, ValueError) as error:
            answers = _unanswered(str(error))
        except Exception as error:  # one strange row must not lose all others
            answers = _unanswered(f"{type(error).__name__}: {error}")
        yield {**row, **answers}


def _plain(column: str) -> str:
    """A column's name, however it is written: " GPUs" is "gpus"."""
    return column.strip().lower()


def _says(column: str, cell: str) -> bool:
    return bool(cell) and (cell.lower() not in EMPTY or (column, cell.lower()) == ("recompute", "none"))


def _unanswered(why: str) -> dict[str, str]:
    return dict.fromkeys(ANSWERS, "") | {"why": " ".join(f"not forecast: {why}".split())}


def forecast_row(row: Mapping[str, Any], on: Cluster | None = None) -> tuple[str, Forecast]:
    """(what is assumed, the forecast) of one row; `on` replaces the cluster that it names. Raises ValueError or
    TplabError for a row that makes no sense."""
    given = {_plain(name): str(cell).strip() for name, cell in row.items() if name and cell is not None}
    given = {name: cell for name, cell in given.items() if _says(name, cell)}
    model, (where, cluster) = model_of(given), ("", on) if on else _cluster(given)
    note, stack = _stack(given.get("stack", "megatron"))
    plan = plan_of(given, stack, cluster)
    check_dtype(cluster, plan.chip_dtype)
    missing = [name for name in ("batch", "sequence") if name not in given]
    if missing:
        raise ValueError(f"the row does not say its {' and '.join(missing)}")
    sizes = {name: _int(name, given[name]) for name in ("batch", "sequence")}
    return where + note, forecast(model, plan, cluster, stack=stack, **sizes)


def model_of(given: Mapping[str, str]) -> Model:
    """The model of a row: by name, by its sizes, or one with other sizes."""
    sizes = _fields(Model, {name: cell for name, cell in given.items() if name != "name"})
    name = given.get("model", "")
    for known in (name, f"playbook-{name}", f"megatron-{name}"):  # "8B" of the playbook, "22B" of Megatron's papers
        try:
            found = Model.find(known)
        except ValueError:
            continue
        return replace(found, **sizes)
    if not sizes:
        raise ValueError(unknown_model(name) if name else "the row names no model, and says none of its sizes")
    missing = [one for one in ("layers", "hidden", "heads", "vocab") if one not in sizes]
    if missing:
        raise ValueError(f"no model is named {name!r}, and the row does not say its {', '.join(missing)}")
    return Model(**sizes, name=name)


def unknown_model(name: str) -> str:
    """That there is no such model, and which are called nearly so; all of them if none is."""
    near = difflib.get_close_matches(name.lower(), MODELS, 3)
    return f"no model is named {name!r}; " + (
        f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(MODELS)}."
    )


def cluster_of(given: Mapping[str, str]) -> Cluster:
    """The cluster of a row: the one that was measured, where there is one, with as many GPUs in a node as it says."""
    name = given.get("cluster", "h100").lower().replace("_", "-").replace(" ", "-")
    name = name.removesuffix("-80gb").removesuffix("-sxm")
    known = next((one for one in (f"{name}-measured", name, name.replace("-", "_")) if one in NAMED), None)
    if known is None:
        raise ClusterError(f"no cluster is named {name!r}; there are {', '.join(CLUSTERS)}")
    cluster = find(known)
    per_node = _int("gpus_per_node", given["gpus_per_node"]) if "gpus_per_node" in given else cluster.node_size
    if per_node == cluster.node_size:
        return cluster
    if cluster.outer_link is None:
        raise ClusterError(f"cluster {cluster.name!r} is one node, so it has no gpus_per_node={per_node}")
    return replace(cluster, node_size=per_node)


def _cluster(given: Mapping[str, str]) -> tuple[str, Cluster]:
    """(what is assumed, the cluster of a row): of a name that is not known, but says a chip, the measured one."""
    name = given.get("cluster", "").lower()
    try:
        return "", cluster_of(given)
    except ClusterError:
        chip = next((word for word in re.split("[^a-z0-9]+", name) if f"{word}-measured" in NAMED), "")
        if not chip or name == chip:
            raise
    cluster, memory = cluster_of({**given, "cluster": chip}), re.search(r"(\d+)gb", name)
    note = f"cluster {name} was not measured, so this is {cluster.name}"
    if memory:
        cluster = replace(cluster, chip=replace(cluster.chip, memory=float(memory[1]) * 1e9))
        note += f" with {memory[1]} GB"
    return f"{note}; ", cluster


def check_dtype(cluster: Cluster, dtype: str) -> None:
    """Raise ClusterError if the cluster's chip has no figure for computing in this dtype."""
    if dtype not in cluster.chip.flops:
        known = ", ".join(cluster.chip.flops)
        raise ClusterError(f"{cluster.chip.name} of {cluster.name!r} has no speed in {dtype}; it has one in {known}")


def plan_of(given: Mapping[str, str], stack: Stack, cluster: Cluster) -> Plan:
    """The plan of a row, with the stack's defaults where it says nothing."""
    chosen = _fields(Plan, given)
    for name in ("dtype", "grad_dtype"):
        if name in chosen:
            dtype = str(chosen[name]).lower().removeprefix("torch.")
            is_small = dtype.startswith(("fp8", "float8"))
            chosen[name] = "float8" if is_small else DTYPES.get(dtype.split("-")[0], dtype)
    for name in ("schedule", "recompute"):
        if name in chosen:
            chosen[name] = str(chosen[name]).lower().replace(" ", "_").replace("-", "_")
    if "recompute" in chosen:
        chosen["recompute"] = RECOMPUTE.get(chosen["recompute"], chosen["recompute"])
    chosen = stack.defaults_on(cluster, chosen.get("recompute")) | chosen
    plan = Plan(**chosen)
    others = plan.ranks // plan.dp
    gpus = _int("gpus", given["gpus"]) if "gpus" in given else plan.ranks
    if "dp" not in chosen:
        if gpus % others:
            raise ValueError(f"tp x pp x cp = {others} does not divide {gpus} GPUs")
        plan = replace(plan, dp=gpus // others)
    if plan.ranks != gpus:
        raise ValueError(f"dp x tp x pp x cp = {plan.ranks}, and the row says {gpus} GPUs")
    return plan if plan.tp > 1 else replace(plan, sequence_parallel=False)


def _stack(name: str) -> tuple[str, Stack]:
    try:
        return "", find_stack(name)
    except ValueError:
        return f"stack {name} was not measured, so this is Megatron's; ", find_stack("megatron")


def _answers(note: str, found: Forecast) -> dict[str, str]:
    held = [f"{found.memory[rank].total / 1e9:.2f}" for rank in found.plan.mesh.ranks]
    return {
        "seconds": f"{found.seconds:.6g}",
        "tokens_per_second_per_gpu": f"{found.tokens_per_second_per_gpu:.6g}",
        "mfu": f"{found.mfu:.4f}",
        "memory_gb": f"{found.peak.total / 1e9:.2f}",
        "memory_gb_by_rank": " ".join(held),
        "memory_gib": f"{found.peak.total / 2**30:.2f}",
        "fits": str(found.fits).lower(),
        "low": f"{found.low:.6g}",
        "high": f"{found.high:.6g}",
        "why": note + found.why,
    }


def _fields(kind: type[Model] | type[Plan], given: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a Model or a Plan that a row says."""
    read: dict[str, Callable[[str, str], Any]] = {"int": _int, "int | None": _int, "bool": _bool, "str": _text}
    read["str | None"] = _text
    return {one.name: read[str(one.type)](one.name, given[one.name]) for one in fields(kind) if one.name in given}


def _int(name: str, text: str) -> int:
    most = 10**9 if name in ("batch", "sequence") else 10**6
    try:
        number = float(text)
        if number == int(number) and number <= most:
            return int(number)
    except (ValueError, OverflowError):  # no number; infinity
        pass
    raise ValueError(f"{name} is {text!r}; it must be a whole number, {most:,} at most")


def _bool(name: str, text: str) -> bool:
    known = {"true": True, "1": True, "1.0": True, "yes": True, "on": True}
    known |= {"false": False, "0": False, "0.0": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError(f"{name} is {text!r}; it must be true or false")
    return known[text.lower()]


def _text(name: str, text: str) -> str:
    return text
