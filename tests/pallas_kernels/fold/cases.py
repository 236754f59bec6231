"""Folds with their naive formulas in NumPy: one list for every backend's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    Band,
    ColumnSums,
    Contraction,
    Epilogue,
    ExpSums,
    Extremum,
    FoldSpec,
    Operand,
    Sums,
    Tile,
    TopK,
    WeightedTerm,
)

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Case:
    """A fold, the draw of its operands, and its results, flat and in f64."""

    name: str
    spec: FoldSpec
    naive: Callable[..., list[np.ndarray]]
    make: Callable[[FoldSpec], Arrays] = lambda spec: draw(spec)

    def __str__(self) -> str:
        return self.name


def draw(spec: FoldSpec, seed: int = 0) -> Arrays:
    """Random operands: normal floats, booleans mostly true, sorted small integers."""
    rng, out = np.random.default_rng(seed), []
    for number, operand in enumerate(spec.operands):
        shape = spec.shape(number)
        if operand.dtype == "bool":
            out.append(rng.random(shape) < 0.7)
        elif operand.dtype == "int32":
            out.append(np.sort(rng.integers(0, 4, shape), axis=-1).astype(np.int32))
        else:
            out.append(rng.normal(size=shape).astype(operand.dtype))
    return tuple(out)


def sizes(**named: int) -> tuple[tuple[str, int], ...]:
    return tuple(named.items())


def exp_sums(t: np.ndarray, *weights: Any) -> list[np.ndarray]:
    """Maximum, Σ e^(t - shift) and its weighted sums over the last axis."""
    with np.errstate(all="ignore"):
        top = t.max(-1, initial=-np.inf)
        p = np.exp(t - np.where(np.isfinite(top), top, 0)[..., None])
        return [top, p.sum(-1), *(np.einsum("...mn,...n e->...me", p, w) for w in weights)]


def attention_naive(a: Attention) -> Callable[..., list[np.ndarray]]:
    """Scores, softmax and values, whole and in f64."""

    def naive(q: Any, k: Any, v: Any, *extras: Any) -> list[np.ndarray]:
        s = np.einsum("bmhgd,bnhd->bhgmn", *(x.astype(np.float64) for x in (q, k)))
        s = s * (a.scale or a.width**-0.5)
        s = a.softcap * np.tanh(s / a.softcap) if a.softcap else s
        rest = [_spread(x, o.axes) for x, o in zip(extras, a.extras, strict=True)]
        s = s + rest.pop(0).astype(np.float64) if a.bias else s
        i, j = np.arange(a.queries)[:, None], np.arange(a.keys)[None, :]
        lower, upper = a.band
        seen = np.ones_like(s, bool)
        seen &= True if upper is None else j - i <= upper
        seen &= True if lower is None else j - i >= lower
        seen &= rest.pop(0) if a.mask else True
        seen &= rest[0] == rest[1] if a.segments else True
        s = np.where(seen, s, -np.inf)
        with np.errstate(all="ignore"):
            top = s.max(-1)
            shift = np.where(np.isfinite(top), top, 0)
            p = np.exp(s - shift[..., None])
            total = p.sum(-1)
            out = np.einsum("bhgmn,bnhe->bmhge", p / total[..., None], v.astype(np.float64))
            return [out, shift + np.log(total)]

    return naive


def _spread(x: Any, axes: tuple[str, ...]) -> Any:
    full = "bhgmn"
    order = sorted(axes, key=full.index)
    x = np.transpose(x, [axes.index(c) for c in order])
    return np.expand_dims(x, [k for k, c in enumerate(full) if c not in axes])


def attention(name: str, a: Attention) -> Case:
    return Case(name, forward(a), attention_naive(a))


ATTENTION = [
    attention("plain", Attention(2, 40, 56, 2, 16)),
    attention("causal", Attention(1, 70, 70, 2, 24, causal=True)),
    attention("grouped", Attention(2, 33, 47, 2, 16, groups=3, causal=True)),
    attention("multi-query", Attention(2, 17, 65, 1, 16, groups=4)),
    attention("head of 72", Attention(1, 64, 64, 1, 72, causal=True)),
    attention("head of 96", Attention(1, 64, 48, 1, 96)),
    attention("head of 256", Attention(1, 32, 32, 1, 256)),
    attention("wider values", Attention(1, 40, 40, 2, 16, value_width=40)),
    attention("window", Attention(1, 90, 90, 1, 16, window=(9, 4))),
    attention("causal window", Attention(1, 90, 90, 1, 16, causal=True, window=(17, None))),
    attention("softcap", Attention(1, 40, 40, 1, 16, softcap=2.0)),
    attention("bias", Attention(2, 40, 40, 2, 16, bias=("h", "g", "m", "n"))),
    attention("bias of keys", Attention(2, 40, 40, 2, 16, bias=("n", "b"))),
    attention("mask", Attention(2, 40, 40, 2, 16, mask=("b", "m", "n"))),
    attention("padding", Attention(3, 40, 40, 2, 16, mask=("b", "n"))),
    attention("segments", Attention(2, 64, 64, 2, 16, segments=True, causal=True)),
    attention("decode", Attention(3, 1, 200, 2, 16, groups=2)),
    attention("more keys", Attention(1, 20, 100, 1, 16, causal=True)),
    attention("more queries", Attention(1, 100, 20, 1, 16, causal=True)),
]


def cross_entropy(rows: int, words: int, width: int) -> Case:
    spec = FoldSpec(
        sizes=sizes(m=rows, n=words, d=width),
        batch=(),
        row="m",
        col="n",
        operands=(Operand(("m", "d")), Operand(("d", "n")), Operand(("m",), "int32")),
        contractions=(Contraction(0, 1, ("d",)),),
        tile=Tile(
            lambda dots, values, i, j: (dots[0], jnp.where(j == values[0], dots[0], 0.0)),
            reads=(2,),
            key="logits and the label's",
        ),
        outputs=(ExpSums(), Sums(tile=1)),
        epilogue=Epilogue(
            lambda r, v: (r[0][0] + jnp.log(r[0][1]) - r[1][0],), (("m",),), key="loss"
        ),
    )

    def naive(x: Any, w: Any, label: Any) -> list[np.ndarray]:
        t = x.astype(np.float64) @ w
        top, total = exp_sums(t)
        return [top + np.log(total) - t[np.arange(rows), label]]

    return Case(f"cross-entropy of width {width}", spec, naive)


def nbody(count: int) -> Case:
    def tile(dots: tuple, values: tuple, i: Any, j: Any) -> tuple:
        here, there, mass = values[:3], values[3:6], values[6]
        step = [b - a for a, b in zip(here, there, strict=True)]
        square = sum(s * s for s in step) + 1e-2
        return tuple(mass * s * square**-1.5 for s in step)

    spec = FoldSpec(
        sizes=sizes(m=count, n=count),
        batch=(),
        row="m",
        col="n",
        operands=(Operand(("m",)),) * 3 + (Operand(("n",)),) * 4,
        contractions=(),
        tile=Tile(tile, tuple(range(7)), key="gravity"),
        outputs=tuple(Sums(tile=k) for k in range(3)),
    )

    def naive(*arrays: Any) -> list[np.ndarray]:
        arrays = tuple(x.astype(np.float64) for x in arrays)
        step = np.stack(arrays[3:6])[:, None, :] - np.stack(arrays[:3])[:, :, None]
        pull = arrays[6] * step * ((step**2).sum(0) + 1e-2) ** -1.5
        return list(pull.sum(-1))

    def make(spec: FoldSpec) -> Arrays:
        x = draw(spec)
        return (*x[:3], *x[:3], np.abs(x[6]))

    return Case("N-body", spec, naive, make)


def pairwise(
    name: str, outputs: tuple, naive: Callable, tile: Callable | None = None, **changes: Any
) -> Case:
    """Negative squared distance of 37 and 83 points of width 5, in two batches."""

    def default(dots: tuple, values: tuple, i: Any, j: Any) -> Any:
        return 2 * dots[0] - values[0] - values[1]

    spec = FoldSpec(
        sizes=sizes(b=2, m=37, n=83, d=5, e=3, f=2),
        batch=("b",),
        row="m",
        col="n",
        operands=(
            Operand(("m", "d", "b")),
            Operand(("d", "n")),
            Operand(("b", "m")),
            Operand(("n",)),
            Operand(("b", "e", "n", "f")),
            Operand(("n", "b")),
        ),
        contractions=(Contraction(0, 1, ("d",)),),
        tile=Tile(tile or default, (2, 3), key=(name, "tile")),
        outputs=outputs,
    )

    def make(spec: FoldSpec) -> Arrays:
        x = [np.round(a) if name == "ties" else a for a in draw(spec)]
        return (x[0], x[1], (x[0] ** 2).sum(1).T.copy(), (x[1] ** 2).sum(0), x[4], x[5])

    def whole(*arrays: Any) -> list[np.ndarray]:
        x, y, xx, yy, *weights = (a.astype(np.float64) for a in arrays)
        t = 2 * np.einsum("mdb,dn->bmn", x, y) - xx[..., None] - yy
        return naive(t, *weights)

    return Case(name, replace(spec, **changes), whole, make)


def top(t: np.ndarray, k: int) -> list[np.ndarray]:
    order = np.argsort(-t, axis=-1, kind="stable")[..., :k]
    return [np.take_along_axis(t, order, -1), order]


def rbf(t: np.ndarray, w: np.ndarray, scalar: np.ndarray) -> list[np.ndarray]:
    p = np.exp(t)
    return [
        p.sum(-1),
        np.einsum("bmn,benf->bmef", p, w),
        np.einsum("bmn,nb->bm", p, scalar),
    ]


def near(dots: tuple, values: tuple, i: Any, j: Any) -> Any:
    return 2 * dots[0] - values[0] - values[1] > -1.0


def masked(t: np.ndarray) -> np.ndarray:
    j = np.arange(t.shape[-1])
    return np.where((j[:40, None] % 5 == 0)[: t.shape[-2]], -np.inf, t)


PAIRWISE = [
    pairwise(
        "RBF matvec",
        (Sums((WeightedTerm(), WeightedTerm(4), WeightedTerm(5))),),
        rbf,
        lambda d, v, i, j: jnp.exp(2 * d[0] - v[0] - v[1]),
    ),
    pairwise(
        "max and min", (Extremum("max"), Extremum("min")), lambda t, *_: [t.max(-1), t.min(-1)]
    ),
    pairwise(
        "any and all",
        (Extremum("any"), Extremum("all")),
        lambda t, *_: [(t > -1).any(-1), (t > -1).all(-1)],
        near,
    ),
    pairwise("count", (Sums(),), lambda t, *_: [(t > -1).sum(-1)], near),
    pairwise(
        "nearest",
        (ArgExtremum(True), ArgExtremum(False)),
        lambda t, *_: [t.max(-1), t.argmax(-1), t.min(-1), t.argmin(-1)],
    ),
    pairwise("top-k", (TopK(4),), lambda t, *_: top(t, 4)),
    pairwise("ties", (TopK(9), ArgExtremum()), lambda t, *_: [*top(t, 9), t.max(-1), t.argmax(-1)]),
    pairwise(
        "two values for one score",
        (ExpSums((WeightedTerm(), WeightedTerm(4), WeightedTerm(5))),),
        lambda t, w, s: [
            *exp_sums(t),
            np.einsum("bmn,benf->bmef", np.exp(t - t.max(-1, keepdims=True)), w),
            np.einsum("bmn,nb->bm", np.exp(t - t.max(-1, keepdims=True)), s),
        ],
    ),
    pairwise(
        "empty rows",
        (ExpSums((WeightedTerm(), WeightedTerm(5))),),
        lambda t, w, s: [
            *exp_sums(masked(t)),
            exp_sums(masked(t), s.T[..., None])[2][..., 0],
        ],
        lambda d, v, i, j: jnp.where(i % 5 == 0, -jnp.inf, 2 * d[0] - v[0] - v[1]),
    ),
    pairwise(
        "mask on the probabilities",
        (ExpSums((WeightedTerm(), WeightedTerm(factor=1), WeightedTerm(5, factor=1))),),
        lambda t, w, s: [
            *exp_sums(t),
            (np.exp(t - t.max(-1, keepdims=True)) * (t > -4)).sum(-1),
            np.einsum("bmn,nb->bm", np.exp(t - t.max(-1, keepdims=True)) * (t > -4), s),
        ],
        lambda d, v, i, j: (s := 2 * d[0] - v[0] - v[1], s > -4.0),
    ),
]


def both_ways() -> Case:
    """Sums over the columns and over the rows of one tile."""

    def tile(d: tuple, v: tuple, i: Any, j: Any) -> Any:
        return jnp.exp(2 * d[0] - v[0] - v[1]), i + j

    def whole(*arrays: Any) -> list[np.ndarray]:
        x, y, xx, yy, w, _ = (a.astype(np.float64) for a in arrays)
        p = np.exp(2 * np.einsum("mdb,dn->bmn", x, y) - xx[..., None] - yy)
        number = np.arange(p.shape[1])[:, None] + np.arange(p.shape[2])
        return [
            np.einsum("bmn,benf->bmef", p, w),
            p.sum(1),
            np.einsum("bmn,mdb->bnd", p * number, x),
            np.einsum("bmn,bm->bn", p, xx),
        ]

    outputs = (
        Sums((WeightedTerm(4),)),
        ColumnSums((WeightedTerm(), WeightedTerm(0, factor=1), WeightedTerm(2))),
    )
    return replace(pairwise("sums both ways", outputs, lambda *_: [], tile), naive=whole)


def length_masked() -> Case:
    """A decode step on a cache of which the first `length` places are filled."""
    a = Attention(3, 1, 300, 2, 16, groups=2)
    spec = forward(a)
    spec = replace(
        spec,
        epilogue=None,
        operands=(*spec.operands, Operand(("b",), "int32")),
        tile=Tile(
            lambda d, v, i, j: jnp.where(j < v[0], d[0] * 0.25, -jnp.inf), (3,), key="length"
        ),
        band=Band(length=3),
    )

    def naive(q: Any, k: Any, v: Any, length: Any) -> list[np.ndarray]:
        s = np.einsum("bmhgd,bnhd->bhgmn", q.astype(np.float64), k) * 0.25
        s = np.where(np.arange(300) < length[:, None, None, None, None], s, -np.inf)
        return exp_sums(s, np.moveaxis(v, 1, 2)[:, :, None].astype(np.float64))

    def make(spec: FoldSpec) -> Arrays:
        return (*draw(spec)[:3], np.array([300, 7, 129], np.int32))

    return Case("length of a cache", spec, naive, make)


CASES = [
    *ATTENTION,
    *PAIRWISE,
    cross_entropy(24, 150, 48),
    cross_entropy(20, 70, 300),
    nbody(50),
    length_masked(),
    both_ways(),
]
