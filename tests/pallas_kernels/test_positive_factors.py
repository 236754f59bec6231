"""Constant factors of elementwise programs, and exponentials that absorb them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.tile_facts import factors_of
from symjax_rewrite.pallas_kernels.positive_factors import without_factors

X = jnp.asarray([-2.0, 0.5, 3.0], jnp.float32)
POSITIVE = X > 0


@pytest.mark.parametrize(
    ("program", "factor"),
    [
        (lambda x: x / 8, 0.125),
        (lambda x: 0.5 * x / 4, 0.125),
        (lambda x: jnp.where(POSITIVE, x / 8, -jnp.inf), 0.125),
        (lambda x: jnp.where(POSITIVE, -jnp.inf, x * 0.5), 0.5),
        (lambda x: jnp.where(POSITIVE, x * 0.5, x * 0.25), 1.0),
        (lambda x: jnp.where(POSITIVE, x / 8, -1e9), 1.0),
        (lambda x: jnp.where(POSITIVE, x / 8, jnp.inf), 1.0),
        (lambda x: x * -0.5, 1.0),
        (lambda x: x * 4, 1.0),
        (lambda x: x * 0.0, 1.0),
        (lambda x: x * 1e-30, 1.0),
        (lambda x: x / 0.0, 1.0),
        (lambda x: x * jnp.float32("nan"), 1.0),
        (lambda x: 3 / x, 1.0),
        (lambda x: x / 8 + 1, 1.0),
        (lambda x: (x / 8).astype(jnp.bfloat16), 1.0),
        (lambda x: jax.nn.relu(x) * 0.5, 0.5),
    ],
)
def test_factors(program, factor):
    (found,) = without_factors(program, X)
    assert (found.factor or 1.0) == pytest.approx(factor, rel=1e-6)
    np.testing.assert_array_equal(found.value, program(X))
    if found.factor != 1.0:
        np.testing.assert_allclose(found.base * factor, program(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("more", "has"),
    [
        ({}, True),
        ({"causal": True}, True),
        ({"softcap": 5.0}, False),
        ({"bias": ("m", "n")}, False),
        ({"causal": True, "dtype": "bfloat16"}, True),
    ],
)
def test_scores_of_attention_have_the_factor_of_their_scale(more, has):
    given = {"batch": 1, "queries": 32, "keys": 32, "heads": 2, "width": 64}
    (factor,) = factors_of(forward(Attention(**given, **more)))
    assert factor == (pytest.approx(0.125) if has else 1.0)
