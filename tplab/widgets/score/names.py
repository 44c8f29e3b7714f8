"""What the chunks of a trace are called in a picture: as in the program where that is known, else by letters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from tplab.units import letter

_PIECE = re.compile(r"(.+)\[(\d+)\]")
_LOW = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
LONGEST = 3  # letters of a variable that are written as they are


class Name(NamedTuple):
    """short: beside every use of the colour. text: in a sentence. place: where it stands among the others."""

    short: str
    text: str
    place: tuple[int, int]


def names(chunks: Sequence[tuple[int, int]], given: Sequence[str], met: Mapping[int, Set[int]]) -> dict[int, Name]:
    """chunk -> its name, for the chunks in `met`: chunk -> the ranks that have to do with it.

    given    what the program calls each chunk, "" where that is not known
    A name in the program is used where it tells the chunks apart that meet on a rank: "x₃" for piece 3 of x. Other
    chunks are a, b, c, ..., in the order of their numbers.
    """
    known = {chunk: given[chunk] if given else "" for chunk in met}
    variable = {chunk: _split(name)[0] for chunk, name in known.items()}
    shared = _shared(known, variable, met)
    first: dict[str, int] = {}  # of each variable, its first chunk
    for chunk in sorted(met):
        first.setdefault(variable[chunk], chunk)
    found: dict[int, Name] = {}
    letters = (letter(index) for index in range(10**6))
    free = (text for text in letters if text not in first)
    for chunk in sorted(met):
        name, index = _split(known[chunk])
        if not name or name in shared:
            short = next(free)
            of = f" ({known[chunk]} of rank {chunks[chunk][0]})" if name else ""
            found[chunk] = Name(short, f"piece {short}{of}", (chunk, 0))
        elif index is None:
            short = name if len(name) <= LONGEST else next(free)
            found[chunk] = Name(short, name, (chunk, 0))
        else:
            low = str(index).translate(_LOW)
            short = f"{name}{low}" if len(name) < LONGEST else f"[{index}]"
            found[chunk] = Name(short, f"{name}[{index}]", (first[name], index))
    return found


def _split(name: str) -> tuple[str, int | None]:
    match = _PIECE.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def _shared(known: Mapping[int, str], variable: Mapping[int, str], met: Mapping[int, Set[int]]) -> set[str]:
    """The variables whose names do not tell chunks apart: two of one name are on one rank."""
    seen: dict[tuple[str, int], int] = {}
    found = set()
    for chunk, name in known.items():
        for rank in met[chunk] if name else ():
            if seen.setdefault((name, rank), chunk) != chunk:
                found.add(variable[chunk])
    return found
