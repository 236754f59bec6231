"""Programs whose reports the tests read: (function, specs, device) by name."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax

from symjax_rewrite import sym_optimize
from symjax_rewrite.reports.report import Report


def f32(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def lora(x, W, A, B):
    return x @ (W + A @ B)


def chain(a, b, v):
    ab = a @ b
    return ab @ v


def attention(q, k, v):
    scores = q @ k.T
    return jax.nn.softmax(scores) @ v


def layers(x, w):
    for _ in range(6):
        x = attention(x @ w, x @ (w + 1), x)
    return x


def perceptron(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return x


def nearest(x, y):
    distances = jnp.sum((x[:, None, :] - y[None, :, :]) ** 2, -1)
    return lax.top_k(-distances, 4)


def recurrence(a, x):
    def step(h, given):
        h = given[0] * h + given[1]
        return h, h

    return lax.scan(step, jnp.zeros(x.shape[1:]), (a, x))[1]


def deviation(x, w):
    centred = x - x.mean(-1, keepdims=True)
    return jnp.where(centred > 0, centred @ w, -0.5)


T, d, r = export.symbolic_shape("T, d, r")
EXAMPLES: dict[str, tuple[Any, tuple, str]] = {
    "lora": (lora, (f32(64, 1024), f32(1024, 1024), f32(1024, 8), f32(8, 1024)), "cpu"),
    "chain": (chain, (f32(512, 512), f32(512, 512), f32(512)), "cpu"),
    "attention": (attention, (f32(4096, 64),) * 3, "h200"),
    "layers": (layers, (f32(2048, 16), f32(16, 16)), "h200"),
    "perceptron": (perceptron, ([(f32(64, 64), f32(64))] * 2, f32(16, 64)), "cpu"),
    "nearest": (nearest, (f32(1024, 16), f32(1024, 16)), "cpu"),
    "recurrence": (recurrence, (f32(512, 16), f32(512, 16)), "cpu"),
    "symbolic": (lora, (f32(T, d), f32(d, d), f32(d, r), f32(r, d)), "cpu"),
    "gradient": (
        jax.grad(lambda p, x: jnp.sum(jnp.tanh(lora(x, *p)))),
        ((f32(512, 512), f32(512, 8), f32(8, 512)), f32(32, 512)),
        "cpu",
    ),
}  # fmt: skip


def report_of(name: str, **options: Any) -> Report:
    """Return the report of an example."""
    fun, specs, device = EXAMPLES[name]
    return sym_optimize(fun, device=device, **options).explain(*specs)
