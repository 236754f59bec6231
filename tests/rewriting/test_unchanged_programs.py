"""Lookalikes of the families, and programs without a better form, are emitted as written."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from symjax_rewrite import keep, sym_optimize
from tests.rewriting.families import F32, specs

inv = jnp.linalg.inv

LOOKALIKES = {
    "already ordered": (lambda a, b, v: a @ (b @ v), "ij,jk,k"),
    "already thin": (lambda x, W, A, B: x @ W + (x @ A) @ B, "nd,do,dr,ro"),
    "merging is cheaper": (lambda x, W, A, B: x @ (W + A @ B), "bd,dh,dh,hh"),
    "both products returned": (lambda x, W, V: (x @ W, x @ V), "nd,do,do"),
    "two separate sums": (lambda x, y, W, V: x @ W + y @ V, "nd,nd,do,do"),
    "dense residual": (lambda X, U, V: jnp.sum((X - U @ V.T) ** 2), "do,dr,or"),
    "nonlinearity in a chain": (lambda a, b, v: jnp.tanh(a @ b) @ v, "ij,jk,k"),
    "softmax attention": (lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, "nd,nd,nd"),
    "relu attention": (lambda q, k, v: jax.nn.relu(q @ k.T) @ v, "nd,nd,nd"),
    "masked linear attention": (lambda q, k, v: jnp.tril(q @ k.T) @ v, "nd,nd,nd"),
    "cast down in a chain": (
        lambda a, b, v: (a @ b).astype(jnp.bfloat16).astype(F32) @ v, "ij,jk,k",
    ),
    "fence in a chain": (lambda a, b, v: keep(a @ b) @ v, "ij,jk,k"),
    "all elements of a product": (lambda a, b: a @ b, "ij,jk"),
    "product kept and summed": (lambda a, b: (y := a @ b, jnp.sum(jnp.exp(y))), "ij,jk"),
    "another matrix": (lambda a, b: (a @ b, b.T @ b), "ij,jk"),
    "RMSNorm then linear": (
        lambda x, g, W: (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * g) @ W, "nd,d,do",
    ),
    "every distance": (lambda x, y: jnp.sqrt(jnp.sum((x[:, None] - y[None]) ** 2, -1)), "ir,lr"),
    "weighted distances": (lambda x, y, w: w @ jnp.sum((x[:, None] - y[None]) ** 2, -1), "ir,lr,i"),
    "fourth powers": (lambda x, y: jnp.sum((x[:, None] - y[None]) ** 4), "ir,lr"),
    "distance to one point": (lambda x, y: jnp.sum((x - y[0]) ** 2), "nd,md"),
    "a solve": (lambda a, v: jnp.linalg.solve(a, v), "hh,h"),
    "a diagonal and a low-rank update": (
        lambda d, u, b: jnp.linalg.solve(jnp.diag(1 + d * d) + u @ u.T, b), "h,hr,h",
    ),
    "a low-rank update of unlike sides": (
        lambda u, v, b: jnp.linalg.solve(2 * jnp.eye(128) + u @ v, b), "hr,rh,h",
    ),
    "a shifted matrix": (lambda a, b: jnp.linalg.solve(2 * jnp.eye(128) + a @ a.T, b), "hh,h"),
    "an inverse returned": (lambda a: inv(a), "hh"),
    "a random projection": (
        lambda x, W: (x + jax.random.normal(jax.random.key(0), x.shape)) @ W, "nd,do",
    ),
    "sum with a bias": (lambda x, W, b: jax.nn.relu(x @ W + b), "nd,do,o"),
    "centred": (lambda x, W: (x - jnp.mean(x, 0)) @ W, "nd,do"),
    "a projection that cancels": (lambda x: (jnp.eye(2) - 0.5) @ x[:2], "nd"),
    "difference of weights": (lambda x, W, V: x @ (W - V), "nd,do,do"),
}  # fmt: skip
SMALL = {
    "i": 128, "j": 192, "k": 160, "l": 96, "m": 64, "n": 64, "b": 512, "d": 128, "h": 128, "o": 128,
    "r": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_unchanged(name):
    fun, shapes = LOOKALIKES[name]
    report = sym_optimize(fun, on_unsupported="error").explain(*specs(shapes, SMALL))
    assert not report.rules, str(report)
    assert str(report.after.jaxpr) == str(report.before.jaxpr)
