"""The programs of published benchmarks, and programs that hide a structure.

Sankaran et al. 2022, "Benchmarking the linear algebra awareness of TensorFlow and PyTorch".
"""

import functools

import jax
import jax.numpy as jnp

from tests.rewriting.families import Family

SQUARE = {"i": 256}

FAMILIES = {
    "AᵀB twice": Family("ii,ii", SQUARE, 1.4, {
        "(AᵀB)ᵀ(AᵀB)": lambda a, b: (a.T @ b).T @ (a.T @ b),
        "AᵀBAᵀB, no parentheses": lambda a, b: a.T @ b @ a.T @ b,
        "BᵀAAᵀB, no parentheses": lambda a, b: b.T @ a @ a.T @ b,
        "A⁴, no parentheses": lambda a, b: a @ a @ a @ a,
        "AᵀB + AᵀB": lambda a, b: a.T @ b + a.T @ b,
        "AᵀB + (BᵀA)ᵀ": lambda a, b: a.T @ b + (b.T @ a).T,
        "AB + AC": lambda a, b: a @ b + a @ jnp.sin(b),
    }),
    "a power by squares": Family(
        "ii", SQUARE, 3, {"A¹⁶": lambda a: functools.reduce(jnp.matmul, [a] * 16)}
    ),
    "copies of an operand": Family("nd,do", {"n": 64, "d": 512, "o": 512}, 3, {
        "tile": lambda x, W: jnp.tile(x, (4, 1)) @ W,
        "repeat, as for beams": lambda x, W: jnp.repeat(x, 4, 0) @ W,
        "broadcast": lambda x, W: jnp.broadcast_to(x[None], (4, *x.shape)) @ W,
        "two users": lambda x, W: (lambda y: (y @ W, jnp.sin(y) @ W))(jnp.tile(x, (4, 1))),
        "of a map": lambda x, W: jnp.tanh(jnp.repeat(x, 4, 0)) @ W,
    }),
    "products with a vector": Family("ii,ii,i,i", SQUARE, 20, {
        "Hᵀy xᵀH": lambda h, a, x, y: h.T @ jnp.outer(y, x) @ h,
        "(A − HᵀH)x": lambda h, a, x, y: (a - h.T @ h) @ x,
        "yᵀHᵀH": lambda h, a, x, y: y @ (h.T @ h),
        "A⁵x": lambda h, a, x, y: jnp.linalg.matrix_power(a, 5) @ x,
        "HAx, multi_dot": lambda h, a, x, y: jnp.linalg.multi_dot([h, a]) @ x,
        "trace of three": lambda h, a, x, y: jnp.trace(h @ jnp.outer(x, y) @ a),
        "ΣΣ HA": lambda h, a, x, y: jnp.sum(h @ a),
        "quadratic form": lambda h, a, x, y: x @ (h.T @ a @ h) @ y,
        "outer product on a matrix": lambda h, a, x, y: jnp.outer(x, y) @ h @ y,
        "Householder": lambda h, a, x, y: (jnp.eye(256) - 2 * jnp.outer(x, x)) @ h,
    }),
    "several products and a diagonal, on a vector": Family("nk,nk,n,k", {"n": 256, "k": 8}, 20, {
        "two and I": lambda u, v, x, s: (u @ u.T + v @ v.T + jnp.eye(256)) @ x,
        "I and two": lambda u, v, x, s: (jnp.eye(256) + (u @ u.T + v @ v.T)) @ x,
        "three and I": lambda u, v, x, s: (
            (u @ u.T - 2 * v @ v.T + jnp.sin(u) @ v.T + 3 * jnp.eye(256)) @ x
        ),
        "two and a diagonal": lambda u, v, x, s: (u @ u.T + v @ v.T + jnp.diag(x)) @ x,
        "U diag(s) Uᵀ + I": lambda u, v, x, s: (u @ jnp.diag(s) @ u.T + jnp.eye(256)) @ x,
        "U S Vᵀ + I": lambda u, v, x, s: (u @ (s * jnp.eye(8)) @ v.T + jnp.eye(256)) @ x,
        "UVᵀ + VUᵀ": lambda u, v, x, s: (u @ v.T + v @ u.T) @ x,
        "symmetric part": lambda u, v, x, s: (0.5 * (u @ v.T + (u @ v.T).T)) @ x,
        "skew part and I": lambda u, v, x, s: (u @ v.T - v @ u.T + jnp.eye(256)) @ x,
    }),
    "a mask of rows between products": Family("ii,ij,j,i", {"i": 256, "j": 192}, 20, {
        "where": lambda a, b, v, m: jnp.where(m[:, None] > 0, a @ b, 0) @ v,
        "zero first": lambda a, b, v, m: jnp.where(m[:, None] > 0, 0, a @ b) @ v,
        "on the left": lambda a, b, v, m: v @ jnp.where(m > 0, b.T @ a, 0),
        "of leading rows": lambda a, b, v, m: (
            jnp.where(jnp.arange(256)[:, None] < 99, a @ b, 0) @ v
        ),
        "twice": lambda a, b, v, m: (
            jnp.where(m[:, None] > 0, jnp.where(m[:, None] < 1, a @ b, 0) @ b.T @ b, 0) @ v
        ),
        "multiplied": lambda a, b, v, m: ((a @ b) * (m > 0)[:, None]) @ v,
    }),
    "derivatives made whole, on a vector": Family("ii,i", SQUARE, 50, {
        "jacfwd": lambda a, x: jax.jacfwd(lambda x: jnp.tanh(a @ x))(x) @ x,
        "jacrev": lambda a, x: jax.jacrev(lambda x: jnp.tanh(a @ x))(x) @ x,
        "jacrev, transposed": lambda a, x: x @ jax.jacrev(lambda x: jnp.tanh(a @ x))(x),
        "hessian": lambda a, x: jax.hessian(lambda x: jnp.sum(jnp.sin(a @ x)))(x) @ x,
        "diagonal of a Hessian": lambda a, x: jnp.diag(
            jax.hessian(lambda x: jnp.sum(jnp.sin(a @ x)))(x)
        ),
        "Laplacian": lambda a, x: jnp.trace(jax.hessian(lambda x: jnp.sum(jnp.sin(a @ x)))(x)),
        "one piece of a split": lambda a, x: (a @ jnp.split(a, 1)[0]) @ x,
    }),
    "blocks by padding": Family("ii,ii,ik,ik", {"i": 256, "k": 128}, 1.9, {
        "block_diag": lambda a, c, x, y: (
            jax.scipy.linalg.block_diag(a, c) @ jnp.concatenate([x, y])
        ),
        "pad": lambda a, c, x, y: jnp.pad(a, ((0, 0), (0, 256))) @ jnp.concatenate([x, y]),
        "pad of the other": lambda a, c, x, y: (
            jnp.concatenate([a, c], 1) @ jnp.pad(x, ((256, 0), (0, 0)))
        ),
    }),
    "permutations": Family("i!,ik", {"i": 256, "k": 128}, 100, {
        "rows of an identity": lambda p, a: jnp.eye(256)[p] @ a,
        "columns": lambda p, a: a.T @ jnp.eye(256)[:, p],
        "take": lambda p, a: jnp.take(jnp.eye(256), p, 0) @ a,
        "transposed": lambda p, a: a.T @ jnp.eye(256)[p].T,
    }),
    "Kronecker product on a vector": Family("ii,jj,k", {"i": 16, "j": 16, "k": 256}, 8, {
        "kron(A, B)x": lambda a, b, x: jnp.kron(a, b) @ x,
        "kron(I, B)x": lambda a, b, x: jnp.kron(jnp.eye(16), b) @ x,
        "kron(A, I)x": lambda a, b, x: jnp.kron(a, jnp.eye(16)) @ x,
    }),
    "large Kronecker product on a vector": Family("ii,k", {"i": 64, "k": 4096}, 30, {
        "kron(A, A)x": lambda a, x: jnp.kron(a, a) @ x,
        "kron(A, I)x": lambda a, x: jnp.kron(a, jnp.eye(64)) @ x,
        "quadratic form": lambda a, x: x @ (jnp.kron(a, jnp.eye(64)) @ x),
    }),
    "products of scores, many of them": Family("nr,nr,nr", {"n": 3072, "r": 8}, 10, {
        "squared": lambda q, k, v: (q @ k.T) ** 2 @ v,
        "multiplied": lambda q, k, v: ((q @ k.T) * (v @ k.T)) @ v,
        "summed": lambda q, k, v: jnp.sum((q @ k.T) * (k @ v.T)),
    }),
    "norms of a thin product": Family("ir,rj", {"i": 512, "j": 512, "r": 8}, 20, {
        "‖AB‖²": lambda a, b: jnp.sum((a @ b) ** 2),
        "‖AB‖": lambda a, b: jnp.linalg.norm(a @ b),
        "tr(BᵀAᵀAB)": lambda a, b: jnp.trace((a @ b).T @ (a @ b)),
    }),
}  # fmt: skip
