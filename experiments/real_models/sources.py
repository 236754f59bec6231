"""Seeded inputs for the models."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """float32[*shape], normally distributed."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(scale * values, jnp.float32)


def integers(high: int, *shape: int, seed: int = 0) -> jax.Array:
    """int32[*shape] below `high`."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)
