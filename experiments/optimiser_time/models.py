"""The programs whose optimiser time is measured; arguments are shapes, nothing is allocated."""

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path[:0] = [str(Path(__file__).parents[1] / "minilm")]

import model
import weights


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gpt2(params: dict, ids: jax.Array, heads: int = 12) -> jax.Array:
    """Next-token scores of GPT-2 (Radford et al. 2019), layers unrolled.

    Args:
        params: nested dicts as `gpt2_shapes` gives them.
        ids: int[batch, tokens].
        heads: attention heads per layer.
    """
    x = params["word"][ids] + params["position"][: ids.shape[1]]
    for layer in params["layers"]:
        x = x + causal_attention(layer, layer_norm(layer["norm_1"], x), heads)
        hidden = jax.nn.gelu(linear(layer["up"], layer_norm(layer["norm_2"], x)))
        x = x + linear(layer["down"], hidden)
    return layer_norm(params["norm"], x) @ params["word"].T


def causal_attention(layer: dict, x: jax.Array, heads: int) -> jax.Array:
    batch, tokens, width = x.shape

    def split(y: jax.Array) -> jax.Array:
        return y.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)

    q, k, v = (split(y) for y in jnp.split(linear(layer["qkv"], x), 3, axis=-1))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1) @ v
    return linear(layer["output"], mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, width))


def linear(weight: dict, x: jax.Array) -> jax.Array:
    return x @ weight["kernel"] + weight["bias"]


def layer_norm(norm: dict, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


def gpt2_shapes(layers: int, width: int = 768, vocabulary: int = 50257) -> dict[str, Any]:
    def dense(inputs: int, outputs: int) -> dict[str, Any]:
        return {"kernel": array(inputs, outputs), "bias": array(outputs)}

    norm = {"scale": array(width), "bias": array(width)}
    layer = {
        "norm_1": norm,
        "qkv": dense(width, 3 * width),
        "output": dense(width, width),
        "norm_2": norm,
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
    }
    return {
        "word": array(vocabulary, width),
        "position": array(1024, width),
        "layers": [layer] * layers,
        "norm": norm,
    }


def chain(*matrices: jax.Array) -> jax.Array:
    return functools.reduce(jnp.matmul, matrices)


def shared_chain(x, wq, wk, y, wv, z, wo):
    """The product X·Wq·Wk·Y·Wv·Z·Wo."""
    return x @ wq @ wk @ y @ wv @ z @ wo


def lora(x, w, a, b):
    return x @ (w + a @ b)


def minilm_shapes(layers: int) -> dict[str, Any]:
    params = jax.eval_shape(weights.random_params)
    params["layers"] = params["layers"][:layers]
    return params


def minilm(params: dict, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return model.encode(params, None, ids, mask)


def programs(quick: bool) -> dict[str, tuple[Callable, tuple]]:
    """Name to function and argument shapes."""
    layers = 1 if quick else 6
    params = minilm_shapes(layers)
    adapters = jax.eval_shape(lambda: weights.lora_adapters(weights.random_params()))[:layers]
    sentences = (array(12, 32, dtype=jnp.int32),) * 2
    sizes = [64 * (3 * i % 7 + 1) for i in range(31)]
    return {
        "MiniLM, 6 layers": (minilm, (params, *sentences)),
        "MiniLM with adapters": (model.encode, (params, adapters, *sentences)),
        "GPT-2, 12 layers": (
            gpt2,
            (gpt2_shapes(2 * layers), array(1, 128, dtype=jnp.int32)),
        ),
        "chain of 30": (chain, tuple(array(*sizes[i : i + 2]) for i in range(30))),
        "X·Wq·Wk·Y·Wv·Z·Wo": (shared_chain, tuple(array(512, 512) for _ in range(7))),
        "LoRA": (lora, (array(8, 2048), array(2048, 2048), array(2048, 16), array(16, 2048))),
    }
