"""Sums over the pairs of one set of points: each pair is computed once where the tile permits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize

COUNT = 650  # two blocks of columns, and rows that overlap


def _gaps(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    d = x[None] - x[:, None]
    return d, jnp.sum(d * d, -1)


def _forces(x, y, m):
    d, r2 = _gaps(x)
    return jnp.sum((m * jax.lax.rsqrt(r2 + 1e-2) ** 3)[..., None] * d, 1)


def _screened(x, y, m):
    d, r2 = _gaps(x)
    r = jnp.sqrt(r2 + 1e-2)
    return 0.5 * jnp.sum((m[:, None] * m * jnp.exp(-r) * (1 + r) / (r * r2 + 1))[..., None] * d, 1)


def _potential(x, y, m):
    _, r2 = _gaps(x)
    return jnp.sum(jnp.where(r2 > 0, m * jax.lax.rsqrt(jnp.maximum(r2, 1e-30)), 0), 1)


def _forces_within_a_distance(x, y, m):
    d, r2 = _gaps(x)
    near = ((r2 > 0) & (r2 < 0.25))[..., None]
    return jnp.sum(jnp.where(near, (m / jnp.sqrt(r2 + 1e-6))[..., None] * d, 0), 1)


def _phases(x, y, m):  # no weights: coupled oscillators
    return jnp.sum(jnp.sin(m[None] - m[:, None]), 1)


def _features(x, y, m):
    _, r2 = _gaps(x)
    return jnp.exp(-jnp.sqrt(r2 + 1)) @ y


def _by_distance_of_places(x, y, m):
    i = jnp.arange(COUNT)
    return jnp.sum(jnp.exp(-jnp.abs(i[:, None] - i) * 0.1) * jnp.cos(m[:, None] - m) * m, 1)


def _two_sets(x, y, m):
    d = y[None] - x[:, None]
    return jnp.sum((m * jax.lax.rsqrt(jnp.sum(d * d, -1) + 1e-2) ** 3)[..., None] * d, 1)


def _lopsided(x, y, m):
    return jnp.sum(jnp.exp(-jnp.square(m[:, None] - 2 * m)) * m, 1)


def _softened_by_point(x, y, m):
    d, r2 = _gaps(x)
    return jnp.sum(jax.lax.rsqrt(r2 + m**2 + 1e-2)[..., None] * d, 1)


def _earlier(x, y, m):
    _, r2 = _gaps(x)
    i = jnp.arange(COUNT)
    return jnp.sum(jnp.where(i[:, None] < i, jnp.exp(-jnp.sqrt(r2 + 1)), 0.0) * m, 1)


def _with_offset(x, y, m):
    return jnp.sum(jnp.tanh(m[:, None] - m + 0.5), 1)


def _arguments(dtype: str = "float32") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    drawn = rng.random((COUNT, 3)), rng.random((COUNT, 3)), rng.random(COUNT)
    return [jnp.asarray(a.astype(dtype)) for a in drawn]


def _is_mirrored(f: Any, *args: jax.Array) -> bool:
    return any("computed once" in r.reason for r in f.explain(*args).routes if r.taken)


def _inverse_distances(x: Any, y: Any, m: Any) -> Any:
    """A pair with itself gives 1 / 0."""
    return jnp.sum(m / (x[:, None, 0] - x[None, :, 0]), axis=1)


SYMMETRIC = [_forces, _screened, _potential, _forces_within_a_distance, _phases, _features]
SYMMETRIC += [_by_distance_of_places]
LOOKALIKES = [_two_sets, _lopsided, _softened_by_point, _earlier, _with_offset]


@pytest.mark.parametrize("program", LOOKALIKES)
def test_other_pairs_are_all_computed(program: Callable) -> None:
    assert not _is_mirrored(sym_optimize(program, kernels="always"), *_arguments())


@pytest.mark.parametrize("program", SYMMETRIC)
def test_symmetric_pairs_are_computed_once(program: Callable) -> None:
    args, f = _arguments(), sym_optimize(program, kernels="always")
    assert _is_mirrored(f, *args)
    expected = np.asarray(jax.jit(program)(*args))
    np.testing.assert_allclose(f(*args), expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max())


def test_weights_that_are_not_read_for_all_pairs_may_be_infinite() -> None:
    """Point 7 does not act on itself; its mass would give 0 · inf there."""
    x, y, m = _arguments()
    m = m.at[7].set(jnp.inf)
    f = sym_optimize(_potential, kernels="always")
    np.testing.assert_allclose(f(x, y, m), jax.jit(_potential)(x, y, m), rtol=1e-5)
    assert np.isfinite(f(x, y, m)[7])


@pytest.mark.parametrize("program", [_inverse_distances, _forces])
@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_values_that_are_not_finite_stay_where_they_are(program: Callable, bad: float) -> None:
    x, y, m = _arguments()
    for args in ((x, y, m.at[7].set(bad)), (x.at[3, 1].set(bad), y, m)):
        f = sym_optimize(program, kernels="always")
        assert _is_mirrored(f, *args)
        np.testing.assert_allclose(f(*args), jax.jit(program)(*args), rtol=1e-4, atol=1e-3)


def test_half_of_the_pairs_of_few_points_is_refused_by_price(one_device) -> None:
    f, few = sym_optimize(_forces), _arguments()
    many = [jnp.zeros((8192, *a.shape[1:])) for a in few]
    assert _is_mirrored(f, *many)
    assert not _is_mirrored(f, *few)
    assert not _is_mirrored(sym_optimize(_forces, device="h200"), *many)


def test_sums_of_two_dtypes_are_computed() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=(6, 2)))
        y = jnp.asarray(rng.normal(size=(6, 2)), jnp.float32)

        def f(x: jax.Array, y: jax.Array) -> jax.Array:
            centre = jnp.eye(6) - 1 / 6
            k, m = (jnp.exp(-_gaps(a)[1]) for a in (x, y))
            return jnp.trace(k @ centre @ m @ centre)

        found = sym_optimize(f, kernels="always", on_unsupported="error")(x, y)
        np.testing.assert_allclose(found, f(x, y), rtol=1e-6)
