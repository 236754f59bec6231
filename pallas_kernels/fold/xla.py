"""Folds streamed by lax loops: any device, linear memory (may import spec.py and tile.py).

An outer loop runs over row blocks and over batch axes that do not fit in a block; an inner loop
runs over column blocks. Blocks are sliced from the operands without transposing, padding or
repeating them. The last row block overlaps the one before. The last columns form a smaller block.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.backend import Reason, Support, first_reason, too_large
from symjax_rewrite.pallas_kernels.fold.array_blocks import ArrayBlocks, with_last_first
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes, fold_reference
from symjax_rewrite.pallas_kernels.fold.spec import (
    ExpSums,
    Extremum,
    FoldSpec,
    KeyedSums,
    Output,
    least_maximum,
    output_axes,
    result_axes,
    runs_across,
    weights_of,
)
from symjax_rewrite.pallas_kernels.fold.tile import (
    Block,
    absorb_block,
    arrange,
    as_block,
    bundle,
    cut,
    finish,
    lift_block,
    monoid_of,
    row_length,
)
from symjax_rewrite.pallas_kernels.fold.tiling import Blocks, lesser, loop_axes, xla_blocks
from symjax_rewrite.pallas_kernels.monoid import State

Array = Any
Begun = Mapping[Output, State]  # states of outputs before a block of rows
STACKED = "stacked"  # name of the axis of a stack


def supports(spec: FoldSpec) -> Support:
    """Return `YES` if 32-bit integers can number the fold's places."""
    numbered = [[spec.size[a] for a in spec.features(k)] for k in spec.tables]
    numbered += [o.sizes for o in spec.outputs if isinstance(o, KeyedSums)]
    if spec.named and numbered:
        return Reason("a table, or sums by key, beside an axis of unknown size")
    known = [(spec.size[a],) for a in (spec.row, spec.col) if a not in spec.named]
    return first_reason(
        (too_large(numbered), "a table, or sums by key, of more than 2^31 elements"),
        (too_large(known), "an axis of more than 2^31 elements"),
    )


def _int32(size: Any) -> Array:
    """Return a size, a number or a symbolic dimension, as an int32."""
    return jnp.asarray(size).astype(jnp.int32)


@dataclass(frozen=True, slots=True)
class _Stack:
    """Operands with the same axes in one array, along its first axis; a single operand as it is.

    XLA on a CPU compiles a kernel for every slice that a loop takes of an array.
    """

    numbers: tuple[int, ...]
    axes: tuple[str, ...]
    array: Array

    def blocks(self, block: Array) -> list[Array]:
        """Return the blocks of the operands in a block of the array."""
        return [block] if len(self.numbers) == 1 else [block[n] for n in range(block.shape[0])]


def _stacked(spec: FoldSpec, arrays: Sequence[Array]) -> list[_Stack]:
    """Put vectors over rows, or over columns, with the same axes and dtype into one array.

    XLA sees that the stack of all columns of a matrix is the matrix. The barrier stores the stack,
    so that its vectors are contiguous. Weights stay apart: XLA multiplies a slice slowly.
    """
    weights, groups = weights_of(spec), defaultdict[Any, list[int]](list)
    for k, operand in enumerate(spec.operands):
        one_side = len({spec.row, spec.col} & {*operand.axes}) == 1
        stacks = one_side and k in spec.tile.reads and k not in weights
        groups[(operand.axes, arrays[k].dtype) if stacks else k].append(k)
    out = []
    for group in groups.values():
        axes, array = spec.operands[group[0]].axes, arrays[group[0]]
        if len(group) > 1:
            axes = (STACKED, *axes)
            last = jnp.stack([arrays[k] for k in group], -1)
            array = lax.optimization_barrier(with_last_first(last))
        out.append(_Stack(tuple(group), axes, array))
    return out


@dataclass(frozen=True, slots=True)
class _Sweep:
    """One fold in execution: its operands and block sizes."""

    spec: FoldSpec
    stacks: Sequence[_Stack]
    blocks: Blocks

    def read(self, number: int, place: dict[str, Any], extent: dict[str, int]) -> Array:
        """Return the block of one operand, sliced from its stack.

        XLA on a CPU computes some tiles of slices of a slice six times slower.
        """
        stack = next(s for s in self.stacks if number in s.numbers)
        place = {**place, STACKED: stack.numbers.index(number)}
        block = self.cut(stack, place, {**extent, STACKED: 1})
        return as_block(self.spec, number, stack.blocks(block)[0], self.blocks.inner)

    @property
    def extent(self) -> dict[str, Any]:
        """Return the sizes of a block along the batch axes that it does not hold whole."""
        outer = {a: 1 for a in self.spec.batch if a not in self.blocks.inner}
        return {**outer, **dict(self.blocks.parts)}

    def cut(self, stack: _Stack, place: dict[str, Any], extent: dict[str, int]) -> Array:
        """Return the block of a stack."""
        return cut(self.spec, stack.axes, stack.array, place, {**self.extent, **extent})

    def results(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[ArrayBlocks]:
        """Return the blocks of the results, without those over columns."""
        extent = {**self.extent, self.spec.row: self.blocks.rows}
        held = [
            tuple(extent.get(a, n) for a, n in zip(axes, s.shape, strict=True))
            for s, axes in zip(shapes, result_axes(self.spec), strict=True)
        ]
        return [ArrayBlocks(s.shape, block) for s, block in zip(shapes, held, strict=True)]

    def operands(self, cuts: Sequence[Array | None]) -> list[Any]:
        """Return the blocks of the operands, from those of their stacks; None without one."""
        made: list[Any] = [None] * len(self.spec.operands)
        for stack, block in zip(self.stacks, cuts, strict=True):
            parts = [] if block is None else stack.blocks(block)
            for k, part in zip(stack.numbers, parts, strict=bool(parts)):
                made[k] = as_block(self.spec, k, part, self.blocks.inner)
        return made

    @property
    def row_blocks(self) -> Any:
        """Return the number of blocks of rows."""
        return -(-self.spec.rows // self.blocks.rows)

    @property
    def rows_overlap(self) -> bool:
        """Return True if the last block of rows may hold rows of the block before."""
        return self.spec.row in self.spec.named or self.spec.rows % self.blocks.rows != 0

    def place_of(self, step: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the starts of a step's blocks, and of the elements that no earlier block held."""
        spec, parts = self.spec, dict(self.blocks.parts)
        step = lax.convert_element_type(step, jnp.int32)  # 64 bits wide if JAX's ints are
        counts, count = self.blocks.counts(spec), _int32(self.row_blocks)
        number = lax.rem(step, count) if counts else step
        begin = {spec.row: number * _int32(self.blocks.rows)}
        place = {spec.row: jnp.minimum(begin[spec.row], _int32(spec.rows - self.blocks.rows))}
        rest = lax.div(step, count)
        for axis, number in reversed(counts.items()):
            count, part = _int32(number), parts.get(axis, 1)
            at = begin[axis] = lax.rem(rest, count) * _int32(part)
            place[axis] = jnp.minimum(at, _int32(spec.size[axis] - part)) if axis in parts else at
            rest = lax.div(rest, count)
        return place, begin

    def unsummed(
        self, new: Array, axes: Sequence[str], place: dict[str, Any], begin: dict[str, Any]
    ) -> Array:
        """Return a summand with zeros for the batch elements that an earlier block summed."""
        for axis, _ in self.blocks.parts:
            k = axes.index(axis)
            at = place[axis] + lax.broadcasted_iota(jnp.int32, new.shape, k)
            new = jnp.where(at >= begin[axis], new, jnp.zeros((), new.dtype))
        return new

    def column_range(self, place: dict[str, Any]) -> tuple[Any, Any]:
        """Return the first column, and one past the last, for the row block at `place`."""
        spec, band = self.spec, self.spec.band
        first = place.get(spec.row, jnp.int32(0))
        last = first + _int32(self.blocks.rows - 1)
        low = 0 if band.lower is None else jnp.maximum(first + band.lower, 0)
        high: Any = spec.cols
        if band.upper is not None:
            high = jnp.clip(last + band.upper + 1, 0, _int32(high))
        if band.length is not None:
            length = row_length(jnp.max(self.read(band.length, place, {}))) + band.extra
            high = jnp.clip(length + last if band.follows else length, 0, _int32(high))
        return low, high

    def begun(self, done: Sequence[Array]) -> Begun:
        """Return the states of the outputs that are summed over every block of rows.

        A loop that adds to the sums of earlier blocks needs no zeros to begin with, and no sum of
        both. done: the blocks of all results so far. Empty where blocks are summed by themselves.
        """
        spec = self.spec
        if spec.epilogue is not None or self.blocks.parts:
            return {}
        left, out = iter(done), dict[Output, State]()
        gone = {a for a in spec.batch if a not in self.blocks.inner}
        for output in spec.outputs:
            pairs = [(next(left), axes) for axes in output_axes(spec, output)]
            if not any(spec.row in axes for _, axes in pairs):
                outer = [[k for k, a in enumerate(axes) if a in gone] for _, axes in pairs]
                state = [lax.squeeze(x, k) for (x, _), k in zip(pairs, outer, strict=True)]
                out[output] = tuple(state)
        return out

    def rows(
        self, place: dict[str, Any], first: Any = None, begun: Begun | None = None
    ) -> list[Array]:
        """Return the results of a fold for one row block, flat; `first` as in `Block`.

        begun: the states that some outputs have before this block.
        """
        spec, extent = self.spec, {self.spec.row: self.blocks.rows}
        fixed = [None if spec.col in s.axes else self.cut(s, place, extent) for s in self.stacks]
        states = self.columns(place, fixed, first, begun or {})
        return finish(spec, states, self.operands(fixed), self.blocks.inner)

    def block(
        self, place: dict[str, Any], fixed: list[Any], first: Any, start: Any, width: int
    ) -> Block:
        """Build the block of columns from `start`; `fixed` holds the stacks without columns."""
        spec = self.spec
        place, extent = {**place, spec.col: start}, {spec.row: self.blocks.rows, spec.col: width}
        arrays = [
            self.read(k, place, extent) if x is None else x
            for k, x in enumerate(self.operands(fixed))
        ]
        i = place.get(spec.row, 0) + jnp.arange(self.blocks.rows, dtype=jnp.int32)
        j = start + jnp.arange(width, dtype=jnp.int32)
        parts = dict(self.blocks.parts)
        return Block(arrays, i[:, None], j[None, :], self.blocks.inner, first, parts)

    def columns(
        self, place: dict[str, Any], fixed: list[Any], first: Any, begun: Begun
    ) -> tuple[State, ...]:
        """Return the states after every block of columns in the band."""
        spec, size = self.spec, self.blocks.cols
        full, tail = self.cut_columns()
        if self.has_one_block(full, tail):
            states = lift_block(spec, self.block(place, fixed, first, 0, spec.cols))
            made = zip(spec.outputs, states, strict=True)
            return tuple([monoid_of(o).combine(begun[o], s) if o in begun else s for o, s in made])
        low, high = self.column_range(place)
        ends = spec.band.upper is not None or spec.band.length is not None
        last = jnp.minimum(-(-high // _int32(size)), _int32(full)) if ends else full

        def step(b: Any, states: tuple[State, ...]) -> tuple[State, ...]:
            start = lax.convert_element_type(b, jnp.int32) * _int32(size)
            return absorb_block(spec, states, self.block(place, fixed, first, start, size))

        avals = jax.eval_shape(lambda: lift_block(spec, self.block(place, fixed, first, 0, size)))
        states = tuple(
            begun[o] if o in begun else monoid_of(o).identity(a)
            for o, a in zip(spec.outputs, avals, strict=True)
        )
        begin = 0 if spec.band.lower is None else low // _int32(size)
        if spec.band.floor is None:
            states = lax.fori_loop(begin, last, step, states)
        else:
            states = self.beyond(place, fixed, begin, last, full, step, states)
        if isinstance(tail, int) and tail == 0:
            return states
        beside = _int32(full * size)

        def absorb_last(states: tuple[State, ...]) -> tuple[State, ...]:
            return absorb_block(spec, states, self.block(place, fixed, first, beside, tail))

        if not (spec.named and ends and spec.band.floor is None):
            return absorb_last(states)
        return lax.cond(high > beside, absorb_last, lambda states: states, states)

    def cut_columns(self) -> tuple[Any, Any]:
        """Return the number of whole blocks of columns, and the columns of the last block.

        The last block of a named axis has at least one column and at most the size of a block, as
        its reductions could not be empty.
        """
        spec, size = self.spec, self.blocks.cols
        if spec.col not in spec.named:
            return divmod(spec.cols, size) if size else (0, 0)
        full = (spec.cols - 1) // size
        return full, lesser(spec.cols, (spec.cols - 1) % size + 1)

    def has_one_block(self, full: Any, tail: Any) -> bool:
        """Return True if one block holds all columns at all sizes."""
        spec = self.spec
        if spec.col not in spec.named:
            return full <= 1 and tail == 0
        return spec.tile.whole == spec.col

    def beyond(
        self, place: dict[str, Any], fixed: list[Any], begin: Any, end: Any, full: int,
        step: Any, states: tuple[State, ...],
    ) -> tuple[State, ...]:  # fmt: skip
        """Run the blocks `begin` to `end`, then all others where a row's maximum is too low."""
        spec, against = self.spec, self.spec.band.against
        inside = jnp.maximum(end - begin, 0)
        low: Any = None
        if against is not None:
            tops = self.operands(fixed)[against]
            low = _is_low(spec, self.read(against, place, {}) if tops is None else tops)

        def runs(carry: tuple[Any, tuple[State, ...]]) -> Any:
            k, states = carry
            beside = low if low is not None else _maximum_is_low(spec, states)
            return (k < inside) | ((k < full) & beside)

        def one(carry: tuple[Any, tuple[State, ...]]) -> Any:
            k, states = carry
            before = k - inside  # a block outside the band, counted from the first column
            outside = jnp.where(before < begin, before, k)
            return k + 1, step(jnp.where(k < inside, begin + k, outside), states)

        return lax.while_loop(runs, one, (jnp.int32(0), states))[1]


def _is_low(spec: FoldSpec, tops: Array) -> Array:
    """Return True if some maximum does not exceed the band's floor by enough, or is NaN.

    The least of them decides: flags would be one more kernel for XLA on a CPU to compile.
    """
    assert spec.band.floor is not None
    least = least_maximum(spec.band.floor, tops.dtype)
    return ~(jnp.min(tops) > least)


def _maximum_is_low(spec: FoldSpec, states: tuple[State, ...]) -> Array:
    kinds = zip(spec.outputs, states, strict=True)
    return functools.reduce(
        jnp.logical_or,
        [_is_low(spec, s[0]) for o, s in kinds if isinstance(o, ExpSums | Extremum)],
    )


def _in_read_order(spec: FoldSpec, operands: Sequence[Array]) -> tuple[FoldSpec, list[Array]]:
    """Transpose operands that loops read more than once, across the order in which they are stored.

    Those are pair operands stored with rows last, vectors that a loop over features reads, and
    those of the parts of a gradient that share a loop. Reading across takes several times as long
    as reading along.
    """
    described, arrays = list(spec.operands), list(operands)
    shared = loop_axes(spec)
    for k, operand in enumerate(spec.operands):
        axes = operand.axes
        if len(axes) > 1 and (axes[-1:] == spec.summed(k) or axes[-1] in shared):
            arrays[k] = lax.optimization_barrier(with_last_first(arrays[k]))
            described[k] = replace(operand, axes=(*axes[-1:], *axes[:-1]))
        if not runs_across(spec, k) or {*spec.batch} <= {*axes}:
            continue
        order = (*(a for a in axes if a not in (spec.row, spec.col)), spec.row, spec.col)
        transposed = lax.transpose(arrays[k], [axes.index(a) for a in order])
        arrays[k] = lax.optimization_barrier(transposed)
        described[k] = replace(operand, axes=order)
    return replace(spec, operands=tuple(described)), arrays


def _whole_if_few(spec: FoldSpec, arrays: Sequence[Array]) -> tuple[Any, ...]:
    """Run a fold of named sizes in one block if its pairs are few, else streamed.

    The sizes are known when XLA compiles the program, which keeps one of the branches.
    """
    left: Any = spec.few
    for axis in (*spec.batch, spec.row, spec.col):
        left = left // spec.size[axis]  # the product of the sizes may not fit into an int32
    return lax.cond(
        _int32(left) > 0,
        lambda *xs: fold_reference(spec, *xs),
        lambda *xs: fold_xla(spec, *xs, blocks=xla_blocks(spec)),
        *arrays,
    )


def fold_xla(spec: FoldSpec, *arrays: Any, blocks: Blocks | None = None) -> tuple[Any, ...]:
    """Run a fold, streamed; `blocks` are chosen from the table of measurements if left out."""
    shapes = flat_shapes(spec)
    if spec.rows == 0 or 0 in spec.batch_shape:
        return bundle(spec, [jnp.zeros(s.shape, s.dtype) for s in shapes])
    if spec.few and blocks is None:
        return _whole_if_few(spec, arrays)
    spec, operands = _in_read_order(spec, arrays)
    sweep = _Sweep(spec, _stacked(spec, operands), blocks or xla_blocks(spec))
    inner, axes = sweep.blocks.inner, result_axes(spec)
    total = math.prod(sweep.blocks.counts(spec).values()) * sweep.row_blocks
    if isinstance(total, int) and total == 1 and not spec.named:
        done = sweep.rows({})
        return bundle(spec, [arrange(spec, k, x, inner) for k, x in enumerate(done)])

    results = sweep.results(shapes)

    def write(step: Any, carried: list[Array]) -> list[Array]:
        place, begin = sweep.place_of(step)
        first = begin[spec.row] if sweep.rows_overlap else None
        starts = [[place.get(a, jnp.int32(0)) for a in order] for order in axes]
        old = [r.read(x, at) for r, x, at in zip(results, carried, starts, strict=True)]
        begun = sweep.begun(old)
        out = []
        for k, new in enumerate(sweep.rows(place, first, begun)):
            new = arrange(spec, k, new, inner)
            if spec.row not in axes[k] and not begun:  # summed over every block of rows
                new = sweep.unsummed(new, axes[k], place, begin) + old[k]
            out.append(results[k].written(carried[k], new, starts[k]))
        return out

    empty = [jnp.zeros(r.stored, s.dtype) for r, s in zip(results, shapes, strict=True)]
    done = lax.fori_loop(0, total, write, empty)
    return bundle(spec, [x.reshape(s.shape) for x, s in zip(done, shapes, strict=True)])
