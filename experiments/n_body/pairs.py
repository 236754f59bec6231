"""All pairs exactly: as written, by blocks, and by blocks with Newton's third law."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SOFT, BLOCK = 1e-3, 256
Kernel = Callable[[jax.Array], jax.Array]


def gravity(squares: jax.Array) -> jax.Array:
    return lax.rsqrt(squares) ** 3


def screened(squares: jax.Array) -> jax.Array:
    """Force of exp(−r)/r over r: an exponential and a root for every pair."""
    r = jnp.sqrt(squares)
    return jnp.exp(-r) * (1 + r) / (r * squares)


def written(kernel: Kernel) -> Callable:
    """Return forces as everyone writes them: an array of all pairs."""

    def forces(x, m, rows=None):
        d = x[None] - (x if rows is None else rows)[:, None]
        squares = jnp.sum(d * d, -1) + SOFT
        return jnp.sum((m * kernel(squares))[..., None] * d, 1)

    return forces


def potential(x, m, rows=None):
    """Σ_j m_j / |x_i − x_j|, as everyone writes it; rows: the points i, if not all."""
    squares = jnp.sum((x[None] - (x if rows is None else rows)[:, None]) ** 2, -1)
    return jnp.sum(jnp.where(squares > 0, m * lax.rsqrt(jnp.maximum(squares, 1e-30)), 0), 1)


def tile(kernel: Kernel, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return d[i,j] = y_j − x_i and the kernel of its length."""
    d = y[None] - x[:, None]
    return d, kernel(jnp.sum(d * d, -1) + SOFT)


def blocked(kernel: Kernel) -> Callable:
    """Return forces over all ordered pairs of blocks."""

    def forces(x, m):
        xs, ms = x.reshape(-1, BLOCK, 3), m.reshape(-1, BLOCK)

        def row(block):
            def step(total, other):
                d, w = tile(kernel, block, other[0])
                return total + jnp.einsum("ij,j,ijd->id", w, other[1], d), None

            return lax.scan(step, jnp.zeros_like(block), (xs, ms))[0]

        return lax.map(row, xs).reshape(x.shape)

    return forces


def symmetric(kernel: Kernel) -> Callable:
    """Return forces over unordered pairs of blocks: f(j, i) = −f(i, j)."""

    def forces(x, m):
        xs, ms = x.reshape(-1, BLOCK, 3), m.reshape(-1, BLOCK)
        pairs = np.array([(i, j) for i in range(len(xs)) for j in range(i, len(xs))])

        def step(total, pair):
            i, j = pair
            d, w = tile(kernel, xs[i], xs[j])
            total = total.at[i].add(jnp.einsum("ij,j,ijd->id", w, ms[j], d))
            back = jnp.einsum("ij,i,ijd->jd", w, ms[i], d)
            return total.at[j].add(jnp.where(i == j, 0, -back)), None

        return lax.scan(step, jnp.zeros_like(xs), jnp.asarray(pairs))[0].reshape(x.shape)

    return forces


def tiles(count: int) -> tuple[int, int]:
    """Return how many tiles `blocked` and `symmetric` evaluate."""
    blocks = count // BLOCK
    return blocks**2, blocks * (blocks + 1) // 2
