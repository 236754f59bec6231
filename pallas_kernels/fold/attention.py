"""Attention as folds: forward over keys, gradients over keys and over queries (imports `fold`).

The specs are those that a router could build; tests, benchmarks and the cuDNN backend share them.
The backward pass recomputes the probabilities from the log-sum-exp (Dao 2023,
"FlashAttention-2"). dK and dV are a fold whose rows are the keys.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.fold.spec import (
    Band,
    Contraction,
    Epilogue,
    ExpSums,
    FoldSpec,
    Operand,
    Sums,
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

    def normalise(results: tuple, values: tuple) -> tuple[Array, Array]:
        del values
        top, total, weighted = results[0]
        return (weighted / total).astype(a.dtype), shift_of(top) + jnp.log(total)

    reads = tuple(range(3, 3 + len(a.extras)))
    return FoldSpec(
        sizes=a.sizes,
        batch=("b", "h", "g"),
        row="m",
        col="n",
        operands=(*(Operand(axes, a.dtype) for axes in (Q, K, V)), *a.extras),
        contractions=(Contraction(0, 1, ("d",)),),
        tile=Tile(tile, reads, key=("score", a), form=a),
        outputs=(ExpSums((WeightedTerm(), WeightedTerm(2, round_to=_rounding(a)))),),
        band=Band(*a.band),
        epilogue=Epilogue(normalise, (OUT, ROW), key=("normalise", a.dtype)),
    )


def backward_queries(a: Attention) -> FoldSpec:
    """Build the fold of dQ.

    Operands: q, k, v, dout, lse, delta, extras. Result: dq [b, m, h, g, d].
    """
    probabilities = _probabilities(a)

    def tile(dots: tuple, values: tuple, i: Array, j: Array) -> Array:
        return probabilities(dots, values[:2], values[2:], i, j)[1]

    return FoldSpec(
        sizes=a.sizes,
        batch=("b", "h", "g"),
        row="m",
        col="n",
        operands=_backward_operands(a),
        contractions=(Contraction(0, 1, ("d",)), Contraction(3, 2, ("e",))),
        tile=Tile(tile, _backward_reads(a), key=("dq", a)),
        outputs=(Sums((WeightedTerm(1, round_to=_rounding(a)),)),),
        band=Band(*a.band),
        epilogue=Epilogue(_cast(a), (Q,), key=("cast", a.dtype)),
    )


def backward_keys(a: Attention) -> FoldSpec:
    """Build the fold of dK and dV, to be summed over g; operands as in `backward_queries`.

    Results: dk [b, h, g, n, d] and dv [b, h, g, n, e].
    """
    probabilities = _probabilities(a)

    def tile(dots: tuple, values: tuple, i: Array, j: Array) -> tuple[Array, Array]:
        return probabilities(dots, values[:2], values[2:], j, i)

    lower, upper = a.band
    dk, dv = ("b", "n", "h", "g", "d"), ("b", "n", "h", "g", "e")
    return FoldSpec(
        sizes=a.sizes,
        batch=("b", "h", "g"),
        row="n",
        col="m",
        operands=_backward_operands(a),
        contractions=(Contraction(1, 0, ("d",)), Contraction(2, 3, ("e",))),
        tile=Tile(tile, _backward_reads(a), key=("dkv", a)),
        outputs=(
            Sums((WeightedTerm(3, round_to=_rounding(a)),), tile=0),
            Sums((WeightedTerm(0, round_to=_rounding(a)),), tile=1),
        ),
        band=Band(None if upper is None else -upper, None if lower is None else -lower),
        epilogue=Epilogue(
            lambda results, values: (_sum(a, results[1][0]), _sum(a, results[0][0])),
            (dk, dv),
            key=("dkv", a.dtype, a.groups > 1),
        ),
    )


def _sum(a: Attention, x: Array) -> Array:
    return x if a.groups > 1 else x.astype(a.dtype)


def _cast(a: Attention) -> Any:
    return lambda results, values: (results[0][0].astype(a.dtype),)


def _rounding(a: Attention) -> str | None:
    return None if a.dtype == "float32" else a.dtype


def _backward_operands(a: Attention) -> tuple[Operand, ...]:
    arrays = tuple(Operand(axes, a.dtype) for axes in (Q, K, V, OUT))
    return (*arrays, Operand(ROW), Operand(ROW), *a.extras)


def _backward_reads(a: Attention) -> tuple[int, ...]:
    return (4, 5, *range(6, 6 + len(a.extras)))


def _probabilities(a: Attention) -> Any:
    def pair(dots: tuple, rows: tuple, extras: tuple, i: Array, j: Array) -> tuple[Array, Array]:
        """Return the probabilities and the cotangent of the contraction."""
        s, pull = jax.vjp(lambda dot: a.score(dot, extras, i, j), dots[0])
        p = jnp.exp(s - rows[0])
        return p, pull(p * (dots[1] - rows[1]))[0]

    return pair


def gradients(
    a: Attention, run: Any, operands: tuple[Array, ...], out: Array, lse: Array, dout: Array
) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv of `forward`, by two folds run with `run(spec, *operands)`.

    Args:
        a: the attention.
        run: a function that executes a fold, for instance `fold`.
        operands: q, k, v and the extras.
        out: [b, m, h, g, e], the result of `forward`.
        lse: [b, h, g, m], the result of `forward`.
        dout: the gradient of `out`.
    """
    q, k, v, *extras = operands
    product = out.astype(jnp.float32) * dout.astype(jnp.float32)
    delta = jnp.sum(product, axis=-1).transpose(0, 2, 3, 1)
    arguments = (q, k, v, dout, lse, delta, *extras)
    (dq,) = run(backward_queries(a), *arguments)
    dk, dv = run(backward_keys(a), *arguments)
    return dq, jnp.sum(dk, axis=3).astype(a.dtype), jnp.sum(dv, axis=3).astype(a.dtype)


def unscaled(a: Attention) -> FoldSpec:
    """Build `forward` without its epilogue; the results are the raw maximum and sums."""
    return dataclasses.replace(forward(a), epilogue=None)
