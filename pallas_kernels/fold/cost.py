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
    return 2 * pairs * (_contracted(spec) + _summed(spec))


def _contracted(spec: FoldSpec) -> int:
    """Products of a pair that its contractions add up."""
    return sum(spec.width(c.row) for c in spec.contractions)


def _summed(spec: FoldSpec) -> int:
    """Features that weighted sums add up for a pair."""
    terms = [t for output in spec.outputs for t in terms_of(output)]
    return sum(spec.width(t.weights) for t in terms if t.weights is not None)


def visited_flops(spec: FoldSpec, block_rows: int, block_cols: int, slices: int = 1) -> int | None:
    """The same of the blocks alone that a kernel visits because they meet the band.

    Args:
        spec: the fold.
        block_rows: rows of a block.
        block_cols: columns of a block.
        slices: how many programs share the features of the weighted sums; each makes the pairs.

    Returns:
        None where data decide which blocks these are.
    """
    band, pairs = spec.band, 0
    if band.length is not None:
        return None
    for row in range(0, spec.rows, block_rows):
        low = 0 if band.lower is None else max(row + band.lower, 0) // block_cols * block_cols
        end = spec.cols if band.upper is None else max(row + block_rows + band.upper, 0)
        high = min(-(-end // block_cols) * block_cols, spec.cols)
        pairs += min(block_rows, spec.rows - row) * max(high - low, 0)
    return 2 * math.prod(spec.batch_shape) * pairs * (slices * _contracted(spec) + _summed(spec))


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
