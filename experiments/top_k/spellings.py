"""Spellings of the k best of n rows: all scores at once, by chunks, and running over a loop."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

K, CHUNKS = 16, 32


def scores(q, y):
    return q @ y.T


def at_once(q, y):
    return lax.top_k(scores(q, y), K)


def by_sort(q, y):
    s = scores(q, y)
    order = jnp.argsort(-s, axis=-1)[:, :K]
    return jnp.take_along_axis(s, order, -1), order


def by_chunks(q, y):
    """The best of every chunk, then the best of these."""
    s = scores(q, y).reshape(len(q), CHUNKS, -1)
    values, index = lax.top_k(s, K)
    index = index + jnp.arange(CHUNKS)[:, None] * s.shape[-1]
    best, at = lax.top_k(values.reshape(len(q), -1), K)
    return best, jnp.take_along_axis(index.reshape(len(q), -1), at, -1)


def running(q, y):
    """A loop over blocks of rows that carries the best so far."""
    size = len(y) // CHUNKS

    def step(carry, given):
        number, rows = given
        return merged(carry, scores(q, rows), number * size), None

    start = jnp.full((len(q), K), -jnp.inf), jnp.zeros((len(q), K), jnp.int32)
    blocks = jnp.arange(CHUNKS), y.reshape(CHUNKS, size, -1)
    return lax.scan(step, start, blocks)[0]


def running_over_scores(q, y):
    """The same loop over scores that were all computed before it."""
    s = scores(q, y).reshape(len(q), CHUNKS, -1)

    def step(carry, given):
        number, values = given
        return merged(carry, values, number * s.shape[-1]), None

    start = jnp.full((len(q), K), -jnp.inf), jnp.zeros((len(q), K), jnp.int32)
    return lax.scan(step, start, (jnp.arange(CHUNKS), s.swapaxes(0, 1)))[0]


def merged(carry, values, first):
    """The best of those so far and of new values, whose first has this number."""
    best, index = carry
    numbers = jnp.broadcast_to(first + jnp.arange(values.shape[-1]), values.shape)
    top, at = lax.top_k(jnp.concatenate([best, values], -1), K)
    return top, jnp.take_along_axis(jnp.concatenate([index, numbers], -1), at, -1)


SPELLINGS = (at_once, by_sort, by_chunks, running, running_over_scores)
