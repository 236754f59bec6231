"""Reductions down the columns of a matrix with long rows, row by row.

Σₖ X[k, …] = 1ᵀ X, and the maximum over rows is that of one row after another. XLA's CPU compiler
keeps a row of partial results on the stack; where the row is longer than that, it reduces element
by element, each at a stride: ten to a hundred times slower. Means over an ensemble, and sums of
gradients over examples or of experts' outputs, have such rows. A sum may be rounded in another
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Candidate, Context, Replacement
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.product_layouts import column_seconds
from symjax_rewrite.cost.term_cost import Cost
from symjax_rewrite.ir.dataflow import makers_of
from symjax_rewrite.ir.flat_program import Equation, Program
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
        allowed = context.allowed is None or self.name in context.allowed
        if device.columns is None or not (context.has(self.name) and allowed):
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
            columns = x.size // (matrices * rows)
            before, after = column_seconds(
                e.name, (matrices, rows, columns), str(x.dtype), unstored, device
            )
            if margins.pays(before, after, "orientation", device):
                yield _candidate(e, (matrices, rows, columns), before, after)


def _is_plain(e: Equation) -> bool:
    """Return True for a reduction of adjacent axes of one array of static sizes, in one place."""
    aval: Any = e.eqn.invars[0].aval
    axes = sorted(e.eqn.params["axes"])
    shardings = (e.eqn.params.get("out_sharding"), getattr(aval, "sharding", None))
    return (
        bool(axes)
        and isinstance(e.invals[0], int)
        and axes == list(range(axes[0], axes[-1] + 1))
        and aval.dtype in DTYPES
        and all(isinstance(n, int) and n > 0 for n in aval.shape)
        and not any(map(jax_internals.constrains, shardings))
    )


def _split(e: Equation) -> tuple[int, int]:
    """Return the elements along the axes before the reduced ones, and along the reduced ones."""
    aval: Any = e.eqn.invars[0].aval
    axes = e.eqn.params["axes"]
    return math.prod(aval.shape[: min(axes)]), math.prod(aval.shape[k] for k in axes)


def _candidate(e: Equation, sizes: tuple[int, int, int], before: float, after: float) -> Candidate:
    by_rows = _summed if e.name == "reduce_sum" else _extremum(EXTREMA[e.name])
    shape = e.eqn.outvars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]

    def run(x: Any) -> Any:
        return lax.reshape(by_rows(lax.reshape(x, sizes)), shape)

    return Candidate(
        COLUMNS,
        (Replacement(e.outvals, e.invals, run, source=e.eqn),),
        e.where(),
        rules=((COLUMNS, LOCALITY),),
        before=Cost(seconds=before),
        after=Cost(seconds=after),
        key=COLUMNS,
        share=True,
    )


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
