"""The names of a trace's chunks and operations in a picture, and the kinds of its operations.

Chunks have the names of the program if they are known, otherwise letters.
"""

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


KINDS = ("product", "norm", "elementwise", "copy", "computing")

_PRODUCTS = re.compile(
    r"(add|badd)?b?(mm|mv)_?|matmul|linear|dot(_general)?|einsum|conv(?!ert)\w*|.*attention.*|.*matmul.*"
)
_NORMS = re.compile(r".*norm.*|.*softmax.*|logsumexp|var(_mean)?|mean|rsqrt")
_COPIES = re.compile(
    r"clone|copy_?|cat|concatenate|stack|split|slice|dynamic_(update_)?slice|gather|index(_select|_put_?)?|embedding|"
    r"transpose|reshape|pad|constant_pad_nd|convert_element_type|_to_copy|zeros?\w*|ones\w*|full\w*|fill_?|select_and_\w*|"
    r"broadcast_in_dim|squeeze|iota|arange|repeat|flip|roll|scatter\w*"
)


_ATTENTION = re.compile(r"_?scaled_dot_product_\w*attention\w*")


def name_of(op: str) -> str:
    """The displayed name of an operation, without names of CPU kernels, which the modelled GPU does not run."""
    backward = ", backward" if op.endswith("_backward") else ""
    return f"scaled dot-product attention{backward}" if _ATTENTION.fullmatch(op) else op


def kind_of(op: str) -> str:
    """ "product" (of matrices), "norm" (norms, softmax and the statistics they need), "copy", "computing" (anything
    between two measured collectives), otherwise "elementwise"."""
    if op == "compute":
        return "computing"
    if _PRODUCTS.fullmatch(op):
        return "product"
    if _NORMS.fullmatch(op):
        return "norm"
    return "copy" if _COPIES.fullmatch(op) else "elementwise"
