"""Derivatives of optimised functions: the original's, and as thrifty as the forward pass."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from symjax_rewrite import sym_optimize
from symjax_rewrite.errors import CliffError
from symjax_rewrite.testing.assertions import assert_no_intermediate

X = np.linspace(-1, 1, 4 * 256, dtype=np.float32).reshape(4, 256)
W = np.cos(np.arange(256 * 320, dtype=np.float32)).reshape(256, 320) / 16
A = np.sin(np.arange(256 * 3, dtype=np.float32)).reshape(256, 3)
B = np.cos(np.arange(3 * 320, dtype=np.float32)).reshape(3, 320)


def adapted(x, w, a, b):
    return jnp.sum(jnp.tanh(x @ (w + a @ b)))


def attend(q, k, v):
    return jnp.sum(jnp.sin(jax.nn.softmax(q @ k.T / 4) @ v))


def test_a_gradient_makes_no_dense_update():
    """Neither pass makes a @ b, nor the outer product that its cotangent would be."""
    assert_no_intermediate(
        jax.grad(sym_optimize(adapted), argnums=(0, 2, 3)), X, W, A, B, elements=256 * 320
    )
    with pytest.raises(CliffError):
        assert_no_intermediate(jax.grad(adapted, argnums=(0, 2, 3)), X, W, A, B, elements=256 * 320)


def test_a_gradient_of_a_complex_program():
    """What reverse mode saves of it is complex, for which `jax.checkpoint` has no rounding."""

    def chain(a, b, c):
        return jnp.sum(jnp.abs(jnp.tanh(a @ b) @ c @ a) ** 2)

    a, b, c = W[:, :4] + 0.1j * W[:, 4:8], W[:4, :256] + 0j, 1j * W[:, :256]
    args = tuple(x.astype(np.complex64) for x in (a, b, c))
    f = sym_optimize(chain)
    assert f.explain(*args).rules
    wanted = jax.grad(chain, argnums=(0, 1, 2))(*args)
    chex.assert_trees_all_close(jax.grad(f, argnums=(0, 1, 2))(*args), wanted, rtol=1e-4)


def test_a_gradient_saves_no_pairs():
    """What the fold was spared is no residual: the pullback holds inputs and row values only."""
    q, k, v = (np.cos(np.arange(96 * 16, dtype=np.float32) + i).reshape(96, 16) for i in range(3))
    f = sym_optimize(attend, kernels="always")
    pullback = jax.vjp(f, q, k, v)[1]
    assert max(x.size for x in jax.tree.leaves(pullback)) < 96 * 96
    assert max(x.size for x in jax.tree.leaves(jax.vjp(attend, q, k, v)[1])) >= 96 * 96
    theirs = jax.grad(attend, (0, 1, 2))(q, k, v)
    chex.assert_trees_all_close(pullback(jnp.float32(1)), theirs, atol=1e-5, rtol=1e-4)


def furthest(x):
    return jnp.tanh(x @ x.T / 3).max(-1)


def nearest(x):
    return jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1) + 1e9 * jnp.eye(len(x))).min(-1)


@pytest.mark.parametrize("fun", [furthest, nearest], ids=lambda f: f.__name__)
def test_the_largest_of_a_row_is_found_where_rows_are_made_again(fun):
    """Pairs made again are rounded otherwise than in the fold: none may equal its maximum."""
    x = np.random.default_rng(0).standard_normal((130, 8)).astype(np.float32)
    f = sym_optimize(fun, kernels="always")
    assert [r.taken for r in f.explain(x).routes if r.name == "fold"] == [True]
    ours, theirs = (jax.grad(lambda x, g=g: jnp.sum(jnp.sin(g(x))))(x) for g in (f, fun))
    chex.assert_trees_all_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_what_is_not_differentiated_costs_nothing():
    """Results that no live input reaches, integers and flags keep symbolic zeros."""

    def f(x, w, a, b, n):
        return jnp.sum(x @ (w + a @ b)), w * 2, n + 1, n > 0

    g = sym_optimize(f)
    primal, pullback = jax.vjp(lambda x: g(x, W, A, B, 3), jnp.asarray(X))
    zero = np.zeros((), jax.dtypes.float0)
    (got,) = pullback((jnp.float32(1), jnp.ones_like(W), zero, zero))
    np.testing.assert_allclose(
        got, jnp.broadcast_to((W + A @ B).sum(1), X.shape), rtol=1e-3, atol=1e-4
    )
    assert primal[2] == 4
    tangents = jax.jvp(lambda x: g(x, W, A, B, 3), (jnp.asarray(X),), (jnp.asarray(X),))[1]
    assert not np.asarray(tangents[1]).any()


def test_reverse_rules_of_the_user_are_kept():
    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    f = lambda x, w, a, b: adapted(doubled(x), w, a, b)  # noqa: E731
    ours = jax.grad(sym_optimize(f))(X, W, A, B)
    np.testing.assert_allclose(ours, 2 * jax.grad(adapted)(X, W, A, B), rtol=1e-3, atol=1e-4)
    assert [r.name for r in sym_optimize(f).explain(X, W, A, B).rules] == ["lora"]


def test_checks_of_the_user_are_run():
    """checkify sees the original's operations."""

    def f(x, w, a, b):
        return jnp.log(x @ (w + a @ b))

    checked = checkify.checkify(sym_optimize(f), errors=checkify.float_checks)
    error, _ = checked(X, W, A, B)
    assert "nan" in (error.get() or "")


def test_a_training_step_of_an_optimised_model():
    """Gradients through scan, remat and a second differentiation."""
    params = {"a": A, "b": B}

    def loss(f):
        def total(p):
            step = jax.checkpoint(lambda c, x: (c + f(x[None], W, p["a"], p["b"]), None))
            return jax.lax.scan(step, 0.0, X)[0]

        return total

    ours, theirs = jax.grad(loss(sym_optimize(adapted))), jax.grad(loss(adapted))
    chex.assert_trees_all_close(ours(params), theirs(params), rtol=2e-3, atol=2e-4)

    def second(g):
        return jax.grad(lambda a: jnp.sum(g({"a": a, "b": B})["b"] ** 2))(A)

    np.testing.assert_allclose(second(ours), second(theirs), rtol=1e-2, atol=2e-2)
