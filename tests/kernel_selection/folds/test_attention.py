"""Bundles of softmax reductions become folds, whatever they are called; look-alikes do not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize

B, T, H, D = 2, 48, 2, 8


def arrays(seed: int = 0, keys: int = T) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values [b, t, h, d]."""
    draw = np.random.default_rng(seed).standard_normal
    shapes = ((B, T, H, D), (B, keys, H, D), (B, keys, H, D))
    q, k, v = (jnp.asarray(draw(s), jnp.float32) for s in shapes)
    return q, k, v


def scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D).astype(np.float32)


def values(p, v):
    return jnp.einsum("bhts,bshd->bthd", p, v)


def causal(s, fill=-jnp.inf):
    t, n = s.shape[-2:]
    return jnp.where(jnp.tril(jnp.ones((t, n), bool)), s, fill)


def plain(q, k, v):
    return values(jax.nn.softmax(scores(q, k)), v)


def by_hand(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return values(e / e.sum(-1, keepdims=True), v)


def divided_after(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * 0.5, k * 0.5, v))
    e = jnp.exp(q @ k.swapaxes(-1, -2))
    return ((e @ v) / e.sum(-1, keepdims=True)).transpose(0, 2, 1, 3)


def log_softmax(q, k, v):
    return values(jnp.exp(jax.nn.log_softmax(scores(q, k))), v)


def with_lse(q, k, v):
    s = scores(q, k)
    lse = jax.nn.logsumexp(s, -1)
    return values(jnp.exp(s - lse[..., None]), v), lse


def masked(q, k, v):
    return values(jax.nn.softmax(causal(scores(q, k))), v)


def finite_fill(q, k, v):
    return values(jax.nn.softmax(causal(scores(q, k), -1e9)), v)


def nothing_to_see(q, k, v):
    s = jnp.where(jnp.arange(T)[:, None] > 3, scores(q, k), -jnp.inf)
    return values(jax.nn.softmax(s), v)


def mean_of_all(q, k, v):
    s = jnp.where(jnp.arange(T)[:, None] > 3, scores(q, k), jnp.finfo(jnp.float32).min)
    return values(jax.nn.softmax(s), v)


def alibi(q, k, v):
    distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(k.shape[1])[None])
    bias = -jnp.array([0.5, 0.25])[:, None, None] * distance
    return values(jax.nn.softmax(scores(q, k) + bias), v)


def softcap(q, k, v):
    return values(jax.nn.softmax(5 * jnp.tanh(scores(q, k) / 5)), v)


def quiet(q, k, v):
    s = scores(q, k)
    m = jnp.maximum(s.max(-1, keepdims=True), 0)
    e = jnp.exp(s - m)
    return values(e / (e.sum(-1, keepdims=True) + jnp.exp(-m)), v)


def epsilon(q, k, v):
    e = jnp.exp(scores(q, k))
    return values(e / (e.sum(-1, keepdims=True) + 1e-3), v)


def grouped(q, k, v):
    k, v = (jnp.repeat(x[:, :, :1], H, axis=2) for x in (k, v))
    return plain(q, k, v)


def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def two_values(q, k, v):
    p = jax.nn.softmax(scores(q, k))
    return values(p, v), values(p, v * v)


def added_mask(q, k, v):
    seen = jnp.tril(jnp.ones((T, k.shape[1])))
    return values(jax.nn.softmax(scores(q, k) + (1 - seen) * -1e9), v)


def added_mask_without_shift(q, k, v):
    seen = jnp.tril(jnp.ones((T, k.shape[1])))
    e = jnp.exp(scores(q, k) + (1 - seen) * -1e9)
    return values(e / e.sum(-1, keepdims=True), v)


def masked_queries(q, k, v):
    shown = (jnp.arange(T) < 30).astype(jnp.float32)[:, None]
    return values(jax.nn.softmax(scores(q, k) + (1 - shown) * -1e9), v)


def two_widths(q, k, v):
    p = jax.nn.softmax(scores(q, k))
    return values(p, v), values(p, v[..., :3])


def vmapped(q, k, v):
    def one(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    return jax.vmap(jax.vmap(one, 1, 1))(q, k, v)


def half(q, k, v):
    return plain(*(x.astype(jnp.bfloat16) for x in (q, k, v)))


FOLDS = [
    plain, by_hand, divided_after, log_softmax, with_lse, masked, finite_fill, nothing_to_see,
    mean_of_all, alibi, softcap, quiet, epsilon, grouped, library, two_values, two_widths,
    added_mask, added_mask_without_shift, masked_queries, vmapped, half,
]  # fmt: skip


@pytest.mark.parametrize("fun", FOLDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("keys", [T, 40])
def test_attention_is_a_fold(fun, keys):
    if keys != T and fun in (library,):
        pytest.skip("causal with fewer keys is another mask")
    args = arrays(keys=keys)
    routed = sym_optimize(fun, kernels="always")
    report = routed.explain(*args)
    assert [r.taken for r in report.routes if r.name == "fold"] == [True], report
    pairs = B * H * T * keys
    names = {e.primitive.name for e in report.after.jaxpr.jaxpr.eqns}
    assert not names & {"exp2", "softmax"}
    wide = [
        e for e in report.after.jaxpr.jaxpr.eqns
        if e.primitive.name in ("exp", "dot_general") and e.outvars[0].aval.size >= pairs
    ]  # fmt: skip
    assert not wide, "the pairwise term is still made"
    tolerance = 0.02 if fun is half else 2e-5
    for ours, written in zip(
        jax.tree.leaves(routed(*args)), jax.tree.leaves(jax.jit(fun)(*args)), strict=True
    ):
        assert ours.dtype == written.dtype
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(written, np.float32), tolerance, tolerance
        )


def wrong_axis(q, k, v):
    return values(jax.nn.softmax(scores(q, k), axis=-2), v)


def probabilities_returned(q, k, v):
    p = jax.nn.softmax(scores(q, k))
    return values(p, v), p


def probabilities_masked(q, k, v):
    return values(jnp.tril(jax.nn.softmax(scores(q, k))), v)


def twice(q, k, v):
    return values(jax.nn.softmax(jax.nn.softmax(scores(q, k))), v)


def sigmoid(q, k, v):
    return values(jax.nn.sigmoid(scores(q, k)), v)


def top_k(q, k, v):
    p = jax.nn.softmax(scores(q, k))
    kept = jnp.where(p >= jax.lax.top_k(p, 4)[0][..., -1:], p, 0)
    return values(kept / kept.sum(-1, keepdims=True), v)


def linear(q, k, v):
    return values(scores(q, k), v)


LEFT = [wrong_axis, probabilities_returned, probabilities_masked, twice, sigmoid, top_k, linear]


@pytest.mark.parametrize("fun", LEFT, ids=lambda f: f.__name__)
def test_values_of_attention_lookalikes_are_kept(fun):
    args = arrays(1)
    routed = sym_optimize(fun, kernels="always")
    pairs = jax.tree.map(np.asarray, (routed(*args), fun(*args)))
    for ours, written in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_allclose(ours, written, 2e-5, 2e-5)


@pytest.mark.parametrize("fun", [probabilities_returned, top_k], ids=lambda f: f.__name__)
def test_the_report_says_why_not(fun):
    routes = sym_optimize(fun, kernels="always").explain(*arrays()).routes
    assert any(not r.taken and "pairwise term" in r.reason for r in routes if r.name == "fold")


def test_derivatives_pass_through():
    args = arrays()
    loss = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a)))  # noqa: E731
    ours = jax.grad(loss(sym_optimize(masked, kernels="always")), (0, 1, 2))(*args)
    theirs = jax.grad(loss(masked), (0, 1, 2))(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, theirs)


def test_probabilities_applied_twice_are_two_folds():
    def twice_applied(q, k, v):
        p = jax.nn.softmax(scores(q, k))
        return p @ (p @ v.transpose(0, 2, 1, 3))

    args = arrays()
    routed = sym_optimize(twice_applied, kernels="always", on_unsupported="error")
    assert [r.taken for r in routed.explain(*args).routes] == [True]
    np.testing.assert_allclose(routed(*args), twice_applied(*args), 2e-5, 2e-5)


def test_a_normaliser_that_no_kernel_can_make_is_made_outside():
    def odd(q, k, v):
        e = jnp.exp(scores(q, k))
        return values(e / jax.scipy.special.erf(e.sum(-1, keepdims=True)), v)

    args = arrays()
    routed = sym_optimize(odd, kernels="always", on_unsupported="error")
    assert [r.taken for r in routed.explain(*args).routes] == [True]
    np.testing.assert_allclose(routed(*args), odd(*args), 1e-4, 1e-4)


def test_exact_numerics_leave_it():
    report = sym_optimize(plain, kernels="always", numerics="exact").explain(*arrays())
    assert not [r for r in report.routes if r.taken]


@pytest.mark.parametrize("queries", [1, 3, D - 1, D, T])
def test_projected_values_are_no_pairs_where_queries_are_few(queries):
    """Features of the values met the keys in a product as well, and were taken for the rows."""

    def pooled(latents, x, wq, wk, wv):
        q, k, v = (jnp.einsum("btc,chd->bthd", *xw) for xw in ((latents, wq), (x, wk), (x, wv)))
        return values(jax.nn.softmax(scores(q, k)), v)

    draw = np.random.default_rng(0).standard_normal
    shapes = ((B, queries, 12), (B, T, 12), *[(12, H, D)] * 3)
    args = [jnp.asarray(draw(s), jnp.float32) for s in shapes]
    routed = sym_optimize(pooled, kernels="always", on_unsupported="error")
    assert any(r.taken for r in routed.explain(*args).routes)
    np.testing.assert_allclose(routed(*args), pooled(*args), 2e-5, 2e-5)
