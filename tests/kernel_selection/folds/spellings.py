"""Attention as public code writes it: one table, queries, keys and values [b, t, h, d]."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, T, H, D = 2, 24, 2, 8
LEAST = float(np.finfo(np.float32).min)
FUNCTIONS: dict[str, Any] = {}
TRIL = np.tril(np.ones((T, T), bool))


def spelling(fun):
    FUNCTIONS[fun.__name__] = fun
    return fun


def arrays(seed=0):
    draw = np.random.default_rng(seed).standard_normal
    return tuple(jnp.asarray(draw((B, T, H, D)), jnp.float32) for _ in range(3))


def heads_first(*arrays):
    return tuple(x.transpose(0, 2, 1, 3) for x in arrays)


def dot(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k)


def out(p, v):
    return jnp.einsum("bhts,bshd->bthd", p, v)


# ------------------------------------------------------------------ libraries


@spelling
def flax_nnx(q, k, v):
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    weights = jnp.einsum("...qhd,...khd->...hqk", q, k)
    weights = jax.nn.softmax(weights).astype(q.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


@spelling
def flax_linen_mask(q, k, v):
    mask = jnp.broadcast_to(jnp.asarray(TRIL)[None, None], (B, 1, T, T))
    q = q / jnp.sqrt(D).astype(q.dtype)
    weights = jnp.einsum("...qhd,...khd->...hqk", q, k)
    weights = jnp.where(mask, weights, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(weights).astype(jnp.float32)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


@spelling
def flax_bias(q, k, v):
    bias = jnp.where(TRIL, 0.0, -1e10)[None, None]
    return out(jax.nn.softmax(dot(q * D**-0.5, k) + bias), v)


@spelling
def haiku(q, k, v):
    logits = jnp.einsum("...thd,...Thd->...htT", q, k)
    logits = logits / np.sqrt(D).astype(k.dtype)
    logits = jnp.where(TRIL, logits, -1e30)
    weights = jax.nn.softmax(logits)
    return jnp.einsum("...htT,...Thd->...thd", weights, v).reshape(B, T, H * D)


@spelling
def equinox(q, k, v):
    def one(query, key, value):
        query = query / math.sqrt(query.shape[-1])
        logits = jnp.einsum("sd,Sd->sS", query, key)
        logits = jnp.where(jnp.asarray(TRIL), logits, jnp.finfo(logits.dtype).min)
        with jax.numpy_dtype_promotion("standard"):
            weights = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(query.dtype)
        return jnp.einsum("sS,Sd->sd", weights, value)

    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(q, k, v)


@spelling
def gpt2(q, k, v):
    q, k, v = heads_first(q, k, v)
    weights = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) / jnp.full([], D**0.5, jnp.float32)
    weights = jnp.where(jnp.asarray(TRIL)[None, None], weights, jnp.full([], LEAST))
    return jnp.matmul(jax.nn.softmax(weights, axis=-1), v).transpose(0, 2, 1, 3)


@spelling
def bert(q, k, v):
    attention_mask = (np.arange(T) < np.array([[20], [T]])).astype(np.float32)
    extended = (1.0 - jnp.asarray(attention_mask)[:, None, None, :]) * LEAST
    scores = dot(q, k) / math.sqrt(D) + extended
    return out(jax.nn.softmax(scores, axis=-1), v)


@spelling
def llama(q, k, v):
    q, k, v = heads_first(q, k, v)
    scores = (q @ k.transpose(0, 1, 3, 2)) * D**-0.5
    mask = jnp.triu(jnp.full((T, T), LEAST), 1)
    weights = jax.nn.softmax((scores + mask).astype(jnp.float32), -1).astype(q.dtype)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(B, T, -1)


@spelling
def t5(q, k, v):
    table = jnp.asarray(np.random.default_rng(1).standard_normal((32, H)), jnp.float32)
    distance = jnp.clip(jnp.arange(T)[None] - jnp.arange(T)[:, None] + 16, 0, 31)
    bias = table[distance].transpose(2, 0, 1)[None]
    return out(jax.nn.softmax(dot(q, k) + bias), v)


@spelling
def alibi(q, k, v):
    slopes = jnp.asarray(2.0 ** -np.arange(1, H + 1), jnp.float32)[:, None, None]
    distance = jnp.arange(T)[None, :] - jnp.arange(T)[:, None]
    s = dot(q, k) * D**-0.5 + slopes * distance
    return out(jax.nn.softmax(jnp.where(distance <= 0, s, -jnp.inf)), v)


@spelling
def alibi_of_keys(q, k, v):
    slopes = jnp.asarray(2.0 ** -np.arange(1, H + 1), jnp.float32)
    bias = slopes[None, :, None, None] * jnp.arange(T, dtype=jnp.float32)
    return out(jax.nn.softmax(dot(q, k) / 3 + bias), v)


@spelling
def gemma(q, k, v):
    s = jnp.tanh(dot(q * D**-0.5, k) / 50.0) * 50.0
    return out(jax.nn.softmax(jnp.where(TRIL, s, -2.3819763e38)), v)


@spelling
def gpt_oss(q, k, v):
    sinks = jnp.asarray([0.3, -0.2], jnp.float32)
    s = jnp.where(TRIL, dot(q, k) * D**-0.5, -jnp.inf)
    top = jnp.maximum(s.max(-1, keepdims=True), sinks[:, None, None])
    e = jnp.exp(s - top)
    return out(e / (e.sum(-1, keepdims=True) + jnp.exp(sinks[:, None, None] - top)), v)


@spelling
def concatenated_sinks(q, k, v):
    sinks = jnp.asarray([0.3, -0.2], jnp.float32)[None, :, None, None]
    s = jnp.where(TRIL, dot(q, k) * D**-0.5, -jnp.inf)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks, (B, H, T, 1))], -1)
    return out(jax.nn.softmax(s - s.max(-1, keepdims=True), -1)[..., :-1], v)


@spelling
def beside_global_keys(q, k, v):
    near, far = (k, v), (k[:, :12] + 1, v[:, :12] - 1)
    s = jnp.concatenate([dot(q, far[0]), jnp.where(TRIL, dot(q, near[0]), -1e9)], -1)
    p = jax.nn.softmax(s * D**-0.5)
    return out(p[..., :12], far[1]) + out(p[..., 12:], near[1])


@spelling
def quiet_softmax(q, k, v):
    s = dot(q, k) * D**-0.5
    top = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), 0))
    e = jnp.exp(s - top)
    return out(e / (jnp.exp(-top) + e.sum(-1, keepdims=True)), v)


@spelling
def library_call(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


@spelling
def library_causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@spelling
def library_window(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(5, 2))


@spelling
def library_grouped(q, k, v):
    return jax.nn.dot_product_attention(q, k[:, :, :1], v[:, :, :1], is_causal=True)


@spelling
def library_lengths(q, k, v):
    lengths = jnp.array([7, T], jnp.int32)
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


@spelling
def library_bias_mask(q, k, v):
    bias = jnp.sin(jnp.arange(H * T * T, dtype=jnp.float32)).reshape(1, H, T, T)
    return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=jnp.asarray(TRIL)[None, None])


# ------------------------------------------------------------------ heads


def repeated(q, k, v):
    return tuple(jnp.repeat(x[:, :, :1], H, axis=2) for x in (k, v))


@spelling
def grouped_by_repeat(q, k, v):
    k, v = repeated(q, k, v)
    return out(jax.nn.softmax(dot(q, k) / 2), v)


@spelling
def grouped_by_broadcast(q, k, v):
    k, v = (jnp.broadcast_to(x[:, :, :1, None], (B, T, 1, H, D)) for x in (k, v))
    k, v = (x.reshape(B, T, H, D) for x in (k, v))
    return out(jax.nn.softmax(dot(q, k) / 2), v)


@spelling
def grouped_by_reshape(q, k, v):
    q = q.reshape(B, T, 1, H, D)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k[:, :, :1]) / 2
    o = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(s), v[:, :, :1])
    return o.reshape(B, T, H, D)


@spelling
def grouped_by_tile(q, k, v):
    k, v = (jnp.tile(x[:, :, :1], (1, 1, H, 1)) for x in (k, v))
    return out(jax.nn.softmax(dot(q, k) / 2), v)


@spelling
def multi_query(q, k, v):
    s = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * 0.3
    return jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(s), v[:, :, 0])


@spelling
def projected(q, k, v):
    w = jnp.asarray(np.random.default_rng(2).standard_normal((3, H * D, H * D)) / 4, jnp.float32)
    x = q.reshape(B, T, H * D)
    q, k, v = (jnp.reshape(x @ w[n], (B, T, H, D)) for n in range(3))
    return out(jax.nn.softmax(dot(q, k) * D**-0.5), v).reshape(B, T, H * D) @ w[0]


@spelling
def fused_projection(q, k, v):
    w = jnp.asarray(np.random.default_rng(2).standard_normal((H * D, 3 * H * D)) / 4, jnp.float32)
    q, k, v = jnp.split(q.reshape(B, T, H * D) @ w, 3, axis=-1)
    q, k, v = (x.reshape(B, T, H, D) for x in (q, k, v))
    return out(jax.nn.softmax(dot(q, k) * D**-0.5), v)


@spelling
def latent(q, k, v):
    latents = k[:, :, 0]
    w = jnp.asarray(np.random.default_rng(3).standard_normal((2, D, H, D)) / 3, jnp.float32)
    k, v = (jnp.einsum("bsc,chd->bshd", latents, w[n]) for n in range(2))
    return out(jax.nn.softmax(dot(q, k) * D**-0.5), v)


@spelling
def latent_absorbed(q, k, v):
    latents = k[:, :, 0]
    w = jnp.asarray(np.random.default_rng(3).standard_normal((2, D, H, D)) / 3, jnp.float32)
    q = jnp.einsum("bthd,chd->bthc", q, w[0])
    p = jax.nn.softmax(jnp.einsum("bthc,bsc->bhts", q, latents) * D**-0.5)
    return jnp.einsum("bthc,chd->bthd", jnp.einsum("bhts,bsc->bthc", p, latents), w[1])


@spelling
def two_part_scores(q, k, v):
    nope = dot(q[..., :5], k[..., :5])
    rope = jnp.einsum("bthd,bsd->bhts", q[..., 5:], k[:, :, 0, 5:])
    return out(jax.nn.softmax((nope + rope) * D**-0.5), v)


@spelling
def rotary(q, k, v):
    angle = jnp.arange(T, dtype=jnp.float32)[:, None] * 0.1 ** jnp.arange(D // 2)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]

    def turn(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    return out(jax.nn.softmax(dot(turn(q), turn(k)) * D**-0.5), v)


@spelling
def normalised_heads(q, k, v):
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return out(jax.nn.softmax(dot(q, k) * 7.0), v)


# ------------------------------------------------------------------ masks


@spelling
def cross(q, k, v):
    k, v = k[:, :17], v[:, :17]
    return out(jax.nn.softmax(dot(q, k) * D**-0.5), v)


@spelling
def decode(q, k, v):
    place = jnp.int32(11)
    s = jnp.einsum("bhd,bshd->bhs", q[:, 0], k) * D**-0.5
    s = jnp.where(jnp.arange(T) <= place, s, -jnp.inf)
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(s), v)


@spelling
def decode_one_row(q, k, v):
    lengths = jnp.array([5, 20])
    s = dot(q[:, :1], k) * D**-0.5
    s = jnp.where((jnp.arange(T) < lengths[:, None])[:, None, None], s, LEAST)
    return out(jax.nn.softmax(s), v)


@spelling
def sliding_window(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    return out(jax.nn.softmax(jnp.where((j <= i) & (j > i - 6), dot(q, k), -jnp.inf)), v)


@spelling
def packed(q, k, v):
    number = jnp.asarray(np.repeat([[0, 1, 2]], 8, axis=1).repeat(B, 0))
    same = number[:, None, :, None] == number[:, None, None, :]
    return out(jax.nn.softmax(jnp.where(same & TRIL, dot(q, k), -1e9)), v)


@spelling
def prefix(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    return out(jax.nn.softmax(jnp.where((j <= i) | (j < 5), dot(q, k), -jnp.inf)), v)


@spelling
def two_masks(q, k, v):
    seen = jnp.arange(T) < jnp.array([[9], [T]])
    s = jnp.where(jnp.asarray(TRIL), dot(q, k) / 3, -1e9)
    return out(jax.nn.softmax(jnp.where(seen[:, None, None], s, -1e9)), v)


@spelling
def rows_without_keys(q, k, v):
    seen = jnp.arange(T)[:, None] > 3
    return out(jax.nn.softmax(jnp.where(seen, dot(q, k), -jnp.inf)), v)


@spelling
def safe_rows(q, k, v):
    seen = jnp.arange(T)[:, None] > jnp.arange(T)[None]
    p = jax.nn.softmax(jnp.where(seen, dot(q, k), -jnp.inf))
    return out(jnp.where(seen.any(-1, keepdims=True), p, 0), v)


@spelling
def rows_that_are_not_numbers(q, k, v):
    seen = jnp.arange(T)[:, None] > jnp.arange(T)[None]
    p = jax.nn.softmax(jnp.where(seen, dot(q, k), -jnp.inf))
    return out(jnp.where(jnp.isnan(p), 0, p), v), out(jnp.nan_to_num(p), k)


@spelling
def softmax_where(q, k, v):
    return out(jax.nn.softmax(dot(q, k) / 2, where=jnp.asarray(TRIL)), v)


@spelling
def multiplied_then_renormalised(q, k, v):
    e = jnp.exp(dot(q, k) / 4) * TRIL
    return out(e / e.sum(-1, keepdims=True), v)


# ------------------------------------------------------------------ softmax by hand


@spelling
def shifted(q, k, v):
    s = dot(q, k) / 2
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return out(e / jnp.sum(e, -1, keepdims=True), v)


@spelling
def unshifted(q, k, v):
    e = jnp.exp(dot(q, k) / 4)
    return out(e / e.sum(-1, keepdims=True), v)


@spelling
def divided_after(q, k, v):
    s = dot(q, k) / 2
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return out(e, v) / e.sum(-1).transpose(0, 2, 1)[..., None]


@spelling
def epsilon(q, k, v):
    e = jnp.exp(dot(q, k) / 4)
    return out(e / (e.sum(-1, keepdims=True) + 1e-6), v)


@spelling
def through_log_softmax(q, k, v):
    return out(jnp.exp(jax.nn.log_softmax(dot(q, k) / 2, -1)), v)


@spelling
def through_logsumexp(q, k, v):
    s = dot(q, k) / 2
    return out(jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


@spelling
def scipy_logsumexp(q, k, v):
    s = dot(q, k) / 2
    return out(jnp.exp(s - jax.scipy.special.logsumexp(s, axis=-1, keepdims=True)), v)


@spelling
def powers_of_two(q, k, v):
    s = dot(q, k) * (D**-0.5 * math.log2(math.e))
    e = jnp.exp2(s - s.max(-1, keepdims=True))
    return out(e / e.sum(-1, keepdims=True), v)


@spelling
def temperature_after_shift(q, k, v):
    s = dot(q, k)
    e = jnp.exp((s - s.max(-1, keepdims=True)) / 3)
    return out(e / e.sum(-1, keepdims=True), v)


@spelling
def with_logsumexp(q, k, v):
    s = dot(q, k) / 2
    lse = jax.nn.logsumexp(s, -1)
    return out(jnp.exp(s - lse[..., None]), v), lse


@spelling
def flash_state(q, k, v):
    s = dot(q, k) / 2
    top = s.max(-1)
    e = jnp.exp(s - top[..., None])
    return out(e, v), top, e.sum(-1)


@spelling
def two_values(q, k, v):
    p = jax.nn.softmax(dot(q, k) / 2)
    return out(p, v), out(p, jnp.sin(v[..., :3]))


@spelling
def merged_caches(q, k, v):
    parts = []
    for a, b in ((0, 10), (10, T)):
        s = dot(q, k[:, a:b]) / 2
        lse = jax.nn.logsumexp(s, -1)
        parts.append((out(jnp.exp(s - lse[..., None]), v[:, a:b]), lse))
    (x, a), (y, b) = parts
    w = jax.nn.sigmoid(a - b).transpose(0, 2, 1)[..., None]
    return w * x + (1 - w) * y


@functools.cache
def tolerance(name: str) -> float:
    return 0.02 if name.startswith("half") else 3e-5
