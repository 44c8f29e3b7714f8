"""Gradients that share a fault, and what is known about them."""

from __future__ import annotations

from collections.abc import Sequence

from tplab.checking.facts import Facts
from tplab.checking.gaps import near
from tplab.checking.gradients import Wrong
from tplab.checking.recording import Sent
from tplab.checking.repairs import Groups, Repair
from tplab.checking.sends import given_to, lines_of_reduction


class Case:
    """Gradients that share a fault.

    is_all     whether every gradient has the fault
    others     the parameters whose gradients do not have it
    reduction  the line at which they are added up over ranks, or ""
    where      the line to name if nothing better is known
    batches    how many microbatches a step has
    made       each line that computed the number on which `backward` is called, the last one first, and its factor if
               it only multiplies by a number; `numbers` are those with a factor, that of the backward pass last
    made_last  the line of the last operation before that of the backward pass, in which a library may compute more
    made_first the line of the operation that reduced many numbers to one. Both are the line of the backward pass if
               nothing else was seen
    """

    def __init__(self, facts: Facts, group: Sequence[Wrong], is_all: bool):
        self.facts, self.first, self.is_all = facts, group[0], is_all
        self.kind, self.names = group[0].kind, [one.name for one in group]
        self.others = [name for name in facts.reference.order if name not in self.names]
        self.backward, self.step = facts.line("backward"), facts.line("step")
        reduction = lines_of_reduction(facts, self.names)
        self.reduction = reduction[0] if reduction else ""
        self.where = self.reduction or self.backward
        self.lines = [*reduction, self.backward, facts.line("scale"), self.step]
        self.batches = max(len(step.parts) for step in facts.mine)
        self.made = next((step.made for step in facts.mine if step.made), [])
        before = [line for line, _ in self.made if line != self.backward] or [self.backward]
        self.made_last, self.made_first = before[0], before[-1]
        known = [(line, by) for line, by in self.made if by is not None]
        self.numbers = sorted(known, key=lambda at: at[0] == self.backward)

    def scaling(self, factor: float) -> str:
        """Return the line that computes the loss and multiplies by this factor; "" if there is none."""
        lines = [line for line, times in self.numbers if near(times, factor)]
        return lines[0] if lines else ""

    def is_of_both(self, line: str) -> bool:
        """Return whether a line multiplies the loss by the same number in the reference."""
        theirs = {made for step in self.facts.theirs for made in step.made}
        return bool(line) and all(made in theirs for made in self.made if made[0] == line)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The ranks' own names for these parameters."""
        return tuple(sorted({mine for (_, mine), place in self.facts.places.items() if place.name in self.names}))

    @property
    def reductions(self) -> list[Sent]:
        """The collectives that reduce these gradients; else all that reduce several elements after the loss."""
        later = given_to(self.facts, self.names) or [
            sent
            for sent in self.facts.sent("reduction", "backward")
            if sent.op in ("all_reduce", "reduce_scatter") and sent.size > 1 and not sent.on
        ]
        return list({sent.where: sent for sent in later}.values())

    def combined(self, how: str, groups: Groups, by: float, words: str, line: str = "") -> Repair:
        """Return the repair that combines the gradients over groups of ranks, or only multiplies them. See `Repair`."""
        return Repair("gradients", words, line, self.own_names, groups, how, by=by)

    @property
    def in_backward(self) -> str:
        """The line whose backward pass makes the gradients wrong, or ""."""
        return next((line for name in self.names if (line := self.facts.line_of_gradient(name))), "")

    @property
    def left_out(self) -> str:
        """The line that keeps these gradients out of a collective that reduces others, or ""."""
        past = lines_of_reduction(self.facts, self.others) if not self.reduction else []
        return self.facts.source.way_past(past[0]) if past else ""

    @property
    def not_synchronised(self) -> str:
        """The line where the script turns off the synchronisation of gradients, or ""."""
        line = self.facts.line_of_script("no sync")
        return (self.facts.source.decision(line) or line) if line else ""

    @property
    def is_added_up(self) -> bool:
        """Whether collectives sum these gradients but average others."""
        mine, others = ({sent.reduction for sent in given_to(self.facts, names)} for names in (self.names, self.others))
        return mine == {"sum"} and others == {"mean"}

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts of any of them."""
        return any(len(self.facts.groups(name)) > 1 for name in self.names)

    @property
    def is_on_several_stages(self) -> bool:
        """Whether several ranks hold these parameters whole, and every other parameter is on a single rank."""
        held = {name: {rank for rank, _, _ in self.facts.holders(name)} for name in self.facts.reference.order}
        are_copies = not self.is_split and all(len(held[name]) > 1 for name in self.names)
        others = [held[name] for name in self.others]
        return are_copies and all(len(ranks) == 1 for ranks in others) and len(set().union(*others)) > 1
