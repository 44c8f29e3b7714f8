"""The course: its parts in the order of reading, three paths through it, and what each lab says of itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

from labs.source import build

MINUTES = {"one hour": 60, "an hour and a quarter": 75, "an hour and a half": 90}
"""How labs write a time, besides "50 minutes"."""


@dataclass(frozen=True)
class Part:
    """A part of the course: what is split in it, and the numbers of its labs."""

    title: str
    about: str
    numbers: range


@dataclass(frozen=True)
class Path:
    """A way through the course for readers who want one thing: the numbers of its labs, in order."""

    title: str
    about: str
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class Lab:
    """A lab as the first cell of its source describes it. `needs` are the labs that it builds on."""

    name: str
    title: str
    question: str
    minutes: int
    needs: tuple[str, ...]

    @property
    def number(self) -> str:
        return self.name[:2]


PARTS = (
    Part("Splitting a layer", "Every rank has a part of each matrix.", range(10)),
    Part("Splitting the depth", "Every rank has some of the layers.", range(10, 16)),
    Part("Splitting the batch", "Every rank has the whole model and a part of the data.", range(16, 20)),
    Part("Splitting the sequence", "Every rank has some of the tokens.", range(20, 22)),
    Part("Splitting the experts", "Every rank has some of a layer's experts.", range(22, 24)),
    Part("Your own program", "The script that you already have.", range(24, 26)),
    Part("Choosing", "Several dimensions at once, and which of them to use.", range(26, 29)),
)

PATHS = (
    Path(
        "The shortest way in",
        "What travels when a layer or a batch is split, and what that costs.",
        ("00", "01", "16"),
    ),
    Path(
        "I debug parallel code",
        "Why a script hangs, why a gradient is wrong, and what ranks must agree on.",
        ("00", "01", "02", "07", "16", "24", "25"),
    ),
    Path(
        "I choose layouts",
        "What each dimension costs in time and memory, and which one crosses the network.",
        ("02", "03", "04", "10", "13", "16", "17", "19", "21", "26", "27", "28"),
    ),
)


def labs(names: list[str] | None = None) -> list[Lab]:
    """These labs, or all of them, in the order of reading."""
    return [_read(name) for name in (build.names() if names is None else sorted(names))]


def parts(found: list[Lab]) -> list[tuple[Part, list[Lab]]]:
    """The parts that have any of these labs, with them."""
    divided = [(part, [lab for lab in found if int(lab.number) in part.numbers]) for part in PARTS]
    return [(part, members) for part, members in divided if members]


def along(path: Path, found: list[Lab]) -> list[Lab]:
    """Those of these labs that are on the path, in its order."""
    return [lab for number in path.numbers for lab in found if lab.number == number]


def hours(minutes: int) -> str:
    """100 -> "1 h 40 min"."""
    whole, rest = divmod(minutes, 60)
    return " ".join([f"{whole} h"] * bool(whole) + [f"{rest} min"] * bool(rest or not whole))


def _read(name: str) -> Lab:
    text = " ".join(build.read_source(name).cells[0].source.split())
    title = re.match(r"# \d\d (.+?) \*\*", text)
    question = re.search(r"\*\*(.+?)\*\*", text)
    time = re.search(r"Time: (?:(\d+) minutes|([a-z ]+))[.,]", text)
    prerequisites = text.partition("Prerequisites:")[2].partition("![")[0]
    if not (title and question and time and prerequisites):
        raise ValueError(
            f"{name}: its first cell must give a title, a question in bold, 'Time: ...' and 'Prerequisites: ...'"
        )
    minutes = int(time[1]) if time[1] else MINUTES[time[2]]
    needs = tuple(dict.fromkeys(re.findall(r"\]\((\d\d)_\w+\.ipynb\)", prerequisites)))
    return Lab(name, title[1], question[1], minutes, needs)
