"""Pairs of functions that differ by a plausible slip, with the specs of their arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.proofs.equal_pairs import (
    Pair,
    attention,
    flash,
    joined,
    layer_norm,
    merge,
    naive_softmax,
    parallel,
    rms_norm,
    sequential,
    stable_softmax,
)
from tests.proofs.loop_pairs import (
    RECURRENT,
    gated,
    leapfrog,
    matrix_scan,
    matrix_tree,
    recurrent,
)

X, Y = "f32[n,d]", "f32[m,d]"
SQUARE = "f32[n,n]"
ATTENTION = ("f32[n,d]", "f32[m,d]", "f32[m,e]")
STATES = (("f32[n]", "f32[n]", "f32[n,d]"),) * 2
LAYER = ("f32[n,d]", "f32[d]", "f32[d]")
AFFINE = ("f32[16,3]", "f32[16,3]")


def scan_of(step, start):
    """Return a function of (a, b) that scans affine steps."""
    return lambda a, b: lax.scan(step, start(a), (a, b))[1]


def flash_without(kept):
    """Return the recurrence of FlashAttention with a faulty update of the state (m, l, acc)."""

    def run(q, k, v):
        def step(state, block):
            kb, vb = block
            s = 0.125 * (q @ kb.T)
            new = jnp.maximum(state[0], s.max(-1))
            p = jnp.exp(s - new[:, None])
            return kept(state, new, p, vb), None

        rows = q.shape[0]
        start = (jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((rows, v.shape[-1])))
        (_, l, acc), _ = lax.scan(step, start, (k, v))
        return acc / l[:, None]

    return run


def causal(compare, fill=-jnp.inf, turned=False):
    """Return masked attention."""

    def run(q, k, v):
        i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None]
        keep = compare(j, i) if turned else compare(i, j)
        return jax.nn.softmax(jnp.where(keep, q @ k.T, fill), -1) @ v

    return run


MASKED = ("f32[6,d]", "f32[6,d]", "f32[6,e]")
GREATER_EQUAL, GREATER = lambda i, j: i >= j, lambda i, j: i > j
BLOCKS = ("f32[n,d]", "f32[t,b,d]", "f32[t,b,e]")


def full(q, k, v):
    return attention(q, joined(k), joined(v))


def unrolled(cell, steps):
    """Return the last state of h' = cell(h, x[k], w) for some steps k, as a Python loop."""

    def run(h, x, w):
        for k in steps:
            h = cell(h, x[k], w)
        return h

    return run


def matrix_tree_of(combine):
    return lambda a, b: lax.associative_scan(combine, (a, b))[1]


def apply(a, b):
    return jnp.einsum("tij,tj->ti", a, b)


def cell(h, x, w):
    return jnp.tanh(w @ h + x)


STEPS = ("f32[n]", "f32[4,n]", "f32[n,n]")
MATRICES = ("f32[5,n,n]", "f32[5,n]")
LOOKUP = ("i32[n]", "f32[v,d]")


def one_hot_product(place):
    return lambda i, w: jax.nn.one_hot(place(i, w.shape[0]), w.shape[0]) @ w


def lookup(place):
    return lambda i, w: w[place(i, w.shape[0])]


def clipped(i, n):
    return jnp.clip(i, 0, n - 1)


NEAR_MISSES: dict[str, Pair] = {
    # softmax
    "softmax over the wrong axis": (stable_softmax, lambda x: stable_softmax(x, 0), (X,)),
    "softmax over the wrong axis of a square": (
        stable_softmax, lambda x: stable_softmax(x, 0), ("f32[4,4]",)),
    "softmax without its normaliser": (stable_softmax, lambda x: jnp.exp(x), (X,)),
    "softmax normalised over all": (naive_softmax, lambda x: jnp.exp(x) / jnp.exp(x).sum(), (X,)),
    "shift by a maximum in the numerator alone": (
        naive_softmax,
        lambda x: jnp.exp(x - x.max(-1, keepdims=True)) / jnp.exp(x).sum(-1, keepdims=True), (X,)),
    "shift by the maximum of another axis": (
        naive_softmax,
        lambda x: jnp.exp(x - x.max(0, keepdims=True))
        / jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True), (X,)),
    "epsilon in the denominator": (
        naive_softmax, lambda x: jnp.exp(x) / (jnp.exp(x).sum(-1, keepdims=True) + 1e-6), (X,)),
    "quiet softmax": (
        naive_softmax, lambda x: jnp.exp(x) / (jnp.exp(x).sum(-1, keepdims=True) + 1), (X,)),
    "base two": (naive_softmax, lambda x: 2**x / (2**x).sum(-1, keepdims=True), (X,)),
    "temperature": (naive_softmax, lambda x: naive_softmax(x / 1.01), (X,)),
    "log of a mean of exponentials": (
        lambda x: jax.nn.logsumexp(x, -1), lambda x: jnp.log(jnp.exp(x).mean(-1)), (X,)),
    "logsumexp without the maximum added": (
        lambda x: jax.nn.logsumexp(x, -1),
        lambda x: jnp.log(jnp.exp(x - x.max(-1, keepdims=True)).sum(-1)), (X,)),
    "log softmax by log of a sum of scores": (
        lambda x: jax.nn.log_softmax(x, -1),
        lambda x: x - jnp.log(jnp.abs(x).sum(-1, keepdims=True)), (X,)),
    # attention
    "missing scale": (attention, lambda q, k, v: attention(q, k, v, 1.0), ATTENTION),
    "scale applied twice": (attention, lambda q, k, v: attention(0.125 * q, k, v), ATTENTION),
    "scale after the softmax": (
        attention, lambda q, k, v: 0.125 * attention(q, k, v, 1.0), ATTENTION),
    "queries and keys exchanged": (
        attention, lambda q, k, v: attention(k, q, v), ("f32[n,d]", "f32[n,d]", "f32[n,e]")),
    "values for keys": (
        attention, lambda q, k, v: attention(q, v, k), ("f32[n,d]", "f32[m,d]", "f32[m,d]")),
    "probabilities transposed": (
        lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, lambda q, k, v: jax.nn.softmax(q @ k.T).T @ v,
        ("f32[n,d]", "f32[n,d]", "f32[n,e]")),
    "mask with > for >=": (
        causal(GREATER_EQUAL), lambda q, k, v: causal(GREATER)(q, k, v), MASKED),
    "mask transposed": (
        causal(GREATER_EQUAL, -1e9), causal(GREATER_EQUAL, -1e9, turned=True), MASKED),
    "mask off by one": (
        causal(GREATER_EQUAL), causal(lambda i, j: i + 1 >= j), MASKED),
    "mask fill of zero": (causal(GREATER_EQUAL), causal(GREATER_EQUAL, 0.0), MASKED),
    "mask multiplied after the softmax": (
        causal(GREATER_EQUAL),
        lambda q, k, v: (jax.nn.softmax(q @ k.T) * jnp.tril(jnp.ones((6, 6)))) @ v, MASKED),
    "band one too wide": (
        causal(lambda i, j: (i >= j) & (i - j < 3)), causal(lambda i, j: (i >= j) & (i - j <= 3)),
        MASKED),
    # flash attention
    "flash without rescaling the sum": (
        flash_without(lambda c, new, p, v: (
            new, c[1] + p.sum(-1), c[2] * jnp.exp(c[0] - new)[:, None] + p @ v)), full, BLOCKS),
    "flash without rescaling the accumulator": (
        flash_without(lambda c, new, p, v: (
            new, c[1] * jnp.exp(c[0] - new) + p.sum(-1), c[2] + p @ v)), full, BLOCKS),
    "flash with the inverse rescaling": (
        flash_without(lambda c, new, p, v: (
            new, c[1] * jnp.exp(new - c[0]) + p.sum(-1), c[2] * jnp.exp(new - c[0])[:, None] + p @ v
        )), full, BLOCKS),
    "flash with the old maximum kept": (
        flash_without(lambda c, new, p, v: (
            c[0], c[1] * jnp.exp(c[0] - new) + p.sum(-1),
            c[2] * jnp.exp(c[0] - new)[:, None] + p @ v)), full, BLOCKS),
    "flash that drops the carried sum": (
        flash_without(lambda c, new, p, v: (
            new, p.sum(-1), c[2] * jnp.exp(c[0] - new)[:, None] + p @ v)), full, BLOCKS),
    "flash that drops the carried accumulator": (
        flash_without(lambda c, new, p, v: (
            new, c[1] * jnp.exp(c[0] - new) + p.sum(-1), p @ v)), full, BLOCKS),
    "flash with another scale": (
        flash, lambda q, k, v: attention(q, joined(k), joined(v), 0.25), BLOCKS),
    "flash that skips the last block": (
        lambda q, k, v: flash(q, k[:-1], v[:-1]), full,
        ("f32[6,4]", "f32[4,2,4]", "f32[4,2,3]")),
    "flash that starts at one": (
        lambda q, k, v: flash(q, k, v) + 0 * q[:, :1].sum(), lambda q, k, v: full(q, k, v) * (
            1 + 1 / (1 + jnp.exp(0.125 * (q @ joined(k).T)).sum(-1, keepdims=True))), BLOCKS),
    # the monoid of the online softmax
    "merge without rescaling": (
        merge, lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1], a[2] + b[2]), STATES),
    "merge rescales one side": (
        merge, lambda a, b: (
            jnp.maximum(a[0], b[0]), a[1] + b[1] * jnp.exp(b[0] - jnp.maximum(a[0], b[0])),
            a[2] + b[2] * jnp.exp(b[0] - jnp.maximum(a[0], b[0]))[:, None]), STATES),
    "merge by a minimum": (
        merge, lambda a, b: (jnp.minimum(a[0], b[0]), *merge(a, b)[1:]), STATES),
    "mean of chunk softmaxes": (
        lambda x: jax.nn.softmax(x, (-2, -1)), lambda x: jax.nn.softmax(x, -1), ("f32[n,c,b]",)),
    # norms
    "epsilon outside the root": (
        lambda x, s, t: layer_norm(x, s, t),
        lambda x, s, t: (x - x.mean(-1, keepdims=True))
        / (jnp.sqrt(x.var(-1, keepdims=True)) + 1e-5) * s + t, LAYER),
    "another epsilon": (layer_norm, lambda x, s, t: layer_norm(x, s, t, 1e-6), LAYER),
    "unbiased variance": (
        lambda x: x.var(-1), lambda x: x.var(-1, ddof=1), ("f32[n,8]",)),
    "variance about zero": (lambda x: x.var(-1), lambda x: (x * x).mean(-1), (X,)),
    "mean over the batch": (
        layer_norm, lambda x, s, t: layer_norm(x.T, 1, 0).T * s + t, LAYER),
    "norm of a square over its other axis": (
        layer_norm, lambda x, s, t: layer_norm(x.T, 1, 0).T * s + t,
        ("f32[n,n]", "f32[n]", "f32[n]")),
    "shift before scale": (
        layer_norm, lambda x, s, t: (layer_norm(x, 1, 0) + t) * s, LAYER),
    "root mean square for layer norm": (
        layer_norm, lambda x, s, t: rms_norm(x, s, 1e-5) + t, LAYER),
    "sum for mean of squares": (
        rms_norm, lambda x, s: x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6) * s,
        ("f32[n,d]", "f32[d]")),
    "root for reciprocal root": (
        rms_norm, lambda x, s: x * jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * s,
        ("f32[n,d]", "f32[d]")),
    "deferred norm without its mean": (
        lambda x, w: (x - x.mean(-1, keepdims=True)) @ w, lambda x, w: x @ w - x.mean(-1)[:, None],
        ("f32[n,d]", "f32[d,o]")),
    "deferred norm with the mean of the weight": (
        lambda x, w: (x - x.mean(-1, keepdims=True)) @ w,
        lambda x, w: x @ w - x.mean(-1, keepdims=True) * w.mean(0), ("f32[n,d]", "f32[d,o]")),
    # linear algebra
    "weight transposed": (
        lambda x, w: x @ w, lambda x, w: x @ w.T, ("f32[n,d]", "f32[d,d]")),
    "product in the other order": (
        lambda a, b: a @ b, lambda a, b: b @ a, (SQUARE, SQUARE)),
    "low rank with the factors exchanged": (
        lambda x, a, b: x @ (a @ b), lambda x, a, b: x @ (b @ a),
        ("f32[n,d]", "f32[d,d]", "f32[d,d]")),
    "low rank without its scale": (
        lambda x, w, a, b: x @ (w + 2.0 * (a @ b)), lambda x, w, a, b: x @ w + (x @ a) @ b,
        ("f32[n,d]", "f32[d,o]", "f32[d,r]", "f32[r,o]")),
    "trace of a product of transposes": (
        lambda a: jnp.trace(a @ a), lambda a: (a * a).sum(), (SQUARE,)),
    "broadcast along rows, equal at one size": (
        lambda x, b: x + b, lambda x, b: x + b[:, None], (SQUARE, "f32[n]")),
    "sum of outer products": (
        lambda a, b: (a * b).sum(), lambda a, b: a.sum() * b.sum(), ("f32[n]", "f32[n]")),
    "mean of means": (
        lambda x: x.mean(), lambda x: x.sum() / x.shape[-1], ("f32[n,d]",)),
    "size of the other axis": (
        lambda x: x.sum(-1) / x.shape[1], lambda x: x.sum(-1) / x.shape[0], (X,)),
    "distance without its factor two": (
        lambda x, y: ((x[:, None] - y) ** 2).sum(-1),
        lambda x, y: (x**2).sum(-1)[:, None] + (y**2).sum(-1) - x @ y.T, (X, Y)),
    "distances with the wrong sign": (
        lambda x, y: ((x[:, None] - y) ** 2).sum(-1),
        lambda x, y: (x**2).sum(-1)[:, None] + (y**2).sum(-1) + 2 * (x @ y.T), (X, Y)),
    "complex product without conjugation": (
        jnp.vdot, lambda x, y: (x * y).sum(), ("c64[n]", "c64[n]")),
    "conjugate of the other factor": (
        jnp.vdot, lambda x, y: (x * y.conj()).sum(), ("c64[n]", "c64[n]")),
    "square of a complex number for its modulus": (
        lambda x: (x * x.conj()).real, lambda x: (x * x).real, ("c64[n]",)),
    # scans
    "scan with a dropped carry": (
        sequential, scan_of(lambda h, ab: (h, ab[0] * h + ab[1]), lambda a: a[0] * 0), AFFINE),
    "scan with exchanged factors": (
        sequential, scan_of(lambda h, ab: ((n := ab[1] * h + ab[0]), n), lambda a: a[0] * 0),
        AFFINE),
    "scan that returns the state before": (
        sequential, scan_of(lambda h, ab: (ab[0] * h + ab[1], h), lambda a: a[0] * 0), AFFINE),
    "scan that starts at one": (
        sequential, scan_of(lambda h, ab: ((n := ab[0] * h + ab[1]), n), lambda a: a[0] * 0 + 1),
        AFFINE),
    "parallel scan with the arguments exchanged": (
        lambda a, b: lax.associative_scan(
            lambda p, q: (p[0] * q[0], p[0] * q[1] + p[1]), (a, b))[1], sequential, AFFINE),
    "parallel scan in reverse": (
        lambda a, b: lax.associative_scan(
            lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (a, b), reverse=True)[1],
        sequential, AFFINE),
    "parallel scan of the factors alone": (
        parallel, lambda a, b: jnp.cumprod(a, 0) * b, AFFINE),
    "sequential scan in reverse": (
        lambda a, b: lax.scan(
            lambda h, ab: ((n := ab[0] * h + ab[1]), n), jnp.zeros(3), (a, b), reverse=True)[1],
        sequential, AFFINE),
    "exclusive sums for inclusive": (
        lambda x: jnp.cumsum(x, 0),
        lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(3), x)[1], ("f32[8,3]",)),
    # loops without a closed form
    "recurrent network with its matrix transposed": (
        recurrent(cell), recurrent(lambda h, x, w: jnp.tanh(h @ w + x)), RECURRENT),
    "recurrent network with the gate turned": (
        recurrent(gated),
        recurrent(lambda h, x, w: gated(h, x, w) + (1 - 2 * jax.nn.sigmoid(w @ h + x)) * (
            jnp.tanh(x) - h)), RECURRENT),
    "recurrent network that starts at zero": (
        recurrent(cell), lambda h, x, w: recurrent(cell)(0 * h, x, w), RECURRENT),
    "recurrent network in reverse": (
        recurrent(cell), lambda h, x, w: recurrent(cell)(h, x[::-1], w),
        STEPS),
    "carries exchanged": (
        leapfrog(False), lambda q, p, f: leapfrog(False)(p, q, f),
        ("f32[d]", "f32[d]", "f32[t,d]")),
    "results exchanged of a loop": (
        leapfrog(False), lambda q, p, f: leapfrog(True)(q, p, f)[::-1],
        ("f32[d]", "f32[d]", "f32[t,d]")),
    "carry read after it is written": (
        lambda q, p: lax.fori_loop(0, 3, lambda _, s: (jnp.sin(s[1]), jnp.cos(s[0])), (q, p)),
        lambda q, p: lax.fori_loop(
            0, 3, lambda _, s: (jnp.sin(s[1]), jnp.cos(jnp.sin(s[1]))), (q, p)),
        ("f32[d]", "f32[d]")),
    "unrolled one step short": (unrolled(cell, range(3)), recurrent(cell), STEPS),
    "unrolled with two steps exchanged": (unrolled(cell, [0, 2, 1, 3]), recurrent(cell), STEPS),
    "unrolled with a step twice": (unrolled(cell, [0, 1, 2, 2]), recurrent(cell), STEPS),
    "unrolled states one later": (
        lambda x: jnp.stack([jnp.sin(x), jnp.sin(jnp.sin(x)), jnp.sin(jnp.sin(x))]),
        lambda x: lax.scan(lambda h, _: (jnp.sin(h), jnp.sin(h)), x, None, length=3)[1],
        ("f32[n]",)),
    "unrolled counter from zero": (
        lambda x: jnp.sin(2 * jnp.sin(x)), lambda x: lax.fori_loop(
            0, 2, lambda k, y: jnp.sin(k * y), x), ("f32[n]",)),
    "unrolled sum that skips an entry": (
        lambda x: x[0] ** 2 + x[1] ** 2 + x[3] ** 2, lambda x: (x**2).sum(0), ("f32[4,d]",)),
    "unrolled maximum that skips an entry": (
        lambda x: jnp.maximum(x[0], x[2]), lambda x: x.max(0), ("f32[3,d]",)),
    "matrices multiplied in the other order": (
        matrix_scan, matrix_tree_of(
            lambda p, q: (p[0] @ q[0], apply(q[0], p[1]) + q[1])), MATRICES),
    "matrices transposed": (
        matrix_scan, lambda a, b: matrix_tree(a.transpose(0, 2, 1), b), MATRICES),
    "matrix applied to the new shift": (
        matrix_scan, matrix_tree_of(
            lambda p, q: (q[0] @ p[0], apply(q[0], p[1] + q[1]))), MATRICES),
    "matrix scan of a loop one matrix behind": (
        matrix_tree, lambda a, b: lax.scan(
            lambda c, ab: (((n := c[1] @ c[0] + ab[1]), ab[0]), n),
            (jnp.zeros(b.shape[1]), a[0]), (a, b))[1], MATRICES),
    # entries that are chosen
    "one hot of an index out of range": (
        one_hot_product(lambda i, n: i), lookup(lambda i, n: i), LOOKUP),
    "one hot clipped one short": (
        one_hot_product(clipped), lookup(lambda i, n: jnp.clip(i, 0, n - 2)), LOOKUP),
    "one hot of an index that may be negative": (
        one_hot_product(lambda i, n: jnp.minimum(i, n - 1)),
        lookup(lambda i, n: jnp.minimum(i, n - 1)), LOOKUP),
    "one hot of the next index": (
        one_hot_product(clipped), lookup(lambda i, n: clipped(i + 1, n)), LOOKUP),
    "one hot of the smallest": (
        lambda x, w: jax.nn.one_hot(x.argmax(-1), w.shape[0]) @ w,
        lambda x, w: w[x.argmin(-1)], ("f32[n,v]", "f32[v,d]")),
    "one hot of an argument past the end": (
        lambda x, w: jax.nn.one_hot(x.argmax(-1), w.shape[0]) @ w, lambda x, w: w[x.argmax(-1)],
        ("f32[n,v]", "f32[u,d]")),
    "filled with ones": (
        one_hot_product(lambda i, n: jnp.maximum(i, 0)), lambda i, w: jnp.take(
            w, jnp.maximum(i, 0), axis=0, mode="fill", fill_value=1), LOOKUP),
    "columns for rows": (
        one_hot_product(clipped), lambda i, w: w[:, clipped(i, w.shape[0])].T,
        ("i32[n]", "f32[d,d]")),
    "window that is clipped elsewhere": (
        lambda x, i: lax.dynamic_slice_in_dim(x, i + 1, 3)[:2],
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 3)[1:], ("f32[9]", "i32[]")),
    # casts
    "cast to fewer digits and back": (
        lambda x: x.astype(jnp.float16).astype(jnp.float32), lambda x: x, ("f32[n]",)),
    "cast to a smaller range and back": (
        lambda x: x.astype(jnp.float16).astype(jnp.bfloat16), lambda x: x, ("bf16[n]",)),
    "running sum from the other end": (
        lambda x: jnp.cumsum(x[::-1], 0)[::-1], lambda x: jnp.cumsum(x, 0), ("f32[t,d]",)),
    "running sum along the other axis": (
        lambda x: jnp.cumsum(x, 0), lambda x: jnp.cumsum(x, 1), ("f32[n,n]",)),
    "reversed rows multiplied with rows in order": (
        lambda x, y: (x[::-1] * y).sum(0), lambda x, y: (x * y).sum(0), ("f32[t,d]",) * 2),
    "values of two caches exchanged": (
        lambda p, q, v, w: jnp.concatenate([p, q], 1) @ jnp.concatenate([v, w]),
        lambda p, q, v, w: p @ w + q @ v, ("f32[n,s]", "f32[n,s]", "f32[s,d]", "f32[s,d]")),
    "cast to a smaller integer and back": (
        lambda x: x.astype(jnp.int8).astype(jnp.int32), lambda x: x, ("i32[n]",)),
    "cast to an integer without a sign and back": (
        lambda x: x.astype(jnp.uint8).astype(jnp.int32), lambda x: x, ("i32[n]",)),
    "sum rounded after each product": (
        lambda x, y: (x * y).astype(jnp.bfloat16).astype(jnp.float32) + x,
        lambda x, y: (x * y + x), ("f32[n]", "f32[n]")),
    # functions
    "equal for positive inputs alone": (lambda x: jnp.sqrt(x * x), lambda x: x, ("f32[n]",)),
    "log of a product of signs": (
        lambda x, y: jnp.log(x * y), lambda x, y: jnp.log(x) + jnp.log(y), ("f32[n]", "f32[n]")),
    "root of a product of signs": (
        lambda x, y: jnp.sqrt(x * y), lambda x, y: jnp.sqrt(x) * jnp.sqrt(y), ("f32[n]", "f32[n]")),
    "square of a root": (lambda x: jnp.sqrt(x) ** 2, lambda x: x, ("f32[n]",)),
    "division that cancels": (lambda x: x / x, jnp.ones_like, ("f32[n]",)),
    "log of an exponential of a log": (lambda x: jnp.exp(jnp.log(x)), lambda x: x, ("f32[n]",)),
    "not a number is kept": (
        lambda x: jnp.where(jnp.isnan(x), 0.0, x), lambda x: x, ("f32[n]",)),
    "infinity is kept": (
        lambda x: jnp.where(jnp.isfinite(x), x, 0.0), lambda x: x, ("f32[n]",)),
    "strict test at zero": (
        lambda x: jnp.where(x > 0, 1.0, 0.0), lambda x: jnp.where(x >= 0, 1.0, 0.0), ("f32[n]",)),
    "tie of two maxima": (
        lambda x, y: jnp.where(x > y, 1.0, 0.0), lambda x, y: 1 - jnp.where(y > x, 1.0, 0.0),
        ("f32[n]", "f32[n]")),
    "absolute value dropped": (lambda x: jnp.abs(x) ** 3, lambda x: x**3, ("f32[n]",)),
    "sign of a sine": (lambda x: jnp.sin(-x), jnp.sin, ("f32[n]",)),
    "gelu by the other formula": (
        jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False), ("f32[n]",)),
    "gelu with a rounded constant": (
        jax.nn.gelu, lambda x: x * jax.nn.sigmoid(1.5957691 * (x + 0.0447 * x**3)), ("f32[n]",)),
    "maximum of sums": (
        lambda x, y: (x + y).max(-1), lambda x, y: x.max(-1) + y.max(-1), (X, X)),
    "maximum of a negative multiple": (
        lambda x: (-2 * x).max(-1), lambda x: -2 * x.max(-1), (X,)),
    "leaky slope": (
        lambda x: jnp.where(x > 0, x, 0.01 * x), lambda x: jnp.maximum(x, 0.1 * x), ("f32[n]",)),
    "integer division": (
        lambda x: x // 2 * 2, lambda x: x, ("i32[n]",)),
    "integer division of a negative": (
        lambda x: x // 2, lambda x: lax.div(x, 2), ("i32[n]",)),
    "rounding to bfloat16": (
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), lambda x: x, ("f32[n]",)),
    "truncation to an integer": (
        lambda x: x.astype(jnp.int32).astype(jnp.float32), lambda x: x, ("f32[n]",)),
    "entry past the end": (
        lambda x: x[:-1] - x[1:], lambda x: x[1:] - x[:-1], ("f32[8]",)),
    "slice off by one": (lambda x: x[1:5], lambda x: x[2:6], ("f32[8]",)),
    "reversed entries": (lambda x: x[::-1], lambda x: x, ("f32[8]",)),
    "concatenation in the other order": (
        lambda x, y: jnp.concatenate([x, y]), lambda x, y: jnp.concatenate([y, x]),
        ("f32[4]", "f32[4]")),
    "reshape instead of transpose": (
        lambda x: x.T, lambda x: x.reshape(x.shape[1], x.shape[0]), ("f32[3,4]",)),
    "gather of the next entry": (
        lambda x, i: x[i], lambda x, i: x[i + 1], ("f32[9]", "i32[n]")),
    # structure
    "another dtype": (lambda x: x, lambda x: x.astype(jnp.bfloat16), ("f32[n]",)),
    "another shape": (lambda x: x, lambda x: x[:, None], ("f32[n]",)),
    "another tree": (lambda x: (x, x), lambda x: [x, x], ("f32[n]",)),
    "fewer results": (lambda x: (x, x), lambda x: (x,), ("f32[n]",)),
    "results exchanged": (lambda x, y: (x, y), lambda x, y: (y, x), ("f32[n]", "f32[n]")),
}  # fmt: skip
