"""Masks that a band implies are left out inside the band, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite.pallas_kernels.index_bounds import inside_band

SIDE = 16


def causal(dots, values, i, j):
    return jnp.where(j <= i, dots[0], -jnp.inf)


def window(dots, values, i, j):
    return jnp.where((j <= i) & (i - j < 64), dots[0], -jnp.inf)


def window_as_zeros(dots, values, i, j):
    return jnp.where((j > i) | (j + 64 <= i), 0.0, dots[0])


def gradient(dots, values, i, j):
    _, pull = jax.vjp(lambda s: causal((s,), values, i, j), dots[0])
    return pull(values[0])[0]


def narrower(dots, values, i, j):
    return jnp.where(j <= i - 20, dots[0], -jnp.inf)


def strided(dots, values, i, j):
    return jnp.where(((i ^ j) & 1) == 0, dots[0], -jnp.inf)


def doubled(dots, values, i, j):
    return jnp.where(2 * j <= i, dots[0], -jnp.inf)


def overflowing(dots, values, i, j):
    return jnp.where(j + (2**31 - 8) <= i + (2**31 - 8), dots[0], -jnp.inf)


def masked_by_data(dots, values, i, j):
    return jnp.where((j <= i) & (values[0] > 0), dots[0], -jnp.inf)


BAND = (-63, 0)
DECIDED = [causal, window, window_as_zeros, gradient]
UNDECIDED = [narrower, strided, doubled, overflowing]


def arguments(row, column):
    rng = np.random.default_rng(0)
    dot, value = (rng.normal(size=(SIDE, SIDE)).astype(np.float32) for _ in range(2))
    i = (row + jnp.arange(SIDE, dtype=jnp.int32))[:, None]
    j = (column + jnp.arange(SIDE, dtype=jnp.int32))[None, :]
    return (dot,), (value,), i, j


@pytest.mark.parametrize("fun", [*DECIDED, *UNDECIDED, masked_by_data])
def test_values_inside_the_band_are_those_of_the_program(fun):
    given = arguments(240, 216)  # j - i from -39 to -9
    got, _ = inside_band(fun, given, BAND)
    np.testing.assert_array_equal(got, fun(*given))


def selects(fun):
    jaxpr = jax.make_jaxpr(lambda *xs: inside_band(fun, xs, BAND)[0])(*arguments(240, 216))
    return str(jaxpr).count("select_n")


@pytest.mark.parametrize("fun", DECIDED)
def test_implied_masks_are_left_out(fun):
    assert selects(fun) == 0
    assert inside_band(fun, arguments(240, 216), BAND)[1]


@pytest.mark.parametrize("fun", UNDECIDED)
def test_masks_that_the_band_does_not_imply_stay(fun):
    assert selects(fun) == 1
    assert not inside_band(fun, arguments(240, 216), BAND)[1]


def test_a_mask_of_data_stays():
    assert selects(masked_by_data) == 1


def test_a_band_without_bounds_decides_nothing():
    assert not inside_band(causal, arguments(0, 0), (None, None))[1]
