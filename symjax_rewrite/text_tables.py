"""Tables and times as text: cells padded to the width of their column, three digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NOT_PRICED = "not priced"
NOT_SEARCHED = "no rule was tried: "  # begins the reason why a part was not searched
PREDICTED = "predicted "  # opens every reason that states a gain of speed
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def aligned(rows: Sequence[Sequence[str]], sides: str = "<", gap: int = 2) -> list[str]:
    """Return the lines of a table; a column without text is left out.

    Args:
        rows: cells; each row has as many as the first.
        sides: `<` or `>` for each column; the last one holds for the columns after it.
        gap: spaces between columns.

    Example:
        >>> aligned([("a", "1.0"), ("long", "12.0")], "<>")
        ['a      1.0', 'long  12.0']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides.ljust(len(widths), sides[-1])
    kept = [(k, f"{sides[k]}{w}") for k, w in enumerate(widths) if w]
    return [(" " * gap).join(f"{row[k]:{form}}" for k, form in kept).rstrip() for row in rows]


def duration(seconds: float | None) -> str:
    """Return seconds for a reader.

    Example:
        >>> duration(1.884), duration(0.0338), duration(2.7e-5), duration(None)
        ('1.88 s', '33.8 ms', '27.0 µs', 'not priced')
    """
    if not seconds:
        return NOT_PRICED if seconds is None else "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if float(f"{seconds / size:.3g}") >= 1:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def digits(value: float) -> str:
    """Return a number with three significant digits; a whole number below 1000 as it is.

    Example:
        >>> digits(1123.75), digits(33.84), digits(1.0), digits(4.2), digits(0.384)
        ('1124', '33.8', '1.00', '4.20', '0.384')
    """
    for least, places in ((99.95, 0), (9.995, 1), (0.9995, 2)):
        if value >= least:
            return f"{value:.{places}f}"
    return f"{value:.3g}"


def quantity(value: Any, unit: str = "") -> str:
    """Return a count of a unit for a reader; an expression of symbolic sizes as it is.

    Example:
        >>> quantity(671088640, "FLOP"), quantity(4, "B"), quantity(None, "B")
        ('671 MFLOP', '4 B', 'not priced')
    """
    if value is None:
        return NOT_PRICED
    if not isinstance(value, (int, float)):
        return str(value)
    for size, prefix in PREFIXES:
        if value / size >= 0.9995:
            return f"{digits(value / size)} {prefix}{unit}"
    text = str(int(value)) if float(value).is_integer() else digits(value)
    return f"{text} {unit}".rstrip()


def ratio(value: float) -> str:
    """Return how many times, for a reader.

    Example:
        >>> ratio(2.136), ratio(1.0), ratio(1123.75), ratio(0.05), ratio(262144), ratio(1e-4)
        ('2.14×', '1.00×', '1124×', '0.05×', '262 k×', '<0.01×')
    """
    if 0 < value < 0.005:
        return "<0.01×"
    if value >= 1e4:
        return f"{quantity(value)}×"
    return f"{value:.2f}×" if value < 9.995 else f"{digits(value)}×"


def speed(gain: float) -> str:
    """Return a gain of speed for a reader; a loss by how many times slower.

    Example:
        >>> speed(2.136), speed(1.001), speed(0.74)
        ('2.14× as fast', 'no faster', '1.35× slower')
    """
    if 0.995 <= gain < 1.005:
        return "no faster"
    return f"{ratio(gain)} as fast" if gain > 1 else f"{ratio(1 / max(gain, 1e-9))} slower"


def too_slow(gain: float, least: float) -> str:
    """Return the reason why a form of this predicted gain is refused: the least gain to take it.

    Example:
        >>> too_slow(1.04, 1.25), too_slow(0.74, 1.25)
        ('predicted 1.04× as fast, below the 1.25× required', 'predicted 1.35× slower')
    """
    text = f"{PREDICTED}{speed(gain)}"
    return f"{text}, below the {ratio(least)} required" if gain > 0.995 else text
