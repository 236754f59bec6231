"""Attention as a fold over keys, for tests and experiments (imports spec.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.fold.spec import (
    Band,
    Contraction,
    Epilogue,
    ExpSums,
    FoldSpec,
    Operand,
    Tile,
    WeightedTerm,
)
from symjax_rewrite.pallas_kernels.monoid import shift_of

Array = Any


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention of q [b, m, h, g, d] with k [b, n, h, d] and v [b, n, h, e].

    Args:
        batch: b.
        queries: m.
        keys: n.
        heads: h, the key heads.
        groups: g, query heads per key head.
        width: d.
        value_width: e; as `width` if left out.
        dtype: of all four arrays.
        scale: of the scores; 1/√d if left out.
        causal: True if query i attends to keys up to i.
        window: (keys back, keys ahead) that a query attends to; None for no bound.
        softcap: scores become `softcap·tanh(score / softcap)`; 0 for none.
        bias: axes of an additive array, e.g. ("h", "g", "m", "n"); empty for none.
        mask: axes of a boolean array, True where a query attends to a key; empty for none.
        segments: int32 numbers [b, m] and [b, n]; a query attends to keys of equal number.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    width: int
    groups: int = 1
    value_width: int = 0
    dtype: str = "float32"
    scale: float = 0.0
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    bias: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()
    segments: bool = False

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Return every axis with its size."""
        values = (self.batch, self.heads, self.groups, self.queries, self.keys, self.width)
        return (*zip("bhgmnd", values, strict=True), ("e", self.value_width or self.width))

    @property
    def extras(self) -> tuple[Operand, ...]:
        """Return the operands after q, k, v: bias, mask, segments of queries, of keys."""
        out = []
        if self.bias:
            out.append(Operand(self.bias, self.dtype))
        if self.mask:
            out.append(Operand(self.mask, "bool"))
        if self.segments:
            out += [Operand(("b", "m"), "int32"), Operand(("b", "n"), "int32")]
        return tuple(out)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """Return the least and the greatest key - query that is not masked."""
        back, ahead = self.window
        ahead = 0 if self.causal else ahead
        return (None if back is None else -back, ahead)

    def score(self, dot: Array, extras: tuple[Array, ...], query: Array, key: Array) -> Array:
        """Return one tile of masked scores."""
        rest = list(extras)
        s = dot * (self.scale or self.width**-0.5)
        if self.softcap:
            s = self.softcap * jnp.tanh(s / self.softcap)
        if self.bias:
            s = s + rest.pop(0).astype(s.dtype)
        seen = [rest.pop(0)] if self.mask else []
        if self.segments:
            seen.append(rest[0] == rest[1])
        lower, upper = self.band
        if upper is not None:
            seen.append(key - query <= upper)
        if lower is not None:
            seen.append(key - query >= lower)
        for condition in seen:
            s = jnp.where(condition, s, -jnp.inf)
        return s


Q, K, V = ("b", "m", "h", "g", "d"), ("b", "n", "h", "d"), ("b", "n", "h", "e")
OUT, ROW = ("b", "m", "h", "g", "e"), ("b", "h", "g", "m")


def forward(a: Attention) -> FoldSpec:
    """Build the forward fold.

    Operands: q, k, v, extras. Results: out [b, m, h, g, e] and log-sum-exp [b, h, g, m].
    """

    def tile(dots: tuple, extras: tuple, i: Array, j: Array) -> Array:
        return a.score(dots[0], extras, i, j)

    reads = tuple(range(3, 3 + len(a.extras)))
    return FoldSpec(
        sizes=a.sizes,
        batch=("b", "h", "g"),
        row="m",
        col="n",
        operands=(*(Operand(axes, a.dtype) for axes in (Q, K, V)), *a.extras),
        contractions=(Contraction(0, 1, ("d",)),),
        tile=Tile(tile, reads, key=("score", a)),
        outputs=(ExpSums((WeightedTerm(), WeightedTerm(2, round_to=rounding(a)))),),
        band=Band(*a.band),
        epilogue=normalised(a.dtype, OUT, ROW),
    )


def normalised(dtype: str, out: tuple[str, ...], row: tuple[str, ...]) -> Epilogue:
    """Return the epilogue of a softmax's sums: the weighted mean in a dtype, and the log-sum-exp.

    out, row: the axes of these results.
    """

    def finished(results: tuple, values: tuple) -> tuple[Array, Array]:
        del values
        top, total, weighted = results[0]
        return (weighted / total).astype(dtype), shift_of(top) + jnp.log(total)

    return Epilogue(finished, (out, row), key=("normalised", dtype))


def rounding(a: Attention) -> str | None:
    """Return the dtype that probabilities are rounded to before a product."""
    return None if a.dtype == "float32" else a.dtype
