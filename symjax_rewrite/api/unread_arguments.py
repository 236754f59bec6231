"""Inputs that a program reads and its optimised form does not.

`concatenate([a, b])[:n]` reads `b`; its form `a` does not. Derivatives are taken of the original,
so `b` can be omitted only if no derivative of the original depends on `b`. This holds if everything
computed from `b` is smooth: a smooth function that is constant in `b` has zero derivatives with
respect to `b`, and its other derivatives are constant in `b`. Functions with custom derivatives
give no such guarantee: `y + x - stop_gradient(x)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from symjax_rewrite import jax_internals
from symjax_rewrite.ir.dataflow import dependents, numbers
from symjax_rewrite.ir.flat_program import RULED, Equation, flatten
from symjax_rewrite.jax_internals import ClosedJaxpr

# Primitives that are smooth everywhere, and finite at ones if finite elsewhere. All are linear,
# polynomial or bounded in each float operand; operands of other dtypes are not considered.
SMOOTH = frozenset(
    "add add_any sub mul neg square dot_general conv_general_dilated reduce_sum cumsum concatenate "
    "slice dynamic_slice dynamic_update_slice gather scatter-add select_n reshape broadcast_in_dim "
    "transpose squeeze rev pad split stack tile copy convert_element_type tanh erf "
    "logistic sin cos".split()
)
OWN_DERIVATIVES = RULED | {"stop_gradient", "custom_linear_solve"}


def with_ones(closed: ClosedJaxpr, values: Sequence[Any], read: Sequence[bool]) -> ClosedJaxpr:
    """Return the program with ones in place of inputs that it does not depend on.

    values: its inputs, arrays or tracers. read: the inputs that the optimised form reads.
    """
    mine = jax_internals.live_part(closed, [True] * len(closed.jaxpr.outvars))[1]
    only = [
        k
        for k, r in enumerate(mine)
        if r and not read[k] and jax_internals.is_float(closed.in_avals[k])
    ]
    if not only or any(jax_internals.has_primitive(closed, name) for name in OWN_DERIVATIVES):
        return closed
    program = flatten(closed, has_rules=True)
    free = {k for k in only if _is_smooth_in(program.equations, program.inputs[k])}
    if not free:
        return closed

    def run(*given: Any) -> list[Any]:
        full = list(given)
        for k in free:
            aval = closed.in_avals[k]
            full[k] = jax_internals.with_aval(jnp.ones(aval.shape, aval.dtype), aval)
        return jax_internals.eval_jaxpr(closed, *full)

    return jax_internals.make_jaxpr(run, *values)[0]


def _is_smooth_in(equations: Sequence[Equation], value: int) -> bool:
    """Return True if everything computed from a value is a smooth function of it."""
    reached = {value}
    for e in dependents(equations, [value]):
        if not _is_smooth(e, reached):
            return False
        reached.update(e.outvals)
    return True


def _is_smooth(e: Equation, reached: set[int]) -> bool:
    """Return True if an equation is smooth in its float operands among some values."""
    if not all(jax_internals.is_float(v.aval) for v in e.eqn.outvars):
        return False
    if e.name == "div":
        return reached.isdisjoint(numbers(e.invals[1:]))
    return e.name in SMOOTH or (e.name == "integer_pow" and e.eqn.params["y"] >= 0)
