"""Products with banded matrices run in blocks of rows that read their columns alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.testing.assertions import assert_equivalent
from tests.profiles import use_on_cpu

N = 600


def index():
    return jnp.arange(N)[:, None], jnp.arange(N)


def tridiagonal(a):
    return jnp.diag(a[0]) + jnp.diag(a[1, 1:], 1) + jnp.diag(a[2, 1:], -1)


def near(a, width):
    i, j = index()
    return jnp.where(jnp.abs(i - j) <= width, a, 0)


BANDED = {
    "tril": lambda a, b: jnp.tril(a) @ b,
    "triu": lambda a, b: jnp.triu(a, 3) @ b,
    "from the right": lambda a, b: b @ jnp.tril(a, -2),
    "transposed": lambda a, b: jnp.tril(a).T @ b,
    "mask of ones": lambda a, b: (a * jnp.tri(N)) @ b,
    "einsum": lambda a, b: jnp.einsum("ki,kj->ji", jnp.tril(a), b),
    "batched": lambda a, b: jnp.einsum(
        "xij,xjk->xik", jnp.tril(a[None] + b[:2, None]), b[None] + 1
    ),
    "tridiagonal": lambda a, b: tridiagonal(a) @ b,
    "near the diagonal": lambda a, b: near(a, 5) @ b,
    "window": lambda a, b: jnp.where((index()[0] >= index()[1]), near(a, 9), 0) @ b,
    "beside the diagonal": lambda a, b: jnp.where(index()[0] + 40 == index()[1], a, 0) @ b,
    "decay": lambda a, b: (
        jnp.where(index()[0] >= index()[1], 0.9 ** jnp.abs(index()[0] - index()[1]), 0.0) @ b
    ),
    "masked scores": lambda a, b: jnp.where(index()[0] >= index()[1], jnp.tanh(a), 0) @ b,
    "numpy mask": lambda a, b: jnp.where(np.tri(N, dtype=bool), a, 0) @ b,
}
LOOKALIKES = {
    "another fill": lambda a, b: jnp.where(index()[0] >= index()[1], a, 1e-3) @ b,
    "any mask": lambda a, b: jnp.where(a > 0, a, 0) @ b,
    "a triangle added": lambda a, b: (a + jnp.tri(N)) @ b,
    "all but the diagonal": lambda a, b: jnp.where(index()[0] == index()[1], 0, a) @ b,
    "both halves": lambda a, b: (jnp.tril(a) + jnp.triu(b)) @ a,
    "of values": lambda a, b: jnp.where(a[:, :1] >= jnp.arange(N), a, 0) @ b,
    "reversed": lambda a, b: jnp.where(index()[0] >= index()[1], a, 0)[::-1] @ b,
}


def drawn():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((N, N)).astype(np.float32) for _ in range(2)]


def blocks(fun, *args, **options):
    report = sym_optimize(fun, on_unsupported="error", **options).explain(*args)
    return [r.reason for r in report.routes if r.name == "banded" and r.taken]


@pytest.fixture
def eager(monkeypatch):
    """Take every banded product, whatever it gains."""
    use_on_cpu(monkeypatch, bands={"least_flops": 0}, margins={"banded": 0.0})


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", BANDED)
def test_banded_products_run_in_blocks(name):
    args = drawn()
    fun = sym_optimize(BANDED[name], on_unsupported="error")
    assert blocks(BANDED[name], *args)
    assert_equivalent(fun, BANDED[name], *args)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_not_banded_products(name):
    assert not blocks(LOOKALIKES[name], *drawn())


def test_small_and_exact_products_stay():
    large, small = (jax.ShapeDtypeStruct((n, n), jnp.float32) for n in (2000, 64))
    assert " blocks" in blocks(BANDED["tril"], large, large)[0]
    assert not blocks(lambda a, b: jnp.tril(a) @ b, small, small)
    assert not blocks(BANDED["tril"], large, large, numerics="exact")
    assert not blocks(BANDED["tril"], large, large, device="h200")
    thin = jax.ShapeDtypeStruct((2000, 2), jnp.float32)
    assert not blocks(BANDED["tril"], large, thin)


@pytest.mark.usefixtures("eager")
def test_operand_beside_structural_zeros_is_not_read():
    a, b = drawn()
    b[-1] = np.nan
    fun = sym_optimize(BANDED["tril"])
    got, wanted = fun(a, b), jnp.tril(a) @ b
    assert np.isnan(wanted).all() and np.isnan(got[-1]).all() and not np.isnan(got[0]).any()


@pytest.mark.usefixtures("eager")
def test_a_row_without_a_band_keeps_its_nans():
    """0 / 0 in a row that is masked everywhere."""

    def probabilities(a, b):
        i, j = index()
        return jax.nn.softmax(jnp.where(i - 100 >= j, a, -jnp.inf)) @ b

    a, b = drawn()
    assert blocks(probabilities, a, b)
    got = sym_optimize(probabilities)(a, b)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(probabilities(a, b)))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("columns", (60, 500, 601))
def test_blocks_of_a_band_bounded_on_both_sides_are_one_batched_product(columns):
    def banded(a, b):
        i, j = jnp.arange(N)[:, None], jnp.arange(columns)
        return jnp.where((i - 40 <= j) & (j < i + 3), a, 0) @ b

    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(s, np.float32) for s in ((N, columns), (columns, 7)))
    fun = sym_optimize(banded, on_unsupported="error")
    assert " blocks" in blocks(banded, a, b)[0]
    assert str(jax.make_jaxpr(fun)(a, b)).count("dot_general") == 1
    assert_equivalent(fun, banded, a, b)


@pytest.mark.usefixtures("eager")
def test_gradients_and_batches():
    a, b = drawn()
    fun = sym_optimize(BANDED["tril"], on_unsupported="error")
    loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x)))  # noqa: E731
    assert_equivalent(jax.grad(loss(fun), (0, 1)), jax.grad(loss(BANDED["tril"]), (0, 1)), a, b)
    assert_equivalent(jax.vmap(fun), jax.vmap(BANDED["tril"]), a[None], b[None])
