"""The laws: identity, associativity, and that a block's state is its halves' combined."""

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from symjax_rewrite.pallas_kernels import monoid

ROWS = 3
finite = st.floats(-30, 30, width=32)
with_infinities = finite | st.sampled_from([-np.inf, -np.inf, 80.0, -200.0])
anything = with_infinities | st.sampled_from([np.nan, np.inf])
few = st.sampled_from([0.0, 1.0, 2.0, -np.inf])


def block_of(elements, columns, rows=ROWS):
    return hnp.arrays(np.float32, (rows, columns), elements=elements)


def block(name, x, start):
    """Return the input of the monoid of a plain block that starts at column `start`."""
    x = jnp.asarray(x)
    j = start + jnp.arange(x.shape[1], dtype=jnp.int32)
    weights = jnp.cos(1.0 + j[:, None] * jnp.arange(1.0, 3.0))
    measures = (monoid.row_sum, lambda p: p @ weights, lambda p: p @ weights[:, 0])
    if name in ("sum", "softmax-weighted sum"):
        return x, measures
    if name.endswith("maps"):
        return jnp.sin(x), jnp.cos(x)
    if name in ("argmax", "argmin") or name.startswith("top"):
        return x, j[None, :]
    return (x > 0,) if name in ("any", "all") else (x,)


MONOIDS = [
    (monoid.SUM, finite),
    (monoid.MAX, anything),
    (monoid.MIN, anything),
    (monoid.ANY, finite),
    (monoid.ALL, finite),
    (monoid.EXP_SUMS, anything),
    (monoid.AFFINE, finite),
    (monoid.RESETTING, finite),
    (monoid.MAX_PLUS, finite),
    (monoid.MIN_PLUS, finite),
    (monoid.ARGMAX, anything),
    (monoid.ARGMIN, anything),
    (monoid.top_k(3, group=1), few),
    (monoid.top_k(2, group=2), few),
]
IDS = [f"{m.name}-{k}" for k, (m, _) in enumerate(MONOIDS)]


def same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "elements"), MONOIDS, ids=IDS)
def test_laws(m, elements):
    @settings(max_examples=25)
    @given(st.data(), st.tuples(*[st.sampled_from([5, 1, 0])] * 3))
    def check(data, widths):
        parts, start = [], 0
        for width in widths:
            x = data.draw(block_of(elements, width))
            parts.append((x, start))
            start += width
        a, b, c = (m.lift(*block(m.name, x, s)) for x, s in parts)
        empty = m.identity(jax.eval_shape(lambda: a))
        same(m.combine(a, m.combine(b, c)), m.combine(m.combine(a, b), c))
        same(m.combine(empty, a), a)
        same(m.combine(a, empty), a)
        whole = m.lift(*block(m.name, np.concatenate([x for x, _ in parts], 1), 0))
        same(whole, m.combine(m.combine(a, b), c))
        first, second, _ = (block(m.name, x, s) for x, s in parts)
        same(m.extend(m.extend(empty, *first), *second), m.combine(a, b))
        same(m.lift(*block(m.name, np.zeros((ROWS, 0), np.float32), 0)), empty)

    check()


@given(block_of(with_infinities, 12))
def test_logsumexp_is_jax_own(x):
    top, total = monoid.EXP_SUMS.extend(monoid.EXP_SUMS.lift(x[:, :5]), x[:, 5:])
    want = jax.nn.logsumexp(x, axis=-1)
    got = monoid.shift_of(top) + jnp.log(total)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@given(block_of(finite, 12))
def test_softmax_mean_is_jax_own(x):
    w = jnp.arange(12.0)
    measures = (monoid.row_sum, lambda p: p @ w)
    _, total, weighted = monoid.EXP_SUMS.lift(jnp.asarray(x), measures)
    got = weighted / total
    np.testing.assert_allclose(got, jax.nn.softmax(x, axis=-1) @ w, rtol=1e-4, atol=1e-5)


def test_a_row_of_minus_infinity_has_empty_sums():
    x = jnp.full((1, 4), -jnp.inf)
    top, total = monoid.EXP_SUMS.lift(x)
    assert top[0] == -jnp.inf
    assert total[0] == 0
    raw = total * jnp.exp(monoid.shift_of(top) - top)  # as the plain softmax: shifted by -inf
    assert jnp.isnan(raw[0])


@given(block_of(few, 64, rows=2), st.sampled_from([1, 2, 4, 8]))
def test_top_k_breaks_ties_as_lax(x, group):
    values, index = monoid.top_k(3, group).lift(jnp.asarray(x), jnp.arange(64)[None])
    want, place = jax.lax.top_k(x, 3)
    np.testing.assert_array_equal(values, want)
    np.testing.assert_array_equal(index, place)


@given(hnp.arrays(np.float32, (2, 9), elements=anything | few))
def test_arg_extrema_are_jax_own(x):
    j = jnp.arange(9, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(monoid.ARGMAX.lift(jnp.asarray(x), j)[1], jnp.argmax(x, -1))
    np.testing.assert_array_equal(monoid.ARGMIN.lift(jnp.asarray(x), j)[1], jnp.argmin(x, -1))


def test_affine_maps_are_a_recurrence():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0.5, 1, (2, 30)), rng.normal(size=(2, 30))
    h = np.full(2, 3.0)
    for k in range(30):
        h = a[:, k] * h + b[:, k]
    halves = [
        tuple(jnp.asarray(x[:, s], jnp.float32) for x in (a, b)) for s in (slice(11), slice(11, 30))
    ]

    @jax.jit
    def whole(halves):
        return monoid.AFFINE.combine(*(monoid.AFFINE.lift(*half) for half in halves))

    slope, offset = whole(halves)
    np.testing.assert_allclose(slope * 3.0 + offset, h, rtol=1e-4)


def test_top_k_of_groups_finds_nan():
    x = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    x[0, [5, 700]] = np.nan
    index = jnp.arange(1000, dtype=jnp.int32)
    got = jax.jit(lambda x: monoid.top_k(4).lift(x, index))(x)
    want = jax.lax.top_k(x, 4)
    jax.tree.map(np.testing.assert_array_equal, got, tuple(want))
