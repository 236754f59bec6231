"""A profile without thresholds: every legal candidate is taken, whatever it costs.

Arrays of random programs are so small that passes such as `fusion_limits` would find nothing worth
their while.
"""

import dataclasses
from typing import Any

from symjax_rewrite.cost.device_profiles import CPU, Device
from symjax_rewrite.cost.profile_groups import Margins
from tests.profiles import changed

GROUPS = (
    "folds loops layouts column_scans columns places scans fusions sorts bands norms banded"
).split()
MARGINS = {f.name: 0.0 for f in dataclasses.fields(Margins)} | {
    "share_of_program": -float("inf"),
    "share_of_loop": -float("inf"),
    "faster": float("inf"),
    "larger": 1.0,
}
# Below these there is nothing to do: a row of two elements, a loop cut after no step.
LEAST = {
    "fusions": {"long_row": 3, "least_elements": 1},
    "loops": {"least_remade_steps": 4, "least_cut_steps": 2},
    "folds": {"least_of_sort": 1},
}


def _least(group: Any, others: int = 0) -> dict[str, Any]:
    """Return the thresholds of a group of figures, all of them zero."""
    names = (f.name for f in dataclasses.fields(group) if f.name.startswith("least_"))
    return {n: type(getattr(group, n))(others) for n in names}


def without_thresholds(device: Device = CPU) -> Device:
    """Return the profile with every margin and every least size at zero, or near it."""
    found = {n: getattr(device, n, None) for n in GROUPS}
    known = {n: g for n, g in found.items() if dataclasses.is_dataclass(g)}
    groups = {n: _least(g, n == "layouts") | LEAST.get(n, {}) for n, g in known.items()}
    return changed(device, margins=MARGINS, **groups)
