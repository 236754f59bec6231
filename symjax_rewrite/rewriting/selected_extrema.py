"""Selections that are extrema: `where(x >= 0, x, 0.2 * x)` is max(x, 0.2 x).

XLA's library has extrema and no selections, so that it takes only the former into its calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.ir.flat_program import Equation, Value

ABOVE, BELOW = ("ge", "gt"), ("le", "lt")


def extremum_of(e: Equation, makers: Mapping[int, Equation]) -> str:
    """Return "max" or "min" if a selection equals that of its two cases to the bit, else "".

    The cases are positive multiples of one value, selected by its sign. Both are NaN where it is,
    and the products of infinity and zeros have its sign.
    """
    aval: Any = e.eqn.outvars[0].aval
    if e.name != "select_n" or len(e.invals) != 3 or not jnp.issubdtype(aval.dtype, jnp.floating):
        return ""  # multiples of integers wrap around
    test, *cases = e.invals
    compared = makers.get(test) if isinstance(test, int) else None
    if compared is None or compared.name not in ABOVE + BELOW:
        return ""
    x, zero = compared.invals
    above = compared.name in ABOVE
    if _number(x, makers) == 0:
        x, zero, above = zero, x, not above
    limits = jnp.finfo(aval.dtype)
    slopes = [_slope(v, x, makers) for v in cases]
    if not all(limits.tiny <= s <= limits.max for s in slopes):  # not 0 or infinite in the dtype
        return ""
    if _number(zero, makers) != 0:
        return ""
    where_not, where = slopes
    return "max" if (where >= where_not) is above else "min"


def _slope(v: Value, x: Value, makers: Mapping[int, Equation]) -> float:
    """Return k if a value is k times another; 0 or NaN if it is no multiple."""
    if v == x:
        return 1.0
    maker = makers.get(v) if isinstance(v, int) else None
    if maker is None or maker.name != "mul" or x not in maker.reads:
        return 0.0
    numbers = [_number(a, makers) for a in maker.invals if a != x]
    return numbers[0] if len(numbers) == 1 else 0.0


def _number(v: Value, makers: Mapping[int, Equation]) -> float:
    """Return the number that a literal, rounded or repeated, is; NaN for any other value."""
    avals: list[Any] = []
    while isinstance(v, int):
        maker = makers.get(v)
        if maker is None or maker.name not in ("convert_element_type", "broadcast_in_dim"):
            return math.nan
        avals.append(maker.eqn.outvars[0].aval)
        v, *_ = maker.invals
    dtypes = [aval.dtype for aval in [v.aval, *avals[::-1]]]
    if np.ndim(v.val) or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return math.nan  # a cast to an integer changes the number
    number = np.asarray(v.val)
    with np.errstate(all="ignore"):
        for dtype in dtypes:
            number = number.astype(dtype)
    return float(number)
