"""Programs that reduce pairwise terms, as people write them; sizes no block covers whole.

`FOLDS` must become folds; each has the elements of its pairwise term. `LEFT` must not; each has a
part of the reason in the report.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

N, M, D = 600, 1100, 16  # rows, columns, features
T, H = 300, 4


class Program(NamedTuple):
    """A function, its arguments, and how many elements its pairwise term has."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    pairs: int


def draw(*shape: int, seed: int = 0) -> jax.Array:
    """Normal deviates [*shape]."""
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def labels() -> jax.Array:
    """A column for each row, int32[N]; some count from the end."""
    return jnp.asarray(np.random.default_rng(7).integers(-3, M, N), jnp.int32)


# ---------------------------------------------------------------- cross-entropy over a vocabulary


def ce_take(h, w, label):
    logits = h @ w
    chosen = jnp.take_along_axis(logits, label[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def ce_log_softmax(h, w, label):
    return -jax.nn.log_softmax(h @ w)[jnp.arange(N), label].mean()


def ce_one_hot(h, w, label):
    return -(jax.nn.one_hot(label, M) * jax.nn.log_softmax(h @ w)).sum(-1).mean()


def ce_by_hand(h, w, label):
    logits = h @ w
    logits -= jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    chosen = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - chosen)


def ce_mapped(h, w, label):
    return jax.vmap(lambda x, k: -jax.nn.log_softmax(x @ w)[k])(h, label % M).mean()


def ce_smoothed(h, w, label):
    logp = jax.nn.log_softmax((h @ w + 0.001 * jnp.arange(M)) / 0.7)
    return -(0.9 * logp[jnp.arange(N), label] + 0.1 * logp.mean(-1)).mean()


# ---------------------------------------------------------------- points, kernels, neighbours


def squares(x, y):
    return (x**2).sum(-1)[:, None] - 2 * x @ y.T + (y**2).sum(-1)


def forces(x, m):
    d = x[None] - x[:, None]
    r2 = (d * d).sum(-1) + 1e-2
    return (m[None, :, None] * d * (r2**-1.5)[..., None]).sum(1)


def forces_einsum(x, m):
    d = x[:, None, :] - x[None]
    r = jnp.sqrt(jnp.sum(d**2, -1) + 1e-2)
    return -jnp.einsum("ijc,ij,j->ic", d, 1 / r**3, m)


def energy(x, m):
    d = x[:, None, :] - x[None]
    return -0.5 * jnp.sum(m[:, None] * m / jnp.sqrt(jnp.sum(d**2, -1) + 1e-2))


def components(x, m):
    d = x[None] - x[:, None]
    a, b, c = d[..., 0], d[..., 1], d[..., 2]
    f = m * (a * a + b * b + c * c + 1e-2) ** -1.5
    return jnp.stack([f * a, f * b, f * c], -1).sum(1)


def gaussian(x, y, v):
    return jnp.exp(-0.5 * squares(x, y)) @ v


def gaussian_differences(x, y, v):
    return jnp.exp(-((x[:, None] - y) ** 2).sum(-1)) @ v


def smoothing(x, y, v):
    k = jnp.exp(-((x[:, None] - y) ** 2).sum(-1))
    return (k @ v) / k.sum(-1, keepdims=True)


def polynomial(x, y, v):
    return (x @ y.T / D + 1.0) ** 4 @ v


def neighbours(x, y):
    return jax.lax.top_k(-squares(x, y), 5)


def nearest(x, y):
    return jnp.argmin(((x[:, None] - y) ** 2).sum(-1), 1)


def best(x, y):
    s = x @ y.T
    return jnp.argmax(s, -1), s.max(-1), s.min(-1)


def column_max(x, y):
    return jnp.tanh(x @ y.T).max(0)


def log_sum_exp(x, y):
    return jax.nn.logsumexp(x @ y.T, axis=-1)


def sorted_neighbours(x, y):
    d = squares(x, y)
    return jnp.argsort(d, axis=1)[:, 1:6], jnp.sort(d, 1)[:, 2]


def contrastive(x, y):
    s = x @ y[:N].T
    label = jnp.arange(N)
    rows, columns = (jax.nn.log_softmax(s, axis) for axis in (1, 0))
    return -(rows[label, label] + columns[label, label]).mean()


def queued(x, y):
    other = jnp.roll(x, 1, 0)
    s = jnp.concatenate([(x * other).sum(-1, keepdims=True), x @ y.T], 1)
    return -jax.nn.log_softmax(s / 3, -1)[:, 0].mean()


def boxes(x, y):
    """The largest overlap of each box with others, corners and sides in 4 columns."""
    (a, b), (c, d) = ((z[:, :2], z[:, :2] + jnp.abs(z[:, 2:4])) for z in (x, y))
    sides = jnp.clip(jnp.minimum(b[:, None], d) - jnp.maximum(a[:, None], c), 0)
    common = sides[..., 0] * sides[..., 1]
    areas = [(z[1] - z[0]).prod(-1) for z in ((a, b), (c, d))]
    overlap = common / (areas[0][:, None] + areas[1] - common)
    return overlap.max(1), overlap.argmax(1)


def shared_signs(x, y):
    a, b = x[:, None] > 0, y > 0
    return ((a & b).sum(-1) / (a | b).sum(-1)).max(-1)


def equivariant(x, y):
    """A layer that moves points along their differences."""
    z, h = x[:, :3], x[:, 3:]
    d = z[:, None] - z
    m = jnp.tanh(h @ h.T + (d * d).sum(-1))
    return z + (d * m[..., None]).mean(1), m @ h


def diagonal(x, y):
    s = x @ y[:N].T
    return (jax.nn.logsumexp(s, 1) - jnp.diag(s) + jax.nn.logsumexp(s, 0)).mean()


def tests(x, y):
    s = x @ y.T
    return jnp.any(s > 9.0, 1), jnp.all(s > -9.0, 1), (s > 1).sum(-1)


def chamfer(x, y):
    d = squares(x, y)
    return d.min(0).mean() + d.min(1).mean()


def steepest(x, y):
    return jnp.tanh(x @ y.T).max(-1)


def entropy(x, y):
    s = x @ y.T
    p = jax.nn.softmax(s)
    return -(p * jax.nn.log_softmax(s)).sum(-1)


# ---------------------------------------------------------------- attention, for its gradients


def scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D).astype(np.float32)


def values(p, v):
    return jnp.einsum("bhts,bshd->bthd", p, v)


def causal(s, fill=-jnp.inf):
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, fill)


def plain(q, k, v):
    return values(jax.nn.softmax(scores(q, k)), v)


def masked(q, k, v):
    return values(jax.nn.softmax(causal(scores(q, k))), v)


def finite_fill(q, k, v):
    return values(jax.nn.softmax(causal(scores(q, k), -1e9)), v)


def stopped(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return values(e, v) / jnp.moveaxis(e.sum(-1, keepdims=True), 1, 2)


def by_hand(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return values(e / e.sum(-1, keepdims=True), v)


def above_nothing(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return values(e / (e.sum(-1, keepdims=True) + 0.1), v)


def ones_beside(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    o = values(e, jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1))
    return o[..., :-1] / o[..., -1:]


def summed_by_a_product(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return values(e, v) / values(e, jnp.ones((2, T, H, 1)))


def masked_after(q, k, v):
    """Mask after the maximum is taken: a masked score may be the maximum."""
    s = scores(q, k)
    e = causal(jnp.exp(s - s.max(-1, keepdims=True)), 0.0)
    return values(e / jnp.maximum(e.sum(-1, keepdims=True), 1e-6), v)


def divided_after(q, k, v):
    s = scores(q, k)
    top = s.max(-1, keepdims=True)
    e = jnp.exp(s - top)
    total = e.sum(-1, keepdims=True)
    return values(e, v) / jnp.moveaxis(total, 1, 2) + jnp.moveaxis(top + jnp.log(total), 1, 2)


def through_lse(q, k, v):
    s = scores(q, k)
    return values(jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


def repeated(q, k, v):
    return masked(q, *(jnp.repeat(x[:, :, :2], H // 2, axis=2) for x in (k, v)))


def grouped(q, k, v):
    q = q.reshape(*q.shape[:2], 2, H // 2, D)
    s = jnp.einsum("bthgd,bshd->bhgts", q, k[:, :, :2]) / 4
    return jnp.einsum("bhgts,bshd->bthgd", jax.nn.softmax(s), v[:, :, :2])


def softcap(q, k, v):
    return values(jax.nn.softmax(5 * jnp.tanh(scores(q, k) / 5)), v)


def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def padded(q, k, v):
    keep = jnp.arange(T) < jnp.array([T - 5, 7])[:, None]
    return values(jax.nn.softmax(jnp.where(keep[:, None, None], scores(q, k), -1e9)), v)


def induced(q, k, v):
    """Few points look at all, and all look at them: no sum over the few is written out."""
    few = q[:, :20]
    h = values(jax.nn.softmax(scores(few, k)), v)
    return values(jax.nn.softmax(scores(q, h)), h)


def biased(q, k, v):
    bias = jnp.asarray(np.random.default_rng(3).standard_normal((H, T, T)), jnp.float32)
    return values(jax.nn.softmax(scores(q, k) + bias), v)


def sinks(q, k, v):
    s, sink = scores(q, k), jnp.asarray([0.3, -0.2, 2.0, 0.1])[:, None, None]
    top = jnp.maximum(s.max(-1, keepdims=True), sink)
    e = jnp.exp(s - top)
    return values(e / (e.sum(-1, keepdims=True) + jnp.exp(sink - top)), v)


def joined_sinks(q, k, v):
    sink = jnp.broadcast_to(jnp.asarray([0.3, -0.2, 2.0, 0.1])[:, None, None], (2, H, T, 1))
    p = jax.nn.softmax(jnp.concatenate([causal(scores(q, k)), sink], -1))
    return values(p[..., :-1], v)


def key_of_zeros(q, k, v):
    s = jnp.pad(scores(q, k), ((0, 0), (0, 0), (0, 0), (1, 0)))
    return values(jax.nn.softmax(s)[..., 1:], v)


def joined_by_hand(q, k, v):
    s = jnp.concatenate([scores(q, k), jnp.full((2, H, T, 1), 0.3)], -1)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return values(e[..., :-1] / e.sum(-1, keepdims=True), v)


def sloped(q, k, v):
    distance = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))
    slopes = jnp.array([0.5, 0.25, 0.1, 0.05])[:, None, None]
    return values(jax.nn.softmax(scores(q, k) - slopes * distance), v)


def gradient(fun: Callable, arguments: int) -> Callable:
    """The gradient of a scalar of the function, named after it."""

    def loss(*args):
        outs = jax.tree.leaves(fun(*args))
        return sum(jnp.sin(x).sum() if jnp.ndim(x) else x for x in outs)

    made = jax.grad(loss, tuple(range(arguments)))
    made.__name__ = f"gradient_of_{fun.__name__}"
    return made


def train_step(params, q):
    """One step of gradient descent on an attention layer's weights."""

    def loss(params):
        a, b, c = (jnp.einsum("bthd,de->bthe", q, w) for w in params)
        return jnp.mean((masked(a, b, c) - q) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def _folds() -> list[Program]:
    tokens = draw(N, D), draw(D, M, seed=1) * 0.3, labels()
    cloud = draw(M, 3), jnp.abs(draw(M))
    near = draw(N, 3), draw(M, 3), draw(M, 5)
    wide = draw(N, D) * 0.5, draw(M, D, seed=1) * 0.5
    qkv = tuple(draw(2, T, H, D, seed=s) for s in range(3))
    losses = (ce_take, ce_log_softmax, ce_one_hot, ce_by_hand, ce_mapped, ce_smoothed)
    out = [Program(f, tokens, N * M) for f in losses]
    out += [Program(gradient(f, 2), tokens, N * M) for f in losses]
    bodies = (forces, forces_einsum, components, energy, gradient(energy, 1))
    out += [Program(f, cloud, M * M) for f in bodies]
    few = tuple(x[:N] for x in cloud)
    out += [Program(gradient(components, 2), few, 4 * N * N)]  # a cotangent is spread, then read
    out += [Program(f, near, N * M) for f in (gaussian, gaussian_differences, smoothing)]
    out += [Program(gradient(gaussian, 3), near, N * M)]
    out += [Program(polynomial, (*wide, draw(M, 5)), N * M)]
    out += [Program(queued, wide, N * M)]
    square = (contrastive, diagonal, equivariant)
    out += [Program(f, wide, N * N) for f in (*square, *(gradient(f, 2) for f in square))]
    pairs = (
        neighbours, sorted_neighbours, best, column_max, log_sum_exp, tests, chamfer, entropy,
        boxes, shared_signs,
    )  # fmt: skip
    out += [Program(f, wide, N * M) for f in pairs]
    out += [Program(nearest, near[:2], N * M)]
    out += [Program(gradient(steepest, 2), wide, N * M)]
    layers = (
        plain, masked, finite_fill, stopped, by_hand, divided_after, through_lse, repeated,
        grouped, softcap, library, padded, biased, sloped, sinks, joined_sinks,
        above_nothing, ones_beside, summed_by_a_product, masked_after, key_of_zeros,
        joined_by_hand,
    )  # fmt: skip
    out += [Program(gradient(f, 3), qkv, 2 * H * T * T) for f in layers]
    params = tuple(draw(D, D, seed=s) * 0.3 for s in range(3))
    return [*out, Program(train_step, (params, qkv[0]), 2 * H * T * T)]


FOLDS = _folds()


# ---------------------------------------------------------------- programs that stay as written


def scores_returned(x, y):
    s = x @ y.T
    return jax.nn.logsumexp(s, -1), s


def scores_sorted(x, y):
    e = jnp.sort(jnp.exp(x @ y.T), -1)
    return e[:, 3] / e[:, -2]


def running(x, y):
    e = jnp.exp(x @ y.T)
    return jnp.cumsum(e, -1).max(-1) / e.max(-1)


def dropped(x, y):
    s = jnp.exp(-squares(x, y))
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, s.shape)
    return jnp.where(keep, s, 0.0).sum(-1)


def above_its_mean(x, y):
    s = jnp.tanh(x @ y.T)
    return jnp.where(s > s.mean(-1, keepdims=True), s, 0.0).max(-1)


def products(x, y):
    return (x @ y.T) @ y


def rows_of_an_argument(x, y):
    return jax.nn.logsumexp(x, -1), jnp.exp(x - x.max(-1, keepdims=True)).sum(-1)


LEFT = [
    (scores_returned, "itself a result"),
    (scores_sorted, "another result of sort over the pairwise term"),
    (running, "used by cumsum"),
    (dropped, "random numbers"),
    (above_its_mean, "compares the pairwise term with its own reduction"),
    (products, None),
    (rows_of_an_argument, None),
]
