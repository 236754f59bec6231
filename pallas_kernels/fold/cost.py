"""Costs of folds, for the router's model (may import spec.py, reference.py and tiling.py)."""

from __future__ import annotations

import math

from symjax_rewrite.pallas_kernels.backend import bytes_of
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec, terms_of
from symjax_rewrite.pallas_kernels.fold.tiling import xla_blocks


def flops(spec: FoldSpec) -> int:
    """Return the FLOPs of the contractions and weighted sums, whole tiles counted."""
    pairs = math.prod(spec.batch_shape) * spec.rows * spec.cols
    return 2 * pairs * (_contracted(spec) + _summed(spec))


def _contracted(spec: FoldSpec) -> int:
    return sum(spec.width(c.row) for c in spec.contractions)


def _summed(spec: FoldSpec) -> int:
    terms = [t for output in spec.outputs for t in terms_of(output)]
    return sum(spec.width(t.weights) for t in terms if t.weights is not None)


def visited_flops(spec: FoldSpec, block_rows: int, block_cols: int, slices: int = 1) -> int | None:
    """Return the FLOPs of the blocks that a kernel visits; None where they depend on data.

    A kernel visits the blocks that meet the band. `slices` programs share the features of the
    weighted sums, and each recomputes the tile.
    """
    if spec.band.length is not None:
        return None
    pairs = visited_pairs(spec, block_rows, block_cols)
    return 2 * pairs * (slices * _contracted(spec) + _summed(spec))


def visited_pairs(spec: FoldSpec, block_rows: int, block_cols: int) -> int:
    """Return the pairs of the blocks that meet the band; bounds known from data alone count not."""
    band, pairs = spec.band, 0
    for row in range(0, spec.rows, max(block_rows, 1)):
        low = 0 if band.lower is None else max(row + band.lower, 0) // block_cols * block_cols
        end = spec.cols if band.upper is None else max(row + block_rows + band.upper, 0)
        high = min(-(-end // max(block_cols, 1)) * block_cols, spec.cols)
        pairs += min(block_rows, spec.rows - row) * max(high - low, 0)
    return math.prod(spec.batch_shape) * pairs


def bytes_moved(spec: FoldSpec) -> int:
    """Return the bytes of all operands and results, each once."""
    return bytes_of([*spec.avals, *flat_shapes(spec)])


def tile_bytes(spec: FoldSpec) -> int:
    """Return the bytes of one whole tile in f32, which a program without the fold stores."""
    return 4 * math.prod(spec.batch_shape) * spec.rows * spec.cols


def block_bytes(spec: FoldSpec) -> int:
    """Return the bytes of one tile of the `xla` backend, which holds a few tiles at once."""
    blocks = xla_blocks(spec)
    held = {**spec.size, **dict(blocks.parts)}
    inner = math.prod(held[a] for a in blocks.inner)
    return 4 * inner * blocks.rows * blocks.cols
