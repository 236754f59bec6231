"""The place of an extremum, as two reductions: argmax x = min {i : xᵢ = max x}.

XLA's CPU compiler reduces pairs of a value and its place one by one. The maximum, and the least of
the places where it stands, are reductions of numbers, which it does in vectors. The values are the
same: the first place of equal extrema, and of the first NaN where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from jax import lax

from symjax_rewrite.candidates import Candidate, Context
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.cost.term_cost import itemsize
from symjax_rewrite.ir.dataflow import makers_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import holds
from symjax_rewrite.rewriting.equation_forms import form, is_in_place
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, PLACES
from symjax_rewrite.rewriting.stored_operands import unstored_bytes

DTYPES = ("float32", "bfloat16", "float16")


class ExtremumPlaces:
    """Pass that finds the place of an extremum by its value."""

    name = PLACES

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the searches along long axes."""
        device = context.device
        if not (context.runs(self.name) and math.isfinite(device.folds.argmax_passes)):
            return
        found = [e for e in program.equations if e.name in ("argmax", "argmin") and _is_plain(e)]
        makers = makers_of(program.equations) if found else {}
        for e in found:
            count = math.prod(shape_of(e.eqn.invars[0]))
            # What XLA computes in the loop of the search would be written, and read twice. The
            # places are written too: in fresh memory that takes as long as XLA's search.
            computed = unstored_bytes(program, e, makers) != 0
            if (
                computed
                or device.page_seconds(count * itemsize("float32"))
                or _is_strided(e, device)
            ):
                continue
            seconds = _seconds(e, device)
            if margins.pays(*seconds, "dominating", device):
                yield form((PLACES, ASSOCIATIVITY), e, _by_value(e), seconds)


def _is_plain(e: Equation) -> bool:
    """Return True for a search along one axis of an array of static sizes, in one place."""
    aval: Any = e.eqn.invars[0].aval
    return (
        is_in_place(e)
        and len(e.eqn.params["axes"]) == 1
        and aval.dtype in DTYPES
        and holds("float32", 0, 2 * aval.shape[e.eqn.params["axes"][0]])
    )


def _is_strided(e: Equation, device: Device) -> bool:
    """Return True if the extremum itself is found element by element."""
    aval: Any = e.eqn.invars[0].aval
    after = math.prod(aval.shape[e.eqn.params["axes"][0] + 1 :])
    return device.columns is not None and after * itemsize("float32") > device.columns.row_bytes


def _seconds(e: Equation, device: Device) -> tuple[float, float]:
    """Return the seconds as XLA searches, and by value."""
    folds, shape = device.folds, shape_of(e.eqn.invars[0])
    count, length = math.prod(shape), shape[e.eqn.params["axes"][0]]
    steps = folds.plain_steps(e.name, count / length, length), folds.argmax_passes * count
    return steps[0] / folds.fused_steps_per_s, steps[1] / folds.fused_steps_per_s


def _by_value(e: Equation) -> Callable[[Any], Any]:
    """Return the function of the array that gives the places."""
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
