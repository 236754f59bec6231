"""Costs of folds, for the router's model (may import spec.py, reference.py and tiling.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.pallas_kernels.backend import bytes_of
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import (
    FoldSpec,
    result_axes,
    runs_across,
    terms_of,
    weights_of,
)
from symjax_rewrite.pallas_kernels.fold.tiling import Blocks, columns_visited, xla_blocks

RATES = {  # of the products of each CUDA backend, among the figures of folds
    "library": "library_share",
    "triton": "kernel_share",
    "mosaic": "mosaic_share",
}


def rate(backend: str, device: Device) -> float:
    """Return the share of the rate of a library's products that a backend reaches."""
    return getattr(device.folds, RATES[backend])


def kernel_rates(spec: FoldSpec, backend: str, device: Device) -> tuple[float, float]:
    """Return the share of the rate of products that a kernel reaches, and its steps a second."""
    folds, multiplied = device.folds, {*spec.contracted, *weights_of(spec)}
    widest = max((jnp.dtype(spec.operands[k].dtype).itemsize for k in multiplied), default=4)
    if widest < 4:
        return rate(backend, device), folds.fused_steps_per_s
    return folds.single_share, folds.single_steps * folds.fused_steps_per_s


def by_rate(device: Device) -> list[str]:
    """Return the CUDA backends that "auto" tries, the fastest first; Mosaic's where measured."""
    measured = device.is_measured(f"folds.{RATES['mosaic']}")
    names = [name for name in RATES if name != "mosaic" or measured]
    return sorted(names, key=lambda name: -rate(name, device))


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
    rows = np.minimum(block_rows, spec.rows - np.arange(0, spec.rows, max(block_rows, 1)))
    pairs = rows @ columns_visited(spec, block_rows, block_cols)
    return math.prod(spec.batch_shape) * int(pairs)


def looped_pairs(spec: FoldSpec, blocks: Blocks) -> int:
    """Return the pairs that loops compute: of every row those of a smaller last block of columns.

    The loop over the blocks in the band has the whole blocks of columns alone.
    """
    visited, band, cols = visited_pairs(spec, blocks.rows, blocks.cols), spec.band, blocks.cols
    tail = spec.cols % cols if 0 < cols < spec.cols and spec.col not in spec.named else 0
    if not tail or band.upper is None:
        return visited
    first = np.arange(0, spec.rows, max(blocks.rows, 1))
    outside = first + blocks.rows + band.upper <= spec.cols - tail
    rows = int(np.minimum(blocks.rows, spec.rows - first)[outside].sum())
    return visited + math.prod(spec.batch_shape) * rows * tail


def bytes_moved(spec: FoldSpec) -> int:
    """Return the bytes of all operands and results, each once."""
    return bytes_of([*spec.avals, *flat_shapes(spec)])


def pieces_moved(spec: FoldSpec, blocks: Blocks) -> float:
    """Return the contiguous pieces of memory in which loops read and write the blocks of arrays.

    A looped axis that is stored last leaves pieces of one element, and so does a batch axis that a
    block holds: its products need such axes first. What no loop cuts is read as the program as
    written reads it.
    """
    rows, cols = max(blocks.rows, 1), max(blocks.cols, 1)
    extent = dict.fromkeys(spec.batch, 1) | {a: spec.size[a] for a in blocks.inner}
    extent |= {**dict(blocks.parts), spec.row: min(rows, spec.rows), spec.col: min(cols, spec.cols)}
    across = math.prod(blocks.counts(spec).values()) * -(-spec.rows // rows)
    along = -(-spec.cols // cols)

    def pieces(axes: tuple[str, ...]) -> float:
        sizes = [spec.extent(a) for a in axes]
        held = [min(extent.get(a, size), size) for a, size in zip(axes, sizes, strict=True)]
        cut = [k for k, size in enumerate(sizes) if held[k] < size]
        if not cut:
            return 0.0
        lead = [k for k, a in enumerate(axes) if held[k] == 1 or a in blocks.inner]
        transposed = [k + 1 for k in lead if held[k] > 1 and not {*range(k)} <= {*lead}]
        times = across * (along if spec.col in axes else 1)
        return times * math.prod(held[: max(cut[-1:] + transposed)])

    return sum(map(pieces, (*[o.axes for o in spec.operands], *result_axes(spec))))


def orders_moved(
    spec: FoldSpec, blocks: Blocks
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the arrays that blocks hold in another order of their axes: operands, then results.

    An operand counts if no loop cuts it. Products read their rows and features in either order,
    after the batch axes that a block holds. Of a result that loops cut, the axes count that its
    blocks hold whole, and those beside: `pieces_moved` has the batch.

    Yields:
        The shape of an array, and its axes longer than 1 in the order of the copy.
    """
    looped = {a for a, n in blocks.counts(spec).items() if n > 1}
    looped |= {spec.row} if blocks.rows < spec.rows else set()
    looped |= {spec.col} if blocks.cols < spec.cols else set()
    shared = (*spec.batch, spec.row, spec.col)
    multiplied = {*spec.contracted, *weights_of(spec)}

    def moved(stored: Sequence[str], wanted: Sequence[str]) -> Iterator[Any]:
        order = tuple([stored.index(a) for a in wanted if spec.extent(a) > 1])
        if list(order) != sorted(order):
            yield tuple(map(spec.extent, stored)), order

    for k, operand in enumerate(spec.operands):
        features = spec.features(k)
        side = [a for a in (spec.row, spec.col) if a in operand.axes]
        lead = [a for a in blocks.inner if a in operand.axes]
        either = k in multiplied and [*operand.axes] == [*lead, *features, *side]
        if not (looped & {*operand.axes} or runs_across(spec, k) or either):
            yield from moved(operand.axes, [*lead, *side, *features])
    for axes in result_axes(spec):
        kept = [a for a in shared if a in axes and (a not in spec.batch or not looped & {*axes})]
        made = [*kept, *(a for a in axes if a not in shared)]
        yield from moved(made, [a for a in axes if a in made])


def result_bytes(spec: FoldSpec) -> int:
    """Return the bytes of all results."""
    return bytes_of(flat_shapes(spec))


def state_bytes(spec: FoldSpec) -> int:
    """Return the bytes of the results before any epilogue, which splits of a kernel write."""
    return result_bytes(replace(spec, epilogue=None))


def block_bytes(spec: FoldSpec) -> int:
    """Return the bytes of one tile of the `xla` backend, which holds a few tiles at once."""
    blocks = xla_blocks(spec)
    held = {**spec.size, **dict(blocks.parts)}
    inner = math.prod(held[a] for a in blocks.inner)
    return 4 * inner * blocks.rows * blocks.cols
