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
from tests.programs import assert_close, normal

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
    """Its residuals are complex: `jax.checkpoint` has no rounding for these."""

    def chain(a, b, c):
        return jnp.sum(jnp.abs(jnp.tanh(a @ b) @ c @ a) ** 2)

    a, b, c = W[:, :4] + 0.1j * W[:, 4:8], W[:4, :256] + 0j, 1j * W[:, :256]
    args = tuple(x.astype(np.complex64) for x in (a, b, c))
    f = sym_optimize(chain)
    assert f.explain(*args).rules
    wanted = jax.grad(chain, argnums=(0, 1, 2))(*args)
    chex.assert_trees_all_close(jax.grad(f, argnums=(0, 1, 2))(*args), wanted, rtol=1e-4)


def test_a_gradient_saves_no_pairs():
    """The pullback holds inputs and row values only, no pairwise terms."""
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
def test_extremum_of_recomputed_pairs_is_found(fun):
    """Recomputed pairs are rounded differently than in the fold; none may equal its maximum."""
    x = np.random.default_rng(0).standard_normal((130, 8)).astype(np.float32)
    f = sym_optimize(fun, kernels="always")
    assert [r.taken for r in f.explain(x).routes if r.name == "fold"] == [True]
    ours, theirs = (jax.grad(lambda x, g=g: jnp.sum(jnp.sin(g(x))))(x) for g in (f, fun))
    chex.assert_trees_all_close(ours, theirs, atol=1e-5, rtol=1e-4)


def energy(x, m):
    d = jnp.sum((x[:, None] - x[None]) ** 2, -1)
    return -jnp.sum(m[:, None] * m[None] * jax.lax.rsqrt(d + 1e-2))


def kernel_product(x, v):
    return jnp.sum(jnp.sin(jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1)) @ v))


def low_rank(u, v, x):
    return jnp.sum(jnp.sin((u @ v) @ x))


def distances(x, y):
    return jnp.sum(jnp.sum((x[:, None] - y[None]) ** 2, -1))


def tree(a, b):
    def combine(p, q):
        return q[0] * p[0], q[0] * p[1] + q[1]

    return jnp.sum(jnp.sin(jax.lax.associative_scan(combine, (jax.nn.sigmoid(a), b))[1]))


BOTH_WAYS = {
    "low-rank weights": (adapted, (X, W, A, B)),
    "chain": (low_rank, (normal(512, 8), normal(8, 512), normal(512, 4))),
    "attention": (attend, (normal(2048, 32), normal(2048, 32), normal(2048, 32))),
    "kernel matrix": (kernel_product, (normal(512, 8), normal(512, 4))),
    "energy": (energy, (normal(512, 3), normal(512))),
    "distances": (distances, (normal(256, 64), normal(512, 64))),
    "affine tree": (tree, (normal(512, 1024), normal(512, 1024))),
    "nothing to gain": (lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2), (X, W)),
}


def flops(compiled):
    costs = compiled.cost_analysis()
    assert costs is not None
    return costs["flops"]


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_both_ways_to_a_gradient_reach_equal_programs(name, one_device):
    """The gradient of the optimised function, and the optimised gradient of the function."""
    fun, args = BOTH_WAYS[name]
    numbers = tuple(range(len(args)))
    outside = jax.jit(jax.value_and_grad(sym_optimize(fun), numbers))
    inside = sym_optimize(jax.value_and_grad(fun, numbers))
    plain = jax.jit(jax.value_and_grad(fun, numbers))
    assert_close(plain(*args), outside(*args), 5e-4, scaled=True)
    both = [f.lower(*args).compile() for f in (outside, inside)]
    costs = [flops(c) for c in both]
    memory = [m.temp_size_in_bytes for c in both if (m := c.memory_analysis()) is not None]
    # The value of an energy does not wait for cotangents: outside it is a fold of its own.
    assert costs[0] <= (1.3 if name == "energy" else 1.15) * costs[1] + 1e4
    assert memory[0] <= 1.15 * memory[1] + 2e5


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_no_more_is_kept_than_by_plain_reverse_mode(name):
    fun, args = BOTH_WAYS[name]
    kept = [
        sum(x.size for x in jax.tree.leaves(jax.vjp(f, *map(jnp.asarray, args))[1]))
        for f in (sym_optimize(fun), fun)
    ]
    inputs = sum(x.size for x in args)
    assert kept[0] - inputs <= 1.05 * max(kept[1] - inputs, 0)


def test_results_do_not_wait_for_cotangents(one_device):
    """One fold may not compute a result together with values that read its cotangent."""
    x, m = normal(1024, 3), normal(1024)
    value, pullback = jax.vjp(sym_optimize(energy), x, m)
    assert max(x.size for x in jax.tree.leaves(pullback)) < 1024 * 1024
    np.testing.assert_allclose(value, energy(x, m), rtol=1e-4)
    chex.assert_trees_all_close(pullback(2.0), jax.vjp(energy, x, m)[1](2.0), rtol=1e-3, atol=1e-3)


def test_a_second_derivative_is_of_the_original():
    """Residuals of the optimised forward half have no derivatives: `stop_gradient` stays."""

    def stopped(x, w, a, b):
        y = jax.lax.stop_gradient(x) @ (w + a @ b)
        return jnp.sum(jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1)), 0) * jnp.tanh(x @ w))

    def second(f):
        return jax.grad(lambda x: jnp.sum(jax.grad(f)(x, W, A, B) ** 2))(jnp.asarray(X))

    chex.assert_trees_all_close(
        second(sym_optimize(stopped)), second(stopped), rtol=1e-2, atol=1e-2
    )


def test_a_plan_is_of_the_function_alone():
    plan = sym_optimize(adapted).explain(X, W, A, B).plan
    ours = jax.grad(sym_optimize(adapted, plan=plan))(X, W, A, B)
    np.testing.assert_allclose(ours, jax.grad(adapted)(X, W, A, B), rtol=1e-3, atol=1e-4)


def test_gradients_under_vmap_share_residuals():
    """Both halves are batched as they run, so that one keeps the residuals that the other reads."""
    f = lambda w, x: jnp.sum(jnp.sin(attend(x, x @ w, x)))  # noqa: E731
    w, xs = normal(16, 16), normal(3, 64, 16)
    for kernels in ("auto", "always"):
        ours, theirs = (
            jax.vmap(jax.value_and_grad(g, (0, 1)), (None, 0))(w, xs)
            for g in (sym_optimize(f, kernels=kernels), f)
        )
        chex.assert_trees_all_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_products_of_zero_cotangents_are_dropped():
    """A second result of an optimised function has a zero cotangent: no product reads it."""

    def two(x, w, a, b):
        y = x @ (w + a @ b)
        return jnp.sum(jnp.tanh(y)), jnp.sin(y @ jnp.cos(w).T) - x

    def first(f):
        gradient = jax.jit(jax.grad(lambda *args: f(*args)[0], argnums=(0, 1)))
        return gradient.lower(X, W, A, B).compile()

    assert flops(first(sym_optimize(two))) < 1.05 * flops(first(two))
    for k, pick in enumerate((lambda o: o[0], lambda o: o[1].sum(), lambda o: o[0] + o[1].sum())):
        ours, theirs = (
            jax.grad(lambda *args, f=f, pick=pick: pick(f(*args)), (0, 1, 2, 3))(X, W, A, B)
            for f in (sym_optimize(two), two)
        )
        for mine, its in zip(ours, theirs, strict=True):
            scale = float(jnp.abs(its).max())
            np.testing.assert_allclose(mine, its, rtol=1e-3, atol=1e-4 * scale, err_msg=str(k))


def test_undifferentiated_results_cost_nothing():
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
