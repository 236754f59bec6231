"""Sums over all pairs of points, as everyone writes them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

SOFT = 1e-3
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
