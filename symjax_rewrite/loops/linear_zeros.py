"""Evaluation of equations whose operands include symbolic zeros, such as absent cotangents.

As in JAX's own reverse mode, the product of a zero cotangent and any value is zero and costs
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from symjax_rewrite import jax_axes, jax_internals
from symjax_rewrite.jax_internals import JaxprEqn

# Zero if the first operand is zero.
LINEAR = frozenset(
    """broadcast_in_dim convert_element_type copy cumsum div dynamic_slice gather neg
    reduce_precision reduce_sum reshape rev slice squeeze transpose""".split()
)
PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "mul"})  # zero if any operand is zero
SUMS = frozenset({"add", "add_any", "concatenate", "sub"})  # zero if all operands are zero


def run_with_zeros(eqns: Sequence[JaxprEqn], env: dict[Any, Any]) -> None:
    """Run equations in order; a value that is None in `env` is zero."""
    for eqn in eqns:
        read = jax_internals.read_atoms(eqn.invars, env)
        zero = [x is None for x in read]
        if any(zero) and _is_zero(eqn, zero):
            env.update(dict.fromkeys(eqn.outvars))
        elif any(zero) and (kept := _summand(eqn, read)) is not None:
            env[eqn.outvars[0]] = kept
        else:
            given = [with_zero(x, v.aval) for x, v in zip(read, eqn.invars, strict=True)]
            env.update(zip(eqn.outvars, jax_internals.eval_equation(eqn, given), strict=True))


def with_zero(value: Any, aval: Any) -> Any:
    """Return the value, or zeros of an aval if the value is None."""
    return jax_axes.zeros(aval) if value is None else value


def _is_zero(eqn: JaxprEqn, zero: Sequence[bool]) -> bool:
    name = eqn.primitive.name
    if name in LINEAR:
        return zero[0]
    if name == "select_n":
        return all(zero[1:])
    return name in PRODUCTS or (name in SUMS and all(zero))


def _summand(eqn: JaxprEqn, read: Sequence[Any]) -> Any:
    """Return the value of a sum of two operands if one operand is zero, else None."""
    name = eqn.primitive.name
    if name == "sub":
        return read[0] if read[0] is not None else lax.neg(read[1])
    if name in ("add", "add_any"):
        return read[0] if read[0] is not None else read[1]
    return None
