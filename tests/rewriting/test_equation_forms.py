"""Equations of one array get another form where that pays, with the same values, and else stay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import jax_internals, packs, sym_optimize
from symjax_rewrite.cost.device_profiles import CPU

COLUMNS, SCANS, PLACES = "column_reductions", "column_scans", "extremum_places"
TOLERANCE = {COLUMNS: 1e-5, SCANS: 1e-4, PLACES: 0.0}


@pytest.fixture(autouse=True)
def _one_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops over rows need one device; a fold takes the extrema of products there."""
    if PLACES not in request.node.name:
        monkeypatch.setattr(jax_internals, "may_be_partitioned", lambda: False)


def skipped_by(name: str) -> Any:
    skips = name == COLUMNS and CPU.columns is None
    return pytest.mark.skipif(skips, reason="this XLA reduces by rows itself")


def array(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


def forms(name: str, fun: Callable, *args: Any, **options: Any) -> int:
    """The number of equations with another form by a pass; values and dtypes are checked."""
    ours = sym_optimize(fun, device="cpu", **options)
    a, b = ours(*args), fun(*args)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(a, b, rtol=TOLERANCE[name], atol=TOLERANCE[name])
    return sum(r.count for r in ours.explain(*args).rules if r.name == name)


def table(rows: dict[str, dict[str, tuple]]) -> Any:
    """Parameters: the pass, the function and its arguments."""
    cases = [(n, text, case) for n, named in rows.items() for text, case in named.items()]
    return pytest.mark.parametrize(
        ("name", "fun", "args"),
        [
            pytest.param(n, f, a, marks=skipped_by(n), id=f"{n}, {text}")
            for n, text, (f, *a) in cases
        ],
    )


LONG, TALL, X = array(32, 40, 500), array(100, 256), array(64, 4096)
TAKEN = {
    COLUMNS: {
        "mean of an ensemble": (lambda x: jnp.mean(x, 0), LONG),
        "two leading axes": (lambda x: jnp.sum(x, (0, 1)), array(4, 8, 20_000)),
        "negative axis": (lambda x: jnp.sum(x, -3), LONG),
        "two matrices": (lambda x: jnp.sum(x, 1), array(2, 32, 20_000)),
        "maxima of two": (lambda x: jnp.max(x, (1, 2)), array(2, 8, 8, 20_000)),
        "kept axis": (lambda x: jnp.sum(x, 0, keepdims=True), LONG),
        "maximum": (lambda x: jnp.max(x, 0), LONG),
        "minimum": (lambda x: jnp.min(x, 0), LONG),
        "squares": (lambda x: jnp.sum(x * x, 0), LONG),
        "one number for a matrix": (lambda x: jnp.sum(jnp.abs(x + x[:, :1, :1]), 0), LONG),
        "half precision": (lambda x: jnp.sum(x, 0), LONG.astype(jnp.bfloat16)),
        "gradient over examples": (
            jax.grad(lambda w, x: jnp.sum(jnp.tanh(w * x))), LONG[0], LONG,
        ),
    },
    SCANS: {
        "sum": (lambda x: jnp.cumsum(x, 0), TALL),
        "from the end": (lambda x: lax.cumsum(x, 0, reverse=True), TALL),
        "product": (lambda x: jnp.cumprod(x, 0), 1 + 0.1 * TALL),
        "maximum": (lambda x: lax.cummax(x, axis=0), TALL),
        "minimum from the end": (lambda x: lax.cummin(x, axis=0, reverse=True), TALL),
        "logsumexp": (lambda x: lax.cumlogsumexp(x, axis=0), TALL),
        "maximum of short rows": (lambda x: lax.cummax(x, axis=0), array(20_000, 5)),
        "in a batch": (lambda x: jnp.cumsum(x, 1), array(4, 50, 128)),
        "integers": (
            lambda x: jnp.cumsum(x, 0), jnp.arange(40_000, dtype=jnp.int32).reshape(200, 200),
        ),
        "of what is computed": (lambda x: jnp.cumsum(jnp.exp(x), 0), TALL),
        "gradient": (jax.grad(lambda x: jnp.sum(jnp.sin(jnp.cumsum(x, 0)))), TALL),
    },
    PLACES: {
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
    },
}  # fmt: skip
STAYS = {
    COLUMNS: {
        "short rows": (lambda x: jnp.sum(x, 0), array(600, 1000)),
        "rows of a batch": (lambda x: jnp.sum(x, 1), array(8, 8, 20_000)),
        "last axis": (lambda x: jnp.sum(x, -1), LONG),
        "an axis between": (lambda x: jnp.sum(x, (0, 2)), LONG),
        "one row": (lambda x: jnp.sum(x, 0), array(1, 20_000)),
        "weighted rows": (lambda x: jnp.sum(x * x[:, :, :1], 0), LONG),
        "rows over a norm": (
            lambda x, y: jnp.sum(x / y[:, None], 0), array(32, 20_000), 1 + LONG[:, 0, 0] ** 2
        ),
        "integers": (lambda x: jnp.sum(x, 0), jnp.ones((32, 20_000), jnp.int32)),
        "products": (lambda x: jnp.prod(x, 0), LONG),
        "joined arrays": (
            lambda x: jnp.mean(jnp.stack([x[i : i + 990] for i in range(8)]), 0), array(1000, 64)
        ),
        "pairs that no array holds": (
            lambda x, y: jnp.sum(jnp.exp(x[:, None] - y[None]), 0), array(50), array(20_000),
        ),
    },
    SCANS: {
        "last axis": (lambda x: jnp.cumsum(x, -1), TALL),
        "one column": (lambda x: jnp.cumsum(x, 0), array(4000, 1)),
        "many steps": (lambda x: jnp.cumsum(x, 0), array(20_000, 16)),
        "one row": (lambda x: jnp.cumsum(x), array(20_000)),
    },
    PLACES: {
        "short rows": (lambda x: jnp.argmax(x, -1), array(20_000, 10)),
        "few elements": (lambda x: jnp.argmax(x, -1) + jnp.ones((600, 600)).sum(), array(40)),
        "computed in the loop": (lambda x: jnp.argmax(jnp.exp(x), -1), X),
        "integers": (lambda x: jnp.argmax(x, -1), jnp.ones((64, 4096), jnp.int32)),
    },
}  # fmt: skip


@table(TAKEN)
def test_other_forms_are_taken(name: str, fun: Callable, args: list[Any]) -> None:
    assert 1 <= forms(name, fun, *args) <= (2 if name == SCANS else 1)
    assert forms(name, fun, *args, rules=packs.default - name) == 0


@table(STAYS)
def test_other_equations_stay(name: str, fun: Callable, args: list[Any]) -> None:
    assert forms(name, fun, *args) == 0


EXACT = {
    "sums of columns": (COLUMNS, lambda x: jnp.sum(x, 0), LONG, 0),
    "cumulative sums": (SCANS, lambda x: jnp.cumsum(x, 0), TALL, 0),
    "cumulative maxima": (SCANS, lambda x: lax.cummax(x, axis=0), TALL, 1),
}


@pytest.mark.parametrize("case", EXACT)
def test_sums_keep_their_order_where_told_to(case: str) -> None:
    name, fun, x, count = EXACT[case]
    assert forms(name, fun, x, numerics="exact") == count


SPREAD = {
    "maxima of columns": (COLUMNS, lambda x: jnp.max(x, 0), LONG, 0),
    "sums of columns": pytest.param(
        (COLUMNS, lambda x: jnp.sum(x, 0), LONG, 1), marks=skipped_by(COLUMNS)
    ),
    "cumulative sums": (SCANS, lambda x: jnp.cumsum(x, 0), TALL, 0),
}


@pytest.mark.parametrize("case", SPREAD.values(), ids=SPREAD)
def test_rows_spread_over_devices_are_not_looped_over(
    case: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_internals, "may_be_partitioned", lambda: True)
    name, fun, x, count = case
    assert forms(name, fun, x) == count


@skipped_by(COLUMNS)
def test_reductions_of_values_that_are_not_finite() -> None:
    x = LONG.at[3, 0, 0].set(jnp.nan).at[4, 0, 1].set(jnp.inf).at[:, 0, 2].set(-jnp.inf)
    for name in ("sum", "max", "min"):  # XLA's own extrema of long rows may lose a NaN
        ours = sym_optimize(lambda x, name=name: getattr(jnp, name)(x, 0), device="cpu")(x)
        np.testing.assert_array_equal(ours[0, :3], getattr(np, name)(np.asarray(x), 0)[0, :3])


def test_prefixes_of_values_that_are_not_finite() -> None:
    x = TALL.at[3, 0].set(jnp.nan).at[4, 1].set(jnp.inf).at[5, 1].set(-jnp.inf)
    x = x.at[:, 2].set(-jnp.inf)
    for name in ("cumsum", "cummax", "cummin", "cumlogsumexp"):
        fun = lambda x, name=name: getattr(lax, name)(x, axis=0)  # noqa: E731
        ours, theirs = sym_optimize(fun, device="cpu")(x)[:, :3], fun(x)[:, :3]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("fun", [jnp.argmax, jnp.argmin])
def test_the_first_nan_is_the_extremum(fun: Any) -> None:
    x = X.at[0, 4095].set(jnp.nan).at[1, 0].set(jnp.nan).at[2, 7].set(jnp.nan).at[2, 5].set(9.0)
    x = x.at[3, 70].set(jnp.nan).at[3, 80].set(jnp.nan).at[4].set(jnp.nan).at[5, 3].set(jnp.inf)
    ours = sym_optimize(lambda x: fun(x, -1), device="cpu")
    assert any(r.name == PLACES for r in ours.explain(x).rules)
    np.testing.assert_array_equal(ours(x), getattr(np, fun.__name__)(np.asarray(x), -1))


def test_gradients_of_reductions() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.logsumexp(x, 0) ** 2)

    np.testing.assert_allclose(jax.grad(sym_optimize(loss))(LONG), jax.grad(loss)(LONG), rtol=1e-4)


@skipped_by(COLUMNS)
def test_weighted_rows_in_double_precision_are_written_as_a_product() -> None:
    """XLA's library makes a product of sums in single precision alone."""
    with jax.enable_x64(True):
        x, a = array(32, 20_000).astype("float64"), array(32).astype("float64")
        weighted = sym_optimize(lambda x, a: jnp.sum(x * a[:, None], 0))
        assert [r.name for r in weighted.explain(x, a).rules] == ["contraction_order"]
