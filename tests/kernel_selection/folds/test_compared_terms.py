"""The derivative of a maximum goes to the places where it is taken, and is shared among them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.testing.assertions import assert_equivalent, assert_no_intermediate
from tests.kernel_selection.folds.programs import draw, gradient, steepest

N, M, D = 130, 110, 4


def rounded(*shape, seed=0):
    """Whole numbers, of which many are equal."""
    return jnp.round(draw(*shape, seed=seed))


def repeated(*shape, seed=0):
    """Rows that are there twice."""
    x = draw(*shape, seed=seed)
    return x.at[shape[0] // 2 :].set(x[: shape[0] - shape[0] // 2])


def constant(*shape, seed=0):
    """Everything is the maximum."""
    return jnp.full(shape, 1.0 + seed, jnp.float32)


def unbounded(*shape, seed=0):
    return draw(*shape, seed=seed).at[3, 0].set(jnp.nan).at[5].set(jnp.inf)


def clipped(x, y):
    return jax.nn.relu(x @ y.T - 1).max(-1)


def filled(x, y):
    """Rows without a key are equal to their fill everywhere."""
    seen = jnp.arange(len(x))[:, None] - 20 > jnp.arange(len(y))
    return jnp.where(seen, x @ y.T, -1e9).max(-1)


def shifted(x, y):
    s = x @ y.T
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e @ y) / (e.sum(-1, keepdims=True) + 0.5)


FUNCTIONS = [steepest, clipped, filled, shifted]


@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("values", [rounded, repeated, constant], ids=lambda f: f.__name__)
def test_ties_share_the_derivative(fun, values):
    args = values(N, D), values(M, D, seed=1)
    grad = gradient(fun, 2)
    routed = sym_optimize(grad, kernels="always", on_unsupported="error")
    assert {r.taken for r in routed.explain(*args).routes if r.name == "fold"} == {True}
    for ours, written in zip(routed(*args), jax.jit(grad)(*args), strict=True):
        np.testing.assert_allclose(ours, written, rtol=2e-5, atol=5e-6 + 2e-5 * abs(written).max())


@pytest.mark.parametrize("fun", [steepest, clipped, filled, shifted], ids=lambda f: f.__name__)
def test_gradient_with_infinite_scores_is_unchanged(fun):
    args = unbounded(N, D), draw(M, D, seed=1)
    grad = gradient(fun, 2)
    ours, theirs = sym_optimize(grad, kernels="always")(*args), jax.jit(grad)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), ours, theirs)


@pytest.mark.parametrize("rows", [700, 1500])
def test_blocks_of_whole_rows_and_a_remainder(rows):
    """More rows, or columns, than one block holds; numbers of which no sum is rounded."""
    args = rounded(rows, D), rounded(1501, D, seed=1)
    grad = gradient(steepest, 2)
    routed = sym_optimize(grad, kernels="always")
    assert_no_intermediate(routed, *args, elements=rows * 1501)
    assert_equivalent(routed, jax.jit(grad), *args, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_ties_in_other_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        args = (jnp.asarray(rounded(n, D), dtype) for n in (70, 90))
        x, y = args
        grad = gradient(steepest, 2)
        ours, theirs = sym_optimize(grad, kernels="always")(x, y), grad(x, y)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype == dtype
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol={"float64": 1e-12}.get(dtype, 2e-2), atol=2e-2)


def straight_through(x, y):
    """One at the maximum on the way there, a softmax on the way back."""
    s = x @ y.T
    soft = jax.nn.softmax(s)
    hard = (s == s.max(-1, keepdims=True)).astype(s.dtype)
    return (soft + jax.lax.stop_gradient(hard - soft)) @ y


def stopped_beneath(x, y):
    """The shift of the sum counts, that of the weights does not."""
    s = x @ y.T
    top = s.max(-1, keepdims=True)
    e = jnp.exp(s - jax.lax.stop_gradient(top))
    return (e @ y) / jnp.exp(s - top).sum(-1, keepdims=True)


def two_scores(x, y):
    s, r = x @ y.T, (x * 0.5) @ y.T
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e @ y) / jnp.exp(r - s.max(-1, keepdims=True)).sum(-1, keepdims=True)


def largest_as_a_value(x, y):
    s = x @ y.T
    top = s.max(-1, keepdims=True)
    return (jnp.exp(s - top) @ y) * top


def of_another_axis(x, y):
    s = x @ y.T
    e = jnp.exp(s - s.max(0, keepdims=True))
    return e @ y / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "fun",
    [straight_through, stopped_beneath, two_scores, largest_as_a_value, of_another_axis],
    ids=lambda f: f.__name__,
)
def test_a_maximum_that_matters_keeps_its_derivative(fun):
    args = draw(60, D), draw(50, D, seed=1)
    grad = gradient(fun, 2)
    assert_equivalent(sym_optimize(grad, kernels="always"), jax.jit(grad), *args, rtol=5e-5)
    assert_equivalent(sym_optimize(fun, kernels="always"), jax.jit(fun), *args, rtol=5e-5)


def attention_weights(x, y):
    """A softmax with its shift written out."""
    s = x @ y.T
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ y


@pytest.mark.parametrize("fun", [attention_weights, shifted])
def test_rounding_between_the_terms_hides_no_cancellation(fun):
    """In bfloat16 the derivative by a shift that cancels is rounding; another one is kept."""
    args = [jnp.asarray(draw(n, D, seed=n), jnp.bfloat16) for n in (60, 50)]
    grad = gradient(fun, 2)
    routed = sym_optimize(grad, kernels="always")
    text = str(routed.explain(*args).after.jaxpr)
    assert ("eq" in re.findall(r"= (\w+)", text)) == (fun is not attention_weights)
    exact = jax.jit(grad)(*(jnp.asarray(x, jnp.float32) for x in args))
    for ours, true in zip(routed(*args), exact, strict=True):
        ours = np.asarray(ours, np.float32)
        np.testing.assert_allclose(ours, true, rtol=0.1, atol=0.02 * abs(true).max())
