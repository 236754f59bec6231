"""Folds that are plain attention, by cuDNN (may import spec.py and plain_attention.py).

Other backends run the cases that cuDNN computes wrongly or slowly: f32, a bias beside f16 or bf16,
masks that are no bounds (cuDNN's call stores them), odd head sizes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from symjax_rewrite import jax_kernels
from symjax_rewrite.cost.device_profiles import OLDEST_GPU
from symjax_rewrite.pallas_kernels.backend import (
    NAMED,
    Reason,
    Support,
    first_reason,
    gpu_at_hand,
    is_hopper,
)
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
    width, capability = spec.width(a.key), gpu_at_hand().capability
    heads, of_keys, of_values = (
        {*spec.operands[k].axes} & {*spec.batch} for k in (a.query, a.key, a.value)
    )
    upper, window, length = a.seen.upper, _window(spec, a), a.seen.length
    widest = 256 if is_hopper(capability) and window is None else 128  # windows: as measured
    counted = set() if length is None else {*spec.operands[length].axes}
    return first_reason(
        (jax.default_backend() != "gpu", "cuDNN is looked for while tracing, and no GPU is here"),
        (capability < OLDEST_GPU, f"compute capability {capability} is below {OLDEST_GPU}"),
        (width != spec.width(a.value), "keys and values differ in width"),
        (width % 8 != 0 or width > widest, f"the head size is no multiple of 8, or above {widest}"),
        (a.scale <= 0, "the scale is not positive"),
        (
            upper not in (None, 0) or (upper is None and window is not None),
            "cuDNN's call stores the mask of a band",
        ),
        (upper == 0 and spec.rows > spec.cols, "causal with more queries than keys"),
        (window is not None and window < 1, "a window without the query's own key"),
        (window is not None and spec.rows != spec.cols, "a window of more keys than queries"),
        (window is not None and length is not None, "a window beside lengths"),
        (spec.rows < 2, "one query: bound by memory, the other backends split the keys"),
        (of_keys != of_values, "keys and values differ in their batch axes"),
        (heads != {*spec.batch}, "queries lack a batch axis"),
        (not counted <= {*layout_of(spec, a).batch}, "lengths differ between heads"),
        (length is not None and "lse" in a.results, "cuDNN has no log-sum-exp of no keys"),
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
    (q, k, v), (of_out, _, value) = _operands(spec, a, operands), _axes(spec, a)
    (batch, rows, heads, _), length = of_out, a.seen.length
    lengths = None if length is None else _lengths(spec, a, operands[length], batch)
    out, lse = jax_kernels.cudnn_attention(
        q, k, v, lengths, a.scale, causal=a.seen.upper == 0, window=_window(spec, a)
    )
    if lengths is not None:
        out = jnp.where((lengths > 0)[:, None, None, None], out, _keyless(a, v, out))
    results = {"out": (out, (*of_out[:3], value[3])), "lse": (lse, (batch, heads, rows))}
    names = zip(a.results, spec.epilogue.axes, strict=True)
    return tuple(_split(spec, *results[name], axes=axes) for name, axes in names)


def attention_gradient(spec: FoldSpec, *operands: Any) -> list[Any]:
    """Return dq, dk and dv, each with the axes of its operand, of a fold that `supports` accepts.

    operands: q, k, v in the order of the fold, do and out with the axes of out, and lse.
    """
    a = plain_attention(spec)
    assert a is not None and spec.epilogue is not None
    axes, results = _axes(spec, a), dict(zip(a.results, spec.epilogue.axes, strict=True))
    (batch, rows, heads, _), of_out = axes[0], (*axes[0][:3], axes[2][3])
    *_, upstream, out, lse = operands
    query, key, value = _operands(spec, a, operands)
    upstream, out = (_merged(spec, x, results["out"], of_out) for x in (upstream, out))
    lse = _merged(spec, lse, results["lse"], (batch, heads, rows))
    made = jax_kernels.cudnn_attention_gradient(
        query, key, value, upstream, out, lse, a.scale, a.seen.upper == 0, _window(spec, a)
    )
    wanted = [spec.operands[n].axes for n in (a.query, a.key, a.value)]
    return [_split(spec, x, *each) for x, *each in zip(made, axes, wanted, strict=True)]


def _window(spec: FoldSpec, a: PlainAttention) -> int | None:
    """Return how many keys, its own last, a query attends to; None where all before its own."""
    back = spec.rows if a.seen.lower is None else 1 - a.seen.lower
    return back if back < spec.rows else None


Groups = tuple[tuple[str, ...], ...]


def _axes(spec: FoldSpec, a: PlainAttention) -> tuple[Groups, Groups, Groups]:
    """Return the merged axes of q [b, m, h·g, d], k [b, n, h, d] and v [b, n, h, e]."""
    batch, heads, groups, contracted, summed = layout_of(spec, a)
    return (
        (batch, (spec.row,), (*heads, *groups), contracted),
        (batch, (spec.col,), heads, contracted),
        (batch, (spec.col,), heads, summed),
    )


def _operands(spec: FoldSpec, a: PlainAttention, operands: Any) -> list[Any]:
    """Return q, k and v as cuDNN reads them."""
    read = zip((a.query, a.key, a.value), _axes(spec, a), strict=True)
    return [_merged(spec, operands[n], spec.operands[n].axes, axes) for n, axes in read]


def _lengths(spec: FoldSpec, a: PlainAttention, x: Any, batch: tuple[str, ...]) -> Any:
    """Return the number of keys that each sequence attends to."""
    axes = spec.operands[a.seen.length or 0].axes
    order = [b for b in batch if b in axes]
    x = jax.lax.transpose(x, [axes.index(b) for b in order]) + a.seen.extra
    sizes, kept = [spec.size[b] for b in batch], [k for k, b in enumerate(batch) if b in axes]
    x = jax.lax.broadcast_in_dim(x, sizes, kept)
    return jnp.clip(x.reshape(-1), 0, spec.cols)


def _keyless(a: PlainAttention, values: Any, out: Any) -> Any:
    """Return the attention [b, 1, heads, e] of sequences without keys: all scores are the fill."""
    if not math.isfinite(a.fill):
        return jnp.full((), jnp.nan, out.dtype)
    mean = jnp.mean(values, axis=1, keepdims=True, dtype=jnp.float32).astype(out.dtype)
    return jnp.repeat(mean, out.shape[2] // mean.shape[2], axis=2)


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
