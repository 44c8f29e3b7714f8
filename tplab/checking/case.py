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
    reduction  the line at which they are added up over ranks, or ""
    where      the line to name if nothing better is known
    """

    def __init__(self, facts: Facts, group: Sequence[Wrong], is_all: bool):
        self.facts, self.first, self.is_all = facts, group[0], is_all
        self.names = [one.name for one in group]
        self.backward, self.step = facts.line("backward"), facts.line("step")
        reduction = lines_of_reduction(facts, self.names)
        self.reduction = reduction[0] if reduction else ""
        self.where = self.reduction or self.backward
        self.lines = [*reduction, self.backward, facts.line("scale"), self.step]
        self.made = Makers(facts)

    @property
    def batches(self) -> int:
        """How many microbatches a step has."""
        return max(len(step.parts) for step in self.facts.mine)

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
    def others(self) -> list[str]:
        """All parameters whose gradients do not have the fault."""
        return [name for name in self.facts.reference.order if name not in self.names]

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


class Makers:
    """The lines that computed the number on which `backward` is called. If none was seen, or one line does everything,
    this is the line of the backward pass.

    made    each line, and its factor if it only multiplies by a number; the last one first
    last    the line of the last operation before that of the backward pass, in which a library may compute more
    first   the line of the operation that reduced many numbers to one
    """

    def __init__(self, facts: Facts):
        self.backward = facts.line("backward")
        self.made = next((step.made for step in facts.mine if step.made), [])
        self._theirs = {made for step in facts.theirs for made in step.made}
        others = [line for line, _ in self.made if line != self.backward]
        self.last = others[0] if others else self.backward
        self.first = others[-1] if others else self.backward

    @property
    def numbers(self) -> list[tuple[str, float]]:
        """The lines that multiply by a number, with the number; the line of the backward pass comes last."""
        known = [(line, by) for line, by in self.made if by is not None]
        return sorted(known, key=lambda at: at[0] == self.backward)

    def is_of_both(self, line: str) -> bool:
        """Whether the line multiplies by the same number in the reference."""
        return bool(line) and all(made in self._theirs for made in self.made if made[0] == line)

    def scaling(self, factor: float) -> str:
        """The line that multiplies by this factor; "" if there is none."""
        lines = [line for line, times in self.made if times is not None and near(times, factor)]
        return next((line for line in lines if line != self.backward), lines[0] if lines else "")
