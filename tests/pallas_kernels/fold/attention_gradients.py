"""Gradients of attention as folds over keys and over queries.

The backward pass recomputes the probabilities from the log-sum-exp (Dao 2023, "FlashAttention-2").
dK and dV are a fold whose rows are the keys.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.fold.attention import OUT, ROW, Attention, K, Q, V, rounding
from symjax_rewrite.pallas_kernels.fold.spec import (
    Band,
    Contraction,
    Epilogue,
    FoldSpec,
    Operand,
    Sums,
    Tile,
    WeightedTerm,
)

Array = Any


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
        outputs=(Sums((WeightedTerm(1, round_to=rounding(a)),)),),
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
            Sums((WeightedTerm(3, round_to=rounding(a)),), tile=0),
            Sums((WeightedTerm(0, round_to=rounding(a)),), tile=1),
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
