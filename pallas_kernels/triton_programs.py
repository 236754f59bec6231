"""Elementwise programs as Pallas-Triton computes them (may import the ground layer alone).

Pallas-Triton lowers maxima and minima to instructions that drop a NaN, where XLA keeps the NaN. It
lowers an exponential to a library function of nine instructions, where two do. It has no lowering
rule for some operations. This module handles these for every kind of kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals, jax_kernels

Array = Any
Fun = Callable[..., Any]
LOG2_E = math.log2(math.e)


def unlowered(*programs: tuple[Fun, tuple[Any, ...]]) -> tuple[str, ...]:
    """Return the names of operations that Pallas-Triton has no rule for.

    Args:
        programs: functions, each with its arguments as avals.

    Example:
        >>> unlowered((lax.erf, (jax.ShapeDtypeStruct((16,), "float32"),)))
        ('erf',)
    """
    traced = [jax.make_jaxpr(fun)(*avals) for fun, avals in programs]
    found = set().union(*map(jax_kernels.primitives, traced))
    return tuple(sorted(p.name for p in found if not jax_kernels.triton_lowers(p)))


def keeping_nan(fun: Fun) -> Fun:
    """Return a function whose float maxima and minima are NaN where an operand is NaN.

    Example:
        >>> keeping_nan(jnp.maximum)(jnp.float32("nan"), 0.0)
        Array(nan, dtype=float32)
    """
    return _by_rules(_EXTREMA, fun)


def for_triton(fun: Fun) -> Fun:
    """Return a function as `keeping_nan` does, with exponentials of f32 by `exp`."""
    return _by_rules(_EXTREMA | {"exp": _exponential}, fun)


class _Operand(NamedTuple):
    """A value of a program in a loop.

    is_fixed: True if no step changes it. factors: of a product, else empty.
    """

    value: Array
    is_fixed: bool
    factors: tuple[_Operand, _Operand] | None = None


def for_triton_loop(fun: Fun, is_fixed: Sequence[bool]) -> Fun:
    """Return a function as `for_triton` does, for a loop whose steps do not change some arguments.

    In `exp(a·b)` with b of these, b is multiplied by log2 e, which the compiler does once, before
    the loop.

    Args:
        fun: an elementwise program.
        is_fixed: by argument, as leaves of a pytree.
    """

    def apart(*args: Any) -> Any:
        closed, tree = jax_internals.make_jaxpr(fun, *args)
        if "exp" not in jax_kernels.float_primitives(closed):
            return fun(*args)
        given = map(_Operand, jax.tree.leaves(args), is_fixed)
        outs = _with_factors(closed, [*given])
        return jax.tree.unflatten(tree, [_operand(x).value for x in outs])

    return for_triton(apart)


def _with_factors(closed: Any, args: Sequence[Any]) -> list[Any]:
    def run(eqn: Any, operands: list[Any]) -> list[Any]:
        known = [_operand(x) for x in operands]
        if eqn.primitive.name == "exp" and (made := _exp_of_product(known[0])) is not None:
            return [_Operand(made, False)]
        outs = jax_internals.eval_equation(eqn, [k.value for k in known])
        factors = (known[0], known[1]) if eqn.primitive.name == "mul" else None
        is_fixed = all(k.is_fixed for k in known)
        return [_Operand(x, is_fixed, factors) for x in outs]

    return jax_internals.eval_inlined(closed, args, run)


def _operand(x: Any) -> _Operand:
    return x if isinstance(x, _Operand) else _Operand(x, True)


def _exp_of_product(x: _Operand) -> Array | None:
    """Return e^x by a power of two if x is a product of one fixed factor and another in f32."""
    if x.factors is None or x.value.dtype != jnp.float32:
        return None
    first, other = x.factors
    if first.is_fixed == other.is_fixed:
        return None
    fixed, moving = (first, other) if first.is_fixed else (other, first)
    return jax_kernels.power_of_two(moving.value * (fixed.value * LOG2_E))


def exp(x: Array, factor: float = 1.0) -> Array:
    """Return e^(x·factor) of f32 as a power of two; results below 2^-126 are 0.

    The result is e^(x·factor·(1 + ε)) to 2 units in the last place, with ε at most 2^-23: the
    exponent is rounded once, as x itself was where it was computed.
    """
    return jax_kernels.power_of_two(x * (LOG2_E * factor))


def _by_rules(rules: dict[str, Fun], fun: Fun) -> Fun:
    def ruled(*args: Any) -> Any:
        closed, tree = jax_internals.make_jaxpr(fun, *args)
        if not rules.keys() & jax_kernels.float_primitives(closed):
            return fun(*args)
        outs = jax_kernels.eval_with(rules, closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(tree, outs)

    return ruled


def _exponential(original: Fun, x: Array, **_: Any) -> Array:
    return exp(x) if x.dtype == jnp.float32 else original(x)


def _extremum(original: Fun, x: Array, y: Array, **_: Any) -> Array:
    return _first_nan(x, _first_nan(y, original(x, y)))


def _first_nan(x: Array, other: Array) -> Array:
    return jnp.where(x != x, x, other)


def _clamp(_: Fun, low: Array, x: Array, high: Array, **__: Any) -> Array:
    bounds = (jnp.broadcast_to(b, x.shape) for b in (low, high))
    return keeping_nan(lambda x, low, high: lax.min(lax.max(x, low), high))(x, *bounds)


def _reduced(original: Fun, x: Array, *, axes: tuple[int, ...], **_: Any) -> Array:
    made = original(x)
    broken = jnp.max((x != x).astype(jnp.int32), axis=axes)
    return jnp.where(broken != 0, jnp.full_like(made, jnp.nan), made)


_EXTREMA = {
    "max": _extremum,
    "min": _extremum,
    "clamp": _clamp,
    "reduce_max": _reduced,
    "reduce_min": _reduced,
}
