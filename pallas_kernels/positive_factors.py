"""Elementwise programs without a constant positive factor of their results.

The maximum of x·k is k times the maximum of x, and e^(x·k - m·k) is e^((x - m)·k). A kernel that
sums exponentials multiplies by k where it multiplies by log2 e anyway, so that a scale of scores
costs nothing per pair (may import the ground layer alone).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals

Array = Any
LEAST_FACTOR = 2.0**-20  # of a smaller one the product may underflow where the operand does not


class Scaled(NamedTuple):
    """A value, and the same without a factor: `value == base * factor`.

    factor: 0 < factor <= 1; None for -inf, which has any factor. constant: the value itself, if it
    is one number.
    """

    value: Array
    base: Array
    factor: float | None = 1.0
    constant: float | None = None


def without_factors(fun: Callable[..., Any], *given: Any) -> list[Scaled]:
    """Return the results of an elementwise program with their factors.

    Example:
        >>> (x,) = without_factors(lambda x: jnp.where(x > 0, x / 8, -jnp.inf), jnp.ones(2))
        >>> x.factor, x.base
        (0.125, Array([1., 1.], dtype=float32))
    """
    closed, _ = jax_internals.make_jaxpr(fun, *given)
    return [_known(x) for x in _evaluate(closed, jax.tree.leaves(given))]


def _evaluate(closed: Any, args: Sequence[Any]) -> list[Any]:
    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        known = [_known(x) for x in operands]
        outs = jax_internals.eval_equation(eqn, [k.value for k in known])
        rule = _RULES.get(eqn.primitive.name)
        if rule is None or outs[0].dtype != jnp.float32:
            return outs
        return [rule(eqn, outs[0], known)]

    return jax_internals.eval_inlined(closed, args, run)


def _known(x: Any) -> Scaled:
    if isinstance(x, Scaled):
        return x
    if isinstance(x, (float, np.ndarray, np.generic)) and np.ndim(x) == 0:
        number = float(x)
        return Scaled(x, x, None if number == -float("inf") else 1.0, number)
    return Scaled(x, x)


def _scaled(value: Array, base: Scaled, factor: float) -> Scaled:
    """Return a value that is another one times a number, with this number as a factor."""
    total = factor * (base.factor or 1.0)
    if base.factor is None or not LEAST_FACTOR <= total <= 1 or not factor > 0:
        return Scaled(value, value)
    return Scaled(value, base.base, total)


def _product(eqn: Any, value: Array, known: Sequence[Scaled]) -> Scaled:
    del eqn
    for number, other in (known, known[::-1]):
        if number.constant is not None and np.shape(other.base) == value.shape:
            return _scaled(value, other, number.constant)
    return Scaled(value, value)


def _quotient(eqn: Any, value: Array, known: Sequence[Scaled]) -> Scaled:
    del eqn
    above, below = known
    if not below.constant or np.shape(above.base) != value.shape:
        return Scaled(value, value)
    return _scaled(value, above, 1 / below.constant)


def _choice(eqn: Any, value: Array, known: Sequence[Scaled]) -> Scaled:
    which, *cases = known
    factors = {c.factor for c in cases} - {None}
    if len(factors) != 1 or factors == {1.0}:
        return Scaled(value, value)
    made = jax_internals.eval_equation(eqn, [which.value, *(c.base for c in cases)])
    return Scaled(value, made[0], factors.pop())


def _shaped(eqn: Any, value: Array, known: Sequence[Scaled]) -> Scaled:
    x = known[0]
    (base,) = jax_internals.eval_equation(eqn, [x.base])
    return Scaled(value, base, x.factor, x.constant)


_RULES = {
    "mul": _product,
    "div": _quotient,
    "select_n": _choice,
    "broadcast_in_dim": _shaped,
    "convert_element_type": _shaped,
}
