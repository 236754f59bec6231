"""Programs with products in every orientation: gradients of models, statistics, chains, loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*shape: int, seed: int = 0) -> jax.Array:
    """Standard normal numbers, scaled so that sums over the last axis stay near one."""
    values = np.random.default_rng((seed, *shape)).normal(size=shape) / np.sqrt(shape[-1])
    return jnp.asarray(values, jnp.float32)


def linear_loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def logistic_loss(w, x, y):
    return jnp.mean(jax.nn.softplus(x @ w) - y * (x @ w))


def softmax_loss(w, x, y):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(x @ w) * y, -1))


def mlp_loss(params, x, y):
    first, second = params
    return jnp.mean((jnp.tanh(x @ first) @ second - y) ** 2)


def attention_loss(params, x):
    q, k, v = (x @ w for w in params)
    return jnp.sum(jax.nn.softmax(q @ k.T) @ v)


def rnn_loss(params, xs):
    w, u = params

    def step(h, x):
        h = jnp.tanh(x @ u + h @ w)
        return h, None

    return jnp.sum(jax.lax.scan(step, jnp.zeros((xs.shape[1], w.shape[0])), xs)[0])


def train_step(params, x, y):
    gradient = jax.grad(mlp_loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


def power_iteration(a, v):
    def step(_, v):
        v = a.T @ (a @ v)
        return v / jnp.linalg.norm(v)

    return jax.lax.fori_loop(0, 10, step, v)


def conjugate_gradient(x, b):
    def step(_, state):
        w, r, p, rr = state
        q = x.T @ (x @ p) + p
        alpha = rr / (p @ q)
        w, r = w + alpha * p, r - alpha * q
        new = r @ r
        return w, r, r + new / rr * p, new

    return jax.lax.fori_loop(0, 10, step, (jnp.zeros_like(b), b, b, b @ b))[0]


def covariance(x):
    centred = x - jnp.mean(x, 0)
    return centred.T @ centred / x.shape[0]


def expectation_maximisation(x, centres):
    weights = jax.nn.softmax(x @ centres.T)
    return weights.T @ x / jnp.sum(weights, 0)[:, None]


def regressions() -> dict[str, Program]:
    """Gradients of linear, logistic and softmax regression."""
    found: dict[str, Program] = {}
    for n, d in ((200_000, 16), (20_000, 200), (2_000, 2_000), (500, 3_000)):
        x, w, y = array(n, d), array(d), array(n)
        found[f"linear, {n} × {d}"] = jax.grad(linear_loss), (w, x, y)
        found[f"by hand, {n} × {d}"] = lambda w, x, y: x.T @ (x @ w - y), (w, x, y)
        column = w[:, None], x, y[:, None]
        found[f"linear, a column, {n} × {d}"] = jax.grad(linear_loss), column
        found[f"logistic, {n} × {d}"] = jax.grad(logistic_loss), (w, x, y)
        rows = array(d, 10), x, array(n, 10)
        found[f"softmax of 10, {n} × {d}"] = jax.grad(softmax_loss), rows
    return found


def models() -> dict[str, Program]:
    """Gradients and steps of networks."""
    x, y = array(2048, 784), array(2048, 10)
    params = (array(784, 256), array(256, 10))
    tokens = array(512, 256)
    heads = tuple(array(256, 64, seed=k) for k in range(3))
    recurrent = (array(128, 128), array(64, 128))
    steps = array(50, 32, 64)
    batched = jax.vmap(jax.grad(linear_loss), (None, 0, 0))
    return {
        "MLP, gradient": (jax.grad(mlp_loss), (params, x, y)),
        "MLP, step": (train_step, (params, x, y)),
        "MLP, forward": (mlp_loss, (params, x, y)),
        "wide MLP, step": (
            train_step,
            ((array(1024, 1024), array(1024, 1024)), array(256, 1024), array(256, 1024)),
        ),
        "attention": (attention_loss, (heads, tokens)),
        "attention, gradient": (jax.grad(attention_loss), (heads, tokens)),
        "RNN": (rnn_loss, (recurrent, steps)),
        "RNN, gradient": (jax.grad(rnn_loss), (recurrent, steps)),
        "batched linear, gradient": (batched, (array(100), array(16, 500, 100), array(16, 500))),
        "a decoder's row": (lambda h, w: jnp.tanh(h @ w.T), (array(1024), array(8192, 1024))),
        "a long row": (lambda h, w: h @ w.T, (array(1, 8192), array(1024, 8192))),
        "tied embedding": (lambda h, e: (h @ e.T) @ e, (array(8, 256), array(8192, 256))),
    }


def algebra() -> dict[str, Program]:
    """Statistics, iterations and chains."""
    a, x = array(3000, 1500), array(100_000, 32)
    return {
        "Xᵀ y": (lambda x, y: x.T @ y, (x, array(100_000))),
        "y Xᵀ": (lambda x, y: y @ x.T, (array(32, 100_000), array(100_000))),
        "Xᵀ Y, few columns": (lambda x, y: x.T @ y, (x, array(100_000, 4))),
        "Yᵀ X, few columns": (lambda x, y: y.T @ x, (x, array(100_000, 4))),
        "(A B)ᵀ": (lambda a, b: (a @ b).T, (a, array(1500, 40))),
        "Aᵀ Bᵀ": (lambda a, b: a.T @ b.T, (a, array(40, 3000))),
        "Aᵀ Bᵀ, both large": (lambda a, b: a.T @ b.T, (array(800, 900), array(700, 800))),
        "Aᵀ B, both large": (lambda a, b: a.T @ b, (array(800, 900), array(800, 700))),
        "covariance": (covariance, (array(20_000, 100),)),
        "Gram matrix": (lambda x: x @ x.T, (array(500, 2000),)),
        "normal equations": (
            lambda x, y: jnp.linalg.solve(x.T @ x + jnp.eye(50), x.T @ y),
            (array(20_000, 50), array(20_000)),
        ),
        "power iteration": (power_iteration, (a, array(1500))),
        "conjugate gradient": (conjugate_gradient, (a, array(1500))),
        "Aᵀ (A v)": (lambda a, v: a.T @ (a @ v), (a, array(1500))),
        "Aᵀ tanh(A v)": (lambda a, v: a.T @ jnp.tanh(a @ v), (a, array(1500))),
        "uᵀ A B v": (lambda u, a, b, v: u @ a @ b @ v, (array(3000), a, a.T + 0, array(3000))),
        "Sinkhorn": (
            lambda k, u: jax.lax.fori_loop(0, 10, lambda _, u: 1 / (k @ (1 / (k.T @ u))), u),
            (jnp.exp(array(1500, 1500)), jnp.ones(1500)),
        ),
        "mixture of 8": (expectation_maximisation, (array(50_000, 32), array(8, 32))),
        "tensor, two summed axes": (
            lambda x, g: jnp.einsum("btd,bth->dh", x, g),
            (array(32, 512, 128), array(32, 512, 16)),
        ),
        "tensor and vector": (
            lambda x, g: jnp.einsum("btd,bt->d", x, g),
            (array(32, 512, 128), array(32, 512)),
        ),
        "one result row": (lambda x, y: y.T @ x, (array(50_000, 64), array(50_000, 1))),
        "one result column": (lambda x, y: x.T @ y, (array(50_000, 64), array(50_000, 1))),
        "read twice": (lambda x, y: (x.T @ y, x.T + 1), (array(4000, 300), array(4000))),
        "product of a sum": (lambda x, z, y: (x + z).T @ y, (a, a + 1, array(3000))),
        "small": (lambda x, y: x.T @ y, (array(100, 30), array(100))),
        "mean of 64 rows": (lambda x: jnp.mean(x, 0), (array(64, 65_536),)),
        "maximum of 64 rows": (lambda x: jnp.max(x, 0), (array(64, 65_536),)),
        "softmax over 16 rows": (lambda x: jax.nn.softmax(x, 0), (array(16, 256, 256),)),
        "variance of 32 matrices": (lambda x: jnp.var(x, 0), (array(32, 512, 128),)),
        "argmax of 50000": (lambda x: jnp.argmax(x, -1), (array(64, 50_000),)),
        "accuracy": (
            lambda x, y: jnp.mean(jnp.argmax(x, -1) == y),
            (array(8192, 1000), jnp.arange(8192) % 1000),
        ),
        "argmax of 10": (lambda x: jnp.argmax(x, -1), (array(65_536, 10),)),
        "cumulative sum of 512 rows": (lambda x: jnp.cumsum(x, 0), (array(512, 768),)),
        "cumulative sum in a batch": (lambda x: jnp.cumsum(x, 1), (array(16, 1024, 64),)),
        "cumulative maximum": (lambda x: jax.lax.cummax(x, axis=0), (array(2048, 512),)),
        "cumulative logsumexp": (lambda x: jax.lax.cumlogsumexp(x, axis=0), (array(256, 512),)),
        "cumulative sum of a row": (lambda x: jnp.cumsum(x), (array(1_000_000),)),
        "short rows, mean": (lambda x: jnp.mean(x, 0), (array(4096, 1024),)),
    }


def transposed() -> dict[str, Program]:
    """Functions of products that are read transposed."""
    points, centres = array(900, 8), array(700, 8)
    return {
        "kernel, read by columns": (lambda x, y: jnp.tanh(jnp.exp(x @ y.T).T), (points, centres)),
        "masked, read by columns": (
            lambda x, y: 1 - jnp.where(jnp.tri(900, 700, dtype=bool), x @ y.T, 0).T,
            (points, centres),
        ),
        "batch, read by columns": (
            jax.vmap(lambda x: jnp.abs(-(x @ x.T).T - 1)),
            (array(16, 300, 8),),
        ),
        "product, read by columns": (lambda x, y: jnp.tanh((x @ y.T).T), (points, centres)),
    }


def fused() -> dict[str, Program]:
    """Reductions that XLA fuses with what computes their operands."""
    return {
        "distances of embeddings": (distance_loss, (array(512, 64), array(64, 32))),
        "forces in the plane": (forces, (array(600, 2),)),
        "kernel of numbers": (kernel_smoother, (array(7000, 1), array(134, 1), array(134, 4))),
        "threshold of a top-k": (lambda x: x >= jax.lax.top_k(x, 8)[0][:, -1:], (array(512, 512),)),
        "radial basis functions": (
            lambda x, c, w: jnp.exp(-jnp.sum((x[:, None] - c) ** 2, -1)) @ w,
            (array(8000, 784), array(10, 784), array(10, 10)),
        ),
        "largest differences": (
            lambda x, c, w: jnp.max(jnp.abs(x[:, None] - c), -1) @ w,
            (array(4000, 64), array(64, 64), array(64, 10)),
        ),
        "additive attention": (
            additive_attention,
            (array(300, 256), array(300, 256, seed=1), array(256), array(300, 64)),
        ),
        "weighted differences": (
            lambda x, w: jnp.sum(jnp.abs(x[:, None] - x) * w, -1),
            (array(500, 128), array(128)),
        ),
        "sums of points": (lambda x: jnp.sum(x, -1), (array(300_000, 3),)),
    }


def distance_loss(x, w):
    z = x @ w
    return jnp.mean(jnp.exp(-jnp.sum((z[:, None] - z) ** 2, -1)))


def forces(x):
    r = x[None] - x[:, None]
    return jnp.sum(jnp.sin(r) / (jnp.sum(r**2, -1, keepdims=True) + 0.1) ** 1.5, 1)


def additive_attention(q, k, w, v):
    return jax.nn.softmax(jnp.tanh(q[:, None] + k) @ w) @ v


def kernel_smoother(x, y, v):
    k = jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1))
    return k @ v / jnp.sum(k, 1, keepdims=True)


def scores(q, k):
    return jnp.einsum("bhtd,bhsd->bhts", q, jnp.repeat(k, q.shape[1] // k.shape[1], 1))


def grouped_attention(q, k, v):
    p = jax.nn.softmax(scores(q, k) / np.sqrt(q.shape[-1]), -1)
    return p @ jnp.repeat(v, q.shape[1] // v.shape[1], 1)


def grouped_heads() -> dict[str, Program]:
    """Products whose heads are repeated in groups."""
    found: dict[str, Program] = {}
    for b, h, g, t, s, d in (
        (2, 4, 4, 256, 256, 64),
        (2, 4, 4, 1, 4096, 64),
        (1, 2, 8, 32, 1024, 32),
    ):
        q, k = array(b, h * g, t, d), array(b, h, s, d)
        found[f"scores, {h} × {g} heads, {t} × {s}"] = scores, (q, k)
        found[f"values, {h} × {g} heads, {t} × {s}"] = (
            lambda p, v: p @ jnp.repeat(v, p.shape[1] // v.shape[1], 1),
            (array(b, h * g, t, s), k),
        )
        found[f"attention, {h} × {g} heads, {t} × {s}"] = grouped_attention, (q, k, k + 1)
    return found


def programs() -> dict[str, Program]:
    """Every program with its arguments."""
    return regressions() | models() | algebra() | transposed() | fused() | grouped_heads()
