"""Extrema of sums: a term leaves an extremum along the indices that it does not read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize

RNG = np.random.default_rng(0)
A, B = (jnp.asarray(RNG.standard_normal(600), jnp.float32) for _ in range(2))
M = jnp.asarray(RNG.standard_normal((600, 40)), jnp.float32)

SEPARATED = {
    "rows": lambda a, b: jnp.max(a[:, None] - b, 1),
    "both": lambda a, b: jnp.min(3 * a[:, None] - 2 * b),
    "a common index": lambda a, b: jnp.max(a[:, None] + M[:, None, 0] + b[:40], (0, 1)),
    "of matrices": lambda a, b: jnp.min(M[:, None] + (b[:600, None] - M[:, :1])[None, :], (0, 1)),
    "half": lambda a, b: jnp.max(a.astype(jnp.bfloat16)[:, None] - b.astype(jnp.bfloat16), 1),
}
KEPT = {
    "integers wrap": lambda a, b: jnp.max((9 * a).astype(jnp.int8)[:, None] + jnp.int8(100), 1),
    "both terms read the index": lambda a, b: jnp.max(a[:, None] * b + b, 1),
    "an absolute value": lambda a, b: jnp.max(jnp.abs(a[:, None] - b), 1),
    "a product": lambda a, b: jnp.max(M.T @ M),
    "a place": lambda a, b: jnp.argmax(a[:, None] - b, 1),
}


def fired(fun):
    return [r.name for r in sym_optimize(fun).explain(A, B).rules if r.name == "separable_extremum"]


@pytest.mark.parametrize("name", SEPARATED)
def test_terms_leave_extrema_bit_for_bit(name):
    fun = SEPARATED[name]
    assert fired(fun)
    ours, written = sym_optimize(fun)(A, B), jax.jit(fun)(A, B)
    assert ours.dtype == written.dtype
    np.testing.assert_array_equal(ours, written)


@pytest.mark.parametrize("name", KEPT)
def test_other_extrema_stay(name):
    assert not fired(KEPT[name])
    ours = sym_optimize(KEPT[name])(A, B)
    np.testing.assert_allclose(ours, jax.jit(KEPT[name])(A, B), rtol=1e-6)


@pytest.mark.parametrize("place", [(0, np.inf), (0, -np.inf), (5, np.nan)])
def test_extrema_of_infinite_terms_are_not_new_nans(place):
    at, value = place
    for a, b in ((A.at[at].set(value), B), (A, B.at[at].set(value))):
        ours = sym_optimize(SEPARATED["rows"])(a, b)
        np.testing.assert_array_equal(ours, np.max(np.asarray(a)[:, None] - np.asarray(b), 1))
