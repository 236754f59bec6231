"""The ends of sorted rows by selection, and selection in a dtype that is fast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize

ROWS, LENGTH, K = 6, 80, 7


def rows(dtype: Any = "float32", *special: float) -> jax.Array:
    """Rows with many ties, and both zeros."""
    x = np.random.default_rng(0).integers(-9, 9, (ROWS, LENGTH)).astype("float32")
    x[:, ::7] *= -0.0
    for row, number in enumerate(special):
        x[row, 3 + row] = number
    return jnp.asarray(x).astype(dtype)


def check(fun: Callable, *args: Any, taken: bool = True) -> None:
    optimised = sym_optimize(fun, device="cpu", on_unsupported="error")
    found = [r.taken for r in optimised.explain(*args).routes if r.name == "selection"]
    assert any(found) == taken, found
    want, got = jax.jit(fun)(*args), optimised(*args)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert (w.shape, w.dtype) == (g.shape, g.dtype)
        np.testing.assert_array_equal(w.astype("float32"), g.astype("float32"))
        if jnp.issubdtype(w.dtype, jnp.floating):
            np.testing.assert_array_equal(np.signbit(w), np.signbit(g))


SORTED: dict[str, Callable] = {
    "first": lambda x: jnp.sort(x)[:, :K],
    "last": lambda x: jnp.sort(x)[:, -K:],
    "best first": lambda x: jnp.sort(x)[:, ::-1][:, :K],
    "places of the first": lambda x: jnp.argsort(x)[:, :K],
    "places of the last": lambda x: jnp.argsort(x)[:, -K:],
    "places, descending": lambda x: jnp.argsort(x, descending=True)[:, :K],
    "both ends": lambda x: (jnp.sort(x)[:, 2:K], jnp.sort(x)[:, -1]),
    "every other": lambda x: jnp.sort(x)[:, 1:K:2] + 1,
    "one": lambda x: jnp.sort(x)[:, K],
    "another axis": lambda x: jnp.sort(x.T, axis=0)[:K],
    "sorted along": lambda x: lax.sort((x, x + 1, jnp.cos(x)), num_keys=1)[2][:, :K],
    "reshaped": lambda x: jnp.sort(x.reshape(2, 3, LENGTH), axis=-1)[1, :, :K].T,
}


@pytest.mark.parametrize("name", SORTED)
def test_ends_of_a_sort_are_selected(name: str) -> None:
    taken = name != "reshaped"  # rows are sliced with the places
    check(SORTED[name], rows(), taken=taken)


@pytest.mark.parametrize("name", ["first", "last", "places, descending"])
def test_nonfinite_values_are_placed_as_by_the_sort(name: str) -> None:
    check(SORTED[name], rows("float32", np.inf, -np.inf))
    check(SORTED[name], rows("float32", np.nan, -np.nan, np.inf))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint16"])
def test_small_dtypes(dtype: str) -> None:
    check(SORTED["places of the last"], rows(dtype))
    check(lambda x: lax.top_k(x, K), rows(dtype))


def test_top_k_of_small_floats_orders_nonfinite_values() -> None:
    check(lambda x: lax.top_k(x, K), rows("bfloat16", np.nan, np.inf, -np.inf, -np.nan))


LEFT: dict[str, Callable] = {
    "whole": lambda x: (jnp.sort(x), jnp.sort(x)[:, :K]),
    "most": lambda x: jnp.sort(x)[:, : LENGTH // 2 + 1],
    "middle": lambda x: jnp.sort(x)[:, 30:50],
    "two keys": lambda x: lax.sort((jnp.round(x), x), num_keys=2)[1][:, :K],
    "summed": lambda x: jnp.cumsum(jnp.sort(x), 1)[:, :K],
    "chosen by data": lambda x: lax.dynamic_slice_in_dim(
        jnp.sort(x), x[0, 0].astype("int32"), K, 1
    ),
    "top-k": lambda x: lax.top_k(x, K),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_sorts_stay(name: str) -> None:
    check(LEFT[name], rows(), taken=False)


def test_integers_stay_with_the_reason() -> None:
    fun = SORTED["first"]
    check(fun, rows("int32"), taken=False)
    (route,) = sym_optimize(fun, device="cpu").explain(rows("int32")).routes
    assert "int32 is not selected faster" in route.reason


def test_gradients_are_those_of_the_sort() -> None:
    fun = lambda x: jnp.sum(jnp.sin(jnp.sort(x)[:, :K]))  # noqa: E731
    want = jax.grad(fun)(rows())
    np.testing.assert_array_equal(jax.grad(sym_optimize(fun, device="cpu"))(rows()), want)
    np.testing.assert_array_equal(sym_optimize(jax.grad(fun), device="cpu")(rows()), want)
