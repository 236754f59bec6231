"""Attention: operations beside its fold, and programs that stay as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from tests.kernel_selection.folds.spellings import FUNCTIONS, B, D, H, T, arrays, dot, out


def test_probabilities_applied_twice_are_two_folds():
    def twice_applied(q, k, v):
        p = jax.nn.softmax(dot(q, k) / 3)
        return p @ (p @ v.transpose(0, 2, 1, 3))

    args = arrays()
    routed = sym_optimize(twice_applied, kernels="always", on_unsupported="error")
    assert [r.taken for r in routed.explain(*args).routes] == [True]
    np.testing.assert_allclose(routed(*args), twice_applied(*args), 2e-5, 2e-5)


def test_a_normaliser_that_no_kernel_can_make_is_made_outside():
    def odd(q, k, v):
        e = jnp.exp(dot(q, k) / 3)
        return out(e / jax.scipy.special.erf(e.sum(-1, keepdims=True)), v)

    args = arrays()
    routed = sym_optimize(odd, kernels="always", on_unsupported="error")
    assert [r.taken for r in routed.explain(*args).routes] == [True]
    np.testing.assert_allclose(routed(*args), odd(*args), 1e-4, 1e-4)


def test_exact_numerics_leave_it():
    report = sym_optimize(FUNCTIONS["library_call"], kernels="always", numerics="exact").explain(
        *arrays()
    )
    assert not [r for r in report.routes if r.taken]


@pytest.mark.parametrize("queries", [1, 3, D - 1, D, T])
def test_projected_values_are_no_pairs_where_queries_are_few(queries):
    """Features of the values met the keys in a product as well, and were taken for the rows."""

    def pooled(latents, x, wq, wk, wv):
        q, k, v = (jnp.einsum("btc,chd->bthd", *xw) for xw in ((latents, wq), (x, wk), (x, wv)))
        return out(jax.nn.softmax(dot(q, k) / 3), v)

    draw = np.random.default_rng(0).standard_normal
    shapes = ((B, queries, 12), (B, T, 12), *[(12, H, D)] * 3)
    args = [jnp.asarray(draw(s), jnp.float32) for s in shapes]
    routed = sym_optimize(pooled, kernels="always", on_unsupported="error")
    assert any(r.taken for r in routed.explain(*args).routes)
    np.testing.assert_allclose(routed(*args), jax.jit(pooled)(*args), 2e-5, 2e-5)
