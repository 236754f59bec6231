"""Equinox modules: pytrees with methods, their static parts closed over."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from sources import normal


class GRU(eqx.Module):
    """A GRU cell over time and a linear readout."""

    cell: eqx.nn.GRUCell
    readout: eqx.nn.Linear

    def __init__(self, inputs: int, width: int, key: jax.Array):
        self.cell = eqx.nn.GRUCell(inputs, width, key=key)
        self.readout = eqx.nn.Linear(width, 10, key=key)

    def __call__(self, xs):
        def step(state, x):
            return self.cell(x, state), None

        state, _ = jax.lax.scan(step, jnp.zeros(self.cell.hidden_size), xs)
        return self.readout(state)


class ConvNet(eqx.Module):
    """Convolutions, pooling and linear layers for one image."""

    layers: list

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.layers = [
            eqx.nn.Conv2d(3, 32, kernel_size=3, padding=1, key=keys[0]),
            jax.nn.relu,
            eqx.nn.MaxPool2d(kernel_size=2, stride=2),
            eqx.nn.Conv2d(32, 64, kernel_size=3, padding=1, key=keys[1]),
            jax.nn.relu,
            eqx.nn.AvgPool2d(kernel_size=2, stride=2),
            jnp.ravel,
            eqx.nn.Linear(64 * 8 * 8, 128, key=keys[2]),
            eqx.nn.LayerNorm(128),
            jax.nn.silu,
            eqx.nn.Linear(128, 10, key=keys[3]),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Block(eqx.Module):
    """A pre-norm attention block for one sequence, causal, with rotary positions."""

    norm_1: eqx.nn.RMSNorm
    norm_2: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    rotary: eqx.nn.RotaryPositionalEmbedding
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, heads: int, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.norm_1 = eqx.nn.RMSNorm(width)
        self.norm_2 = eqx.nn.RMSNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.rotary = eqx.nn.RotaryPositionalEmbedding(width // heads)
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x):
        def rotate(q, k, v):
            turn = jax.vmap(self.rotary, in_axes=1, out_axes=1)
            return turn(q), turn(k), v

        y = jax.vmap(self.norm_1)(x)
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        x = x + self.attention(y, y, y, mask=mask, process_heads=rotate)
        y = jax.vmap(self.norm_2)(x)
        return x + jax.vmap(lambda z: self.down(jax.nn.gelu(self.up(z))))(y)


def batched(module: eqx.Module, *inputs: jax.Array) -> tuple[Callable, tuple]:
    """A module of one example, over a batch, as a function of its arrays and inputs."""
    arrays, static = eqx.partition(module, eqx.is_array)

    def apply(arrays, *inputs):
        return jax.vmap(eqx.combine(arrays, static))(*inputs)

    return apply, (arrays, *inputs)


KEY = jax.random.key(0)


def attention():
    x = normal(2, 192, 256)
    return batched(eqx.nn.MultiheadAttention(8, 256, key=KEY), x, x, x)


MODELS = {
    "equinox MLP": lambda: batched(eqx.nn.MLP(256, 10, 512, 3, key=KEY), normal(64, 256)),
    "equinox attention": attention,
    "equinox block, rotary": lambda: batched(Block(256, 4, KEY), normal(2, 128, 256)),
    "equinox GRU": lambda: batched(GRU(64, 128, KEY), normal(8, 48, 64)),
    "equinox CNN": lambda: batched(ConvNet(KEY), normal(4, 3, 32, 32)),
}
