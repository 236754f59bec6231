"""Pairs of functions that are equal, with the specs of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Pair = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]
PAIRS: dict[str, Pair] = {}


def equal(*specs: Any) -> Callable[[Callable[[], tuple[Any, Any]]], None]:
    """Add the pair of functions that a function returns, under its name."""

    def add(make: Callable[[], tuple[Any, Any]]) -> None:
        PAIRS[make.__name__] = (*make(), specs)

    return add


def naive_softmax(x, axis=-1):
    e = jnp.exp(x)
    return e / e.sum(axis, keepdims=True)


def stable_softmax(x, axis=-1):
    e = jnp.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def layer_norm(x, scale, shift, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * scale + shift


def rms_norm(x, scale, eps=1e-6):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def attention(q, k, v, scale=0.125):
    return jax.nn.softmax(scale * (q @ k.T), -1) @ v


def merge(a, b):
    """Combine the states (m, l, acc) of an online softmax."""
    m = jnp.maximum(a[0], b[0])
    left, right = jnp.exp(a[0] - m), jnp.exp(b[0] - m)
    return m, a[1] * left + b[1] * right, a[2] * left[:, None] + b[2] * right[:, None]


def start_state(rows, columns):
    return jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((rows, columns))


def next_state(state, scores, values):
    """Return the state (m, l, acc) of an online softmax after a block of scores and values."""
    m, l, acc = state
    new = jnp.maximum(m, scores.max(-1))
    p, kept = jnp.exp(scores - new[:, None]), jnp.exp(m - new)
    return new, l * kept + p.sum(-1), acc * kept[:, None] + p @ values


def flash(q, k, v, scale=0.125):
    """Return attention over blocks k[t, b, d], v[t, b, e] by FlashAttention's recurrence."""

    def step(state, block):
        return next_state(state, scale * (q @ block[0].T), block[1]), None

    (_, l, acc), _ = lax.scan(step, start_state(q.shape[0], v.shape[-1]), (k, v))
    return acc / l[:, None]


def joined(blocks):
    return blocks.reshape(-1, blocks.shape[-1])


@equal("f32[n,d]", "i32[n]")
def cross_entropy_of_shifted_scores():
    def by_softmax(x, y):
        return -jnp.take_along_axis(jnp.log(naive_softmax(x)), y[:, None], 1).mean()

    def by_shift(x, y):
        shifted = x - x.max(-1, keepdims=True)
        picked = jnp.take_along_axis(shifted, y[:, None], 1)[:, 0]
        return (jnp.log(jnp.exp(shifted).sum(-1)) - picked).mean()

    return by_softmax, by_shift


@equal("f32[n,d]", "f32[d]", "f32[d]", "f32[d,o]")
def deferred_layer_norm():
    def deferred(x, scale, shift, w):
        mean = x.mean(-1, keepdims=True)
        variance = (x * x).mean(-1, keepdims=True) - mean * mean
        product = x @ (scale[:, None] * w) - mean * (scale @ w)
        return product * lax.rsqrt(variance + 1e-5) + shift @ w

    return lambda x, scale, shift, w: layer_norm(x, scale, shift) @ w, deferred


@equal("f32[n,d]", "f32[d]", "f32[d,o]")
def deferred_rms_norm():
    def deferred(x, scale, w):
        size = jnp.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + 1e-6)
        return (x @ (scale[:, None] * w)) / size

    return lambda x, scale, w: rms_norm(x, scale) @ w, deferred


STATE = ("f32[n]", "f32[n]", "f32[n,d]")


@equal("f32[n,c,b]", "f32[c,b,d]")
def chunks_of_an_online_softmax():
    def chunked(s, v):
        m = s.max(-1)
        p = jnp.exp(s - m[..., None])
        whole = m.max(-1)
        weight = jnp.exp(m - whole[:, None])
        acc = jnp.einsum("nc,ncb,cbd->nd", weight, p, v)
        return acc / (weight * p.sum(-1)).sum(-1)[:, None]

    def plain(s, v):
        return jnp.einsum("ncb,cbd->nd", jax.nn.softmax(s, (-2, -1)), v)

    return chunked, plain


@equal("f32[24,32]", "f32[64,32]", "f32[64,16]")
def flash_attention_with_dynamic_slices():
    def sliced(q, k, v, size=16):
        def step(i, state):
            kb, vb = (lax.dynamic_slice_in_dim(x, i * size, size) for x in (k, v))
            return next_state(state, 0.125 * (q @ kb.T), vb)

        _, l, acc = lax.fori_loop(0, 4, step, start_state(24, 16))
        return acc / l[:, None]

    return sliced, attention


@equal("f32[16,8]", "f32[32,8]", "f32[32,8]")
def causal_flash_attention():
    def masked(q, k, v):
        s = q @ k.T
        keep = jnp.arange(16)[:, None] + 16 >= jnp.arange(32)
        return jax.nn.softmax(jnp.where(keep, s, -jnp.inf), -1) @ v

    def blocks(q, k, v):
        def step(i, state):
            kb, vb = (lax.dynamic_slice_in_dim(x, i * 8, 8) for x in (k, v))
            keep = jnp.arange(16)[:, None] + 16 >= i * 8 + jnp.arange(8)
            return next_state(state, jnp.where(keep, q @ kb.T, -jnp.inf), vb)

        _, l, acc = lax.fori_loop(0, 4, step, start_state(16, 8))
        return acc / l[:, None]

    return masked, blocks


@equal("f32[n]", "f32[n,d]")
def running_average_of_attention():
    def normalised(s, v):
        def step(state, entry):
            m, l, mean = state
            new = jnp.maximum(m, entry[0])
            total = l * jnp.exp(m - new) + jnp.exp(entry[0] - new)
            mean = mean * (l * jnp.exp(m - new) / total)
            return (new, total, mean + jnp.exp(entry[0] - new) / total * entry[1]), None

        start = (jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros(v.shape[1]))
        return lax.scan(step, start, (s, v))[0][2]

    return normalised, lambda s, v: naive_softmax(s) @ v


@equal("f32[n]")
def online_logsumexp_is_logsumexp():
    def online(x):
        def step(state, entry):
            m, l = state
            new = jnp.maximum(m, entry)
            return (new, l * jnp.exp(m - new) + jnp.exp(entry - new)), None

        (m, l), _ = lax.scan(step, (jnp.float32(-jnp.inf), jnp.float32(0)), x)
        return m + jnp.log(l)

    return online, jax.nn.logsumexp


@equal("f32[n,d]")
def loop_of_a_sum():
    def loop(x):
        return lax.scan(lambda c, row: (c + row**2, None), jnp.zeros(x.shape[1]), x)[0]

    return loop, lambda x: (x * x).sum(0)


@equal("f32[12,d]")
def running_sums():
    def loop(x):
        return lax.scan(lambda c, row: (c + row, c + row), jnp.zeros(x.shape[1]), x)[1]

    return loop, lambda x: jnp.tril(jnp.ones((12, 12))) @ x


@equal("f32[n,d]")
def loop_of_a_minimum():
    def loop(x):
        step = lambda c, row: (jnp.minimum(c, row), None)  # noqa: E731
        return lax.scan(step, jnp.full(x.shape[1], jnp.inf), x)[0]

    return loop, lambda x: x.min(0)


@equal("f32[n,d]", "f32[n,d]", "f32[d]")
def two_spellings_of_an_affine_scan():
    def one(a, b, h):
        return lax.scan(lambda h, ab: ((new := ab[0] * h + ab[1]), new), h, (a, b))[1]

    def other(a, b, h):
        return lax.scan(lambda h, ab: (h - (h - ab[0] * h - ab[1]), ab[1] + h * ab[0]), h, (a, b))[
            1
        ]

    return one, other


AFFINE = ("f32[16,3]", "f32[16,3]")


def sequential(a, b):
    return lax.scan(lambda h, ab: ((new := ab[0] * h + ab[1]), new), jnp.zeros(3), (a, b))[1]


def parallel(a, b):
    def combine(left, right):
        return right[0] * left[0], right[0] * left[1] + right[1]

    return lax.associative_scan(combine, (a, b))[1]


@equal("f32[n]", "f32[n]", "f32[n]", "f32[n]", "f32[n]", "f32[n]")
def affine_maps_compose_associatively():
    def combine(left, right):
        return right[0] * left[0], right[0] * left[1] + right[1]

    def left(a, b, c, d, e, f):
        return combine(combine((a, b), (c, d)), (e, f))

    return left, lambda a, b, c, d, e, f: combine((a, b), combine((c, d), (e, f)))


@equal("f32[b,h,q,d]", "f32[b,h,k,d]", "f32[b,h,k,e]")
def einsum_and_matmul():
    def einsum(q, k, v):
        return jnp.einsum("bhqk,bhke->bqhe", jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k)), v)

    def matmul(q, k, v):
        return (stable_softmax(q @ jnp.swapaxes(k, -1, -2)) @ v).transpose(0, 2, 1, 3)

    return einsum, matmul


@equal("f32[b,s,h*16]", "f32[h*16,h*16]")
def heads_by_reshape():
    def heads(x, w):
        y = (x @ w).reshape(x.shape[0], x.shape[1], -1, 16)
        return (y * y).sum(-1)

    def einsum(x, w):
        y = jnp.einsum("bsd,dhe->bhse", x, w.reshape(w.shape[0], -1, 16))
        return jnp.einsum("bhse,bhse->bsh", y, y)

    return heads, einsum


@equal("f32[n,d]", "f32[m,d]")
def pairwise_distances():
    def direct(x, y):
        return ((x[:, None] - y[None]) ** 2).sum(-1)

    return direct, lambda x, y: (x**2).sum(-1)[:, None] + (y**2).sum(-1) - 2 * (x @ y.T)


@equal("f32[8,d]", "f32[8,8]")
def additive_and_selected_masks():
    mask = jnp.tril(jnp.ones((8, 8), bool))

    def selected(v, s):
        return jax.nn.softmax(jnp.where(mask, s, -jnp.inf), -1) @ v

    def added(v, s):
        return naive_softmax(s + jnp.where(mask, 0.0, -jnp.inf)) @ v

    return selected, added


@equal("f32[6,d]", "f32[6,e]")
def products_with_concatenation():
    def joined_rows(x, w):
        return jnp.concatenate([x[:2], x[2:]]).T @ w

    return joined_rows, lambda x, w: x[:2].T @ w[:2] + x[2:].T @ w[2:]


@equal("f32[d,a]", "f32[d,b]", "f32[n,d]")
def concatenated_projections():
    def joint(u, v, x):
        return x @ jnp.concatenate([u, v], 1)

    return joint, lambda u, v, x: jnp.concatenate([x @ u, x @ v], 1)


PAIRS |= {
    "stable_and_naive_softmax": (stable_softmax, naive_softmax, ("f32[n,d]",)),
    "softmax_of_jax": (jax.nn.softmax, naive_softmax, ("f32[n,d]",)),
    "log_softmax": (
        lambda x: jax.nn.log_softmax(x, -1), lambda x: jnp.log(naive_softmax(x)), ("f32[n,d]",)),
    "logsumexp": (
        lambda x: jax.nn.logsumexp(x, -1), lambda x: jnp.log(jnp.exp(x).sum(-1)), ("f32[n,d]",)),
    "variance_of_numpy": (
        lambda x: x.var(-1), lambda x: (x * x).mean(-1) - x.mean(-1) ** 2, ("f32[n,d]",)),
    "online_softmax_is_associative": (
        lambda a, b, c: merge(merge(a, b), c),
        lambda a, b, c: merge(a, merge(b, c)), (STATE, STATE, STATE)),
    "online_softmax_commutes": (merge, lambda a, b: merge(b, a), (STATE, STATE)),
    "flash_attention_of_any_number_of_blocks": (
        flash,
        lambda q, k, v: attention(q, joined(k), joined(v)),
        ("f32[n,d]", "f32[t,b,d]", "f32[t,b,e]")),
    "parallel_and_sequential_affine_scans": (parallel, sequential, AFFINE),
    "long_parallel_and_sequential_affine_scans": (
        parallel, sequential, ("f32[200,3]", "f32[200,3]")),
    "relu_by_selection": (jax.nn.relu, lambda x: jnp.where(x > 0, x, 0.0), ("f32[n]",)),
    "swish_by_tanh": (jax.nn.silu, lambda x: 0.5 * x * (1 + jnp.tanh(x / 2)), ("f32[n]",)),
    "sigmoid_of_the_opposite": (
        lambda x: 1 - jax.nn.sigmoid(x), lambda x: jax.nn.sigmoid(-x), ("f32[n]",)),
    "exact_gelu": (
        lambda x: jax.nn.gelu(x, approximate=False),
        lambda x: x * 0.5 * (1 + lax.erf(x / jnp.sqrt(2.0))), ("f32[n]",)),
    "approximate_gelu": (
        jax.nn.gelu,
        lambda x: x * jax.nn.sigmoid(2 * jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x * x * x)),
        ("f32[n]",)),
    "complex_inner_products": (
        jnp.vdot,
        lambda x, y: (x.real * y.real + x.imag * y.imag).sum()
        + 1j * (x.real * y.imag - x.imag * y.real).sum(),
        ("c64[n]", "c64[n]")),
    "integer_ring": (
        lambda x, y: (x + y) * (x - y), lambda x, y: x * x - y * y, ("i32[n]", "i32[n]")),
    "trace_of_a_square": (lambda x: jnp.trace(x @ x), lambda x: (x * x.T).sum(), ("f32[n,n]",)),
    "matrix_chain": (
        lambda x, a, b, v: ((x @ a) @ b) @ v,
        lambda x, a, b, v: x @ (a @ (b @ v)), ("f32[n,d]", "f32[d,o]", "f32[o,p]", "f32[p]")),
    "common_denominator": (
        lambda a, b, c: a / (1 + b * b) + c,
        lambda a, b, c: (a + c + c * b**2) / (1 + b**2), ("f32[n]", "f32[n]", "f32[n]")),
    "pytrees_of_arguments": (
        lambda p, x: {"y": x @ p["w"] + p["b"]},
        lambda p, x: {"y": jnp.einsum("do,nd->no", p["w"], x) + p["b"][None]},
        ({"w": "f32[d,o]", "b": "f32[o]"}, "f32[n,d]")),
    "squares_of_roots": (lambda x: jnp.sqrt(x * x), jnp.abs, ("f32[n]",)),
    "double_where": (lambda x: jnp.where(x > 0, x, -x), jnp.abs, ("f32[n]",)),
}  # fmt: skip


def stepwise(combine, start):
    """Return a scan that combines rows one by one and returns all states."""
    return lambda x: lax.scan(
        lambda c, row: (combine(c, row),) * 2, jnp.full(x.shape[1], start, x.dtype), x
    )[1]


@equal("f32[t,d]", "f32[s,d]", "f32[s,e]", "f32[r,d]", "f32[r,e]")
def attention_to_two_caches():
    def joined_caches(q, k, v, more_k, more_v):
        keys, values = jnp.concatenate([k, more_k]), jnp.concatenate([v, more_v])
        return jax.nn.softmax(q @ keys.T, -1) @ values

    def merged(q, k, v, more_k, more_v):
        p, more_p = jnp.exp(q @ k.T), jnp.exp(q @ more_k.T)
        return (p @ v + more_p @ more_v) / (p.sum(-1) + more_p.sum(-1))[:, None]

    return joined_caches, merged


PAIRS |= {
    "running_sum_in_steps": (lambda x: jnp.cumsum(x, 0), stepwise(jnp.add, 0.0), ("f32[t,d]",)),
    "running_sum_by_a_triangular_matrix": (
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.tril(jnp.ones((x.shape[0],) * 2)) @ x, ("f32[t,d]",)),
    "running_maximum_in_steps": (
        lambda x: lax.cummax(x, 0), stepwise(jnp.maximum, -jnp.inf), ("f32[t,d]",)),
    "running_logsumexp": (
        lambda x: lax.cumlogsumexp(x, 0),
        lambda x: jnp.log(jnp.cumsum(jnp.exp(x), 0)), ("f32[t,d]",)),
    "running_sum_from_the_end": (
        lambda x: jnp.cumsum(x[::-1], 0)[::-1],
        lambda x: x.sum(0) - jnp.cumsum(x, 0) + x, ("f32[t,d]",)),
}  # fmt: skip
