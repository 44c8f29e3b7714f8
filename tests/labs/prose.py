"""The sentences of the labs, and those among them that state a speed or an amount of memory."""

import re
from functools import cache
from typing import NamedTuple

import nbformat

from labs.source import build

UNITS = r"%|ms|us|s|GB|GiB|MB|MiB|KiB|GB/s|Gb/s|TFLOP/s|tokens/s|tokens per (second|rank|GPU)"
PART = r"(half|twice|(third|quarter|fifth|sixth|seventh|eighth|ninth|tenth)s?)"
HOW_MUCH = re.compile(
    rf"""(?<![\w.,])\d[\d.,]*\s?({UNITS.replace(" ", "[ ]")})(?![\w/])
      | \b(faster|slower|fastest|slowest|sooner(?![ ]or[ ]later)|(?<!no[ ])longer)\b
      | \btimes[ ]as\b | \bas[ ](fast|slow)[ ]as\b | \b(halves|doubles)[ ]the[ ](time|memory)\b
      | \b(los\w+|sav\w+|hid\w+|wait\w*|gains?|within|than|below)[ ](\w+[ ]){{0,3}}{PART}\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""A statement of a speed, of a ratio of speeds, or of an amount of memory."""


@cache
def sentences(lab: str) -> tuple[str, ...]:
    """A lab's text, sentence by sentence, and in tables row by row; without formulas, addresses and badges."""
    found = list[str]()
    for cell in build.read_source(lab).cells:
        if cell.cell_type == "markdown" and cell.source != build.closing_line():
            found += _sentences(cell.source)
    return tuple(found)


def _sentences(text: str) -> list[str]:
    text = re.sub(r"!?\[!?\[[^\n]*\n", "\n", text)  # badges
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    text = re.sub(r"</?\w+>|[*`\[\]!]", "", text)
    blocks = re.split(r"\n\s*\n|\n(?=[-|#] ?)", text)
    plain = [" ".join(block.split()) for block in blocks]
    return [sentence for block in plain for sentence in re.split(r"(?<=[.?!:])\s+(?=[A-Z0-9(])", block) if sentence]


def says_how_much(sentence: str) -> bool:
    return HOW_MUCH.search(sentence) is not None


@cache
def printed(lab: str) -> str:
    """The printed outputs of a lab's cells in the repository, with the sentences of its pictures."""
    book = nbformat.read(build.LABS / f"{lab}.ipynb", as_version=4)
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def milliseconds(lab: str, line: str, network: str = "") -> float:
    """The number of ms in the printed line that begins with `line` and names this network."""
    (found,) = (one for one in printed(lab).splitlines() if one.startswith(line) and network in one)
    return numbers(found[len(line) : found.index(" ms")])[-1].value


class Number(NamedTuple):
    """A number in a text, and its precision: 2,500 is known to 100, and 0.47 to 0.01."""

    value: float
    unit: float

    def is_rounded_from(self, value: float) -> bool:
        return abs(value - self.value) <= self.unit * 0.5000001


def numbers(text: str) -> list[Number]:
    """The numbers in a text that are not part of a name, such as "H100"."""
    return [_number(found) for found in re.findall(r"(?<![\w.,])\d{1,3}(?:,\d{3})+|(?<![\w.,])\d+(?:\.\d+)?", text)]


def _number(text: str) -> Number:
    whole, _, places = text.replace(",", "").partition(".")
    unit = 10.0 ** -len(places) if places else 10.0 ** (len(whole) - len(whole.rstrip("0") or whole))
    return Number(float(f"{whole}.{places or 0}"), unit)
