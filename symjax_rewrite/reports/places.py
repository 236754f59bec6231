"""The user's source lines, `file.py:12 (f)`: their parts, and how reports show them."""

from __future__ import annotations

import os
import re

from symjax_rewrite.errors import readable_place

_PLACE = re.compile(r"(.*):(\d+) \((.*)\)$", re.DOTALL)
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")


def place(where: str) -> tuple[str, int, str] | None:
    """Return the file, line and function of `file.py:12 (f)`; None for any other text."""
    found = _PLACE.match(where)
    return (found[1], int(found[2]), found[3]) if found else None


def short_place(where: str) -> str:
    """Return a source line by its notebook cell, or by the shortest path that names its file.

    This is the path from the working directory, or from the folder of installed packages.

    Example:
        >>> short_place("/env/lib/python3.12/site-packages/flax/linen/linear.py:199 (Dense)")
        'flax/linen/linear.py:199 (Dense)'
    """
    at, cell = place(where), readable_place(where)
    if at is None or cell != where:
        return cell or "an unknown line"
    path, line, function = at
    installed = _INSTALLED.match(path)
    inside = os.path.abspath(path).startswith(os.getcwd() + os.sep)
    short = path[installed.end() :] if installed else os.path.relpath(path) if inside else path
    return f"{short}:{line} ({function})"
