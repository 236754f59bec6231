"""Quantities as text: three digits and a prefix, so that columns align and units are right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from symjax_rewrite.errors import UsageError
from symjax_rewrite.text_tables import NOT_PRICED as NOT_PRICED
from symjax_rewrite.text_tables import PREDICTED as PREDICTED
from symjax_rewrite.text_tables import PREFIXES
from symjax_rewrite.text_tables import digits as digits
from symjax_rewrite.text_tables import duration as duration
from symjax_rewrite.text_tables import quantity as quantity
from symjax_rewrite.text_tables import ratio as ratio
from symjax_rewrite.text_tables import speed as speed


def size(count: Any) -> str:
    """Return a size of memory, given in bytes, for a reader."""
    return quantity(count, "B")


def flops(count: Any) -> str:
    """Return FLOPs for a reader."""
    return quantity(count, "FLOP")


def parse_bytes(size: float | str) -> float:
    """Return a number of bytes given as a number or as text such as `"2 GB"` or `"512 MiB"`.

    Raises:
        UsageError: it is no size.

    Example:
        >>> parse_bytes("2 GB"), parse_bytes("1 KiB"), parse_bytes(64)
        (2000000000.0, 1024.0, 64.0)
    """
    text = str(size).strip().lower()
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e[+-]?\d+)?)\s*(?:([kmgt]?)(i?)b)?", text)
    if isinstance(size, bool) or match is None or (match[3] and not match[2]):
        raise UsageError("not a size in bytes", expected='such as 2e9 or "2 GB"', got=repr(size))
    power = " kmgt".index(match[2] or " ")
    return float(match[1]) * (1024 if match[3] else 1000) ** power


def sizes(sample: Mapping[str, int]) -> str:
    """Return the numbers of named sizes: `n = 64, d = 512`."""
    return ", ".join(f"{name} = {size}" for name, size in sample.items())


def count(value: Any) -> str:
    """Return a number of things, in full below a million."""
    if is_number(value) and value < 1e6:
        return f"{value:.0f}"
    return quantity(value)


def ratio_of(before: Any, after: Any) -> str:
    """Return `before / after` for a reader; empty unless both are positive numbers."""
    return ratio(before / after) if is_number(before, after) and before and after else ""


def is_number(*values: Any) -> bool:
    """Return True if all values are numbers."""
    return all(isinstance(x, (int, float)) for x in values)


def scaled_numbers(text: str) -> str:
    """Return a text with its large integers scaled.

    Example:
        >>> scaled_numbers("16777216 pairs are never stored")
        '16.8 M pairs are never stored'
    """
    return re.sub(r"\b\d{6,}\b", lambda m: quantity(int(m[0])), text)


def times(count: int) -> str:
    """Return a number of repetitions: ` ×12`; empty for one."""
    return f" ×{count}" if count > 1 else ""


def short(value: float) -> str:
    """Return a power of ten with a prefix, to stand before a unit.

    Example:
        >>> short(1e9), short(1e4)
        ('1 G', '10 k')
    """
    for size, prefix in PREFIXES:
        if value >= 0.9995 * size:
            return f"{value / size:g} {prefix}"
    return f"{value:g} "
