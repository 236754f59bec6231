"""A kernel rounds wherever the program casts to 8 bits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from symjax_rewrite import sym_optimize
from symjax_rewrite.jax_internals import joint_dtype

FP8, FP8_GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def quantised(x):
    return x.astype(FP8).astype(x.dtype)


def attention(q, k, v):
    return quantised(jax.nn.softmax(q @ k.T)) @ v


def norm(q, k, v):
    return quantised(q * jax.lax.rsqrt((q * q).mean(-1, keepdims=True) + 1e-6)) @ v[: q.shape[1]]


def product(q, k, v):
    """A product whose operands have 8 bits, and its result 32."""
    p = jax.nn.softmax(q @ k.T)
    return jnp.dot(p.astype(FP8), v.astype(FP8), preferred_element_type=jnp.float32)


def scaled_norm(q, k, v):
    """A normalisation of rows that a product in 8 bits scales."""
    scaled = (q.astype(FP8) * k[0].astype(FP8)).astype(q.dtype)
    return (scaled * jax.lax.rsqrt((q * q).mean(-1, keepdims=True) + 1e-6)) @ v[: q.shape[1]]


def distances(q, k, v):
    """Squares of 8 bits over all pairs."""
    pairs = q.astype(FP8)[:, None] - k.astype(FP8)
    return (pairs * pairs).astype(q.dtype).sum(-1).min(1)


def states(q, k, v):
    """A recurrence whose states have 8 bits."""

    def step(h, kv):
        h = (jax.nn.sigmoid(kv[0]) * h.astype(q.dtype) + kv[1]).astype(FP8)
        return h, h.astype(q.dtype)

    return jax.lax.scan(step, q[0].astype(FP8), (k, v))[1]


def fast_weights(q, k, v):
    """A state that outer products in 8 bits are added to."""

    def step(s, qkv):
        q, k, v = qkv
        s = 0.9 * s + (k.astype(FP8)[:, None] * v.astype(FP8)).astype(q.dtype)
        return s, q @ s

    return jax.lax.scan(step, jnp.zeros((8, 8)), (q, k, v))[1]


def cached(q, k, v):
    """Attention to keys and values that a cache holds in 8 bits."""
    return jax.nn.softmax(q @ k.astype(q.dtype).T) @ v.astype(q.dtype)


def outer_products(q, k, v):
    """Products of integers in 8 bits, which have 32, in the steps of a loop and over pairs."""
    q, k, v = ((30 * x).astype(jnp.int8) for x in (q, k, v))
    batched = (((), ()), ((0,), (0,)))
    times = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.int32)

    def step(s, kv):
        s = 0.9 * s + times(kv[0], kv[1], batched).astype(jnp.float32)
        return s, s

    pairs = jnp.abs(times(q.T, k.T, batched)).sum(0).min(1)
    return pairs, jax.lax.scan(step, jnp.zeros(8), (k, v))[1]


def rounded_products(q, k, v):
    """Rounding errors of bfloat16 products of float32 factors, over pairs and in loops."""
    times: Any = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.bfloat16)

    def lost(a, b):
        return 100 * (jnp.outer(a, b) - times(a, b, (((), ()), ((), ()))).astype(a.dtype))

    def step(carry, kv):
        h, s = carry
        h = 0.9 * h + lost(kv[0][:1], kv[1])[0]
        s = 0.9 * s + times(*kv, (((), ()), ((), ()))).astype(s.dtype)
        return (h, s), (h, s @ kv[0])

    start = jnp.zeros(8), jnp.zeros((8, 8))
    pairs = jnp.exp(lost(q[:, 0], k[:, 0])) @ v
    scores = jnp.exp(100 * (q @ k.T - times(q, k, (((1,), (1,)), ((), ()))).astype(q.dtype)))
    return pairs, scores @ v, jax.lax.scan(step, start, (k, v))[1]


def drawn(*dtypes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((24, 8)), jnp.float32).astype(d) for d in dtypes]


@jax.jit
def both(q, k, v, cache):
    programs = (
        attention, norm, product, scaled_norm, distances, states, fast_weights, outer_products,
        rounded_products,
    )  # fmt: skip
    ours = [sym_optimize(f, kernels="always", on_unsupported="error") for f in (*programs, cached)]
    run = lambda fs: ([f(q, k, v) for f in fs[:-1]], fs[-1](q, *cache))  # noqa: E731
    return run([*programs, cached]), run(ours)


def test_kernels_keep_what_a_program_quantises():
    q, k, v, *cache = drawn(*["float32"] * 3, FP8, FP8_GRADIENT)
    written, ours = both(q, k, v, cache)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5), written, ours)


def test_attention_to_a_cache_in_8_bits_is_a_fold():
    report = sym_optimize(cached, kernels="always").explain(*drawn("float32", FP8, FP8_GRADIENT))
    assert any(r.taken and r.name == "fold" for r in report.routes)


@pytest.mark.parametrize(
    ("dtypes", "joint"),
    [
        ((FP8, "float32"), "float32"),
        ((FP8, FP8_GRADIENT), "bfloat16"),
        ((FP8, FP8), FP8),
        ((FP8, "float16"), "float32"),
        (("int4", "float32"), "float32"),
        (("uint4", "int8"), "int8"),
        (("bfloat16", "float16"), "float32"),
    ],
)
def test_joint_dtypes_hold_the_values_of_all(dtypes, joint):
    assert joint_dtype(*dtypes) == jnp.dtype(joint)
