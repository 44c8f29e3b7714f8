"""Letters without a font: which ones a line can contain, and their approximate widths."""

from __future__ import annotations

import re
from collections.abc import Callable

_WIDTHS = (
    "318 401 460 838 636 950 780 275 390 390 500 838 318 361 318 337 636 636 636 636 636 636 636 636 636 636 337 337 "
    "838 838 838 531 1000 684 686 698 770 632 575 775 752 295 295 656 557 863 748 787 603 787 695 635 611 732 684 989 "
    "685 611 685 390 337 390 838 500 500 613 635 550 635 615 352 635 634 278 278 579 278 974 634 612 635 635 411 521 "
    "392 634 592 818 592 592 525 636 337 636 838 "
)
"""Widths in DejaVu Sans, from space to tilde, in thousandths of the size. Bold letters are wider by a tenth."""

_WIDTH = {chr(32 + place): int(width) / 1000 for place, width in enumerate(_WIDTHS.split())}
_OTHER, _MONO, _BOLD = 0.6, 0.602, 1.1


def about_width(text: str, size: float = 11, bold: bool = False, mono: bool = False) -> float:
    """The width of a text, within a few percent, when no font is available."""
    text = one_line(text)
    if mono:
        return size * _MONO * len(text)
    return size * sum(_WIDTH.get(letter, _OTHER) for letter in text) * (_BOLD if bold else 1)


def one_line(text: str) -> str:
    """The text with spaces for line ends, tabs and other characters that no font draws; XML forbids some of them."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", " ", text)


def fitted(text: str, size: float, room: float, width_of: Callable[[str, float], float] = about_width) -> str:
    """The text, or as much of it as fits into `room`, with an ellipsis at its end."""
    if width_of(text, size) <= room:
        return text
    while text and width_of(f"{text} …", size) > room:
        text = text[:-1]
    return f"{text.rstrip(' ·')} …"
