"""Reductions down long rows are done row by row, keep their values, and else stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import jax_internals, packs, sym_optimize
from symjax_rewrite.cost.device_profiles import CPU

NAME = "column_reductions"
pytestmark = [
    pytest.mark.skipif(CPU.columns is None, reason="this XLA reduces by rows itself"),
    pytest.mark.usefixtures("one_device"),
]


def array(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), dtype)


def reduced(fun: Any, *args: Any, **options: Any) -> int:
    """The number of reductions done row by row; values and dtypes are checked."""
    ours = sym_optimize(fun, device="cpu", **options)
    a, b = ours(*args), fun(*args)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return sum(r.count for r in ours.explain(*args).rules if r.name == NAME)


X = array(32, 40, 500)
FIRES = {
    "mean of an ensemble": (lambda x: jnp.mean(x, 0), X),
    "two leading axes": (lambda x: jnp.sum(x, (0, 1)), array(4, 8, 20_000)),
    "negative axis": (lambda x: jnp.sum(x, -3), X),
    "two matrices": (lambda x: jnp.sum(x, 1), array(2, 32, 20_000)),
    "maxima of two": (lambda x: jnp.max(x, (1, 2)), array(2, 8, 8, 20_000)),
    "kept axis": (lambda x: jnp.sum(x, 0, keepdims=True), X),
    "maximum": (lambda x: jnp.max(x, 0), X),
    "minimum": (lambda x: jnp.min(x, 0), X),
    "squares": (lambda x: jnp.sum(x * x, 0), X),
    "half precision": (lambda x: jnp.sum(x, 0), X.astype(jnp.bfloat16)),
    "gradient over examples": (
        jax.grad(lambda w, x: jnp.sum(jnp.tanh(w * x))), X[0], X,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIRES)
def test_long_rows_are_reduced_by_rows(name: str) -> None:
    fun, *args = FIRES[name]
    assert reduced(fun, *args) == 1
    assert reduced(fun, *args, rules=packs.default - NAME) == 0


STAYS = {
    "short rows": (lambda x: jnp.sum(x, 0), array(600, 1000)),
    "rows of a batch": (lambda x: jnp.sum(x, 1), array(8, 8, 20_000)),
    "last axis": (lambda x: jnp.sum(x, -1), X),
    "an axis between": (lambda x: jnp.sum(x, (0, 2)), X),
    "one row": (lambda x: jnp.sum(x, 0), array(1, 20_000)),
    "integers": (lambda x: jnp.sum(x, 0), jnp.ones((32, 20_000), jnp.int32)),
    "products": (lambda x: jnp.prod(x, 0), X),
    "pairs that no array holds": (
        lambda x, y: jnp.sum(jnp.exp(x[:, None] - y[None]), 0), array(50), array(20_000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_other_reductions_stay(name: str) -> None:
    fun, *args = STAYS[name]
    assert reduced(fun, *args) == 0


def test_values_that_are_not_finite() -> None:
    x = X.at[3, 0, 0].set(jnp.nan).at[4, 0, 1].set(jnp.inf).at[:, 0, 2].set(-jnp.inf)
    for name in ("sum", "max", "min"):  # XLA's own extrema of long rows may lose a NaN
        ours = sym_optimize(lambda x, name=name: getattr(jnp, name)(x, 0), device="cpu")(x)
        np.testing.assert_array_equal(ours[0, :3], getattr(np, name)(np.asarray(x), 0)[0, :3])


def test_sums_keep_their_order_where_told_to() -> None:
    assert reduced(lambda x: jnp.sum(x, 0), X, numerics="exact") == 0


def test_rows_spread_over_devices_are_not_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_internals, "may_be_partitioned", lambda: True)
    assert reduced(lambda x: jnp.max(x, 0), X) == 0
    assert reduced(lambda x: jnp.sum(x, 0), X) == 1


def test_gradients() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.logsumexp(x, 0) ** 2)

    np.testing.assert_allclose(jax.grad(sym_optimize(loss))(X), jax.grad(loss)(X), rtol=1e-4)
