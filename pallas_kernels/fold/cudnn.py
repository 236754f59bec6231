"""Folds that are plain attention, by cuDNN (may import spec.py and plain_attention.py).

Other backends run the cases that cuDNN computes wrongly or slowly: f32, fully masked rows, a bias
beside f16 or bf16, windows (cuDNN's masks are materialised), odd head sizes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.backend import NAMED, Reason, Support, first_reason
from symjax_rewrite.pallas_kernels.fold.plain_attention import PlainAttention, plain_attention
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec


class CudnnAxes(NamedTuple):
    """The axes of a fold as cuDNN's: sequences of a batch, key heads, queries per key head.

    contracted and summed are the features of the keys and of the values.
    """

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    groups: tuple[str, ...]
    contracted: tuple[str, ...]
    summed: tuple[str, ...]


def supports(spec: FoldSpec) -> Support:
    """Return `YES` if cuDNN's fused attention computes the fold, else the reason why not."""
    a = None if spec.named else plain_attention(spec)
    if a is None:
        return Reason(NAMED if spec.named else "not plain attention in f16 or bf16")
    width = spec.width(a.key)
    heads, of_keys, of_values = (
        {*spec.operands[k].axes} & {*spec.batch} for k in (a.query, a.key, a.value)
    )
    return first_reason(
        (jax.default_backend() != "gpu", "cuDNN is looked for while tracing, and no GPU is here"),
        (width != spec.width(a.value), "keys and values differ in width"),
        (width % 8 != 0 or width > 128, "head size no multiple of 8, or above 128"),
        (a.scale <= 0, "the scale is not positive"),
        (a.upper not in (None, 0), "bands are materialised by this call"),
        (a.upper == 0 and spec.rows > spec.cols, "causal with more queries than keys"),
        (spec.rows < 2, "one query: bound by memory, the other backends split the keys"),
        (of_keys != of_values, "keys and values differ in their batch axes"),
        (heads != {*spec.batch}, "queries lack a batch axis"),
    )


def layout_of(spec: FoldSpec, a: PlainAttention) -> CudnnAxes:
    """Return the axes in cuDNN's order; axes before the queries' are sequences, if not a group."""
    axes, keys = spec.operands[a.query].axes, spec.operands[a.key].axes
    lead = axes[: axes.index(spec.row)]
    batch = [x for x in axes if x in spec.batch]
    return CudnnAxes(
        tuple(x for x in batch if x in keys and x in lead),
        tuple(x for x in batch if x in keys and x not in lead),
        tuple(x for x in batch if x not in keys),
        spec.contractions[0].over,
        spec.features(a.value),
    )


def fold_library(spec: FoldSpec, *operands: Any) -> tuple[Any, ...]:
    """Run a fold that `supports` accepts."""
    a = plain_attention(spec)
    assert a is not None and spec.epilogue is not None
    batch, heads, groups, contracted, summed = layout_of(spec, a)
    columns, lead = (spec.col,), (batch, (spec.row,), (*heads, *groups))
    read = (
        (a.query, (*lead, contracted)),
        (a.key, (batch, columns, heads, contracted)),
        (a.value, (batch, columns, heads, summed)),
    )
    given = [_merged(spec, operands[k], spec.operands[k].axes, order) for k, order in read]
    told = "lse" in a.results
    attend: Any = jax.nn.dot_product_attention
    found = attend(
        *given,
        scale=a.scale,
        is_causal=a.upper == 0,
        implementation="cudnn",
        return_residual=told,
    )
    out, lse = found if told else (found, found)
    results = {"out": (out, (*lead, summed)), "lse": (lse.astype(jnp.float32), lead)}
    names = zip(a.results, spec.epilogue.axes, strict=True)
    return tuple(_split(spec, *results[name], axes=axes) for name, axes in names)


def _merged(spec: FoldSpec, x: Any, axes: tuple, groups: tuple) -> Any:
    """Return an array with the axes of each group as one."""
    order = [a for group in groups for a in group]
    x = jax.lax.transpose(x, [axes.index(a) for a in order])
    return x.reshape([math.prod(spec.size[a] for a in group) for group in groups])


def _split(spec: FoldSpec, x: Any, groups: tuple, axes: tuple) -> Any:
    """Return an array of merged axes over `axes`."""
    order = [a for group in groups for a in group]
    x = x.reshape([spec.size[a] for a in order])
    return jax.lax.transpose(x, [order.index(a) for a in axes])
