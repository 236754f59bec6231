"""Loops of which some carries are affine run one part after the other, with the same values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from symjax_rewrite import sym_optimize
from tests.programs import assert_close

L, D, N = 12, 6, 4


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).uniform(-1, 1, shape), jnp.float32)


X, H, A, W = draw(L, D), draw(D, N), -abs(draw(D, N)), draw(D, D)
START = (draw(D), H)


def window_before(carry, x):
    """A short convolution's window, and the states it feeds."""
    window, h = carry
    window = jnp.concatenate([window[1:], x[:1]])
    u = jax.nn.silu(window * 0.5)
    h = jnp.exp(jax.nn.softplus(u)[:, None] * A) * h + u[:, None]
    return (window, h), (h * A).sum(-1) + u


def network_after(carry, x):
    """States that are affine in themselves, and a network that reads them."""
    g, h = carry
    h = jnp.exp(A * abs(x)[:, None]) * h + x[:, None]
    g = jnp.tanh(g @ W + h.sum(-1))
    return (g, h), g * x


def between(carry, x):
    """A network before and one after; products of the sources."""
    g, h = carry
    last, g = g, jnp.tanh(g + x @ W)
    h = jax.nn.sigmoid(g)[:, None] * h + last[:, None]
    return (g, h), (h @ A.T, last)


def stabilised(carry, x):
    """Exponential gates by their running maximum."""
    m, h = carry
    new = jnp.maximum(m + x, x * 2)
    h = jnp.exp(m + x - new)[:, None] * h + jnp.exp(x * 2 - new)[:, None]
    return (new, h), h.sum(-1)


def two_affine(carry, x):
    g, h = carry
    return (0.5 * g + x, jnp.exp(A * abs(x)[:, None]) * h + g[:, None]), h.sum(0)


def turned(carry, x):
    """A network reads the states before a step, with their entries moved."""
    g, h = carry
    g = jnp.tanh(g + jnp.roll(h, 1, 0).sum(-1))
    return (g, jnp.exp(A * abs(x)[:, None]) * h + x[:, None]), jnp.roll(h, 1, 1)


SPLIT = [window_before, network_after, between, stabilised, two_affine, turned]


def check(fun: Callable, *args: Any, **options: Any) -> Any:
    optimised = sym_optimize(fun, on_unsupported="error", **options)
    assert_close(jax.jit(fun)(*args), optimised(*args))
    return [r for r in optimised.explain(*args).routes if r.name == "scan"]


@pytest.mark.parametrize("step", SPLIT, ids=lambda f: f.__name__)
def test_affine_carries_run_apart(step: Callable) -> None:
    reverse = step is between
    run = lambda start, xs: lax.scan(step, start, xs, reverse=reverse)  # noqa: E731
    (route,) = check(run, START, X, kernels="xla")
    assert route.taken and "separate loops" in route.reason


def test_a_carry_that_a_matrix_state_reads_as_it_is() -> None:
    def step(carry, x):
        g, h = carry
        return (0.5 * g + x, jnp.sin(x)[:, None] * h + g[:, None]), h.sum(0)

    (route,) = check(lambda start, xs: lax.scan(step, start, xs), START, X, kernels="xla")
    assert route.taken and "matrix states" in route.reason


def test_carries_that_read_each_other_stay_together() -> None:
    def step(carry, x):
        g, h = carry
        return (jnp.tanh(g + h.sum(-1)), 0.9 * h + (g * x)[:, None]), h.sum(-1)

    (route,) = check(lambda start, xs: lax.scan(step, start, xs), START, X, kernels="xla")
    assert not route.taken and "tanh of the carry" in route.reason


def test_split_on_a_cpu_where_it_pays() -> None:
    def step(carry, given):
        g, h = carry
        x, dt, c = given
        g = jnp.tanh(g + x)
        h = jnp.exp(dt[:, None] * A0) * h + (dt * g)[:, None]
        return (g, h), h @ c

    wide, narrow = jnp.zeros((512, 16)), jnp.zeros((6, 4))
    for state, taken in ((wide, True), (narrow, False)):
        rows, columns = state.shape
        A0 = -jnp.ones((rows, columns))
        given = (draw(64, rows), abs(draw(64, rows)), draw(64, columns))
        routes = check(lambda start, xs: lax.scan(step, start, xs), (state[:, 0], state), given)
        assert [r.taken for r in routes] == [taken]
