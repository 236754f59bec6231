"""The families of linear algebra, each in the spellings people write it in."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite.testing.numpy_evaluator import evaluate, tolerance

F32 = jnp.float32


def specs(shapes, sizes, dtype=F32):
    """`"nd,do"` as ShapeDtypeStructs; `n!` is an array of indices."""
    out = []
    for word in shapes.split(","):
        kind = jnp.int32 if word.endswith("!") else dtype
        out.append(jax.ShapeDtypeStruct(tuple(sizes[c] for c in word.strip("!")), kind))
    return out


def random(avals, seed=0, offset=0.0):
    rng = np.random.default_rng(seed)
    return [
        np.asarray(rng.standard_normal(a.shape) + offset, a.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating)
        else rng.integers(0, 9, a.shape).astype(a.dtype)
        for a in avals
    ]


def same_values(report, args, rtol=None):
    wanted = evaluate(report.before.jaxpr, args)
    got = evaluate(report.after.jaxpr, args)
    for x, y in zip(got, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.size:
            x, y = x.astype(np.float64), y.astype(np.float64)
            largest = np.abs(y).max()
            assert np.abs(x - y).max() <= (rtol or 4 * tolerance("float32")) * largest


@dataclass(frozen=True)
class Family:
    """The spellings of a program, and the least saving that each must reach."""

    shapes: str
    sizes: dict
    times: float
    spellings: dict
    cost: str = "flops"
    missing: dict = field(default_factory=dict)  # spelling: why it is not done yet


def _unroll(parts):
    total = parts[0]
    for p in parts[1:]:
        total = total + p
    return total


def _weighted(gates, experts):
    return _unroll([gates[:, e, None] * experts[e] for e in range(4)])


MATRICES = {"i": 256, "j": 384, "k": 320, "l": 8, "m": 1}

FAMILIES = {
    "chain on a vector": Family("ij,jk,k", MATRICES, 50, {
        "matmul": lambda a, b, v: (a @ b) @ v,
        "left to right": lambda a, b, v: a @ b @ v,
        "einsum": lambda a, b, v: jnp.einsum("ik,k->i", jnp.einsum("ij,jk->ik", a, b), v),
        "einsum, other letters": lambda a, b, v: jnp.einsum(
            "k,zk->z", v, jnp.einsum("ba,zb->za", b, a)
        ),
        "tensordot": lambda a, b, v: jnp.tensordot(jnp.tensordot(a, b, 1), v, 1),
        "dot_general": lambda a, b, v: lax.dot_general(
            lax.dot_general(b, a, (((0,), (1,)), ((), ()))), v, (((0,), (0,)), ((), ()))
        ),
        "transposed": lambda a, b, v: (v @ (b.T @ a.T)).T,
        "vmap": lambda a, b, v: jax.vmap(lambda row: jnp.vdot(row, v))(
            jax.vmap(lambda r: r @ b)(a)
        ),
        "vmap over columns": lambda a, b, v: jax.vmap(lambda c: a @ c, 1, 1)(b) @ v,
        "multiply and sum": lambda a, b, v: jnp.sum((a @ b) * v, 1),
        "a column": lambda a, b, v: ((a @ b) @ v[:, None])[:, 0],
        "batched": lambda a, b, v: ((a[None] @ b[None]) @ v[None, :, None])[0, :, 0],
        "reshaped": lambda a, b, v: (a.reshape(16, 16, -1) @ b).reshape(256, -1) @ v,
        "cast in": lambda a, b, v: (a.astype(jnp.bfloat16).astype(F32) @ b) @ v,
        "scaled": lambda a, b, v: ((2.0 * a) @ (b / 3)) @ -v,
        "nested jit": lambda a, b, v: jax.jit(jnp.matmul)(jax.jit(jnp.matmul)(a, b), v),
        "in a scope": jax.named_scope("layer")(lambda a, b, v: (a @ b) @ v),
        "stop_gradient": lambda a, b, v: lax.stop_gradient(a @ b) @ v,
        "remat": lambda a, b, v: jax.checkpoint(lambda a, b, v: (a @ b) @ v)(a, b, v),
        "scanned": lambda a, b, v: lax.scan(
            lambda c, _: (c + (a @ b) @ v, None), a[:, 0], None, 3
        )[0],
    }),
    "low-rank update of many rows": Family(
        "nd,do,dr,ro", {"n": 8192, "d": 16, "o": 16, "r": 7}, 1.5, {
            "apart": lambda x, W, A, B: x @ W + (x @ A) @ B,
            "subtracted": lambda x, W, A, B: x @ W - (x @ A) @ B,
        },
    ),
    "low-rank update": Family("nd,do,dr,ro", {"n": 8, "d": 512, "o": 512, "r": 4}, 1.4, {
        "merged": lambda x, W, A, B: x @ (W + A @ B),
        "update first": lambda x, W, A, B: x @ (A @ B + W),
        "scaled": lambda x, W, A, B: x @ (W + 0.25 * (A @ B)),
        "scaled inside": lambda x, W, A, B: x @ (W + (0.25 * A) @ B),
        "divided": lambda x, W, A, B: x @ (W + A @ B / 4),
        "subtracted": lambda x, W, A, B: x @ (W - A @ B),
        "einsum": lambda x, W, A, B: jnp.einsum("nd,do->no", x, W + jnp.einsum("dr,ro->do", A, B)),
        "weights transposed": lambda x, W, A, B: x @ (W.T + (A @ B).T).T,
        "all transposed": lambda x, W, A, B: ((W + A @ B).T @ x.T).T,
        "vmap": lambda x, W, A, B: jax.vmap(lambda t: t @ (W + A @ B))(x),
        "batch and time": lambda x, W, A, B: (x.reshape(2, 4, -1) @ (W + A @ B)).reshape(8, -1),
        "heads": lambda x, W, A, B: jnp.einsum(
            "nd,dhk->nhk", x, (W + A @ B).reshape(-1, 8, 64)
        ).reshape(8, -1),
        "with a bias": lambda x, W, A, B: x @ (W + A @ B) + W[0],
        "cast in": lambda x, W, A, B: x @ (W.astype(jnp.bfloat16).astype(F32) + A @ B),
        "two adapters": lambda x, W, A, B: x @ (W + A @ B + (2 * A) @ jnp.sin(B)),
        "three adapters": lambda x, W, A, B: (
            x @ (W + A @ B + jnp.cos(A) @ jnp.sin(B) + jnp.sin(A) @ B)
        ),
        "stacked adapters": lambda x, W, A, B: (
            x
            @ (W + jnp.einsum("edr,ero->do", jnp.stack([A, jnp.sin(A)]), jnp.stack([B, B * B])))
        ),
        "used twice": lambda x, W, A, B: (x @ (W + A @ B), jnp.sin(x) @ (W + A @ B)),
        "scale is an argument": lambda x, W, A, B: x @ (W + x[0, 0] * (A @ B)),
        "a gain between": lambda x, W, A, B: x @ (W + (A * B[:, 0]) @ B),
    }),
    "batched adapters": Family(
        "btd,do,bdr,bro",
        {"b": 4, "t": 8, "d": 256, "o": 256, "r": 4},
        1.4,
        {
            "matmul": lambda x, W, A, B: x @ (W + A @ B),
            "einsum": lambda x, W, A, B: jnp.einsum(
                "btd,bdo->bto", x, W[None] + jnp.einsum("bdr,bro->bdo", A, B)
            ),
            "vmap": lambda x, W, A, B: jax.vmap(lambda x, A, B: x @ (W + A @ B))(x, A, B),
            "scaled": lambda x, W, A, B: x @ (W + 0.5 * (A @ B)),
        },
    ),
    "shared operand": Family("nd,do,do", {"n": 512, "d": 512, "o": 512}, 1.9, {
        "matmul": lambda x, V, W: x @ V + x @ W,
        "difference": lambda x, V, W: x @ V - x @ W,
        "scaled": lambda x, V, W: 2 * (x @ V) + x @ (3 * W),
        "einsum": lambda x, V, W: jnp.einsum("nd,do->no", x, V) + jnp.einsum("do,nd->no", W, x),
        "transposed": lambda x, V, W: (V.T @ x.T).T + x @ W,
        "right operand": lambda x, V, W: V @ x + W @ x,
        "with a bias": lambda x, V, W: (x @ V + W[0]) + x @ W,
        "three": lambda x, V, W: x @ V + x @ W + x @ (V * W),
        "weights in a stack": lambda x, V, W: sum(x @ w for w in jnp.stack([V, W])),
        "unstacked": lambda x, V, W: _unroll(
            [x @ w for w in jnp.unstack(jnp.stack([V, W], 2), axis=2)]
        ),
        "stacked products": lambda x, V, W: jnp.stack([x @ V, x @ W], -1).sum(-1),
        "tiled": lambda x, V, W: jnp.tile(x, (1, 2)) @ jnp.concatenate([V, W]),
        "batched": lambda x, V, W: x.reshape(2, 256, -1) @ V + x.reshape(2, 256, -1) @ W,
        "vmap": lambda x, V, W: jax.vmap(lambda t: t @ V + t @ W)(x),
    }),
    "MoE sandwich": Family("nd,dr,err,rd,ne", {"n": 256, "d": 512, "r": 128, "e": 4}, 1.4, {
        "unrolled": lambda x, U, W, D, g: _weighted(g, [((x @ U) @ W[e]) @ D for e in range(4)]),
        "unrolled, left to right": lambda x, U, W, D, g: _unroll(
            [g[:, e, None] * (x @ U @ W[e] @ D) for e in range(4)]
        ),
        "unrolled, merged": lambda x, U, W, D, g: _weighted(
            g, [x @ (U @ W[e] @ D) for e in range(4)]
        ),
        "stacked": lambda x, U, W, D, g: jnp.einsum(
            "ne,end->nd", g, jnp.einsum("nd,dr,ers,so->eno", x, U, W, D, optimize=False)
        ),
        "stacked, step by step": lambda x, U, W, D, g: jnp.sum(
            g.T[:, :, None] * (((x @ U)[None] @ W) @ D), 0
        ),
        "vmap over experts": lambda x, U, W, D, g: jnp.einsum(
            "ne,end->nd", g, jax.vmap(lambda w: x @ U @ w @ D)(W)
        ),
    }),
    "Gram": Family("ij,ik", {"i": 384, "j": 256, "k": 256}, 1.4, {
        "BᵀA AᵀB": lambda a, b: (b.T @ a) @ (a.T @ b),
        "left to right": lambda a, b: b.T @ a @ a.T @ b,
        "einsum": lambda a, b: jnp.einsum("ik,ij,lj,lm->km", b, a, a, b, optimize=False),
        "G and its transpose": lambda a, b: (a.T @ b, (b.T @ a) * 2),
    }),
    "powers on a vector": Family("ij,ij,j", {"i": 384, "j": 384}, 20, {
        "HᵀHx": lambda a, b, y: (a.T @ a) @ y,
        "(AᵀB)(AᵀB)y": lambda a, b, y: ((a.T @ b) @ (a.T @ b)) @ y,
        "y'AᵀA": lambda a, b, y: y @ (a.T @ a),
        "quadratic form": lambda a, b, y: y @ (a @ b) @ y,
        "repeated": lambda a, b, y: (a @ a @ a @ b) @ y,
    }),
    "part of a product": Family("ij,ji", {"i": 256, "j": 320}, 20, {
        "trace": lambda a, b: jnp.trace(a @ b),
        "trace, transposed": lambda a, b: jnp.trace((b.T @ a.T).T),
        "trace by diagonal": lambda a, b: jnp.sum(jnp.diagonal(a @ b)),
        "trace by einsum": lambda a, b: jnp.einsum("ii->", jnp.einsum("ij,jk->ik", a, b)),
        "trace by mask": lambda a, b: jnp.sum((a @ b) * jnp.eye(256)),
        "diagonal": lambda a, b: jnp.diagonal(a @ b),
        "diag": lambda a, b: jnp.diag(a @ b),
        "sum": lambda a, b: jnp.sum(a @ b),
        "sum, one axis at a time": lambda a, b: (a @ b).sum(0).sum(),
        "mean": lambda a, b: jnp.mean(a @ b),
        "row sums": lambda a, b: jnp.sum(a @ b, 1),
        "element": lambda a, b: (a @ b)[2, 2],
        "last element": lambda a, b: (a @ b)[-1, -1],
        "row": lambda a, b: (a @ b)[3],
        "column": lambda a, b: (a @ b)[:, 3],
        "some rows": lambda a, b: (a @ b)[:4],
        "a corner": lambda a, b: (a @ b)[:4, :4],
        "every 64th row": lambda a, b: (a @ b)[::64],
        "lax.slice": lambda a, b: lax.slice(a @ b, (0, 0), (2, 256)),
        "element of a sum": lambda a, b: (a @ b + 1)[0, 0],
        "element of a map": lambda a, b: jnp.tanh(a @ b)[0, 0],
        "a row, transposed": lambda a, b: (a @ b).T[:, 0],
        "dynamic element": lambda a, b: lax.dynamic_index_in_dim(a @ b, 3, 0, keepdims=False),
        "taken": lambda a, b: jnp.take(a @ b, jnp.array([1, 3]), 0),
    }),
    "sum of a product": Family("ij,jk,k", MATRICES, 20, {
        "columns": lambda a, b, v: jnp.sum(a @ b, 0),
        "weighted": lambda a, b, v: jnp.sum((a @ b) * v),
        "of three": lambda a, b, v: jnp.sum((a @ b) @ jnp.outer(v, v)),
    }),
    "linear attention": Family("nd,nd,nd", {"n": 512, "d": 32}, 7, {
        "matmul": lambda q, k, v: (q @ k.T) @ v,
        "einsum": lambda q, k, v: jnp.einsum("nm,md->nd", jnp.einsum("nd,md->nm", q, k), v),
        "scaled": lambda q, k, v: ((q @ k.T) / jnp.sqrt(32.0)) @ v,
        "scaled q": lambda q, k, v: ((q * 0.125) @ k.T) @ v,
        "v on the left": lambda q, k, v: (v.T @ (k @ q.T)).T,
        "feature map": lambda q, k, v: (jnp.exp(q) @ jnp.exp(k).T) @ v,
        "vmap over queries": lambda q, k, v: jax.vmap(lambda t: (k @ t) @ v)(q),
        "normalised": lambda q, k, v: (
            ((jnp.exp(q) @ jnp.exp(k).T) @ v)
            / jnp.sum(jnp.exp(q) @ jnp.exp(k).T, 1, keepdims=True)
        ),
    }),
    "batched linear attention": Family("bnhd,bnhd,bnhd", {"b": 2, "n": 512, "h": 2, "d": 32}, 7, {
        "bhnm": lambda q, k, v: jnp.einsum(
            "bhnm,bmhd->bnhd", jnp.einsum("bnhd,bmhd->bhnm", q, k), v
        ),
        "transposed to heads": lambda q, k, v: (
            (q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1)) @ v.transpose(0, 2, 1, 3)
        ).transpose(0, 2, 1, 3),
        "double vmap": lambda q, k, v: jax.vmap(jax.vmap(lambda q, k, v: (q @ k.T) @ v, 1, 1))(
            q, k, v
        ),
    }),
    "squared distances": Family("nd,md", {"n": 512, "m": 384, "d": 16}, 5, {
        "broadcast": lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2),
        "square": lambda x, y: jnp.sum(jnp.square(x[:, None, :] - y[None, :, :])),
        "product": lambda x, y: jnp.sum((x[:, None] - y) * (x[:, None] - y)),
        "swapped": lambda x, y: jnp.sum((y[None] - x[:, None]) ** 2),
        "sum in steps": lambda x, y: jnp.sum(jnp.sum((x[:, None] - y[None]) ** 2, -1)),
        "vmap": lambda x, y: jnp.sum(
            jax.vmap(lambda a: jax.vmap(lambda b: jnp.sum((a - b) ** 2))(y))(x)
        ),
        "mean": lambda x, y: jnp.mean((x[:, None] - y[None]) ** 2),
        "halved": lambda x, y: 0.5 * jnp.sum((x[:, None] - y[None]) ** 2),
        "einsum": lambda x, y: jnp.einsum("ijk,ijk->", x[:, None] - y, x[:, None] - y),
        "row sums": lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, (1, 2)),
        "column sums": lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, (0, 2)),
        "mean distance of each": lambda x, y: jnp.mean(jnp.sum((x[:, None] - y[None]) ** 2, -1), 1),
        "to each other": lambda x, y: jnp.sum((x[:, None] - x[None]) ** 2, (1, 2)),
        "by dimension": lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, 1),
    }, cost="seconds"),
    "blocks": Family("ij,ij,jk,ik", {"i": 256, "j": 256, "k": 256}, 1.9, {
        "zero corner": lambda a, b, c, d: (
            jnp.block([[a, jnp.zeros_like(b)], [jnp.zeros_like(a), b]])
            @ jnp.concatenate([c, d])
        ),
        "zero column": lambda a, b, c, d: (
            jnp.concatenate([a, jnp.zeros_like(a)], 1) @ jnp.concatenate([c, d])
        ),
        "one piece is read": lambda a, b, c, d: (jnp.concatenate([a, b]) @ c)[:256],
        "split of a product": lambda a, b, c, d: jnp.split(a @ jnp.concatenate([c, d], 1), 2, 1)[0],
    }),
    "one-hot": Family("n!,vd", {"n": 256, "v": 512, "d": 128}, 100, {
        "one_hot": lambda i, W: jax.nn.one_hot(i, 512) @ W,
        "by comparison": lambda i, W: (i[:, None] == jnp.arange(512)).astype(F32) @ W,
        "where": lambda i, W: jnp.where(i[:, None] == jnp.arange(512), 1.0, 0.0) @ W,
        "einsum": lambda i, W: jnp.einsum("nv,vd->nd", jax.nn.one_hot(i, 512), W),
        "transposed": lambda i, W: (W.T @ jax.nn.one_hot(i, 512).T).T,
    }),
    "diagonal": Family("i,ij,j", {"i": 256, "j": 320}, 20, {
        "diag on the left": lambda d, a, e: jnp.diag(d) @ a,
        "diag on the right": lambda d, a, e: a @ jnp.diag(e),
        "both": lambda d, a, e: jnp.diag(d) @ a @ jnp.diag(e),
        "eye": lambda d, a, e: jnp.eye(256) @ a,
        "scaled eye": lambda d, a, e: (3 * jnp.eye(256)) @ a,
        "masked": lambda d, a, e: (d[:, None] * jnp.eye(256)) @ a,
    }),
    "centring": Family("ij", {"i": 256, "j": 64}, 3, {
        "ones over n": lambda a: (jnp.eye(256) - jnp.ones((256, 256)) / 256) @ a,
        "a number": lambda a: (jnp.eye(256) - 1 / 256) @ a,
        "outer product": lambda a: (
            (jnp.eye(256) - jnp.outer(jnp.ones(256) / 16, jnp.ones(256) / 16)) @ a
        ),
        "both sides": lambda a: (c := jnp.eye(256) - 1 / 256) @ (a @ a.T) @ c,
        "kernel alignment": lambda a: jnp.sum(((jnp.eye(256) - 1 / 256) @ (a @ a.T)) ** 2),
        "from the right": lambda a: a.T @ (jnp.eye(256) - 1 / 256),
    }, cost="seconds"),
    "triangle of ones": Family("ij", {"i": 256, "j": 64}, 5, {
        "tril": lambda a: jnp.tril(jnp.ones((256, 256))) @ a,
        "triu": lambda a: jnp.triu(jnp.ones((256, 256))) @ a,
        "by comparison": lambda a: ((jnp.arange(256)[:, None] >= jnp.arange(256)).astype(F32) @ a),
        "tri": lambda a: jnp.tri(256) @ a,
        "strict": lambda a: jnp.tril(jnp.ones((256, 256)), -1) @ a,
        "strict, by comparison": lambda a: (
            (jnp.arange(256)[:, None] > jnp.arange(256)).astype(F32) @ a
        ),
        "one diagonal more": lambda a: jnp.tri(256, k=1) @ a,
        "far above": lambda a: jnp.triu(jnp.ones((256, 256)), 7) @ a,
        "far below": lambda a: jnp.triu(jnp.ones((256, 256)), -7) @ a,
        "strict, from the right": lambda a: (a.T @ jnp.tril(jnp.ones((256, 256)), -1)).T,
        "einsum": lambda a: jnp.einsum("ts,sd->td", jnp.tril(jnp.ones((256, 256))), a),
    }),
    "common subexpression": Family("ij,jk", {"i": 256, "j": 256, "k": 256}, 1.9, {
        "transposed": lambda a, b: (a @ b, b.T @ a.T),
        "other einsum": lambda a, b: jnp.sin(a @ b) + jnp.cos(jnp.einsum("jk,ij->ki", b, a)).T,
        "dot_general": lambda a, b: (a @ b, lax.dot_general(b, a, (((0,), (1,)), ((), ())))),
        "batched": lambda a, b: (a @ b, (a[None] @ b[None])[0]),
    }),
}  # fmt: skip
