"""The exercises of lab 14: cut a model so that its largest stage is minimal, and so that every stage fits in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from tplab.errors import ShapeError
from tplab.exercises.drawn import Drawn
from tplab.exercises.pipeline_memory import cross_entropy
from tplab.exercises.verdict import Refused, Verdict, check, on, refuse, right, run_on
from tplab.mesh import Mesh
from tplab.pipeline.partition import Partition, partition
from tplab.schedules import Costs, interleaved_1f1b, measured_costs, one_f_one_b, simulate
from tplab.units import bytes_text
from tplab.widgets.matrices import Panel

BYTES_PER_PARAMETER = 16
"""The parameter, its gradient and Adam's two averages, all in float32."""

Cut = Callable[[Sequence[float], Sequence[int], Sequence[int], int, float], Any]


@dataclass(frozen=True)
class Trial:
    """A model to cut for ranks of `limit` bytes: each layer's cost, bytes of weights and kept bytes [layers].

    Rank r of 1F1B needs the sum of its layers' weights, plus ranks - r times the sum of their kept bytes.
    """

    name: str
    costs: Sequence[float]
    weights: Sequence[int]
    kept: Sequence[int]
    ranks: int
    limit: float

    def memory(self) -> list[list[int]]:
        """The bytes that each layer would need on each rank [ranks, layers]."""
        held = range(self.ranks, 0, -1)
        return [[w + microbatches * k for w, k in zip(self.weights, self.kept)] for microbatches in held]

    def takes(self, bounds: Sequence[int]) -> list[int]:
        """The bytes that each rank needs."""
        return [sum(row[a:b]) for row, (a, b) in zip(self.memory(), pairwise(bounds))]

    def parts(self, bounds: Sequence[int]) -> list[dict[str, int]]:
        """The same by kind, for a picture."""
        alone = replace(self, kept=[0] * len(self.kept)).takes(bounds)
        rest = [total - own for total, own in zip(self.takes(bounds), alone)]
        return [{"parameters and Adam": own, "activations": more} for own, more in zip(alone, rest)]

    def within(self, limit: float) -> Partition:
        """The best cut for ranks with this limit."""
        return replace(self, limit=limit).best()

    def has(self, bounds: Sequence[int]) -> list[float]:
        """The cost of one microbatch on each rank."""
        return [sum(self.costs[a:b]) for a, b in pairwise(bounds)]

    def makespan(self, bounds: Sequence[int], microbatches: int = 8) -> float:
        forward = np.array(self.has(bounds), float)
        return simulate(one_f_one_b(self.ranks, microbatches), Costs(forward, forward, forward)).makespan

    def best(self) -> Partition:
        """The cut within the limit whose busiest rank has the least work."""
        return partition(self.weights, self.ranks, self.costs, memory=self.memory(), memory_limit=self.limit)


def measured_layers(layers: Sequence[Any], ids: Any) -> tuple[list[int], list[int], list[int]]:
    """(FLOPs of a forward pass, bytes of parameters, gradients and Adam's averages, bytes kept for the backward pass)
    of each layer, found by running it on a microbatch `ids` [B, T]; the loss counts towards the last layer."""
    from tplab.torch import num_parameters, run, stages_of, train_batch

    schedule = interleaved_1f1b(1, 1, virtual_stages=len(layers))  # every layer is a stage, and all are on one rank

    def program() -> None:
        train_batch(schedule, stages_of(layers, schedule, "uniform"), [(ids, ids)], cross_entropy)

    trace = run(program, Mesh(pp=1), cluster="h100").trace  # FLOPs are only counted if there is a cluster to time them
    flops = dict.fromkeys([f"stage {place}" for place in range(len(layers))], 0)
    for event in trace.select(kind="compute").events:
        if event.op == "F0":
            flops[event.where] += event.flops
    kept = np.asarray(measured_costs(schedule, trace).activation, int).tolist()
    return list(flops.values()), [BYTES_PER_PARAMETER * size for size in num_parameters(layers)], kept


FILLED = ([1, 4, 2, 2, 2], [2, 3, 1, 3, 2], [5, 1, 1, 1], [1, 1, 1, 1, 9], [1, 2, 3, 4, 5, 6, 7, 8], [2] * 9) + (
    [1, 9, 8, 1, 2, 7],
    [8, 2, 6, 4, 7],
)
"""Costs of layers, to be cut for 4, 3 and 2 ranks. For the last two, the stages with the least sum of squares, or the
least difference between largest and smallest, do not have the least maximum."""


@check("fill", not_with=("partition", "Trial"), libraries=("tplab",))
def check_fill(fill: Callable[[list[int], int], Any]) -> Verdict:
    """Check that `fill(costs, ranks)` returns bounds of stages, each with at least one layer, of which the largest is
    as small as possible. The learner's cut is drawn under 1F1B."""
    shown: Verdict | None = None
    for costs, ranks in product(FILLED, (4, 3, 2)):
        none = [0] * len(costs)
        trial = Trial(f"layers of {costs} steps on {ranks} ranks", costs, none, none, ranks, 1)
        given = list(costs)
        with on(f"with {trial.name}"):
            found = _listed(fill(given, ranks))
            if wrong_form := _form(trial, found):
                refuse(f", {trial.name}: {wrong_form}. Every stage needs a layer.")
        if given != costs:
            refuse(f", {trial.name}: it changes the list that it is given.")
        has = trial.has([int(bound) for bound in found])
        best, forward = partition(costs, ranks).largest, np.array(has, float)
        drawn = one_f_one_b(ranks, 8), Costs(forward, forward, forward)
        if max(has) > best:
            text = f", {trial.name}: the stages have {has} steps.\nThe largest could have {best:g}.\n"
            if has[-1] == max(has):
                text += "The last stage takes whatever is left, however much that is."
            else:
                text += "The largest stage sets the pace. How full may a stage be, and how full must it be?"
            raise Refused(Drawn(False, text, *drawn))
        text = f" is right: no cut of {len(FILLED)} models for 2, 3 and 4 ranks has a smaller largest stage.\n"
        shown = shown or Drawn(True, f"{text}Here are {trial.name}:", *drawn)
    assert shown is not None
    return shown


@check("my_cut", not_with=("partition", "Trial"), libraries=("tplab",))
def check_cut(cut: Cut, layers: Sequence[Any], ids: Any) -> Verdict:
    """Check that `cut(costs, weights, kept, ranks, limit)` returns bounds of the stages, [0, ..., layers], such that no
    rank of 1F1B needs more than `limit` bytes and the busiest rank has as little to do as possible.

    It is tried on small models given as numbers, then on `layers`, measured with a microbatch `ids`; that cut is run.
    """
    known = getattr(cut, "__globals__", {})
    if any(isinstance(known.get(one), Trial) for one in cut.__code__.co_names):
        refuse(": `Trial` does the work. Here you write it yourself.")
    trial, bounds = SMALL[0], []
    for trial in (*SMALL, *map(_random, range(20)), *_real(layers, ids)):
        lists = list(trial.costs), list(trial.weights), list(trial.kept)
        with on(f"with {trial.name}"):
            try:
                given = _listed(cut(*lists, trial.ranks, trial.limit))
            except Exception as error:
                if trial.limit < math.inf:
                    error.args = (f"{error}\n{NONE_FITS}",)
                raise
            if given is None and trial.limit < math.inf:
                refuse(f", {trial.name}: it returned None.\n{NONE_FITS}")
            if wrong := _form(trial, given):
                refuse(f", {trial.name}: {wrong}.")
        if lists != (list(trial.costs), list(trial.weights), list(trial.kept)):
            refuse(f", {trial.name}: it changes the lists that it is given.")
        bounds = [int(bound) for bound in given]  # pyright: ignore[reportOptionalIterable]
        _refuse_unless_best(trial, bounds)
    text = " is right: no cut within the limit has a smaller largest stage."
    return right(f"{text}\n{_run_it(trial, bounds, layers, ids)}", _panels(trial, bounds)[:2])


NONE_FITS = (
    "There are cuts that fit, and a rank may take exactly the limit. If yours finds none, does it count more bytes "
    "than a rank takes? How many microbatches does each rank hold?"
)


SMALL = (
    Trial("four layers on 3 ranks", [1, 6, 3, 3], [0] * 4, [0] * 4, 3, math.inf),
    Trial("one large layer and three small ones on 3 ranks", [9, 1, 1, 1], [0] * 4, [0] * 4, 3, math.inf),
    Trial("five layers on 4 ranks", [1, 4, 2, 2, 2], [0] * 5, [0] * 5, 4, math.inf),
    Trial("seven layers on 2 ranks, 21 bytes each", [6, 1, 1, 1, 1, 1, 1], [3] * 7, [1] * 7, 2, 21),
    Trial("six equal layers on 3 ranks, 9 bytes each", [1] * 6, [2] * 6, [1] * 6, 3, 9),
)


def _random(seed: int) -> Trial:
    """A small model on three ranks, each with 85% of the bytes of the cut without a limit, or more if nothing fits."""
    random = np.random.default_rng(seed)
    costs, weights, kept = random.integers(1, 7, (3, random.integers(5, 9))).tolist()
    name = f"layers that cost {costs}, with {weights} bytes of weights, and that keep {kept} bytes"
    trial = Trial(name, costs, weights, kept, 3, math.inf)
    for percent in range(85, 101, 5):
        limit = max(trial.takes(trial.best().bounds)) * percent // 100
        fitting = replace(trial, name=f"{name}, on 3 ranks of {limit} bytes each", limit=limit)
        try:
            fitting.best()
            return fitting
        except ShapeError:
            continue
    return trial


def _real(layers: Sequence[Any], ids: Any) -> list[Trial]:
    """The learner's own model on four ranks: once with plenty of memory, and once with the least that allows a cut."""
    measured = measured_layers(layers, ids)
    trials = [Trial("your model on 4 ranks", *measured, 4, math.inf)]
    most = max(trials[0].takes(trials[0].best().bounds))
    for percent in range(95, 0, -5):
        limit = most * percent // 100
        trial = Trial(f"your model on 4 ranks, {bytes_text(limit)} each", *measured, 4, limit)
        try:
            trial.best()
        except ShapeError:
            break
        trials[1:] = [trial]
    return trials


def _listed(given: Any) -> Any:
    """The bounds; as a list if they are an iterator, which can be read only once."""
    return list(given) if isinstance(given, Iterator) else given


def _form(trial: Trial, given: Any) -> str:
    """The fault in the form of the bounds, in words; "" if there is none."""
    wanted = f"[0, ..., {len(trial.costs)}], {trial.ranks + 1} rising numbers"
    try:
        bounds = [int(bound) for bound in given]
    except TypeError:
        return f"it must return the bounds {wanted}, and it returned {given!r}"
    rises = all(a < b for a, b in pairwise(bounds))
    if len(bounds) != trial.ranks + 1 or bounds[0] != 0 or bounds[-1] != len(trial.costs) or not rises:
        return f"it returned {bounds}; the bounds of {trial.ranks} stages are {wanted}"
    return ""


def _refuse_unless_best(trial: Trial, bounds: list[int]) -> None:
    takes, has, best = trial.takes(bounds), trial.has(bounds), trial.best()
    panels = _panels(trial, bounds)
    for rank, num_bytes in enumerate(takes):
        if num_bytes > trial.limit:
            held = trial.ranks - rank
            weights, activations = map(bytes_text, trial.parts(bounds)[rank].values())
            refuse(
                f", {trial.name}: {bounds} gives rank {rank} {bytes_text(num_bytes)}.\nIts layers' weights take "
                f"{weights}, with their gradients and Adam's averages. Under 1F1B, rank {rank} of {trial.ranks} keeps "
                f"{held} microbatch{'es' if held > 1 else ''}, {activations}.",
                panels,
            )
    if max(has) > best.largest * (1 + 1e-9):
        most, least = (f"{largest / sum(has):.1%}" for largest in (max(has), best.largest))
        text = f", {trial.name}: {bounds} is within the limit.\nThe busiest rank does {most} of the work, where {least}"
        room = f" Under 1F1B, rank r of {trial.ranks} keeps {trial.ranks} - r microbatches: which ranks have room left?"
        refuse(f"{text} is possible.{room if trial.limit < math.inf else ''}", panels)


def _panels(trial: Trial, bounds: list[int]) -> list[Panel]:
    takes, has, best = trial.takes(bounds), trial.has(bounds), trial.best()
    return [
        Panel("yours: share of the limit", np.array(takes) / trial.limit, np.array(takes) > trial.limit),
        Panel("yours: share of the work", np.array(has) / sum(has), np.array(has) > best.largest),
        Panel("right: share of the work", np.array(best.stage_costs) / sum(has)),
    ]


def _run_it(trial: Trial, bounds: list[int], layers: Sequence[Any], ids: Any) -> str:
    """The memory that the cut needs when it runs on real tensors, for a batch and a step of Adam."""
    import torch

    from tplab.torch import stages_of, train_batch

    schedule = one_f_one_b(trial.ranks, 2 * trial.ranks)

    def program() -> int:
        stages = stages_of(layers, schedule, bounds=bounds)
        train_batch(schedule, stages, [(ids, ids)] * schedule.num_microbatches, cross_entropy)
        optimizer = torch.optim.Adam(stages.parameters(), foreach=False)
        optimizer.step()
        made = [[p, p.grad, *optimizer.state[p].values()] for p in stages.parameters()]
        return sum(x.nbytes for xs in made for x in xs if x.dim())

    out = run_on(Mesh(pp=trial.ranks), program)
    took = [held + int(most) for held, most in zip(out.per_rank, out.trace.peak_bytes)]
    free = replace(trial, limit=math.inf).best().bounds
    return (
        f"We ran your model with this cut on {trial.ranks} ranks. The fullest rank took {bytes_text(max(took))} of "
        f"{bytes_text(trial.limit)}. Without the limit, it would have taken {bytes_text(max(trial.takes(free)))}, and "
        f"your cut makes the batch {trial.makespan(bounds) / trial.makespan(free):.2f} times as long."
    )
