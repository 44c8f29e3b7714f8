"""Gradients that have the same fault, and what is known about them."""

from __future__ import annotations

from collections.abc import Sequence

from tplab.checking.causes import thread
from tplab.checking.facts import Facts
from tplab.checking.gradients import Wrong
from tplab.checking.makers import Makers
from tplab.checking.same_model import Finding
from tplab.checking.sends import lines_of_reduction, reductions


class Case:
    """Gradients that have the same fault.

    is_all     whether these are all gradients
    reduction  the line at which they are added up over ranks, or ""
    where      the line to blame if nothing better is known
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

    def fault(self, cause: str, key: str = "", words: str = "", where: str = "") -> Finding:
        """The finding for them."""
        first = self.first
        return self.facts.fault(
            "gradient",
            self.names[0],
            words or first.words,
            first.factor,
            where or self.where,
            cause,
            thread=thread(key),
            values=(f"{first.got:.6g}", f"{first.want:.6g}"),
            ranks=first.ranks if first.kind in ("none", "shape", "other") else (),
            others=self.names[1:],
            lines=self.lines,
        )

    @property
    def in_backward(self) -> str:
        """The line whose backward pass makes them wrong, or ""."""
        return next((line for name in self.names if (line := self.facts.line_of_gradient(name))), "")

    @property
    def left_out(self) -> str:
        """The line that keeps these gradients out of a collective that others go through, or ""."""
        past = lines_of_reduction(self.facts, self.others) if not self.reduction else []
        return self.facts.source.way_past(past[0]) if past else ""

    @property
    def is_added_up(self) -> bool:
        """Whether collectives add these gradients up, and average others."""
        return reductions(self.facts, self.names) == {"sum"} and reductions(self.facts, self.others) == {"mean"}

    @property
    def others(self) -> list[str]:
        """All parameters whose gradients do not have the fault."""
        return [name for name in self.facts.reference.order if name not in self.names]

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts of any of them."""
        return any(self.facts.holds_differ(name, range(self.facts.num_ranks)) for name in self.names)

    @property
    def is_on_several_stages(self) -> bool:
        """Whether several ranks hold these parameters whole, and every other parameter is on one rank alone."""
        held = {name: {rank for rank, _, _ in self.facts.holders(name)} for name in self.facts.reference.order}
        are_copies = not self.is_split and all(len(held[name]) > 1 for name in self.names)
        others = [held[name] for name in self.others]
        return are_copies and all(len(ranks) == 1 for ranks in others) and len(set().union(*others)) > 1

    @property
    def is_in_stages(self) -> bool:
        """Whether each parameter is whole, and on one of several ranks, and a step has several microbatches."""
        facts, steps = self.facts, self.facts.mine
        held = [[rank for rank, _, _ in facts.holders(name)] for name in facts.reference.order]
        is_cut = len({rank for ranks in held for rank in ranks}) > 1 and all(len(ranks) == 1 for ranks in held)
        return is_cut and not self.is_split and max(len(step.parts) for step in steps) > 1
