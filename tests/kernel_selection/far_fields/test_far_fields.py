"""Sums over pairs of points by cells: within the tolerance, or by all pairs."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.kernel_selection.far_fields import chebyshev
from symjax_rewrite.kernel_selection.far_fields.radial_terms import Monomial

RTOL = 1e-2
COUNT = 1500


def squares(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def guarded(x, m):
    r2 = squares(x, x)
    return jnp.sum(jnp.where(r2 > 0, m * jax.lax.rsqrt(jnp.maximum(r2, 1e-30)), 0), 1)


def off_diagonal(x, m):
    r2 = squares(x, x) + jnp.eye(len(x))
    return jnp.sum(m / jnp.sqrt(r2) * (1 - jnp.eye(len(x))), 1)


def softened(x, m):
    return jnp.sum(m / (squares(x, x) + 1e-2), 1)


def forces(x, m):
    d = x[None] - x[:, None]
    return jnp.sum((m * (jnp.sum(d * d, -1) + 1e-2) ** -1.5)[..., None] * d, 1)


def weighted(x, m):
    return (squares(x, x) + 1e-2) ** -0.5 @ jnp.stack([m, 1 + m], 1)


slow = pytest.mark.slow
SUMS = (guarded, forces, *(pytest.param(f, marks=slow) for f in (off_diagonal, softened, weighted)))


def points(dims=2, count=COUNT, seed=0):
    rng = np.random.default_rng(seed)
    x, m = rng.random((count, dims), np.float32), rng.random(count, np.float32)
    return jnp.asarray(x), jnp.asarray(m)


def routes(fun, *args, numerics=f"approx({RTOL})"):
    """Return `taken` by the name of every route."""
    report = compiled(fun, numerics).explain(*args)
    return {r.name: r.taken for r in report.routes}


def in_float64(fun, *args):
    with jax.enable_x64(True):
        return np.asarray(fun(*(jnp.asarray(np.asarray(a, np.float64)) for a in args)))


@functools.cache
def compiled(fun, numerics):
    return sym_optimize(fun, numerics=numerics, kernels="always")


def by_cells(fun, *args):
    """Return the value, and True if the branch of cells ran."""
    assert routes(fun, *args) == {"far_field": True}
    value = np.asarray(compiled(fun, f"approx({RTOL})")(*args))
    exact = np.asarray(compiled(fun, "reassoc")(*args))
    return value, not np.array_equal(value, exact, equal_nan=True)


@pytest.mark.parametrize("fun", SUMS, ids=lambda f: f.__name__)
def test_sums_by_cells_are_within_the_tolerance(fun):
    args = points()
    value, approximated = by_cells(fun, *args)
    exact = in_float64(fun, *args)
    assert approximated
    assert np.abs(value - exact).max() <= RTOL * np.abs(exact).max()


@slow
def test_sums_in_space_with_two_levels_of_cells_are_within_the_tolerance():
    args = points(dims=3, count=3000)
    value, approximated = by_cells(guarded, *args)
    exact = in_float64(guarded, *args)
    assert approximated
    assert np.abs(value - exact).max() <= RTOL * np.abs(exact).max()


def clustered(x, m):
    return x**8, m


def with_nan(x, m):
    return x.at[3, 0].set(jnp.nan), m


def with_infinity(x, m):
    return x.at[3, 0].set(jnp.inf), m


def equal_points(x, m):
    return jnp.zeros_like(x), m


def cancelling(x, m):
    return x, jnp.where(jnp.arange(len(m)) % 2, 1.0, -1.0)


def tiny(x, m):
    return x * 1e-16, m  # squared distances below the threshold of `guarded`


@pytest.mark.parametrize(
    "change",
    [clustered, with_nan, with_infinity, equal_points, cancelling, tiny],
    ids=lambda f: f.__name__,
)
def test_all_pairs_are_summed_where_the_bound_fails(change):
    _, approximated = by_cells(guarded, *change(*points()))
    assert not approximated


def oscillating(x, m):
    return jnp.sum(m * jnp.sin(40 * jnp.sqrt(squares(x, x) + 1e-2)), 1)


def beyond_a_radius(x, m):
    r2 = squares(x, x)
    return jnp.sum(jnp.where(r2 < 0.1, m / (r2 + 1e-2), 0), 1) + jnp.sum(m / (r2 + 1e-2) ** 2, 1)


def of_one_coordinate_too(x, m):
    return jnp.sum(m * x[:, None, 0] * x[None, :, 0] / (squares(x, x[::-1]) + jnp.eye(len(x))), 1)


def of_a_product(x, m):
    return jnp.sum(m / (2 + x @ x.T), 1)


def stretched(x, m):
    d = x[:, None] - x[None]
    return jnp.sum(m / (d[..., 0] ** 2 + 2 * d[..., 1] ** 2 + 1e-2), 1)


def singular_apart(x, m):
    return jnp.sum(m / (squares(x, x) - 0.25), 1)


def causal(x, m):
    i = jnp.arange(len(x))
    return jnp.sum(jnp.where(i[:, None] >= i, m / (squares(x, x) + 1e-2), 0), 1)


def largest(x, m):
    return jnp.max(m / (squares(x, x) + 1e-2), 1)


LOOKALIKES = (
    oscillating, beyond_a_radius, of_one_coordinate_too, of_a_product, stretched, singular_apart,
    causal, largest,
)  # fmt: skip


@pytest.mark.parametrize("fun", LOOKALIKES, ids=lambda f: f.__name__)
def test_terms_without_a_known_expansion_stay_folds(fun):
    assert not routes(fun, *points()).get("far_field")


@pytest.mark.parametrize("numerics", ["exact", "reassoc", "cancels"])
def test_nothing_is_approximated_without_permission(numerics):
    assert "far_field" not in routes(guarded, *points(), numerics=numerics)


def test_few_points_and_small_tolerances_stay_folds():
    assert not routes(guarded, *points(count=12)).get("far_field")
    assert not routes(guarded, *points(), numerics="approx(1e-30)").get("far_field")
    report = sym_optimize(guarded, numerics="approx(1e-2)", device="cpu").explain(*points())
    assert "far_field" not in {r.name for r in report.routes if r.taken}


@slow
def test_gradients_are_those_of_the_sum():
    x, m = points(count=400)
    fast = sym_optimize(softened, numerics=f"approx({RTOL})", kernels="always")
    got = jax.grad(lambda x: fast(x, m).sum())(x)
    want = jax.grad(lambda x: softened(x, m).sum())(x)
    np.testing.assert_allclose(got, want, atol=2 * RTOL * np.abs(want).max())


KERNELS = (
    Monomial(radials=((0.0, Fraction(-1, 2)),)),
    Monomial(radials=((0.0, Fraction(-1)),)),
    Monomial(differences=(0,), radials=((0.0, Fraction(-3, 2)),)),
    Monomial(differences=(0, 1), radials=((0.0, Fraction(-5, 2)),)),
    Monomial(radials=((0.3, Fraction(-1, 2)),)),
    Monomial(radials=((9.0, Fraction(-3, 2)),)),
)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("order", [2, 4, 6])
def test_errors_at_random_points_are_below_the_bound(kernel, order):
    offsets = np.array([[0, 2], [2, 2], [-1, 3]])
    bounds = chebyshev.largest_errors(kernel, order, offsets)
    x, y = np.random.default_rng(0).uniform(-1, 1, (2, 400, 2))
    at = np.array(np.meshgrid(chebyshev.nodes(order), chebyshev.nodes(order))).T.reshape(-1, 2)
    for offset, bound in zip(offsets, bounds, strict=True):

        def term(a, b, offset=offset):
            gaps = (a[:, None] - b[None]) / 2 - offset
            made = np.prod(
                [gaps[..., d] for d in kernel.differences] or [np.ones(gaps.shape[:2])], 0
            )
            for shift, power in kernel.radials:
                made = made * (np.sum(gaps**2, -1) + shift) ** float(power)
            return made

        def weights(p):
            columns = [chebyshev.basis(order, np.ascontiguousarray(p[:, d])) for d in (0, 1)]
            return np.einsum("pi,pj->pij", *columns).reshape(len(p), -1)

        error = term(x, y) - weights(x) @ term(at, at) @ weights(y).T
        assert np.abs(error).max() <= bound
