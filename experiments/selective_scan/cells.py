"""Recurrent cells with their input projections inside the loop, a loop Python unrolls, and decoys.

A decoy is a loop, or looks like one, of which nothing is to be had: it must not get slower.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import spellings
from jax import lax

STEPS, WIDTH, BATCH, UNROLLED = 512, 512, 8, 32


def over_steps(step: Callable, start: Any, x: jax.Array) -> jax.Array:
    """Return the results of the steps, for x of (batch, steps, features)."""
    return lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)


def gated(gates: Iterable[jax.Array], c: jax.Array) -> tuple[tuple, jax.Array]:
    """An LSTM's new state, and what the step gives."""
    i, f, g, o = gates
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def lstm(x, W, U, b):
    def step(carry, x):
        h, c = carry
        return gated(jnp.split(x @ W + h @ U + b, 4, -1), c)

    start = jnp.zeros((x.shape[0], U.shape[0]))
    return over_steps(step, (start, start), x)


def lstm_hoisted(x, W, U, b):
    """The input projections of all steps at once, as one would write it for a GPU."""

    def step(carry, given):
        h, c = carry
        return gated(jnp.split(given + h @ U, 4, -1), c)

    start = jnp.zeros((x.shape[0], U.shape[0]))
    return over_steps(step, (start, start), x @ W + b)


def lstm_joined(x, W, U, b):
    """One product for what a step is given and its state."""
    K = jnp.concatenate([W, U])

    def step(carry, x):
        h, c = carry
        return gated(jnp.split(jnp.concatenate([x, h], -1) @ K + b, 4, -1), c)

    start = jnp.zeros((x.shape[0], U.shape[0]))
    return over_steps(step, (start, start), x)


def lstm_gradient(x, W, U, b):
    return jax.grad(lambda *args: (lstm(*args) ** 2).sum(), argnums=(0, 1, 2, 3))(x, W, U, b)


def lstm_by_gates(x, W, U, b):
    def step(carry, x):
        h, c = carry
        return gated((x @ w + h @ u + k for w, u, k in zip(W, U, b, strict=True)), c)

    start = jnp.zeros((x.shape[0], U[0].shape[0]))
    return over_steps(step, (start, start), x)


def gru(x, W, U, b):
    def step(h, x):
        given, kept = jnp.split(x @ W + b, 3, -1), jnp.split(h @ U, 3, -1)
        r, z = (jax.nn.sigmoid(given[k] + kept[k]) for k in range(2))
        h = (1 - z) * jnp.tanh(given[2] + r * kept[2]) + z * h
        return h, h

    return over_steps(step, jnp.zeros((x.shape[0], U.shape[0])), x)


def gru_by_gates(x, W, U, b):
    def step(h, x):
        r, z = (jax.nn.sigmoid(x @ W[k] + h @ U[k] + b[k]) for k in range(2))
        h = (1 - z) * jnp.tanh(x @ W[2] + r * (h @ U[2]) + b[2]) + z * h
        return h, h

    return over_steps(step, jnp.zeros((x.shape[0], U[0].shape[0])), x)


def unrolled(x, dt, A, B, C):
    """The selective scan as a Python loop."""
    h, ys = jnp.zeros((x.shape[0], *A.shape)), []
    for t in range(x.shape[1]):
        h = jnp.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        ys.append(jnp.einsum("bdn,bn->bd", h, C[:, t]))
    return jnp.stack(ys, 1)


def no_input(x, U):
    def step(h, x):
        h = jnp.tanh(h @ U + x)
        return h, h

    return over_steps(step, jnp.zeros((x.shape[0], U.shape[0])), x)


def average(x):
    def step(h, x):
        h = 0.9 * h + 0.1 * x
        return h, h

    return over_steps(step, x[:, 0], x)


def layers(x, weights):
    for w in weights:
        x = jax.nn.relu(x @ w) + x
    return x


def unrolled_tanh(x, a):
    h, ys = x[:, 0], []
    for t in range(UNROLLED):
        h = jnp.tanh(a * h + x[:, t])
        ys.append(h)
    return jnp.stack(ys, 1)


def programs(quick: bool) -> dict[str, dict[str, tuple[Callable, list[Any]]]]:
    """By kind and name: the function and its arguments."""
    steps, width = (16, 32) if quick else (STEPS, WIDTH)
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)

    x = draw(BATCH, steps, width)

    def one(gates: int, width: int = width) -> list[Any]:
        return [draw(width, gates * width), draw(width, gates * width), draw(1, gates * width)[0]]

    def many(gates: int) -> list[Any]:
        return [list(draw(gates, width, width)) for _ in range(2)] + [list(draw(gates, width))]

    square = draw(width, width)
    return {
        "cell": {
            "LSTM": (lstm, [x, *one(4)]),
            "LSTM, projections hoisted by hand": (lstm_hoisted, [x, *one(4)]),
            "LSTM, joined operands": (lstm_joined, [x, *one(4)]),
            "LSTM, gradient": (lstm_gradient, [x, *one(4)]),
            "LSTM, gate by gate": (lstm_by_gates, [x, *many(4)]),
            "GRU": (gru, [x, *one(3)]),
            "GRU, gate by gate": (gru_by_gates, [x, *many(3)]),
            f"selective scan, Python loop of {UNROLLED} steps": (
                unrolled,
                spellings.arguments(9 if quick else UNROLLED),
            ),
        },
        "decoy": {
            "no input projection": (no_input, [x, square]),
            "LSTM of width 16": (lstm, [x[..., :16], *one(4, 16)]),
            "moving average": (average, [x]),
            "8 layers": (layers, [x[0], list(draw(8, width, width))]),
            "8 layers of one array": (layers, [x[0], draw(8, width, width)]),
            f"tanh, Python loop of {UNROLLED} steps": (
                unrolled_tanh,
                [draw(BATCH, UNROLLED, width), square[0]],
            ),
        },
    }
