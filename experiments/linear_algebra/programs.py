"""The programs of this experiment: as written, and as an expert would write them for XLA on CPU.

What the expert knows (measured, jax 0.10.2, two cores): `X.T @ v` is four times slower than the
same contraction as `v @ X`; a thin product of two long matrices, `k.T @ v`, is faster with the
transpose written out, which takes a barrier.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One program: how it was written, the best forms known, and what is asked of the rewrite."""

    name: str
    program: Callable
    shapes: tuple[tuple[int, ...], ...]
    hand: tuple[Callable, ...] = ()  # the fastest of them, as measured, is the best form
    at_least: float | None = None  # against plain jax.jit
    at_most: float | None = None  # against the best form
    alone: bool = False  # should run as written
    offset: float = 0.0  # added to every argument

    def arguments(self, shrink: int = 1) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(len(self.name)), len(self.shapes))
        sizes = [tuple(s // shrink if s >= 64 else s for s in shape) for shape in self.shapes]
        return [jax.random.normal(k, s) + self.offset for k, s in zip(keys, sizes, strict=True)]


def chain(*matrices):
    return functools.reduce(jnp.matmul, matrices)


def ordered_chain(sizes: tuple[int, ...]) -> Callable:
    """The product of matrices of sizes n₀×n₁, n₁×n₂, … in its cheapest order."""
    last = len(sizes) - 2

    @functools.cache
    def plan(i: int, j: int) -> tuple[float, int]:
        if i == j:
            return 0, i
        size = sizes[i] * sizes[j + 1]
        return min(
            (plan(i, k)[0] + plan(k + 1, j)[0] + size * sizes[k + 1], k) for k in range(i, j)
        )

    def multiply(matrices, i: int, j: int):
        if i == j:
            return matrices[i]
        k = plan(i, j)[1]
        return multiply(matrices, i, k) @ multiply(matrices, k + 1, j)

    return lambda *matrices: multiply(matrices, 0, last)


def random_chain(length: int) -> Row:
    draw = random.Random(length)
    sizes = tuple(draw.choice((64, 128, 256, 512, 1024, 2048)) for _ in range(length + 1))
    name = f"chain of {length}: {'×'.join(map(str, sizes))}"
    return Row(name, chain, tuple(itertools.pairwise(sizes)), (ordered_chain(sizes),))


def pairwise(x, y):
    return jnp.sum((x[:, None, :] - y[None, :, :]) ** 2)


def pairwise_apart(x, y):
    center = jnp.mean(x, axis=0)
    x, y = x - center, y - center
    cross = jnp.dot(x.sum(0), y.sum(0))
    return len(y) * jnp.sum(x * x) + len(x) * jnp.sum(y * y) - 2 * cross


def sandwich(x, gates, w_in, experts, w_out):
    """Every expert between the same two projections, weighted per token."""
    outputs = (x @ w_in @ expert @ w_out for expert in experts)
    return sum(gate[:, None] * y for gate, y in zip(gates, outputs, strict=True))


def sandwich_shared(x, gates, w_in, experts, w_out):
    inner = x @ w_in
    mixed = sum(gate[:, None] * (inner @ w) for gate, w in zip(gates, experts, strict=True))
    return mixed @ w_out


def sandwich_as_one(x, gates, w_in, experts, w_out):
    gated = gates.T[:, :, None] * (x @ w_in)[:, None, :]
    return gated.reshape(len(x), -1) @ experts.reshape(-1, experts.shape[2]) @ w_out


def experts_mixed(x, gates, w_in, experts, w_out):
    return x @ w_in @ jnp.einsum("e,ekl->kl", gates[:, 0], experts) @ w_out


def products_only(x, gates, w_in, experts, w_out):
    """Gates that do not depend on the token."""
    return sum(g * (x @ w_in @ w @ w_out) for g, w in zip(gates[:, 0], experts, strict=True))


def squared_gram(a, b, y):
    return (a.T @ b) @ (a.T @ b) @ y


def gram_of_product(a, b):
    product = a.T @ b
    return product.T @ product


def gram_thin(a, b, y):
    once = (b @ y) @ a
    return (b @ once) @ a


def rms_norm_linear(x, gain, weight):
    return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain) @ weight


def low_rank_residual(x, u, v):
    return jnp.sum((x - u @ v.T) ** 2)


def tridiagonal(a, b):
    i = jnp.arange(len(a))
    return jnp.where(jnp.abs(i[:, None] - i) <= 1, a, 0) @ b


def three_diagonals(a, b):
    middle, above, below = (jnp.diagonal(a, k)[:, None] for k in (0, 1, -1))
    none = jnp.zeros_like(b[:1])
    up = jnp.concatenate([above * b[1:], none])
    return middle * b + up + jnp.concatenate([none, below * b[:-1]])


def triangular_rows(a, b):
    """The lower triangle in four row blocks, each as wide as it must be."""
    edges = [len(a) * k // 4 for k in range(5)]
    a = jnp.tril(a)
    return jnp.concatenate([a[i:j, :j] @ b[:j] for i, j in itertools.pairwise(edges)])


def block_diagonal(a, c, b):
    zero = jnp.zeros_like(a)
    return jnp.block([[a, zero], [zero, c]]) @ b


def invariant_in_loop(a, b, vectors):
    def step(total, v):
        return total + a @ b + jnp.outer(v, v), None

    return lax.scan(step, jnp.zeros_like(a), vectors)[0]


def out_of_loop(a, b, vectors):
    return len(vectors) * (a @ b) + vectors.T @ vectors


N = 2000
SQUARE, COLUMN, VECTOR = (N, N), (N, 1), (N,)
MOE = ((256, 512), (8, 256), (512, 512), (8, 512, 512), (512, 512))
SCALAR_MOE = ((256, 512), (8, 1), (512, 512), (8, 512, 512), (512, 512))
POINTS = ((2048, 64), (2048, 64))

FIGURES = (
    Row(
        "(A@B)@x, 512×2048×2048×1",
        lambda a, b, x: (a @ b) @ x,
        ((512, 2048), (2048, 2048), (2048, 1)),
        (lambda a, b, x: a @ (b @ x), lambda a, b, x: (a @ (b @ x[:, 0]))[:, None]),
        15,
        1.10,
    ),
    Row(
        "X@(W+A@B), X [8,2048], r = 16",
        lambda x, w, a, b: x @ (w + a @ b),
        ((8, 2048), (2048, 2048), (2048, 16), (16, 2048)),
        (lambda x, w, a, b: x @ w + (x @ a) @ b,),
        1.8,
        1.10,
    ),
    Row(
        "(q@k.T)@v, 4096×64",
        lambda q, k, v: (q @ k.T) @ v,
        ((4096, 64),) * 3,
        (lambda q, k, v: q @ (k.T @ v), lambda q, k, v: q @ (lax.optimization_barrier(k.T) @ v)),
        20,
        1.10,
    ),
    Row(
        "trace(A@B), 2048",
        lambda a, b: jnp.trace(a @ b),
        ((2048, 2048),) * 2,
        (lambda a, b: jnp.sum(a * b.T), lambda a, b: jnp.sum(jnp.einsum("ij,ji->i", a, b))),
        10,
        1.10,
    ),
    Row(
        "Σ pairwise squared distances, 2048×2048×64", pairwise, POINTS, (pairwise_apart,), 50, 1.10
    ),
    Row(
        "the same, points at offset 1e4", pairwise, POINTS, (pairwise_apart,), 50, 1.10, offset=1e4
    ),
    Row(
        "x@W1 + x@W2, x [2048,2048]",
        lambda x, w1, w2: x @ w1 + x @ w2,
        ((2048, 2048),) * 3,
        (lambda x, w1, w2: x @ (w1 + w2),),
        1.7,
        1.10,
    ),
    Row(
        "MoE sandwich, 8 experts, x [256,512]",
        sandwich,
        MOE,
        (sandwich_shared, sandwich_as_one),
        1.4,
        1.10,
    ),
    Row("(AᵀB)(AᵀB)y, n = 2000", squared_gram, (SQUARE, SQUARE, VECTOR), (gram_thin,), 5, 1.10),
    Row(
        "HᵀHx, n = 2000",
        lambda h, x: h.T @ h @ x,
        (SQUARE, VECTOR),
        (lambda h, x: (h @ x) @ h,),
        5,
        1.10,
    ),
    Row(
        "(A@B)[2,2], n = 2000",
        lambda a, b: (a @ b)[2, 2],
        (SQUARE, SQUARE),
        (lambda a, b: a[2] @ b[:, 2],),
        100,
        1.2,
    ),
)

ALONE = (
    Row(
        "x@W1 and x@W2 both returned, x [8,2048]",
        lambda x, w1, w2: (x @ w1, x @ w2),
        ((8, 2048), (2048, 2048), (2048, 2048)),
        alone=True,
    ),
    Row(
        "RMSNorm then linear, [8,2048]",
        rms_norm_linear,
        ((8, 2048), (2048,), (2048, 2048)),
        alone=True,
    ),
    Row(
        "RMSNorm then linear, [512,2048]",
        rms_norm_linear,
        ((512, 2048), (2048,), (2048, 2048)),
        alone=True,
    ),
    Row("‖X−UVᵀ‖², dense X, r = 16", low_rank_residual, (SQUARE, (N, 16), (N, 16)), alone=True),
    *(
        Row(f"already best: {row.name}", form, row.shapes, alone=True)
        for row in FIGURES
        if not row.offset
        for form in row.hand[:1]
    ),
)

# After Sankaran et al. 2022, "Benchmarking the linear algebra awareness of TensorFlow and PyTorch".
AWARENESS = (
    *(random_chain(length) for length in (3, 4, 5, 6)),
    Row("(AᵀB)ᵀ(AᵀB)", lambda a, b: (a.T @ b).T @ (a.T @ b), (SQUARE,) * 2, (gram_of_product,)),
    Row(
        "BᵀA + (AᵀB)ᵀ",
        lambda a, b: b.T @ a + (a.T @ b).T,
        (SQUARE,) * 2,
        (lambda a, b: 2 * (b.T @ a),),
    ),
    Row(
        "BᵀA(AᵀB), no parentheses",
        lambda a, b: b.T @ a @ (a.T @ b),
        (SQUARE,) * 2,
        (gram_of_product,),
    ),
    Row("yᵀ(HᵀH)", lambda h, y: y @ (h.T @ h), (SQUARE, VECTOR), (lambda h, y: (h @ y) @ h,)),
    Row(
        "Hᵀy xᵀH",
        lambda h, x, y: h.T @ jnp.outer(y, x) @ h,
        (SQUARE, VECTOR, VECTOR),
        (lambda h, x, y: jnp.outer(y @ h, x @ h),),
    ),
    Row("AB + AC", lambda a, b, c: a @ b + a @ c, (SQUARE,) * 3, (lambda a, b, c: a @ (b + c),)),
    Row(
        "(A − HᵀH)x",
        lambda a, h, x: (a - h.T @ h) @ x,
        (SQUARE, SQUARE, VECTOR),
        (lambda a, h, x: a @ x - (h @ x) @ h,),
    ),
    Row("MoE sandwich, gates without tokens", products_only, SCALAR_MOE, (experts_mixed,)),
    Row(
        "A@B invariant in a scan of 5", invariant_in_loop, (SQUARE, SQUARE, (5, N)), (out_of_loop,)
    ),
    Row("(A+B)[2,2]", lambda a, b: (a + b)[2, 2], (SQUARE,) * 2, (lambda a, b: a[2, 2] + b[2, 2],)),
    Row("(A@B)[2]", lambda a, b: (a @ b)[2], (SQUARE,) * 2, (lambda a, b: a[2] @ b,)),
    Row("(A@B)[:, 2]", lambda a, b: (a @ b)[:, 2], (SQUARE,) * 2, (lambda a, b: a @ b[:, 2],)),
    Row("(A@B)[:8]", lambda a, b: (a @ b)[:8], (SQUARE,) * 2, (lambda a, b: a[:8] @ b,)),
    Row(
        "diag of A@B",
        lambda a, b: jnp.diagonal(a @ b),
        (SQUARE,) * 2,
        (lambda a, b: jnp.einsum("ij,ji->i", a, b),),
    ),
    Row(
        "ΣΣ A@B",
        lambda a, b: jnp.sum(a @ b),
        (SQUARE,) * 2,
        (lambda a, b: a.sum(0) @ b.sum(1), lambda a, b: jnp.sum(a @ b.sum(1))),
    ),
    Row(
        "diag(d)@B", lambda d, b: jnp.diag(d) @ b, (VECTOR, SQUARE), (lambda d, b: d[:, None] * b,)
    ),
    Row("tridiagonal mask of A, @B", tridiagonal, (SQUARE,) * 2, (three_diagonals,)),
    Row("tril(A)@B", lambda a, b: jnp.tril(a) @ b, (SQUARE,) * 2, (triangular_rows,)),
    Row(
        "block-diagonal [[A,0],[0,C]]@B",
        block_diagonal,
        ((1024, 1024), (1024, 1024), (2048, N)),
        (lambda a, c, b: jnp.concatenate([a @ b[: len(a)], c @ b[len(a) :]]),),
    ),
)

ALL = (*FIGURES, *ALONE, *AWARENESS)
