"""Tables as text: cells padded to the width of their column."""

from __future__ import annotations

from collections.abc import Sequence


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
