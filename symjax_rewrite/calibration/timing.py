"""Timing: programs sampled in turn, robust fits of lines, and how much times spread.

All functions take the clock as an argument, so that tests can plan the measured times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]


def sampled(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    sample_s: float,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Return seconds per call of each program, one number per round; programs run in turn.

    Args:
        calls: functions that return when their program has finished.
        rounds: samples of each program.
        sample_s: seconds of a sample at least; a short call is repeated.
        clock: seconds since any time.
    """
    repeats = {}
    for name, call in calls.items():
        call()  # allocates memory and loads code for later calls
        repeats[name] = max(1, int(sample_s / max(_seconds(call, 1, clock), 1e-7)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(_seconds(call, repeats[name], clock))
    return found


def _seconds(call: Callable[[], object], repeats: int, clock: Clock) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def spread(seconds: Sequence[float]) -> float:
    """Return how far samples lie from each other: half of them, relative to the median.

    Example:
        >>> spread([1.0, 1.0, 1.0, 5.0]), spread([1.0, 2.0, 3.0])
        (0.0, 0.5)
    """
    middle = statistics.median(seconds)
    return statistics.median(abs(s - middle) for s in seconds) / middle if middle else 0.0


@dataclass(frozen=True, slots=True)
class LineFit:
    """A line through (amount, seconds): `fixed_s + slope · amount`.

    residual: median of |measured − line| relative to the measured seconds. points: (amount,
    seconds).
    """

    slope: float
    fixed_s: float
    residual: float
    points: tuple[tuple[float, float], ...]


def fitted_line(amounts: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """Return the line by Theil and Sen: the median slope of all pairs, which outliers hardly move.

    Example:
        >>> fitted_line([1, 2, 3, 4], [3.0, 5.0, 7.0, 90.0]).slope
        2.0
    """
    points = list(zip(amounts, seconds, strict=True))
    slope = statistics.median_low(
        (y - v) / (x - u) for k, (x, y) in enumerate(points) for u, v in points[:k] if x != u
    )
    fixed = statistics.median(y - slope * x for x, y in points)
    errors = [abs(y - fixed - slope * x) / y for x, y in points if y > 0]
    return LineFit(slope, fixed, statistics.median(errors) if errors else 0.0, tuple(points))
