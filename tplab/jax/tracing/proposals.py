"""Proposals: specs with which a program would send less, each verified by compiling the program with it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tplab.jax.tracing.asked import Ask, axes_of, spec_text
from tplab.jax.tracing.compiled import runs_of
from tplab.jax.tracing.hlo import Module
from tplab.jax.tracing.lowered import Lowered
from tplab.jax.tracing.sending import bytes_by_rank

_WIDTH = 80  # columns: JupyterLab breaks longer lines inside words
_MARGIN = " " * 4
_MOST_TRIED = 12  # programs compiled
Axes = Mapping[int, Sequence[tuple[str, ...]]]
"""For each dim of a requested array, the axes along which it is cut before the request: one entry per collective."""


@dataclass(frozen=True)
class Proposal:
    """A spec with which a program sends less if nothing else is changed.

    ask            the request in the program
    spec           the spec to request instead
    before, after  the bytes that the busiest rank sends with the one and with the other
    """

    ask: Ask
    spec: tuple[Any, ...]
    before: int
    after: int

    def __str__(self) -> str:
        who, least = self.ask.line or self.ask.place.removeprefix("in "), f"a rank sends at most {self.after:,} B"
        instead = f"with {spec_text(self.spec)} instead of {spec_text(self.ask.spec)}"
        return wrapped(f"{who}: {instead} {least} instead of {self.before:,} B", first="")


def proposals(program: Lowered, asks: Mapping[Ask, Axes], accelerator: bool) -> Iterator[Proposal]:
    """For each request, the first spec with which less is sent. Equal requests of one line share a proposal.

    asks   the axes along which arrays are cut before they are moved for each request
    """
    before, num_tried = busiest(program, program.module, accelerator), 0
    for ask, axes in asks.items():
        for spec in _candidates(ask, axes):
            num_tried += 1
            if num_tried > _MOST_TRIED:
                return
            try:
                after = busiest(program, program.compiled_with({ask: spec}), accelerator)
            except (ValueError, RuntimeError):  # such as a result that cannot be cut so
                continue
            if after < before:
                yield Proposal(ask, spec, before, after)
                break


def busiest(program: Lowered, module: Module, accelerator: bool) -> int:
    """The bytes that the busiest rank sends. Branches that may be taken and loops of unknown length count once."""
    total = [0] * program.mesh.size
    for run in runs_of(module):
        for by_rank in bytes_by_rank(run.one, program.mesh, accelerator).values():
            total = [sum(pair) for pair in zip(total, (num * (run.at_most or 1) for num in by_rank), strict=True)]
    return max(total)


def _candidates(ask: Ask, axes: Axes) -> Iterator[tuple[Any, ...]]:
    """The specs to try: all axes together first, then those of each dim alone."""
    wanted = {dim: max(ways, key=len) for dim, ways in axes.items()}
    seen = {ask.spec}
    for chosen in [wanted, *({dim: names} for dim, names in wanted.items())]:
        spec = list(ask.spec)
        for dim, names in chosen.items():
            spec[dim] = (names or (None,))[0] if len(names) < 2 else names
        used = [name for names in spec for name in axes_of(names)]
        if len(used) == len(set(used)) and tuple(spec) not in seen:
            seen.add(tuple(spec))
            yield tuple(spec)


def wrapped(text: str, first: str = _MARGIN) -> str:
    """A paragraph below a heading. `first` is the margin of its first line."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=_MARGIN,
        break_long_words=False,
        break_on_hyphens=False,
    )
