"""The place of an extremum, as two reductions: argmax x = min {i : xᵢ = max x}.

XLA's CPU compiler reduces pairs of a value and its place one by one. The maximum, and the least of
the places where it stands, are reductions of numbers, which it does in vectors. The values are the
same: the first place of equal extrema, and of the first NaN where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax import lax

from symjax_rewrite.candidates import Context
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.cost.term_cost import itemsize
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.primitives import holds
from symjax_rewrite.rewriting.equation_forms import EquationForms, Form
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, PLACES


class ExtremumPlaces(EquationForms):
    """Pass that finds the place of an extremum by its value."""

    rule, margin = (PLACES, ASSOCIATIVITY), "dominating"
    primitives, dtypes = ("argmax", "argmin"), ("float32", "bfloat16", "float16")

    def form(
        self, e: Equation, context: Context, unstored: Callable[[], float | None]
    ) -> Form | None:
        """Return a search along one long axis by value."""
        device, shape, axes = context.device, shape_of(e.eqn.invars[0]), e.eqn.params["axes"]
        if not math.isfinite(device.folds.argmax_passes) or len(axes) != 1:
            return None
        bytes_wide = math.prod(shape) * itemsize("float32")
        # The extremum itself would be found element by element.
        row_bytes = math.prod(shape[axes[0] + 1 :]) * itemsize("float32")
        is_strided = device.columns is not None and row_bytes > device.columns.row_bytes
        if is_strided or not holds("float32", 0, 2 * shape[axes[0]]):
            return None
        # An operand that XLA computes in the loop of the search would be written, and read twice.
        # The places are written too: in fresh memory that takes as long as XLA's search.
        if device.page_seconds(bytes_wide) or unstored() != 0:
            return None
        before_s, after_s = _seconds(e, device)
        return _by_value(e), (before_s, after_s + device.page_seconds(2 * bytes_wide))


def _seconds(e: Equation, device: Device) -> tuple[float, float]:
    """Return the seconds as XLA searches, and by value."""
    folds, shape = device.folds, shape_of(e.eqn.invars[0])
    count, length = math.prod(shape), shape[e.eqn.params["axes"][0]]
    steps = folds.plain_steps(e.name, count / length, length), folds.argmax_passes * count
    return steps[0] / folds.fused_steps_per_s, steps[1] / folds.fused_steps_per_s


def _by_value(e: Equation) -> Callable[[Any], Any]:
    (axis,), dtype = e.eqn.params["axes"], e.eqn.params["index_dtype"]
    is_max = e.name == "argmax"

    def run(x: Any) -> Any:
        x = lax.convert_element_type(x, "float32")
        n = x.shape[axis]
        best = (lax.reduce_max if is_max else lax.reduce_min)(x, (axis,))
        kept = [k for k in range(x.ndim) if k != axis]
        equal = lax.eq(x, lax.broadcast_in_dim(best, x.shape, kept))
        left = lax.sub(lax.full_like(x, n), lax.broadcasted_iota("float32", x.shape, axis))
        # n - i where it stands; above n at a NaN, which XLA's own extremum may lose
        found = lax.select(equal, left, lax.full_like(x, -1))
        found = lax.select(lax.ne(x, x), lax.add(left, lax.full_like(x, n)), found)
        most = lax.reduce_max(found, (axis,))
        count = lax.full_like(most, n)
        most = lax.select(lax.gt(most, count), lax.sub(most, count), most)
        return lax.convert_element_type(lax.sub(count, most), dtype)

    return run
