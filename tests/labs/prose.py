"""The sentences of the labs, and which of them say how fast something is, or how much memory it takes."""

import re
from functools import cache

import nbformat

from labs.source import build

HOW_MUCH = re.compile(
    r"""\d\s?(%|ms|s|GB|GiB|MB|MiB|KiB|GB/s|Gb/s)(?![\w/])
      | \b(tokens/s|tokens\ per\ (second|rank|GPU)|TFLOP/s)
      | \b(faster|slower|fastest|slowest|sooner|longer)\b
      | \btimes\ as\ (fast|long|much|large|slow) | \bas\ (fast|slow)\ as\b
      | \bhalves\b | \bdoubles\b | \b(half|twice)\ the\ (time|memory)\b
      | \b(tenths?|ninths?|eighths?|sevenths?|sixths?|fifths?|quarters?|thirds?)\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""How a sentence says how fast, how much faster, or how much memory."""


@cache
def sentences(lab: str) -> tuple[str, ...]:
    """What a lab says, sentence by sentence, in tables row by row; without formulas, addresses and badges."""
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
    """All that the cells of a lab print, as it is in the repository; of a picture, the sentence that goes with it."""
    book = nbformat.read(build.LABS / f"{lab}.ipynb", as_version=4)
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
