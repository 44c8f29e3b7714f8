"""Published measurements of training steps on real GPUs, each with its source, and the constants fitted to them.

`python -m benchmarks.fit.steps` in the repository fits them; docs/forecast.md shows every table beside the forecasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tplab.cost import Cluster
from tplab.cost.measured import read
from tplab.forecast.clusters import cluster_of, fields_of
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
    of = {"source": "playbook", "stack": "nanotron", "cluster": "h100-measured", "batch": "256", "sequence": "4096"}
    return tuple(
        _run({**row, **of, "sequence_parallel": str(row["tp"] != "1"), "fitted": row["clean"]})
        for row in read(HERE / "playbook.csv")
    )


@cache
def runs() -> tuple[Run, ...]:
    """Megatron on A100, H100 and B200; FSDP2; DeepSpeed. The table says which may be fitted."""
    return tuple(map(_run, read(HERE / "runs.csv")))


@cache
def foundry() -> tuple[Run, ...]:
    """torch FSDP, eager, on 8 to 512 A100s and H100s."""
    found, of = list[Run](), {"source": "llm-foundry", "stack": "fsdp", "compiled": "false", "fitted": "1"}
    for row in read(HERE / "llmfoundry.csv"):
        chip, memory = row["gpu"].split("_")
        row["cluster"] = f"{chip}-measured" if memory == "80gb" else f"{chip}-{memory}"
        row["fabric"] = "infiniband-ndr" if chip == "h100" else ""
        found.append(_run({**row, **of, "dp": row["gpus"], "positions": row["sequence"]}))
    return tuple(found)


def _run(row: Mapping[str, str]) -> Run:
    given = {name: cell for name, cell in row.items() if cell}
    plan = Plan(**fields_of(Plan, given), grad_dtype=find_stack(given["stack"]).defaults["grad_dtype"])
    model = replace(Model.find(given["model"]), **fields_of(Model, given))
    if "layers" in given:
        model = replace(model, name=f"{model.name}, {given['layers']} layers")
    batch, sequence = int(given["batch"]), int(given["sequence"])
    if "seconds" in given:
        seconds = float(given["seconds"])
    else:
        seconds = batch * sequence / (float(given["tokens_per_second_per_gpu"]) * plan.ranks)
    memory = float(given.get("memory_gib", 0)) * 2**30 / 1e9 or float(given.get("memory_gb", 0)) or None
    about = (model, plan, given["cluster"], batch, sequence, seconds, memory, given["fitted"] == "1")
    return Run(given["source"], given["stack"], *about, given.get("fabric", ""))


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
