"""Tables of plans: each row of a CSV file is forecast, and written out with the answers."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tplab.cost import Cluster
from tplab.errors import TplabError, near
from tplab.forecast.clusters import COLUMNS, cells, check_dtype, cluster_of, fields_of, plain, says, switch, whole
from tplab.forecast.forecast import Forecast, forecast
from tplab.forecast.model import MODELS, Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import Stack, find_stack

ANSWERS: Mapping[str, Callable[[Forecast], str]] = {
    "seconds": lambda found: f"{found.seconds:.6g}",
    "tokens_per_second_per_gpu": lambda found: f"{found.tokens_per_second_per_gpu:.6g}",
    "mfu": lambda found: f"{found.mfu:.4f}",
    "memory_gb": lambda found: f"{found.peak.total / 1e9:.2f}",
    "memory_gb_by_rank": lambda found: " ".join(f"{held.total / 1e9:.2f}" for held in found.memory),
    "memory_gib": lambda found: f"{found.peak.total / 2**30:.2f}",
    "fits": lambda found: str(found.fits).lower(),
    "low": lambda found: "" if found.low is None else f"{found.low:.6g}",
    "high": lambda found: "" if found.high is None else f"{found.high:.6g}",
    "why": lambda found: found.why,
}
"""The columns that are added. A GB is 1e9 bytes; a GiB, as allocators count, is 2^30."""

QUESTIONS = {
    *(*COLUMNS, "stack", "gpus", "batch", "sequence", "model", "flash"),
    *(field.name for kind in (Model, Plan) for field in fields(kind) if field.name != "name"),
}
"""The columns that are read."""

CARRIED = re.compile(
    r"(note|comment|measured|published)\w*|id|row|index|name|run|title|label|source|url|link|date|unnamed: \d+"
)
"""The names of your own columns, which are copied unchanged."""

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}

SPELLED = {
    "recompute": {
        **dict.fromkeys(("true", "1", "yes", "on"), "full"),
        **dict.fromkeys(("false", "0", "no", "off"), "none"),
    },
    "attention": {
        **dict.fromkeys(("fa2", "flash_2", "flash_attention_2", "flashattention_2"), "flash2"),
        **dict.fromkeys(("fa3", "flash_3", "flash_attention_3", "flashattention_3"), "flash3"),
        **dict.fromkeys(("eager", "math"), "unfused"),
    },
}
"""Column -> other names of its values in tables."""


def forecast_file(path: str | Path, out: str | Path) -> list[dict[str, str]]:
    """Forecast the rows of a CSV file, and write them to another one with the columns of `ANSWERS`."""
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
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
    """A sentence for each column that is not read, with a suggestion."""
    found = list[str]()
    for name in map(plain, columns):
        if name not in QUESTIONS and name not in ANSWERS and not CARRIED.fullmatch(name):
            meant = get_close_matches(name, QUESTIONS, 2, 0.75)
            way_out = f"did you mean {' or '.join(meant)}?" if meant else f"note_{name} would be carried along"
            found.append(f"the column {name!r} is not read; {way_out}")
    return found


def forecast_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """The rows with their answers. A row that cannot be forecast says why, in its column `why`.

    model          a name, the path of a config.json, or empty, with layers, hidden, heads, kv_heads, ffn, gated, vocab,
                   tied (experts, head_dim and others of `Model` are read too). With a name, they override its sizes
    cluster        unlike for --cluster, "h100", "h200", "a100" and "b200" are the measured ones, like "h100-measured".
                   "b300", "gb200", "gb300" and "tpu_v5e" are data sheets, and so are "laptop" and "ethernet", which
                   have dtype float32 only. Another name that contains a measured chip, such as "dgx-h100", means that
                   chip's cluster, and `why` says so
    fabric         the network between nodes: playbook, infiniband-ndr, infiniband-hdr, efa-p5, ethernet-100g, or a path
                   to a .json; empty: the cluster's own
    cards, oversubscription        network cards of a node; by how much the network is too small for all of them
    stack          one of tplab.forecast.stacks; for an unknown one, Megatron's figures are used, and `why` says so
    gpus, gpus_per_node, dp, tp, pp, cp, ep     an empty dp is gpus divided by the other axes; these are 1 if empty
    etp, dispatch, skew    of experts: the ranks that divide each, how tokens are sent, how unequal the choices are
    microbatch, batch (sequences in a step), sequence, zero, schedule, virtual, sequence_parallel, recompute,
    dtype, grad_dtype, overlap, balance         empty: the stack's default, or that of `Plan`
    attention      flash2, flash3 or unfused. (flash, true or false, says only whether it is fused)
    compiled       true or false: whether torch.compile fuses small kernels, for torch FSDP
    state_dtype    float32 or bfloat16: of the optimizer's moments, and of its own copy of the parameters
    Your own columns, which are copied unchanged, are called note..., comment..., measured..., published..., id, row,
    name, run, title, label, source, url or date. Any other column with a value is refused.
    """
    for row in rows:
        try:
            note, found = forecast_row(row)
            answers = {name: text(found) for name, text in ANSWERS.items()}
            answers["why"] = note + answers["why"]
        except (TplabError, ValueError) as error:
            answers = _unanswered(str(error))
        except Exception as error:  # one bad row must not lose the others
            answers = _unanswered(f"{type(error).__name__}: {error}")
        yield {**row, **answers}


def _unanswered(why: str) -> dict[str, str]:
    return dict.fromkeys(ANSWERS, "") | {"why": " ".join(f"not forecast: {why}".split())}


def forecast_row(row: Mapping[str, Any], on: Cluster | None = None) -> tuple[str, Forecast]:
    """(what is assumed, the forecast) of one row; `on` replaces the cluster that it names. Raises ValueError or
    TplabError for an invalid row."""
    written = cells(row)
    given = {name: cell for name, cell in written.items() if says(name, cell)}
    if sentences := unread(given):
        raise ValueError("; ".join(sentences))
    if on and (said := [name for name in COLUMNS if name in given]):
        raise ValueError(f"the cluster is given already, so the row cannot say its {' and '.join(said)}")
    model, (where, cluster) = model_of(given), ("", on) if on else cluster_of(given)
    note, stack = _stack(given.get("stack", "megatron"))
    plan = plan_of(given, stack, cluster)
    check_dtype(cluster, plan.chip_dtype)
    missing = [name for name in ("batch", "sequence") if name not in given]
    if missing:
        empty = [f"{name} is {written[name]!r}" for name in missing if written.get(name)]
        what = f"; {' and '.join(empty)}, which says nothing" if empty else ""
        raise ValueError(f"the row does not say its {' and '.join(missing)}{what}")
    sizes = {name: whole(name, given[name]) for name in ("batch", "sequence")}
    if "compiled" in given and stack.name != "fsdp":
        note += f"compiled is a choice of torch FSDP, and nothing changes with it for {stack.name}; "
    return where + note, forecast(model, plan, cluster, stack=stack, **sizes)


def model_of(given: Mapping[str, str]) -> Model:
    """The model of a row: by name, by the path of a config.json, by its sizes, or one with other sizes."""
    sizes = fields_of(Model, {name: cell for name, cell in given.items() if name != "name"})
    name = given.get("model", "")
    if name.endswith(".json"):
        return replace(Model.of_config(name), **sizes)
    for known in (name, f"playbook-{name}", f"megatron-{name}"):  # "8B" of the playbook, "22B" of Megatron's papers
        try:
            found = Model.find(known)
        except ValueError:
            continue
        return replace(found, **sizes)
    missing = [one for one in ("layers", "hidden", "heads", "vocab") if one not in sizes]
    if not missing:
        return Model(**sizes, name=name)
    if sizes:
        raise ValueError(f"no model is named {name!r}, and the row does not say its {', '.join(missing)}")
    if not name:
        raise ValueError("the row names no model, and says none of its sizes")
    raise ValueError(f"no model is named {name!r}, nor is that the path of a config.json{near(name, MODELS)}")


def plan_of(given: Mapping[str, str], stack: Stack, cluster: Cluster) -> Plan:
    """The plan of a row, with the stack's defaults for empty cells."""
    chosen = fields_of(Plan, given)
    for name in ("dtype", "grad_dtype", "state_dtype"):
        if name in chosen:
            dtype = str(chosen[name]).lower().removeprefix("torch.")
            is_small = dtype.startswith(("fp8", "float8"))
            chosen[name] = "float8" if is_small else DTYPES.get(dtype.split("-")[0], dtype)
    for name in ("schedule", "recompute", "attention", "dispatch"):
        if name in chosen:
            text = str(chosen[name]).lower().replace(" ", "_").replace("-", "_")
            chosen[name] = SPELLED.get(name, {}).get(text, text)
    chosen = stack.defaults_on(cluster, chosen.get("recompute")) | chosen
    if "flash" in given and "attention" not in given:
        is_fused, usual = switch("flash", given["flash"]), chosen.get("attention")
        chosen["attention"] = "unfused" if not is_fused else "flash2" if usual == "unfused" else usual
    plan = Plan(**chosen)
    others = plan.ranks // plan.dp
    gpus = whole("gpus", given["gpus"]) if "gpus" in given else plan.ranks
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
