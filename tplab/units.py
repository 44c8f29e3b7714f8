"""Numbers as people read them. widgets/static/units.js is the same in JavaScript; a browser test compares the two."""

from __future__ import annotations

import math
from collections.abc import Iterable

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def plain(number: float) -> str:
    """Up to three significant digits, and no exponent: 4, 1.5, 0.125, 22.4, 1024."""
    if number == 0 or not math.isfinite(number):
        return "0" if number == 0 else str(number)
    digits = max(0, 2 - math.floor(math.log10(abs(number)) + 1e-9))
    text = f"{number * (1 + 1e-12):.{digits}f}"  # 1.125 becomes 1.13, as in JavaScript
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(number: int, noun: str) -> str:
    """ "1 rank", "4,096 ranks", "2 batches"."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """ "ranks", "batches"."""
    return f"{noun}{'es' if noun.endswith('ch') else 's'}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks by number: rank 1; ranks 0, 2."""
    numbers = [*map(str, ranks)]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def number_text(number: float) -> str:
    """An element of a tensor: whole numbers below a million are unchanged; others get four significant digits."""
    if math.isfinite(number) and number == int(number) and abs(number) < 1e6:
        return str(int(number))
    mantissa, _, exponent = f"{number:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def bytes_text(number: float) -> str:
    """4096 -> "4 KiB"."""
    power = 0
    while number >= 1024 and power < len(_BYTES) - 1:
        number, power = number / 1024, power + 1
    return f"{plain(number)} {_BYTES[power]}"


def time_text(time: float, unit: str, scale: float | None = None) -> str:
    """2.24e-5, "s" -> "22.4 µs"; unit times are plain numbers. `scale`, a time, sets one prefix for several times."""
    if unit == "steps":
        return plain(time)
    size = abs(time if scale is None else scale)
    name, factor = next((pair for pair in _SECONDS if size >= pair[1] * 0.9995), _SECONDS[-1] if size else _SECONDS[0])
    return f"{plain(time / factor)} {name}"


def range_text(numbers: Iterable[float], text=bytes_text) -> str:
    """One figure if all read the same, otherwise "the least to the most"."""
    numbers = list(numbers)
    least, most = text(min(numbers)), text(max(numbers))
    return least if least == most else f"{least} to {most}"


def ticks(start: float, end: float, most: int, unit: str = "s") -> list[float]:
    """Round times between `start` and `end`, about `most` of them or fewer, counted from `start` = 0."""
    span = end - start
    if span <= 0:
        return [start]
    rough = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough) + 1e-9)
    step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough * (1 - 1e-9))
    if unit == "steps":
        step = max(step, 1.0)
    return [start + index * step for index in range(math.floor(span / step + 1e-9) + 1)]


def letter(index: int) -> str:
    """The name of a piece: a to z, then aa, ab, ..."""
    return letter(index // 26 - 1) + letter(index % 26) if index >= 26 else chr(97 + index)


def count_text(number: float) -> str:
    """6144 -> "6,144"; 3.2e10 -> "32 G"."""
    for factor, name in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if number >= 10 * factor:
            return f"{plain(number / factor)} {name}"
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"
