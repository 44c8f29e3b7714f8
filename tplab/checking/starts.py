"""The initial weights of the ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from tplab.checking.facts import Facts, Found, same
from tplab.checking.gaps import farthest, gaps, largest, shown
from tplab.checking.observed import factor_between
from tplab.checking.places import Place
from tplab.checking.repairs import Hypothesis, Repair
from tplab.checking.same_model import named
from tplab.checking.samples import seeds_by_rank
from tplab.units import plain, ranks_text


class NeedsWeights(Exception):
    """The ranks begin with other weights than the reference, but agree among themselves. `weights` are the ranks',
    whole, by name: the reference can be given them."""

    def __init__(self, weights: dict[str, np.ndarray]):
        super().__init__("the reference begins with other weights")
        self.weights = weights


_Held = tuple[int, np.ndarray, Place]
"""What a rank holds of a parameter: the rank, the values, and their place."""


def weights(facts: Facts, may_ask: bool) -> Found:
    """Check that ranks that hold copies begin with the same values. Raises NeedsWeights if `may_ask`."""
    wrong, apart = dict[str, set[int]](), dict[str, tuple[_Held, _Held]]()
    whole: dict[str, np.ndarray] = {}
    late = {name for seen in facts.reference.seen for name in seen.late}
    for name, wanted in facts.reference.weights.items():
        groups: dict = {}
        if name in late:
            continue
        for rank, mine, place in facts.holders(name):
            groups.setdefault(place.index, []).append((rank, facts.ours[rank].weights[mine].values, place))
        for group in groups.values():
            first = next((one for one in group if one[2].fits), group[0])
            if unlike := [one for one in group if not same(one[1], first[1])]:
                wrong.setdefault(name, set()).update(rank for rank, *_ in unlike)
                apart.setdefault(name, (unlike[0], first))
        if any(not place.fits for group in groups.values() for _, _, place in group):
            whole[name] = _joined(wanted, [group[0][1:] for group in groups.values()])
    where, cause = _of_seeds(facts)
    forward = facts.line("forward")
    if wrong:
        name, ranks = next(iter(wrong.items()))
        (rank, bad, _), (other, good, place) = apart[name]
        got, want = shown(bad, good, rank)
        if not place.fits:
            want = f"the same on ranks that hold copies, and rank {other} has {want}"
        every = (tuple(range(facts.num_ranks)),)
        repairs = [*facts.of_one_seed, Repair("weights", "rank 0's weights on every rank", groups=every)]
        if not place.fits:
            cause = (
                f"ranks that hold copies begin with different values, and none with the reference's {name}: the values "
                "come from what a rank alone has, such as its samples, its part of a tensor or its own seed. Compute "
                "them from the whole, and send them from one rank"
            )
            repairs = [Repair("weights", "the reference's weights", values=facts.dealt(facts.reference.weights))]
        hypotheses = [Hypothesis(one, cause, where) for one in repairs]
        yield facts.fault(
            "weights", "not the same on ranks that hold copies", where, names=wrong, ranks=ranks, lines=[forward],
            values=(got, want), hypotheses=hypotheses,
        )  # fmt: skip
    elif equal := [name for name in facts.reference.weights if _are_equal_shards(facts, name)]:
        hypotheses = _of_equal_shards(facts, equal, where)
        yield facts.fault("weights", "every rank's shard is the same", where, names=equal, lines=[forward],
                          hypotheses=hypotheses)  # fmt: skip
    elif (lost := facts.on_no_rank) and not facts.unplaced:
        words = f"held by no rank; the reference's other {len(facts.reference.weights) - len(lost)} parameters are"
        yield facts.fault("weights", words, forward, names=lost)
    elif sizes := {name: ratio for name, x in whole.items() if (ratio := _ratio(x, facts.reference.weights[name]))}:
        name, factor = next(iter(sizes.items()))
        words = f"drawn {plain(factor)} times as large as the reference's"
        got, want = (f"{np.std(x):.4g} (the standard deviation)" for x in (whole[name], facts.reference.weights[name]))
        cause = (
            "the numbers that ranks begin with have another size: what scales them comes from what a rank has (the "
            "shape of its shard, the place of a layer in its stage), where that of the whole is meant"
        )
        repair = Repair("weights", "the reference's weights", values=facts.dealt(facts.reference.weights))
        yield facts.fault("weights", words, where, names=sizes, factor=factor, values=(got, want),
                          hypotheses=[Hypothesis(repair, cause, where)])  # fmt: skip
    elif few := [*_overwritten(facts)]:
        names, ranks, own, parts, wanted, counts = zip(*few)
        words = f"{counts[0]} of {parts[0].size} elements are not the reference's, and all others are"
        words += f" ({names[0]} on rank {ranks[0]})" * (len({*names}) > 1)
        cause = (
            "some elements begin otherwise, and all others as in the reference: what sets them depends on the rank or "
            "on the number of ranks, such as an index that counts from the beginning of a rank's part, or random "
            "numbers of each rank's own"
        )
        of = f"the reference's {named([*dict.fromkeys(names)])} on {ranks_text(sorted({*ranks}))}"
        repair = Repair("weights", of, values=dict(zip(zip(ranks, own), wanted)))
        yield facts.fault(
            "weights", words, where, names=dict.fromkeys(names), ranks={*ranks}, lines=[forward],
            values=shown(parts[0], wanted[0], ranks[0]), hypotheses=[Hypothesis(repair, cause, where)],
        )  # fmt: skip
    elif len(whole) == len(facts.reference.weights) and (loaded := facts.line_of_script("weights")):
        words = "not the reference's, although both load weights: the ranks load nothing, or something else"
        yield facts.fault("weights", words, loaded, names=whole)
    elif facts.goes_on and (names := [name for name, x in whole.items() if not same(x, facts.reference.weights[name])]):
        got, want = (f"{x:.6g}" for x in farthest(whole[names[0]], facts.reference.weights[names[0]]))
        cause = "these weights were not restored when the script was started again: save all of them, and load them"
        repair = Repair(
            "weights", "the weights with which the run goes on", values=facts.dealt(facts.reference.weights)
        )
        yield facts.fault("weights", "not those with which the run goes on", where, names=names, values=(got, want),
                          lines=[forward], hypotheses=[Hypothesis(repair, cause, where)])  # fmt: skip
    elif whole and may_ask:
        raise NeedsWeights(facts.reference.weights | whole)
    else:
        count = len(facts.reference.weights) - len(lost)
        unknown = f"; not compared, as they were found on no rank: {named(lost)}" if lost else ""
        words = f"{count} of {len(facts.reference.weights)} parameters begin as the reference's{unknown}"
        yield facts.row("weights", True, words, count=count)


def _overwritten(facts: Facts) -> Iterator[tuple[str, int, str, np.ndarray, np.ndarray, int]]:
    """Yield the parts of parameters that begin as the reference's but for a few elements: the reference's name, the
    rank, its own name, the part, the expected one, and how many elements differ."""
    for name, rank, mine, want, place in facts.cut(facts.reference.weights):
        got = facts.ours[rank].weights[mine].values
        if not place.fits and got.shape == want.shape:
            count = int((gaps(got, want) > 1e-5 * largest(want)).sum())
            if 0 < 2 * count < got.size:
                yield name, rank, mine, got, want, count


def _ratio(has: np.ndarray, want: np.ndarray) -> float | None:
    """Return how many times larger the numbers are, if this is no chance: they are a multiple of the others; or the
    standard deviation of N random numbers is off by more than its relative error of 1 / sqrt(2 N) allows."""
    if has.size > 2 and (factor := factor_between([(has, want)], 1e-5 * largest(want))) and abs(factor - 1) > 1e-3:
        return factor
    a, b = float(np.std(has)), float(np.std(want))
    if not a or not b or abs(np.log(a / b)) < max(0.03, 6 / np.sqrt(2 * want.size)):
        return None
    return a / b


def _are_equal_shards(facts: Facts, name: str) -> bool:
    holders = list(facts.holders(name))
    values = [facts.ours[rank].weights[mine].values for rank, mine, _ in holders]
    if len(values) < 2 or values[0].size == facts.reference.weights[name].size:
        return False
    return np.ptp(values[0]) > 0 and all(same(x, values[0]) for x in values)


def _of_equal_shards(facts: Facts, names: list[str], where: str) -> Iterator[Hypothesis]:
    """Yield a broadcast that makes them equal; or that they are drawn alike, with the reference's weights as the
    repair."""
    own = tuple(mine for name in names for _, mine, _ in facts.holders(name))
    sent = {one.where: one for one in facts.sent("between") if one.op == "broadcast" and {*one.names} & {*own}}
    for line in sent:
        cause = (
            f"this broadcast overwrites {named(names)}, of which each rank has a part of its own, with the part of one "
            "rank: leave such parameters out"
        )
        words = f"no broadcast of {named(names)} at {line}"
        yield Hypothesis(Repair("last", words, line, own, times=sys.maxsize), cause, line)
    cause = (
        "each rank begins with the same numbers where it should have a part of its own: draw the whole tensor and cut "
        "it, or draw the parts from different seeds"
    )
    theirs = facts.dealt(facts.reference.weights)
    for mine, (alike, *_) in facts.deals(names):
        words = f"the reference's weights, with a part of {named(names)} for each rank"
        words += f" ({ranks_text(alike)} have the same one)" * (len(alike) > 1)
        yield Hypothesis(Repair("weights", words, values=theirs | mine), cause, where)


def _of_seeds(facts: Facts) -> tuple[str, str]:
    """Return the line and the cause of weights that differ, or are equal by mistake."""
    if facts.goes_on:
        cause = (
            "ranks that hold copies go on with different weights, as where only some of them have loaded the "
            "checkpoint: load it on every rank, or before DistributedDataParallel sends rank 0's weights to the others"
        )
        return next(
            (seen.lines["weights"] for seen in facts.ours if "weights" in seen.lines), facts.line("forward")
        ), cause
    if seeds := seeds_by_rank(facts.ours):
        values, line = seeds
        cause = (
            f"ranks set the seeds {', '.join(map(str, values))} at this line, and nothing copies rank 0's weights "
            "to the others: set one seed before the model is made, or broadcast its weights"
        )
        return line, cause
    cause = "copies must be drawn from one seed, or sent by one rank; shards must be drawn from different seeds"
    return next((line for _, line in facts.ours[0].seeds), facts.line("forward")), cause


def _joined(like: np.ndarray, pieces: list[tuple[np.ndarray, Place]]) -> np.ndarray:
    """Return a whole tensor made of one piece for each place."""
    whole = np.array(like)
    numbers = np.arange(whole.size).reshape(whole.shape)
    for values, place in pieces:
        at = place.take(numbers + 1).reshape(-1)  # 0 for the padding of a last part
        whole.flat[at[at > 0] - 1] = values.reshape(-1)[at > 0]
    return whole
