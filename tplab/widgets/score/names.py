"""The names of a trace's chunks in a picture: those of the program if they are known, otherwise letters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from tplab.units import letter

_PIECE = re.compile(r"(.+)\[(\d+)\]")
LOW = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
"""Digits -> subscripts."""
LONGEST = 3  # the longest name of a variable that is written in full


class Name(NamedTuple):
    """short: for use beside the colour. text: for sentences. place: its position among the others."""

    short: str
    text: str
    place: tuple[int, int]


def names(chunks: Sequence[tuple[int, int]], given: Sequence[str], met: Mapping[int, Set[int]]) -> dict[int, Name]:
    """chunk -> its name, for the chunks in `met`, which maps each chunk to the ranks that use it.

    given    each chunk's name in the program, or "" if that is unknown
    The program's name is used if it distinguishes the chunks that meet on a rank: "x₃" for piece 3 of x. The other
    chunks are a, b, c, ..., in the order of their numbers.
    """
    known = {chunk: given[chunk] if given else "" for chunk in met}
    variable = {chunk: _split(name)[0] for chunk, name in known.items()}
    shared = _shared(known, variable, met)
    first: dict[str, int] = {}  # the first chunk of each variable
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
            low = str(index).translate(LOW)
            short = f"{name}{low}" if len(name) < LONGEST else f"[{index}]"
            found[chunk] = Name(short, f"{name}[{index}]", (first[name], index))
    return found


def _split(name: str) -> tuple[str, int | None]:
    match = _PIECE.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def _shared(known: Mapping[int, str], variable: Mapping[int, str], met: Mapping[int, Set[int]]) -> set[str]:
    """The variables whose names are ambiguous, because two chunks of one name are on the same rank."""
    seen: dict[tuple[str, int], int] = {}
    found = set()
    for chunk, name in known.items():
        for rank in met[chunk] if name else ():
            if seen.setdefault((name, rank), chunk) != chunk:
                found.add(variable[chunk])
    return found
