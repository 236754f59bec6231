"""What a fold costs, for the router's model (may import the spec, its results and its cuts)."""

from __future__ import annotations

import math

import jax.numpy as jnp

from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec, terms_of
from symjax_rewrite.pallas_kernels.fold.tiling import xla_blocks


def flops(spec: FoldSpec) -> int:
    """Multiplications and additions of the contractions and weighted sums, whole tiles counted."""
    pairs = math.prod(spec.batch_shape) * spec.rows * spec.cols
    total = sum(spec.width(c.row) for c in spec.contractions)
    for output in spec.outputs:
        total += sum(spec.width(t.weights) for t in terms_of(output) if t.weights is not None)
    return 2 * pairs * total


def bytes_moved(spec: FoldSpec) -> int:
    """Bytes of all operands and results, each once."""
    read = sum(
        math.prod(spec.shape(k)) * jnp.dtype(o.dtype).itemsize for k, o in enumerate(spec.operands)
    )
    return read + sum(math.prod(s.shape) * s.dtype.itemsize for s in flat_shapes(spec))


def tile_bytes(spec: FoldSpec) -> int:
    """Bytes of one tile made whole in f32: what a program without the fold holds."""
    return 4 * math.prod(spec.batch_shape) * spec.rows * spec.cols


def block_bytes(spec: FoldSpec) -> int:
    """Bytes of one tile of the `xla` backend: it holds a few of these."""
    blocks = xla_blocks(spec)
    inner = math.prod(spec.size[a] for a in blocks.inner)
    return 4 * inner * blocks.rows * blocks.cols
