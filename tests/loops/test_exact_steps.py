"""Functions are compared at exact points: equal, different, or undecided."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import flatten
from symjax_rewrite.loops.exact_steps import (
    NAN,
    Sampler,
    Undecided,
    compared,
    greatest,
    one_like,
    run_exactly,
)

SPECS = [jax.ShapeDtypeStruct((3,), jnp.float32)] * 3
COUNTS = [jax.ShapeDtypeStruct((3,), jnp.int32)] * 3

EQUAL = {
    "a larger value": (lambda a, b, c: lax.max(a, b), lambda a, b, c: jnp.where(a > b, a, b)),
    "nested maxima": (
        lambda a, b, c: lax.max(lax.max(a, b), c), lambda a, b, c: lax.max(a, lax.max(b, c)),
    ),
    "exponentials": (lambda a, b, c: jnp.exp(a + b), lambda a, b, c: jnp.exp(b) * jnp.exp(a)),
    "a quotient": (lambda a, b, c: a / b / c, lambda a, b, c: a / (b * c)),
    "a logarithm": (lambda a, b, c: jnp.log(jnp.exp(a) * jnp.exp(b)), lambda a, b, c: a + b),
    "a shift": (lambda a, b, c: jnp.log1p(jnp.exp(a)), lambda a, b, c: jnp.log(1 + jnp.exp(a))),
    "a mask": (
        lambda a, b, c: jnp.exp(a + jnp.where(b > c, 0.0, -jnp.inf)),
        lambda a, b, c: jnp.where(b > c, jnp.exp(a), 0.0),
    ),
    "an order of sums": (lambda a, b, c: (a + b) + c, lambda a, b, c: a + (c + b)),
    "a size": (lambda a, b, c: jnp.abs(a), lambda a, b, c: jnp.where(a >= 0, a, -a)),
    "sums of rows": (lambda a, b, c: jnp.sum(a) * b, lambda a, b, c: jnp.dot(a, jnp.ones(3)) * b),
}  # fmt: skip
DIFFERENT = {
    "a smaller value": (lambda a, b, c: lax.max(a, b), lambda a, b, c: lax.min(a, b)),
    "a product": (lambda a, b, c: a * b, lambda a, b, c: a + b),
    "another operand": (lambda a, b, c: jnp.exp(a), lambda a, b, c: jnp.exp(b)),
    "a number": (lambda a, b, c: 2 * a, lambda a, b, c: 2.0000002 * a),
}
UNDECIDED = {
    "a threshold": lambda a, b, c: jnp.where(a > 1, b, c),
    "an order of sums of entries": lambda a, b, c: lax.max(a + b, c),
    "an infinite exponential": lambda a, b, c: jnp.exp(a - (-jnp.inf)),
    "opposite infinities": lambda a, b, c: a + jnp.inf - jnp.inf,
    "a multiple of an infinity": lambda a, b, c: a * jnp.inf,
    "a division by zero": lambda a, b, c: a / 0.0,
    "a logarithm of zero": lambda a, b, c: jnp.log(a - a),
    "a negative power": lambda a, b, c: lax.integer_pow(a, -2),
    "a sine": lambda a, b, c: jnp.sin(a),
    "half precision": lambda a, b, c: a.astype(jnp.float16),
    "a rounding": lambda a, b, c: a.astype(jnp.int32),
    "another shape": lambda a, b, c: jnp.stack([a, b]).reshape(3, 2),
}


def points(*funs: Callable, specs: Any = SPECS) -> list[Any]:
    """The values of functions at the same points."""
    sampler = Sampler()
    given = [sampler.entries(s.shape, s.dtype) for s in specs]
    found = []
    for fun in funs:
        program = flatten(jax.make_jaxpr(fun)(*specs))
        env = dict(zip(program.inputs, given, strict=True))
        run_exactly(program.equations, env, sampler)
        (made,) = numbers(program.outputs)
        found.append(env[made])
    return found


@pytest.mark.parametrize("name", EQUAL)
def test_equal_functions_agree(name: str) -> None:
    x, y = points(*EQUAL[name])
    assert x.is_equal(y)


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_functions_differ(name: str) -> None:
    x, y = points(*DIFFERENT[name])
    assert not x.is_equal(y)


@pytest.mark.parametrize("name", UNDECIDED)
def test_inexact_operations_are_undecided(name: str) -> None:
    with pytest.raises(Undecided):
        points(UNDECIDED[name])


def test_integers_wrap_so_that_their_differences_have_no_order() -> None:
    x, y = points(lambda a, b, c: a - b, lambda a, b, c: -(b - a), specs=COUNTS)
    assert x.is_equal(y)
    with pytest.raises(Undecided):
        points(lambda a, b, c: lax.max(a - b, jnp.zeros_like(a)), specs=COUNTS)
    with pytest.raises(Undecided):
        points(lambda a, b, c: lax.div(a, b), specs=COUNTS)


def test_large_integers_are_told_apart() -> None:
    sampler = Sampler()
    x, y = (sampler.constant(np.int64(2**60 + k)) for k in range(2))
    assert not x.is_equal(y)


def test_zeros_and_ends_are_drawn_where_asked_for() -> None:
    for zeros, ends in ((False, False), (True, False), (True, True)):
        x = Sampler(zeros, ends).entries((3,), np.dtype(np.float32))
        assert np.any((x.rank == 0) & (x.end == 0)) == zeros
        assert {*x.end.flat} == ({-1, 0, 1, NAN} if ends else {0})


def test_nan_is_larger_than_nothing_and_spreads_through_maxima() -> None:
    sampler = Sampler(ends=True)
    x, y = (sampler.entries((3,), np.dtype(np.float32)) for _ in range(2))
    either = (x.end == NAN) | (y.end == NAN)
    assert not np.any(compared(np.greater, x, y) & either)
    assert np.all(compared(np.not_equal, x, y) >= either)
    assert np.array_equal(greatest(x, y).end == NAN, either)
    nothing = Sampler(zeros=True).constant(0, (3,))
    assert np.array_equal((x - nothing).is_nan, x.is_nan)
    assert np.all((nothing / nothing).is_nan)
    with pytest.raises(Undecided):
        _ = one_like(nothing) / nothing
