"""Fields of device profiles, and the names of their sources (imports nothing of the package)."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

DATASHEET = "datasheet"
FACT = "how the device, or XLA for it, works"  # a boolean, not a figure
JUDGED = "judged"  # a bound that was set by hand
NO_SCRIPT = "measured; no script is kept"
FOLDS = "experiments/folds/run.py"
STREAMS = "experiments/top_k/streams.py"
TREES = "experiments/selective_scan/trees.py"
TURNS = "experiments/selective_scan/turns.py"
MATRICES = "experiments/selective_scan/matrices.py"
BATCHES = "experiments/batched_loops/run.py"
LAWS = "experiments/performance_fuzz/laws.py"
RESIDUALS = "experiments/performance_fuzz/margins.py"
ORIENTATION = "experiments/orientation/run.py"
ELEMENTWISE = "symjax_rewrite/calibration/elementwise.py"
ON_GPU = "experiments/on_gpu/fit.py"


def quantity(unit: str, meaning: str, source: str, default: Any = MISSING, **more: Any) -> Any:
    """Return a field of a profile.

    Args:
        unit: "s", "bytes", "bytes/s", "1" for a ratio or a count, "yes/no" …
        meaning: the meaning of the figure, as a clause.
        source: the script that measures it, or `FACT`, `JUDGED` or a similar name above.
        default: the figure that all profiles share.
        more: further arguments of `dataclasses.field`.
    """
    about = {"unit": unit, "meaning": meaning, "source": source}
    return field(default=default, metadata=about, **more)


def fact(meaning: str, default: bool) -> Any:
    """Return a field of a profile that says how the device, or XLA for it, works."""
    return quantity("yes/no", meaning, FACT, default)


def group(meaning: str, default: Any = MISSING) -> Any:
    """Return a field of a profile that holds a group of figures."""
    return quantity("group", meaning, FACT, default)
