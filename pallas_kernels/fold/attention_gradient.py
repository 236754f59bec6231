"""The gradient of plain attention, by cuDNN or as one fold (may import fold.py and cudnn.py).

    p = e^(s - lse)    dv = pᵀ do    ds = p·(do vᵀ - Σ do·out)·scale    dq = ds k    dk = dsᵀ q

p and ds are rounded to the dtype of the operands before the products, as cuDNN rounds them
(FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.fold import cudnn
from symjax_rewrite.pallas_kernels.fold.fold import FOLDS
from symjax_rewrite.pallas_kernels.fold.plain_attention import PlainAttention, plain_attention
from symjax_rewrite.pallas_kernels.fold.spec import (
    ColumnSums,
    Contraction,
    FoldSpec,
    Operand,
    Sums,
    Tile,
    WeightedTerm,
)
from symjax_rewrite.pallas_kernels.fold.xla import fold_xla

Array = Any


def attention_of(spec: FoldSpec) -> tuple[PlainAttention, tuple[str, ...], tuple[str, ...]]:
    """Return the parts of a fold that is plain attention, and the axes of out and lse."""
    a = plain_attention(spec)
    assert a is not None and spec.epilogue is not None
    axes = dict(zip(a.results, spec.epilogue.axes, strict=True))
    return a, axes["out"], axes["lse"]


def gradient_spec(spec: FoldSpec) -> FoldSpec:
    """Build the fold of dq, dk and dv, from the fold of out and lse.

    Operands: q, k, v as in `spec`, do with the axes of out, lse and Σ do·out.
    """
    (a, out, lse), scores = attention_of(spec), spec.tile
    dtype = spec.operands[a.value].dtype

    def tile(dots: tuple, values: tuple, i: Array, j: Array) -> tuple[Array, Array]:
        made = scores.fun(dots[:1], (), i, j)
        p = jnp.exp((made[0] if isinstance(made, tuple) else made) - values[0])
        return p, p * (dots[1] - values[1]) * a.scale

    def term(weights: int) -> tuple[WeightedTerm]:
        return (WeightedTerm(weights, round_to=dtype),)

    return replace(
        spec,
        operands=(*spec.operands, Operand(out, dtype), Operand(lse), Operand(lse)),
        contractions=(*spec.contractions, Contraction(3, a.value, spec.features(a.value))),
        tile=Tile(tile, (4, 5), ("gradient", scores.key, a.scale)),
        outputs=(Sums(term(a.key), 1), ColumnSums(term(a.query), 1), ColumnSums(term(3), 0)),
        band=replace(spec.band, floor=None),  # every row attends to a key
        epilogue=None,
    )


def attention_gradient(spec: FoldSpec, *operands: Array) -> list[Array]:
    """Return dq, dk and dv of plain attention, with the axes of the operands of `spec`.

    cuDNN computes them where the program is lowered for CUDA and `cudnn.supports` the fold.

    Args:
        spec: the fold of out and lse.
        operands: q, k and v in the order of `spec`, do and out with the axes of out, and lse.
    """
    streamed = partial(_streamed, spec)
    return FOLDS.call(spec, operands, "auto", streamed, cuda_run=_cuda_run)


def _cuda_run(spec: FoldSpec) -> Any:
    found = cudnn.supports(spec)
    return partial(cudnn.attention_gradient, spec) if found else found


def _streamed(spec: FoldSpec, *operands: Array) -> list[Array]:
    """Return the gradients by loops over blocks, in linear memory."""
    (a, out, lse), (*read, upstream, result, stats) = attention_of(spec), operands
    order = [out.index(x) for x in (*lse, *spec.features(a.value))]
    product = (upstream.astype(jnp.float32) * result).transpose(order)
    mean = product.sum(tuple(range(len(lse), product.ndim)))
    made = fold_xla(gradient_spec(spec), *read, upstream, stats, mean)
    numbers = (a.query, a.key, a.value)
    return [_arranged(spec, n, x) for n, (x,) in zip(numbers, made, strict=True)]


def _arranged(spec: FoldSpec, number: int, x: Array) -> Array:
    """Return sums [batch.., row or column, features..] with the axes and dtype of an operand."""
    wanted = spec.operands[number]
    place = spec.row if spec.row in wanted.axes else spec.col
    axes = (*spec.batch, place, *spec.features(number))
    x = x.sum(tuple(n for n, axis in enumerate(axes) if axis not in wanted.axes))
    kept = [axis for axis in axes if axis in wanted.axes]
    return jax.lax.transpose(x, [kept.index(axis) for axis in wanted.axes]).astype(wanted.dtype)
