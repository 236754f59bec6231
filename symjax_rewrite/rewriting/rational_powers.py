"""Powers whose exponent is a number of quarters, by square roots: x^(3/2) = x √x.

XLA's CPU compiler computes a power element by element, by calls of a library, and roots in vectors.
Softened forces (`(r² + ε)**-1.5`) and flux limiters have such powers. Values differ by a few units
in the last place. At 0, -0, ±infinity and negative numbers they are those of the power. Positive
subnormal numbers count as 0, as in XLA's square roots and quotients on CPUs. XLA's power has one
value for all of them, that of 2^-150 (float32), which differs for exponents between -1 and 1 alone.

    x**1.5 → x · √x        x**-0.25 → 1 / √√x
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.product_layouts import copy_seconds
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.rewriting.equation_forms import EquationForms, Form
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, POWERS

MOST_QUARTERS = 16  # rounding adds up in higher powers
GUARD_STEPS = 4  # comparisons and selections of special values


class RationalPowers(EquationForms):
    """Pass that computes powers by square roots."""

    rule, margin = (POWERS, ASSOCIATIVITY), "dominating"
    primitives, dtypes = frozenset({"pow"}), ("float32", "float64")

    def form(
        self, e: Equation, context: Context, unstored: Callable[[], float | None]
    ) -> Form | None:
        """Return a power with a literal exponent as a product of powers and roots."""
        exponent = e.invals[1]
        if not jax_internals.is_literal(exponent) or not context.reorders():
            return None
        quarters = 4 * float(exponent.val)
        if quarters % 1 or quarters % 4 == 0 or abs(quarters) > MOST_QUARTERS:
            return None
        if quarters == 2:  # XLA computes the root itself
            return None
        made = int(quarters)
        return lambda *args: power(args[0], made), _seconds(e, made, context.device)


def _seconds(e: Equation, quarters: int, device: Device) -> tuple[float, float]:
    """Return the seconds of the power, and of its roots and products."""
    x: Any = e.eqn.invars[0].aval
    whole, rest = divmod(abs(quarters), 4)
    roots = 1 + rest % 2 + (quarters < 0)  # a reciprocal takes as long
    steps = roots * device.functions.root + whole + rest // 2 + GUARD_STEPS
    moved = copy_seconds(2 * x.size * x.dtype.itemsize, device)
    each = x.size / device.folds.fused_steps_per_s
    return moved + device.functions.power * each, moved + steps * each


def power(x: Any, quarters: int) -> Any:
    """Return x to the power of some quarters, which are no whole number.

    x: real floats, any shape.
    """
    negative = lax.lt(x, lax.full_like(x, 0)) & lax.gt(x, lax.full_like(x, -np.inf))
    x = lax.select(negative, lax.full_like(x, np.nan), lax.abs(x))  # of -0, -infinity
    whole, rest = divmod(abs(quarters), 4)
    root = lax.sqrt(x)
    made = {1: lambda: lax.sqrt(root), 2: lambda: root, 3: lambda: root * lax.sqrt(root)}[rest]()
    if whole:
        # Of a power whose inverse is in range, 4 times the power is.
        made = lax.integer_pow(x, whole) * (made if quarters > 0 else 4 * made)
    return made if quarters > 0 else lax.div(lax.full_like(made, 4 if whole else 1), made)
