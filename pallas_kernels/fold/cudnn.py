"""Folds that are plain attention, by cuDNN (may import spec.py and attention.py).

The tile of such a fold has an `Attention` as its `form`. Other backends run the cases that cuDNN
computes wrongly or slowly: f32, fully masked rows, a bias beside f16 or bf16, windows (cuDNN's
masks are materialised), odd head sizes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.backend import Reason, Support, first_reason
from symjax_rewrite.pallas_kernels.fold.attention import Attention, forward
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec


def supports(spec: FoldSpec) -> Support:
    """Return `YES` if cuDNN's fused attention computes the fold, else the reason why not."""
    a = spec.tile.form
    if not isinstance(a, Attention) or spec != forward(a):
        return Reason("not plain attention")
    width = a.value_width or a.width
    return first_reason(
        (jax.default_backend() != "gpu", "cuDNN is looked for while tracing, and no GPU is here"),
        (a.dtype not in ("bfloat16", "float16"), "cuDNN attention takes f16 and bf16 only"),
        (width != a.width, "keys and values differ in width"),
        (a.width % 8 != 0 or a.width > 128, "head size no multiple of 8, or above 128"),
        (a.softcap != 0, "cuDNN's call has no softcap"),
        (bool(a.bias), "a bias is read by the tile in the other backends"),
        (bool(a.mask) or a.segments, "masks are materialised by this call"),
        (a.window != (None, None), "windows are materialised by this call"),
        (a.causal and a.queries > a.keys, "causal with more queries than keys"),
        (a.queries < 2, "one query: bound by memory, the other backends split the keys"),
    )


def fold_library(spec: FoldSpec, *operands: Any) -> tuple[Any, ...]:
    """Run a fold that `supports` accepts, of q [b, m, h, g, d], k and v [b, n, h, d]."""
    a = spec.tile.form
    assert isinstance(a, Attention)
    q, k, v = operands
    merged = (a.batch, a.queries, a.heads * a.groups, a.width)
    out, lse = jax.nn.dot_product_attention(
        q.reshape(merged),
        k,
        v,
        scale=a.scale or a.width**-0.5,
        is_causal=a.causal,
        implementation="cudnn",
        return_residual=True,
    )
    by_head = jnp.moveaxis(lse.astype(jnp.float32), 1, 2)
    shape = (a.batch, a.heads, a.groups, a.queries)
    return out.reshape(q.shape), by_head.reshape(shape)
