"""Recurrent layers of bfloat16 arrays, as loops over time with states in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BATCH, LENGTH, CHANNELS, STATES = 4, 1024, 1024, 16
HEADS, WIDTH = 16, 64
Layer = tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]


def scanned(step: Callable, starts: Any, sequences: Sequence[Any]) -> Any:
    """Run a step over the second axis of all sequences, in float32; the results are bfloat16."""
    xs = [jnp.moveaxis(x, 1, 0).astype(jnp.float32) for x in sequences]
    ys = lax.scan(step, starts, xs)[1]
    return jnp.moveaxis(ys, 0, 1).astype(jnp.bfloat16)


def mamba(x: Any, dt: Any, b: Any, c: Any, a: Any) -> Any:
    """The selective scan of Mamba (Gu and Dao 2023)."""

    def step(h: Any, now: Any) -> Any:
        x, dt, b, c = now
        h = jnp.exp(dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    return scanned(step, jnp.zeros((BATCH, CHANNELS, STATES)), (x, dt, b, c))


def mamba_2(x: Any, dt: Any, b: Any, c: Any, a: Any, skip: Any) -> Any:
    """The same with one decay and one skip per head (Dao and Gu 2024)."""

    def step(h: Any, now: Any) -> Any:
        x, dt, b, c = now
        h = jnp.exp(dt * a)[..., None, None] * h + (dt[..., None] * x)[..., None] * b[:, None, None]
        return h, jnp.einsum("bhpn,bn->bhp", h, c) + skip[:, None] * x

    return scanned(step, jnp.zeros((BATCH, HEADS, WIDTH, WIDTH)), (x, dt, b, c))


def rwkv_4(k: Any, v: Any, w: Any, u: Any) -> Any:
    """The weighted average of RWKV-4, which keeps the largest exponent (Peng et al. 2023)."""

    def step(carried: Any, now: Any) -> Any:
        (a, b, p), (k, v) = carried, now
        q = jnp.maximum(p, u + k)
        past, this = jnp.exp(p - q), jnp.exp(u + k - q)
        y = (past * a + this * v) / (past * b + this)
        q = jnp.maximum(p + w, k)
        past, this = jnp.exp(p + w - q), jnp.exp(k - q)
        return (past * a + this * v, past * b + this, q), y

    zero = jnp.zeros((BATCH, CHANNELS))
    return scanned(step, (zero, zero, zero - 1e38), (k, v))


def xlstm(q: Any, k: Any, v: Any, i: Any, f: Any) -> Any:
    """The matrix memory of xLSTM with its stabiliser (Beck et al. 2024)."""

    def step(carried: Any, now: Any) -> Any:
        (C, n, m), (q, k, v, i, f) = carried, now
        forget = jax.nn.log_sigmoid(f) + m
        m = jnp.maximum(forget, i)
        keep, add = jnp.exp(forget - m)[..., None], jnp.exp(i - m)[..., None]
        C = keep[..., None] * C + (add * k)[..., None] * v[..., None, :]
        n = keep * n + add * k
        size = jnp.maximum(jnp.abs((q * n).sum(-1)), jnp.exp(-m))
        return (C, n, m), jnp.einsum("bhk,bhkv->bhv", q, C) / size[..., None]

    n = jnp.zeros((BATCH, HEADS, WIDTH))
    return scanned(step, (jnp.zeros((*n.shape, WIDTH)), n, jnp.zeros(n.shape[:2])), (q, k, v, i, f))


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def sequence(*shape: int) -> jax.ShapeDtypeStruct:
    return array(BATCH, LENGTH, *shape, dtype=jnp.bfloat16)


def layers() -> Iterator[tuple[str, Layer]]:
    """Yield layers by name, with their arguments; the result has the shape of the first."""
    wide, narrow, heads = sequence(CHANNELS), sequence(STATES), sequence(HEADS, WIDTH)
    shared, scalar, head = sequence(WIDTH), sequence(HEADS), array(HEADS)
    yield "Mamba", (mamba, [wide, wide, narrow, narrow, array(CHANNELS, STATES)])
    yield "Mamba-2", (mamba_2, [heads, scalar, shared, shared, head, head])
    yield "RWKV-4", (rwkv_4, [wide, wide, array(CHANNELS), array(CHANNELS)])
    yield "xLSTM", (xlstm, [heads, heads, heads, scalar, scalar])
