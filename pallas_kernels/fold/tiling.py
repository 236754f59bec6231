"""Block sizes of folds, from a table of measurements (may import spec.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import core

from symjax_rewrite.pallas_kernels.backend import LEAST_SIDE, Gpu, power_of_two
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    Band,
    FoldSpec,
    KeyedSums,
    TopK,
    terms_of,
    weights_of,
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block sizes of a fold on the `xla` backend: rows and columns per block.

    inner: batch axes that a block holds whole or in part; the others are looped over. parts: the
    batch axes held in part, with the size of the part. In blocks of named axes the sizes are
    symbolic dimensions.
    """

    rows: Any
    cols: Any
    inner: tuple[str, ...] = ()
    parts: tuple[tuple[str, Any], ...] = ()

    def counts(self, spec: FoldSpec) -> dict[str, Any]:
        """Return the number of blocks along every batch axis that is looped over."""
        looped = {a: spec.size[a] for a in spec.batch if a not in self.inner}
        return looped | {a: -(-spec.size[a] // part) for a, part in self.parts}

    def held(self, spec: FoldSpec) -> dict[str, Any]:
        """Return the batch axes that a block holds, whole or in part, with how much of each."""
        return {a: spec.size[a] for a in self.inner} | dict(self.parts)

    def steps(self, spec: FoldSpec) -> Any:
        """Return the number of blocks of a fold, whatever its band is."""
        rows, cols = -(-spec.rows // greater(self.rows, 1)), -(-spec.cols // greater(self.cols, 1))
        return math.prod(self.counts(spec).values()) * rows * cols


def even(size: int, block: int) -> int:
    """Return the block size nearest below `block` that cuts `size` into almost equal blocks."""
    return -(-size // -(-size // block)) if size else 0


@dataclass(frozen=True, slots=True)
class FoldTiling:
    """A row of the table: the fastest sizes, f32 on two cores with 2 MiB of L2 each (2026-11).

    pairs: the most pairs for which a block still holds whole batch axes. whole: the most columns
    of which a block holds all. whole_pairs: the pairs of a block that holds all columns.
    """

    rows: int
    cols: int
    pairs: int = 2**19
    whole: int = 0
    whole_pairs: int = 0


def dividing(size: int, block: int) -> int:
    """Return the largest block size between half of `block` and `block` that divides `size`.

    A smaller last block is compiled once more. If no block size divides, blocks are almost equal.
    """
    sizes = range(min(block, size), block // 2, -1)
    return next((n for n in sizes if size % n == 0), even(size, block))


# The comments give the time relative to the plain program's, where it was measured.
XLA_CUTS = {
    "top-k": FoldTiling(64, 65_536, 2**22),  # 4096 of 100,000 points, k = 10: 0.17 to 0.43
    "whole": FoldTiling(128, 512, 2**15),  # minima and where they are: 0.13, by 2**19: 0.28
    # N-body of 8192: 0.06 to 0.17
    "elementwise": FoldTiling(128, 512, whole=4096, whole_pairs=2**17),
    "banded": FoldTiling(512, 512),  # causal attention, H = 4, d = 64: T = 512 0.57, 4096 0.22
    "paired": FoldTiling(512, 1024),  # gradients of attention: T = 1024 0.33, 4096 0.17
    # attention: T = 4096 0.27; cross-entropy of 50,000 words: 0.27
    "plain": FoldTiling(512, 2048, whole=8192, whole_pairs=2**20),
}
ONE_BLOCK = 2**20  # pairs of an elementwise fold in one block, without a loop: 0.68 to 1.02
# Elements of a block whose pairs share loops: with a quarter, gradients took 1.1 to 1.6 times.
LOOP_PAIRS = 2**21
NARROWEST = 128  # rows and columns per block of a narrow band


def xla_cut(spec: FoldSpec) -> FoldTiling:
    """Return the row of the table for a fold."""
    if any(isinstance(o, TopK) for o in spec.outputs):
        return XLA_CUTS["top-k"]
    if spec.tile.whole is not None:
        return XLA_CUTS["whole"]
    if not spec.contractions:
        return XLA_CUTS["elementwise"]
    cut = XLA_CUTS["paired" if len(spec.contractions) > 1 else "plain"]
    if spec.band == Band():
        return cut
    lower, upper = spec.band.lower, spec.band.upper
    if lower is None or upper is None:
        return XLA_CUTS["banded"]
    side = min(max(power_of_two(upper - lower + 1), NARROWEST), XLA_CUTS["banded"].rows)
    return FoldTiling(side, side)


def lesser(a: Any, b: Any) -> Any:
    """Return the minimum of two sizes, numbers or symbolic dimensions."""
    both_known = isinstance(a, int) and isinstance(b, int)
    return min(a, b) if both_known else core.min_dim(a, b)


def greater(a: Any, b: Any) -> Any:
    """Return the maximum of two sizes, numbers or symbolic dimensions."""
    both_known = isinstance(a, int) and isinstance(b, int)
    return max(a, b) if both_known else core.max_dim(a, b)


def _named_blocks(spec: FoldSpec, cut: FoldTiling) -> Blocks:
    """Return blocks for any size of the named axes; a block holds part of each batch axis."""
    whole, side = spec.tile.whole, NARROWEST
    rows, cols = (cut.rows, cut.cols) if whole is None else (side, side)
    rows = spec.rows if whole == spec.row else lesser(spec.rows, rows)
    cols = spec.cols if whole == spec.col else lesser(spec.cols, cols)
    parts: dict[str, Any] = {}
    left = cut.pairs // (rows * cols)
    for axis in reversed(spec.batch):
        parts[axis] = lesser(spec.size[axis], greater(left, 1))
        left = left // parts[axis]
    return Blocks(rows, cols, spec.batch, tuple(parts.items()))


def xla_blocks(spec: FoldSpec) -> Blocks:
    """Return the block sizes of a fold on the `xla` backend."""
    cut = xla_cut(spec)
    if spec.named:
        return _named_blocks(spec, cut)
    shared = shared_axes(spec)
    many = math.prod(spec.size[a] for a in shared)
    if many > 1:
        side = max(math.isqrt(cut.pairs // many), NARROWEST)
        shared = shared if many * side * side <= cut.pairs else ()
        cut = replace(cut, rows=min(cut.rows, side), cols=min(cut.cols, side)) if shared else cut
    cut = _whole_rows(spec, cut)
    wider = cut.cols // max(spec.cols, 1)  # short rows leave room for more rows, but never for all
    rows = even(spec.rows, max(cut.rows, min(cut.rows * wider, spec.rows // 2)))
    cols = dividing(spec.cols, max(cut.cols, cut.rows * cut.cols // max(rows, 1)))
    if spec.tile.whole is not None:
        whole = spec.size[spec.tile.whole]
        side = min(cut.rows, max(cut.pairs // max(whole, 1), 1))
        by_row = spec.tile.whole == spec.col
        rows, cols = (
            (even(spec.rows, side), whole) if by_row else (whole, dividing(spec.cols, side))
        )
    held = rows * max(cols, 1) * math.prod(spec.size[a] for a in shared)
    looped = [a for a in loop_axes(spec) if a not in shared]
    parts = _parts(spec, looped, LOOP_PAIRS // max(held, 1))
    inner = [*shared, *looped]
    held *= math.prod(parts.get(a, spec.size[a]) for a in looped)
    for axis in reversed([a for a in spec.batch if a not in inner]):
        held *= spec.size[axis]
        if held > cut.pairs:
            break
        inner.append(axis)
    kept = tuple(a for a in spec.batch if a in inner)
    return Blocks(rows, cols, kept, tuple(parts.items()))


def _whole_rows(spec: FoldSpec, cut: FoldTiling) -> FoldTiling:
    """Return blocks of fewer rows that hold all columns, if these are few, else the same blocks.

    No states are combined then, and XLA compiles half as many kernels. An elementwise fold of 512
    to 2,000 columns takes 0.73 to 0.98 of the time, with twice as many pairs in a block. A fold of
    products of 3,000 to 8,000 columns takes 0.93 to 1.04, and 1.10 where it finds places of
    extrema. Of two blocks of columns, a band that is bounded on one side leaves out a quarter:
    without them, a fold of 585 columns takes 0.97 of the time.
    """
    if spec.contractions and any(isinstance(o, ArgExtremum) for o in spec.outputs):
        return cut
    band = spec.band
    few = spec.cols <= 2 * cut.cols and band.length is None
    if not cut.whole or not (band == Band() or (few and None in (band.lower, band.upper))):
        return cut
    pairs = math.prod(spec.batch_shape) * spec.rows * spec.cols
    if not spec.contractions and pairs <= ONE_BLOCK and not shared_axes(spec):
        return replace(cut, rows=spec.rows, cols=spec.cols, pairs=ONE_BLOCK)
    whole = cut.cols < spec.cols <= cut.whole
    return replace(cut, rows=cut.whole_pairs // spec.cols, cols=spec.cols) if whole else cut


def shared_axes(spec: FoldSpec) -> tuple[str, ...]:
    """Return the batch axes that share one table lookup and one sum by key."""
    sums = [o for o in spec.outputs if isinstance(o, KeyedSums)]
    used = {a for k in spec.tables for a in spec.operands[k].axes}
    used |= {a for o in sums for a in (*o.kept, *o.varies)}
    return tuple(a for a in spec.batch if a not in used) if spec.tables or sums else ()


def _parts(spec: FoldSpec, axes: Sequence[str], most: int) -> dict[str, int]:
    """Return the sizes of the parts of axes of which a block does not hold all elements."""
    parts: dict[str, int] = {}
    for axis in reversed(axes):
        part = dividing(spec.size[axis], max(most, 1))
        parts |= {axis: part} if part < spec.size[axis] else {}
        most //= max(part, 1)
    return parts


def loop_axes(spec: FoldSpec) -> tuple[str, ...]:
    """Return the batch axes that share a tile's sums over features, as each part of a gradient."""
    used = {a for k in spec.tile.reads if spec.summed(k) for a in spec.operands[k].axes}
    return tuple(a for a in spec.batch if a not in used) if used else ()


@dataclass(frozen=True, slots=True)
class TritonBlocks:
    """The block sizes of a fold on the `triton` backend.

    rows: rows per program. cols: columns per step.
    chunk: features per step, where the features are too many to hold at once.
    warps: warps per program. stages: depth of the load pipeline.
    splits: programs that share the columns of one row block.
    features: features of the weights per program; 0 for all of them.
    """

    rows: int = 64
    cols: int = 64
    chunk: int = 64
    warps: int = 4
    stages: int = 2
    splits: int = 1
    features: int = 0


@dataclass(frozen=True, slots=True)
class TritonCut:
    """A row of the tables: the block sizes of folds that hold at most some bytes per pair.

    held: bytes per pair of a row and a column, at most (`bytes_held`).
    from_memory: for GPUs whose matmuls read operands from shared memory (capability 9 on).
    from_registers: for the others.
    """

    held: int
    from_memory: TritonBlocks
    from_registers: TritonBlocks


def _cut(rows: int, cols: int, warps: int, stages: int) -> TritonBlocks:
    return TritonBlocks(rows, cols, warps=warps, stages=stages)


# From memory: the fastest of nine on an H200 for attention at head sizes 64 to 256
# (`experiments/on_gpu`), by 1 to 14 % faster than 128 × 128, and at its gradient. From registers:
# the sizes need the fewest instructions per pair among those that compile without spilling, on an
# A100 and L4; their speed was not measured.
TRITON_CUTS = (  # one contraction: attention forward
    TritonCut(256, _cut(64, 64, 4, 3), _cut(128, 64, 8, 3)),
    TritonCut(512, _cut(64, 64, 4, 3), _cut(128, 64, 8, 3)),
    TritonCut(1024, _cut(64, 64, 4, 3), _cut(32, 32, 4, 3)),
    TritonCut(1536, _cut(64, 32, 4, 3), _cut(64, 32, 8, 2)),
    TritonCut(4096, _cut(32, 32, 8, 2), _cut(32, 32, 8, 2)),
)
TRITON_PAIRED_CUTS = (  # several contractions: gradients of attention
    TritonCut(384, _cut(64, 64, 4, 3), _cut(64, 64, 4, 3)),
    TritonCut(512, _cut(64, 64, 4, 3), _cut(64, 32, 4, 3)),
    TritonCut(768, _cut(128, 64, 8, 3), _cut(64, 32, 4, 3)),
    TritonCut(1024, _cut(128, 32, 8, 3), _cut(64, 64, 8, 3)),
    TritonCut(1536, _cut(64, 32, 8, 3), _cut(64, 32, 8, 2)),
    TritonCut(4096, _cut(32, 32, 8, 2), _cut(32, 32, 8, 2)),
)
NARROW_COLUMNS = 64  # per step, where f32 or operands over pairs need more registers
TRITON_ELEMENTWISE = TritonBlocks(64, 64, warps=4)
TRITON_WIDE = TritonBlocks(128, 128, chunk=64, warps=8)
TRITON_SLICED = (  # weights too wide for one program: (rows at most, block sizes)
    (16, TritonBlocks(16, 128, warps=4, stages=3, features=32)),
    (64, TritonBlocks(64, 64, warps=4, stages=3, features=64)),
    (2**31, TritonBlocks(128, 64, warps=8, stages=3, features=128)),
)
MOST_SPLITS = 32  # programs that share the columns of one row block
# Columns that a program takes in the time in which a split's state is written and read again, and
# a kernel launched: by their profiles about 300 on an H200, 250 on an A100 and 650 on an L4.
COMBINED_COLUMNS = 512
WIDE = 256  # the most features contracted, or summed, in one step


def triton_blocks(spec: FoldSpec, gpu: Gpu) -> TritonBlocks:
    """Return the block sizes of a fold on the `triton` backend, columns not split."""
    blocks = _triton_cut(spec, gpu)
    rows, cols = (power_of_two(n, LEAST_SIDE) for n in (spec.rows, spec.cols))
    return replace(blocks, rows=min(blocks.rows, rows), cols=min(blocks.cols, cols))


def with_splits(spec: FoldSpec, blocks: TritonBlocks, multiprocessors: int) -> TritonBlocks:
    """Return the block sizes with columns split where the last program of all then ends sooner.

    A single block of rows is bound by the loads of its columns, and two programs per multiprocessor
    load more at once. A split's state is written, and a second kernel reads and combines the
    states.
    """
    batch = math.prod(spec.batch_shape)
    if blocks.features or not batch * spec.rows * spec.cols:
        return blocks
    at_once = multiprocessors * (2 if spec.rows <= blocks.rows else 1)
    visited = columns_visited(spec, blocks.rows, blocks.cols)
    total, longest = batch * int(visited.sum()), int(visited.max())
    shortest = max(int(visited.min()), 1)
    steps = -(-spec.cols // blocks.cols)

    def last_end(splits: int) -> float:
        part = -(-steps // splits) * blocks.cols
        turns = total * splits * part / (steps * blocks.cols * at_once)
        least, most = min(shortest, part), min(longest, part)
        combined = COMBINED_COLUMNS * max(batch * len(visited) * splits / at_once, 1)
        return max(most, math.ceil(turns / least) * least) + (combined if splits > 1 else 0)

    return replace(blocks, splits=min(range(1, min(steps, MOST_SPLITS) + 1), key=last_end))


def columns_visited(spec: FoldSpec, rows: int, cols: int) -> np.ndarray:
    """Return, by block of rows, the columns of the blocks that meet the band: int64[blocks].

    Bounds known from data alone do not count.
    """
    band, rows, cols = spec.band, max(rows, 1), max(cols, 1)
    row = np.arange(0, spec.rows, rows)
    low = np.zeros_like(row) if band.lower is None else np.maximum(row + band.lower, 0)
    if band.upper is None:
        end = np.full_like(row, spec.cols)
    else:
        end = np.maximum(row + rows + band.upper, 0)
    return np.maximum(np.minimum(-(-end // cols) * cols, spec.cols) - low // cols * cols, 0)


def slices_of(spec: FoldSpec, blocks: TritonBlocks) -> int:
    """Return the programs that share the features of the weights."""
    widest = max((spec.width(k) for k in weights_of(spec)), default=0)
    return -(-widest // blocks.features) if blocks.features else 1


def _triton_cut(spec: FoldSpec, gpu: Gpu) -> TritonBlocks:
    if any(spec.width(k) > WIDE for k in weights_of(spec)):
        return next(b for limit, b in TRITON_SLICED if spec.rows <= limit)
    if not spec.contractions:
        return TRITON_ELEMENTWISE
    if any(spec.width(c.row) > WIDE for c in spec.contractions):
        return TRITON_WIDE
    table = TRITON_PAIRED_CUTS if len(spec.contractions) > 1 else TRITON_CUTS
    held = bytes_held(spec)
    cut = next((c for c in table if held <= c.held), table[-1])
    found = cut.from_memory if gpu.reads_products_from_memory else cut.from_registers
    pairs = any({spec.row, spec.col} <= {*o.axes} for o in spec.operands)
    if pairs or any(jnp.dtype(spec.operands[k].dtype).itemsize > 2 for k in spec.contracted):
        found = replace(found, cols=min(found.cols, NARROW_COLUMNS))
    return found


def bytes_held(spec: FoldSpec) -> int:
    """Return the bytes of contracted and summed features that one row and one column need.

    A feature multiplied in a wider dtype than its stored dtype counts in the wider dtype.
    """

    def held(number: int, *dtypes: str) -> int:
        size = max(jnp.dtype(d).itemsize for d in (spec.operands[number].dtype, *dtypes))
        return power_of_two(spec.width(number), LEAST_SIDE) * size

    terms = {(t.weights, t.round_to) for o in spec.outputs for t in terms_of(o)}
    total = sum(held(c.col, spec.operands[c.row].dtype) for c in spec.contractions)
    return total + sum(held(w, rounded or "float32") for w, rounded in terms if w is not None)
