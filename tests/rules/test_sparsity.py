"""One-hot sums and triangles: labels out of range, empty axes and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from tests.equal_forms import CHOICES, agree, f16
from tests.fuzz.check import Failure, Mode, check_function


def test_prefix_of_another_dtype():
    """A triangle of float32 ones times float16 gave a float16 prefix sum."""
    agree(lambda x: jnp.tri(3) @ x, f16(3, 3))
    agree(lambda x: jnp.tri(3) @ x, f16(3, 3), transform="grad")


def test_a_sum_of_a_one_hot_is_zero_out_of_range():
    labels = jnp.array([-1, 0, 3, 9])
    y = jnp.arange(1.0, 5.0)

    def f(labels, y):
        return jnp.einsum("bv,b->b", jax.nn.one_hot(labels, 4), y)

    np.testing.assert_array_equal(sym_optimize(f, device="h200")(labels, y), f(labels, y))
    np.testing.assert_array_equal(f(labels, y), [0, 2, 3, 0])


N = 256
STENCILS = {
    "differences": lambda x: (jnp.eye(N, k=1) - jnp.eye(N)) @ x,
    "of columns": lambda x: x.T @ (jnp.eye(N) - jnp.eye(N, k=1)),
    "Laplacian": lambda x: (2 * jnp.eye(N) - jnp.eye(N, k=1) - jnp.eye(N, k=-1)) @ x,
    "made before": lambda x: (np.eye(N, k=3) - 4 * np.eye(N) - np.eye(N, k=-2)).astype("f") @ x,
    "fewer rows": lambda x: (jnp.eye(N - 9, N) - jnp.eye(N - 9, N, k=1)) @ x,
    "centred": lambda x: (np.eye(N, dtype="f") - np.float32(1 / N)) @ x,
}


@pytest.mark.parametrize("stencil", STENCILS.values(), ids=STENCILS)
def test_products_with_few_diagonals_read_their_places(stencil):
    x = np.random.default_rng(0).normal(size=(N, N)).astype(np.float32)
    optimised = sym_optimize(stencil)
    assert "distribute" in [r.name for r in optimised.explain(x).rules]
    np.testing.assert_allclose(optimised(x), stencil(x.astype(np.float64)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scaled", [lambda t, x: t @ x / 300, lambda t, x: (t * 0.3) @ x])
def test_multiples_of_prefix_sums_are_prefix_sums(scaled):
    x = np.random.default_rng(0).normal(size=(300, 40)).astype(np.float32)
    optimised = sym_optimize(lambda x: scaled(jnp.tri(300), x))
    assert "triangular_prefix" in [r.name for r in optimised.explain(x).rules]
    want = scaled(np.tri(300), x.astype(np.float64))
    np.testing.assert_allclose(optimised(x), want, rtol=1e-4, atol=1e-4)


def test_diagonals_that_may_cancel_stay_together():
    x = np.ones((N, N), np.float32)
    for close in (1.0, 0.9, np.eye(N, dtype=np.float32)):
        f = sym_optimize(lambda x, close=close: (jnp.eye(N) - close) @ x)
        assert "distribute" not in [r.name for r in f.explain(x).rules]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_labels_into_nothing(dtype):
    """A one-hot sum over no classes (jnp.take refuses an empty axis), or over many."""
    for n in (0, 1, 127):
        f = lambda i, w: jnp.einsum("on,nd->od", jax.nn.one_hot(i, w.shape[0]), w)  # noqa: E731
        values = [np.array([-1, 0, 3, 100]).astype(dtype), np.ones((n, 3), np.float32)]
        for choice, seed in CHOICES:
            outcome = check_function(f, values, Mode("value", choice, seed))
            assert not isinstance(outcome, Failure), outcome
