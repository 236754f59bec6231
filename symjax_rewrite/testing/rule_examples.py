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


class Spelling:
    """Random spellings of the same operations.

    Example:
        >>> s = Spelling(0)
        >>> s.mm(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
        (2, 4)
    """

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
            lambda: jnp.concatenate([a, b], axis),
            lambda: jnp.concatenate([a.T, b.T], 1 - axis).T,
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

    def letters(self) -> list[str]:
        """Return the named sizes."""
        return sorted({c for word in self.shapes for c in word.split("!")[0].lstrip("*")})

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
    letters = specimen.letters()
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
    for factor, offset in scales:
        yield [
            _sample(rng, a, w, factor, offset) for a, w in zip(avals, specimen.shapes, strict=True)
        ]
    factors = (
        (10.0 ** rng.integers(-3, 4, len(avals))) if dtype == "float64" else np.ones(len(avals))
    )
    yield [
        _sample(rng, a, w, f, 0.0) for a, w, f in zip(avals, specimen.shapes, factors, strict=True)
    ]


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


def _chains(s: Spelling) -> Iterator[Specimen]:
    yield _of("chain", "ij,jk,kl", lambda a, b, c: s.mm(s.mm(a, b), c))
    yield _of("chain of four", "ij,jk,kl,lr", lambda a, b, c, d: s.mm(s.mm(a, b), s.mm(c, d)))
    yield _of("chain on a vector", "ij,jk,k", lambda a, b, v: s.mm(a, b) @ v)
    yield _of("batched chain", "bij,bjk,bkl", lambda a, b, c: (a @ b) @ c)
    yield _of("Gram", "ij,ik", lambda a, b: s.mm(s.mm(b.T, a), s.mm(a.T, b)))
    yield _of("linear attention", "nd,md,me", lambda q, k, v: s.mm(s.mm(q, k.T), v))
    yield _of("scaled product", "ij,jk,kl", lambda a, b, c: s.mm(2 * s.mm(a, 3 * b), c))
    yield _of("diagonal scaling", "ij,j,jk,k", lambda a, d, b, e: s.mm(a * d, b) * e)
    yield _of("sum of a product", "ij,jk", lambda a, b: s.total(s.mm(a, b)))
    yield _of("trace of a product", "ij,ji", lambda a, b: jnp.trace(s.mm(a, b)))
    yield _of("diagonal of a product", "ij,ji", lambda a, b: jnp.diagonal(s.mm(a, b)))
    yield _of("a count", "ij,k", lambda a, v: jnp.sum(jnp.einsum("ij,k->ijk", a, v), 1))


def _sums(s: Spelling) -> Iterator[Specimen]:
    yield _of("LoRA", "nd,do,dr,ro", lambda x, W, A, B: s.mm(x, s.add(W, s.mm(A, B))))
    yield _of("scaled LoRA", "nd,do,dr,ro", lambda x, W, A, B: s.mm(x, W - 3 * s.mm(A, B)))
    yield _of(
        "two adapters",
        "nd,do,dr,ro,ds,so",
        lambda x, W, A, B, C, D: s.mm(x, s.add(W, s.add(s.mm(A, B), s.mm(C, D)))),
    )
    yield _of("shared left operand", "nd,do,do", lambda x, V, W: s.add(s.mm(x, V), s.mm(x, W)))
    yield _of("shared right operand", "nd,nd,do", lambda x, y, W: s.mm(x, W) - s.mm(y, W))
    yield _of("shared, scaled", "nd,do,do", lambda x, V, W: 2 * s.mm(x, V) + 3 * s.mm(x, W))
    yield _of(
        "shared, and more",
        "nd,do,do,no",
        lambda x, V, W, c: s.add(c, s.add(s.mm(x, V), s.mm(x, W))),
    )
    yield _of(
        "shared on both sides",
        "nd,de,ef,ef,fo",
        lambda x, U, V, W, D: s.mm(s.mm(s.mm(x, U), V), D) + s.mm(s.mm(s.mm(x, U), W), D),
    )
    yield _of("identity plus", "nd,dd", lambda x, W: s.add(x, s.mm(x, W)))
    yield _of("nested sums", "ij,ij,ij", lambda a, b, c: (a + 2 * b) + (a + (b + c)))
    yield _of("nested differences", "ij,ij,ij", lambda a, b, c: (a - b) - (c - 2 * a))
    yield _of("a sum twice", "ij,ij,jk", lambda a, b, c: s.mm(s.add(a, s.add(a, b)), c))
    yield _of("distances", "nd,md", lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2), kinds="fci")
    yield _of(
        "distances from each", "nd,md", lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, (1, 2))
    )
    yield _of("differences", "nd,md", lambda x, y: jnp.sum(x[:, None] - 3 * y[None]), kinds="fci")
    yield _of(
        "scaled differences from each",
        "nd,md,nd",
        lambda x, y, w: jnp.sum(w[:, None] * (x[:, None] - y[None]), 1),
    )
    yield _of("distances to each", "n,m", lambda x, y: jnp.sum((x[:, None] - y[None]) ** 2, 0))
    yield _of(
        "distances per dimension",
        "nd,md",
        lambda x, y: jnp.einsum("ijk,ijk->k", x[:, None] - y[None], x[:, None] - y[None]),
    )
    yield _of(
        "scaled distances",
        "nd,md",
        lambda x, y: 0.5 * jnp.sum(jnp.square(3 * x[:, None] - 3 * y[None])),
        kinds="fc",
    )


def _parts(s: Spelling) -> Iterator[Specimen]:
    yield _of("an element", "ij,jk", lambda a, b: s.mm(a, b)[-1, 0], at_least_one=True)
    yield _of("a row", "ij,jk", lambda a, b: s.mm(a, b)[0], at_least_one=True)
    yield _of("a column", "ij,jk", lambda a, b: s.mm(a, b)[:, -1], at_least_one=True)
    yield _of("every other row", "ij,jk", lambda a, b: s.mm(a, b)[1::2, ::3])
    yield _of("a slice of a slice", "ij,jk", lambda a, b: s.mm(a, b)[1:][::2][:1])
    yield _of("a slice of a sum", "ij,ij", lambda a, b: (a + 2 * b)[:, 1:])
    yield _of("a slice of a map", "ij,ij", lambda a, b: jnp.tanh(a * b)[1:, :1], kinds="fc")
    yield _of("a slice of a reduction", "ij", lambda a: jnp.max(a, 0, initial=0)[1:], kinds="fi")
    yield _of("a slice of a total", "ijk", lambda a: jnp.sum(a, 1)[1:, ::2])
    yield _of("a reversed order", "ij,jk", lambda a, b: (s.mm(a, b) - 1)[1:, 1:].T)
    yield _of("a piece", "ij,ik", lambda a, b: s.cat(a, b, 1)[:, 1:3])
    yield _of(
        "pieces", "ij,ik", lambda a, b: jnp.split(jnp.concatenate([a, b], 1), [a.shape[1]], 1)
    )


def _indexed(s: Spelling) -> Iterator[Specimen]:
    yield _of("gathered rows", "n!9,ij,jk", lambda x, a, b: s.mm(a, b)[x], at_least_one=True)
    yield _of("clipped rows", "n!9,ij,jk", lambda x, a, b: _rows(s.mm(a, b), x, "clip"), True)
    yield _of("filled rows", "n!9,ij,jk", lambda x, a, b: _rows(s.mm(a, b), x, "fill"), True)
    yield _of("gathered columns", "n!9,ij,jk", lambda x, a, b: s.mm(a, b)[:, x], True)
    yield _of("gathered elements", "n!9,n!9,ij,jk", lambda x, y, a, b: s.mm(a, b)[x, y], True)
    yield _of(
        "an element of each row",
        "i!9,ij,jk",
        lambda x, a, b: jnp.take_along_axis(s.mm(a, b), x[:, None], 1),
        at_least_one=True,
    )
    yield _of(
        "rows from a number on",
        "n!9,ij,jk",
        lambda x, a, b: lax.dynamic_slice_in_dim(s.mm(a, b), x[0], len(a) // 2 + 1),
        at_least_one=True,
    )
    yield _of("gathered sum", "n!9,ij,ij", lambda x, a, b: jnp.take(s.add(a, 2 * b), x, 0), True)
    yield _of("gathered map", "n!9,ij", lambda x, a: jnp.tanh(a)[x], True, kinds="fc")
    yield _of("gathered total", "n!9,ijk", lambda x, a: jnp.sum(a, 1)[x], True)
    yield _of("shifted diagonal", "ij,ji", lambda a, b: jnp.diagonal(s.mm(a, b), 1))


def _rows(a: Any, x: Any, mode: str) -> Any:
    return a.at[x].get(mode=mode)


def _blocks(s: Spelling) -> Iterator[Specimen]:
    yield _of("blocks, free", "ij,kj,jl", lambda a, b, c: s.mm(s.cat(a, b, 0), c))
    yield _of(
        "blocks, summed", "ij,ik,jl,kl", lambda a, b, c, d: s.mm(s.cat(a, b, 1), s.cat(c, d, 0))
    )
    yield _of("blocks, one side", "ij,ik,l", lambda a, b, c: s.cat(a, b, 1)[:, :, None] * c)
    yield _of(
        "blocks of one matrix", "ij,ik,l", lambda a, b, c: jnp.sum(s.cat(a, b, 1), 1)[:, None] * c
    )
    yield _of(
        "zero block",
        "ij,jl",
        lambda a, c: s.mm(s.cat(a, jnp.zeros_like(a), 1), jnp.concatenate([c, c], 0)),
    )
    yield _of(
        "2 by 2 blocks",
        "ij,ik,lj,lk,j,k",
        lambda a, b, c, d, x, y: jnp.block([[a, b], [c, d]]) @ jnp.concatenate([x, y]),
    )
    yield _of(
        "two adapters beside each other",
        "nd,dr,ds,rm,sm",
        lambda x, A, B, C, D: s.mm(s.mm(x, s.cat(A, B, 1)), s.cat(C, D, 0)),
    )

    yield _of(
        "padded factor",
        "ij,kl",
        lambda a, b: s.mm(
            jnp.pad(a, ((1, 0), (0, len(b)))),
            jnp.concatenate([jnp.ones((a.shape[1], b.shape[1]), b.dtype), b]),
        ),
    )
    yield _of(
        "Householder",
        "i,ij",
        lambda v, a: s.mm(jnp.eye(len(v), dtype=v.dtype) - 2 * jnp.outer(v, v), a),
    )


def _sparse(s: Spelling) -> Iterator[Specimen]:
    yield _of(
        "one-hot rows", "n!9,dk", lambda i, W: s.mm(jax.nn.one_hot(i, W.shape[0], dtype=W.dtype), W)
    )
    yield _of(
        "one-hot columns",
        "n!9,kd",
        lambda i, W: s.mm(W, jax.nn.one_hot(i, W.shape[1], dtype=W.dtype).T),
    )
    yield _of("diagonal matrix", "i,ij", lambda d, a: s.mm(jnp.diag(d), a))
    yield _of("diagonal on the right", "ij,j", lambda a, d: s.mm(a, jnp.diag(d)))
    yield _of("identity matrix", "ij", lambda a: s.mm(jnp.eye(a.shape[0], dtype=a.dtype), a))
    yield _of(
        "lower triangle of ones",
        "ij",
        lambda a: s.mm(jnp.tril(jnp.ones((a.shape[0],) * 2, a.dtype)), a),
    )
    yield _of(
        "upper triangle of ones",
        "ij",
        lambda a: s.mm(jnp.triu(jnp.ones((a.shape[0],) * 2, a.dtype)), a),
    )
    yield _of(
        "permutation of rows",
        "n!9,ij",
        lambda x, a: s.mm(jnp.eye(len(a), dtype=a.dtype)[x], a),
        at_least_one=True,
    )
    yield _of(
        "permutation of columns",
        "n!9,ij",
        lambda x, a: s.mm(a, jnp.take(jnp.eye(a.shape[1], dtype=a.dtype), x, 0).T),
        at_least_one=True,
        kinds="fc",
    )
    yield _of(
        "rows masked between products",
        "i!9,ij,jk,kl",
        lambda m, a, b, c: s.mm(jnp.where(m[:, None] > 3, s.mm(a, b), 0), c),
    )
    yield _of(
        "columns masked between products",
        "l!9,ij,jk,kl",
        lambda m, a, b, c: s.mm(a, jnp.where(m > 3, 0, s.mm(b, c))),
    )
    yield _of("masked by a triangle", "ii,ij", lambda m, a: s.mm(jnp.tril(m), a))


def _inverses(s: Spelling) -> Iterator[Specimen]:
    def well(a: Any) -> Any:  # no eigenvalue near zero, whatever the scale
        return a + (1 + 8 * jnp.max(jnp.abs(a), initial=0)) * jnp.eye(len(a), dtype=a.dtype)

    inv = jnp.linalg.inv
    yield _of("inverse of a product", "ii,ii", lambda a, b: inv(s.mm(well(a), well(b))), kinds="F")
    yield _of("inverse of a transpose", "ii,ij", lambda a, b: s.mm(inv(well(a).T), b), kinds="F")
    yield _of("inverse times a vector", "ii,i", lambda a, v: inv(well(a)) @ v, kinds="F")
    yield _of("inverse times a matrix", "ii,ij", lambda a, b: s.mm(inv(well(a)), b), kinds="F")
    yield _of("matrix times an inverse", "ji,ii", lambda b, a: s.mm(b, inv(well(a))), kinds="F")
    yield _of(
        "solve with a low-rank update",
        "ir,ij",
        lambda u, b: jnp.linalg.solve(
            (1 + jnp.sum(u * u)) * jnp.eye(len(u), dtype=u.dtype) + s.mm(u, u.T), b
        ),
        kinds="F",
    )
    yield from _low_rank_readouts(s)
    yield _of("inverse twice", "ii,i", lambda a, v: inv(inv(well(a))) @ v, kinds="F")
    yield _of("inverse of a scaled matrix", "ii,i", lambda a, v: inv(3 * well(a)) @ v, kinds="F")
    yield _of(
        "inverse of a diagonal", "i,ij", lambda d, b: s.mm(inv(jnp.diag(1 + d * d)), b), kinds="F"
    )
    yield _of(
        "inverse of a low-rank update",
        "i,ir,i",
        lambda d, u, v: inv(jnp.diag(1 + d * d) + s.mm(u, u.T)) @ v,
        kinds="F",
    )


def _low_rank_readouts(s: Spelling) -> Iterator[Specimen]:
    def solved(u: Any, b: Any) -> Any:
        scale = 1 + jnp.sum(u * u)
        return jnp.linalg.solve(scale * jnp.eye(len(u), dtype=u.dtype) + s.mm(u, u.T), b)

    name = "solve with a low-rank update"
    yield _of(f"{name}, read through it", "ir,ij", lambda u, b: s.mm(u.T, solved(u, b)), kinds="F")
    yield _of(
        f"{name}, projected", "ir,ij", lambda u, b: s.mm(s.mm(u, u.T), solved(u, b)), kinds="F"
    )
    yield _of(f"{name}, of its factor", "ir", lambda u: solved(u, u), kinds="F")
    yield _of(
        f"{name}, of a product", "ir,rj", lambda u, x: s.mm(u.T, solved(u, s.mm(u, x))), kinds="F"
    )
    yield _of(
        f"{name}, between two", "ir,i,i", lambda u, a, b: (a @ solved(u, b)) * (u.T @ a), kinds="F"
    )
    yield _of(
        f"{name}, squared", "ir,i", lambda u, b: jnp.outer(z := solved(u, b), z) @ u, kinds="F"
    )


def _frozen(s: Spelling) -> Iterator[Specimen]:
    yield _of("scaled linear layer", "nd,*do,*o", lambda x, W, g: s.mm(x, W) * g)
    yield _of("linear layer with two biases", "nd,*do,*o,*o", lambda x, W, b, c: s.mm(x, W) + b + c)
    yield _of("normalised linear layer", "nd,*do,*o,*o,*o", _batch_norm(s.mm), kinds="F")
    yield _of("gain before a linear layer", "nd,*d,*do", lambda x, g, W: s.mm(x * g, W))
    yield _of(
        "normalised convolution", "bhwc,*xycf,*f,*f,*f", _batch_norm(_convolve), True, kinds="F"
    )
    yield _of("scaled convolution", "bhwc,*xycf,*f", lambda x, w, g: _convolve(x, w) * g, True, "F")
    yield _of("merged adapter", "nd,*do,*dr,*ro", lambda x, W, A, B: s.mm(x, W + s.mm(A, B)))


def _batch_norm(layer: Callable[..., Any]) -> Callable[..., Any]:
    def program(x: Any, w: Any, gain: Any, shift: Any, mean: Any) -> Any:
        return (layer(x, w) - mean) * gain + shift

    return program


def _convolve(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _of(
    name: str, shapes: str, fun: Callable[..., Any], at_least_one: bool = False, kinds: str = "fci"
) -> Specimen:
    if at_least_one:
        return Specimen(name, tuple(shapes.split(",")), _guarded(fun), kinds)
    return Specimen(name, tuple(shapes.split(",")), fun, kinds)


def _guarded(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which on empty arrays (no element to read) returns its argument."""

    def program(*args: Any) -> Any:
        return fun(*args) if all(0 not in a.shape for a in args) else args[0]

    return program


def _all() -> tuple[Specimen, ...]:
    out = []
    for seed in range(SPELLINGS):
        for family in (_chains, _sums, _parts, _indexed, _blocks, _sparse, _inverses, _frozen):
            names = [p.name for p in family(Spelling(0))]
            for k, name in enumerate(names):
                out.append(_respelled(family, k, name, seed))
    return tuple(out)


def _respelled(
    family: Callable[[Spelling], Iterator[Specimen]], k: int, name: str, seed: int
) -> Specimen:
    """Return a specimen whose spelling is built again at every trace."""

    def program(*args: Any) -> Any:
        return list(family(Spelling(1000 * k + seed)))[k].fun(*args)

    made = list(family(Spelling(0)))[k]
    return Specimen(f"{name} #{seed}", made.shapes, program, made.kinds)


SPECIMENS = _all()
