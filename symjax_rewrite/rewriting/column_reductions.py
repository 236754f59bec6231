"""Reductions down the columns of a matrix with long rows, row by row.

Σₖ X[k, …] = 1ᵀ X, and the maximum over rows is that of one row after another. XLA's CPU library
reduces element by element, each at a stride, where a row of the result exceeds 64 KiB: ten to a
hundred times slower, until jaxlib 0.11.0 (experiments/orientation). Means over an ensemble, and
sums of gradients over examples or of experts' outputs, have such rows. A sum may be rounded in
another order.
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
from symjax_rewrite.cost.product_layouts import column_seconds
from symjax_rewrite.ir.dataflow import makers_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.rewriting.equation_forms import form, is_in_place
from symjax_rewrite.rewriting.rule import COLUMNS, LOCALITY
from symjax_rewrite.rewriting.stored_operands import unstored_bytes

DTYPES = ("float32", "float64")
EXTREMA = {"reduce_max": lax.max, "reduce_min": lax.min}


class ColumnReductions:
    """Pass that reduces the columns of a matrix with long rows row by row."""

    name = COLUMNS

    def candidates(self, program: Program, context: Context) -> Iterator[Candidate]:
        """Yield the reductions that XLA does element by element."""
        device = context.device
        if device.columns is None or not context.runs(self.name):
            return
        names = {"reduce_sum"} if context.reorders() else set()
        if not jax_internals.may_be_partitioned():  # a loop over rows would gather them
            names |= EXTREMA.keys()
        found = [e for e in program.equations if e.name in names and _is_plain(e)]
        makers = makers_of(program.equations) if found else {}
        for e in found:
            x: Any = e.eqn.invars[0].aval
            matrices, rows = _split(e)
            unstored = unstored_bytes(program, e, makers)
            if matrices > device.columns.matrices or rows < 2 or unstored is None:
                continue
            sizes = (matrices, rows, x.size // (matrices * rows))
            seconds = column_seconds(e.name, sizes, str(x.dtype), unstored, device)
            if margins.pays(*seconds, "orientation", device):
                yield form((COLUMNS, LOCALITY), e, _by_rows(e, sizes), seconds)


def _is_plain(e: Equation) -> bool:
    """Return True for a reduction of adjacent axes of one array of static sizes, in one place."""
    aval: Any = e.eqn.invars[0].aval
    axes = sorted(e.eqn.params["axes"])
    return (
        bool(axes)
        and is_in_place(e)
        and axes == list(range(axes[0], axes[-1] + 1))
        and aval.dtype in DTYPES
    )


def _split(e: Equation) -> tuple[int, int]:
    """Return the elements along the axes before the reduced ones, and along the reduced ones."""
    aval: Any = e.eqn.invars[0].aval
    axes = e.eqn.params["axes"]
    return math.prod(aval.shape[: min(axes)]), math.prod(aval.shape[k] for k in axes)


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
