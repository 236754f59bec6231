"""The user's source lines, `file.py:12 (f)`: their parts, and how reports show them."""

from __future__ import annotations

import os
import re

from symjax_rewrite.errors import readable_place

_PLACE = re.compile(r"(.*):(\d+) \((.*)\)$", re.DOTALL)


def place(where: str) -> tuple[str, int, str] | None:
    """Return the file, line and function of `file.py:12 (f)`; None for any other text."""
    found = _PLACE.match(where)
    return (found[1], int(found[2]), found[3]) if found else None


def short_place(where: str) -> str:
    """Return a source line by its notebook cell, or by its path from the working directory."""
    at, cell = place(where), readable_place(where)
    if at is None or cell != where:
        return cell or "an unknown line"
    path, line, function = at
    inside = os.path.abspath(path).startswith(os.getcwd() + os.sep)
    return f"{os.path.relpath(path) if inside else path}:{line} ({function})"
