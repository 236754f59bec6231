"""The MiniLM-L6 sentence encoder in plain JAX, as one would first write it.

A BERT encoder (Devlin et al. 2018): embeddings, six post-norm layers, mean pooling. Nothing is
arranged for speed: low-rank adapters are added to their weights, scores are built in full.
"""

from typing import Any

import jax
import jax.numpy as jnp

HEADS = 12
EPSILON = 1e-12


def encode(params: dict, adapters: list | None, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Unit-length sentence embeddings.

    Args:
        params: nested dicts as `weights.load` gives them.
        adapters: one dict of low-rank adapters per layer, or None.
        ids: int[batch, tokens].
        mask: int[batch, tokens], 1 where there is a token.

    Returns:
        float[batch, 384].
    """
    x = params["word"][ids] + params["position"][: ids.shape[1]] + params["type"][0]
    x = layer_norm(params["norm"], x)
    for i, layer in enumerate(params["layers"]):
        x = encoder_layer(layer, adapters[i] if adapters else {}, x, mask)
    weight = mask[:, :, None].astype(x.dtype)
    pooled = jnp.sum(x * weight, axis=1) / jnp.maximum(jnp.sum(weight, axis=1), 1e-9)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def encoder_layer(layer: dict, adapters: dict, x: jax.Array, mask: jax.Array) -> jax.Array:
    def project(name: str, value: jax.Array) -> jax.Array:
        return linear(layer[name], adapters.get(name), value)

    attended = attention(project("query", x), project("key", x), project("value", x), mask)
    x = layer_norm(layer["attention_norm"], x + project("output", attended))
    hidden = jax.nn.gelu(project("up", x), approximate=False)
    return layer_norm(layer["mlp_norm"], x + project("down", hidden))


def linear(weight: dict, adapter: dict[str, Any] | None, x: jax.Array) -> jax.Array:
    kernel = weight["kernel"]
    if adapter is not None:
        kernel = kernel + adapter["scale"] * (adapter["a"] @ adapter["b"])
    return x @ kernel + weight["bias"]


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    batch, tokens, width = q.shape
    q, k, v = (split_heads(x) for x in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / jnp.sqrt(width // HEADS)
    scores = jnp.where(mask[:, None, None, :] > 0, scores, -1e9)
    mixed = jax.nn.softmax(scores, axis=-1) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, width)


def split_heads(x: jax.Array) -> jax.Array:
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, HEADS, width // HEADS).transpose(0, 2, 1, 3)


def layer_norm(norm: dict, x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + EPSILON) * norm["scale"] + norm["bias"]
