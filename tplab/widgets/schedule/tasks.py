"""The tasks of `pipeline_lab`. They are judged by the simulated schedule, however it was made."""

from __future__ import annotations

from collections.abc import Iterator

from tplab.schedules import RULES, Simulation, simulate
from tplab.widgets.paper.task import Claim, Task, Tasks, at_least, at_most, below

START = {
    "rule": "one_f_one_b", "compare": None, "ranks": 4, "microbatches": 8, "virtual_stages": 2, "forward": 1.0,
    "input_grad": 1.0, "weight_grad": 1.0, "transfer": 0.0, "stage_costs": "", "overlap": 0.0, "memory_limit": None,
}  # fmt: skip
"""The default settings at the start of a task."""

TIMES = {
    "forward": "F", "input_grad": "I", "weight_grad": "W", "transfer": "transfer", "overlap": "overlap of F & B"
}  # fmt: skip
SAME = {"ranks": "ranks", "microbatches": "microbatches", "stage_costs": "cost of each stage", **TIMES}
"""The settings that most tasks keep fixed: the same work on the same ranks."""

LAYER, HEAD, WHOLE = 0.25, 1.0, 5.0
"""Costs of the model of "cut": of a layer, of the head, and of 16 layers with it."""


def bubble(run: Simulation) -> tuple[str, float]:
    return "the bubble is {}% of the makespan", 100 * run.bubble_fraction


def held(run: Simulation, most: float) -> Claim:
    peak = float(run.peak_activations.max())
    return at_most("a rank holds {:microbatch} at once", peak, most, "it may hold {} at most")


def steps(run: Simulation, most: float, why: str = "it may take {} at most") -> Claim:
    return at_most("the makespan is {:step}", run.makespan, most, why)


def whole_backward(run: Simulation) -> Claim:
    split = run.schedule.splits_backward
    return Claim(not split, "some backward passes are split into I and W" if split else "no backward pass is split")


def beside(run: Simulation, rule: str) -> Simulation:
    """Another rule on the same ranks, with the same microbatches and costs."""
    made = RULES[rule](ranks=run.schedule.num_ranks, microbatches=run.schedule.num_microbatches)
    return simulate(made, run.costs)


def tenth(run: Simulation) -> Iterator[Claim]:
    yield below(*bubble(run), 10, "it must be below {}%")


def same_memory(run: Simulation) -> Iterator[Claim]:
    yield at_most(*bubble(run), 10, "it may be {}% at most")
    yield held(run, float(beside(run, "one_f_one_b").peak_activations.max()))


def smaller_stages(run: Simulation) -> Iterator[Claim]:
    yield at_most(*bubble(run), 10, "it may be {}% at most")
    yield whole_backward(run)
    yield held(run, 5)


def one_more_forward(run: Simulation) -> Iterator[Claim]:
    yield steps(run, beside(run, "gpipe").makespan, "GPipe takes {}")
    yield held(run, 3)
    yield whole_backward(run)
    most = max(map(len, run.schedule.placement))
    yield Claim(most == 1, "each rank has one stage" if most == 1 else f"a rank has {most} stages, and it may have one")


def exchange(run: Simulation) -> Iterator[Claim]:
    yield below("the makespan is {:step}", run.makespan, beside(run, "gpipe").makespan, "it must be below GPipe's {}")
    yield held(run, 5)


def half(run: Simulation) -> Iterator[Claim]:
    other = beside(run, "one_f_one_b")
    yield held(run, float(other.peak_activations.max()) / 2)
    yield steps(run, other.makespan, "1F1B takes {}")


def even(run: Simulation) -> Iterator[Claim]:
    apart = float(run.peak_activations.max() - run.peak_activations.min())
    says = "one rank holds {:microbatch} more than another" if apart else "all ranks hold equally many microbatches"
    yield at_most(says, apart, 0.5, "it may hold {} more at most")
    yield held(run, 3)
    yield steps(run, beside(run, "one_f_one_b").makespan, "1F1B takes {}")


def cut(run: Simulation) -> Iterator[Claim]:
    stages, ranks = [float(cost) for cost in run.costs.stage_costs or ()], run.schedule.num_ranks
    if len(stages) != ranks:
        given = f"{len(stages)} {'is' if len(stages) == 1 else 'are'} given"
        yield Claim(False, f"{ranks} stages need {ranks} costs, and {given}")
        return
    parts = sorted({cost for cost in stages if cost % LAYER})
    if parts:
        costs = " or ".join(f"{cost:g}" for cost in parts)
        yield Claim(False, f"a layer costs {LAYER:g}, so no stage of whole layers costs {costs}")
    if abs(sum(stages) - WHOLE) > 1e-9:
        yield Claim(False, f"the stages cost {sum(stages):g} together, and the model costs {WHOLE:g}")
    yield at_least("the last stage costs {}", stages[-1], HEAD, "it has the head, which costs {}")
    yield steps(run, 42)


TASKS = Tasks(
    Task(
        "tenth", 10, "A bubble of a tenth",
        "1F1B on four ranks. Make the bubble smaller than 10% of the makespan, and leave the schedule and the times as "
        "they are.",
        START, {name: words for name, words in {"rule": "schedule", **SAME}.items() if name != "microbatches"}, tenth,
        ("The idle time of each rank is the same for any number of microbatches. What is it a share of?",
         "The bubble is (p−1)/(m+p−1) of the makespan. Here p is 4.",
         "Find the m from which 3/(m+3) is below one tenth. At 27 it is exactly that."),
    ),
    Task(
        "same-memory", 10, "No more memory than 1F1B",
        "Four ranks, eight microbatches, F = I = W. Make the bubble 10% of the makespan or less, with no rank holding "
        "more microbatches than 1F1B needs.",
        START, SAME, same_memory,
        ("More microbatches are not allowed here. So something else has to fill the bubble.",
         "W is the one pass that no other rank waits for. Try the schedules that split the backward pass.",
         "ZB-H1 still has 11.1%. A rank that has an early stage and a late one waits for less."),
    ),
    Task(
        "smaller-stages", 10, "Without splitting the backward pass",
        "Some libraries have no separate I and W. Make the bubble 10% of the makespan or less with whole backward "
        "passes, eight microbatches, and no more than 5 of them held at once by a rank.",
        START, SAME, smaller_stages,
        ("The first microbatch should reach the last rank sooner.",
         "A rank can have several small stages instead of one. The slider is “stages per rank”.",
         "The looped schedule holds all eight microbatches. The interleaved one does not."),
    ),
    Task(
        "one-more-forward", 10, "One more forward, by hand",
        "Two ranks, four microbatches, and a message takes as long as a forward pass. Move actions of 1F1B by hand "
        "until it ends as soon as GPipe does, with no rank holding more than 3 microbatches. Each rank keeps its one "
        "stage and its whole backward passes.",
        {**START, "ranks": 2, "microbatches": 4, "transfer": 1.0}, SAME, one_more_forward,
        ("Press “edit”, choose an action, and move it with “earlier” or “later”. Where does rank 0 wait?",
         "Rank 0 waits for B0, which needs two messages. It could run another forward meanwhile.",
         "On rank 0, move F2 before B0, and then F3 before B1."),
    ),
    Task(
        "exchange", 12, "An exchange as long as a forward",
        "Four ranks, eight microbatches, and a message takes as long as a forward pass. GPipe hides messages well, "
        "because it has many microbatches under way. End sooner than GPipe, with no rank holding more than 5.",
        {**START, "rule": "gpipe", "transfer": 1.0}, SAME, exchange,
        ("1F1B alternates forwards and backwards, so it waits for a message in both directions.",
         "A rank that has work from both ends of the model can go on while a message travels.",
         "In DualPipe, microbatches enter at both ends of the pipeline."),
    ),
    Task(
        "half-of-1f1b", 13, "Half of the memory",
        "Eight ranks, sixteen microbatches. No rank may hold more than half of the microbatches that 1F1B needs, and "
        "the makespan may not be longer than that of 1F1B.",
        {**START, "ranks": 8, "microbatches": 16}, SAME, half,
        ("Under 1F1B the first rank holds p microbatches, because each waits until it comes back from the last rank.",
         "In a V, a rank has an early stage and a late one. One holds a microbatch long, the other only briefly.",
         "V-Half holds (p+2)//2 microbatches, which is one too many here."),
    ),
    Task(
        "even", 13, "No rank holds more than another",
        "Under 1F1B, rank 0 of four holds four microbatches, and rank 3 holds one. Make the ranks equal to within "
        "half a microbatch. No rank may hold more than three, and the makespan may not be longer than that of 1F1B.",
        START, SAME, even,
        ("A rank holds a microbatch of its stage until the backward pass returns there. Which stages wait longest?",
         "Give each rank one stage that waits long, and one that waits briefly.",
         "In a V, the stages go down the ranks and up again. ZB-V, V-Half and V-Min differ in what they hold."),
    ),
    Task(
        "cut", 14, "Cut a model with a large head",
        "A model has 16 layers, which cost 0.25 each, and a head after them, which costs 1. With four layers on each "
        "rank, the stages cost 1, 1, 1, 2. Write a better cut as the cost of each stage, so that 1F1B with eight "
        "microbatches takes 42 steps or fewer.",
        {**START, "stage_costs": "1, 1, 1, 2"},
        {"rule": "schedule", "ranks": "ranks", "microbatches": "microbatches", **TIMES}, cut,
        ("All ranks wait for the slowest stage. It has the head.",
         "The stages cost 5 together. How much would each cost if all were equal?",
         "Five layers cost 1.25. So does one layer with the head."),
    ),
)  # fmt: skip
