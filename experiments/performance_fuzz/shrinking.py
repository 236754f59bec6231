"""Programs that are slower than as written, or far from their best form, made small."""

from __future__ import annotations

import time
from typing import Any

from performance_fuzz import measurement
from performance_fuzz.program import Program


def shrunk(
    program: Program, record: dict[str, Any], seconds: float = 60.0, budget_s: float = 0.3
) -> tuple[Program, dict[str, Any]]:
    """Return a smaller program with half of the harm or regret left, and its record.

    Args:
        program: what was measured.
        record: its record.
        seconds: of trying, at most.
        budget_s: seconds of timing for each try.
    """
    by, least = ("harm", 1.05) if record["harm"] > 1.05 else ("regret", 1.10)
    asked = max(least, 1 + (record[by] - 1) / 2)
    until = time.monotonic() + seconds
    while True:
        for other in program.smaller():
            if time.monotonic() > until:
                return program, record
            found = _measured(other, budget_s)
            if found is not None and not found["is_short"] and found[by] >= asked:
                program, record = other, found
                break
        else:
            return program, record


def _measured(program: Program, budget_s: float) -> dict[str, Any] | None:
    """Return the record of a program; None if a smaller one makes no sense any more."""
    try:
        specs, function = program.specs(), program.function()
        return measurement.measure(function, specs, program.arguments(), budget_s, most=3)
    except (TypeError, ValueError, NameError, IndexError, ZeroDivisionError):
        return None  # shapes that do not fit: what was removed was needed
