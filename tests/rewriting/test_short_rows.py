"""Short rows of reductions are joined, split or written out; values stay."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import packs, sym_optimize
from symjax_rewrite.reports.report import Report
from tests.rewriting.test_fusion_limits import array, distances

NAME = "short_rows"
pytestmark = pytest.mark.usefixtures("one_device")
LINE, POINTS = array(400, 1), array(300, 3)
ROWS, OTHERS, COLUMN = array(60_000, 3), array(60_000, 3) + 1, array(180_000, 1)
BATCH = array(7, 20_000, 2)
WEIGHTS = array(3, 1)


def explained(fun: Callable, *args: Any, **options: Any) -> Report:
    """The report; values and dtypes are checked."""
    ours = sym_optimize(fun, device="cpu", kernels="off", **options)
    a, b = ours(*args), jax.jit(fun)(*args)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)
    return ours.explain(*args)


def joined(fun: Callable, *args: Any, **options: Any) -> int:
    """The number of equations with joined axes."""
    return sum(r.count for r in explained(fun, *args, **options).rules if r.name == NAME)


def cross_entropy(x, y):
    return jnp.mean(jnp.maximum(x, 0) - x * y + jnp.log1p(jnp.exp(-jnp.abs(x))))


JOINED = {
    "a loss over points": (lambda x, y: jnp.mean((jnp.tanh(x) - y) ** 2), ROWS, OTHERS),
    "a loss over numbers": (cross_entropy, COLUMN, COLUMN[::-1]),
    "a loss for each of a batch": (lambda x: jnp.sum(jnp.exp(x) * x, (1, 2)), BATCH),
    "losses of examples": (
        lambda x, y: jnp.mean(jax.vmap(lambda a, b: jnp.sum((jnp.tanh(a) - b) ** 2))(x, y)),
        ROWS, OTHERS,
    ),
    "an extremum": (lambda x, y: jnp.max(jnp.tanh(x) * y), ROWS, OTHERS),
    "rows in another order": (lambda x, y: jnp.sum(jnp.tanh(x[::-1]) * y), ROWS, OTHERS),
    "a scale and a number": (lambda x, s: jnp.sum(jnp.tanh(x * s[0]) * s[1] + 1), ROWS, array(2)),
    "a number for each pair of axes": (
        lambda x, b: jnp.sum(jnp.tanh(x + b[:, None, None]) ** 2, (1, 2)), BATCH, array(7)
    ),
    "columns whose rows are kept": (
        lambda x, c: jnp.sum(jnp.exp(x + c), 0), array(90, 2000, 2), array(2000, 2)
    ),
    "a correlation of columns": (
        lambda x, y: jnp.tanh(x).T @ jnp.tanh(y), COLUMN, COLUMN[::-1]
    ),
    "columns of a product": (
        lambda x, w, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2),
        array(90_000, 3), WEIGHTS, array(90_000, 1),
    ),
    "what others read too": (
        lambda x, y: (lambda d: (jnp.sum(jnp.exp(d) * d), d))(jnp.tanh(x) - y), ROWS, OTHERS
    ),
    "row sums of a kernel of numbers": (
        lambda x, y: jnp.sum(jnp.exp(-distances(x, y)), 1), array(400, 1), array(300, 1)
    ),
    "a kernel that a product reads too": (
        lambda x, y, v: (lambda k: k @ v / jnp.sum(k, 1, keepdims=True))(jnp.exp(-distances(x, y))),
        array(700, 1), array(134, 1), array(134, 3),
    ),
    "a gradient of distances on a line": (
        lambda x: jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.sum(distances(x, x + 1) ** 2, 1))))(x),
        LINE,
    ),
    "products of two arrays, for each of a batch": (
        lambda x, y: jnp.einsum("bik,bik->b", jnp.tanh(x), jnp.exp(y)), BATCH, BATCH[::-1]
    ),
    "NaN and infinity": (
        lambda x, y: jnp.sum(jnp.tanh(x) * y),
        ROWS.at[0, 0].set(jnp.nan), OTHERS.at[5, 1].set(jnp.inf),
    ),
}  # fmt: skip

SPLIT = {
    "sums of features": (lambda x, y: jnp.sum(jnp.tanh(x) * y, 0), ROWS, OTHERS),
    "deviations of features": (lambda x: (x - jnp.mean(x, 0)) / jnp.std(x, 0), ROWS),
    "extrema of features": (lambda x: jnp.max(x, 0), ROWS),
    "features of a batch": (lambda x, b: jnp.sum(jnp.exp(x - b[:, None]), 1), BATCH, array(7, 2)),
    "products of features": (
        lambda x, y: jnp.einsum("ik,ik->k", jnp.tanh(x), jnp.exp(y)), ROWS, OTHERS
    ),
}  # fmt: skip

WRITTEN = {
    "sums of rows": (lambda x: jnp.sum(x, -1), ROWS),
    "distances of pairs in order": (lambda x, y: jnp.sum((x - y) ** 2, -1), ROWS, OTHERS),
    "distances of all pairs": (lambda x, y: jnp.sqrt(distances(x, y)), POINTS, POINTS[:250] + 1),
    "largest differences of all pairs": (
        lambda x, y: jnp.max(jnp.abs(x[:, None] - y), -1), POINTS, POINTS[:250] + 1
    ),
    "lengths, and their mean": (lambda x: jnp.mean(jnp.linalg.norm(x, axis=-1)), ROWS),
    "unit vectors": (lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True), ROWS),
    "a softmax of few classes": (lambda x: jax.nn.softmax(x, -1), array(600_000, 2)),
    "products of rows": (lambda x, y: jnp.einsum("ik,ik->i", jnp.abs(x), y), ROWS, OTHERS),
    "a vector along the rows": (lambda x, b: jnp.sum((x + b) * x, -1), ROWS, array(3)),
    "a number for each row": (lambda x, b: jnp.sum(abs(x - b[:, None]), -1), ROWS, array(60_000)),
    "rows of a product": (lambda x, w: jnp.sum((x @ w) ** 2, -1), ROWS, array(3, 2)),
    "NaN and infinity": (
        lambda x: jnp.sum(x, -1), ROWS.at[0, 0].set(jnp.nan).at[5, 1].set(jnp.inf)
    ),
}  # fmt: skip

LEFT = {
    "a vector along the rows": (lambda x, b: jnp.sum(jnp.tanh(x + b) * x), ROWS, array(3)),
    "a number for each row": (
        lambda x, b: jnp.sum(jnp.tanh(x + b[:, None]) * x), ROWS, array(60_000)
    ),
    "an axis of no whole parts": (lambda x: jnp.sum(jnp.tanh(x) * x, 0), array(60_037, 3)),
    "rows that are no power of two": (lambda x: jax.nn.softmax(x, -1), array(200_000, 6)),
    "an axis that another stands between": (
        lambda x: jnp.sum(jnp.tanh(x) * x, (0, 2)), array(20_000, 7, 2)
    ),
    "long rows": (lambda x: jnp.sum(jnp.tanh(x) * x), array(3000, 64)),
    "rows in memory": (lambda x: jnp.sum(x), ROWS),
    "few numbers": (lambda x: jnp.sum(jnp.tanh(x) * x), array(500, 3)),
    "other numbers": (lambda x: jnp.sum((x + 1) * x), jnp.ones((60_000, 3), int)),
    "what the library does not compute": (
        lambda x, y: jnp.sum(jnp.where(x > y, x, 2 * y)), ROWS, OTHERS
    ),
    "no axes": (
        lambda x: lax.reduce_sum_p.bind(jnp.tanh(x) + 1, axes=(), out_sharding=None), ROWS
    ),
    "a product along rows": (lambda x, w: jnp.tanh(x) @ w, ROWS, array(3)),
    "a batch in another order": (
        lambda x, y: lax.dot_general(
            jnp.tanh(x), jnp.tanh(y), (((2,), (2,)), ((1, 0), (1, 0))),
        ), array(3, 30_000, 2), array(3, 30_000, 2),
    ),
    "transposed squares": (
        lambda x: jnp.einsum("ij,ji", jnp.tanh(x), jnp.exp(x)), array(300, 300)[:, :1] * LINE[:1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_axes_of_short_rows_are_joined(name: str) -> None:
    fun, *args = JOINED[name]
    assert joined(fun, *args)
    assert not joined(fun, *args, rules=packs.default - NAME)


@pytest.mark.parametrize("name", SPLIT)
def test_axes_are_split_for_short_rows(name: str) -> None:
    fun, *args = SPLIT[name]
    assert joined(fun, *args)


@pytest.mark.parametrize("name", WRITTEN)
def test_short_rows_are_written_out(name: str) -> None:
    fun, *args = WRITTEN[name]
    assert joined(fun, *args)


def test_extrema_of_rows_with_nan_are_nan() -> None:
    """As in NumPy; XLA's library leaves some out."""
    x = ROWS.at[0, 0].set(jnp.nan).at[1, 2].set(jnp.nan).at[5, 1].set(jnp.inf)
    ours = sym_optimize(lambda x: jnp.max(x, -1), device="cpu", kernels="off")
    assert [r.name for r in ours.explain(x).rules] == [NAME]
    np.testing.assert_array_equal(ours(x), np.max(np.asarray(x), -1))


@pytest.mark.parametrize("name", LEFT)
def test_other_axes_stay(name: str) -> None:
    fun, *args = LEFT[name]
    assert not joined(fun, *args)


def test_no_short_row_is_left_in_the_call() -> None:
    """XLA would move a reshape of the arrays into the reduction, and undo it."""
    fun = sym_optimize(cross_entropy, device="cpu", kernels="off")
    text = str(jax.jit(fun).lower(COLUMN, COLUMN).compile().as_text())
    assert " reduce(" in text
    assert "f32[180000]{0} add(" in text
    assert "f32[180000,1]{1,0} add(" not in text


def test_exact_numerics_keep_the_order_of_sums() -> None:
    fun, *args = JOINED["a loss over points"]
    assert not joined(fun, *args, numerics="exact")
    assert joined(*JOINED["an extremum"], numerics="exact")
    assert joined(*JOINED["a loss over numbers"], numerics="exact")  # one axis, another shape
    assert not joined(*SPLIT["sums of features"], numerics="exact")
    assert not joined(*WRITTEN["sums of rows"], numerics="exact")
    assert joined(*WRITTEN["largest differences of all pairs"], numerics="exact")


def test_gradients_are_those_of_the_original() -> None:
    fun = sym_optimize(cross_entropy, device="cpu", kernels="off")
    x, y = COLUMN[:70_000], COLUMN[-70_000:]
    for ours, plain in zip(
        jax.grad(fun, (0, 1))(x, y), jax.grad(cross_entropy, (0, 1))(x, y), strict=True
    ):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.sum(jnp.exp(-distances(x, x)), 1),
        lambda x: (lambda k: k @ x / jnp.sum(k, 1, keepdims=True))(jnp.exp(-distances(x, x))),
        lambda x: jnp.exp(-distances(x, x)) @ x / jnp.sum(jnp.exp(-distances(x, x)), 1)[:, None],
        lambda x: jnp.max(jnp.tanh(x[:, None] - x[None]), (1, 2)),
        lambda x: jnp.sum(jnp.exp(-(jnp.squeeze(x[:, None] - x, -1) ** 2)), 0)[:, None],
    ],
)
def test_distances_on_a_line_are_computed_without_the_axis_of_features(fun: Callable) -> None:
    """XLA takes some time for every row, and these have one element."""
    report = explained(fun, LINE)
    assert any(r.name == NAME for r in report.rules)
    equations = report.after.jaxpr.eqns
    assert all(v.aval.shape != (400, 400, 1) for e in equations for v in e.outvars)


def test_rows_of_one_element_that_several_read_are_stored_by_a_loop_without_them() -> None:
    def both(x):
        pairs = jnp.tanh(x[:, None] + x)
        return jnp.sum(pairs, 0) + jnp.sum(pairs, 1)

    assert not joined(both, LINE)
