"""Published measurements of training steps on real GPUs, each with its source, and the constants fitted to them.

`python -m benchmarks.fit.steps` in the repository fits them; docs/forecast.md shows every table beside the forecasts.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tplab.cost import Cluster
from tplab.forecast.clusters import cluster_of
from tplab.forecast.model import Model
from tplab.forecast.plan import Plan
from tplab.forecast.stacks import find_stack

HERE = Path(__file__).parent

ON_B200: Mapping[tuple[int, int, int], tuple[float, ...]] = MappingProxyType(
    {(1, 2, 4): (66.552, 62.968), (2, 1, 4): (60.68,), (4, 1, 2): (39.07,), (8, 1, 1): (28.29,)}
)
"""(tp, pp, dp) -> peak GiB allocated on each stage: Megatron with ZeRO 1, 12 layers of Llama 3 70B on 8 B200s, 8
microbatches of one sequence of 4096 in bfloat16 (MooreThreads/SimuMax, commit 4dcaae5, Apache-2.0)."""


class Run(NamedTuple):
    """A step of `batch` sequences that took `seconds`.

    source      where it was published: "playbook", or a name that the first lines of runs.csv explain
    cluster     its name; `fabric` is the name of the network if it is not the cluster's own; `on` combines both
    memory      GB per GPU, if published
    is_fitted   whether constants may be fitted to it: not if the forecast is known not to hold, and not if the row is
                only there to be forecast
    """

    source: str
    stack: str
    model: Model
    plan: Plan
    cluster: str
    batch: int
    sequence: int
    seconds: float
    memory: float | None = None
    is_fitted: bool = True
    fabric: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of each GPU in a step."""
        return self.batch * self.sequence // self.plan.ranks

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of each GPU."""
        return self.tokens / self.seconds

    @property
    def on(self) -> Cluster:
        return cluster_of({"cluster": self.cluster} | ({"fabric": self.fabric} if self.fabric else {}))[1]


@cache
def playbook() -> tuple[Run, ...]:
    """nanotron on 8 to 512 H100s. Runs with a pipeline are not fitted, because the engine was later replaced."""
    batch, sequence, found = 256, 4096, list[Run]()
    for row in _rows("playbook.csv"):
        number: dict[str, Any] = {name: int(row[name]) for name in ("dp", "tp", "pp", "microbatch", "zero")}
        plan = Plan(**number, sequence_parallel=number["tp"] > 1)
        seconds = batch * sequence / (float(row["tokens_per_second_per_gpu"]) * plan.ranks)
        about = (Model.find(row["model"]), plan, "h100-measured", batch, sequence, seconds)
        found.append(Run("playbook", "nanotron", *about, float(row["memory_gb"]), row["clean"] == "1"))
    return tuple(found)


@cache
def runs() -> tuple[Run, ...]:
    """Megatron on A100, H100 and B200; FSDP2; DeepSpeed. The table says which may be fitted."""
    return tuple(_run(row) for row in _rows("runs.csv"))


def _run(row: dict[str, str]) -> Run:
    numbers = ("dp", "tp", "pp", "cp", "ep", "microbatch", "zero", "virtual")
    switches = ("sequence_parallel", "overlap")
    fields: dict[str, Any] = {name: int(row[name]) for name in numbers} | {name: row[name] == "1" for name in switches}
    fields |= {name: row[name] or None for name in ("attention", "state_dtype")}
    fields |= {"compiled": {"true": True, "false": False}.get(row["compiled"])}
    sums = find_stack(row["stack"]).defaults["grad_dtype"]
    plan = Plan(**fields, recompute=row["recompute"], dtype=row["dtype"], grad_dtype=sums)
    model = Model.find(row["model"])
    if row["layers"]:
        model = replace(model, layers=int(row["layers"]), name=f"{model.name}, {row['layers']} layers")
    about = (plan, row["cluster"], int(row["batch"]), int(row["sequence"]), float(row["seconds"]))
    memory = float(row["memory_gib"]) * 2**30 / 1e9 if row["memory_gib"] else None
    return Run(row["source"], row["stack"], model, *about, memory, row["fitted"] == "1", row["fabric"])


@cache
def foundry() -> tuple[Run, ...]:
    """torch FSDP, eager, on 8 to 512 A100s and H100s."""
    found = list[Run]()
    for row in _rows("llmfoundry.csv"):
        sequence, gpus, batch = (int(row[name]) for name in ("sequence", "gpus", "batch"))
        model = replace(Model.find(row["model"]), positions=sequence)
        plan = Plan(
            dp=gpus,
            microbatch=int(row["microbatch"]),
            zero=int(row["zero"]),
            recompute=row["recompute"],
            dtype=row["dtype"],
            compiled=False,
        )
        chip, memory = row["gpu"].split("_")
        cluster = f"{chip}-measured" if memory == "80gb" else f"{chip}-{memory}"
        fabric = "infiniband-ndr" if chip == "h100" else ""
        seconds = batch * sequence / (float(row["tokens_per_second_per_gpu"]) * gpus)
        found.append(Run("llm-foundry", "fsdp", model, plan, cluster, batch, sequence, seconds, fabric=fabric))
    return tuple(found)


def pairs(few: int, many: int, microbatch: int, ranks: int = 256) -> list[tuple[Run, Run]]:
    """Pairs of runs of the playbook with tp `few` and `many`, and the same model, GPUs, microbatch and ZeRO stage.

    ranks   the most GPUs: at 512, single runs took up to six times as long as similar ones
    """
    known = {(run.model, run.plan): run for run in playbook()}
    chosen = [run for run in playbook() if (run.plan.tp, run.plan.pp, run.plan.microbatch) == (many, 1, microbatch)]
    found = list[tuple[Run, Run]]()
    for run in chosen:
        plan = replace(run.plan, tp=few, dp=run.plan.dp * many // few, sequence_parallel=few > 1)
        if run.plan.ranks <= ranks and (run.model, plan) in known:
            found.append((known[run.model, plan], run))
    return found


def sources(name: str) -> list[str]:
    """The lines at the top of a table, which give its source: "playbook", "runs" or "llmfoundry"."""
    lines = (HERE / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("#")]


def _rows(name: str) -> list[dict[str, str]]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
