"""Places of extrema are found by value along long axes, are the same, and else stay as written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import packs, sym_optimize

NAME = "extremum_places"


def array(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


def found(fun: Any, *args: Any, **options: Any) -> int:
    """The number of searches by value; results are those of NumPy's definition."""
    ours = sym_optimize(fun, device="cpu", **options)
    a, b = ours(*args), fun(*args)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(a, b)
    return sum(r.count for r in ours.explain(*args).rules if r.name == NAME)


X = array(64, 4096)
FIRES = {
    "argmax": (lambda x: jnp.argmax(x, -1), X),
    "argmin": (lambda x: jnp.argmin(x, -1), X),
    "first axis": (lambda x: jnp.argmax(x, 0), X.T),
    "whole array": (lambda x: jnp.argmax(x), X),
    "middle axis": (lambda x: jnp.argmax(x, 1), array(8, 512, 64)),
    "kept axis": (lambda x: jnp.argmax(x, -1, keepdims=True), X),
    "half precision, ties": (lambda x: jnp.argmax(x, -1), X.astype(jnp.bfloat16)),
    "rounded, ties": (lambda x: jnp.argmax(x, -1), jnp.round(X)),
    "zeros of both signs": (lambda x: jnp.argmax(x, -1), jnp.where(X > 0, -0.0, 0.0)),
    "nothing but -inf": (lambda x: jnp.argmax(x, -1), jnp.where(X > 9, X, -jnp.inf)),
    "decoding": (lambda h, w: jnp.argmax(h @ w, -1), array(16, 8), array(8, 50_000)),
}


@pytest.mark.parametrize("name", FIRES)
def test_places_are_found_by_value(name: str) -> None:
    fun, *args = FIRES[name]
    assert found(fun, *args) == 1
    assert found(fun, *args, rules=packs.default - NAME) == 0


STAYS = {
    "short rows": (lambda x: jnp.argmax(x, -1), array(20_000, 10)),
    "few elements": (lambda x: jnp.argmax(x, -1) + jnp.ones((600, 600)).sum(), array(40)),
    "computed in the loop": (lambda x: jnp.argmax(jnp.exp(x), -1), X),
    "integers": (lambda x: jnp.argmax(x, -1), jnp.ones((64, 4096), jnp.int32)),
}


@pytest.mark.parametrize("name", STAYS)
def test_other_searches_stay(name: str) -> None:
    fun, *args = STAYS[name]
    assert found(fun, *args) == 0


@pytest.mark.parametrize("fun", [jnp.argmax, jnp.argmin])
def test_the_first_nan_is_the_extremum(fun: Any) -> None:
    x = X.at[0, 4095].set(jnp.nan).at[1, 0].set(jnp.nan).at[2, 7].set(jnp.nan).at[2, 5].set(9.0)
    x = x.at[3, 70].set(jnp.nan).at[3, 80].set(jnp.nan).at[4].set(jnp.nan).at[5, 3].set(jnp.inf)
    ours = sym_optimize(lambda x: fun(x, -1), device="cpu")
    assert any(r.name == NAME for r in ours.explain(x).rules)
    np.testing.assert_array_equal(ours(x), getattr(np, fun.__name__)(np.asarray(x), -1))
