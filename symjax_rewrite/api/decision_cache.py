"""A bounded cache of decisions, so that a program that is traced again is not optimised again.

`explain` and a call trace the same function separately, and so does every transformation of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

MOST_PROGRAMS = 8  # of one function; a decision holds its programs


class DecisionCache:
    """The last decisions for the programs of one function, the oldest first."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def get(self, key: Hashable | None) -> Any:
        """Return the decision for a key, or None."""
        found = None if key is None else self._found.pop(key, None)
        if found is not None:
            self._found[key] = found
        return found

    def put(self, key: Hashable | None, decision: Any) -> None:
        """Keep a decision in place of the one that was not asked for the longest."""
        if key is None:
            return
        self._found[key] = decision
        while len(self._found) > MOST_PROGRAMS:
            self._found.pop(next(iter(self._found)), None)
