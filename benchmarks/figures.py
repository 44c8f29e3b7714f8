"""Write the table of docs/figures.md from measured rows, and keep the prose around it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.table import Row

BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->"
_HEAD = ["| what | measured | aim |", "|---|---|---|"]


def written(text: str, rows: Sequence[Row], about: str, is_whole: bool) -> str:
    """The page with these rows in its table, and `about`: where and on which commit they were measured.

    is_whole   whether these are all rows. Otherwise they replace their old versions, and the other rows stay; the page
               then states each time and machine
    Raises ValueError if the page has no place for a table.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"docs/figures.md needs one line {BEGIN.strip()} and one line {END} around its table")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    lines = {} if is_whole else _lines(old)
    abouts = [] if is_whole else re.findall(r"(?m)^Measured .*$", old)
    for row in rows:
        lines[row.what] = _line(row)
    if not is_whole and abouts and abouts[-1] != about:
        about = "\n".join([*abouts, f"{about} These rows: {'; '.join(row.what for row in rows)}."])
    return f"{before}{BEGIN}{about}\n\n" + "\n".join([*_HEAD, *lines.values()]) + f"\n{END}{after}"


def _line(row: Row) -> str:
    measured = row.measured if row.ok else f"**{row.measured}**"
    return f"| {row.what} | {measured} | {row.reach} |"


def _lines(table: str) -> dict[str, str]:
    """name of a row -> its line"""
    lines = [line for line in table.splitlines() if line.startswith("| ") and line not in _HEAD]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}
