"""The report of `same_model`: whether a training script trains the same model on many ranks as the reference does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import groupby
from textwrap import fill
from typing import Any, Literal

from tplab.units import ranks_text

What = Literal[
    "weights",
    "samples",
    "dropout",
    "loss",
    "gradient",
    "norm",
    "optimizer",
    "parameters",
    "buffers",
    "log",
    "evaluation",
]
"""What is compared, in the order of a training step."""

Verdict = Literal["same", "different", "logs differ", "could not run", "cannot tell"]

EXIT_CODES: dict[Verdict, int] = {"same": 0, "different": 1, "logs differ": 1, "could not run": 2, "cannot tell": 3}
"""A wrong log of the same model is a fault, too: people decide by it."""

MOST_NAMES = 3

RIGHT_WITH = "it is right in a run with this change: "
"""The beginning of a proof."""
NOT_FINITE = "not finite"


@dataclass(frozen=True)
class Finding:
    """A fault: something is wrong that no earlier fault explains.

    what, name      the gradient of "blocks.0.mlp.weight", by the reference's name. Some quantities have no name
    step            of the optimizer, from 0
    factor          what was found, divided by what should be there, if that is one number
    text_of_factor  "4 times the reference (4 is the number of ranks)", "of the last microbatch only"
    where           the line at fault, as "train.py:31": a collective's, or the line that a missing one should precede
    cause           the cause, if it is known: a run in which it was repaired was right
    proof           what was changed in that run; "" if the cause is observed rather than inferred, or not known
    tried           what was changed in runs that were not right either
    seen            what is certain of the fault without another run
    hypotheses      possible causes, until they are tried
    thread          the address of a public thread that reports the same fault; "" if there is none
    got, want       both values
    ranks           where it is wrong; () if on all ranks
    others          names of other tensors that have the same fault
    lines           all lines that have to do with it; `where` is one of them
    """

    what: What
    name: str
    step: int
    text_of_factor: str
    factor: float | None = None
    where: str = ""
    cause: str = ""
    thread: str = ""
    got: str = ""
    want: str = ""
    ranks: tuple[int, ...] = ()
    others: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    proof: str = ""
    tried: tuple[str, ...] = ()
    seen: str = ""
    hypotheses: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    def proven(self, cause: str, words: str, where: str, others: Iterable[str] = (), thread: str = "") -> Finding:
        """Return the same finding with its cause: it is right in a run with the change that `words` describe."""
        lines = tuple(dict.fromkeys(line for line in (where, *others) if line))
        return replace(self, cause=cause, where=where, thread=thread, lines=lines, proof=RIGHT_WITH + words)

    @property
    def title(self) -> str:
        """The quantity in words: the gradient of blocks.0.mlp.weight and of 5 others."""
        many = f" and of {len(self.others)} other{'s' * (len(self.others) > 1)}" if self.others else ""
        on = f" on {ranks_text(self.ranks)}" if self.ranks else ""
        return titled(self.what, self.name) + many + on

    @property
    def untold(self) -> str:
        """The sentence for a fault that no repair mended. It lists the first two of many trials."""
        told = self.tried if len(self.tried) < 4 else (*self.tried[:2], f"and {len(self.tried) - 2} more")
        tried = f"; these changes were tried and are not enough: {'; '.join(told)}" if told else ""
        return f"the cause is not known{tried}"

    @property
    def is_not_finite(self) -> bool:
        return self.text_of_factor.startswith(NOT_FINITE)

    def __str__(self) -> str:
        """The fault, and below it all that is known, each on a line."""
        return "\n".join([self.headline, *(_indented(before + text) for before, _, text in self.known)])

    @property
    def headline(self) -> str:
        return f"step {self.step}: {self.title}: {self.text_of_factor}"

    @property
    def known(self) -> list[tuple[str, str, str]]:
        """All that is known: as text, what comes before it; in a table, its label; and the words."""
        rows = [
            ("at ", "line", self.where),
            ("also see ", "also see", ", ".join(line for line in self.lines if line != self.where)),
            ("found ", "found", f"{self.got}; expected {self.want}" if self.got else ""),
            ("", "cause", self.cause),
            ("proof: ", "proof", self.proof),
            ("", "cause", self.untold if not self.proof and (self.tried or not self.cause) else ""),
            ("others have met this: ", "others have met this", self.thread),
        ]
        return [row for row in rows if row[2]]


TITLES: dict[What, str] = {
    "weights": "the weights at the start",
    "samples": "the samples",
    "dropout": "the dropout mask",
    "loss": "the loss",
    "gradient": "the gradient",
    "norm": "the norm of the gradients",
    "optimizer": "the optimizer",
    "parameters": "the parameters after the step",
    "buffers": "the buffer",
    "log": "the logged value",
    "evaluation": "the evaluation",
}


def titled(what: What, name: str) -> str:
    """Return the quantity in words: the gradient of a parameter, the optimizer's setting or state of this name."""
    return TITLES[what] + (f"'s {name}" if what == "optimizer" else f" of {name}") * bool(name)


@dataclass(frozen=True)
class Row:
    """What was compared of one quantity in one step.

    ok      None if it was not judged, because it follows from an earlier fault or was not seen; `words` say which
    factor  what was found, divided by what should be there, if that is one number
    count   how many tensors, or numbers, were compared, if there may be several
    """

    what: What
    step: int
    ok: bool | None
    words: str
    name: str = ""
    factor: float | None = None
    count: int = 0

    @property
    def mark(self) -> str:
        if self.ok is None:
            return "-"
        return "ok" if self.ok else "WRONG" if self.factor is None else f"x {self.factor:.4g}"

    @property
    def text(self) -> str:
        return f"{self.name}: {self.words}" if self.name else self.words


class SameModel:
    """Whether a script trains the same model as its reference, and if not, what is first wrong.

    verdict    "same", "different", "logs differ" (of the same model), "could not run" or "cannot tell"
    reason     why it could not run, or why the comparison cannot tell; "" otherwise
    rows       what was compared, in the order of a training step
    findings   the faults, in the same order, without those that follow from one of them
    first      the first of them, or None
    notes      sentences about the comparison: which differences count as rounding, and what was changed for it
    exit_code  0 if nothing is wrong, 1 if anything is, the log alone included; 2 and 3 for the last two verdicts
    suspects   names of further wrong tensors, which may follow from the faults
    has_right_loss   whether the loss of the last step that was compared is right, whatever its gradients are
    about      what was compared with what: "train.py on 4 ranks with train.py on 1 rank"
    words      the verdicts "same" and "different" in words
    """

    def __init__(
        self, rows: Iterable[Row] = (), findings: Iterable[Finding] = (), *, notes: Iterable[str] = (),
        reason: str = "", about: str = "", words: tuple[str, str] = ("the same model", "NOT the same model"),
        has_run: bool = True,
    ):  # fmt: skip
        self.rows, self.findings, self.notes = tuple(rows), tuple(findings), tuple(notes)
        self.reason, self.about, self.words, self._has_run = reason, about, words, has_run
        self.suspects, self.has_right_loss = set[str](), False

    def with_findings(self, findings: Iterable[Finding]) -> SameModel:
        """Return the same report with other findings."""
        other = SameModel(self.rows, findings, notes=self.notes, reason=self.reason, about=self.about, words=self.words)
        other._has_run = self._has_run
        return other

    @property
    def verdict(self) -> Verdict:
        if self.findings:
            return "logs differ" if all(map(self.is_logged, self.findings)) else "different"
        if not self._has_run:
            return "could not run"
        return "cannot tell" if self.reason or not any(row.ok is not None for row in self.rows) else "same"

    def is_logged(self, finding: Finding) -> bool:
        """Return whether training is right in the step of a finding, and only what is logged is not."""
        is_right = any(row.what == "gradient" and row.ok and row.step == finding.step for row in self.rows)
        return finding.what in ("log", "evaluation") or (finding.what == "loss" and is_right)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def first(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    @property
    def title(self) -> str:
        """The verdict in one sentence."""
        about = f"{self.about}: " if self.about else ""
        if self.verdict in ("could not run", "cannot tell"):
            return f"{about}{self.verdict}, because {self.reason or 'nothing was seen'}"
        if self.first is None:
            return about + self.words[0]
        how = f": {self.first.text_of_factor}, at {self.first.where}" if self.first.is_not_finite else ""
        words = f"{self.words[0]}, but what it logs is wrong" if self.verdict == "logs differ" else self.words[1]
        return f"{about}{words}; first wrong in step {self.first.step}: {self.first.title}{how}"

    def __str__(self) -> str:
        parts = ["\n".join(fill(line, 110, break_long_words=False) for line in self.title.splitlines())]
        parts += ["\n\n".join(map(str, self.findings))] * bool(self.findings)
        if self.reason and self.findings:
            parts.append(_indented(f"nothing further was compared, because {self.reason}"))
        if self.rows:
            parts.append("\n".join(self._table()))
        if notes := [self.coverage, *self.notes] if self.rows else self.notes:
            parts.append("\n".join(_indented(note) for note in notes))
        return "\n\n".join(parts)

    @property
    def coverage(self) -> str:
        """What was compared, and what was not: "compared in step 0: samples, loss, 8 gradients; not compared: norm"."""
        judged = [row for row in self.rows if row.ok is not None]
        counts = {what: max((row.count for row in judged if row.what == what), default=0) for what in TITLES}
        of = {row.what for row in judged}
        compared = [
            f"{counts[what]} {_many(what, counts[what])}" if counts[what] else what for what in TITLES if what in of
        ]
        steps = sorted({row.step for row in judged})
        when = f"in steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"in step {steps[0]}" if steps else ""
        parts = [f"compared {when}: {', '.join(compared)}"] * bool(compared)
        left = [what for what in TITLES if what not in of]
        parts += [f"not compared: {', '.join(left)}"] * bool(left)
        return "; ".join(parts)

    def _table(self) -> Iterator[str]:
        marks = max(len(row.mark) for row in self.rows)
        whats = max(len(row.what) for row in self.rows)
        for step, rows in groupby(self.rows, lambda row: row.step):
            yield f"step {step}"
            yield from (f"  {row.mark:<{marks}}  {row.what:<{whats}}  {row.text}" for row in rows)

    def __repr__(self) -> str:
        return f"SameModel: {self.title}"

    def _repr_html_(self) -> str:
        """Return the verdict; each fault, expanded, with its values and lines; a table of what was compared."""
        colour = {0: "#238636", 1: "#d73a49"}.get(self.exit_code, "#9e6a03")
        style = f"color: {colour}; white-space: pre-line"
        parts = [f"<p><b style='{style}'>{escape(self.title)}</b></p>", *map(_html_of, self.findings)]
        if self.rows:
            lines = "".join(_html_row(row) for row in self.rows)
            head = "<tr><th>step</th><th></th><th>quantity</th><th>what was found</th></tr>"
            parts.append(f"<table><thead>{head}</thead><tbody>{lines}</tbody></table>")
        notes = [self.coverage, *self.notes] if self.rows else self.notes
        return "".join([*parts, *(f"<p><small>{escape(note)}</small></p>" for note in notes)])


def could_not_run(reason: str, *, about: str = "") -> SameModel:
    """Return the report of a script that fails, or hangs, on one of the two sides."""
    return SameModel(reason=reason, about=about, has_run=False)


def cannot_tell(reason: str, *, about: str = "") -> SameModel:
    """Return the report of two runs whose comparison is not conclusive."""
    return SameModel(reason=reason, about=about)


def named(names: Sequence[str]) -> str:
    """Return the first few of many names: a, b, c and 4 others."""
    names = list(names)
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    rest = len(names) - MOST_NAMES
    return f"{', '.join(names[:MOST_NAMES])} and {rest} other{'s' * (rest > 1)}"


def of_idle(idle: Iterable[tuple[int, str]]) -> list[str]:
    """Return a note about copies that ranks do not use, by rank and name; [] if there are none."""
    names: dict[int, dict[str, None]] = {}
    for rank, name in idle:
        names.setdefault(rank, {})[name] = None
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, some in sorted(names.items()):
        ranks.setdefault(tuple(some), []).append(rank)
    listed = "; ".join(f"{named(some)} on {ranks_text(those)}" for some, those in ranks.items())
    return [f"copies that a rank does not use are not compared: {listed}"] * bool(listed)


def _many(what: What, count: int) -> str:
    """Return the noun for what is counted, singular or plural."""
    one = {"log": "logged number", "evaluation": "evaluation", "norm": "norm"}.get(what, what.removesuffix("s"))
    return one + "s" * (count > 1)


def _html_of(finding: Finding) -> str:
    """Return a fault, expanded."""
    rows = [*finding.known, ("", "also wrong in", named(finding.others))]
    cells = "".join(
        f"<tr><th>{label}</th><td style='text-align: left'>{_linked(text)}</td></tr>" for _, label, text in rows if text
    )
    return f"<details open><summary>{escape(finding.headline)}</summary><table>{cells}</table></details>"


def _linked(text: str) -> str:
    return f"<a href='{escape(text)}'>{escape(text)}</a>" if text.startswith("https://") else escape(text)


def _html_row(row: Row) -> str:
    mark = {"-": "–", "ok": "✓", "WRONG": "✗"}.get(row.mark, row.mark.replace("x", "×"))
    colour = {None: "inherit", True: "#238636", False: "#d73a49"}[row.ok]
    return (
        f"<tr><td>{row.step}</td><td style='color: {colour}'>{mark}</td><td>{row.what}</td>"
        f"<td style='text-align: left'>{escape(row.text)}</td></tr>"
    )


def _indented(text: str) -> str:
    return fill(text, 110, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
