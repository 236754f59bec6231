"""Losses whose gradients are measured: functions of arrays, differentiated by all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Row(NamedTuple):
    """A loss and the shapes of its arguments; `fixed` are further arguments of no gradient."""

    name: str
    loss: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    fixed: Callable[[int], tuple] = lambda shrink: ()

    def arguments(self, shrink: int) -> tuple[list[jax.Array], tuple]:
        """Draw the arguments, every axis longer than 8 divided by `shrink`."""
        rng = np.random.default_rng(0)
        draw = []
        for shape in self.shapes:
            sizes = tuple(d if d <= 8 else max(d // shrink, 8) for d in shape)
            scale = sizes[0] ** -0.5 if len(sizes) > 1 else 1.0
            draw.append(jnp.asarray(scale * rng.standard_normal(sizes), jnp.float32))
        return draw, self.fixed(shrink)


def labels(count: int, classes: int) -> Callable[[int], tuple]:
    """Return integer labels of a batch."""

    def make(shrink: int) -> tuple:
        n, c = max(count // shrink, 8), max(classes // shrink, 8)
        return (jnp.asarray(np.arange(n) * 7 % c),)

    return make


def mlp(x, w1, b1, w2, b2):
    return jnp.mean((jax.nn.gelu(x @ w1 + b1) @ w2 + b2) ** 2)


def linear_regression(x, w, y):
    return jnp.mean((x @ w - y) ** 2)


def ridge(x, w, y):
    return jnp.sum((x @ w - y) ** 2) + 0.1 * jnp.sum(w**2)


def logistic(x, w, y):
    z = x @ w
    return jnp.mean(jnp.logaddexp(0.0, z) - jax.nn.sigmoid(y) * z)


def lora(x, w, a, b):
    return jnp.sum(jnp.tanh(x @ (w + a @ b)))


def low_rank(u, v, x):
    return jnp.sum(((u @ v) @ x) ** 2)


def chain(a, b, c, x):
    return jnp.sum(jnp.sin(((a @ b) @ c) @ x))


def attention(q, k, v):
    return jnp.sum(jnp.sin(jax.nn.softmax(q @ k.T * q.shape[1] ** -0.5) @ v))


def causal_attention(q, k, v):
    s = q @ k.T * q.shape[1] ** -0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, -1e30)
    return jnp.sum(jnp.sin(jax.nn.softmax(s) @ v))


def linear_attention(q, k, v):
    return jnp.sum(jnp.sin((jax.nn.relu(q) @ jax.nn.relu(k).T) @ v))


def attention_block(x, wq, wk, wv, wo):
    y = jax.nn.softmax((x @ wq) @ (x @ wk).T * wq.shape[1] ** -0.5) @ (x @ wv)
    return jnp.mean((x + y @ wo) ** 2)


def cross_entropy(x, w, labels):
    z = x @ w
    picked = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(z, axis=1) - picked)


def one_hot_cross_entropy(x, w, labels):
    z = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, w.shape[1]) * z, 1))


def nearest(x, y):
    return jnp.mean(jnp.min(jnp.sum((x[:, None] - y[None]) ** 2, -1), 1))


def soft_nearest(x, y):
    return -jnp.mean(jax.nn.logsumexp(-jnp.sum((x[:, None] - y[None]) ** 2, -1), axis=1))


def kernel_product(x, v):
    return jnp.sum(jnp.sin(jnp.exp(-0.5 * jnp.sum((x[:, None] - x[None]) ** 2, -1)) @ v))


def energy(x, m):
    d = jnp.sum((x[:, None] - x[None]) ** 2, -1)
    return -jnp.sum(m[:, None] * m[None] * lax.rsqrt(d + 1e-2))


def pairwise_sum(x, y):
    return jnp.sum(jnp.sum((x[:, None] - y[None]) ** 2, -1))


def contrastive(x, y):
    x, y = (v * lax.rsqrt(jnp.sum(v * v, 1, keepdims=True) + 1e-6) for v in (x, y))
    s = 10 * x @ y.T
    return jnp.mean(jax.nn.logsumexp(s, axis=1) - jnp.diag(s))


def correlation(x, y):
    x, y = ((v - v.mean(0)) / (v.std(0) + 1e-3) for v in (x, y))
    c = x.T @ y / len(x)
    return jnp.sum((c - jnp.eye(len(c))) ** 2)


def covariance(x):
    x = x - x.mean(0)
    c = x.T @ x / len(x)
    return jnp.sum(c**2) - jnp.sum(jnp.diag(c) ** 2)


def marginal_likelihood(x, y, s):
    k = jnp.exp(-0.5 * jnp.sum((x[:, None] - x[None]) ** 2, -1) * s[0] ** 2)
    low = jnp.linalg.cholesky(k + jnp.eye(len(x)))
    a = jax.scipy.linalg.solve_triangular(low, y, lower=True)
    return jnp.sum(a * a) + 2 * jnp.sum(jnp.log(jnp.diag(low)))


def experts(x, gate, w1, w2):
    g = jax.nn.softmax(x @ gate)
    h = jnp.einsum("nd,edf->nef", x, w1)
    return jnp.mean(jnp.einsum("ne,nef,efd->nd", g, jnp.tanh(h), w2) ** 2)


def norm_linear(x, scale, w):
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return jnp.mean(jnp.sin(x @ w))


def layer_norm_linear(x, scale, shift, w):
    x = x - x.mean(-1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale + shift
    return jnp.mean(jnp.sin(x @ w))


def convolution(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jax.nn.relu(y) ** 2)


def affine_scan(a, b):
    h = lax.scan(lambda h, ab: ((h := jax.nn.sigmoid(ab[0]) * h + ab[1]), h), b[0], (a, b))[1]
    return jnp.sum(jnp.sin(h))


def affine_tree(a, b):
    def combine(p, q):
        return q[0] * p[0], q[0] * p[1] + q[1]

    return jnp.sum(jnp.sin(lax.associative_scan(combine, (jax.nn.sigmoid(a), b))[1]))


def selective_scan(x, dt, a, b, c):
    def step(h, given):
        x, dt, b, c = given
        h = jnp.exp(-dt[:, None] * jnp.exp(a)) * h + (dt * x)[:, None] * b
        return h, h @ c

    each = (x, jax.nn.softplus(dt), b, c)
    return jnp.sum(jnp.sin(lax.scan(step, jnp.zeros(a.shape, a.dtype), each)[1]))


def rnn(x, w, u):
    step = lambda h, x: ((h := jnp.tanh(x @ w + h @ u)), h)  # noqa: E731
    return jnp.mean(lax.scan(step, jnp.zeros((x.shape[1], len(u))), x)[1] ** 2)


def gru(x, wz, wr, wh, uz, ur, uh):
    def step(h, x):
        z, r = jax.nn.sigmoid(x @ wz + h @ uz), jax.nn.sigmoid(x @ wr + h @ ur)
        return (h := (1 - z) * h + z * jnp.tanh(x @ wh + (r * h) @ uh)), h

    return jnp.mean(lax.scan(step, jnp.zeros((x.shape[1], len(uz))), x)[1] ** 2)


def lstm(x, w, u):
    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ w + h @ u, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[1], len(u)))
    return jnp.mean(lax.scan(step, (start, start), x)[1] ** 2)


ROWS = (
    Row("MLP", mlp, ((256, 512), (512, 1024), (1024,), (1024, 256), (256,))),
    Row("linear regression", linear_regression, ((4096, 256), (256,), (4096,))),
    Row("ridge, several outputs", ridge, ((2048, 256), (256, 64), (2048, 64))),
    Row("logistic regression", logistic, ((4096, 256), (256,), (4096,))),
    Row("LoRA", lora, ((64, 1024), (1024, 1024), (1024, 8), (8, 1024))),
    Row("low-rank product", low_rank, ((2048, 16), (16, 2048), (2048, 8))),
    Row("matrix chain", chain, ((512, 512), (512, 512), (512, 512), (512, 4))),
    Row("attention", attention, ((1024, 64),) * 3),
    Row("causal attention", causal_attention, ((1024, 64),) * 3),
    Row("linear attention", linear_attention, ((2048, 64),) * 3),
    Row("attention block", attention_block, ((512, 256), *((256, 64),) * 3, (64, 256))),
    Row("cross-entropy", cross_entropy, ((512, 128), (128, 4096)), labels(512, 4096)),
    Row("cross-entropy, one-hot", one_hot_cross_entropy, ((512, 128), (128, 4096)),
        labels(512, 4096)),
    Row("nearest neighbours", nearest, ((1024, 16), (1024, 16))),
    Row("soft nearest neighbours", soft_nearest, ((1024, 16), (1024, 16))),
    Row("kernel matrix times vectors", kernel_product, ((1024, 8), (1024, 4))),
    Row("N-body energy", energy, ((1024, 3), (1024,))),
    Row("sum of pairwise distances", pairwise_sum, ((1024, 64), (1024, 64))),
    Row("contrastive loss", contrastive, ((512, 128), (512, 128))),
    Row("correlation loss", correlation, ((512, 512), (512, 512))),
    Row("covariance loss", covariance, ((256, 1024),)),
    Row("marginal likelihood", marginal_likelihood, ((512, 4), (512,), (1,))),
    Row("mixture of experts", experts, ((256, 128), (128, 8), (8, 128, 256), (8, 256, 128))),
    Row("RMS norm and linear", norm_linear, ((512, 512), (512,), (512, 512))),
    Row("layer norm and linear", layer_norm_linear, ((512, 512), (512,), (512,), (512, 512))),
    Row("convolution", convolution, ((8, 32, 32, 16), (3, 3, 16, 32))),
    Row("affine scan", affine_scan, ((512, 1024), (512, 1024))),
    Row("affine tree", affine_tree, ((512, 1024), (512, 1024))),
    Row("selective scan", selective_scan,
        ((512, 256), (512, 256), (256, 16), (512, 16), (512, 16))),
    Row("recurrent network", rnn, ((128, 16, 128), (128, 128), (128, 128))),
    Row("GRU", gru, ((128, 16, 128), *((128, 128),) * 6)),
    Row("LSTM", lstm, ((128, 16, 128), (128, 512), (128, 512))),
)  # fmt: skip
