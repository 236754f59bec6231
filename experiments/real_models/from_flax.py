"""Flax: linen and nnx modules, with random weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from sources import integers, normal


class MLP(nn.Module):
    """Dense layers with gelu between them."""

    widths: tuple[int, ...] = (1024, 1024, 512)

    @nn.compact
    def __call__(self, x):
        for width in self.widths[:-1]:
            x = nn.gelu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


class ResNet(nn.Module):
    """Residual blocks of 3x3 convolutions and batch normalisation."""

    widths: tuple[int, ...] = (32, 64, 128)

    @nn.compact
    def __call__(self, x):
        def norm(y):
            return nn.BatchNorm(use_running_average=True)(y)

        x = nn.relu(norm(nn.Conv(self.widths[0], (3, 3), use_bias=False)(x)))
        for stage, width in enumerate(self.widths):
            strides = (2, 2) if stage else (1, 1)
            y = nn.relu(norm(nn.Conv(width, (3, 3), strides, use_bias=False)(x)))
            y = norm(nn.Conv(width, (3, 3), use_bias=False)(y))
            if x.shape != y.shape:
                x = norm(nn.Conv(width, (1, 1), strides, use_bias=False)(x))
            x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class Encoder(nn.Module):
    """Post-norm transformer encoder with a padding mask."""

    layers: int = 3
    width: int = 256
    heads: int = 4

    @nn.compact
    def __call__(self, ids):
        mask = nn.make_attention_mask(ids > 0, ids > 0)
        x = nn.Embed(1000, self.width)(ids)
        for _ in range(self.layers):
            y = nn.MultiHeadDotProductAttention(self.heads)(x, mask=mask)
            x = nn.LayerNorm()(x + y)
            y = nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(x)))
            x = nn.LayerNorm()(x + y)
        return x


class Decoder(nn.Module):
    """Pre-norm causal transformer with RMS normalisation and cross attention to a memory."""

    layers: int = 3
    width: int = 256
    heads: int = 4

    @nn.compact
    def __call__(self, ids, memory):
        embed = nn.Embed(1000, self.width)
        causal = nn.make_causal_mask(ids)
        x = embed(ids)
        for _ in range(self.layers):
            y = nn.RMSNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads)(y, mask=causal)
            y = nn.RMSNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads)(y, memory)
            y = nn.RMSNorm()(x)
            x = x + nn.Dense(self.width)(nn.silu(nn.Dense(4 * self.width)(y)))
        return embed.attend(nn.RMSNorm()(x))


class NnxBlock(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attend(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class NnxEncoder(nnx.Module):
    """Blocks one after another."""

    def __init__(self, layers: int, width: int, heads: int, rngs: nnx.Rngs):
        self.blocks = nnx.List([NnxBlock(width, heads, rngs) for _ in range(layers)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class NnxConvNet(nnx.Module):
    """Two convolutions with batch normalisation, pooling and a dense layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv_1 = nnx.Conv(3, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, use_running_average=True, rngs=rngs)
        self.conv_2 = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dense = nnx.Linear(64 * 8 * 8, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv_1(x))), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv_2(x)), (2, 2), (2, 2))
        return self.dense(x.reshape(x.shape[0], -1))


def linen(module: nn.Module, *inputs: jax.Array) -> tuple[Callable, tuple]:
    """A linen module as a function of its variables and inputs."""
    variables = jax.jit(module.init)(jax.random.key(0), *inputs)
    return module.apply, (variables, *inputs)


def stateless(module: Any, *inputs: jax.Array) -> tuple[Callable, tuple]:
    """An nnx module as a function of its state and inputs."""
    graph, state = nnx.split(module)

    def apply(state, *inputs):
        return nnx.merge(graph, state)(*inputs)

    return apply, (state, *inputs)


IMAGES = (4, 32, 32, 3)

MODELS = {
    "linen MLP": lambda: linen(MLP(), normal(64, 512)),
    "linen ResNet": lambda: linen(ResNet(), normal(*IMAGES)),
    "linen encoder": lambda: linen(Encoder(), integers(1000, 4, 64)),
    "linen decoder, cross attention": lambda: linen(
        Decoder(), integers(1000, 2, 64), normal(2, 48, 256)
    ),
    "linen attention": lambda: linen(nn.MultiHeadDotProductAttention(8), normal(2, 256, 256)),
    "linen LSTM": lambda: linen(nn.RNN(nn.OptimizedLSTMCell(256)), normal(8, 64, 128)),
    "linen LSTM, bidirectional": lambda: linen(
        nn.Bidirectional(nn.RNN(nn.LSTMCell(128)), nn.RNN(nn.LSTMCell(128))), normal(4, 32, 64)
    ),
    "linen GRU": lambda: linen(nn.RNN(nn.GRUCell(256)), normal(8, 64, 128)),
    "linen encoder, bf16": lambda: in_bfloat16(*linen(Encoder(layers=2), integers(1000, 4, 64))),
    "nnx encoder": lambda: stateless(NnxEncoder(3, 256, 4, nnx.Rngs(0)), normal(4, 64, 256)),
    "nnx CNN": lambda: stateless(NnxConvNet(nnx.Rngs(0)), normal(*IMAGES)),
    "nnx GRU": lambda: stateless(
        nnx.RNN(nnx.GRUCell(64, 128, rngs=nnx.Rngs(0))), normal(8, 32, 64)
    ),
    "nnx LoRA": lambda: stateless(
        nnx.LoRALinear(1024, 1024, lora_rank=8, rngs=nnx.Rngs(0)), normal(16, 1024)
    ),
}


def in_bfloat16(fun: Callable, args: tuple) -> tuple[Callable, tuple]:
    """The same with its floating-point arguments in bfloat16."""

    def narrow(x):
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return fun, jax.tree.map(narrow, args)
