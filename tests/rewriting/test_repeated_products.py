"""Products of which an operand is broadcast: computed over their own indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize


def mean_similarity(x, y):
    return jnp.mean(x @ y.T)


@pytest.mark.parametrize("features", [1, 8])
def test_a_product_with_a_broadcast_number_is_a_sum(features):
    gradient = jax.grad(mean_similarity, (0, 1))
    x = jax.ShapeDtypeStruct((1298, features), jnp.float32)
    report = sym_optimize(gradient, device="cpu").explain(x, x)
    products = [e for e in report.after.jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert not any(v.aval.size == 1298**2 for e in products for v in e.invars), report


@pytest.mark.parametrize("sizes", [(8, 912, 1816), (1057, 248, 8)])
def test_a_gradient_that_repeats_a_vector_computes_the_vector_once(sizes):
    rows, features, columns = sizes
    gradient = jax.grad(lambda w, x: jnp.sum(x @ w))
    shapes = (features, columns), (rows, features)
    report = sym_optimize(gradient, device="cpu").explain(
        *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    )
    assert report.after.flops <= 2 * rows * features, report


@pytest.mark.parametrize(
    ("shape", "fun", "is_product"),
    [
        ((300, 200), lambda x: x, True),
        ((200_000, 2), lambda x: x, False),  # short rows
        ((3000, 200), lambda x: x, False),  # large
        ((300, 200), jnp.tanh, False),  # computed in the loop of the sum
    ],
)
def test_small_arrays_in_memory_are_summed_by_a_product_with_a_vector(shape, fun, is_product):
    """XLA hands a sum to several threads, which takes longer than a small sum."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (shape, (shape[1], 300)))
    gradient = jax.grad(lambda w, x: jnp.sum(fun(x) @ w))
    ours = sym_optimize(gradient, device="cpu")
    np.testing.assert_allclose(ours(w, x), gradient(w, x), rtol=1e-3, atol=1e-3)
    done = [e.primitive.name for e in ours.explain(w, x).after.jaxpr.jaxpr.eqns]
    assert ("dot_general" in done, "reduce_sum" in done) == (is_product, not is_product)


def test_the_sum_gives_the_values_of_the_product():
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((600, 4)), jnp.float32) for _ in range(2))
    gradient = jax.grad(mean_similarity, (0, 1))
    ours = sym_optimize(gradient, device="cpu")(x, y)
    for got, asked in zip(ours, jax.jit(gradient)(x, y), strict=True):
        np.testing.assert_allclose(got, asked, rtol=1e-4, atol=1e-8)


def test_a_product_of_two_matrices_stays():
    def product(x, y):
        return x @ y

    x = jax.ShapeDtypeStruct((300, 300), jnp.float32)
    report = sym_optimize(product, device="cpu").explain(x, x)
    assert not any(r.taken for r in report.routes if r.name == "repeated_work")


def test_a_small_predicted_gain_of_another_order_is_none():
    def attention(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)

    gradient = jax.grad(lambda *qkv: jnp.sum(jnp.sin(attention(*qkv))), (0, 1, 2))
    x = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.float32)
    report = sym_optimize(gradient, device="cpu").explain(x, x, x)
    assert not any(rule.name == "contraction_order" for rule in report.rules), report


@pytest.mark.parametrize(("size", "taken"), [(4, False), (400, True)])
def test_a_product_written_twice_must_save_a_share_of_the_program(size, taken):
    def f(x, y, w):
        return x @ y, (y.T @ x.T) + 1, w @ w

    x, w = (jax.ShapeDtypeStruct((n, n), jnp.float32) for n in (size, 800))
    report = sym_optimize(f, device="cpu").explain(x, x, w)
    assert ("common_subexpression" in {r.name for r in report.rules}) is taken
    refused = [r.reason for r in report.routes if r.name == "common_subexpression" and not r.taken]
    assert bool(refused) is not taken
