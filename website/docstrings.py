"""A docstring as HTML: tables of arguments become lists, equations and drawings keep their columns.

tplab's docstrings are plain text. A paragraph whose lines have a name, two or more spaces, and a meaning is a table:

    args        the arguments of `fn`
    in_specs    one P per argument, or
                one P for all

Lines that are indented, or that have an arrow with spaces around it, keep their form.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby

ROW = re.compile(r"(?P<name>\S(?:.{0,38}?\S)?)(?P<gap> {2,})\S")
ARROW = re.compile(r"\s(->|<-|=>)\s{2}|\s{2}(->|<-|=>)\s")


def as_html(docstring: str) -> str:
    """The whole docstring, without blank lines, for use in Markdown."""
    paragraphs = re.split(r"\n\s*\n", docstring.strip("\n"))
    return "\n".join(part for text in paragraphs for part in _paragraph(text.splitlines()))


def first_sentence(docstring: str) -> str:
    """The first sentence as one line of Markdown: code stays code, and all other markup is escaped."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s(?=[A-Z`])", paragraph)[0]
    parts = re.split(r"(`[^`]+`)", sentence)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_\[\]<>#|~$&])", r"\\\1", part) for part in parts)


def inline(text: str) -> str:
    """Text with its `code` marked."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _paragraph(lines: list[str]) -> Iterator[str]:
    column = _column(lines)
    lines = list(_names_joined(lines, column))
    kinds = [(_kind(line, column, after), line) for after, line in zip(_table_before(lines, column), lines)]
    for kind, found in groupby(kinds, lambda one: one[0]):
        part = [line for _, line in found]
        if kind == "row":
            yield _table(part, column)
        elif kind == "form":
            yield f'<pre class="form">{html.escape(_dedent(part), quote=False)}</pre>'
        else:
            yield f"<p>{inline(' '.join(map(str.strip, part)))}</p>"


def _names_joined(lines: list[str], column: int) -> Iterator[str]:
    """Join a name on a line of its own to the first line of its meaning."""
    names = ""
    for line, after in zip(lines, [*lines[1:], ""]):
        is_meaning = column and len(after) - len(after.lstrip()) == column
        if not names and is_meaning and len(line) <= 40 and not line.startswith(" ") and not ROW.match(line):
            names = line
        else:
            yield f"{names}  {line.strip()}" if names else line
            names = ""


def _column(lines: list[str]) -> int:
    """The column at which the meanings of a table begin; 0 if the paragraph is not a table."""
    found = Counter(row.end("gap") for line in lines if (row := ROW.match(line)) and not ARROW.search(line))
    return found.most_common(1)[0][0] if found else 0


def _kind(line: str, column: int, in_table: bool) -> str:
    if column and (_split(line, column) or (in_table and line.startswith(" " * column))):
        return "row"
    return "form" if line.startswith("  ") or ARROW.search(line) or re.search(r"\S {3,}\S", line) else "text"


def _split(line: str, column: int) -> tuple[str, str] | None:
    """(name, meaning) of the first line of a row; a long name may reach beyond the column."""
    own = ROW.match(line)
    if ARROW.search(line) or line.startswith(" "):
        return None
    if line[column - 1 : column] == " " and line[column : column + 1].strip() and "  " not in line[:column].strip():
        return line[:column].strip(), line[column:].rstrip()
    return (own["name"], line[own.end("gap") :].rstrip()) if own and "  " not in own["name"] else None


def _table_before(lines: list[str], column: int) -> Iterator[bool]:
    """For each line, whether the line before it is in the table."""
    before = False
    for line in lines:
        yield before
        before = _kind(line, column, before) == "row"


def _table(lines: list[str], column: int) -> str:
    rows: list[tuple[str, list[str]]] = []
    for line in lines:
        if found := _split(line, column):
            rows.append((found[0], [found[1]]))
        else:
            meaning = line[column:].rstrip()
            rows[-1][1].append(f"\n{meaning.strip()}" if meaning.startswith("  ") else meaning)
    cells = (f"<dt>{_name(name)}</dt><dd>{_meaning(parts)}</dd>" for name, parts in rows)
    return f'<dl class="arguments">{"".join(cells)}</dl>'


def _name(text: str) -> str:
    return f"<code>{html.escape(text.replace('`', ''), quote=False)}</code>"


def _meaning(parts: list[str]) -> str:
    return inline(" ".join(parts)).replace(" \n", "<br>")


def _dedent(lines: list[str]) -> str:
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join(line[margin:].rstrip() for line in lines)
