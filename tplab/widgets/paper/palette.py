"""The colours of the pictures that Python draws: those of static/tplab.css in its light theme. A test compares them."""

from __future__ import annotations

from functools import cache

Colour = str | tuple[int, int, int]

INK, DIM, LINE, SOFT, PAPER = "#1c2230", "#5c677a", "#d5dbe5", "#f4f6f9", "#ffffff"
ACCENT, HATCH, WORK = "#1f5fd0", "#dfe4ec", "#66718a"
WHITE = "white"
"""For letters on a colour that is the same on dark paper."""

# Wherever one is used, a letter, number or pattern is beside it. White text on any of them has a contrast of at least
# 4.5, and each of them on light or dark paper at least 3; neighbours are distinct for colour-blind readers.
HUES = ("#2f6bd8", "#b45309", "#0f7d5c", "#b33a83", "#0b7a99", "#d0342c", "#537a30", "#7a5fb0")

KINDS = {"F": "#1f55bd", "I": "#55b3a6", "W": "#f0c969"}
"""Colours of a schedule's actions: dark, medium and light, so they differ even in grey. A B is an I and a W."""

OPS = {"product": "#43558c", "backward": "#4a9d97", "norm": "#8f6fc4", "elementwise": "#8fa0bb", "copy": "#c3cbd9"}
OPS |= {"computing": WORK, "combines": HUES[1], "moves": HUES[0]}
"""Colours of a rank's work, by kind of operation. "backward" is a product of a backward pass; "computing" is of unknown
kind. A collective "combines" data, as a sum does, or only "moves" it."""

GRADIENT = "#1d7f72"
"""The colour of a message with gradients in a pipeline: that of I, darkened for white letters."""


_TOKENS = {INK: "ink", DIM: "dim", LINE: "line", SOFT: "soft", PAPER: "paper", ACCENT: "accent", HATCH: "hatch"}
_TOKENS |= {colour: f"o{kind}" for kind, colour in OPS.items()} | {WORK: "work", GRADIENT: "kig"}
_TOKENS |= {hue: f"c{place}" for place, hue in enumerate(HUES)}
_TOKENS |= {colour: f"k{kind.lower()}" for kind, colour in KINDS.items()}


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


class Mixed(tuple[int, int, int]):
    """RGB on light paper, and its components: a browser mixes them on its own paper."""

    colour: str
    share: float
    over = ""


@cache
def mix(colour: str, share: float, paper: str = PAPER) -> Mixed:
    """`share` of a colour over the paper."""
    parts = zip(rgb(colour), rgb(paper), strict=True)
    mixed = Mixed(round(share * a + (1 - share) * b) for a, b in parts)
    mixed.colour, mixed.share = colour, share
    return mixed


@cache
def lighter(colour: str, share: float) -> Mixed:
    """`share` of a colour over white, on dark paper too."""
    mixed = Mixed(mix(colour, share))
    mixed.colour, mixed.share, mixed.over = colour, share, f" {WHITE}"
    return mixed


def token(colour: Colour) -> str:
    """The name of a colour in static/tplab.css: "c3"; "c3 26" for 26% of it over paper, "c3 26 white" over white."""
    if isinstance(colour, Mixed):
        return f"{_TOKENS[colour.colour]} {100 * colour.share:g}{colour.over}"
    return WHITE if colour == WHITE else _TOKENS[str(colour)]


def hue(index: int) -> str:
    return HUES[index % len(HUES)] if index >= 0 else WORK


def shades() -> list[tuple[int, int, int]]:
    """The colours of pictures: each one plain, mixed with paper, and as in its smoothed edges."""
    paper = [rgb(PAPER), rgb(SOFT), rgb(LINE), rgb(HATCH)]
    greys = [mix(colour, share / 8) for colour in (INK, DIM) for share in range(1, 9)]
    strong = [mix(colour, share) for colour in (ACCENT, WORK) for share in (1, 0.7, 0.42, 0.22)]
    strong += [mix(colour, share) for colour in KINDS.values() for share in (1, 0.775, 0.55)]
    strong += [mix(colour, share) for colour in OPS.values() for share in (1, 0.55)]
    hues = [mix(colour, share) for colour in (*HUES, GRADIENT) for share in (1, 0.8, 0.55, 0.26, 0.13)]
    return paper + greys + strong + hues
