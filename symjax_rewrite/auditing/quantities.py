"""Seconds and bytes as text for people, and sizes of memory read from text."""

from __future__ import annotations

import re

from symjax_rewrite.errors import UsageError

_decimal = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_binary = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def seconds_text(seconds: float | None) -> str:
    """Return a time with the unit that suits it.

    Example:
        >>> seconds_text(4.2e-5), seconds_text(1.5), seconds_text(None)
        ('42 us', '1.5 s', 'not priced')
    """
    if seconds is None:
        return "not priced"
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def bytes_text(count: float | None) -> str:
    """Return a size of memory in decimal units.

    Example:
        >>> bytes_text(33_554_432), bytes_text(12)
        ('33.6 MB', '12 B')
    """
    if count is None:
        return "not priced"
    for prefix in ("t", "g", "m", "k"):
        if count >= _decimal[prefix]:
            unit = prefix if prefix == "k" else prefix.upper()
            return f"{count / _decimal[prefix]:.3g} {unit}B"
    return f"{count:.3g} B"


def parse_bytes(size: float | str) -> float:
    """Return a number of bytes given as a number or as text such as `"2 GB"` or `"512 MiB"`.

    Raises:
        UsageError: it is no size.

    Example:
        >>> parse_bytes("2 GB"), parse_bytes("1 KiB"), parse_bytes(64)
        (2000000000.0, 1024.0, 64.0)
    """
    text = str(size).strip()
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e[+-]?\d+)?)\s*(?:([kmgt]?)(i?)b)?", text.lower())
    units = _binary if match and match[3] else _decimal
    if isinstance(size, bool) or match is None or (match[2] or "") not in units:
        raise UsageError("not a size in bytes", expected='such as 2e9 or "2 GB"', got=repr(size))
    return float(match[1]) * units[match[2] or ""]
