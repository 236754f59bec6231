"""Programs for testing rules: every form that a law matches, each in many spellings.

A specimen is a function of arrays with named sizes. Its operations are spelled at random (matmul,
einsum, dot_general, vmap, transposed, swapped), so no rule is tested on one spelling only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite.ir.primitives import dtype_kind

Sizes = dict[str, int]
SPELLINGS = 2  # per specimen
inv = jnp.linalg.inv


class Spelling:
    """Random spellings of the same operations."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def _any(self, *forms: Callable[[], Any]) -> Any:
        return self._random.choice(forms)()

    def mm(self, a: Any, b: Any) -> Any:
        """Return the product of two matrices."""
        return self._any(
            lambda: a @ b,
            lambda: jnp.einsum("ij,jk->ik", a, b),
            lambda: jnp.einsum("kj,ik->ij", b, a),
            lambda: (b.T @ a.T).T,
            lambda: jnp.tensordot(a, b, 1),
            lambda: jax.vmap(lambda row: row @ b)(a),
            lambda: jax.vmap(lambda column: a @ column, 1, 1)(b),
            lambda: lax.dot_general(b, a, (((0,), (1,)), ((), ()))).T,
            lambda: (a[None] @ b[None])[0],
        )

    def add(self, a: Any, b: Any) -> Any:
        """Return the sum of two arrays."""
        return self._any(lambda: a + b, lambda: b + a, lambda: (a.T + b.T).T)

    def total(self, a: Any) -> Any:
        """Return the sum of all elements of a matrix."""
        return self._any(
            lambda: jnp.sum(a),
            lambda: a.sum(0).sum(),
            lambda: a.sum(1).sum(),
            lambda: jnp.einsum("ij->", a),
            lambda: jnp.sum(a.T.reshape(-1)),
        )

    def cat(self, a: Any, b: Any, axis: int) -> Any:
        """Return the concatenation of two matrices along an axis."""
        return self._any(
            lambda: jnp.concatenate([a, b], axis), lambda: jnp.concatenate([a.T, b.T], 1 - axis).T
        )


@dataclass(frozen=True, slots=True)
class Specimen:
    """A program in which a rule may fire.

    name: its name. shapes: one word per argument, one letter per axis; `n!7` is an array of n
    indices from -1 to 7 (both ends are out of range), `*do` is frozen. fun: the function. kinds:
    the dtypes it takes, as the first letters of float, complex, int; F is float of at least 32
    bits. small: letters of sizes that are small relative to the others.
    """

    name: str
    shapes: tuple[str, ...]
    fun: Callable[..., Any] = field(compare=False)
    kinds: str = "fci"
    small: tuple[str, ...] = ("r", "s")

    def takes(self, dtype: str) -> bool:
        """Return True if the specimen is defined at a dtype."""
        kind = dtype_kind(dtype)
        return kind in self.kinds or (
            kind == "f" and "F" in self.kinds and jnp.finfo(dtype).bits > 16
        )

    def frozen(self) -> frozenset[int]:
        """Return the numbers of the frozen arguments."""
        return frozenset(k for k, word in enumerate(self.shapes) if word.startswith("*"))

    def avals(self, sizes: Sizes | None, dtype: str) -> list[jax.ShapeDtypeStruct]:
        """Return the arguments' shapes and dtypes; sizes default to the usual ones."""
        table = sizes or size_tables(self, 0)[0]
        out = []
        for word in self.shapes:
            letters, _, limit = word.lstrip("*").partition("!")
            shape = tuple(table[c] for c in letters)
            out.append(jax.ShapeDtypeStruct(shape, jnp.dtype("int32" if limit else dtype)))
        return out


def size_tables(specimen: Specimen, seed: int) -> list[Sizes]:
    """Return tables of sizes: distinct sizes, all 1, all 0, and mixtures of 0 to 3."""
    letters = sorted({c for word in specimen.shapes for c in word.split("!")[0].lstrip("*")})
    rng = random.Random(seed)
    usual = dict(zip(letters, rng.sample(range(8, 24), len(letters)), strict=True))
    usual.update({c: k + 2 for k, c in enumerate(specimen.small) if c in usual})
    out = [usual, dict.fromkeys(letters, 1), dict.fromkeys(letters, 0)]
    for choices in ((1, 2, 3), (0, 1, 3)):
        out.append({c: rng.choice(choices) for c in letters})
    return out


def arguments(
    specimen: Specimen, sizes: Sizes, dtype: str, scales: Iterable[tuple[float, float]]
) -> Iterator[list[np.ndarray]]:
    """Yield random arguments: one set per (factor, offset), then one with a factor per argument."""
    rng = np.random.default_rng(0)
    avals = specimen.avals(sizes, dtype)
    pairs = list(zip(avals, specimen.shapes, strict=True))
    for factor, offset in scales:
        yield [_sample(rng, a, w, factor, offset) for a, w in pairs]
    is_wide = dtype == "float64"
    factors = 10.0 ** rng.integers(-3, 4, len(avals)) if is_wide else np.ones(len(avals))
    yield [_sample(rng, a, w, f, 0.0) for (a, w), f in zip(pairs, factors, strict=True)]


def _sample(rng: Any, aval: Any, word: str, factor: float, offset: float) -> np.ndarray:
    limit = word.partition("!")[2]
    kind = dtype_kind(str(aval.dtype))
    if limit:
        return rng.integers(-1, int(limit) + 1, aval.shape).astype(aval.dtype)
    if kind in "iu":
        info = np.iinfo(aval.dtype)
        return rng.integers(info.min, info.max, aval.shape, aval.dtype, endpoint=True)
    x = rng.standard_normal(aval.shape)
    if kind == "c":
        x = x + 1j * rng.standard_normal(aval.shape)
    return np.asarray(factor * x + offset).astype(aval.dtype)


def _far(x: Any, y: Any) -> Any:
    return x[:, None] - y[None]


def _eye(a: Any) -> Any:
    return jnp.eye(len(a), dtype=a.dtype)


def _square(a: Any) -> Any:
    return jnp.ones((len(a), len(a)), a.dtype)


def _one_hot(i: Any, table: Any) -> Any:
    return jax.nn.one_hot(i, len(table), dtype=table.dtype)


def _well(a: Any) -> Any:
    """Return a matrix without an eigenvalue near zero, whatever the scale."""
    return a + (1 + 8 * jnp.max(jnp.abs(a), initial=0)) * _eye(a)


def _solved(s: Spelling, u: Any, b: Any) -> Any:
    return jnp.linalg.solve((1 + jnp.sum(u * u)) * _eye(u) + s.mm(u, u.T), b)


def _convolve(s: Spelling, x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _batch_norm(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda s, x, w, gain, shift, mean: (layer(s, x, w) - mean) * gain + shift


# By name: shapes, the program of a spelling and arrays, and the dtypes that it takes, as in
# `Specimen`; with a "+", the program needs an element to read.
Table = dict[str, tuple]

# fmt: off
CHAINS: Table = {
    "chain": ("ij,jk,kl", lambda s, a, b, c: s.mm(s.mm(a, b), c)),
    "chain of four": ("ij,jk,kl,lr", lambda s, a, b, c, d: s.mm(s.mm(a, b), s.mm(c, d))),
    "chain on a vector": ("ij,jk,k", lambda s, a, b, v: s.mm(a, b) @ v),
    "batched chain": ("bij,bjk,bkl", lambda s, a, b, c: (a @ b) @ c),
    "Gram": ("ij,ik", lambda s, a, b: s.mm(s.mm(b.T, a), s.mm(a.T, b))),
    "linear attention": ("nd,md,me", lambda s, q, k, v: s.mm(s.mm(q, k.T), v)),
    "scaled product": ("ij,jk,kl", lambda s, a, b, c: s.mm(2 * s.mm(a, 3 * b), c)),
    "diagonal scaling": ("ij,j,jk,k", lambda s, a, d, b, e: s.mm(a * d, b) * e),
    "sum of a product": ("ij,jk", lambda s, a, b: s.total(s.mm(a, b))),
    "trace of a product": ("ij,ji", lambda s, a, b: jnp.trace(s.mm(a, b))),
    "diagonal of a product": ("ij,ji", lambda s, a, b: jnp.diagonal(s.mm(a, b))),
    "a count": ("ij,k", lambda s, a, v: jnp.sum(jnp.einsum("ij,k->ijk", a, v), 1)),
}

SUMS: Table = {
    "LoRA": ("nd,do,dr,ro", lambda s, x, W, A, B: s.mm(x, s.add(W, s.mm(A, B)))),
    "scaled LoRA": ("nd,do,dr,ro", lambda s, x, W, A, B: s.mm(x, W - 3 * s.mm(A, B))),
    "two adapters": ("nd,do,dr,ro,ds,so",
        lambda s, x, W, A, B, C, D: s.mm(x, s.add(W, s.add(s.mm(A, B), s.mm(C, D))))),
    "shared left operand": ("nd,do,do", lambda s, x, V, W: s.add(s.mm(x, V), s.mm(x, W))),
    "shared right operand": ("nd,nd,do", lambda s, x, y, W: s.mm(x, W) - s.mm(y, W)),
    "shared, scaled": ("nd,do,do", lambda s, x, V, W: 2 * s.mm(x, V) + 3 * s.mm(x, W)),
    "shared, and more": ("nd,do,do,no",
        lambda s, x, V, W, c: s.add(c, s.add(s.mm(x, V), s.mm(x, W)))),
    "shared on both sides": ("nd,de,ef,ef,fo",
        lambda s, x, U, V, W, D: s.mm(s.mm(s.mm(x, U), V), D) + s.mm(s.mm(s.mm(x, U), W), D)),
    "identity plus": ("nd,dd", lambda s, x, W: s.add(x, s.mm(x, W))),
    "nested sums": ("ij,ij,ij", lambda s, a, b, c: (a + 2 * b) + (a + (b + c))),
    "nested differences": ("ij,ij,ij", lambda s, a, b, c: (a - b) - (c - 2 * a)),
    "a sum twice": ("ij,ij,jk", lambda s, a, b, c: s.mm(s.add(a, s.add(a, b)), c)),
    "distances": ("nd,md", lambda s, x, y: jnp.sum(_far(x, y) ** 2)),
    "distances from each": ("nd,md", lambda s, x, y: jnp.sum(_far(x, y) ** 2, (1, 2))),
    "differences": ("nd,md", lambda s, x, y: jnp.sum(_far(x, 3 * y))),
    "scaled differences from each": ("nd,md,nd",
        lambda s, x, y, w: jnp.sum(w[:, None] * _far(x, y), 1)),
    "distances to each": ("n,m", lambda s, x, y: jnp.sum(_far(x, y) ** 2, 0)),
    "distances per dimension": ("nd,md",
        lambda s, x, y: jnp.einsum("ijk,ijk->k", _far(x, y), _far(x, y))),
    "scaled distances": ("nd,md",
        lambda s, x, y: 0.5 * jnp.sum(jnp.square(_far(3 * x, 3 * y))), "fc"),
}

PARTS: Table = {
    "an element": ("ij,jk", lambda s, a, b: s.mm(a, b)[-1, 0], "fci+"),
    "a row": ("ij,jk", lambda s, a, b: s.mm(a, b)[0], "fci+"),
    "a column": ("ij,jk", lambda s, a, b: s.mm(a, b)[:, -1], "fci+"),
    "every other row": ("ij,jk", lambda s, a, b: s.mm(a, b)[1::2, ::3]),
    "a slice of a slice": ("ij,jk", lambda s, a, b: s.mm(a, b)[1:][::2][:1]),
    "a slice of a sum": ("ij,ij", lambda s, a, b: (a + 2 * b)[:, 1:]),
    "a slice of a map": ("ij,ij", lambda s, a, b: jnp.tanh(a * b)[1:, :1], "fc"),
    "a slice of a reduction": ("ij", lambda s, a: jnp.max(a, 0, initial=0)[1:], "fi"),
    "a slice of a total": ("ijk", lambda s, a: jnp.sum(a, 1)[1:, ::2]),
    "a reversed order": ("ij,jk", lambda s, a, b: (s.mm(a, b) - 1)[1:, 1:].T),
    "a piece": ("ij,ik", lambda s, a, b: s.cat(a, b, 1)[:, 1:3]),
    "pieces": ("ij,ik", lambda s, a, b: jnp.split(jnp.concatenate([a, b], 1), [a.shape[1]], 1)),
}

INDEXED: Table = {
    "gathered rows": ("n!9,ij,jk", lambda s, x, a, b: s.mm(a, b)[x], "fci+"),
    "clipped rows": ("n!9,ij,jk", lambda s, x, a, b: s.mm(a, b).at[x].get(mode="clip"), "fci+"),
    "filled rows": ("n!9,ij,jk", lambda s, x, a, b: s.mm(a, b).at[x].get(mode="fill"), "fci+"),
    "gathered columns": ("n!9,ij,jk", lambda s, x, a, b: s.mm(a, b)[:, x], "fci+"),
    "gathered elements": ("n!9,n!9,ij,jk", lambda s, x, y, a, b: s.mm(a, b)[x, y], "fci+"),
    "an element of each row": ("i!9,ij,jk",
        lambda s, x, a, b: jnp.take_along_axis(s.mm(a, b), x[:, None], 1), "fci+"),
    "rows from a number on": ("n!9,ij,jk",
        lambda s, x, a, b: lax.dynamic_slice_in_dim(s.mm(a, b), x[0], len(a) // 2 + 1), "fci+"),
    "gathered sum": ("n!9,ij,ij", lambda s, x, a, b: jnp.take(s.add(a, 2 * b), x, 0), "fci+"),
    "gathered map": ("n!9,ij", lambda s, x, a: jnp.tanh(a)[x], "fc+"),
    "gathered total": ("n!9,ijk", lambda s, x, a: jnp.sum(a, 1)[x], "fci+"),
    "shifted diagonal": ("ij,ji", lambda s, a, b: jnp.diagonal(s.mm(a, b), 1)),
}

BLOCKS: Table = {
    "blocks, free": ("ij,kj,jl", lambda s, a, b, c: s.mm(s.cat(a, b, 0), c)),
    "blocks, summed": ("ij,ik,jl,kl", lambda s, a, b, c, d: s.mm(s.cat(a, b, 1), s.cat(c, d, 0))),
    "blocks, one side": ("ij,ik,l", lambda s, a, b, c: s.cat(a, b, 1)[:, :, None] * c),
    "blocks of one matrix": ("ij,ik,l", lambda s, a, b, c: jnp.sum(s.cat(a, b, 1), 1)[:, None] * c),
    "zero block": ("ij,jl",
        lambda s, a, c: s.mm(s.cat(a, jnp.zeros_like(a), 1), jnp.concatenate([c, c], 0))),
    "2 by 2 blocks": ("ij,ik,lj,lk,j,k",
        lambda s, a, b, c, d, x, y: jnp.block([[a, b], [c, d]]) @ jnp.concatenate([x, y])),
    "adapters beside each other": ("nd,dr,ds,rm,sm",
        lambda s, x, A, B, C, D: s.mm(s.mm(x, s.cat(A, B, 1)), s.cat(C, D, 0))),
    "padded factor": (
        "ij,kl",
        lambda s, a, b: s.mm(
            jnp.pad(a, ((1, 0), (0, len(b)))),
            jnp.concatenate([jnp.ones((a.shape[1], b.shape[1]), b.dtype), b]),
        ),
    ),
    "Householder": ("i,ij", lambda s, v, a: s.mm(_eye(v) - 2 * jnp.outer(v, v), a)),
}

SPARSE: Table = {
    "one-hot rows": ("n!9,dk", lambda s, i, W: s.mm(_one_hot(i, W), W)),
    "one-hot columns": ("n!9,kd", lambda s, i, W: s.mm(W, _one_hot(i, W.T).T)),
    "diagonal matrix": ("i,ij", lambda s, d, a: s.mm(jnp.diag(d), a)),
    "diagonal on the right": ("ij,j", lambda s, a, d: s.mm(a, jnp.diag(d))),
    "identity matrix": ("ij", lambda s, a: s.mm(_eye(a), a)),
    "lower triangle of ones": ("ij", lambda s, a: s.mm(jnp.tril(_square(a)), a)),
    "upper triangle of ones": ("ij", lambda s, a: s.mm(jnp.triu(_square(a)), a)),
    "permutation of rows": ("n!9,ij", lambda s, x, a: s.mm(_eye(a)[x], a), "fci+"),
    "permutation of columns": ("n!9,ij",
        lambda s, x, a: s.mm(a, jnp.take(_eye(a.T), x, 0).T), "fc+"),
    "rows masked between products": ("i!9,ij,jk,kl",
        lambda s, m, a, b, c: s.mm(jnp.where(m[:, None] > 3, s.mm(a, b), 0), c)),
    "columns masked between products": ("l!9,ij,jk,kl",
        lambda s, m, a, b, c: s.mm(a, jnp.where(m > 3, 0, s.mm(b, c)))),
    "masked by a triangle": ("ii,ij", lambda s, m, a: s.mm(jnp.tril(m), a)),
}

INVERSES: Table = {
    "inverse of a product": ("ii,ii", lambda s, a, b: inv(s.mm(_well(a), _well(b))), "F"),
    "inverse of a transpose": ("ii,ij", lambda s, a, b: s.mm(inv(_well(a).T), b), "F"),
    "inverse times a vector": ("ii,i", lambda s, a, v: inv(_well(a)) @ v, "F"),
    "inverse times a matrix": ("ii,ij", lambda s, a, b: s.mm(inv(_well(a)), b), "F"),
    "matrix times an inverse": ("ji,ii", lambda s, b, a: s.mm(b, inv(_well(a))), "F"),
    "solve with a low-rank update": ("ir,ij", _solved, "F"),
    "low-rank solve, read through it": ("ir,ij", lambda s, u, b: s.mm(u.T, _solved(s, u, b)), "F"),
    "low-rank solve, projected": ("ir,ij",
        lambda s, u, b: s.mm(s.mm(u, u.T), _solved(s, u, b)), "F"),
    "low-rank solve, of its factor": ("ir", lambda s, u: _solved(s, u, u), "F"),
    "low-rank solve, of a product": ("ir,rj",
        lambda s, u, x: s.mm(u.T, _solved(s, u, s.mm(u, x))), "F"),
    "low-rank solve, between two": ("ir,i,i",
        lambda s, u, a, b: (a @ _solved(s, u, b)) * (u.T @ a), "F"),
    "low-rank solve, squared": ("ir,i",
        lambda s, u, b: jnp.outer(z := _solved(s, u, b), z) @ u, "F"),
    "inverse twice": ("ii,i", lambda s, a, v: inv(inv(_well(a))) @ v, "F"),
    "inverse of a scaled matrix": ("ii,i", lambda s, a, v: inv(3 * _well(a)) @ v, "F"),
    "inverse of a diagonal": ("i,ij", lambda s, d, b: s.mm(inv(jnp.diag(1 + d * d)), b), "F"),
    "inverse of a low-rank update": ("i,ir,i",
        lambda s, d, u, v: inv(jnp.diag(1 + d * d) + s.mm(u, u.T)) @ v, "F"),
}

FROZEN: Table = {
    "scaled linear layer": ("nd,*do,*o", lambda s, x, W, g: s.mm(x, W) * g),
    "linear layer with two biases": ("nd,*do,*o,*o", lambda s, x, W, b, c: s.mm(x, W) + b + c),
    "normalised linear layer": ("nd,*do,*o,*o,*o", _batch_norm(Spelling.mm), "F"),
    "gain before a linear layer": ("nd,*d,*do", lambda s, x, g, W: s.mm(x * g, W)),
    "normalised convolution": ("bhwc,*rscf,*f,*f,*f", _batch_norm(_convolve), "F+"),
    "scaled convolution": ("bhwc,*rscf,*f", lambda s, x, w, g: _convolve(s, x, w) * g, "F+"),
    "merged adapter": ("nd,*do,*dr,*ro", lambda s, x, W, A, B: s.mm(x, W + s.mm(A, B))),
}
# fmt: on


def _specimen(k: int, seed: int, name: str, shapes: str, fun: Any, kinds: str = "fci") -> Specimen:
    """Return the program of row `k` of a table; its spelling is built again at every trace.

    A program that reads an element returns its first argument on empty arrays.
    """

    def program(*args: Any) -> Any:
        if "+" in kinds and any(0 in a.shape for a in args):
            return args[0]
        return fun(Spelling(1000 * k + seed), *args)

    return Specimen(f"{name} #{seed}", tuple(shapes.split(",")), program, kinds.rstrip("+"))


SPECIMENS = tuple(
    _specimen(k, seed, name, *row)
    for seed in range(SPELLINGS)
    for table in (CHAINS, SUMS, PARTS, INDEXED, BLOCKS, SPARSE, INVERSES, FROZEN)
    for k, (name, row) in enumerate(table.items())
)
