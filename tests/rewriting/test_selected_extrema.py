"""Selections by the sign of a value are extrema where that changes no bit."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.cost.device_profiles import CPU

X, Y = (jax.random.normal(jax.random.key(n), (400, 64)) for n in (0, 1))
A = jnp.linspace(-1, 1, 64)
ENDS = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45])
EXTREMA = {
    "leaky": lambda x: jax.nn.leaky_relu(x, 0.2),
    "steeper below": lambda x: jnp.where(x <= 0, 3 * x, x),
    "number first": lambda x: jnp.where(jax.lax.lt(jnp.zeros_like(x), x), 0.5 * x, 2.5 * x),
}
OTHERS = {
    "another threshold": lambda x: jnp.where(x > 1, x, 0.2 * x),
    "a negative multiple": lambda x: jnp.where(x > 0, x, -0.2 * x),
    "zero for NaN": lambda x: jnp.where(x > 0, x, 0.0),
    "infinite": lambda x: jnp.where(x > 0, x, jnp.inf * x),
    "zero in float32": lambda x: jnp.where(x > 0, x, 1e-46 * x),
    "of integers that wrap": lambda x: jnp.where((n := jnp.int32(2**28 * x)) > 0, 8 * n, n).astype(
        "float32"
    ),
    "a number cast to integers": lambda x: jnp.where(
        x > 0, x, jnp.full(64, 1.4).astype(jnp.int32) * x
    ),
    "another value": lambda x: jnp.where(x > 0, x, 0.2 * (x + 1)),
}


def text(fun: Callable) -> str:
    return str(sym_optimize(fun, device="cpu").explain(X, Y, A).after.jaxpr)


def attention(f: Callable) -> Callable:
    return lambda x, y, a: f(x[:, None] + y) @ a


@pytest.mark.skipif(CPU.fusions is None, reason="no prices")
@pytest.mark.parametrize("name", EXTREMA)
def test_selection_becomes_extremum(name):
    f = EXTREMA[name]
    ours = text(attention(f))
    assert "select_n" not in ours and (" max " in ours or " min " in ours)
    ends = jnp.resize(ENDS, (400, 64))
    summed = lambda x, y, a: jnp.sum(f(x[:, None] + y) ** 2, -1)  # noqa: E731
    found, want = sym_optimize(summed, device="cpu")(ends, 0 * Y, A), summed(ends, 0 * Y, A)
    np.testing.assert_array_equal(found, want)
    found, want = sym_optimize(attention(f), device="cpu")(X, Y, A), attention(f)(X, Y, A)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_selections_stay(name):
    assert "select_n" in text(attention(OTHERS[name]))


@pytest.mark.skipif(CPU.fusions is None, reason="no prices")
def test_sums_of_selections_are_priced_as_stored():
    """XLA's library computes an extremum within a sum; it reads a selection from memory."""
    seconds = [
        sym_optimize(lambda x, y, f=f: jnp.sum(f(x[:, None] + y), -1), device="cpu").explain(X, Y)
        .before.seconds
        for f in (lambda s: jnp.where(s > 1, s, 0.2 * s), lambda s: jnp.maximum(s, 0.2 * s + 0.8))
    ]  # fmt: skip
    assert seconds[0] - seconds[1] > 2 * 4 * 400 * 400 * 64 / CPU.bytes_per_s
