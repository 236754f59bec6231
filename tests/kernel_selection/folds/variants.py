"""Attention by other scores, biases, caches and mappings: the third part of the table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import softmax

from tests.kernel_selection.folds.spellings import (
    LEAST,
    TRIL,
    B,
    D,
    H,
    T,
    dot,
    heads_first,
    out,
    spelling,
)

PLACE = np.arange(T)


def weights(*shape):
    return jnp.asarray(np.random.default_rng(5).standard_normal(shape), jnp.float32)


# ------------------------------------------------------------------ mappings


@spelling
def vectorized(q, k, v):
    @functools.partial(jnp.vectorize, signature="(t,d),(s,d),(s,e)->(t,e)")
    def one(q, k, v):
        return softmax(q @ k.T / 3, -1) @ v

    return one(*heads_first(q, k, v))


@spelling
def mapped_over_heads(q, k, v):
    one = lambda a: softmax(a[0] @ a[1].swapaxes(1, 2) / 3) @ a[2]  # noqa: E731
    return jax.lax.map(one, tuple(x.transpose(2, 0, 1, 3) for x in (q, k, v)))


@spelling
def query_by_query(q, k, v):
    def step(_, query):
        p = softmax(jnp.einsum("bhd,bshd->bhs", query, k))
        return None, jnp.einsum("bhs,bshd->bhd", p, v)

    return jax.lax.scan(step, None, q.transpose(1, 0, 2, 3))[1]


@spelling
def with_its_own_derivative(q, k, v):
    attend = jax.custom_vjp(lambda q, k, v: out(softmax(dot(q, k)), v))
    attend.defvjp(lambda *a: (attend(*a), a), lambda a, g: (g, g, g))
    return attend(q, k, v)


@spelling
def over_two_axes(q, k, v):
    """Pixels of an image: the softmax runs over both axes of keys."""
    q, k, v = (x.reshape(B, 4, T // 4, H, D) for x in (q, k, v))
    p = softmax(jnp.einsum("bxyhd,buvhd->bhxyuv", q, k), axis=(-2, -1))
    return jnp.einsum("bhxyuv,buvhd->bxyhd", p, v)


# ------------------------------------------------------------------ scores


@spelling
def complex_rotary(q, k, v):
    angle = PLACE[:, None] * 0.1 ** jnp.arange(D // 2)
    turn = jax.lax.complex(jnp.cos(angle), jnp.sin(angle))[None, :, None]

    def rotated(x):
        x = x.reshape(B, T, H, D // 2, 2)
        z = jax.lax.complex(x[..., 0], x[..., 1]) * turn
        return jnp.stack([z.real, z.imag], -1).reshape(B, T, H, D)

    return out(softmax(dot(rotated(q), rotated(k))), v)


@spelling
def cosines_after_the_product(q, k, v):
    a, b = (jnp.sqrt((x * x).sum(-1)).transpose(0, 2, 1) for x in (q, k))
    return out(softmax(5 * dot(q, k) / (a[..., None] * b[:, :, None])), v)


@spelling
def negative_distances(q, k, v):
    d = ((q[:, :, None] - k[:, None]) ** 2).sum(-1)
    return jnp.einsum("btsh,bshd->bthd", softmax(-d / 8, 2), v)


@spelling
def additive(q, k, v):
    s = jnp.tanh(q[:, :, None] + k[:, None]) @ weights(D)
    return jnp.einsum("btsh,bshd->bthd", softmax(s, 2), v)


@spelling
def of_a_graph(q, k, v):
    s = (q @ weights(D))[:, :, None] + (k @ weights(D, 1)[:, 0])[:, None]
    near = (PLACE[:, None] + PLACE) % 3 == 0
    s = jnp.where(near[None, :, :, None], jax.nn.leaky_relu(s, 0.2), -9e15)
    return jnp.einsum("btsh,bshd->bthd", softmax(s, 2), v)


@spelling
def talking_heads(q, k, v):
    s = jnp.einsum("bthd,bshd,hg->bgts", q, k, weights(H, H)) / 3
    return out(softmax(s), v)


@spelling
def forgetting(q, k, v):
    c = jnp.cumsum(jax.nn.log_sigmoid(q[..., 0]), 1).transpose(0, 2, 1)
    s = dot(q, k) + c[..., None] - c[:, :, None]
    return out(softmax(jnp.where(TRIL, s, -jnp.inf)), v)


@spelling
def difference_of_two(q, k, v):
    p, o = (softmax(dot(q[..., a], k[..., a])) for a in (slice(0, 4), slice(4, 8)))
    return out(p - 0.4 * o, v)


# ------------------------------------------------------------------ biases


@spelling
def gathered_relative_scores(q, k, v):
    s = jnp.einsum("bthd,rhd->bhtr", q, weights(2 * T, H, D))
    place = jnp.broadcast_to(PLACE[:, None] - PLACE + T, (B, H, T, T))
    return out(softmax((dot(q, k) + jnp.take_along_axis(s, place, -1)) / 3), v)


@spelling
def clamped_mask(q, k, v):
    least = jnp.finfo(jnp.float32).min
    return out(softmax(jnp.maximum(dot(q, k) + jnp.where(TRIL, 0.0, least), least)), v)


@spelling
def padding_on_both_sides(q, k, v):
    there = np.array([[9], [T]]) > PLACE
    seen = TRIL[None] * there[:, :, None] * there[:, None]
    return out(softmax(jnp.where(seen[:, None], dot(q, k), -1e9)), v)


@spelling
def bias_of_distances(q, k, v):
    slopes = 2.0 ** -jnp.arange(1, H + 1)[:, None, None]
    return out(softmax(dot(q, k) - slopes * np.abs(PLACE[:, None] - PLACE)), v)


@spelling
def causal_with_fewer_keys(q, k, v):
    k, v = k[:, :17], v[:, :17]
    return out(softmax(jnp.where(TRIL[:, :17], dot(q, k), -jnp.inf)), v)


@spelling
def rows_without_keys_as_means(q, k, v):
    return out(softmax(jnp.where(PLACE[:, None] > 3, dot(q, k), LEAST)), v)


@spelling
def masked_queries(q, k, v):
    shown = (PLACE < 15).astype(np.float32)[:, None]
    return out(softmax(dot(q, k) + (1 - shown) * -1e9), v)


@spelling
def masked_without_a_shift(q, k, v):
    e = jnp.exp(dot(q, k) / 4 + (1 - TRIL.astype(np.float32)) * -1e9)
    return out(e / e.sum(-1, keepdims=True), v)


# ------------------------------------------------------------------ caches


@spelling
def paged(q, k, v):
    table = PLACE[::-1] + T * np.arange(B)[:, None]
    k, v = (x.reshape(B * T, H, D)[table] for x in (k, v))
    s = jnp.einsum("bhd,bshd->bhs", q[:, -1], k)
    s = jnp.where(np.array([3, T])[:, None, None] > PLACE, s, -jnp.inf)
    return jnp.einsum("bhs,bshd->bhd", softmax(s), v)


@spelling
def updated_cache(q, k, v):
    k = jax.lax.dynamic_update_slice(k, q[:, :1], (0, T // 2, 0, 0))
    v = jax.lax.dynamic_update_slice_in_dim(v, q[:, 1:2], T // 2, 1)
    s = jnp.where(PLACE <= T // 2, dot(q[:, :1], k), -1e9)
    return out(softmax(s), v)


@spelling
def pooled_by_a_seed(q, k, v):
    p = softmax(jnp.einsum("hd,bshd->bhs", weights(H, D), k))
    return jnp.einsum("bhs,bshd->bhd", p, v)


# ------------------------------------------------------------------ softmax by hand


@spelling
def ones_beside_the_values(q, k, v):
    s = dot(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    o = out(e, jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1))
    return o[..., :-1] / o[..., -1:]


@spelling
def a_key_of_zeros(q, k, v):
    s = jnp.pad(dot(q, k), ((0, 0), (0, 0), (0, 0), (1, 0)))
    return out(softmax(s)[..., 1:], v)


@spelling
def largest_or_zero(q, k, v):
    s = dot(q, k)
    top = jnp.max(s, -1, keepdims=True, initial=0.0)
    e = jnp.exp(s - top)
    return out(e / (jnp.exp(-top) + e.sum(-1, keepdims=True)), v)


@spelling
def reciprocal_last(q, k, v):
    s = dot(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bhts,bshd,bht->bthd", e, v, jax.lax.reciprocal(e.sum(-1)))


@spelling
def exponential_of_its_logarithm(q, k, v):
    return out(jnp.exp(jnp.log(softmax(dot(q, k)))), v)
