"""The body of the Triton fold: masked loads, the column loop, stores (may import spec.py).

The code here runs while the kernel is traced. A program has one row block of one batch element.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from symjax_rewrite.pallas_kernels import monoid
from symjax_rewrite.pallas_kernels.fold.layout import FEATURE, FoldResult
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
    state_axes,
    terms_of,
    weights_of,
)
from symjax_rewrite.pallas_kernels.fold.tile import accumulator, bundle, monoid_of, row_length
from symjax_rewrite.pallas_kernels.fold.tiling import WIDE, TritonBlocks, power_of_two
from symjax_rewrite.pallas_kernels.monoid import Monoid, State
from symjax_rewrite.pallas_kernels.triton_programs import keeping_nan

Array = Any


@dataclass(frozen=True, slots=True)
class Kernel:
    """One fold with its block sizes; `axes` are the operands' axes after features are merged."""

    spec: FoldSpec
    blocks: TritonBlocks
    axes: tuple[tuple[str, ...], ...]
    results: tuple[FoldResult, ...]

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.spec.rows, self.blocks.rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the numbers of row blocks in all batches, column splits, and feature slices."""
        widths = [self.spec.width(k) for k in weights_of(self.spec)]
        slices = pl.cdiv(max(widths), self.blocks.features) if self.blocks.features else 1
        return self.row_blocks * math.prod(self.spec.batch_shape), self.blocks.splits, slices

    def sliced(self, number: int) -> bool:
        """Return True if each program has its own slice of the operand's features."""
        reads = self.spec.epilogue.reads if self.spec.epilogue else ()
        return self.blocks.features > 0 and number in (*weights_of(self.spec), *reads)

    def held(self, width: int, sliced: bool) -> int:
        """Return how many of `width` features a program holds."""
        return self.blocks.features if sliced else power_of_two(width)

    def chunked(self, number: int) -> bool:
        """Return True if the operand's features are read in chunks inside the column loop."""
        return self.spec.width(number) > WIDE and not self.sliced(number)

    def place(self, step: Any) -> dict[str, Any]:
        """Return batch indices and row block of a program; causal folds start with late rows."""
        count = jnp.int32(self.row_blocks)
        row = lax.rem(step, count)
        place = {self.spec.row: count - 1 - row if self.spec.band.upper is not None else row}
        rest = lax.div(step, count)
        for axis in reversed(self.spec.batch):
            size = jnp.int32(self.spec.size[axis])
            place[axis] = lax.rem(rest, size)
            rest = lax.div(rest, size)
        return place

    def operand_spec(self, number: int) -> pl.BlockSpec:
        spec, blocks = self.spec, self.blocks
        width = spec.width(number)
        features = (
            pl.cdiv(width, blocks.chunk) * blocks.chunk
            if self.chunked(number)
            else self.held(width, self.sliced(number))
        )
        extent = {
            spec.row: blocks.rows,
            spec.col: pl.cdiv(spec.cols, blocks.cols) * blocks.cols,
            FEATURE: features,
        }
        shape = tuple(extent.get(a) for a in self.axes[number])

        def index(step: Any, split: Any, part: Any) -> tuple[Any, ...]:
            del split
            place = self.place(step) | ({FEATURE: part} if self.sliced(number) else {})
            return tuple(place.get(a, 0) for a in self.axes[number])

        return pl.BlockSpec(shape, index)

    def result_spec(self, result: FoldResult) -> pl.BlockSpec:
        features = self.held(result.width(self.spec), self.blocks.features > 0)
        extent = {self.spec.row: self.blocks.rows, FEATURE: features}

        def index(step: Any, split: Any, part: Any) -> tuple[Any, ...]:
            place = self.place(step) | ({FEATURE: part} if self.blocks.features else {})
            return (split, *(place.get(a, 0) for a in result.axes))

        return pl.BlockSpec((None, *(extent.get(a) for a in result.axes)), index)

    def load(self, ref: Any, number: int, at: dict[str, Any], chunk: Any = None) -> Array:
        """Load a block [rows or columns, features], [rows, columns], [rows], [columns] or [].

        Args:
            ref: the reference of the operand.
            number: the number of the operand.
            at: the numbers of the block's first row and first column.
            chunk: the number of the chunk of features, if features are read in chunks.
        """
        spec, blocks = self.spec, self.blocks
        kept = [a for a in self.axes[number] if a not in spec.batch]
        if not kept:
            return self._typed(ref[...], number)
        where, masks = [], []
        for position, axis in enumerate(kept):
            if axis == spec.row:
                size, first, limit = blocks.rows, 0, spec.rows
                offset = at[axis]
                partial = spec.rows % blocks.rows != 0
            elif axis == spec.col:
                size, first, limit = blocks.cols, at[axis], spec.cols
                offset = at[axis]
                partial = spec.cols % blocks.cols != 0
            else:
                limit = spec.width(number)
                size = self._extent([FEATURE], number, chunk)[0]
                first = 0 if chunk is None else chunk * size
                offset = first + (at[FEATURE] if self.sliced(number) else 0)
                partial = limit % size != 0
            where.append(pl.ds(first, size))
            if partial:
                inside = offset + jnp.arange(size, dtype=jnp.int32) < limit
                masks.append(
                    lax.broadcast_in_dim(inside, self._extent(kept, number, chunk), (position,))
                )
        block = ref.at[tuple(where)]
        if not masks:
            return self._ordered(plgpu.load(block), kept, number)
        mask = masks[0]
        for other in masks[1:]:
            mask = mask & other
        return self._ordered(plgpu.load(block, mask=mask, other=0), kept, number)

    def _extent(self, kept: Sequence[str], number: int, chunk: Any) -> tuple[int, ...]:
        features = self.held(self.spec.width(number), self.sliced(number))
        features = self.blocks.chunk if chunk is not None else features
        sizes = {self.spec.row: self.blocks.rows, self.spec.col: self.blocks.cols}
        return tuple(sizes.get(a, features) for a in kept)

    def _ordered(self, block: Array, kept: Sequence[str], number: int) -> Array:
        order = [a for a in (self.spec.row, self.spec.col, FEATURE) if a in kept]
        if list(kept) != order:
            block = block.T
        return self._typed(block, number)

    def _typed(self, block: Array, number: int) -> Array:
        return block != 0 if self.spec.operands[number].dtype == "bool" else block

    def contraction(
        self, c: Contraction, refs: Sequence[Any], held: dict[int, Array], at: dict[str, Any]
    ) -> Array:
        dtype = jnp.promote_types(self.spec.operands[c.row].dtype, self.spec.operands[c.col].dtype)
        if not self.chunked(c.row):
            col = held[c.col] if c.col in held else self.load(refs[c.col], c.col, at)
            held[c.col] = col
            return _dot_t(held[c.row].astype(dtype), col.astype(dtype), c)

        def step(chunk: Any, total: Array) -> Array:
            row = self.load(refs[c.row], c.row, at, chunk)
            col = self.load(refs[c.col], c.col, at, chunk)
            return total + _dot_t(row.astype(dtype), col.astype(dtype), c)

        zero = jnp.zeros((self.blocks.rows, self.blocks.cols), jnp.float32)
        chunks = pl.cdiv(self.spec.width(c.row), self.blocks.chunk)
        return lax.fori_loop(0, chunks, step, zero).astype(c.dtype)

    def measure(
        self, term: WeightedTerm, made: Sequence[Array], held: dict[int, Array], valid: Array | None
    ) -> monoid.Measure:
        def weighted(p: Array) -> Array:
            if term.factor is not None:
                p = p * made[term.factor].astype(p.dtype)
                p = p if valid is None else jnp.where(valid, p, jnp.zeros_like(p))
            if term.weights is None:
                return jnp.sum(p, axis=-1, dtype=p.dtype)
            w = held[term.weights]
            if term.round_to is not None:
                p = p.astype(term.round_to)
            elif w.ndim == 2 and p.dtype == jnp.float32 and in_two_parts(self.spec, term):
                return _dot_in_two_parts(p, w)
            dtype = jnp.promote_types(p.dtype, w.dtype)
            if w.ndim == 1:
                total = accumulator(dtype)
                p = p.astype(total) * w.astype(total)[None, :]
                return jnp.sum(p, axis=-1, dtype=total)
            return _dot(p.astype(dtype), w.astype(dtype), term.precision)

        return weighted

    def column_range(self, refs: Sequence[Any], row: Any, split: Any) -> tuple[Any, Any]:
        """Return the first block of columns of this program, and one past its last."""
        spec, blocks = self.spec, self.blocks
        total = pl.cdiv(spec.cols, blocks.cols)
        low, high = jnp.int32(0), jnp.int32(total)
        if spec.band.lower is not None:
            low = lax.div(jnp.maximum(row + spec.band.lower, 0), jnp.int32(blocks.cols))
        ends = []
        if spec.band.upper is not None:
            ends.append(row + blocks.rows + spec.band.upper)
        if spec.band.length is not None:
            length = row_length(self.load(refs[spec.band.length], spec.band.length, {}))
            ends.append(length + spec.band.extra + (row + blocks.rows - 1) * spec.band.follows)
        for end in ends:
            last = lax.div(jnp.maximum(end, 0) + blocks.cols - 1, jnp.int32(blocks.cols))
            high = jnp.minimum(high, last)
        if blocks.splits > 1:
            part = pl.cdiv(total, blocks.splits)
            low = jnp.maximum(low, split * part)
            high = jnp.minimum(high, (split + 1) * part)
        return low, high

    def run(self, *refs: Any) -> None:
        spec, blocks = self.spec, self.blocks
        inputs, results = refs[: len(spec.operands)], refs[len(spec.operands) :]
        row = self.place(pl.program_id(0))[spec.row] * blocks.rows
        here = {spec.row: row, FEATURE: pl.program_id(2) * blocks.features}
        i = (row + jnp.arange(blocks.rows, dtype=jnp.int32))[:, None]
        contracted = {k for c in spec.contractions for k in (c.row, c.col)}
        last = spec.epilogue.reads if spec.epilogue else ()
        needed = {
            *spec.tile.reads,
            *weights_of(spec),
            *(k for k in contracted if not self.chunked(k)),
        }
        fixed = {
            k: self.load(inputs[k], k, here) for k in sorted(needed) if spec.col not in self.axes[k]
        }

        def step(block: Any, states: tuple[State, ...]) -> tuple[State, ...]:
            start = block * blocks.cols
            at = {**here, spec.col: start}
            j = (start + jnp.arange(blocks.cols, dtype=jnp.int32))[None, :]
            held = dict(fixed)
            dots = tuple(self.contraction(c, inputs, held, at) for c in spec.contractions)
            for k in sorted(needed - set(held)):
                held[k] = self.load(inputs[k], k, at)
            values = tuple(self._as_tile(held[k], k) for k in spec.tile.reads)
            made = keeping_nan(spec.tile.fun)(dots, values, i, j)
            made = made if isinstance(made, (tuple, list)) else (made,)
            shape = (blocks.rows, blocks.cols)
            made = [jnp.broadcast_to(t, shape) for t in made]
            valid = None if spec.cols % blocks.cols == 0 else jnp.broadcast_to(j < spec.cols, shape)
            return tuple(
                _extend(o, s, *self.arguments(o, made, held, valid, j))
                for o, s in zip(spec.outputs, states, strict=True)
            )

        low, high = self.column_range(inputs, row, pl.program_id(1))
        states = lax.fori_loop(low, high, step, self.start())
        rows = [self._as_row(fixed.get(k, self.load(inputs[k], k, here)), k) for k in last]
        for k, value in enumerate(self.finish(states, rows)):
            self.store(results[k], k, value, here)

    def finish(self, states: tuple[State, ...], rows: Sequence[Array]) -> list[Array]:
        """Return all stored results, flat: [rows] or [rows, features]."""
        states = tuple(_told(o, s) for o, s in zip(self.spec.outputs, states, strict=True))
        if self.spec.epilogue is None:
            return [x for state in states for x in state]
        wide = tuple(tuple(x[:, None] if x.ndim == 1 else x for x in state) for state in states)
        out = []
        made = keeping_nan(self.spec.epilogue.fun)(wide, tuple(rows))
        for x, r in zip(made, self.results, strict=True):
            if FEATURE in r.axes:
                wide = self.held(r.width(self.spec), self.blocks.features > 0)
                x = jnp.broadcast_to(x, (self.blocks.rows, wide))
            else:
                x = jnp.sum(x, axis=1, dtype=x.dtype) if x.ndim == 2 else x
                x = jnp.broadcast_to(x, (self.blocks.rows,))
            out.append(x)
        return out

    def _as_row(self, value: Array, number: int) -> Array:
        if value.ndim == 1:
            return value[:, None] if self.spec.row in self.axes[number] else value[None, :]
        return value

    def _as_tile(self, value: Array, number: int) -> Array:
        axes = self.axes[number]
        if value.ndim == 1:
            return value[:, None] if self.spec.row in axes else value[None, :]
        return value

    def arguments(
        self, o: Output, made: Sequence[Array], held: dict[int, Array], valid: Any, j: Array
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
        return tile, [self.measure(t, made, held, valid) for t in terms_of(o)]

    def start(self) -> tuple[State, ...]:
        """Return the identity of every output's monoid, at the padded shapes of a block."""
        raw = dataclasses.replace(self.spec, epilogue=None)
        avals = []
        for axes, shape in zip(state_axes(raw), flat_shapes(raw), strict=True):
            features = math.prod(shape.shape[len(self.spec.batch) + 1 :])
            wide = (self.held(features, self.blocks.features > 0),)
            wide = wide if len(axes) > len(self.spec.batch) + 1 else ()
            dtype = jnp.int32 if shape.dtype == jnp.bool_ else shape.dtype
            avals.append(jax.ShapeDtypeStruct((self.blocks.rows, *wide), dtype))
        return tuple(
            _monoid(o).identity(state)
            for o, state in zip(self.spec.outputs, bundle(raw, avals), strict=True)
        )

    def store(self, ref: Any, number: int, value: Array, here: dict[str, Any]) -> None:
        """Write a block of result `number`, masked past the ends of the result."""
        result = self.results[number]
        value = value.astype(ref.dtype)
        kept = [a for a in result.axes if a not in self.spec.batch]
        masks = []
        for position, axis in enumerate(kept):
            if axis == self.spec.row:
                size, limit = self.blocks.rows, self.spec.rows
            else:
                limit = result.width(self.spec)
                size = self.held(limit, self.blocks.features > 0)
            if limit % size:
                shape = (
                    value.shape
                    if value.ndim == 1 or kept[0] == self.spec.row
                    else value.shape[::-1]
                )
                inside = here[axis] + jnp.arange(size, dtype=jnp.int32) < limit
                masks.append(lax.broadcast_in_dim(inside, shape, (position,)))
        if value.ndim == 2 and kept[0] != self.spec.row:
            value = value.T
        mask = None
        for m in masks:
            mask = m if mask is None else mask & m
        plgpu.store(ref.at[...], value, mask=mask)


def _monoid(output: Output) -> Monoid:
    """Return the monoid; any and all are max and min of integers (Triton reduces no booleans)."""
    if isinstance(output, Extremum) and output.kind in ("any", "all"):
        return monoid.MAX if output.kind == "any" else monoid.MIN
    return monoid_of(output)


def _total(output: ExpSums) -> int | None:
    """Return the index, in the state, of the plain sum of exponentials; None if there is none."""
    plain = (k for k, t in enumerate(output.terms) if t.weights is None and t.factor is None)
    return next((1 + k for k in plain), None)


def _extend(output: Output, state: State, *block: Any) -> State:
    """Return the state after one more block; a NaN term makes the state NaN.

    The maximum of exponents may drop a NaN where their sum keeps the NaN. Two more instructions per
    pair would make attention slower.
    """
    extend = _monoid(output).extend
    if isinstance(output, ExpSums) and _total(output) is not None:
        return extend(state, *block)
    tile, *rest = block
    return keeping_nan(lambda state, tile: extend(state, tile, *rest))(state, tile)


def _told(output: Output, state: State) -> State:
    """Return the state to store: booleans from integers, and maxima NaN where sums are NaN."""
    if isinstance(output, Extremum) and output.kind in ("any", "all"):
        return (state[0] != 0,)
    if isinstance(output, ExpSums) and (k := _total(output)) is not None:
        return (jnp.where(state[k] != state[k], state[k], state[0]), *state[1:])
    return state


def _dot(a: Array, b: Array, precision: str | None) -> Array:
    return lax.dot_general(
        a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _dot_in_two_parts(a: Array, b: Array) -> Array:
    """Return `a @ b` of f32 and bf16; the bf16 rounding error of `a` is multiplied too.

    Two products in bf16 take the time of one in TF32, whose mantissa has 3 bits more than bf16's.
    """
    high = a.astype(b.dtype)
    rest = jnp.where(lax.is_finite(high), a - high.astype(a.dtype), jnp.zeros_like(a))
    return _dot(high, b, None) + _dot(rest.astype(b.dtype), b, None)


def _dot_t(a: Array, b: Array, c: Contraction) -> Array:
    return lax.dot_general(
        a, b, (((1,), (1,)), ((), ())), precision=c.precision, preferred_element_type=jnp.float32
    ).astype(c.dtype)
