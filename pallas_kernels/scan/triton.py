"""Scans as Pallas-Triton kernels (may import spec.py and triton_kernel.py).

A program holds the states of one block of lanes in registers and loops over time. Coefficients are
computed where they are used, a readout's sum stays in registers, and every operand is read once.
Where the states are too few to fill the device, time is cut into chunks, in two kernels. The first
computes the map of each chunk, from the state before to the state after, as an element of the
kind's monoid. The second composes the maps of earlier chunks and runs its chunk from there
(Blelloch 1990). The coefficients are then computed twice.

A program holds one axis that readouts sum over. A sum over other axes is written in parts, one for
each program along them, and the parts are added afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from symjax_rewrite.pallas_kernels import triton_programs
from symjax_rewrite.pallas_kernels.backend import (
    TOO_LARGE,
    Support,
    cost_estimate,
    first_reason,
    gpu_at_hand,
    power_of_two,
    too_large,
)
from symjax_rewrite.pallas_kernels.fold.tile import accumulator
from symjax_rewrite.pallas_kernels.scan import cost as scan_cost
from symjax_rewrite.pallas_kernels.scan.block import carried, within_limits, without_ones
from symjax_rewrite.pallas_kernels.scan.spec import (
    KINDS,
    Readout,
    ScanProgram,
    ScanSpec,
    readout_axes,
    result_axes,
    result_shapes,
    roles,
)
from symjax_rewrite.pallas_kernels.triton_programs import for_triton, for_triton_loop, keeping_nan
from symjax_rewrite.pallas_kernels.triton_tiles import Extent, indices, load, store

Array = Any
DTYPES = frozenset({"float32", "bfloat16", "float16", "int32"})
MOST_SUMMED = 256  # the most elements along a state's summed axis in a program
TILE = 256  # elements of state per program: eight per thread of one warp


def supports(spec: ScanSpec) -> Support:
    """Return `YES` if this backend runs the scan on a GPU of compute capability 8.0 or newer."""
    refusal = within_limits(spec, DTYPES)
    if not refusal:
        return refusal
    spec, _ = without_ones(spec)
    cut = triton_cut(spec)
    sweep, foreign = Sweep.of(spec, cut), unlowered(spec)
    parted = any(r.finish is not None and sweep.parted(r) for r in spec.readouts)
    maps, parts = (cut.chunks, *spec.state_shape), [x.shape for x in sweep.written()]
    return first_reason(
        (parted, f"a function of a sum over more than {MOST_SUMMED}, or over several axes"),
        (too_large([maps, *parts]), TOO_LARGE),
        (bool(foreign), f"Triton cannot lower {', '.join(foreign)}"),
    )


@lru_cache(maxsize=256)
def unlowered(spec: ScanSpec) -> tuple[str, ...]:
    """Return the operations of a scan's programs that Pallas-Triton cannot lower."""
    state, t = jax.ShapeDtypeStruct((16, 16), carried(spec)), jax.ShapeDtypeStruct((), jnp.int32)

    def values(program: ScanProgram) -> tuple[Any, ...]:
        return tuple(jax.ShapeDtypeStruct((16, 16), spec.operands[k].dtype) for k in program.reads)

    c = spec.coefficients
    programs: list[Any] = [(c.fun, (values(c), t))]
    for r in spec.readouts:
        states = (state, state)
        made = state
        if r.program is not None:
            programs.append((r.program.fun, (states, values(r.program), t)))
            made = jax.eval_shape(r.program.fun, states, values(r.program), t)
        if r.finish is not None:
            programs.append((r.finish.fun, (made, values(r.finish), t)))
    return triton_programs.unlowered(*programs)


def triton_cut(spec: ScanSpec) -> ScanTiling:
    """Return the tiling of a scan, with chunks where lanes alone leave most of the device idle.

    Chunks take two kernels, each of which computes all coefficients: of a selective scan that has
    half of the programs that fill an H200 they took 1.46 times as long as one kernel.
    """
    sweep = Sweep.of(spec, ScanTiling(1))
    lanes = spec.size[sweep.lane] if sweep.lane else 1
    rows = min(max(TILE // sweep.summed_size, 1), power_of_two(lanes))
    programs = math.prod(spec.size[a] for a in sweep.outer) * pl.cdiv(lanes, rows)
    wanted = pl.cdiv(8 * gpu_at_hand().multiprocessors, programs)
    chunks = 1
    while 2 < wanted > chunks and spec.length // (2 * chunks) >= 64 and chunks < 64:
        chunks *= 2
    return ScanTiling(rows, chunks)


def programs_of(spec: ScanSpec) -> tuple[int, int]:
    """Return the programs of a scan's kernel, and the chunks that time is cut into."""
    spec, _ = without_ones(spec)
    grid = Sweep.of(spec, triton_cut(spec)).grid
    return math.prod(grid), grid[1]


def parts_bytes(spec: ScanSpec) -> int:
    """Return the bytes of the parts of sums, which are written and read beside the results."""
    spec, _ = without_ones(spec)
    sweep = Sweep.of(spec, triton_cut(spec))
    pairs = zip(spec.readouts, sweep.written(), strict=False)
    return 2 * sum(x.size * x.dtype.itemsize for r, x in pairs if sweep.parted(r) or r.total)


def scan_triton(
    spec: ScanSpec, *operands: Any, cut: ScanTiling | None = None, interpret: bool = False
) -> tuple[Any, ...]:
    """Run a scan that `supports` accepts as one kernel, or as two where time is cut into chunks.

    cut: the tiling; chosen from the sizes if left out.
    interpret: run in Pallas' interpreter, on any device.
    """
    shapes = result_shapes(spec)
    spec, operands = without_ones(spec, operands)
    cut = cut or triton_cut(spec)
    sweep = Sweep.of(spec, cut)
    reads = [sweep.block(o.axes) for o in spec.operands]
    options = {
        "grid": sweep.grid,
        "compiler_params": plgpu.CompilerParams(num_warps=cut.warps, num_stages=1),
        "interpret": interpret,
    }
    flops, steps = scan_cost.sums_flops(spec), scan_cost.elementwise_steps(spec)
    maps: Sequence[Array] = ()
    if sweep.grid[1] > 1:
        one = jax.ShapeDtypeStruct((sweep.grid[1], *spec.state_shape), carried(spec))
        block = sweep.block((CHUNK, *spec.state))
        maps = pl.pallas_call(
            partial(_run, sweep, Body.summarise),
            in_specs=reads,
            out_specs=[block, block],
            out_shape=[one, one],
            cost_estimate=cost_estimate(0, operands, [one, one], steps),
            name="scan_maps",
            **options,
        )(*operands)
        reads = [*reads, block, block]
    written = sweep.written()
    results = pl.pallas_call(
        partial(_run, sweep, Body.run),
        in_specs=reads,
        out_specs=[sweep.block(a) for a in sweep.written_axes()],
        out_shape=written,
        cost_estimate=cost_estimate(flops, [*operands, *maps], written, steps),
        name="scan",
        **options,
    )(*operands, *maps)
    whole = []
    for x, axes, (shape, dtype) in zip(results, sweep.written_axes(), shapes, strict=True):
        parts = tuple(k for k, a in enumerate(axes) if _is_part(a))
        whole.append((jnp.sum(x, parts) if parts else x).astype(dtype).reshape(shape))
    return tuple(whole)


def _run(sweep: Sweep, kernel: Any, *refs: Any) -> None:
    """Trace a kernel, a method of `Body`."""
    row = indices(pl.program_id(0), sweep.counts)[sweep.lane] * sweep.rows
    kernel(Body(sweep, row, pl.program_id(1)), *refs)


@dataclass(frozen=True, slots=True)
class ScanTiling:
    """The tiling of a scan: lanes per program, chunks of time, and warps per program.

    unroll: steps whose operands are loaded before the first of these steps.
    """

    rows: int
    chunks: int = 1
    unroll: int = 8
    warps: int = 1


class ProgramsAlong(NamedTuple):
    """An axis of the parts of a sum: one part for each program along an axis of the state."""

    axis: str


Axis = str | ProgramsAlong
CHUNK = "chunk"  # the axis of the results of each chunk of time


def _is_part(axis: Axis) -> bool:
    """Return True for an axis over which parts of a sum are added afterwards."""
    return isinstance(axis, ProgramsAlong) or axis == CHUNK


@dataclass(frozen=True, slots=True)
class Sweep:
    """A scan without axes of size 1, and the roles of its state's axes in a program.

    lane: the axis cut into rows; None if there is none.
    summed: the axis held whole, because readouts sum over it; None if there is none.
    outer: the other axes; a program has one element of them.
    """

    spec: ScanSpec
    cut: ScanTiling
    lane: str | None
    summed: str | None
    outer: tuple[str, ...]

    @staticmethod
    def of(spec: ScanSpec, cut: ScanTiling) -> Sweep:
        outer, lane, summed = roles(spec, MOST_SUMMED, TILE)
        return Sweep(spec, cut, lane, summed, outer)

    @property
    def summed_size(self) -> int:
        """Return the elements along the summed axis, padded to a power of two."""
        return power_of_two(self.spec.size[self.summed]) if self.summed else 1

    @property
    def rows(self) -> int:
        return self.cut.rows if self.lane else 1

    @property
    def tile(self) -> tuple[int, int]:
        """Return the shape of a program's states."""
        return self.rows, self.summed_size

    @property
    def counts(self) -> dict[str | None, int]:
        """Return the programs along each axis of one chunk, the axis that varies fastest last."""
        lanes = pl.cdiv(self.spec.size[self.lane], self.rows) if self.lane else 1
        return {a: self.spec.size[a] for a in self.outer} | {self.lane: lanes}

    @property
    def chunk(self) -> int:
        """Return the steps per chunk, a multiple of the unrolled steps."""
        steps = pl.cdiv(self.spec.length, self.cut.chunks)
        return pl.cdiv(steps, self.cut.unroll) * self.cut.unroll

    @property
    def grid(self) -> tuple[int, int]:
        """Return the blocks of lanes over all outer elements, and the chunks."""
        return math.prod(self.counts.values()), pl.cdiv(self.spec.length, self.chunk)

    def parted(self, readout: Readout) -> tuple[str, ...]:
        """Return the axes that a readout sums over and no program holds whole."""
        return tuple(a for a in readout.over if a != self.summed)

    def written_axes(self) -> list[tuple[Axis, ...]]:
        """Return the axes of the kernel's results: of sums over other programs, the parts."""
        parts: list[tuple[Axis, ...]] = [
            (*[CHUNK] * r.total, *map(ProgramsAlong, self.parted(r))) for r in self.spec.readouts
        ]
        parts += [()] * self.spec.last
        return [(*p, *axes) for p, axes in zip(parts, result_axes(self.spec), strict=True)]

    def written(self) -> list[jax.ShapeDtypeStruct]:
        """Return the arrays that the kernel writes; parts in the dtype in which they are added."""
        size: dict[Any, int] = {**self.spec.size, CHUNK: self.grid[1]}
        size |= {ProgramsAlong(a): n for a, n in self.counts.items() if a}
        out = []
        for axes, (_, dtype) in zip(self.written_axes(), result_shapes(self.spec), strict=True):
            has_parts = any(map(_is_part, axes))
            wide = accumulator(dtype) if has_parts else jnp.dtype(dtype)
            out.append(jax.ShapeDtypeStruct([size[a] for a in axes], wide))
        return out

    def block(self, axes: Sequence[Axis]) -> pl.BlockSpec:
        """Return a program's block of an array: its rows, all of time, all of the summed axis."""
        extent: dict[Any, int] = {self.lane: self.rows, self.summed: self.summed_size}
        extent |= {self.spec.time: self.grid[1] * self.chunk, CHUNK: self.grid[1]}

        def index(step: Any, chunk: Any) -> tuple[Any, ...]:
            del chunk
            place: dict[Any, Any] = indices(step, self.counts)
            place |= {ProgramsAlong(a): k for a, k in place.items()}
            return tuple(place.get(a, 0) for a in axes)

        return pl.BlockSpec(tuple(extent.get(a) for a in axes), index)


@dataclass(frozen=True, slots=True)
class Body:
    """One program while it is traced: the sweep, the number of its first lane, and of its chunk."""

    sweep: Sweep
    row: Array
    number: Array

    @property
    def spec(self) -> ScanSpec:
        return self.sweep.spec

    def where(self, axes: Sequence[str], at: dict[str, Any]) -> list[Any]:
        """Return for each axis of an array its index in `at`, or its extent in a tile."""
        sweep, size = self.sweep, self.spec.size
        whole: dict[str, Any] = {}
        if sweep.lane:
            whole[sweep.lane] = Extent(sweep.rows, 0, self.row, size[sweep.lane])
        if sweep.summed:
            whole[sweep.summed] = Extent(sweep.summed_size, 0, 0, size[sweep.summed])
        whole |= at
        return [whole[a] for a in axes if a in whole]

    def has_lanes_last(self, axes: Sequence[str]) -> bool:
        sweep = self.sweep
        return [a for a in axes if a in (sweep.lane, sweep.summed)] == [sweep.summed, sweep.lane]

    def load(self, ref: Any, axes: Sequence[str], at: dict[str, Any]) -> Array:
        """Load elements as [rows or 1, summed or 1], with 0 past an end."""
        x = load(ref, self.where(axes, at))
        x = x.T if self.has_lanes_last(axes) else x
        x = x if self.sweep.lane in axes else x[None, ...]
        return x if self.sweep.summed in axes else x[..., None]

    def store(self, ref: Any, axes: Sequence[str], at: dict[str, Any], x: Array, active: Any):
        """Store [rows, summed or 1] at `at`, but nothing where `active` is false."""
        x = x.T if self.has_lanes_last(axes) else x
        if self.sweep.summed not in axes:  # `x` has size 1 there; likewise without a lane below
            x = jnp.sum(x, axis=1, dtype=x.dtype)
        if self.sweep.lane not in axes:
            x = jnp.sum(x, axis=0, dtype=x.dtype)
        store(ref, self.where(axes, at), x, active)

    def evaluate(self, program: ScanProgram, values: Sequence[Array], t: Any, *given: Any) -> Any:
        """Run a program of the scan on the operands of step `t`, after its other arguments."""
        read = tuple(values[k] for k in program.reads)
        return for_triton(program.fun)(*given, read, t)

    def coefficients(self, values: Sequence[Array], t: Any) -> list[Array]:
        """Return `a` and `b` of a step, broadcast to the tile."""
        program, operands = self.spec.coefficients, self.spec.operands
        is_fixed = [self.spec.time not in operands[k].axes for k in program.reads]
        read = tuple(values[k] for k in program.reads)
        made = for_triton_loop(program.fun, [*is_fixed, False])(read, t)
        return [jnp.broadcast_to(x, self.sweep.tile).astype(carried(self.spec)) for x in made]

    def over_time(self, refs: Sequence[Any], state: Any, step: Any) -> Any:
        """Run `state = step(state, values, t, active)` over the steps of the chunk."""
        spec, unroll, length = self.spec, self.sweep.cut.unroll, self.spec.length
        operands = [(ref, o.axes) for ref, o in zip(refs, spec.operands, strict=True)]
        fixed = [None if spec.time in axes else self.load(ref, axes, {}) for ref, axes in operands]
        chunks, first = self.sweep.grid[1], self.number * self.sweep.chunk

        def turn(start: Any, state: Any, count: int, active: Any) -> Any:
            times = [start + jnp.int32(u) for u in range(count)]
            times = [length - 1 - t for t in times] if spec.reverse else times
            loaded = [
                [
                    self.load(ref, axes, {spec.time: t}) if x is None else x
                    for (ref, axes), x in zip(operands, fixed, strict=True)
                ]
                for t in times
            ]
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
            if active is None:
                return new
            return tuple(jnp.where(active, x, y) for x, y in zip(new, state, strict=True))

        state = self.over_time(refs[:count], kind.monoid.identity([one, one]), step)
        for ref, x in zip(refs[count:], state, strict=True):
            self.store(ref, (CHUNK, *self.spec.state), {CHUNK: self.number}, x, None)

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
            axes = (CHUNK, *spec.state)
            a, b = (self.load(ref, axes, {CHUNK: j}) for ref in maps)
            after = keeping_nan(kind.step)(a, h, b)
            # A product of decays may overflow where the state is 0, and 0·inf would be NaN.
            return jnp.where(h == 0, b, after) if kind.multiplies else after

        return lax.fori_loop(0, self.number, apply, h)

    def run(self, *refs: Any) -> None:
        """Run the second kernel, which is the only kernel where time is not cut."""
        spec, count = self.spec, len(self.spec.operands)
        given, refs = refs[:count], refs[count:]
        maps = refs[:2] if self.sweep.grid[1] > 1 else ()
        results = refs[len(maps) :]
        kind = KINDS[spec.kind]

        totals = [(ref, r) for ref, r in zip(results, spec.readouts, strict=False) if r.total]

        def step(state: tuple[Array, ...], values: Any, t: Any, active: Any) -> tuple[Array, ...]:
            h, *before = state
            sums = list[Array]()
            a, b = self.coefficients(values, t)
            after = keeping_nan(kind.step)(a, h, b)
            for ref, readout in zip(results, spec.readouts, strict=False):
                made = self.read_out(readout, h, after, values, t)
                if readout.total:
                    total = before[len(sums)]
                    sums.append(total + made.astype(total.dtype))
                else:
                    self.store(ref, readout_axes(spec, readout), {spec.time: t}, made, active)
            new = after, *sums
            if active is None:
                return new
            return tuple(jnp.where(active, x, y) for x, y in zip(new, state, strict=True))

        zeros = (
            jnp.zeros(self.shape_read(r), accumulator(r.dtype or spec.dtype)) for _, r in totals
        )
        h, *sums = self.over_time(given, (self.start(given, maps), *zeros), step)
        for (ref, readout), x in zip(totals, sums, strict=True):
            self.store(ref, (CHUNK, *readout_axes(spec, readout)), {CHUNK: self.number}, x, None)
        if spec.last:
            active = None if self.sweep.grid[1] == 1 else self.number == self.sweep.grid[1] - 1
            self.store(results[-1], spec.state, {}, h, active)

    def shape_read(self, readout: Readout) -> tuple[int, int]:
        """Return the shape of a readout of one step in a program."""
        rows, width = self.sweep.tile
        over = readout.over
        return 1 if self.sweep.lane in over else rows, 1 if self.sweep.summed in over else width

    def read_out(self, readout: Readout, before: Array, after: Array, values: Any, t: Any) -> Array:
        """Return a readout of one step as [rows, held], or [rows, 1] if it is a sum."""
        made, (rows, width) = after, self.sweep.tile
        if readout.program is not None:
            made = self.evaluate(readout.program, values, t, (before, after))
            made = jnp.broadcast_to(made, self.sweep.tile)
        sweep, size = self.sweep, self.spec.size
        if sweep.summed in readout.over:
            made = _or_zero(made, jnp.arange(width, dtype=jnp.int32)[None, :], size[sweep.summed])
            made, width = jnp.sum(made, axis=1)[:, None], 1
        if sweep.lane in readout.over:
            lanes = self.row + jnp.arange(rows, dtype=jnp.int32)
            made = _or_zero(made, lanes[:, None], size[sweep.lane])
            made, rows = jnp.sum(made, axis=0)[None, :], 1
        if readout.finish is not None:
            made = self.evaluate(readout.finish, values, t, made)
        return jnp.broadcast_to(made, (rows, width))


def _or_zero(x: Array, numbers: Array, limit: int) -> Array:
    """Return a tile with 0 where the number of an element is past the end of its axis."""
    if limit % numbers.size == 0:
        return x
    return jnp.where(numbers < limit, x, jnp.zeros_like(x))
