"""Lookalikes of attention: the values stay those of the program as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from tests.kernel_selection.folds.spellings import TRIL, B, H, T, arrays, dot, out

softmax = jax.nn.softmax


def scores(q, k):
    return dot(q, k) / 2


def over_queries(q, k, v):
    return out(softmax(scores(q, k), -2), v)


def over_heads(q, k, v):
    return out(softmax(scores(q, k), 1), v)


def over_batch(q, k, v):
    return out(softmax(scores(q, k), 0), v)


def over_everything(q, k, v):
    s = scores(q, k)
    return out(softmax(s.reshape(B, -1), -1).reshape(s.shape), v)


def not_normalised(q, k, v):
    return out(jnp.exp(scores(q, k) / 2), v)


def normalised_by_other_scores(q, k, v):
    e, other = jnp.exp(scores(q, k) / 3), jnp.exp(scores(k, q) / 3)
    return out(e / other.sum(-1, keepdims=True), v)


def normalised_at_another_scale(q, k, v):
    s = scores(q, k)
    return out(jnp.exp(s / 2) / jnp.exp(s / 3).sum(-1, keepdims=True), v)


def normalised_without_the_first_key(q, k, v):
    e = jnp.exp(scores(q, k) / 2)
    return out(e / e[..., 1:].sum(-1, keepdims=True), v)


def normalised_by_the_largest(q, k, v):
    e = jnp.exp(scores(q, k) / 2)
    return out(e / e.max(-1, keepdims=True), v)


def normalised_by_the_norm(q, k, v):
    e = jnp.exp(scores(q, k) / 2)
    return out(e / jnp.sqrt((e * e).sum(-1, keepdims=True)), v)


def normalised_over_queries(q, k, v):
    e = jnp.exp(scores(q, k) / 2)
    return out(e / e.sum(-2, keepdims=True), v)


def shifted_per_key(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-2, keepdims=True))
    return out(e / e.sum(-1, keepdims=True), v)


def masked_after(q, k, v):
    return out(softmax(scores(q, k)) * TRIL, v)


def masked_and_renormalised(q, k, v):
    p = softmax(scores(q, k)) * TRIL
    return out(p / (p.sum(-1, keepdims=True) + 1e-3), v)


def top_k_renormalised(q, k, v):
    p = softmax(scores(q, k))
    kept = jnp.where(p >= jax.lax.top_k(p, 4)[0][..., -1:], p, 0)
    return out(kept / kept.sum(-1, keepdims=True), v)


def thresholded(q, k, v):
    p = softmax(scores(q, k))
    return out(jnp.where(p > 0.05, p, 0), v)


def twice(q, k, v):
    return out(softmax(softmax(scores(q, k))), v)


def sharpened(q, k, v):
    p = softmax(scores(q, k)) ** 2
    return out(p / p.sum(-1, keepdims=True), v)


def sigmoid(q, k, v):
    return out(jax.nn.sigmoid(scores(q, k) - np.log(T)), v)


def rectified(q, k, v):
    return out(jax.nn.relu(scores(q, k)) ** 2 / T, v)


def linear(q, k, v):
    return out(scores(q, k), v)


def sinkhorn(q, k, v):
    p = jnp.exp(scores(q, k) / 2)
    for axis in (-1, -2, -1):
        p = p / p.sum(axis, keepdims=True)
    return out(p, v)


def sparsemax(q, k, v):
    s = scores(q, k)
    z = -jnp.sort(-s, axis=-1)
    total, place = jnp.cumsum(z, -1), jnp.arange(1, T + 1)
    count = (1 + place * z > total).sum(-1, keepdims=True)
    tau = (jnp.take_along_axis(total, count - 1, -1) - 1) / count
    return out(jnp.maximum(s - tau, 0), v)


def returned(q, k, v):
    p = softmax(scores(q, k))
    return out(p, v), p


def entropy(q, k, v):
    p = softmax(scores(q, k))
    return out(p, v), -(p * jnp.log(p + 1e-9)).sum(-1)


def column_sums(q, k, v):
    p = softmax(scores(q, k))
    return out(p, v), p.sum(-2)


def dropout(q, k, v):
    p = softmax(scores(q, k))
    kept = jax.random.bernoulli(jax.random.key(0), 0.8, p.shape)
    return out(jnp.where(kept, p / 0.8, 0), v)


def gumbel(q, k, v):
    noise = jax.random.gumbel(jax.random.key(1), (B, H, T, T))
    return out(softmax(scores(q, k) + noise), v)


def talking_heads_after(q, k, v):
    mix = jnp.asarray([[1.0, 0.5], [-0.3, 2.0]])
    return out(jnp.einsum("bhts,hg->bgts", softmax(scores(q, k)), mix), v)


def talking_heads_before(q, k, v):
    mix = jnp.asarray([[1.0, 0.5], [-0.3, 2.0]])
    return out(softmax(jnp.einsum("bhts,hg->bgts", scores(q, k), mix)), v)


def accumulated(q, k, v):
    return out(jnp.cumsum(softmax(scores(q, k)), -1), v)


def hard(q, k, v):
    return out(jax.nn.one_hot(jnp.argmax(scores(q, k), -1), T), v)


def straight_through(q, k, v):
    p = softmax(scores(q, k))
    chosen = jax.nn.one_hot(jnp.argmax(p, -1), T)
    return out(chosen + p - jax.lax.stop_gradient(p), v)


def of_logarithms(q, k, v):
    return out(jax.nn.log_softmax(scores(q, k)), v)


def less_the_identity(q, k, v):
    return out(softmax(scores(q, k)) - jnp.eye(T), v)


def values_of_queries(q, k, v):
    return jnp.einsum("bhts,bthd->bshd", softmax(scores(q, k)), v)


def scores_used_too(q, k, v):
    s = scores(q, k)
    return out(softmax(s), v) + out(s, v)


def scaled_per_key(q, k, v):
    return out(softmax(scores(q, k)) * jnp.linspace(0.5, 2, T), v)


def summed_by_hand(q, k, v):
    p = softmax(scores(q, k))
    return (
        p[..., None]
        * (v.transpose(0, 2, 1, 3)[:, :, None] - q.transpose(0, 2, 1, 3)[:, :, :, None])
    ).sum(3)


def over_queries_then_keys(q, k, v):
    p = softmax(scores(q, k), -2) + 1e-8
    return out(p / p.sum(-1, keepdims=True), v)


def over_heads_and_keys(q, k, v):
    return out(softmax(scores(q, k), (1, 3)), v)


def normalised_by_its_transpose(q, k, v):
    e = jnp.exp(scores(q, k) / 2)
    return out(e / jnp.swapaxes(e, -1, -2).sum(-1, keepdims=True), v)


def normalised_where_seen(q, k, v):
    e = jnp.exp(scores(q, k) / 2)
    return out(e / (e * TRIL).sum(-1, keepdims=True), v)


def logsumexp_at_another_scale(q, k, v):
    s = scores(q, k)
    return out(jnp.exp(s - jax.nn.logsumexp(2 * s, -1, keepdims=True)), v)


def best_keys_only(q, k, v):
    s, place = jax.lax.top_k(scores(q, k), 3)
    v = jnp.take_along_axis(v.transpose(0, 2, 1, 3)[:, :, None], place[..., None], 3)
    return jnp.einsum("bhtk,bhtkd->bthd", softmax(s), v)


def near_the_largest(q, k, v):
    s = scores(q, k)
    return out(softmax(jnp.where(s > s.max(-1, keepdims=True) - 1, s, -1e9)), v)


def standardised(q, k, v):
    s = scores(q, k)
    s = (s - s.mean(-1, keepdims=True)) / (s.std(-1, keepdims=True) + 1e-3)
    return out(softmax(s), v)


def between_extremes(q, k, v):
    s = scores(q, k)
    low, high = s.min(-1, keepdims=True), s.max(-1, keepdims=True)
    return out((s - low) / (high - low + 1e-6), v)


def min_plus(q, k, v):
    return (scores(q, k)[..., None] + v.transpose(0, 2, 1, 3)[:, :, None]).min(3)


def broken_sticks(q, k, v):
    s = jnp.where(TRIL, scores(q, k), -1e9)
    left = jax.nn.log_sigmoid(-s)
    rest = jnp.cumsum(left[..., ::-1], -1)[..., ::-1] - left
    return out(jnp.exp(jax.nn.log_sigmoid(s) + rest), v)


def scores_of_two_layers(q, k, v):
    s = scores(q, k)
    return out(softmax(scores(out(softmax(s), v), k) + s), v)


def applied_twice(q, k, v):
    p = softmax(scores(q, k))
    return out(p, out(p, v))


def largest_probability(q, k, v):
    p = softmax(scores(q, k))
    return out(p, v), p.max(-1), p.argmax(-1), jnp.diagonal(p, axis1=-2, axis2=-1)


def fills_that_scores_reach(q, k, v):
    return out(softmax(jnp.where(TRIL, scores(q, k), -1.0)), v)


def halves_rounded(q, k, v):
    s = scores(q, k).astype(jnp.float16).astype(jnp.float32)
    return out(softmax(s), v)


LOOKALIKES = [
    over_queries, over_heads, over_batch, over_everything, not_normalised,
    normalised_by_other_scores, normalised_at_another_scale, normalised_without_the_first_key,
    normalised_by_the_largest, normalised_by_the_norm, normalised_over_queries, shifted_per_key,
    masked_after, masked_and_renormalised, top_k_renormalised, thresholded, twice, sharpened,
    sigmoid, rectified, linear, sinkhorn, sparsemax, returned, entropy, column_sums, dropout,
    gumbel, talking_heads_after, talking_heads_before, accumulated, hard, straight_through,
    of_logarithms, less_the_identity, values_of_queries, scores_used_too, scaled_per_key,
    summed_by_hand, fills_that_scores_reach, halves_rounded, over_queries_then_keys,
    over_heads_and_keys, normalised_by_its_transpose, normalised_where_seen,
    logsumexp_at_another_scale, best_keys_only, near_the_largest, standardised, between_extremes,
    min_plus, broken_sticks, scores_of_two_layers, applied_twice, largest_probability,
]  # fmt: skip


@pytest.mark.parametrize("fun", LOOKALIKES, ids=lambda f: f.__name__)
def test_values_of_fold_lookalikes_are_kept(fun):
    args = arrays(3)
    routed = sym_optimize(fun, kernels="always", on_unsupported="error")
    pairs = zip(jax.tree.leaves(routed(*args)), jax.tree.leaves(fun(*args)), strict=True)
    for ours, written in pairs:
        assert (ours.dtype, ours.shape) == (written.dtype, written.shape)
        scale = max(1.0, float(jnp.abs(written).max()))
        np.testing.assert_allclose(ours, written, 5e-5, 5e-5 * scale)


@pytest.mark.parametrize(
    "fun", [returned, dropout, top_k_renormalised, accumulated], ids=lambda f: f.__name__
)
def test_probabilities_that_are_needed_are_made(fun):
    routes = sym_optimize(fun, kernels="always").explain(*arrays()).routes
    folds = [r for r in routes if r.name == "fold"]
    assert not any(r.taken for r in folds), folds
    assert any("pairwise term" in r.reason for r in folds), folds
