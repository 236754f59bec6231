"""Cumulative sums, products and extrema down an array, row by row.

JAX lowers them to a tree over the scanned axis, whose levels XLA's CPU compiler writes to memory. A
loop over the rows, each a vector along the axes behind, reads and writes the array once. A sum or
product is rounded in the order of the rows, for axes of moderate length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.rewriting.equation_forms import EquationForms, Form
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, SCANS

Combine = Callable[[Any, Any], Any]
EXACT: dict[str, Combine] = {"cummax": lax.max, "cummin": lax.min}
COMBINE: dict[str, Combine] = EXACT | {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cumlogsumexp": jnp.logaddexp,
}


class ColumnScans(EquationForms):
    """Pass that accumulates down an array row by row."""

    rule, margin = (SCANS, ASSOCIATIVITY), "dominating"
    primitives, dtypes = frozenset(COMBINE), ("float32", "float64", "int32")

    def form(self, e: Equation, context: Context, unstored: Any) -> Form | None:
        """Return a cumulative operation along an axis that is not the last one, row by row."""
        del unstored
        x: Any = e.eqn.invars[0].aval
        facts, axis = context.device.column_scans, e.eqn.params["axis"]
        # A loop over rows that lie on several devices would gather them.
        if facts is None or jax_internals.may_be_partitioned():
            return None
        steps, columns = x.shape[axis], math.prod(x.shape[axis + 1 :])
        in_order = e.name in EXACT or x.dtype.kind == "i"
        may_be_in_order = in_order or (context.reorders() and steps <= facts.most_steps)
        if columns == 1 or not may_be_in_order:
            return None
        by_rows = x.size * facts.element_s + steps * facts.step_s
        return _by_rows(e), (x.size * facts.tree_s, by_rows)


def _by_rows(e: Equation) -> Callable[[Any], Any]:
    axis, is_reversed = e.eqn.params["axis"], e.eqn.params["reverse"]
    combine = COMBINE[e.name]

    def run(x: Any) -> Any:
        last = x.shape[axis] - 1

        def step(k: Any, carry: Any) -> Any:
            place = last - k if is_reversed else k
            row = combine(carry[0], lax.dynamic_index_in_dim(x, place, axis))
            return row, lax.dynamic_update_index_in_dim(carry[1], row, place, axis)

        first = lax.index_in_dim(x, last if is_reversed else 0, axis)
        return lax.fori_loop(1, last + 1, step, (first, x))[1]

    return run
