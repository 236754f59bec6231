"""The body of the Triton scan: masked loads, the loop over time, stores (may import spec.py).

The methods of `Body` run while the kernel is traced. A program has one block of lanes of one
element of the outer axes, and one chunk of time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from symjax_rewrite.pallas_kernels.scan.block import carried
from symjax_rewrite.pallas_kernels.scan.spec import KINDS, Readout, ScanSpec, readout_axes
from symjax_rewrite.pallas_kernels.triton_programs import keeping_nan

Array = Any


@dataclass(frozen=True, slots=True)
class ScanTiling:
    """The tiling of a scan.

    Args:
        rows: lanes per program.
        chunks: chunks of time.
        unroll: steps whose operands are loaded before the first of these steps.
        warps: warps per program.
    """

    rows: int
    chunks: int = 1
    unroll: int = 8
    warps: int = 1


def power_of_two(size: int) -> int:
    """Return the least power of two not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True, slots=True)
class Sweep:
    """A scan without axes of size 1, and the roles of its state's axes in a program.

    Args:
        spec: the scan.
        cut: the tiling.
        lane: the axis cut into rows; None if there is none.
        held: the axis held whole, because readouts sum over it; None if there is none.
        outer: the other axes; a program has one element of them.
    """

    spec: ScanSpec
    cut: ScanTiling
    lane: str | None
    held: str | None
    outer: tuple[str, ...]

    @staticmethod
    def of(spec: ScanSpec, cut: ScanTiling) -> Sweep:
        """Build the sweep, with a role for each axis."""
        held = next((a for r in spec.readouts for a in r.over), None)
        rest = [a for a in spec.state if a != held]
        lane = rest[-1] if rest else None
        return Sweep(spec, cut, lane, held, tuple(rest[:-1]))

    @property
    def held_size(self) -> int:
        """Return the elements along the summed axis, padded to a power of two."""
        return power_of_two(self.spec.size[self.held]) if self.held else 1

    @property
    def tile(self) -> tuple[int, int]:
        """Return the shape of a program's states."""
        return self.rows, self.held_size

    @property
    def rows(self) -> int:
        """Return the lanes per program."""
        return self.cut.rows if self.lane else 1

    @property
    def lane_blocks(self) -> int:
        """Return the number of programs along the lanes."""
        return pl.cdiv(self.spec.size[self.lane], self.rows) if self.lane else 1

    @property
    def chunk(self) -> int:
        """Return the steps per chunk, a multiple of the unrolled steps."""
        steps = pl.cdiv(self.spec.length, self.cut.chunks)
        return pl.cdiv(steps, self.cut.unroll) * self.cut.unroll

    @property
    def grid(self) -> tuple[int, int]:
        """Return the blocks of lanes over all outer elements, and the chunks."""
        count = math.prod(self.spec.size[a] for a in self.outer) * self.lane_blocks
        return count, pl.cdiv(self.spec.length, self.chunk)

    def block(self, axes: Sequence[str]) -> pl.BlockSpec:
        """Return a program's block of an array: its rows, all of time, all of the summed axis."""
        extent = {self.lane: self.cut.rows, self.held: self.held_size}
        extent |= {self.spec.time: self.grid[1] * self.chunk, "chunk": self.grid[1]}
        shape = tuple(extent.get(a) for a in axes)

        def index(step: Any, chunk: Any) -> tuple[Any, ...]:
            del chunk
            count = jnp.int32(self.lane_blocks)
            place = {self.lane: lax.rem(step, count)}
            rest = lax.div(step, count)
            for axis in reversed(self.outer):
                place[axis] = lax.rem(rest, jnp.int32(self.spec.size[axis]))
                rest = lax.div(rest, jnp.int32(self.spec.size[axis]))
            return tuple(place.get(a, 0) for a in axes)

        return pl.BlockSpec(shape, index)


@dataclass(frozen=True, slots=True)
class Body:
    """One program: the sweep, the number of its first lane, and the number of its chunk."""

    sweep: Sweep
    row: Array
    number: Array

    @staticmethod
    def of(sweep: Sweep) -> Body:
        """Build the body of the program that is being traced."""
        row = lax.rem(pl.program_id(0), jnp.int32(sweep.lane_blocks)) * sweep.rows
        return Body(sweep, row, pl.program_id(1))

    @property
    def spec(self) -> ScanSpec:
        """Return the scan."""
        return self.sweep.spec

    def part(self, axes: Sequence[str], at: dict[str, Any]) -> tuple[tuple, Array | None, bool]:
        """Return the index of a block, the mask of its elements, and True if lanes come last."""
        where, masks, kept = [], [], [a for a in axes if a in (self.sweep.lane, self.sweep.held)]
        sizes = {self.sweep.lane: self.sweep.rows, self.sweep.held: self.sweep.held_size}
        shape = tuple(sizes[a] for a in kept)
        for axis in axes:
            if axis in at:
                where.append(at[axis])
            elif axis in kept:
                where.append(pl.ds(0, sizes[axis]))
                limit = self.spec.size[axis]
                if limit % sizes[axis]:
                    number = jnp.arange(sizes[axis], dtype=jnp.int32)
                    number = number + (self.row if axis == self.sweep.lane else 0)
                    masks.append(lax.broadcast_in_dim(number < limit, shape, (kept.index(axis),)))
        mask = None
        for other in masks:
            mask = other if mask is None else mask & other
        return tuple(where), mask, kept == [self.sweep.held, self.sweep.lane]

    def load(self, ref: Any, axes: Sequence[str], at: dict[str, Any]) -> Array:
        """Load elements as [rows or 1, held or 1], with 0 past an end."""
        where, mask, swapped = self.part(axes, at)
        block = ref.at[where] if where else ref
        x = plgpu.load(block, mask=mask, other=None if mask is None else 0)
        if swapped:
            x = x.T
        if self.sweep.lane not in axes:
            x = x[None, ...]
        return x if self.sweep.held in axes else x[..., None]

    def store(self, ref: Any, axes: Sequence[str], at: dict[str, Any], x: Array, active: Any):
        """Store [rows, held or 1] at `at`, but nothing where `active` is false."""
        where, mask, swapped = self.part(axes, at)
        x = x.T if swapped else x
        if self.sweep.held not in axes:  # `x` has size 1 there; likewise without a lane below
            x = jnp.sum(x, axis=1, dtype=x.dtype)
        if self.sweep.lane not in axes:
            x = jnp.sum(x, axis=0, dtype=x.dtype)
        if active is not None:
            wide = jnp.broadcast_to(active, x.shape)
            mask = wide if mask is None else mask & wide
        block = ref.at[where] if where else ref
        plgpu.store(block, x.astype(ref.dtype), mask=mask)

    def fixed(self, refs: Sequence[Any]) -> list[Array | None]:
        """Load the loop-invariant operands; None for the others."""
        return [
            None if self.spec.time in o.axes else self.load(ref, o.axes, {})
            for o, ref in zip(self.spec.operands, refs, strict=True)
        ]

    def values(self, refs: Sequence[Any], fixed: Sequence[Any], t: Any) -> list[Array]:
        """Return every operand at step `t`."""
        return [
            self.load(ref, o.axes, {self.spec.time: t}) if x is None else x
            for o, ref, x in zip(self.spec.operands, refs, fixed, strict=True)
        ]

    def coefficients(self, values: Sequence[Array], t: Any) -> tuple[Array, Array]:
        """Return `a` and `b` of a step, broadcast to the tile."""
        program = self.spec.coefficients
        a, b = keeping_nan(program.fun)(tuple(values[k] for k in program.reads), t)
        tile, dtype = self.sweep.tile, carried(self.spec)
        return jnp.broadcast_to(a, tile).astype(dtype), jnp.broadcast_to(b, tile).astype(dtype)

    def over_time(self, refs: Sequence[Any], state: Any, step: Any) -> Any:
        """Run `state = step(state, values, t, active)` over the steps of the chunk."""
        fixed, unroll, length = self.fixed(refs), self.sweep.cut.unroll, self.spec.length
        chunks, first = self.sweep.grid[1], self.number * self.sweep.chunk

        def turn(start: Any, state: Any, count: int, active: Any) -> Any:
            times = [start + jnp.int32(u) for u in range(count)]
            times = [length - 1 - t for t in times] if self.spec.reverse else times
            loaded = [self.values(refs, fixed, t) for t in times]
            for t, values in zip(times, loaded, strict=True):
                state = step(state, values, t, active)
            return state

        turns = lax.div(jnp.minimum(length - first, self.sweep.chunk), jnp.int32(unroll))
        state = lax.fori_loop(
            0, turns, lambda i, s: turn(first + i * unroll, s, unroll, None), state
        )
        if rest := length % unroll:
            active = None if chunks == 1 else self.number == chunks - 1
            start = jnp.int32(length - rest)
            state = turn(start, state, rest, active)
        return state

    def summarise(self, *refs: Any) -> None:
        """Run the first kernel: store the map of each chunk, as (a, b) of the kind's monoid."""
        kind, count = KINDS[self.spec.kind], len(self.spec.operands)
        one = jax.ShapeDtypeStruct(self.sweep.tile, carried(self.spec))

        def step(state: Any, values: Any, t: Any, active: Any) -> Any:
            new = keeping_nan(kind.monoid.combine)(state, self.coefficients(values, t))
            return new if active is None else _choose(active, new, state)

        state = self.over_time(refs[:count], kind.monoid.identity([one, one]), step)
        for ref, x in zip(refs[count:], state, strict=True):
            self.store(ref, ("chunk", *self.spec.state), {"chunk": self.number}, x, None)

    def start(self, refs: Sequence[Any], maps: Sequence[Any]) -> Array:
        """Return the state before this program's chunk."""
        spec, kind = self.spec, KINDS[self.spec.kind]
        h = kind.start(self.sweep.tile, carried(spec))
        if spec.start is not None:
            given = self.load(refs[spec.start], spec.operands[spec.start].axes, {})
            h = jnp.broadcast_to(given, self.sweep.tile).astype(carried(spec))
        if not maps:
            return h

        def apply(j: Any, h: Array) -> Array:
            axes = ("chunk", *spec.state)
            a, b = (self.load(ref, axes, {"chunk": j}) for ref in maps)
            after = keeping_nan(kind.step)(a, h, b)
            # A product of decays may overflow where the state is 0, and 0·inf would be NaN.
            return jnp.where(h == 0, b, after) if spec.kind == "affine" else after

        return lax.fori_loop(0, self.number, apply, h)

    def run(self, *refs: Any) -> None:
        """Run the second kernel, which is the only kernel where time is not cut."""
        spec, count = self.spec, len(self.spec.operands)
        given, refs = refs[:count], refs[count:]
        maps = refs[:2] if self.sweep.grid[1] > 1 else ()
        results = refs[len(maps) :]
        kind = KINDS[spec.kind]

        def step(h: Array, values: Any, t: Any, active: Any) -> Array:
            a, b = self.coefficients(values, t)
            after = keeping_nan(kind.step)(a, h, b)
            for ref, readout in zip(results, spec.readouts, strict=False):
                made = self.read_out(readout, h, after, values, t)
                self.store(ref, readout_axes(spec, readout), {spec.time: t}, made, active)
            return after if active is None else jnp.where(active, after, h)

        h = self.over_time(given, self.start(given, maps), step)
        if spec.last:
            active = None if self.sweep.grid[1] == 1 else self.number == self.sweep.grid[1] - 1
            self.store(results[-1], spec.state, {}, h, active)

    def read_out(self, readout: Readout, before: Array, after: Array, values: Any, t: Any) -> Array:
        """Return a readout of one step as [rows, held], or [rows, 1] if it is a sum."""
        program, made = readout.program, after
        if program is not None:
            read = tuple(values[k] for k in program.reads)
            made = keeping_nan(program.fun)((before, after), read, t)
            made = jnp.broadcast_to(made, self.sweep.tile)
        if readout.over:
            limit = self.spec.size[str(self.sweep.held)]
            if limit != self.sweep.held_size:
                real = jnp.arange(self.sweep.held_size, dtype=jnp.int32) < limit
                made = jnp.where(real[None, :], made, jnp.zeros_like(made))
            made = jnp.sum(made, axis=1)[:, None]
        if readout.finish is not None:
            program = readout.finish
            read = tuple(values[k] for k in program.reads)
            made = keeping_nan(program.fun)(made, read, t)
        width = 1 if readout.over else self.sweep.held_size
        return jnp.broadcast_to(made, (self.sweep.rows, width))


def _choose(condition: Any, new: Sequence[Array], old: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(jnp.where(condition, x, y) for x, y in zip(new, old, strict=True))
