"""Changes by which the user could turn a refusal, by the obstacle that it names."""

from __future__ import annotations

from symjax_rewrite.obstacles import Obstacle, obstacle_of
from symjax_rewrite.usage_records import RouteUse

KERNELS = ("fold", "far_field", "norm_linear", "scan", "banded", "selection", "sparse")
FORCED = "kernels='always' takes it; tune=True times it and keeps what is fastest"
BY_HAND = "no option takes it: write that form yourself if it measures faster"

# Of an obstacle that is not here nothing is known that the user could change.
REMEDIES: dict[Obstacle, str] = {
    Obstacle.MEASUREMENT: "call tune=True outside of transformations, at concrete sizes",
    Obstacle.SIZES: "pass assume=(...): see the crossover",
    Obstacle.DEVICE: "device='h200' explains it for a GPU",
    Obstacle.MEMORY: BY_HAND,
    Obstacle.RANGE: "numerics='finite', if no value overflows",
    Obstacle.NUMERICS: "pass that level of numerics, if its rounding is acceptable",
    Obstacle.CANCELLATION: "numerics='cancels', if lost digits are acceptable",
    Obstacle.ROUNDING: "numerics='reassoc' permits another order of sums",
    Obstacle.SHARDING: "call it inside jax.shard_map, where axes are manual",
    Obstacle.DTYPES: "give the operands one float dtype",
    Obstacle.BUDGET: "budget=Budget(...) with a larger limit",
    Obstacle.RANDOM: "draw the random numbers before, and pass them as an argument",
    Obstacle.READER: "do not return or reuse the intermediate values",
    Obstacle.STORAGE: "store these weights in one dtype",
}


def remedy(use: RouteUse) -> str:
    """Return a change by the user that gets a refused candidate taken; empty if there is none.

    Example:
        >>> cancels = Obstacle.CANCELLATION("terms of unknown sign may cancel")
        >>> remedy(RouteUse("distribute", False, cancels))
        "numerics='cancels', if lost digits are acceptable"
    """
    obstacle = obstacle_of(use.reason)
    if obstacle is not Obstacle.COST:
        return REMEDIES.get(obstacle, "")
    if use.ratio is not None and use.ratio <= 1:
        return ""  # predicted slower: nothing to gain
    return FORCED if use.name in KERNELS else BY_HAND
