"""A profile under which candidates that are a little too expensive are proposed, to be measured."""

from __future__ import annotations

import dataclasses

from symjax_rewrite.cost.device_profiles import Device

NEAR = 0.7  # of the predicted time as written: a prediction may be off by so much
# Margins that compare a whole candidate with the program as written. The others choose among
# candidates, or among forms inside a candidate.
AGAINST_WRITTEN = ("rewrite", "dominating", "fold", "norm", "scan", "tree", "banded")


def near(device: Device) -> Device:
    """Return a profile by which no candidate with a predicted speedup of `NEAR` is refused."""
    margins = device.margins
    lower = {kind: min(NEAR, getattr(margins, kind)) for kind in AGAINST_WRITTEN}
    opened = dataclasses.replace(margins, **lower, faster=1 / NEAR, share_of_program=0.0)
    return dataclasses.replace(device, margins=opened)
