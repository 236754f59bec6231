"""Mamba's selective scan as people write it in JAX: two programs with the same values."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CHANNELS, STATES = 256, 16


def sequential(x, dt, A, B, C):
    """One `lax.scan` step per position, coefficients made inside."""

    def step(h, xs):
        x, dt, b, c = xs
        h = jnp.exp(dt[..., None] * A) * h + (dt * x)[..., None] * b[:, None, :]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    start = jnp.zeros((x.shape[0], *A.shape), x.dtype)
    _, y = lax.scan(step, start, [v.swapaxes(0, 1) for v in (x, dt, B, C)])
    return y.swapaxes(0, 1)


def hoisted(x, dt, A, B, C):
    """`lax.scan` over coefficients made beforehand, as in the published reference."""
    a = jnp.exp(dt[..., None] * A)
    b = (dt * x)[..., None] * B[:, :, None, :]

    def step(h, xs):
        a, b, c = xs
        h = a * h + b
        return h, jnp.einsum("bdn,bn->bd", h, c)

    start = jnp.zeros((x.shape[0], *A.shape), x.dtype)
    _, y = lax.scan(step, start, [v.swapaxes(0, 1) for v in (a, b, C)])
    return y.swapaxes(0, 1)


def associative(x, dt, A, B, C):
    """`lax.associative_scan` over all states."""
    a = jnp.exp(dt[..., None] * A)
    b = (dt * x)[..., None] * B[:, :, None, :]
    _, h = lax.associative_scan(lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (a, b), axis=1)
    return jnp.einsum("bldn,bln->bld", h, C)


SPELLINGS = {
    "`lax.scan`": sequential,
    "`lax.scan`, coefficients first": hoisted,
    "`associative_scan`": associative,
}


def arguments(length, channels=CHANNELS, states=STATES, batch=1, dtype="float32"):
    """x, Δ, A, B, C as a trained layer has them: Δ around 0.05, decays from near 1 to near 0."""
    rng = np.random.default_rng(0)
    wide, shared = (batch, length, channels), (batch, length, states)
    arrays = {
        "x": rng.normal(size=wide),
        "dt": np.exp(rng.normal(size=wide) - 3),
        "A": -np.tile(np.arange(1.0, states + 1), (channels, 1)),
        "B": rng.normal(size=shared),
        "C": rng.normal(size=shared),
    }
    return [jnp.asarray(v, "float32" if k == "A" else dtype) for k, v in arrays.items()]


def gradient(run):
    """The gradient by every argument of a loss of `run`'s result."""
    return jax.grad(lambda *xs: jnp.sum(jnp.sin(run(*xs))), argnums=(0, 1, 2, 3, 4))
