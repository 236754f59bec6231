"""Equations with operands that are symbolic zeros give the values that zeros give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite.loops.linear_zeros import run_with_zeros

X = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.float32)
Y = np.array([[1, -2, 1], [0, 3, 1], [2, 1, 4]], np.float32)

# A function, and for each case of absent operands: is its result absent too?
CASES = {
    "transpose": (lambda x, y: x.T, {"x": True}),
    "negative": (lambda x, y: -x, {"x": True}),
    "quotient": (lambda x, y: x / (y + 5), {"x": True}),
    "sum of rows": (lambda x, y: lax.reduce_sum(x, (1,)), {"x": True}),
    "product": (lambda x, y: x * y, {"x": True, "y": True, "xy": True}),
    "product of matrices": (lambda x, y: lax.dot(x, y), {"x": True, "y": True}),
    "sum": (lambda x, y: x + y, {"x": False, "y": False, "xy": True}),
    "difference": (lambda x, y: x - y, {"x": False, "y": False, "xy": True}),
    "joined": (lambda x, y: lax.concatenate([x, y], 0), {"x": False, "y": False, "xy": True}),
    "selection": (lambda x, y: lax.select(Y > 0, x, y), {"x": False, "xy": True}),
    "sine": (lambda x, y: lax.sin(x), {"x": False}),
    "cosine": (lambda x, y: lax.cos(x), {"x": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_absent_operands_count_as_zeros(name: str) -> None:
    fun, cases = CASES[name]
    jaxpr = jax.make_jaxpr(fun)(X, Y)
    for gone, is_absent in cases.items():
        given = [None if "x" in gone else X, None if "y" in gone else Y]
        env: dict[Any, Any] = dict(zip(jaxpr.jaxpr.invars, given, strict=True))
        env.update(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        run_with_zeros(jaxpr.jaxpr.eqns, env)
        made = env[jaxpr.jaxpr.outvars[0]]
        assert (made is None) is is_absent
        zeros = [jnp.zeros_like(X) if x is None else x for x in given]
        np.testing.assert_array_equal(np.zeros(()) if made is None else made, fun(*zeros))
