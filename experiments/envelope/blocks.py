"""Blocks of real models and, of each, the part that a rewrite changes.

`part` computes what `block` computes at one place, from the same arguments: its time over the
block's is the share p of Amdahl's law, and its own speedup is s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HEAD = 64
NORMS = ("norm1", "norm2")
PROJECTIONS = ("q", "k", "v", "out")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A block at one size.

    published: the range of gains that the source gives for its kind; `frozen`: its weights are
    known before the call.
    """

    kind: str
    name: str
    block: Callable[..., Any]
    part: Callable[..., Any]
    tokens: int
    width: int
    published: tuple[float, float]
    rank: int = 0
    experts: int = 0
    frozen: bool = False

    def arguments(self, quick: bool) -> tuple[jax.Array, dict[str, Any]]:
        """Draw x: f32[tokens, width] and the weights."""
        tokens, width = (min(self.tokens, 16), 64) if quick else (self.tokens, self.width)
        rng = np.random.default_rng(0)

        def draw(*shape: int) -> jax.Array:
            scale = 1 / math.sqrt(shape[0]) if len(shape) > 1 else 0.1
            return jnp.asarray(scale * rng.standard_normal(shape, np.float32))

        hidden = 4 * width
        shapes = dict.fromkeys(PROJECTIONS, (width, width))
        shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        weights: dict[str, Any] = {name: draw(*shape) for name, shape in shapes.items()}
        weights |= {name: 1 + draw(width) for name in NORMS}
        if self.rank:
            ranks = {name: (draw(width, self.rank), draw(self.rank, width)) for name in PROJECTIONS}
            weights["adapters"] = ranks
        if self.experts:
            half = width // 2
            weights["router"] = draw(width, self.experts)
            weights["into"], weights["from"] = draw(width, half), draw(half, width)
            weights["experts"] = [draw(half, half) for _ in range(self.experts)]
        return draw(tokens, width) * math.sqrt(tokens), weights


def rms_norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def heads(x):
    return x.reshape(len(x), -1, HEAD).swapaxes(0, 1)


def softmax_attention(q, k, v):
    scores = jnp.einsum("htd,hsd->hts", heads(q), heads(k)) / math.sqrt(HEAD)
    mixed = jnp.einsum("hts,hsd->thd", jax.nn.softmax(scores, axis=-1), heads(v))
    return mixed.reshape(q.shape)


def linear_attention(q, k, v):
    """Attention without a softmax, in the order in which it is published: scores first."""
    scores = jnp.einsum("htd,hsd->hts", heads(q), heads(k))
    return jnp.einsum("hts,hsd->thd", scores, heads(v)).reshape(q.shape) / len(q)


def gated(x, weights):
    return (jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]


def normed_projections(x, weights):
    y = rms_norm(x, weights["norm1"])
    return tuple(y @ weights[name] for name in "qkv")


def dense(x, weights, attend=softmax_attention):
    """A pre-norm block with a gated MLP."""
    x = x + attend(*normed_projections(x, weights)) @ weights["out"]
    return x + gated(rms_norm(x, weights["norm2"]), weights)


def dense_linear(x, weights):
    return dense(x, weights, linear_attention)


def adapted(x, weights, name):
    a, b = weights["adapters"][name]
    return x @ (weights[name] + a @ b)


def adapted_projections(x, weights):
    y = rms_norm(x, weights["norm1"])
    return tuple(adapted(y, weights, name) for name in PROJECTIONS)


def with_adapters(x, weights):
    """The block with low-rank adapters on its attention, merged in every call."""
    y = rms_norm(x, weights["norm1"])
    q, k, v = (adapted(y, weights, name) for name in "qkv")
    x = x + adapted(softmax_attention(q, k, v), weights, "out")
    return x + gated(rms_norm(x, weights["norm2"]), weights)


def mixture(x, weights):
    """Experts between two shared projections, all weighted by a softmax over them."""
    gates = jax.nn.softmax(x @ weights["router"], axis=-1)
    outputs = [x @ weights["into"] @ expert @ weights["from"] for expert in weights["experts"]]
    return sum(gates[:, n, None] * y for n, y in enumerate(outputs))


def mixture_part(x, weights):
    return mixture(rms_norm(x, weights["norm2"]), weights)


def with_experts(x, weights):
    """The block with a mixture of experts in place of its MLP."""
    x = x + softmax_attention(*normed_projections(x, weights)) @ weights["out"]
    return x + mixture_part(x, weights)


def attention_part(x, weights):
    return softmax_attention(*(x @ weights[name] for name in "qkv"))


def linear_attention_part(x, weights):
    return linear_attention(*(x @ weights[name] for name in "qkv"))


DENSE, SPARSE, CLIFF = (1.005, 1.04), (1.02, 1.15), (1.5, 3.0)
CASES = (
    Case("dense", "16 tokens, weights frozen", dense, normed_projections, 16, 1024, DENSE,
         frozen=True),
    Case("dense", "256 tokens, weights frozen", dense, normed_projections, 256, 1024, DENSE,
         frozen=True),
    Case("adapters", "256 tokens, rank 16", with_adapters, adapted_projections, 256, 1024, SPARSE,
         rank=16),
    Case("adapters", "512 tokens, rank 16", with_adapters, adapted_projections, 512, 1024, SPARSE,
         rank=16),
    Case("experts", "256 tokens, 2 experts", with_experts, mixture_part, 256, 1024, SPARSE,
         experts=2),
    Case("experts", "256 tokens, 8 experts", with_experts, mixture_part, 256, 1024, SPARSE,
         experts=8),
    Case("cliff", "adapters merged for one token", with_adapters, adapted_projections, 1, 1024,
         CLIFF, rank=16),
    Case("cliff", "4096 tokens, scores written", dense, attention_part, 4096, 512, CLIFF),
    Case("cliff", "4096 tokens, linear attention scores first", dense_linear,
         linear_attention_part, 4096, 512, CLIFF),
)  # fmt: skip
