"""Cumulative sums, products and extrema down an array, row by row.

JAX lowers them to a tree over the scanned axis, whose levels XLA's CPU compiler writes to memory. A
loop over the rows, each a vector along the axes behind, reads and writes the array once. A sum or
product is rounded in the order of the rows, for axes of moderate length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.cost.profile_groups import ColumnScanFacts
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.rewriting.equation_forms import form, is_in_place
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, SCANS

Combine = Callable[[Any, Any], Any]
ROUNDED: dict[str, Combine] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cumlogsumexp": jnp.logaddexp,
}
EXACT: dict[str, Combine] = {"cummax": lax.max, "cummin": lax.min}
DTYPES = ("float32", "float64", "int32")


class ColumnScans:
    """Pass that accumulates down an array row by row."""

    name = SCANS

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the cumulative operations along axes that are not the last one."""
        facts = context.device.column_scans
        # A loop over rows that lie on several devices would gather them.
        if facts is None or not context.runs(self.name) or jax_internals.may_be_partitioned():
            return
        for e in program.equations:
            if (e.name in EXACT or e.name in ROUNDED) and _is_plain(e, context, facts):
                seconds = _seconds(e, facts)
                if margins.pays(*seconds, "dominating", context.device):
                    yield form((SCANS, ASSOCIATIVITY), e, _by_rows(e), seconds)


def _is_plain(e: Equation, context: Context, facts: ColumnScanFacts) -> bool:
    """Return True for an array of static sizes, in one place, whose scan may be in order."""
    aval: Any = e.eqn.invars[0].aval
    axis = e.eqn.params["axis"]
    in_order = e.name in EXACT or aval.dtype.kind == "i"
    return (
        is_in_place(e)
        and aval.dtype in DTYPES
        and math.prod(aval.shape[axis + 1 :]) > 1
        and (in_order or (context.reorders() and aval.shape[axis] <= facts.most_steps))
    )


def _seconds(e: Equation, facts: ColumnScanFacts) -> tuple[float, float]:
    """Return the seconds as XLA accumulates, and row by row."""
    shape = shape_of(e.eqn.invars[0])
    count, steps = math.prod(shape), shape[e.eqn.params["axis"]]
    return count * facts.tree_s, count * facts.element_s + steps * facts.step_s


def _by_rows(e: Equation) -> Callable[[Any], Any]:
    """Return the function of the array that gives its prefixes."""
    axis, is_reversed = e.eqn.params["axis"], e.eqn.params["reverse"]
    combine = (EXACT | ROUNDED)[e.name]

    def run(x: Any) -> Any:
        last = x.shape[axis] - 1

        def step(k: Any, carry: Any) -> Any:
            place = last - k if is_reversed else k
            row = combine(carry[0], lax.dynamic_index_in_dim(x, place, axis))
            return row, lax.dynamic_update_index_in_dim(carry[1], row, place, axis)

        first = lax.index_in_dim(x, last if is_reversed else 0, axis)
        return lax.fori_loop(1, last + 1, step, (first, x))[1]

    return run
