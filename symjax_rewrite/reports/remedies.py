"""Changes by which the user could turn a refusal, by the condition that failed."""

from __future__ import annotations

import re

from symjax_rewrite.usage_records import RouteUse

KERNELS = ("fold", "far_field", "norm_linear", "scan", "banded", "partial_sort", "sparse")
FORCED = "kernels='always', tune=True times the kernel and keeps what is fastest"
BY_HAND = "none by an option: write that form yourself if it measures faster"

# Reasons of refusals, as patterns, and what the user could change. The first that matches counts;
# an empty text: nothing.
REMEDIES: tuple[tuple[str, str], ...] = (
    (r"not admitted|earlier candidate|another (fold|equation)|become dense", ""),
    (r"not measured:", "call tune=True outside of transformations, at concrete sizes"),
    (r"for all sizes", "pass assume=(...): see the crossover"),
    (r"saves less than .* of the (program|loop)|less than 1 %|little beside it", ""),
    (r"runs on GPUs|on a CPU", "device='h200' explains it for a GPU"),
    (r"larger intermediate", BY_HAND),
    (r"numerics='finite'|float16 may overflow", "numerics='finite', if no value overflows"),
    (r"needs numerics=", "pass that level of numerics, if its rounding is acceptable"),
    (r"may cancel|squares of sums cancel", "numerics='cancels', if lost digits are acceptable"),
    (r"several devices|sharding|sharded", "call it inside jax.shard_map, where axes are manual"),
    (r"round in another order", "numerics='reassoc' permits another order of sums"),
    (r"dtypes? .*not supported|two dtypes|several dtypes", "give the operands one float dtype"),
    (r"budget|clock", "budget=Budget(...) with a larger limit"),
    (r"random numbers", "draw the random numbers before, and pass them as an argument"),
    (r"also used by|is itself a result|is used$", "do not return or reuse the pairwise values"),
    (r"nonlinearity .* between", "apply the linear layer to the norm's result directly"),
    (r"an axis is empty or a name", "use concrete sizes"),
    (r"stored differently", "store these weights in one dtype"),
)


def remedy(use: RouteUse) -> str:
    """Return what the user could change so that a refused candidate is taken; empty if nothing.

    Example:
        >>> remedy(RouteUse("distribute", False, "terms of unknown sign may cancel"))
        "numerics='cancels', if lost digits are acceptable"
    """
    for pattern, text in REMEDIES:
        if re.search(pattern, use.reason):
            return text
    if "predicted gain" in use.reason or "is selected faster" in use.reason:
        if use.ratio is not None and use.ratio <= 1:
            return ""  # predicted slower: nothing to gain
        return FORCED if use.name in KERNELS else BY_HAND
    return ""
