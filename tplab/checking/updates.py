"""The optimizer, the parameters after its step, and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from tplab.checking.facts import Facts, Found, same
from tplab.checking.forward import of_reads, of_value
from tplab.checking.gaps import farthest, gap, gaps, largest, shown
from tplab.checking.recording import settings_that_differ
from tplab.checking.reference import TIMES
from tplab.checking.repairs import Hypothesis, Repair
from tplab.checking.same_model import named
from tplab.units import ranks_text

_SETTINGS = {"lr": "the learning rate (lr)", "weight_decay": "the weight decay", "momentum": "the momentum"}


def skipped(facts: Facts) -> Found:
    """Compare the updates that were skipped because gradients were not finite."""
    should = facts.theirs[0].skipped
    wrong = {rank: step.skipped for rank, step in enumerate(facts.mine) if step.skipped != should}
    if wrong:
        rank, got = next(iter(wrong.items()))
        words = f"before this step, rank {rank} has skipped {got} updates and the reference {should}"
        line = facts.line_of_script("skipped") or facts.reference.seen[0].lines["skipped"]
        yield facts.fault("optimizer", words, line, names=["skipped updates"], ranks=wrong)
    elif should:
        yield facts.row("optimizer", None, f"both sides skipped {should} before this step, and these are not compared")


def settings(facts: Facts) -> Found:
    """Compare the optimizer's settings in the step."""
    wrong: dict[str, tuple[float, float, set[int]]] = {}
    for name in facts.reference.weights:
        want = next((step.settings[name] for step in facts.theirs if name in step.settings), {})
        for rank, mine, _ in facts.holders(name):
            for key, a, b in settings_that_differ(facts.mine[rank].settings.get(mine, {}), want):
                wrong.setdefault(key, (a, b, set()))[2].add(rank)
    for key, (got, want, ranks) in wrong.items():
        factor = got / want if want else None
        words = facts.sizes.words(factor)
        if factor and facts.goes_on:  # a schedule's value at another step, not a number of ranks
            words = f"{factor:.4g} times the reference's"
        cause = f"{_SETTINGS.get(key, key)} is not what it is on one rank"
        if facts.goes_on:
            cause = (
                f"{_SETTINGS.get(key, key)} is not that of the run that goes on, as it was not restored: load the "
                "optimizer's state, and that of its schedule, which otherwise begins anew"
            )
        elif len(ranks) < facts.num_ranks:
            cause = f"{_SETTINGS.get(key, key)} is not the same on all ranks"
        elif factor and facts.sizes.named(factor):
            cause = (
                f"{_SETTINGS.get(key, key)} depends on the number of ranks, although the whole batch does not: scale "
                "it once, and let a schedule count steps of the optimizer, or samples of all ranks"
            )
        values, step = (f"{got:.6g}", f"{want:.6g}"), facts.line("step")
        line = facts.line(f"set {key}")
        line = facts.source.repetition(line) or line or step
        wanted = {
            (mine, key, number): theirs.settings[name][key]
            for number in range(min(len(one.steps) for one in facts.reference.seen))
            for theirs in facts.reference.steps(number)[:1]
            for name in theirs.settings
            for _, mine, _ in facts.holders(name)
            if key in theirs.settings[name]
        }
        stepped = {(rank, mine) for rank, step in enumerate(facts.mine) for mine in step.settings}
        is_partial = not stepped <= facts.places.keys() | facts.idle.keys()
        of = " of the parameters whose place in the reference is known" if is_partial else ""
        repair = Repair("settings", f"the reference's {key}{of} in each step", values=wanted)
        tried = [Hypothesis(repair, cause, line, is_partial=is_partial)]
        if facts.goes_on and not facts.number:
            also = _restored(facts)
            both = replace(repair, words=f"{repair.words}, and {also.words}")
            tried.append(Hypothesis(both, f"{cause}. Its states were not restored either", line, also=(also,)))
        yield facts.fault("optimizer", words, line, names=[key], factor=factor, values=values, ranks=ranks,
                          lines=[step], hypotheses=tried)  # fmt: skip
    if not wrong:
        yield facts.row("optimizer", True, "its settings are the reference's")


def states(facts: Facts) -> Found:
    """Compare the states that the optimizer keeps from step to step."""
    wrong: dict[tuple[str, str], dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    for (name, key), rank, _, got, want, _ in facts.pieces("states", facts.reference.states(facts.number)):
        gradient = facts.reference.gradients(facts.number).get(name)
        size = 0.0 if gradient is None else largest(gradient)
        share = 4 * facts.reference.slack_of_gradient(name, facts.number) / size if size else 1.0
        slack = 8 * max(share, facts.reference.floor) * largest(want)
        if gap(got, want) > max(slack, TIMES * facts.reference.moved("states", (name, key), facts.number)):
            wrong.setdefault((name, key), {})[rank] = got, want
    for at, held in [*wrong.items()]:  # ranks that do not own the parameter may keep zeros
        if len(held) < len([*facts.holders(at[0])]) and not any(got.any() for got, _ in held.values()):
            del wrong[at]
    if not wrong:
        return
    (name, key), held = next(iter(wrong.items()))
    rank, (got, want) = next(iter(held.items()))
    (got, want), step, loaded = farthest(got, want), facts.line("step"), facts.line("loaded")
    if not all("loaded" in one.lines for one in facts.mine):  # only some ranks load them
        loaded = facts.source.condition(loaded) or loaded
    factor = got / want if want and facts.sizes.named(got / want) else None
    cause = (
        "settings and gradients are the reference's, but the optimizer's state is not: it was created anew, as when "
        "training is resumed on only one rank, or it was updated more than once in a step"
    )
    ranks = set().union(*wrong.values())
    right = [other for other in range(facts.num_ranks) if other not in ranks]
    tried = [
        Repair("states", f"the optimizer's states of rank {other} on all ranks before the step",
               values={"from": other, "step": facts.number}) for other in right[:1]
    ]  # fmt: skip
    if facts.goes_on and not facts.number:
        cause = "the optimizer's state was not restored when the script was started again: "
        if all("loaded" in step.lines for step in facts.mine):
            cause += f"what is loaded here is not that of {ranks_text(sorted(ranks))}. Save all of it, on each rank "
            cause += "that has a state of its own, and let each load its own"
        else:
            cause += "save its state_dict() with the weights, and load it before training goes on"
        tried = [_restored(facts)]
    whole = () if facts.goes_on else _of_whole_tensors(facts, [name for name, _ in wrong])
    yield facts.fault(
        "optimizer", facts.sizes.words(factor), loaded or step, names=[key if key == "step" else f"{key} of {name}"],
        factor=factor, values=(f"{got:.6g} on rank {rank}", f"{want:.6g}"), ranks=ranks, lines=[step],
        hypotheses=[*(Hypothesis(one, cause, loaded or step) for one in tried), *whole],
        seen="settings and gradients are the reference's, but the optimizer's state is not",
    )  # fmt: skip


def _restored(facts: Facts) -> Repair:
    """Return the repair that gives restarted ranks the optimizer's states of the run that goes on."""
    values = {"step": 0, "whole": facts.dealt(facts.reference.start)}
    return Repair("states", "the optimizer's states of the run that goes on", values=values)


def parameters(facts: Facts) -> Found:
    """Compare the parameters after the step."""
    reference, number = facts.reference, facts.number
    whole, before = reference.parameters(number), {**reference.weights, **reference.parameters(number - 1)}
    wrong: dict[str, set[int]] = {}
    shares: list[float] = []
    first, values = 0, ("", "")
    for name, rank, mine, got, want, place in facts.pieces("parameters", whole):
        far = gaps(got, want) > place.take(reference.slack_of_parameter(name, number))
        if far.any() and not _is_kept_elsewhere(facts, name, rank, mine):
            if not wrong:
                first, values = rank, shown(got[far], want[far], rank)
            wrong.setdefault(name, set()).add(rank)
            start = place.take(before[name])
            moved, should = got.astype(np.float64) - start, want - start
            shares.append(float((moved * should).sum() / max(float((should * should).sum()), 1e-300)))
    if not wrong:
        where = ", on ranks that use them" * bool(facts.idle)
        words = f"{len(whole)} parameters are the reference's after the step{where}"
        yield facts.row("parameters", True, words, count=len(whole))
        return
    ranks, names, line = set().union(*wrong.values()), list(wrong), facts.line("step")
    after = [sent.where for sent in facts.sent("after", "step") if sent.on == "parameter" or sent.size > 1]
    factor = shares[0] if np.ptp(shares) < 1e-2 * max(1, abs(shares[0])) else None
    seen = "gradients, settings and states are the reference's, but the update is not"
    words, cause = "not the reference's", seen
    if factor is not None and abs(factor) < 1e-3:
        words = "not updated"
        cause = (
            "each rank updates only the parameters that it owns, and its update does not reach these ranks: let the "
            "rank that owns a parameter broadcast it after the step"
        )
    elif factor is not None and abs(factor - 1) > 1e-2:
        words = f"the update is {facts.sizes.words(factor)}"
    elif len(ranks) < facts.num_ranks:
        cause = "ranks that hold copies have updated them differently"
    if not any(name in step.settings for step in facts.theirs for name in names):  # no optimizer has them
        factor, words = None, "not the reference's, and no optimizer updates it"
        seen = "no optimizer has it: the script itself writes it"
        cause = (
            "the script itself writes it, as with a moving average or a copy in another precision, and ranks write "
            "different values: write it once every rank has the new parameters, from the same ones on all ranks"
        )
        mine = next(mine for at, mine, _ in facts.holders(names[0]) if at == first)
        after = [facts.mine[first].lines.get(f"parameter {mine}", line)]
    owners = {mine: min({at for at, _, _ in facts.holders(name)} - wrong[name], default=-1)
              for name in names for _, mine, _ in facts.holders(name)}  # fmt: skip
    hypotheses = []
    if all(owner >= 0 for owner in owners.values()):
        spoken = f"the parameters of the ranks that have updated {named(names)} correctly, sent to the others"
        repair = Repair("parameters", spoken, names=tuple(owners), values=owners)
        hypotheses.append(Hypothesis(repair, cause, after[0] if after else line))
    elif after and factor is not None and abs(factor) < 1e-3:
        spoken = f"each parameter sent by the rank that has updated it, in place of the collective at {after[0]}"
        repair = Repair("parameters", spoken, after[0])
        hypotheses.append(Hypothesis(repair, cause, after[0]))
    begun_at, found = _begun(facts, "parameters", next(mine for _, mine, _ in facts.holders(names[0])))
    found += of_reads(facts, facts.trails) if facts.trails else ()
    casts = [one for one in found if one.repair.kind == "cast"]
    whole_first = [*_of_whole_tensors(facts, names), *casts]
    hypotheses = [*whole_first, *hypotheses, *(one for one in found if one not in casts)]
    yield facts.fault(
        "parameters", words, after[0] if after else begun_at or line, names=names, factor=factor, values=values,
        ranks=ranks, lines=[line], hypotheses=hypotheses, seen=seen,
    )  # fmt: skip


def _begun(facts: Facts, what: Literal["parameters", "buffers"], name: str) -> tuple[str, list[Hypothesis]]:
    """Return the line where a value that ranks end the step with goes wrong, "" if not known, and hypotheses."""
    held = getattr(facts.mine[0], what).get(name)
    return of_value(facts, held and held.values)


def _of_whole_tensors(facts: Facts, names: Sequence[str]) -> Iterator[Hypothesis]:
    """Yield the case that the update of a shard is not the shard of the whole tensor's update."""
    whole = facts.reference.weights
    padded = {place.name for place in facts.places.values() if place.shape and place.elements is None}
    cut = [name for name in whole if len(facts.groups(name)) > 1 and name not in padded]
    if not set(names) & set(cut):
        return
    numbers = facts.dealt({name: np.arange(whole[name].size).reshape(whole[name].shape) for name in cut})
    of = {(rank, mine): name for name in cut for rank, mine, _ in facts.holders(name)}
    values = {at: (of[at], some, whole[of[at]].shape) for at, some in numbers.items()}
    cause = (
        f"the optimizer computes the update of {named(names)} from each rank's part alone, and it depends on the whole "
        "tensor, as a norm, a mean or a factor of it does: combine over ranks what is computed of several elements"
    )
    words = "optimizers that update whole tensors, of which each rank keeps its part"
    yield Hypothesis(Repair("whole", words, values=values), cause, facts.line("combined") or facts.line("step"))


def _is_kept_elsewhere(facts: Facts, name: str, rank: int, mine: str) -> bool:
    """Return whether no optimizer has a parameter, and this rank left it unchanged: another keeps the average."""
    number = facts.number
    seen = facts.ours[rank]
    if any(name in step.settings for step in facts.theirs) or f"parameter {mine}" in seen.steps[number].lines:
        return False
    before = (seen.steps[number - 1].parameters if number else seen.weights).get(mine)
    return before is not None and same(seen.steps[number].parameters[mine].values, before.values)


def buffers(facts: Facts) -> Found:
    """Compare the buffers that the reference changed in the step."""
    whole, seen = facts.theirs[0].buffers, facts.reference.seen[0]
    start = seen.buffers if not facts.number else seen.steps[facts.number - 1].buffers
    moving = [
        name
        for name, piece in whole.items()
        if name in start and piece.values.dtype.kind == "f" and not same(piece.values, start[name].values)
    ]
    wrong: dict[str, tuple[tuple[str, str], list[int]]] = {}
    for name in moving:
        want = whole[name].values
        slack = 16 * facts.reference.floor * largest(want)
        slack = max(slack, TIMES * facts.reference.moved("buffers", name, facts.number))
        held = {rank: step.buffers[name].values for rank, step in enumerate(facts.mine) if name in step.buffers}
        if ranks := [rank for rank, x in held.items() if x.shape == want.shape and gap(x, want) > slack]:
            wrong[name] = shown(held[ranks[0]], want, ranks[0]), ranks
    if wrong:
        cause = (
            "the buffer is computed from each rank's own samples: combine over ranks what it is computed from, a sum "
            "as a sum and a mean as a mean, or average the buffer itself. DistributedDataParallel only broadcasts "
            "rank 0's, and only if broadcast_buffers is True"
        )
        changed = {line: place for place, line in enumerate(facts.mine[0].lines)}
        names = sorted(wrong, key=lambda name: changed.get(f"buffer {name}", len(changed)))
        first, (values, ranks) = names[0], wrong[names[0]]
        flag = facts.line_of_script("no broadcast") or facts.line_of_script("wrapped")
        lines = [flag, facts.line("forward"), facts.line("step")]
        where = facts.line(f"buffer {first}") or flag or lines[1]
        every = tuple(range(facts.num_ranks))
        repair = Repair("buffers", f"the mean over all ranks of {named(list(wrong))} after each forward pass",
                        names=tuple(wrong), groups=(every,), combine="mean")  # fmt: skip
        yield facts.fault(
            "buffers", "not the reference's", where, names=names, values=values, ranks=ranks, lines=lines,
            hypotheses=[Hypothesis(repair, cause, where), *_begun(facts, "buffers", first)[1]],
        )  # fmt: skip
        return
    if moving:
        yield facts.row("buffers", True, f"{named(moving)} as in the reference", count=len(moving))
