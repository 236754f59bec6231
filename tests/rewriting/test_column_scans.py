"""Cumulative operations down an array go row by row, keep their values, and else stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, packs, sym_optimize

pytestmark = pytest.mark.usefixtures("one_device")

NAME = "column_scans"


def array(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


def looped(fun: Any, *args: Any, **options: Any) -> int:
    """The number of operations done row by row; values and dtypes are checked."""
    ours = sym_optimize(fun, device="cpu", **options)
    a, b = ours(*args), fun(*args)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    return sum(r.count for r in ours.explain(*args).rules if r.name == NAME)


X = array(100, 256)
FIRES = {
    "sum": (lambda x: jnp.cumsum(x, 0), X),
    "from the end": (lambda x: lax.cumsum(x, 0, reverse=True), X),
    "product": (lambda x: jnp.cumprod(x, 0), 1 + 0.1 * X),
    "maximum": (lambda x: lax.cummax(x, axis=0), X),
    "minimum from the end": (lambda x: lax.cummin(x, axis=0, reverse=True), X),
    "logsumexp": (lambda x: lax.cumlogsumexp(x, axis=0), X),
    "in a batch": (lambda x: jnp.cumsum(x, 1), array(4, 50, 128)),
    "integers": (lambda x: jnp.cumsum(x, 0), jnp.arange(40_000, dtype=jnp.int32).reshape(200, 200)),
    "of what is computed": (lambda x: jnp.cumsum(jnp.exp(x), 0), X),
    "gradient": (jax.grad(lambda x: jnp.sum(jnp.sin(jnp.cumsum(x, 0)))), X),
}


@pytest.mark.parametrize("name", FIRES)
def test_arrays_are_accumulated_row_by_row(name: str) -> None:
    fun, *args = FIRES[name]
    assert looped(fun, *args) >= 1
    assert looped(fun, *args, rules=packs.default - NAME) == 0


STAYS = {
    "last axis": (lambda x: jnp.cumsum(x, -1), X),
    "one column": (lambda x: jnp.cumsum(x, 0), array(4000, 1)),
    "many steps": (lambda x: jnp.cumsum(x, 0), array(20_000, 16)),
    "one row": (lambda x: jnp.cumsum(x), array(20_000)),
}


@pytest.mark.parametrize("name", STAYS)
def test_other_operations_stay(name: str) -> None:
    fun, *args = STAYS[name]
    assert looped(fun, *args) == 0


def test_sums_keep_their_order_where_told_to() -> None:
    assert looped(lambda x: jnp.cumsum(x, 0), X, numerics="exact") == 0
    assert looped(lambda x: lax.cummax(x, axis=0), X, numerics="exact") == 1


def test_values_that_are_not_finite() -> None:
    x = X.at[3, 0].set(jnp.nan).at[4, 1].set(jnp.inf).at[5, 1].set(-jnp.inf).at[:, 2].set(-jnp.inf)
    for name in ("cumsum", "cummax", "cummin", "cumlogsumexp"):
        fun = lambda x, name=name: getattr(lax, name)(x, axis=0)  # noqa: E731
        ours, theirs = sym_optimize(fun, device="cpu")(x)[:, :3], fun(x)[:, :3]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_rows_spread_over_devices_are_not_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_internals, "may_be_partitioned", lambda: True)
    assert looped(lambda x: jnp.cumsum(x, 0), X) == 0
