"""Sums over the few places of each row that are not zero: gradients of the k nearest."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.pallas_kernels.fold import tiling
from symjax_rewrite.testing.assertions import assert_equivalent, assert_no_intermediate
from tests.kernel_selection.folds.programs import squares
from tests.programs import emitted

N, M, D, K = 600, 1101, 8, 4


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


X, Y = draw(N, D), draw(M, D, seed=1)


def far(x, y):
    """Distances that are no rounding away from each other."""
    return jnp.sqrt(((x[:, None] - y) ** 2).sum(-1) + 1e-6)


def one_row(x, y):
    return jnp.log1p(-jax.lax.top_k(-((x - y) ** 2).sum(-1), K)[0]).sum()


def masked(x, y):
    keep = (jnp.arange(N)[:, None] + jnp.arange(M)) % 3 > 0
    s = jnp.where(keep, jnp.tanh(0.1 * x @ y.T), -9.0)
    return jnp.sin(jax.lax.top_k(s, K)[0]).sum()


def batched(x, y):
    s = jnp.einsum("bnd,bmd->bnm", x.reshape(3, -1, D), y[: M // 3 * 3].reshape(3, -1, D))
    return jnp.sin(jax.lax.top_k(s, 2)[0]).sum()


def along_rows(x, y):
    return jnp.sin(jnp.sort(far(x, y), axis=0)[:K]).sum()


def triplet(x, y):
    """The hardest of the others, their places chosen without derivatives."""
    d = far(x, x)
    worst = jnp.argmin(jax.lax.stop_gradient(d) + 9 * jnp.eye(N), 1)
    return jax.nn.relu(3.0 - jnp.take_along_axis(d, worst[:, None], 1)).sum() + 0 * y.sum()


def chosen(x, y):
    s = x @ y.T
    return jnp.sin(s[jnp.arange(N), jnp.argmax(s, 1)]).sum()


def weighted(x, y):
    d, at = jax.lax.top_k(-squares(x, y), K)
    return (jax.nn.softmax(d)[..., None] * y[at] * x[:, None]).sum()


LOSSES: dict[str, Callable] = {
    "top-k": lambda x, y: jnp.sin(jax.lax.top_k(-squares(x, y), K)[0]).sum(),
    "of differences": lambda x, y: jnp.log1p(-jax.lax.top_k(-far(x, y), K)[0]).mean(),
    "sorted": lambda x, y: jnp.sin(jnp.sort(squares(x, y), 1)[:, :K]).sum(),
    "one of the sorted": lambda x, y: jnp.sin(jnp.sort(far(x, y), 1)[:, 3]).sum(),
    "mapped": lambda x, y: jax.vmap(one_row, (0, None))(x, y).sum(),
    "taken along": lambda x, y: jnp.sin(
        jnp.take_along_axis(squares(x, y), jax.lax.top_k(-squares(x, y), K)[1], 1)
    ).sum(),
    "masked": masked,
    "batched": batched,
    "along rows": along_rows,
    "triplet": triplet,
    "chosen": chosen,
    "weighted": weighted,
}  # fmt: skip


def taken(fun: Callable, *args: Any) -> list[bool]:
    report = sym_optimize(fun, kernels="always").explain(*args)
    return [r.taken for r in report.routes if r.name == "sparse"]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_hold_no_pairs(name, monkeypatch):
    monkeypatch.setattr(tiling, "ONE_BLOCK", 0)  # else few pairs are one block
    grad = jax.grad(LOSSES[name], (0, 1))
    routed = sym_optimize(grad, kernels="always", on_unsupported="error")
    report = routed.explain(X, Y)
    assert [r.taken for r in report.routes if r.name == "sparse"] == [True]
    assert all(r.seconds for r in report.routes if r.name == "sparse")
    pairs = {"batched": N * M // 9 * 3, "triplet": N * N}.get(name, N * M)
    assert_no_intermediate(emitted(report), X, Y, elements=pairs)
    assert_equivalent(routed, jax.jit(grad), X, Y, rtol=2e-5)


@pytest.mark.parametrize("name", ["top-k", "of differences", "batched", "sorted"])
def test_gradients_of_optimised_programs_hold_no_pairs(name):
    fun = LOSSES[name]
    grad = jax.grad(sym_optimize(fun, kernels="always"), (0, 1))
    assert_no_intermediate(grad, X, Y, elements=N * M // (3 if name == "batched" else 1))
    assert_equivalent(grad, jax.jit(jax.grad(fun, (0, 1))), X, Y, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_sparse_gradients_in_other_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, y = (jnp.asarray(np.round(z), dtype) for z in (X, Y))  # exact products
        fun = jax.grad(lambda x, y: (jax.lax.top_k(x @ y.T, K)[0] ** 2).sum(), (0, 1))
        assert taken(fun, x, y) == [True]
        both = sym_optimize(fun, kernels="always")(x, y), jax.jit(fun)(x, y)
        for ours, written in zip(*both, strict=True):
            assert ours.dtype == written.dtype
            scale = np.abs(np.asarray(written, np.float64)).max()
            error = np.abs(np.asarray(ours, np.float64) - np.asarray(written, np.float64)).max()
            assert error <= scale * (1e-14 if dtype == "float64" else 2e-2)


@pytest.mark.parametrize("mode", ["drop", "clip"])
@pytest.mark.parametrize("to", ["rows", "columns"])
def test_places_out_of_range_and_places_twice(mode, to):
    at = jnp.asarray(np.random.default_rng(0).integers(-3 * M, 3 * M, (N, K)), jnp.int32)
    at = at.at[:, 1].set(at[:, 0])

    def fun(v, x, y):
        rows = jnp.arange(N)[:, None]
        s = jnp.zeros((N, M)).at[rows, at].add(v, mode=mode)
        return s @ y if to == "rows" else s.T @ jnp.tanh(x)

    args = draw(N, K), X, Y
    assert taken(fun, *args) == [True]
    assert_equivalent(sym_optimize(fun, kernels="always"), jax.jit(fun), *args)


def at_equal_places(v, x):
    """Two values at one place of each row, which are added."""
    at = jnp.arange(len(v))[:, None] * jnp.ones(2, int) * 7 % len(x)
    return jnp.zeros((len(v), len(x))).at[jnp.arange(len(v))[:, None], at].add(v)


def replaced(v, x):
    at = jnp.arange(len(v))[:, None] * jnp.ones(2, int) * 7 % len(x)
    return jnp.zeros((len(v), len(x))).at[jnp.arange(len(v))[:, None], at].set(v)


def both_ways(v, x):
    s = jnp.zeros((len(v), len(v))).at[jnp.arange(len(v)), jnp.arange(len(v)) * 7 % len(v)]
    return (s.add(v[:, 0]) * s.add(v[:, 0]).T) @ x


def positive(s):
    return jnp.where(s > 0.5, s, 0.0)


@pytest.mark.parametrize(
    ("fun", "routed"),
    [
        (lambda v, x: at_equal_places(v, x) @ x, True),
        (lambda v, x: at_equal_places(v, x) ** 2 @ x, False),
        (lambda v, x: at_equal_places(v, x).astype(int).T @ jnp.ones((len(v), 2), int), False),
        (lambda v, x: positive(at_equal_places(v, x)) @ x, False),
        (lambda v, x: replaced(v, x) @ x, False),
        (lambda v, x: replaced(v, x).T @ x, False),
        (both_ways, True),
    ],
)
def test_values_at_equal_places_are_summed_where_the_program_sums_them(fun, routed):
    v, x = draw(200, 2), draw(200, 4)
    assert taken(fun, v, x) == [True] * routed
    assert_equivalent(sym_optimize(fun, kernels="always"), jax.jit(fun), v, x)


def test_zeros_by_position_are_not_multiplied():
    """Beside the nearest a distance is zero: its derivative is infinite, times zero."""

    def fun(x):
        d = jnp.sqrt(((x[:, None] - x) ** 2).sum(-1))
        return -jax.lax.top_k(-jnp.where(jnp.eye(N, dtype=bool), 9.0, d), K)[0].sum()

    grad = sym_optimize(jax.grad(fun), kernels="always")
    assert np.isfinite(grad(X)).all() and np.isnan(jax.jit(jax.grad(fun))(X)).any()


def beside(x, y):
    s = x @ y.T
    return jax.lax.top_k(s, K)[0].sum() + jnp.exp(s / 9).sum()


LEFT: dict[str, Callable] = {
    "many places": lambda x, y: jax.lax.top_k(x @ y.T, M // 4)[0].sum(),
    "all places": lambda x, y: (jnp.sort(x @ y.T, 1) * jnp.arange(M)).sum(),
    "beside others": beside,
    "onto what is not zero": lambda x, y: jnp.sin(
        jnp.exp(x @ y.T).at[jnp.arange(N), jnp.arange(N)].add(1.0) @ y
    ).sum(),
}


@pytest.mark.parametrize("name", LEFT)
def test_gradients_that_are_not_sparse_stay(name):
    grad = jax.grad(LEFT[name], (0, 1))
    assert not any(taken(grad, X, Y))
    assert_equivalent(sym_optimize(grad, kernels="always"), jax.jit(grad), X, Y, rtol=2e-5)


@pytest.mark.usefixtures("one_device")
def test_gradients_of_long_rows_are_taken_where_their_kernels_pay():
    def taken_on_cpu(rows, width, columns):
        grad = jax.grad(lambda x, y: jnp.sin(jnp.sort(x @ y.T, 1)[:, :2]).sum(), (0, 1))
        report = sym_optimize(grad, device="cpu").explain(draw(rows, width), draw(columns, width))
        return {r.name for r in report.routes if r.taken}

    assert taken_on_cpu(165, 210, 128) == {"sparse", "selection"}
    assert not taken_on_cpu(112, 8, 40)


def test_small_sparse_gradients_stay():
    assert not [
        r
        for r in sym_optimize(jax.grad(LOSSES["top-k"], (0, 1)), device="cpu").explain(X, Y).routes
        if r.taken
    ]


def bag(ids, w, table):
    """A weighted sum of rows of a table, by one-hot rows."""
    return (jax.nn.one_hot(ids, len(table)) * w[..., None]).sum(1) @ table


def label_scores(ids, w, table):
    return (jax.nn.one_hot(ids[:, 0], len(table)) * (w @ table[:, :16].T)).sum(-1)


@pytest.mark.parametrize("fun", [bag, label_scores])
def test_one_hot_rows_are_gathered_by_the_rules(fun):
    """Sums over their places would multiply all columns; the rules read a row for each label."""
    specs = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((256, 16), "int32"),
            ((256, 16), "float32"),
            ((20_000, 64), "float32"),
        )
    ]
    report = sym_optimize(fun, device="cpu").explain(*specs)
    assert "one_hot" in [use.name for use in report.rules]
    assert not any(route.taken for route in report.routes if route.name == "sparse")
