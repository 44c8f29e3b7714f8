"""The report of `check_parallel`: one row for each output, the loss, each gradient and each parameter after a step.

The backward pass goes from the loss to the inputs. If the gradient of an activation is wrong, all later gradients are
wrong, too; if only a parameter's own gradient is wrong, no other is affected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from tplab.checking.verdict import Verdict
from tplab.errors import ParallelError


@dataclass(frozen=True)
class Row:
    """One tensor of a parallel model, compared with the unsharded reference.

    kind        "value" (a parameter before the step), "output", "activation" (of a module inside), "loss", "gradient",
                "parameter" (after the optimizer's step) or "dropout"
    name        of the parameter, the output, the input or the module
    shape       of the whole tensor
    layout      how it is laid out on the mesh, as text
    ok, error, tolerance, words, mistake, axes, moved    see `tplab.checking.verdict.Verdict`
    follows     the title of the row that may have caused this error, or ""
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    layout: str
    ok: bool
    error: float
    tolerance: float
    words: str
    mistake: str = ""
    axes: tuple[str, ...] = ()
    follows: str = ""
    moved: float | None = None

    @classmethod
    def of(cls, kind: str, name: str, shape: Sequence[int], layout: Any, verdict: Verdict) -> Row:
        return cls(kind, name, tuple(shape), str(layout), **verdict._asdict())

    @property
    def title(self) -> str:
        """The tensor in words: gradient of norm.weight."""
        return _KINDS[self.kind][0] + self.name


_KINDS = {
    "value": ("value of ", "value", "values"),
    "output": ("", "output", "outputs"),
    "activation": ("output of ", "module's output", "modules' outputs"),
    "loss": ("", "loss", "losses"),
    "gradient": ("gradient of ", "gradient", "gradients"),
    "parameter": ("after the step: ", "parameter after the step", "parameters after the step"),
    "dropout": ("dropout: ", "dropout", "dropouts"),
}
"""What comes before a name in a title; and the kind's noun, of one and of many."""


class ParallelReport:
    """The rows of a comparison in the order of computation: values, outputs, the loss, gradients as they arrive in the
    backward pass, parameters.

    rows    see `Row`
    notes   sentences about the whole: which parameters were changed for the check, where a mistake begins
    ok      whether everything equals the reference, up to rounding
    wrong   the rows that are wrong; those that no other row explains come first
    str()   one line for each of these, and what follows from it; `table()` has all rows
    """

    def __init__(self, rows: Iterable[Row], *, mesh: str = "", notes: Iterable[str] = ()):
        self.rows, self.mesh, self.notes = list(rows), mesh, list(notes)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def wrong(self) -> list[Row]:
        return sorted((row for row in self.rows if not row.ok), key=lambda row: bool(row.follows))

    def of(self, name: str, kind: str | None = None) -> Row:
        """Return the row of a name. If there are several kinds, the first one that is wrong, or else the first. Raises
        KeyError for an unknown name."""
        found = [row for row in self.rows if row.name == name and kind in (None, row.kind)]
        if not found:
            names = ", ".join(dict.fromkeys(row.name for row in self.rows))
            raise KeyError(f"there is no row of {name!r}{f' of kind {kind!r}' if kind else ''}; the names are {names}")
        return next((row for row in found if not row.ok), found[0])

    def raise_if_wrong(self) -> ParallelReport:
        """Raise ParallelError with the whole report if anything is wrong; otherwise return the report."""
        if not self.ok:
            raise ParallelError(str(self))
        return self

    def summary(self) -> str:
        """Return one line: how many tensors are wrong, or how close they all are."""
        on = f" on {self.mesh}" if self.mesh else ""
        if self.ok:
            return f"{_counted(self.rows)} equal to the unsharded reference's{on}; {_loss_gap(self.rows)}"
        return f"{len(self.wrong)} of {len(self.rows)} wrong{on}: {_counted(self.wrong)}; {_loss_gap(self.rows)}"

    def __str__(self) -> str:
        lines, first = [self.summary()], [row for row in self.wrong if not row.follows]
        width = min(max((len(row.title) for row in first), default=0), 60)
        for row in first:
            lines.append(f"  {row.title:<{width}}  {row.words}")
            if behind := [other for other in self.wrong if other.follows == row.title]:
                lines.append(f"  {'':<{width}}  and {_listed(behind)}")
        return "\n".join(lines + [f"  ({note})" for note in self.notes])

    def __repr__(self) -> str:
        return f"ParallelReport: {self.summary()}"

    def table(self) -> str:
        """Return one line per tensor, including those that are right."""
        cells = [(row.title, row.layout, "ok" if row.ok else "WRONG", row.words) for row in self.rows]
        widths = [max((len(line[place]) for line in cells), default=0) for place in range(3)]
        lines = ["  ".join([*(text.ljust(width) for text, width in zip(line, widths)), line[3]]) for line in cells]
        return "\n".join([self.summary(), *lines])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        behind, right = [row for row in self.wrong if row.follows], [row for row in self.rows if row.ok]
        parts = [_html_table([row for row in self.wrong if not row.follows])] if self.wrong else []
        if behind:
            parts.append(_html_folded(f"{_counted(behind)} that may follow from it", behind))
        if right:
            parts.append(_html_folded(f"what is right: {_counted(right)}", right) if self.wrong else _html_table(right))
        shown = "" if self.ok else " open"
        body = "".join(parts)
        return f"<details{shown}><summary>{escape(self.summary())}</summary>{notes}{body}</details>"


def perturbed(names: Sequence[str]) -> str:
    """Return the note about parameters that were constant and therefore got other values for the check."""
    if len(names) == 1:
        return f"{names[0]} was constant, so the check gave it random values"
    return f"{len(names)} parameters, such as {names[0]}, were constant, so the check gave them random values"


def _counted(rows: Sequence[Row]) -> str:
    """2 outputs, 1 loss, 12 gradients"""
    counts = {kind: sum(row.kind == kind for row in rows) for kind in _KINDS}
    return ", ".join(f"{n} {_KINDS[kind][1 + (n > 1)]}" for kind, n in counts.items() if n) or "nothing"


def _loss_gap(rows: Sequence[Row]) -> str:
    loss = next((row for row in rows if row.kind == "loss"), None)
    if loss is None:
        return "no loss was compared"
    if loss.ok and loss.error > loss.tolerance:
        return "each rank has its part of the loss"
    if loss.error == 0:
        return "the loss gap is 0"
    own = f": one in the last place moves the reference by {loss.moved:.2g}" if loss.moved else ""
    return f"the loss gap is {loss.error:.2g}, {'rounding' if loss.ok else 'not rounding'}{own}"


MOST_NAMES = 4


def _listed(behind: Sequence[Row]) -> str:
    """8 gradients that may follow from it: norm_2.bias, out.weight, ..."""
    names = ", ".join(row.name for row in behind[:MOST_NAMES]) + ", ..." * (len(behind) > MOST_NAMES)
    named = f": {names}" if len({row.kind for row in behind}) == 1 else ""
    return f"{_counted(behind)} that may follow from it{named}"


def _html_table(rows: Sequence[Row]) -> str:
    lines = "".join(
        f"<tr><td>{'✓' if row.ok else '✗'}</td><td><code>{escape(row.title)}</code></td>"
        f"<td>{escape(row.layout)}</td><td style='text-align:left'>{escape(row.words)}</td></tr>"
        for row in rows
    )
    head = "<tr><th></th><th>tensor</th><th>layout</th><th>what was found</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{lines}</tbody></table>"


def _html_folded(summary: str, rows: Sequence[Row]) -> str:
    return f"<details><summary>{escape(summary)}</summary>{_html_table(rows)}</details>"


# --- first errors, and what follows from them -------------------------------------------------------------------------

OWN_CAUSE = ("fused", "tied")
"""Mistakes of one parameter alone, whatever else is wrong."""


def in_backward_order(rows: Sequence[Row], order: Sequence[str]) -> list[Row]:
    """Return the same rows with the gradients in order of arrival; those that are not in `order` come last."""
    place = {name: index for index, name in enumerate(order)}
    gradients = iter(sorted(_gradients(rows), key=lambda row: place.get(row.name, len(order))))
    return [next(gradients) if row.kind == "gradient" else row for row in rows]


def folded(rows: Sequence[Row]) -> list[Row]:
    """Return the same rows; those that may be wrong because of another row name it in `follows`."""
    activation = next((row for row in rows if not row.ok and row.kind == "activation"), None)
    value = next((row for row in rows if not row.ok and row.kind == "value"), None)
    output = next((row for row in rows if not row.ok and row.kind in ("output", "loss")), None)
    fused = next((row for row in rows if not row.ok and row.mistake == "fused"), None)
    forward = None if output is None else fused or activation or value or output
    leader: Row | None = None
    leads: dict[str, str] = {}
    found = []
    for row in rows:
        follows = ""
        if row.kind in ("output", "loss") and forward is not None:
            follows = forward.title
        elif row.kind == "activation" and fused is not None:
            follows = fused.title
        elif row.kind == "gradient" and row.mistake not in OWN_CAUSE and _tells(row):
            leader = None if row.ok else forward or leader or row
            follows = leader.title if leader else ""
        elif row.kind == "parameter":
            follows = forward.title if forward else leads.get(row.name, "")
        if row.kind == "gradient" and not row.ok:
            leads[row.name] = follows or row.title
        found.append(replace(row, follows="" if row.ok or follows == row.title else follows))
    return found


def where_it_begins(rows: Sequence[Row]) -> str:
    """Return a note on where gradients begin to be wrong, in rows that are folded; "" if an output is wrong, or only
    the gradients of one module are."""
    order = [row for row in _gradients(rows) if _tells(row)]
    place = next((place for place, row in enumerate(order) if not row.ok and row.mistake != "tied"), 0)
    if place == 0 or order[place].follows or order[place].mistake in ("scaled", "missing", "gather"):
        return ""
    first, module = order[place], order[place].name.rpartition(".")[0]
    behind = [row for row in order if row.follows == first.title]
    if all(module and row.name.rpartition(".")[0] == module for row in behind):
        return ""
    return (
        "all outputs are right; in the order of the backward pass, gradients are right up to "
        f"{order[place - 1].name} and wrong from {first.name} on: look at what is between the two"
    )


def _gradients(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if row.kind == "gradient")


def _tells(row: Row) -> bool:
    """Return whether a gradient is evidence about those before and after it. One that is zero in both models is not."""
    return not (row.ok and row.words.startswith(("zero", "no gradient")))
