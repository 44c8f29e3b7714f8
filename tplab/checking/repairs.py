"""Changes of a run that may repair a fault, and their proof: a cause is stated if the run is right with its repair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from tplab.checking.same_model import Finding, SameModel, What

MOST_TRIED = 10
"""The most repairs that are tried for one fault."""

MOST_FAULTS = 3

Kind = Literal[
    "scale", "skip", "wait", "last", "order",  # of the collective at `line`
    "factor", "keep", "late", "sync", "dual", "through", "cast", "seed",  # of another operation at `line`
    "loss", "norm", "gradients", "samples", "targets",
    "weights", "settings", "states", "parameters", "buffers", "statistics", "put", "whole", "gather",
]  # fmt: skip

Groups = tuple[tuple[int, ...], ...]
"""Groups of ranks."""


@dataclass(frozen=True)
class Repair:
    """One change of every rank's run.

    kind      "scale": the result of the collective at `line` is multiplied by `by`. "skip": of `times` collectives in
              the backward pass there, number `was` is left out. "wait": it is waited for at once. "last": its first
              `times` calls in a step are left out. "order": it takes elements in the program's order, not in memory's
              "factor": `line` multiplies by `by` instead of `was`, or by `values[step]`. "keep": `line` does not clear
              gradients. "late": `line` changes gradients only after they are averaged. "sync": gradients are always
              synchronised, in spite of `line`. "dual": gradients that come back from `line` are added up over `groups`,
              times `by`; with `combine` "function", only from autograd
              functions of the script; with "copies", only where an operation turns equal inputs of the ranks into
              different results. "through": the collective at `line` passes gradients back. "cast": the results of the
              function in `names` at `line` are `combine`d over `groups`, and gradients of the result are added up over
              them, times `by`. "seed": `line` sets rank 0's
              "loss": of each microbatch, times `by`, or times `values[rank, step, microbatch]`
              "norm": gradients are clipped by `values[step, turn]`
              "gradients": those of `names`, after the last backward pass of a step, are `combine`d over `groups`, times
              `by`; with `line`, the collective there is left out
              "samples": those of the recordings `values["seen"]`, in as many parts as there are `groups`. "targets": of
              each step, cut along the sequence; with a factor `by` of the loss, if it is not a mean
              "weights", "parameters", "buffers": of `names`, are those of the first rank of each of `groups`, or with
              `combine` "mean" their mean; "weights" are `values` of ranks and names, if given
              "settings", "states": `values` of names and keys, in each step
              "statistics": batch norm's are of the samples of all ranks. "put": in the step `times`, results of
              operations are replaced by `values`, by key and rank; with a key and a place, the input there is replaced
              "whole": optimizers update whole tensors; `values` of ranks and names: the reference's name, the number of
              each element in it, and its shape. "gather": losses compare with the rank's part of
              `values[step][turn]`; the second operand of the matmul at `line` is that of all ranks, side by side
    words     the same for a reader: "the mean in place of the sum at train.py:31"
    of_reference   whether the reference's run is changed
    """

    kind: Kind
    words: str
    line: str = ""
    names: tuple[str, ...] = ()
    groups: Groups = ()
    combine: str = ""
    was: float = 1.0
    by: float = 1.0
    times: int = 1
    values: Mapping[Any, Any] = field(default_factory=dict)
    of_reference: bool = False

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the group that contains the rank; the rank alone if there is none."""
        return next((group for group in self.groups if rank in group), (rank,))


@dataclass(frozen=True)
class Hypothesis:
    """A possible cause of a fault: in words, with its line, and the repair that would prove it. also: further changes
    that the repair needs. is_partial: the repair does not reach everything that the fault affects, so what is wrong
    after it may follow from the fault. is_forward: nor do gradients, which still go back through what it replaces.
    last: the second of two that were put together."""

    repair: Repair
    cause: str
    where: str = ""
    thread: str = ""
    also: tuple[Repair, ...] = ()
    is_partial: bool = False
    is_forward: bool = False
    last: Hypothesis | None = None

    def and_then(self, other: Hypothesis) -> Hypothesis:
        """Return the hypothesis that both repairs are needed, as for a variance around a mean."""
        words = f"{self.repair.words}; and {other.repair.words}"
        cause = f"{self.cause}; and likewise at {other.where}" if other.where != self.where else self.cause
        also = (*self.also, other.repair, *other.also)
        return replace(self, repair=replace(self.repair, words=words), cause=cause, also=also, last=other)


def proven(
    report: SameModel, again: Callable[[Sequence[Repair]], SameModel | None],
    further: Callable[[Sequence[Repair], int], SameModel | None] | None = None,
) -> SameModel:  # fmt: skip
    """Return the report with the causes of its faults, each proven by a new run with its repair.

    again    the report of another run with all of these repairs; None if that run failed
    further  the same with every operation of a step recorded, which shows further missing reductions

    After a fault is repaired, the next one is looked for. A fault that no repair mends keeps no cause.
    """
    done: list[Finding] = []
    mended: list[Repair] = []
    findings = list(report.findings)
    while findings and len(done) < MOST_FAULTS:
        first, *rest = findings
        if first.proof:
            done.append(first)
            findings = rest
            continue
        tried: list[str] = []
        tries, only_forward = [*first.hypotheses[:MOST_TRIED]], list[Hypothesis]()
        for place, one in enumerate(tries):
            found = again([*mended, one.repair, *one.also])
            if found is not None and is_mended(first, found, report):
                if one.last and (other := again([*mended, one.last.repair, *one.last.also])) is not None:
                    one, found = (one.last, other) if is_mended(first, other, report) else (one, found)
                done.append(
                    first.proven(one.cause, one.repair.words, one.where or first.where, first.lines, one.thread)
                )
                mended += [one.repair, *one.also]
                findings = [  # what is logged may follow from the mended fault
                    other for other in found.findings
                    if not one.is_partial and not (found.is_logged(other) and other.step >= first.step)
                    and not any(other.what == known.what and _overlap(other, known) for known in done)
                ]  # fmt: skip
                break
            tried.append(one.repair.words)
            if found is not None and one.is_forward and not one.last and _is_loss_mended(first, found):
                only_forward.append(one)
                continue
            is_cast = one.repair.kind == "cast"
            is_more = is_cast or (one.is_forward and len(one.also) < 2 and not only_forward)
            if further and is_more and found is not None and len(tries) < 2 * MOST_TRIED:
                more = further([*mended, one.repair, *one.also], first.step)
                others = more.findings[0].hypotheses if more is not None and more.findings else ()
                others = [other for other in others if other.is_forward or (is_cast and other.repair.kind == "cast")]
                at = place + 1 if is_cast else len(tries)
                tries[at:at] = map(one.and_then, others[:2])
        else:
            if only_forward:
                one = only_forward[0]
                words = f"{one.repair.words} (right in the forward pass: gradients still go back through what it is)"
                done.append(first.proven(one.cause, words, one.where, first.lines))
                break
            done += [
                replace(first, cause=first.seen, tried=tuple(dict.fromkeys(tried)), thread=""),
                *(replace(other, cause=other.seen, thread="") for other in rest),
            ]
            break
    return report.with_findings(done)


def is_mended(fault: Finding, found: SameModel, before: SameModel) -> bool:
    """Return whether a fault is gone from a new report, and no earlier quantity, nor one beside it that was right, is
    wrong now. Samples that a run is given are always right, so the whole step must then be; with weights, its loss."""
    place, is_logged = _place(fault), before.is_logged(fault)
    for other in (other for other in found.findings if is_logged or not found.is_logged(other)):
        is_new = not any(_overlap(one, other) for one in before.findings if _place(one) == place)
        is_new = is_new and not {other.name, *other.others} <= before.suspects
        if _place(other) < place or (_place(other) == place and (is_new or _overlap(fault, other))):
            return False
        if other.step == fault.step and (fault.what == "samples" or (fault.what, other.what) == ("weights", "loss")):
            return False
    is_right = any(row.ok and row.step == fault.step and row.what in (fault.what, "gradient") for row in found.rows)
    return found.verdict in ("same", "different", "logs differ") or is_right


def _is_loss_mended(fault: Finding, found: SameModel) -> bool:
    """Return whether all that was wrong before the backward pass is right in a new report."""
    is_right = found.has_right_loss and all(_place(other) >= _place(fault) for other in found.findings)
    return fault.what == "loss" and is_right


def _overlap(a: Finding, b: Finding) -> bool:
    return not a.name or not b.name or bool({a.name, *a.others} & {b.name, *b.others})


def _place(finding: Finding) -> tuple[int, int]:
    order = get_args(What)
    what = "gradient" if finding.what == "loss" else finding.what
    return finding.step, order.index(what)
