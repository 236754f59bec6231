"""The load that other programs put on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from symjax_rewrite.cost.core_scaling import usable_cores

WAIT_S = 0.5  # over which the load is averaged
STAT = Path("/proc/stat")


def taken_cores(wait_s: float = WAIT_S, stat: Path = STAT) -> float | None:
    """Return the usable cores that other programs keep busy; None if the system does not say.

    Cores of the machine that this process may not use are taken to be used first.
    """
    before = _seconds(stat)
    mine = time.process_time()
    time.sleep(wait_s)
    after = _seconds(stat)
    if before is None or after is None or after[1] <= before[1]:
        return None
    cores = os.cpu_count() or 1
    busy = cores * (after[0] - before[0]) / (after[1] - before[1])
    others = busy - (time.process_time() - mine) / wait_s
    return max(others - (cores - usable_cores()), 0.0)


def _seconds(stat: Path) -> tuple[float, float] | None:
    """Return the busy time of all cores and their whole time, in the system's ticks."""
    try:
        name, *ticks = stat.read_text().splitlines()[0].split()
    except (OSError, IndexError, ValueError):  # no Linux
        return None
    if not name.startswith("cpu") or len(ticks) < 5:
        return None
    user, nice, system, idle, waiting, *rest = map(int, ticks[:8])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting
