"""Tables and times as text: cells padded to the width of their column, three digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence

NOT_PRICED = "not priced"


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


def predicted(before_s: float, after_s: float) -> str:
    """Return the predicted times of a form that is taken and of the form as written.

    Example:
        >>> predicted(5.2e-3, 3e-3)
        'predicted 3.00 ms instead of 5.20 ms'
    """
    return f"predicted {duration(after_s)} instead of {duration(before_s)}"
