"""The body of the Triton fold: layout, masked loads, the column loop, stores (imports spec.py).

The code here runs while the kernel is traced. A program has one row block of one batch element. The
feature axes of every operand and result are merged into one axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from symjax_rewrite import jax_internals
from symjax_rewrite.pallas_kernels import monoid
from symjax_rewrite.pallas_kernels.backend import LEAST_SIDE, power_of_two
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    Contraction,
    ExpSums,
    Extremum,
    FoldSpec,
    Output,
    Sums,
    WeightedTerm,
    in_two_parts,
    least_maximum,
    state_axes,
    terms_of,
    weights_of,
)
from symjax_rewrite.pallas_kernels.fold.tile import accumulator, row_length
from symjax_rewrite.pallas_kernels.fold.tile_facts import (
    factors_of,
    identities,
    implies_masks,
    kernel_monoid,
    tiles_of,
)
from symjax_rewrite.pallas_kernels.fold.tiling import WIDE, TritonBlocks, slices_of
from symjax_rewrite.pallas_kernels.monoid import State
from symjax_rewrite.pallas_kernels.triton_programs import keeping_nan
from symjax_rewrite.pallas_kernels.triton_tiles import Extent, dot, indices, load, store

Array = Any
FEATURE = ""  # the name of the merged feature axis of an operand or a result
LEAST_INNER_BLOCKS = 4  # fewer blocks inside the band do not pay for a loop of their own
SPLIT = "split"  # the name of the first axis of stored results, one element per split of columns


def merge(
    axes: tuple[str, ...], features: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return axes in an order in which the features are adjacent, and with the features merged.

    The order changes only where the features are not adjacent: they are then moved to the end.
    """
    if not features:
        return axes, axes
    at, count = axes.index(features[0]), len(features)
    if axes[at : at + count] != features:
        axes = (*(a for a in axes if a not in features), *features)
        at = len(axes) - count
    return axes, (*axes[:at], FEATURE, *axes[at + count :])


@dataclass(frozen=True, slots=True)
class FoldResult:
    """One result of a kernel.

    wanted: the axes as requested.
    order: the axes with features adjacent.
    axes: the axes as stored, with features merged.
    width: the number of features.
    """

    wanted: tuple[str, ...]
    order: tuple[str, ...]
    axes: tuple[str, ...]
    width: int
    dtype: Any

    @classmethod
    def of(cls, spec: FoldSpec, wanted: tuple[str, ...], shape: jax.ShapeDtypeStruct) -> FoldResult:
        features = tuple(a for a in wanted if a not in (*spec.batch, spec.row))
        width = math.prod(spec.size[a] for a in features)
        return cls(wanted, *merge(wanted, features), width, shape.dtype)

    def stored(self, spec: FoldSpec, splits: int) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype as the kernel writes them; Triton stores no booleans."""
        sizes = [self.width if a == FEATURE else spec.size[a] for a in self.axes]
        dtype = jnp.int8 if self.dtype == jnp.bool_ else self.dtype
        return jax.ShapeDtypeStruct((splits, *sizes), dtype)

    def restored(self, spec: FoldSpec, x: Array) -> Array:
        x = x.reshape([spec.size[a] for a in self.order]).astype(self.dtype)
        return lax.transpose(x, [self.order.index(a) for a in self.wanted])


@dataclass(frozen=True, slots=True)
class Kernel:
    """One fold with its block sizes.

    axes: the operands' axes after features are merged.
    is_inner: True for blocks of columns wholly inside the band and the array.
    """

    spec: FoldSpec
    blocks: TritonBlocks
    axes: tuple[tuple[str, ...], ...]
    results: tuple[FoldResult, ...]
    is_inner: bool = False

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.spec.rows, self.blocks.rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the numbers of row blocks in all batches, column splits, and feature slices."""
        slices = slices_of(self.spec, self.blocks)
        return self.row_blocks * math.prod(self.spec.batch_shape), self.blocks.splits, slices

    def is_sliced(self, number: int) -> bool:
        """Return True if each program has its own slice of the operand's features."""
        spec = self.spec
        return self.blocks.features > 0 and number in (*weights_of(spec), *spec.read_last)

    def is_chunked(self, number: int) -> bool:
        """Return True if the operand's features are read in chunks inside the column loop."""
        return self.spec.width(number) > WIDE and not self.is_sliced(number)

    def features(self, width: int, is_sliced: bool) -> int:
        """Return how many of `width` features a program holds, padded."""
        return self.blocks.features if is_sliced else power_of_two(width, LEAST_SIDE)

    def place(self, step: Any) -> dict[str, Any]:
        """Return batch indices and row block of a program; causal folds start with late rows."""
        spec = self.spec
        counts = {a: spec.size[a] for a in spec.batch} | {spec.row: self.row_blocks}
        place = indices(step, counts)
        if spec.band.upper is not None:
            place[spec.row] = self.row_blocks - 1 - place[spec.row]
        return place

    def operand_spec(self, number: int) -> pl.BlockSpec:
        width, chunk = self.spec.width(number), self.blocks.chunk
        is_sliced = self.is_sliced(number)
        if self.is_chunked(number):
            return self._block_spec(self.axes[number], pl.cdiv(width, chunk) * chunk, False)
        return self._block_spec(self.axes[number], self.features(width, is_sliced), is_sliced)

    def result_spec(self, result: FoldResult) -> pl.BlockSpec:
        is_sliced = self.blocks.features > 0
        features = self.features(result.width, is_sliced)
        return self._block_spec((SPLIT, *result.axes), features, is_sliced)

    def _block_spec(self, axes: Sequence[str], features: int, is_sliced: bool) -> pl.BlockSpec:
        """Return a program's block of an array: its rows, all columns, and its features."""
        spec, cols = self.spec, self.blocks.cols
        extent = {spec.row: self.blocks.rows, spec.col: pl.cdiv(spec.cols, cols) * cols}
        extent[FEATURE] = features

        def index(step: Any, split: Any, part: Any) -> tuple[Any, ...]:
            place = self.place(step) | {SPLIT: split, FEATURE: part if is_sliced else 0}
            return tuple(place.get(a, 0) for a in axes)

        return pl.BlockSpec(tuple(extent.get(a) for a in axes), index)

    def extents(
        self, axes: Sequence[str], width: int, is_sliced: bool, at: dict[str, Any], chunk: Any
    ) -> list[Extent]:
        """Return the extents of a tile along the row, column and feature axes of an array.

        at: the numbers of the first row and feature of the program, and of the first column.
        chunk: the number of the chunk of features; None if features are not read in chunks.
        """
        spec, blocks = self.spec, self.blocks
        size = self.features(width, is_sliced) if chunk is None else blocks.chunk
        start = 0 if chunk is None else chunk * size
        made = {FEATURE: Extent(size, start, start + at[FEATURE] if is_sliced else start, width)}
        if spec.row in axes:
            made[spec.row] = Extent(blocks.rows, 0, at[spec.row], spec.rows)
        if spec.col in axes:
            limit = blocks.cols if self.is_inner else spec.cols  # inside, no column is masked
            made[spec.col] = Extent(blocks.cols, at[spec.col], at[spec.col], limit)
        return [made[a] for a in axes if a not in spec.batch]

    def read(self, ref: Any, number: int, at: dict[str, Any], chunk: Any = None) -> Array:
        """Load a tile [rows or columns, features], [rows, columns], [rows], [columns] or [].

        at, chunk: as in `extents`.
        """
        axes, spec = self.axes[number], self.spec
        where = self.extents(axes, spec.width(number), self.is_sliced(number), at, chunk)
        tile = load(ref, where)
        order = [(spec.row, spec.col, FEATURE).index(a) for a in axes if a not in spec.batch]
        tile = tile if order == sorted(order) else tile.T
        return tile != 0 if spec.operands[number].dtype == "bool" else tile

    def write(self, ref: Any, result: FoldResult, value: Array, at: dict[str, Any]) -> None:
        """Store a tile [rows] or [rows, features] of a result."""
        where = self.extents(result.axes, result.width, self.blocks.features > 0, at, None)
        first = next(a for a in result.axes if a not in self.spec.batch)
        store(ref, where, value if first == self.spec.row else value.T)

    def contraction(
        self, c: Contraction, refs: Sequence[Any], loaded: dict[int, Array], at: dict[str, Any]
    ) -> Array:
        dtype = jax_internals.joint_dtype(
            self.spec.operands[c.row].dtype, self.spec.operands[c.col].dtype
        )

        def product(row: Array, col: Array) -> Array:
            row, col = row.astype(dtype), col.astype(dtype)
            return dot(row, col, c.precision, transposed=True).astype(c.dtype)

        if not self.is_chunked(c.row):
            if c.col not in loaded:
                loaded[c.col] = self.read(refs[c.col], c.col, at)
            return product(loaded[c.row], loaded[c.col])

        def step(chunk: Any, total: Array) -> Array:
            row, col = (self.read(refs[k], k, at, chunk) for k in (c.row, c.col))
            return total + product(row, col)

        zero = jnp.zeros((self.blocks.rows, self.blocks.cols), jnp.float32)
        chunks = pl.cdiv(self.spec.width(c.row), self.blocks.chunk)
        return lax.fori_loop(0, chunks, step, zero).astype(c.dtype)

    def measure(
        self,
        term: WeightedTerm,
        made: Sequence[Array],
        loaded: dict[int, Array],
        valid: Array | None,
    ) -> monoid.Measure:
        def weighted(p: Array) -> Array:
            if term.factor is not None:
                p = p * made[term.factor].astype(p.dtype)
                p = p if valid is None else jnp.where(valid, p, jnp.zeros_like(p))
            if term.weights is None:
                return jnp.sum(p, axis=-1, dtype=p.dtype)
            w = loaded[term.weights]
            if term.round_to is not None:
                p = p.astype(term.round_to)
            elif w.ndim == 2 and p.dtype == jnp.float32 and in_two_parts(self.spec, term):
                return _ProductInTwoParts(p, w)
            dtype = jax_internals.joint_dtype(p.dtype, w.dtype)
            if w.ndim == 1:
                total = accumulator(dtype)
                p = p.astype(total) * w.astype(total)[None, :]
                return jnp.sum(p, axis=-1, dtype=total)
            return dot(p.astype(dtype), w.astype(dtype), term.precision)

        return weighted

    def column_range(self, refs: Sequence[Any], row: Any, split: Any) -> tuple[Any, Any]:
        """Return the first block of columns of this program, and one past its last."""
        spec, blocks = self.spec, self.blocks
        begin, end = self.own_columns(split)
        low, high = begin, end
        if spec.band.lower is not None:
            first = lax.div(jnp.maximum(row + spec.band.lower, 0), jnp.int32(blocks.cols))
            low = jnp.minimum(jnp.maximum(low, first), end)
        ends = []
        if spec.band.upper is not None:
            ends.append(row + blocks.rows + spec.band.upper)
        if spec.band.length is not None:
            length = row_length(self.read(refs[spec.band.length], spec.band.length, {}))
            ends.append(length + spec.band.extra + (row + blocks.rows - 1) * spec.band.follows)
        for end in ends:
            last = lax.div(jnp.maximum(end, 0) + blocks.cols - 1, jnp.int32(blocks.cols))
            high = jnp.maximum(jnp.minimum(high, last), begin)
        return low, high

    def inner_blocks(self, row: Any, low: Any, high: Any) -> tuple[Any, Any]:
        """Return the first of the blocks wholly inside the band and the array, and one past them.

        low, high: the blocks of the program.
        """
        band, cols = self.spec.band, self.blocks.cols
        first, last = jnp.int32(0), jnp.int32(self.spec.cols // cols)
        if band.lower is not None:
            first = _blocks_below(row + self.blocks.rows - 1 + band.lower + cols - 1, cols)
        if band.upper is not None:
            last = jnp.minimum(last, _blocks_below(row + band.upper + 1, cols))
        first = jnp.clip(first, low, high)
        return first, jnp.clip(last, first, high)

    def run(self, *refs: Any) -> None:
        spec, blocks = self.spec, self.blocks
        inputs, results = refs[: len(spec.operands)], refs[len(spec.operands) :]
        row = self.place(pl.program_id(0))[spec.row] * blocks.rows
        here = {spec.row: row, FEATURE: pl.program_id(2) * blocks.features}
        contracted = {k for k in spec.contracted if not self.is_chunked(k)}
        needed = {*spec.tile.reads, *weights_of(spec), *contracted}
        fixed = {
            k: self.read(inputs[k], k, here) for k in sorted(needed) if spec.col not in self.axes[k]
        }
        low, high = self.column_range(inputs, row, pl.program_id(1))
        step = partial(self.step, inputs, sorted(needed), fixed, here)
        states, rest = self.start(), low
        if self.has_inner_loop:
            first, last = self.inner_blocks(row, low, high)
            if spec.band.lower is not None:
                states = lax.fori_loop(low, first, step, states)
            inner = replace(self, is_inner=True)
            step_inside = partial(inner.step, inputs, sorted(needed), fixed, here)
            states = lax.fori_loop(first, last, step_inside, states)
            rest = last
        if not self.has_inner_loop or spec.band.upper is not None or spec.cols % blocks.cols:
            states = lax.fori_loop(rest, high, step, states)
        if spec.band.floor is not None:
            tops = self.least_top(inputs, fixed, states)
            states = self.beyond(tops, low, high, step, states)
        last_read = spec.read_last
        rows = [self._across(fixed.get(k, self.read(inputs[k], k, here)), k) for k in last_read]
        for k, value in enumerate(self.finish(states, rows)):
            self.write(results[k], self.results[k], value, here)

    def least_top(
        self, refs: Sequence[Any], fixed: dict[int, Array], states: tuple[State, ...]
    ) -> Array:
        """Return the least of the maxima that the band's floor is compared with."""
        spec, against = self.spec, self.spec.band.against
        if against is None:
            kinds = zip(spec.outputs, self.told(states), strict=True)
            tops = [s[0] for o, s in kinds if isinstance(o, ExpSums | Extremum)]
            return jnp.min(functools.reduce(jnp.minimum, tops))
        if against in fixed:
            return jnp.min(fixed[against])

        def block(b: Any, least: Array) -> Array:
            read = self.read(refs[against], against, {spec.col: b * self.blocks.cols})
            return jnp.minimum(least, jnp.min(read))

        most = jnp.array(jnp.inf, spec.operands[against].dtype)
        return lax.fori_loop(0, pl.cdiv(spec.cols, self.blocks.cols), block, most)

    def beyond(
        self, top: Array, low: Any, high: Any, step: Any, states: tuple[State, ...]
    ) -> tuple[State, ...]:
        """Run the blocks of columns outside the band where a row's maximum is too low."""
        floor = self.spec.band.floor
        assert floor is not None
        begin, end = self.own_columns(pl.program_id(1))
        inside = jnp.maximum(high - low, 0)
        outside = jnp.where(top <= least_maximum(floor, top.dtype), end - begin - inside, 0)

        def one(k: Any, states: tuple[State, ...]) -> tuple[State, ...]:
            b = begin + k
            return step(jnp.where(b < low, b, b + inside), states)

        return lax.fori_loop(0, outside, one, states)

    def own_columns(self, split: Any) -> tuple[Any, Any]:
        """Return the first block of columns of a program, and one past its last, without a band."""
        total = jnp.int32(pl.cdiv(self.spec.cols, self.blocks.cols))
        if self.blocks.splits == 1:
            return jnp.int32(0), total
        part = pl.cdiv(pl.cdiv(self.spec.cols, self.blocks.cols), self.blocks.splits)
        return jnp.minimum(split * part, total), jnp.minimum((split + 1) * part, total)

    def step(
        self,
        inputs: Sequence[Any],
        needed: Sequence[int],
        fixed: dict[int, Array],
        here: dict[str, Any],
        block: Any,
        states: tuple[State, ...],
    ) -> tuple[State, ...]:
        """Return the states after one more block of columns.

        needed: the operands that the step reads.
        fixed: those of them that are read before the loop.
        here: the numbers of the program's first row and feature.
        """
        spec, blocks = self.spec, self.blocks
        start = block * blocks.cols
        at = {**here, spec.col: start}
        i = (here[spec.row] + jnp.arange(blocks.rows, dtype=jnp.int32))[:, None]
        j = (start + jnp.arange(blocks.cols, dtype=jnp.int32))[None, :]
        loaded = dict(fixed)
        dots = tuple(self.contraction(c, inputs, loaded, at) for c in spec.contractions)
        for k in needed:
            if k not in loaded:
                loaded[k] = self.read(inputs[k], k, at)
        values = tuple(self._across(loaded[k], k) for k in spec.tile.reads)
        shape = (blocks.rows, blocks.cols)
        tiles = tiles_of(spec, self.is_inner, dots, values, i, j)
        made, factors = [jnp.broadcast_to(t, shape) for t in tiles], factors_of(spec)
        whole = self.is_inner or spec.cols % blocks.cols == 0
        valid = None if whole else jnp.broadcast_to(j < spec.cols, shape)
        return tuple(
            _extend(o, s, factors[o.tile], *self.arguments(o, made, loaded, valid, j))
            for o, s in zip(spec.outputs, states, strict=True)
        )

    @property
    def has_inner_loop(self) -> bool:
        """Return True if blocks inside the band and the array are many, and cheaper than others."""
        spec, blocks = self.spec, self.blocks
        lower, upper = spec.band.lower, spec.band.upper
        width = spec.cols
        if lower is not None and upper is not None:
            width = min(width, upper - lower + 2 - blocks.rows)
        if width < LEAST_INNER_BLOCKS * blocks.cols:
            return False
        return spec.cols % blocks.cols > 0 or implies_masks(spec)

    def finish(self, states: tuple[State, ...], rows: Sequence[Array]) -> list[Array]:
        """Return all stored results, flat: [rows] or [rows, features]."""
        states = self.told(states)
        if self.spec.epilogue is None:
            return [x for state in states for x in state]
        wide = tuple(tuple(x[:, None] if x.ndim == 1 else x for x in state) for state in states)
        out = []
        made = keeping_nan(self.spec.epilogue.fun)(wide, tuple(rows))
        for x, r in zip(made, self.results, strict=True):
            shape: tuple[int, ...] = (self.blocks.rows,)
            if FEATURE in r.axes:
                shape = (*shape, self.features(r.width, self.blocks.features > 0))
            elif x.ndim == 2:
                x = jnp.sum(x, axis=1, dtype=x.dtype)
            out.append(jnp.broadcast_to(x, shape))
        return out

    def told(self, states: tuple[State, ...]) -> tuple[State, ...]:
        """Return the states as they are stored."""
        outputs, factors = self.spec.outputs, factors_of(self.spec)
        return tuple(_told(o, s, factors[o.tile]) for o, s in zip(outputs, states, strict=True))

    def _across(self, value: Array, number: int) -> Array:
        """Return a vector over rows or columns as one that broadcasts over the tile."""
        if value.ndim != 1:
            return value
        return value[:, None] if self.spec.row in self.axes[number] else value[None, :]

    def arguments(
        self, o: Output, made: Sequence[Array], loaded: dict[int, Array], valid: Any, j: Array
    ) -> tuple[Any, ...]:
        """Return the arguments of the monoid's `lift`; columns past the end hold the identity."""
        tile = made[o.tile]
        fill: Any = 0
        if isinstance(o, Extremum):
            least = o.kind in ("max", "any")
            tile = tile.astype(jnp.int32) if o.kind in ("any", "all") else tile
            fill = monoid.least(tile.dtype) if least else monoid.greatest(tile.dtype)
        elif isinstance(o, ArgExtremum):
            fill = monoid.least(tile.dtype) if o.larger else monoid.greatest(tile.dtype)
        elif isinstance(o, ExpSums):
            tile, fill = tile.astype(jnp.float32), -float("inf")
        elif isinstance(o, Sums):
            tile = tile.astype(accumulator(tile.dtype))
        if valid is not None:
            tile = jnp.where(valid, tile, jnp.full_like(tile, fill))
        if isinstance(o, Extremum):
            return (tile,)
        if isinstance(o, ArgExtremum):
            return tile, j
        return tile, [self.measure(t, made, loaded, valid) for t in terms_of(o)]

    def start(self) -> tuple[State, ...]:
        """Return the identity of every output's monoid, at the padded shapes of a block."""
        raw = replace(self.spec, epilogue=None)
        avals = []
        for axes, shape in zip(state_axes(raw), flat_shapes(raw), strict=True):
            features = math.prod(shape.shape[len(self.spec.batch) + 1 :])
            wide = (self.features(features, self.blocks.features > 0),)
            wide = wide if len(axes) > len(self.spec.batch) + 1 else ()
            dtype = jnp.int32 if shape.dtype == jnp.bool_ else shape.dtype
            avals.append(jax.ShapeDtypeStruct((self.blocks.rows, *wide), dtype))
        return identities(self.spec, avals)


def _blocks_below(column: Any, cols: int) -> Any:
    """Return how many whole blocks of columns lie before a column; 0 if it is negative."""
    return lax.div(jnp.maximum(column, 0), jnp.int32(cols))


def _total(output: ExpSums) -> int | None:
    """Return the index, in the state, of the plain sum of exponentials; None if there is none."""
    plain = (k for k, t in enumerate(output.terms) if t.weights is None and t.factor is None)
    return next((1 + k for k in plain), None)


def _extend(output: Output, state: State, factor: float, *block: Any) -> State:
    """Return the state after one more block; a NaN term makes the state NaN.

    factor: as in `kernel_monoid`.

    The maximum of exponents may drop a NaN where their sum keeps the NaN. Two more instructions per
    pair would make attention slower.
    """
    extend = kernel_monoid(output, factor).extend
    if isinstance(output, ExpSums) and _total(output) is not None:
        return extend(state, *block)
    tile, *rest = block
    return keeping_nan(lambda state, tile: extend(state, tile, *rest))(state, tile)


def _told(output: Output, state: State, factor: float) -> State:
    """Return the state to store: booleans from integers, and maxima NaN where sums are NaN.

    factor: as in `kernel_monoid`.
    """
    if isinstance(output, Extremum) and output.kind in ("any", "all"):
        return (state[0] != 0,)
    if not isinstance(output, ExpSums):
        return state
    top = state[0] if factor == 1 else state[0] * factor
    if (k := _total(output)) is not None:
        top = jnp.where(state[k] != state[k], state[k], top)
    return (top, *state[1:])


class _ProductInTwoParts(NamedTuple):
    """`a @ b` of f32 and bf16, added to a sum; the bf16 rounding error of `a` is multiplied too.

    Two products in bf16 take the time of one in TF32, whose mantissa has 3 bits more than bf16's.
    Both accumulate onto the sum, so that it is the only one that registers hold.
    """

    a: Array
    b: Array

    def __radd__(self, total: Array) -> Array:
        a, b = self
        high = a.astype(b.dtype)
        rest = jnp.where(lax.is_finite(high), a - high.astype(a.dtype), jnp.zeros_like(a))
        return total + dot(high, b) + dot(rest.astype(b.dtype), b)
