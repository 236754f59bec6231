"""The body of the Mosaic GPU fold: layout, the pipeline of column blocks, stores (imports spec.py).

The code here runs while the kernel is traced. A program has one block of rows of one batch element.
Each of its compute warpgroups has `ROWS` of these rows; one more warpgroup copies blocks of columns
to shared memory (TMA) ahead of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from symjax_rewrite.pallas_kernels import monoid
from symjax_rewrite.pallas_kernels.fold.reference import flat_shapes
from symjax_rewrite.pallas_kernels.fold.spec import (
    Contraction,
    ExpSums,
    FoldSpec,
    Output,
    WeightedTerm,
    in_two_parts,
    state_axes,
    terms_of,
    weights_of,
)
from symjax_rewrite.pallas_kernels.fold.tile_facts import (
    factors_of,
    identities,
    implies_masks,
    kernel_monoid,
    tiles_of,
)
from symjax_rewrite.pallas_kernels.monoid import State
from symjax_rewrite.pallas_kernels.triton_tiles import indices
from symjax_rewrite.pallas_kernels.unit_axes import without_unit_axes

Array = Any
ROWS = 64  # rows of a warpgroup's matmul instruction
STEP = 16  # features of a matmul instruction; widths are padded to multiples
TILED = 8  # rows and columns of a tile in shared memory, which divide those of an array
FEATURE = ""  # the name of the merged feature axis of an operand or a result
PROGRAM, GROUP = "program", "warpgroup"  # the axes of the grid and of the threads


@dataclass(frozen=True, slots=True)
class MosaicBlocks:
    """The block sizes of a fold on the `mosaic` backend.

    groups: compute warpgroups per program, each with `ROWS` rows.
    cols: columns per step.
    stages: blocks of columns in shared memory at once.
    """

    groups: int = 2
    cols: int = 128
    stages: int = 2

    @property
    def rows(self) -> int:
        return self.groups * ROWS


def padded(size: int, multiple: int) -> int:
    """Return the least multiple not below a size."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An operand or a result as the kernel reads or writes it.

    A matrix keeps its axes in order and has its features last, merged and padded; its rows or
    columns are padded to multiples of `TILED`. A vector has the batch axes first, and its rows or
    columns are padded to whole blocks. 32-bit numbers represent the values of vectors.

    order: the axes, features apart.
    axes: the axes with the features merged.
    shape: by axis of `axes`.
    """

    order: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(
        cls, spec: FoldSpec, axes: Sequence[str], features: Sequence[str], dtype: Any, whole: int
    ) -> StoredArray:
        """Return the layout of an array.

        whole: padding of the rows or columns of vectors.
        """
        kept = [a for a in axes if a not in features]
        extent = dict(spec.sizes)
        if features:
            extent[FEATURE] = padded(math.prod(extent[a] for a in features), STEP)
            extent |= {a: padded(extent[a], TILED) for a in kept if a not in spec.batch}
            merged = (*kept, FEATURE)
        elif {spec.row, spec.col} <= {*kept}:
            merged = tuple(kept)
            dtype = jnp.int8 if dtype == "bool" else dtype
        else:
            kept = [a for a in spec.batch if a in kept] + [a for a in kept if a not in spec.batch]
            extent |= {a: padded(extent[a], whole) for a in kept if a not in spec.batch}
            merged = tuple(kept)
            dtype = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
        shape = tuple(extent[a] for a in merged) or (1,)
        return cls((*kept, *features), merged, shape, jnp.dtype(dtype))

    def stored(self, axes: Sequence[str], x: Array) -> Array:
        """Return an array of `axes` as stored."""
        x = lax.transpose(x, [axes.index(a) for a in self.order])
        x = x.reshape([*x.shape[: len(self.axes) - 1], -1] if FEATURE in self.axes else x.shape)
        x = x.reshape(x.shape or self.shape)
        pad = [(0, n - m) for n, m in zip(self.shape, x.shape, strict=True)]
        return jnp.pad(x.astype(self.dtype), pad)

    def restored(self, spec: FoldSpec, axes: Sequence[str], x: Array, dtype: Any) -> Array:
        """Return a stored array over `axes`."""
        features = self.order[len(self.axes) - (FEATURE in self.axes) :]
        width = math.prod(spec.size[a] for a in features)
        x = x[tuple(slice(width if a == FEATURE else spec.size[a]) for a in self.axes)]
        x = x.reshape([spec.size[a] for a in self.order]).astype(dtype)
        return lax.transpose(x, [self.order.index(a) for a in axes])


@dataclass(frozen=True, slots=True)
class AddedProduct:
    """The product of tiles [rows, columns] with weights [columns, features], added to a sum.

    Each part is rounded to the dtype of the weights. The parts of one tile add up to the tile.
    """

    parts: tuple[Array, ...]
    weights: Any
    by_instruction: bool

    def __radd__(self, total: Array) -> Array:
        if not self.by_instruction:
            weights = self.weights[...].astype(jnp.float32)
            made = (jnp.dot(part.astype(jnp.float32), weights) for part in self.parts)
            return sum(made, total)

        def accumulate(acc: Any) -> None:
            for part in self.parts:
                plgpu.wgmma(acc, part, self.weights)

        return pl.run_state(accumulate)(plgpu.WGMMAAccumulatorRef.init(total))


@dataclass(frozen=True, slots=True)
class MosaicKernel:
    """One fold with its block sizes.

    operands, results: how they are stored.
    interpreted: True in the interpreter, which has no matmul instruction for tiles in registers.
    is_inner: True for tiles wholly inside the band and the array.
    """

    spec: FoldSpec
    blocks: MosaicBlocks
    operands: tuple[StoredArray, ...]
    results: tuple[StoredArray, ...]
    interpreted: bool = False
    is_inner: bool = False

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.spec.rows, self.blocks.rows)

    @property
    def programs(self) -> int:
        return self.row_blocks * math.prod(self.spec.batch_shape)

    @property
    def read(self) -> list[int]:
        """Return the numbers of the operands that the kernel reads."""
        spec = self.spec
        return sorted({*spec.contracted, *spec.tile.reads, *weights_of(spec), *spec.read_last})

    @property
    def streamed(self) -> list[int]:
        """Return the numbers of the operands that are read block by block of columns."""
        return [k for k in self.read if self.spec.col in self.operands[k].axes]

    @property
    def held(self) -> list[int]:
        """Return the numbers of the operands whose rows a program holds in shared memory."""
        axes = {k: self.operands[k].axes for k in self.read}
        return [k for k in self.read if self.spec.row in axes[k] and self.spec.col not in axes[k]]

    @property
    def loads_blocks(self) -> bool:
        """Return True if streamed blocks are loaded, not only read by matmul instructions.

        The next copy into such a block must be ordered after the loads by a fence.
        """
        return self.interpreted or any(FEATURE not in self.operands[k].axes for k in self.streamed)

    def tile_shape(self, stored: StoredArray) -> tuple[int, ...]:
        """Return the part of an array that a warpgroup works on at a time."""
        extent = {self.spec.row: ROWS, self.spec.col: self.blocks.cols}
        sizes = zip(stored.axes, stored.shape, strict=True)
        return tuple(extent.get(a, n) for a, n in sizes if a not in self.spec.batch)

    @property
    def scratch(self) -> dict[str, Any]:
        """Return the shared memory of a block: tiles of rows, results, and barriers."""

        def tiles(stored: Sequence[StoredArray]) -> list[Any]:
            groups = self.blocks.groups
            return [plgpu.SMEM((groups, *self.tile_shape(s)), s.dtype) for s in stored]

        held = [self.operands[k] for k in self.held]
        barrier = plgpu.Barrier(num_arrivals=len(held), num_barriers=self.blocks.groups)
        return {"held": tiles(held), "made": tiles(self.results), "arrived": barrier}

    def place(self) -> dict[str, Any]:
        """Return batch indices and row block of a program; causal folds start with late rows."""
        spec = self.spec
        counts = {a: spec.size[a] for a in spec.batch} | {spec.row: self.row_blocks}
        place = indices(lax.axis_index(PROGRAM), counts)
        if spec.band.upper is not None:
            place[spec.row] = self.row_blocks - 1 - place[spec.row]
        return place

    def column_range(self, row: Any) -> tuple[Any, Any]:
        """Return the first block of columns of a program, and the number of blocks."""
        band, cols = self.spec.band, jnp.int32(self.blocks.cols)
        low, high = jnp.int32(0), jnp.int32(pl.cdiv(self.spec.cols, self.blocks.cols))
        if band.floor is not None:  # which columns outside matter is known from data alone
            return low, high
        if band.lower is not None:
            low = jnp.minimum(lax.div(jnp.maximum(row + band.lower, 0), cols), high)
        if band.upper is not None:
            end = jnp.maximum(row + self.blocks.rows + band.upper, 0)
            high = jnp.minimum(lax.div(end + cols - 1, cols), high)
        return low, jnp.maximum(high - low, 0)

    def run(self, *refs: Any, held: Any, made: Any, arrived: Any) -> None:
        inputs, outputs = refs[: len(self.operands)], refs[len(self.operands) :]
        place, group = self.place(), lax.axis_index(GROUP)
        low, count = self.column_range(place[self.spec.row] * self.blocks.rows)
        row = place[self.spec.row] * self.blocks.rows + group * ROWS
        mine = {k: ref.at[group] for k, ref in zip(self.held, held, strict=True)}

        def computed(pipeline: Callable[[Any], Any]) -> None:
            for k, tile in mine.items():
                part = inputs[k].at[self.part(self.operands[k], place, row)]
                plgpu.copy_gmem_to_smem(part, tile, arrived.at[group])
            plgpu.barrier_wait(arrived.at[group])
            states = pipeline(self.start())
            rows = [self.reader(k, inputs, mine, place) for k in self.spec.read_last]
            results = self.finish(states, rows)
            for x, ref, stored in zip(results, made, self.results, strict=True):
                ref[group] = x.astype(stored.dtype)
            plgpu.commit_smem()
            for ref, stored, to in zip(made, self.results, outputs, strict=True):
                plgpu.copy_smem_to_gmem(ref.at[group], to.at[self.part(stored, place, row)])
            plgpu.wait_smem_to_gmem(0)

        def body(step: Any, *args: Any) -> Any:
            *blocks, states = args
            tiles = mine | dict(zip(self.streamed, blocks, strict=True))
            states = self.step(tiles, inputs, place, group, low + step[0], states)
            if self.loads_blocks:
                plgpu.commit_smem()
            return states

        pipeline = plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(count,),
            in_specs=[self.block_spec(k, place, low) for k in self.streamed],
            max_concurrent_steps=self.blocks.stages,
            num_compute_wgs=self.blocks.groups,
            memory_registers=40,
            wg_axis=GROUP,
            compute_context=computed,
        )
        pipeline(*(inputs[k] for k in self.streamed))

    def block_spec(self, number: int, place: Mapping[str, Any], low: Any) -> Any:
        """Return the blocks of an operand that the pipeline copies, one per step."""
        spec, stored = self.spec, self.operands[number]
        extent = dict.fromkeys(spec.batch) | {
            spec.row: self.blocks.rows,
            spec.col: self.blocks.cols,
        }
        shape = [extent.get(a, n) for a, n in zip(stored.axes, stored.shape, strict=True)]

        def index(step: Any) -> tuple[Any, ...]:
            at = {**place, spec.col: low + step}
            return tuple(at.get(a, 0) for a in stored.axes)

        return plgpu.BlockSpec(tuple(shape), index)

    def part(self, stored: StoredArray, place: Mapping[str, Any], row: Any) -> tuple[Any, ...]:
        """Return the index of the rows of a warpgroup."""
        at = {**place, self.spec.row: pl.ds(row, ROWS), FEATURE: slice(None)}
        return tuple(at[a] for a in stored.axes)

    def reader(
        self, number: int, inputs: Sequence[Any], tiles: Mapping[int, Any], place: Mapping[str, Any]
    ) -> Callable[[], Array]:
        """Return the load of an operand as programs read it: a scalar, a vector or a tile."""
        axes, dtype = self.operands[number].axes, self.spec.operands[number].dtype

        def load() -> Array:
            if number not in tiles:
                value = inputs[number][tuple(place[a] for a in axes) or 0]
            elif {self.spec.row, self.spec.col} <= {*axes}:
                value = tiles[number][pl.ds(lax.axis_index(GROUP) * ROWS, ROWS)]
            else:
                value = tiles[number][...]
            return value != 0 if dtype == "bool" else value.astype(dtype)

        return load

    def inside(self, row: Any, start: Any) -> Any:
        """Return True if a tile lies wholly inside the band and the array.

        row, start: the numbers of its first row and column.
        """
        band, cols = self.spec.band, self.blocks.cols
        inside = start + cols <= self.spec.cols
        if band.lower is not None:
            inside &= start >= row + ROWS - 1 + band.lower
        if band.upper is not None:
            inside &= start + cols - 1 <= row + band.upper
        return inside

    @property
    def has_inner_blocks(self) -> bool:
        """Return True if tiles inside the band and the array need fewer masks."""
        return self.spec.cols % self.blocks.cols > 0 or implies_masks(self.spec)

    def step(
        self,
        tiles: Mapping[int, Any],
        inputs: Sequence[Any],
        place: Mapping[str, Any],
        group: Any,
        block: Any,
        states: tuple[State, ...],
    ) -> tuple[State, ...]:
        """Return the states after one more block of columns; tiles: references by operand."""
        spec = self.spec
        dots = tuple(self.contraction(c, tiles) for c in spec.contractions)
        values = [self.reader(k, inputs, tiles, place) for k in spec.tile.reads]
        row = place[spec.row] * self.blocks.rows + group * ROWS
        start = block * self.blocks.cols
        masked = partial(self.tiles, dots, values, row, start)
        if self.has_inner_blocks:
            whole = partial(replace(self, is_inner=True).tiles, dots, values, row, start)
            made = lax.cond(self.inside(row, start), whole, masked)
        else:
            made = masked()
        return tuple(
            kernel_monoid(o, factor).extend(s, tile, self.measures(o, factors, tiles))
            for o, s, factor, (tile, factors) in zip(
                spec.outputs, states, self.factors, made, strict=True
            )
        )

    @property
    def factors(self) -> list[float]:
        """Return by output the factor that its tile lacks."""
        return [factors_of(self.spec)[o.tile] for o in self.spec.outputs]

    def tiles(
        self, dots: Sequence[Array], values: Sequence[Any], row: Any, start: Any
    ) -> list[tuple[Array, list[Array | None]]]:
        """Return by output its tile, without its factor, and the factors of its terms.

        values: functions that load the operands of the program. row, start: the numbers of the
        first row and column. Columns past the end hold the identity.
        """
        spec, shape = self.spec, (ROWS, self.blocks.cols)
        i = lambda: row + lax.iota(jnp.int32, ROWS)  # noqa: E731
        j = lambda: start + lax.iota(jnp.int32, self.blocks.cols)  # noqa: E731

        def program(*given: Any) -> list[Array]:
            made = tiles_of(spec, self.is_inner, *given)
            return [jnp.broadcast_to(x, shape).astype(jnp.float32) for x in made]

        made = without_unit_axes(program, *self.tile_avals)(dots, tuple(values), i, j)
        whole = self.is_inner or spec.cols % self.blocks.cols == 0
        valid = None if whole else lax.broadcast_in_dim(j() < spec.cols, shape, (1,))

        def filled(tile: int | None, fill: float) -> Array | None:
            if tile is None or valid is None:
                return None if tile is None else made[tile]
            return jnp.where(valid, made[tile], jnp.full_like(made[tile], fill))

        return [
            (
                filled(o.tile, -jnp.inf if isinstance(o, ExpSums) else 0.0),
                [filled(t.factor, 0.0) for t in terms_of(o)],
            )
            for o in spec.outputs
        ]

    @property
    def tile_avals(self) -> tuple[Any, ...]:
        """Return the arguments of the tile program as it takes them."""
        spec = self.spec
        dots = tuple(self.aval((spec.row, spec.col), c.dtype) for c in spec.contractions)
        values = tuple(map(self.operand_aval, spec.tile.reads))
        return dots, values, self.aval((spec.row,), "int32"), self.aval((spec.col,), "int32")

    def operand_aval(self, number: int) -> jax.ShapeDtypeStruct:
        return self.aval(self.spec.operands[number].axes, self.spec.operands[number].dtype)

    def aval(self, axes: Sequence[str], dtype: str) -> jax.ShapeDtypeStruct:
        sides = ((self.spec.row, ROWS), (self.spec.col, self.blocks.cols))
        return jax.ShapeDtypeStruct([n if a in axes else 1 for a, n in sides], dtype)

    def contraction(self, c: Contraction, tiles: Mapping[int, Any]) -> Array:
        def multiply(acc: Any) -> Array:
            plgpu.wgmma(acc, tiles[c.row], tiles[c.col].transpose((1, 0)))
            return acc[...]

        made = pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((ROWS, self.blocks.cols), jnp.float32)
        )
        return made.astype(c.dtype)

    def measures(
        self, output: Output, factors: Sequence[Array | None], tiles: Mapping[int, Any]
    ) -> list[monoid.Measure]:
        """Return by term the function that sums a tile with the factor and weights of the term."""
        terms = zip(terms_of(output), factors, strict=True)
        return [partial(self.measured, t, factor, tiles) for t, factor in terms]

    def measured(
        self, term: WeightedTerm, factor: Array | None, tiles: Mapping[int, Any], p: Array
    ) -> Any:
        p = p if factor is None else p * factor
        if term.weights is None:
            return jnp.sum(p, axis=-1)
        weights = tiles[term.weights]
        if weights.ndim == 1:
            rounded = p.astype(term.round_to or p.dtype).astype(p.dtype)
            return jnp.sum(rounded * lax.broadcast_in_dim(weights[...], p.shape, (1,)), axis=-1)
        high = p.astype(weights.dtype)
        parts = (high,)
        if in_two_parts(self.spec, term):
            rest = jnp.where(jnp.abs(p) < jnp.inf, p - high.astype(p.dtype), jnp.zeros_like(p))
            parts = (high, rest.astype(weights.dtype))
        return AddedProduct(parts, weights, not self.interpreted)

    def start(self) -> tuple[State, ...]:
        """Return the identity of every output's monoid, at the padded shapes of a block."""
        raw = replace(self.spec, epilogue=None)
        avals = []
        for axes, shape in zip(state_axes(raw), flat_shapes(raw), strict=True):
            lead = (*self.spec.batch, self.spec.row)
            features = [a for a in axes if a not in lead]
            stored = StoredArray.of(raw, axes, features, shape.dtype, ROWS)
            avals.append(jax.ShapeDtypeStruct(self.tile_shape(stored), shape.dtype))
        return identities(self.spec, avals)

    def finish(self, states: tuple[State, ...], rows: Sequence[Any]) -> list[Array]:
        """Return all results of a warpgroup, flat: [rows] or [rows, features].

        rows: functions that load the operands of the epilogue.
        """
        told = tuple(
            (s[0] * factor, *s[1:]) if factor != 1 else s
            for s, factor in zip(states, self.factors, strict=True)
        )
        epilogue = self.spec.epilogue
        if epilogue is None:
            return [x for state in told for x in state]
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape, 1)[:2], x.dtype), told)
        avals = wide, tuple(map(self.operand_aval, epilogue.reads))

        def program(*given: Any) -> list[Array]:
            made = epilogue.fun(*given)
            shapes = [self.tile_shape(r) for r in self.results]
            return [
                jnp.broadcast_to(x, (*shape, 1)[:2]) for x, shape in zip(made, shapes, strict=True)
            ]

        return without_unit_axes(program, *avals)(told, tuple(rows))
