"""Lab 28: forecasts of the playbook's runs by class, like-for-like rows, and the best plans on two networks."""

from functools import cache

from tests.labs.entries import Claim, Given, Quote
from tests.labs.model import NDR, PLAYBOOK, tokens
from tplab.cost import Cluster
from tplab.exercises.which_layout import ENOUGH, JOBS, forecast_of, measured_runs
from tplab.forecast import Forecast, Model, plans
from tplab.forecast.classes import Measured
from tplab.forecast.measured import Run, playbook

GPUS = (32, 64, 128, 256, 512)


@cache
def forecasts() -> list[tuple[Run, Forecast]]:
    """All of the playbook's runs, with their forecasts."""
    return [(run, forecast_of(run)) for run in playbook()]


def classes() -> list[Measured]:
    """The classes of the playbook's runs, the best first."""
    return sorted({known for _, said in forecasts() if (known := said.measured)}, key=lambda known: known.median)


def off(run: Run) -> float:
    return forecast_of(run).seconds / run.seconds - 1


def large_errors_on_both_sides() -> tuple[int, int]:
    """(The number of runs that took much longer than forecast, of those that took much less)."""
    errors = [said.seconds / run.seconds - 1 for run, said in forecasts()]
    return sum(error < -0.3 for error in errors), sum(error > 0.3 for error in errors)


def alike(run: Run) -> tuple[str, int, int, int]:
    return run.model.name, run.plan.ranks, run.plan.microbatch, run.plan.zero


def over_nodes() -> list[float]:
    """How many times as long steps with tp 16 took as the same with tp 8, up to 32 nodes."""
    runs = [run for run in playbook() if run.plan.pp == 1 and run.plan.ranks <= 256]
    inside, across = ({alike(run): run.seconds for run in runs if run.plan.tp == tp} for tp in (8, 16))
    return sorted(across[key] / inside[key] for key in inside.keys() & across.keys())


def of_one_layout() -> list[float]:
    """Seconds of all runs of the 8B model with dp 2, tp 8 and ZeRO 1."""
    runs = [run for run in measured_runs("playbook-8b", 16) if (run.plan.tp, run.plan.microbatch) == (8, 1)]
    return sorted(run.seconds for run in runs if run.plan.zero)


@cache
def best(cluster: Cluster, gpus: int, batch: int) -> Forecast:
    return plans("llama3-8b", cluster, gpus=gpus, batch=batch, sequence=8192)[0]


def only_zero3(cluster: Cluster, batch: int) -> list[int]:
    """The numbers of GPUs on which data parallelism with ZeRO 3 alone is best."""
    found = [(gpus, best(cluster, gpus, batch).plan) for gpus in GPUS]
    return [gpus for gpus, plan in found if plan.dp == gpus and plan.zero == 3]


def _masked(sequence: int) -> float:
    """The share of scores above the diagonal in Llama 3 8B's usual count of FLOPs."""
    model = Model.find("llama3-8b")
    return (1 - 6 * model.parameters / model.flops_per_token(sequence)) / 2


CLAIMS = (
    Claim(
        "The slowest took 1.9 times as long as the fastest, and the forecast did not foresee it",
        lambda: (
            [measured_runs("playbook-8b", 128)[-1].seconds / measured_runs("playbook-8b", 128)[0].seconds]
            if off(measured_runs("playbook-8b", 128)[-1]) < -0.4
            else False
        ),
    ),
    Claim("Two numbers are fitted to 118 runs", lambda: [sum(run.is_fitted for run in playbook())]),
    Claim(
        "the host cannot start kernels as fast as the GPU finishes them, and host is most of the loss",
        lambda: all(
            2 * forecast_of(run).parts["host"] > run.seconds - forecast_of(run).parts["computing"]
            for run in measured_runs("playbook-3b", 16)
            if (run.plan.tp, run.plan.microbatch) == (8, 1)
        ),
    ),
    Claim("steps took more than three times as long", lambda: over_nodes()[len(over_nodes()) // 2] > 3),
    Claim(
        "nine of ten runs are within about 10%",
        lambda: [max(round(100 * known.most) for known in classes()[:3])],
    ),
    Claim(
        "the intervals reach 106 times the forecast",
        lambda: [max(known.high for known in classes() if ", pipeline, " in known.name)],
    ),
    Claim(
        "Almost all large errors are on one side: the run took longer",
        lambda: large_errors_on_both_sides()[0] > 50 * large_errors_on_both_sides()[1],
    ),
    Claim(
        "took 19 s in one run and 89 s in another",
        lambda: of_one_layout(),
    ),
    Claim(
        "has an MFU of about 70%, because kernels do not reach the peak",
        lambda: [100 * best(NDR, 32, 256).mfu],
    ),
    Claim("A tenth of it is attention that the mask spares", lambda: round(_masked(8192), 1) == 0.1),
    Claim(
        "So the best plan of 1F1B is shown too: it has no pipeline",
        lambda: plans("llama3-70b", NDR, gpus=256, batch=1024, sequence=8192, schedules=["1f1b"])[0].plan.pp == 1,
    ),
    Claim(
        "as long as there is a sequence for each GPU, data parallelism with ZeRO 3 is best",
        lambda: only_zero3(NDR, 64) == [32, 64] and only_zero3(NDR, 256) == [32, 64, 128, 256],
    ),
    Claim(
        "twice as many GPUs are almost twice as fast",
        lambda: all(best(NDR, gpus, 256).seconds / best(NDR, 2 * gpus, 256).seconds > 1.9 for gpus in (32, 64, 128)),
    ),
    Claim(
        "behind about 2,200 tokens per rank on 64 GPUs, and a sequence has 8,192",
        lambda: [*tokens("ZeRO 3", 64, NDR), 64, 8192],
    ),
    Claim(
        "lab 17's threshold is about 6,500 tokens per rank on 64 GPUs, and 13,200 on 256",
        lambda: [17, *tokens("ZeRO 3", 64, PLAYBOOK), 64, *tokens("ZeRO 3", 256, PLAYBOOK), 256],
    ),
    Given("turn the knob to a batch four times as large"),
    Claim(
        "with a batch four times as large, this begins at four times as many GPUs",
        lambda: only_zero3(NDR, 256)[-1] == 4 * only_zero3(NDR, 64)[-1],
    ),
    Claim("ZeRO 3 alone is best up to 64 GPUs only", lambda: only_zero3(PLAYBOOK, 256) == [32, 64]),
    Claim(
        "It must fit, and take at most a quarter longer than the best of all plans on InfiniBand NDR",
        lambda: ENOUGH == 1.25 and len(JOBS) == 5,
    ),
    Quote("half of those that fit take 2.1 times as long, or longer", ("take 2.1 times as long as the best",)),
)
