"""Reductions down the columns of a matrix with long rows, row by row.

Σₖ X[k, …] = 1ᵀ X, and a maximum over rows can be taken one row after another. XLA's CPU library
reduces element by element, each at a stride, where a row of the result exceeds 64 KiB: ten to a
hundred times slower, until jaxlib 0.11.0 (experiments/orientation). Means over an ensemble, and
sums of gradients over examples or of experts' outputs, have such rows. A sum may be rounded in
another order. A sum of `x * a[:, None]` is left to the library, which computes it as `a @ x`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context
from symjax_rewrite.cost.library_calls import is_product_with_vector
from symjax_rewrite.cost.product_layouts import column_seconds
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.rewriting.equation_forms import EquationForms, Form
from symjax_rewrite.rewriting.rule import COLUMNS, LOCALITY

EXTREMA = {"reduce_max": lax.max, "reduce_min": lax.min}


class ColumnReductions(EquationForms):
    """Pass that reduces the columns of a matrix with long rows row by row."""

    rule, margin = (COLUMNS, LOCALITY), "orientation"
    primitives, dtypes = frozenset({"reduce_sum", *EXTREMA}), ("float32", "float64")

    def leaves(self, e: Equation, makers: Mapping[int, Equation]) -> bool:
        """Return True for a sum that XLA's library computes as a product."""
        return is_product_with_vector(e, makers)

    def form(
        self, e: Equation, context: Context, unstored: Callable[[], float | None]
    ) -> Form | None:
        """Return a reduction of adjacent axes, which XLA does element by element, row by row."""
        x: Any = e.eqn.invars[0].aval
        device, axes = context.device, sorted(e.eqn.params["axes"])
        if device.columns is None or not axes or axes != [*range(axes[0], axes[-1] + 1)]:
            return None
        # A loop over rows that lie on several devices would gather them.
        is_sum, is_apart = e.name == "reduce_sum", jax_internals.may_be_partitioned()
        if not context.reorders() if is_sum else is_apart:
            return None
        matrices, rows = math.prod(x.shape[: axes[0]]), math.prod(x.shape[k] for k in axes)
        if matrices > device.columns.matrices or rows < 2 or (written := unstored()) is None:
            return None
        sizes = (matrices, rows, x.size // (matrices * rows))
        seconds = column_seconds(e.name, sizes, str(x.dtype), written, device)
        return _by_rows(e, sizes), seconds


def _by_rows(e: Equation, sizes: tuple[int, int, int]) -> Callable[[Any], Any]:
    """Return the function of the array, as matrices, rows and columns, that gives its reduction."""
    reduced = _summed if e.name == "reduce_sum" else _extremum(EXTREMA[e.name])
    aval: Any = e.eqn.outvars[0].aval
    return lambda x: lax.reshape(reduced(lax.reshape(x, sizes)), aval.shape)


def _summed(x: Any) -> Any:
    """Return 1ᵀ X of each matrix, which XLA's library computes row by row."""
    axes = (((1,), (1,)), ((0,), (0,)))
    return lax.dot_general(jnp.ones(x.shape[:2], x.dtype), x, axes, lax.Precision.HIGHEST)


def _extremum(combine: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return the function of matrices that combines one row after another."""

    def run(x: Any) -> Any:
        def step(k: Any, row: Any) -> Any:
            return combine(row, lax.dynamic_index_in_dim(x, k, 1, keepdims=False))

        return lax.fori_loop(1, x.shape[1], step, x[:, 0])

    return run
