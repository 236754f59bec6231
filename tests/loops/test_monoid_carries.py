"""Loops whose carries follow monoids run at once, in any spelling; look-alikes stay loops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize

N, D, B = 200, 3, 5
GPU: dict[str, Any] = {"device": "h200", "kernels": "off"}
NONE, ZERO, ONE = jnp.full(D, -jnp.inf), jnp.zeros(D), jnp.ones(D)
COUNTED = jnp.arange(N, dtype=jnp.int32)


def stream(*shape: int, seed: int = 0) -> jax.Array:
    """Return values with ties."""
    return jnp.asarray(np.random.default_rng(seed).integers(-9, 10, shape) / 4, jnp.float32)


def softmax(c, x):
    m, s = c
    n = jnp.maximum(m, x)
    return n, s * jnp.exp(m - n) + jnp.exp(x - n)


def softmax_other_order(c, x):
    n = jnp.where(x > c[0], x, c[0])
    return n, (jnp.exp(c[0]) * c[1] / jnp.exp(n)) + 1 / jnp.exp(n - x)


def softmax_guarded(c, x):
    m, s = c
    n = jnp.maximum(m, x)
    r = jnp.where(jnp.isfinite(n), n, 0)
    return n, s * jnp.exp(m - r) + jnp.exp(x - r)


def attention(c, x):
    m, s, a = c
    scores, values = x  # [D, B], [B, 4]
    n = jnp.maximum(m, scores.max(-1))
    p, r = jnp.exp(scores - n[:, None]), jnp.exp(m - n)
    return n, s * r + p.sum(-1), a * r[:, None] + p @ values


def best(c, x):
    better = x[0] > c[0]
    return tuple(jnp.where(better, new, old) for new, old in zip(x, c, strict=True))


def best_by_maximum(c, x):
    return jnp.maximum(c[0], x[0]), jnp.where(x[0] > c[0], x[1], c[1])


def least(c, x):
    return jnp.where(c[0] > x[0], x[0], c[0]), lax.select(x[0] < c[0], x[1], c[1])


def best_row(c, x):
    better = x[0] > c[0]
    return jnp.where(better, x[0], c[0]), jnp.where(better[:, None], x[1], c[1])


def welford(c, x):
    n, mean, squares = c
    n = n + 1
    d = x - mean
    mean = mean + d / n
    return n, mean, squares + d * (x - mean)


def welford_one_product(c, x):
    n, mean, squares = c
    d = x - mean
    return n + 1, (n * mean + x) / (n + 1), squares + d * d * n / (n + 1)


def weighted(c, x):
    total, mean, squares = c
    x, w = x
    total = total + w
    d = x - mean
    mean = mean + w / total * d
    return total, mean, squares + w * d * (x - mean)


def chan(c, x):
    """Blocks of B values."""
    n, mean, squares = c
    own, d = x.mean(-1), x.mean(-1) - mean
    whole = n + B
    own_squares = ((x - own[:, None]) ** 2).sum(-1)
    return whole, mean + d * B / whole, squares + own_squares + d * d * n * B / whole


def covariance(c, x):
    n, mean_x, mean_y, both = c
    x, y = x
    n = n + 1
    d = x - mean_x
    mean_x, mean_y = mean_x + d / n, mean_y + (y - mean_y) / n
    return n, mean_x, mean_y, both + d * (y - mean_y)


def mean_by_counter(c, x):
    x, number = x
    return c + (x - c) / (number + 1)


X, Y, W = stream(N, D), stream(N, D, seed=1), jnp.abs(stream(N, D, seed=2))
MASKED = X.at[::3].set(-jnp.inf)
PLACES = jnp.full(D, -1, jnp.int32)
NUMBERS = jnp.broadcast_to(COUNTED[:, None], (N, D))
FOLDS: dict[str, tuple[Callable, Any, Any]] = {
    "log-sum-exp": (softmax, (NONE, ZERO), X),
    "log-sum-exp, from a state": (softmax, (ONE, 2 * ONE), X),
    "log-sum-exp, masked": (softmax, (ONE, 2 * ONE), MASKED),
    "log-sum-exp, masked, from nothing": (softmax, (NONE, ZERO), MASKED),
    "log-sum-exp, guarded": (softmax_guarded, (NONE, ZERO), MASKED),
    "log-sum-exp, another spelling": (softmax_other_order, (ONE, ZERO), X),
    "logaddexp": (jnp.logaddexp, NONE, X),
    "logaddexp, masked": (jnp.logaddexp, NONE, MASKED),
    "online softmax": (
        attention,
        (NONE, ZERO, jnp.zeros((D, 4))),
        (stream(N, D, B), stream(N, B, 4)),
    ),
    "best": (best, (NONE, PLACES), (X, NUMBERS)),
    "best, from a state": (best, (2 * ONE, PLACES), (X, NUMBERS)),
    "best, with NaNs": (best, (NONE, PLACES), (X.at[5].set(jnp.nan), NUMBERS)),
    "best, counted": (best, (NONE, PLACES), (X, COUNTED)),
    "best of integers": (best, (jnp.full(D, -100), PLACES), (NUMBERS % 7, NUMBERS)),
    "best by maximum": (best_by_maximum, (NONE, PLACES), (X, NUMBERS)),
    "best by maximum, with NaNs": (
        best_by_maximum,
        (NONE, PLACES),
        (X.at[50:].multiply(2).at[40, 1].set(jnp.nan), NUMBERS),
    ),
    "least": (least, (-NONE, PLACES), (X, NUMBERS)),
    "best row": (best_row, (NONE, jnp.zeros((D, 4))), (X, stream(N, D, 4))),
    "Welford": (welford, (jnp.float32(0), ZERO, ZERO), X),
    "Welford, from a state": (welford, (jnp.float32(4), ONE, ONE), X),
    "Welford, integer count": (welford, (jnp.int32(0), ZERO, ZERO), X),
    "Welford, another spelling": (welford_one_product, (jnp.float32(0), ZERO, ZERO), X),
    "weighted moments": (weighted, (ZERO, ZERO, ZERO), (X, W + 0.25)),
    "weights of zero": (weighted, (ONE, ONE, ONE), (X, W)),
    "weights of zero, from nothing": (weighted, (ZERO, ZERO, ZERO), (X, W)),
    "moments of blocks": (chan, (jnp.float32(0), ZERO, ZERO), stream(N, D, B)),
    "covariance": (covariance, (jnp.float32(0), ZERO, ZERO, ZERO), (X, Y)),
}
REVERSED = ("best", "best row", "log-sum-exp, masked, from nothing", "covariance")


def looped(step: Callable, reverse: bool = False) -> Callable:
    def loop(start, xs):
        return lax.scan(lambda c, x: (step(c, x), None), start, xs, reverse=reverse)[0]

    return loop


def is_loop(fun: Callable, *args, **options) -> bool:
    return "scan[" in str(sym_optimize(fun, **options).explain(*args).after.jaxpr)


@pytest.mark.parametrize("name", [*FOLDS, *[f"{name}; reversed" for name in REVERSED]])
def test_a_monoid_runs_at_once(name: str) -> None:
    step, start, xs = FOLDS[name.removesuffix("; reversed")]
    fold = looped(step, name.endswith("reversed"))
    assert not is_loop(fold, start, xs, **GPU)
    got, want = sym_optimize(fold, **GPU)(start, xs), fold(start, xs)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


EXTREMA: dict[str, Callable] = {
    "largest since NaN": lambda c, x: jnp.where(c > x, c, x),
    "least since NaN": lambda c, x: jnp.where(x >= c, c, x),
    "largest number": jnp.fmax,
    "least number": jnp.fmin,
    "state that is no number": lambda c, x: jnp.where(jnp.isnan(c), x, jnp.maximum(c, x)),
    "input that is no number": lambda c, x: jnp.where(jnp.isnan(x), c, jnp.maximum(c, x)),
}


@pytest.mark.parametrize("name", EXTREMA)
def test_extrema_that_lose_a_nan_run_at_once(name: str) -> None:
    draw, fold = np.random.default_rng(0), looped(EXTREMA[name], reverse="least" in name)
    numbers = draw.integers(-3, 4, (9, 512)).astype("f")
    ends = draw.choice(np.array([np.nan, np.inf, -np.inf], "f"), (9, 512), p=[0.6, 0.2, 0.2])
    xs = np.where(draw.random((9, 512)) < np.linspace(0, 1, 512), ends, numbers)
    start = draw.choice(np.array([np.nan, np.inf, -np.inf, 0], "f"), 512)
    assert not is_loop(fold, start, xs, **GPU)
    np.testing.assert_array_equal(sym_optimize(fold, **GPU)(start, xs), fold(start, xs))


@pytest.mark.parametrize("first", [0, 1, 7])
def test_a_counter_is_a_count(first: int) -> None:
    """The count before the first step is `first`, or for the second loop `first` less one."""

    def before(start, xs):
        step = lambda i, c: mean_by_counter(c, (xs[i - first], i))  # noqa: E731
        return lax.fori_loop(first, N + first, step, start)

    def after(start, xs):
        step = lambda i, c: mean_by_counter(c, (xs[i - first], i - 1))  # noqa: E731
        return lax.fori_loop(first, N + first, step, start)

    for mean in (before, after)[: 1 + (first > 0)]:
        assert not is_loop(mean, ZERO, X, **GPU)
        np.testing.assert_allclose(sym_optimize(mean, **GPU)(ONE, X), mean(ONE, X), rtol=1e-4)


@pytest.mark.parametrize("number", [lambda i: 2 * i, lambda i: N - i, lambda i: i * i])
def test_a_counter_that_steps_otherwise_is_no_count(number: Callable) -> None:
    def mean(start, xs):
        return lax.fori_loop(0, N, lambda i, c: mean_by_counter(c, (xs[i], number(i))), start)

    assert is_loop(mean, ZERO, X, **GPU)


def test_values_far_from_zero_keep_their_digits() -> None:
    xs = X + 1e4
    args = (jnp.float32(0), ZERO, ZERO), xs
    squares = sym_optimize(looped(welford), **GPU)(*args)[2]
    np.testing.assert_allclose(squares / N, np.var(np.asarray(xs, np.float64), 0), rtol=1e-4)


@pytest.mark.parametrize(("length", "stays"), [(100_000, False), (100, True)])
def test_a_cpu_folds_long_streams_of_numbers(length: int, stays: bool) -> None:
    args = (-jnp.inf, 0.0), stream(length)
    assert is_loop(looped(softmax), *args, device="cpu") == stays


def kahan(c, x):
    s, error = c
    y = x - error
    t = s + y
    return t, (t - s) - y


def two_sum(c, x):
    s, error = c
    t = s + x
    part = t - s
    return t, error + ((s - (t - part)) + (x - part))


def last_best(c, x):
    better = x[0] >= c[0]
    return tuple(jnp.where(better, new, old) for new, old in zip(x, c, strict=True))


def reset(c, x):
    m, s = softmax(c, x)
    return m, jnp.where(s > 1000, 0, s)


def forgetting(c, x):
    n, mean, squares = welford(c, x)
    return jnp.minimum(n, 50), mean, squares


def saturated(c, x):
    return jnp.where(c + x > 20, 20, c + x)


def clamped(c, x):
    return jnp.maximum(c + x, 0)


def unscaled(c, x):
    n = jnp.maximum(c[0], x)
    return n, c[1] * jnp.exp(c[0] - n) + jnp.exp(x)


def wrong_sign(c, x):
    n = jnp.maximum(c[0], x)
    return n, c[1] * jnp.exp(n - c[0]) + jnp.exp(x - n)


def other_condition(c, x):
    better = x[0] > c[0] + 0.5
    return tuple(jnp.where(better, new, old) for new, old in zip(x, c, strict=True))


def kept_with_another(c, x):
    return jnp.maximum(c[0], x[0]), jnp.where(x[1] > c[0], x[1], c[1])


def biased(c, x):
    n, mean, squares = c
    n = n + 1
    d = x - mean
    mean = mean + d / n
    return n, mean, squares + d * d


def begun_by_zero(c, x):
    return jnp.where(c == 0, x, jnp.minimum(c, x))


def begun_by_infinity(c, x):
    return jnp.where(jnp.isfinite(c), jnp.minimum(c, x), x)


def kept_after_nan(c, x):
    largest, place = c
    return jnp.maximum(largest, x[0]), jnp.where(x[0] <= largest, place, x[1])


def least_divided(c, x):
    return jnp.where(c == 0, 2 * x, c + x * (c / c))


def moving_average(c, x):
    return 0.9 * c + 0.1 * x


LOOK_ALIKES: dict[str, tuple[Callable, Any, Any]] = {
    "a compensated sum": (kahan, (ZERO, ZERO), X),
    "errors of a sum": (two_sum, (ZERO, ZERO), X),
    "the last of the best": (last_best, (NONE, PLACES), (X, NUMBERS)),
    "a state that is reset": (reset, (NONE, ZERO), X),
    "a count that ends": (forgetting, (jnp.float32(0), ZERO, ZERO), X),
    "a sum that saturates": (saturated, ZERO, X),
    "a sum that is clamped": (clamped, ZERO, X),
    "a sum that is not rescaled": (unscaled, (NONE, ZERO), X),
    "a sum that grows": (wrong_sign, (ONE, ZERO), X),
    "a margin": (other_condition, (NONE, PLACES), (X, NUMBERS)),
    "a value of another condition": (kept_with_another, (NONE, ZERO), (X, Y)),
    "squares without a correction": (biased, (jnp.float32(0), ZERO, ZERO), X),
    "a least value that zero begins": (begun_by_zero, ZERO, X),
    "a least value that infinity begins": (begun_by_infinity, -NONE, X),
    "a sum that zero begins, with a quotient": (least_divided, ZERO, X),
    "a place that NaN moves": (kept_after_nan, (NONE, PLACES), (X, NUMBERS)),
    "an average that forgets": (moving_average, ZERO, X),
    "half precision": (lambda c, x: c + x, ZERO.astype(jnp.float16), X.astype(jnp.float16)),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_stay_loops(name: str) -> None:
    step, start, xs = LOOK_ALIKES[name]
    assert is_loop(looped(step), start, xs, **GPU)


def test_states_that_are_read_keep_their_loop() -> None:
    def history(start, xs):
        return lax.scan(lambda c, x: (softmax(c, x), c[1]), start, xs)

    assert is_loop(history, (NONE, ZERO), X, **GPU)


def test_exact_keeps_the_order_of_sums() -> None:
    assert is_loop(looped(welford), (jnp.float32(0), ZERO, ZERO), X, numerics="exact", **GPU)


def test_a_state_that_reads_a_carried_key_stays_a_loop() -> None:
    def walk(key: jax.Array, x: jax.Array) -> jax.Array:
        def step(c, _):
            return (jax.random.split(c[0])[0], c[1] + jax.random.normal(c[0], (D,))), None

        return lax.scan(step, (key, x), None, length=N)[0][1]

    sym_optimize(walk, on_unsupported="error", **GPU).explain(jax.random.key(0), ZERO)
