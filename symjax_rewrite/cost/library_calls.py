"""The elementwise operations that XLA's library for CPUs takes into a call, as into a reduction.

XLA computes other operands of a call in a loop of their own, and stores them.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax

KNOWN = frozenset(
    "abs add add_any ceil convert_element_type cosh div erf exp exp2 expm1 floor integer_pow log"
    " log1p logistic max min mul neg pow round rsqrt sign sqrt square sub tanh".split()
)
if jax.__version_info__ >= (0, 11):
    KNOWN |= {"sin", "cos", "tan"}
ENDS = frozenset({"min", "max"})


def is_known(name: str, operands: Iterable[str]) -> bool:
    """Return True for an operation that the library has; it has no clamp.

    operands: names of the operations that compute its operands.
    """
    return name in KNOWN and not (name in ENDS and any(x in ENDS - {name} for x in operands))
