"""One tile of a fold: reads of blocks, the tile program, and the monoid of each output.

May import monoid.py and spec.py. The reference uses one tile that covers everything; the `xla`
backend uses many. A block holds the batch axes named in `inner` whole, and one index of each other
batch axis. The axes of a block have the order (inner batch axes, row, column, features), after
features that the tile program sums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.pallas_kernels import monoid
from symjax_rewrite.pallas_kernels.fold.array_blocks import ArrayBlocks, with_last_first
from symjax_rewrite.pallas_kernels.fold.spec import (
    ArgExtremum,
    ColumnSums,
    Contraction,
    ExpSums,
    Extremum,
    FoldSpec,
    KeyedSums,
    Output,
    Sums,
    TopK,
    WeightedTerm,
    output_axes,
    result_axes,
    terms_of,
)
from symjax_rewrite.pallas_kernels.monoid import Monoid, State

Array = Any
MOST_COLUMNS = 2**30  # rows are shorter, so that sums of a length and offsets stay within int32
EXTREMA = {"max": monoid.MAX, "min": monoid.MIN, "any": monoid.ANY, "all": monoid.ALL}


def block_axes(spec: FoldSpec, number: int, inner: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of an operand's block, in the order of a block."""
    axes = spec.operands[number].axes
    kept = [a for a in (*inner, spec.row, spec.col) if a in axes]
    summed = spec.summed(number)
    return (*summed, *kept, *(a for a in spec.features(number) if a not in summed))


def read_block(
    spec: FoldSpec,
    number: int,
    array: Array,
    place: Mapping[str, Any],
    extent: Mapping[str, int],
    inner: Sequence[str],
) -> Array:
    """Return an operand's block at `place` with `extent`; axes not named there are read whole."""
    return as_block(
        spec, number, cut(spec, spec.operands[number].axes, array, place, extent), inner
    )


def cut(
    spec: FoldSpec,
    axes: Sequence[str],
    array: Array,
    place: Mapping[str, Any],
    extent: Mapping[str, int],
) -> Array:
    """Slice an array at `place` with `extent`; axes not named there are read whole."""
    starts = [jnp.asarray(place.get(a, 0), jnp.int32) for a in axes]
    whole = zip(axes, array.shape, strict=True)
    sizes = (extent.get(a, spec.size.get(a, n)) for a, n in whole)
    return ArrayBlocks(array.shape, tuple(sizes)).read(array, starts)


def as_block(spec: FoldSpec, number: int, array: Array, inner: Sequence[str]) -> Array:
    """Return an operand's slice in the order of a block, without the batch axes looped over."""
    axes, target = spec.operands[number].axes, block_axes(spec, number, inner)
    dropped = tuple(k for k, a in enumerate(axes) if a not in target)
    kept = [a for a in axes if a in target]
    return lax.transpose(lax.squeeze(array, dropped), [kept.index(a) for a in target])


class Block(NamedTuple):
    """The inputs of one tile.

    arrays: a block of each operand.
    i: int32 row numbers [rows, 1].
    j: int32 column numbers [1, columns].
    inner: the batch axes that the blocks hold.
    first: the first row that no earlier block held; None if all rows are new.
    parts: the sizes of the batch axes that the blocks hold in part.
    """

    arrays: Sequence[Array]
    i: Array
    j: Array
    inner: Sequence[str]
    first: Array | None = None
    parts: Mapping[str, Any] = MappingProxyType({})


def _einsum(
    spec: FoldSpec,
    sides: Sequence[tuple[Array, Sequence[str]]],
    out: Sequence[str],
    precision: str | None,
    dtype: Any,
) -> Array:
    number = {a: k for k, (a, _) in enumerate(spec.sizes)}
    given = [part for x, axes in sides for part in (x, [number[a] for a in axes])]
    total = jnp.dtype(dtype)
    axes = [number[a] for a in out]
    return jnp.einsum(*given, axes, precision=precision, preferred_element_type=total)


def contract(spec: FoldSpec, contraction: Contraction, block: Block) -> Array:
    """Return the tile of a contraction, with size 1 for inner batch axes that neither side has."""
    row, col = contraction.row, contraction.col
    rows, cols = (block_axes(spec, k, block.inner) for k in (row, col))
    x, columns = block.arrays[row], block.arrays[col]
    alone = [a for a in block.inner if a in cols and a not in rows]
    # A product in which only the columns have a batch begins with them, and its result, which is
    # as many times larger as it has columns, would be read across.
    if alone and spec.width(row) <= columns.shape[cols.index(spec.col)]:
        x = jnp.broadcast_to(x, (*(columns.shape[cols.index(a)] for a in alone), *x.shape))
        rows = (*alone, *rows)
    full = (*block.inner, spec.row, spec.col)
    present = [a for a in full if a in rows or a in cols]
    sides = (x, rows), (columns, cols)
    tile = _einsum(spec, sides, present, contraction.precision, contraction.dtype)
    return lax.expand_dims(tile, [k for k, a in enumerate(full) if a not in present])


def tiles(spec: FoldSpec, block: Block) -> tuple[Array, ...]:
    """Return every tile of the tile program, broadcast to (inner batch axes, rows, columns)."""
    dots = tuple(contract(spec, c, block) for c in spec.contractions)
    full = (*block.inner, spec.row, spec.col)
    values = []
    for number in spec.tile.reads:
        axes = block_axes(spec, number, block.inner)
        missing = [k for k, a in enumerate((*spec.summed(number), *full)) if a not in axes]
        values.append(lax.expand_dims(block.arrays[number], missing))
    out = spec.tile.fun(dots, tuple(values), block.i, block.j)
    held = {**spec.size, **block.parts}
    shape = (*(held[a] for a in block.inner), block.i.shape[0], block.j.shape[1])
    made = out if isinstance(out, (tuple, list)) else (out,)
    return tuple(jnp.broadcast_to(t, shape) for t in made)


def accumulator(dtype: Any) -> jnp.dtype:
    """Return the dtype in which values of `dtype` are summed: at least f32, or i32."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.floating):
        return jax_internals.joint_dtype(dtype, jnp.float32)
    return dtype


def state_dtypes(spec: FoldSpec) -> list[Any]:
    """Return the dtypes of the results before any epilogue; empty if those of tiles are unknown."""
    if not spec.tile.dtypes:
        return []
    return [d for output in spec.outputs for d in _dtypes_of(spec, output)]


def _dtypes_of(spec: FoldSpec, output: Output) -> list[Any]:
    tile = jnp.dtype(spec.tile.dtypes[output.tile])
    total = accumulator(tile)
    match output:
        case Extremum(kind=kind):
            return [jnp.dtype(bool) if kind in ("any", "all") else tile]
        case ArgExtremum() | TopK():
            return [tile, jnp.dtype(jnp.int32)]
        case KeyedSums():
            return [total]
    weights = [None if t.weights is None else spec.operands[t.weights].dtype for t in output.terms]
    sums = [total if w is None else jax_internals.joint_dtype(total, w) for w in weights]
    return [total] * isinstance(output, ExpSums) + sums


def row_length(length: Array) -> Array:
    """Return a length as int32, clipped to a range larger than any array."""
    limits = jnp.iinfo(length.dtype)
    low, high = max(limits.min, -MOST_COLUMNS), min(limits.max, MOST_COLUMNS)
    low, high = (jnp.asarray(x, length.dtype) for x in (low, high))
    return jnp.minimum(jnp.maximum(length, low), high).astype(jnp.int32)


def stored_apart(x: Array) -> Array:
    """Return floats rounded to their own precision, which changes no value.

    XLA on a CPU runs a reduction, fused with the arithmetic before it, one operation at a time
    (YNNPACK). It does not fuse the rounding: the arithmetic is compiled into one loop, and the
    reduction alone then reads its result.
    """
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _apart(spec: FoldSpec, tile: Array) -> Array:
    """Return a tile stored apart; terms of one value of each point are faster fused."""
    fuses = len(spec.tile.reads) <= 2 or not jnp.issubdtype(tile.dtype, jnp.floating)
    return tile if fuses else stored_apart(tile)


def _stored_tiles(spec: FoldSpec, made: Sequence[Array]) -> list[Array]:
    """Return the tiles, those apart that a sum without weights or factor reads beside products.

    The products would store the tile as well, and the sum read a copy of it.
    """
    sums = [o for o in spec.outputs if isinstance(o, Sums)]
    alone = {o.tile for o in sums for t in o.terms if t.weights is None and t.factor is None}
    return [_apart(spec, x) if k in alone else x for k, x in enumerate(made)]


def _measure(
    spec: FoldSpec, output: Output, term: WeightedTerm, made: Sequence[Array], block: Block
) -> monoid.Measure:
    def measure(p: Array) -> Array:
        if term.factor is not None:
            p = p * made[term.factor].astype(p.dtype)
        total = accumulator(p.dtype)
        if term.weights is None:
            factored = isinstance(output, Sums) and term.factor is not None
            return jnp.sum(_apart(spec, p) if factored else p, axis=-1, dtype=total)
        p, weights = _multiplied(term, p, block.arrays[term.weights])
        tile_axes = (*block.inner, spec.row, spec.col)
        sides = [(p, tile_axes), (weights, block_axes(spec, term.weights, block.inner))]
        out = (*block.inner, spec.row, *spec.features(term.weights))
        dtype = jax_internals.joint_dtype(total, weights.dtype)
        return _einsum(spec, sides, out, term.precision, dtype)

    return measure


def _multiplied(term: WeightedTerm, p: Array, weights: Array) -> tuple[Array, Array]:
    """Return a tile and its weights in the dtypes of their product."""
    if term.round_to is not None:
        return p.astype(term.round_to), weights
    weights = weights.astype(jax_internals.joint_dtype(accumulator(p.dtype), weights.dtype))
    return p.astype(weights.dtype), weights


def _column_sum(
    spec: FoldSpec, term: WeightedTerm, p: Array, made: Sequence[Array], block: Block
) -> Array:
    """Return `Σ_m p·factor·w` over the new rows of a block: [inner.., n, feature..]."""
    new = None if block.first is None else block.i >= block.first
    p = p.astype(accumulator(p.dtype))
    if term.factor is not None:
        p = p * made[term.factor].astype(p.dtype)
    if new is not None:
        p = jnp.where(new, p, jnp.zeros((), p.dtype))
    total = p.dtype
    if term.weights is None:
        p = _apart(spec, p) if block.inner else p
        return jnp.sum(p, axis=-2, dtype=total)
    axes, features = block_axes(spec, term.weights, block.inner), spec.features(term.weights)
    p, weights = _multiplied(term, p, block.arrays[term.weights])
    # A product over the rows of both is slower than one with the narrower weights transposed.
    order = (*(a for a in axes if a not in (spec.row, *features)), *features, spec.row)
    if axes == (spec.row, *features) and len(features) == 1:
        weights = with_last_first(weights)
    else:
        weights = lax.transpose(weights, [axes.index(a) for a in order])
    if new is not None:
        weights = jnp.where(new[:, 0], weights, jnp.zeros((), weights.dtype))
    sides = [(lax.optimization_barrier(weights), order), (p, (*block.inner, spec.row, spec.col))]
    out = (*block.inner, *features, spec.col)
    dtype = jax_internals.joint_dtype(total, weights.dtype)
    made_turned = lax.optimization_barrier(_einsum(spec, sides, out, term.precision, dtype))
    return jnp.moveaxis(made_turned, -1, len(block.inner))


def monoid_of(output: Output) -> Monoid:
    """Return the monoid that reduces an output."""
    match output:
        case Extremum(kind=kind):
            return EXTREMA[kind]
        case Sums() | KeyedSums() | ColumnSums():
            return monoid.SUM
        case ExpSums():
            return monoid.EXP_SUMS
        case ArgExtremum(larger=larger):
            return monoid.ARGMAX if larger else monoid.ARGMIN
        case TopK(k=k):
            return monoid.top_k(k)


def _lifted(spec: FoldSpec, output: Output, made: Sequence[Array], block: Block) -> tuple[Any, ...]:
    """Return the arguments of the monoid's `lift` for one tile."""
    tile = made[output.tile]
    if isinstance(output, (ArgExtremum, TopK)):
        return tile, block.j
    if isinstance(output, Extremum):
        if output.kind in ("any", "all"):
            return (tile.astype(bool),)
        return (_apart(spec, tile),)
    if isinstance(output, KeyedSums):
        tile = tile.astype(accumulator(tile.dtype))
        return tile, [lambda x: _sum_by_key(spec, output, x, made, block)]
    if isinstance(output, ExpSums):
        tile = tile.astype(accumulator(tile.dtype))
    return tile, [_measure(spec, output, t, made, block) for t in terms_of(output)]


def numbered(places: Sequence[Array], sizes: Sequence[int]) -> tuple[Array, Array]:
    """Return int32 places in the flattened axes, and True where all places are within bounds."""
    at, inside = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    for place, size in zip(places, sizes, strict=True):
        if place.dtype.itemsize < 4:  # the dtype may be too small for the sizes
            place = place.astype(jnp.int32)
        inside = inside & (place >= 0) & (place < size)
        at = at * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    return at, inside


def _sum_by_key(
    spec: FoldSpec, output: KeyedSums, tile: Array, made: Sequence[Array], block: Block
) -> Array:
    """Return `out[key] += tile` for one tile: [kept inner axes.., k..]."""
    lead = block.inner
    if block.first is not None:
        tile = jnp.where(block.i >= block.first, tile, jnp.zeros((), tile.dtype))
    varies = [n for n, a in enumerate(lead) if a in output.varies]
    gone = [n for n, a in enumerate(lead) if a not in (*output.kept, *output.varies)]
    tile = jnp.sum(tile, axis=tuple(gone), dtype=tile.dtype)
    alike = [n for n in range(len(lead)) if n not in varies]
    keys = [_at_first(made[k], alike) for k in output.keys]
    at, inside = numbered(keys, output.sizes)
    size = math.prod(output.sizes)
    at = at if output.clips else jnp.where(inside, at, size)
    left = [a for n, a in enumerate(lead) if n not in gone]
    summed = _scattered(tile, at, size, left, output)
    return summed.reshape(*summed.shape[:-1], *output.sizes)


def _at_first(x: Array, axes: Sequence[int]) -> Array:
    """Return an array at index 0 of axes along which the array is constant."""
    for axis in reversed(axes):
        x = lax.index_in_dim(x, 0, axis, keepdims=False)
    return x


def _scattered(tile: Array, at: Array, size: int, lead: Sequence[str], output: KeyedSums) -> Array:
    """Sum a tile [lead.., m, n] by the places [varying lead.., m, n]; return [kept.., size]."""
    both = [n for n, a in enumerate(lead) if a in output.kept and a in output.varies]
    if both:
        axis = both[0]
        rest = [a for n, a in enumerate(lead) if n != axis]
        mine = [a for a in lead if a in output.varies].index(lead[axis])
        kept = [a for a in lead if a in output.kept].index(lead[axis])
        one = lambda x, k: _scattered(x, k, size, rest, output)  # noqa: E731
        return jax.vmap(one, in_axes=(axis, mine), out_axes=kept)(tile, at)
    spread = [n for n, a in enumerate(lead) if a not in output.kept]
    shared = [n for n, a in enumerate(lead) if a in output.kept]
    tile = lax.transpose(tile, [*shared, *spread, tile.ndim - 2, tile.ndim - 1])
    empty = jnp.zeros((*tile.shape[: len(shared)], size), tile.dtype)
    return empty.at[..., at].add(tile, mode="drop")


def _streamed(output: Output) -> Monoid:
    """Return the monoid that reduces an output under XLA.

    Without a barrier XLA stores an extremum as a separate tile when the extremum is compared with
    its tile in the same loop, and the loop is several times slower. Triton has no such barrier.
    """
    if isinstance(output, ArgExtremum):
        return monoid.arg_extremum(output.larger, apart=lax.optimization_barrier)
    return monoid_of(output)


def _column_sums(
    spec: FoldSpec, output: ColumnSums, made: Sequence[Array], block: Block
) -> list[Array]:
    """Return the summands that a block adds to its columns, for each term."""
    return [_column_sum(spec, t, made[output.tile], made, block) for t in output.terms]


def lift_block(spec: FoldSpec, block: Block) -> tuple[State, ...]:
    """Return the state of each output after this tile alone."""
    made = _stored_tiles(spec, tiles(spec, block))

    def lift(output: Output) -> State:
        if not isinstance(output, ColumnSums):
            return _streamed(output).lift(*_lifted(spec, output, made, block))
        axis, parts = len(block.inner), _column_sums(spec, output, made, block)
        if block.j.shape[1] == spec.cols:
            return tuple(parts)
        empty = [
            jnp.zeros((*x.shape[:axis], spec.cols, *x.shape[axis + 1 :]), x.dtype) for x in parts
        ]
        return _added_at(empty, parts, block.j[0, 0], axis)

    return tuple(map(lift, spec.outputs))


def absorb_block(spec: FoldSpec, states: Sequence[State], block: Block) -> tuple[State, ...]:
    """Return the state of each output after one more tile."""
    made = _stored_tiles(spec, tiles(spec, block))

    def absorb(output: Output, state: State) -> State:
        if isinstance(output, ColumnSums):
            parts = _column_sums(spec, output, made, block)
            return _added_at(state, parts, block.j[0, 0], len(block.inner))
        return _streamed(output).extend(state, *_lifted(spec, output, made, block))

    return tuple(map(absorb, spec.outputs, states))


def _added_at(state: Sequence[Array], parts: Sequence[Array], start: Any, axis: int) -> State:
    """Return the sums of all columns, with the sums of a block added at its columns."""
    out = []
    for total, part in zip(state, parts, strict=True):
        old = lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
        out.append(lax.dynamic_update_slice_in_dim(total, old + part, start, axis))
    return tuple(out)


def finish(
    spec: FoldSpec,
    states: Sequence[State],
    blocks: Sequence[Array],
    inner: Sequence[str],
) -> list[Array]:
    """Return all results of a fold for a block, flat, each [inner batch axes, rows, features]."""
    leaves = [x for state in states for x in state]
    if spec.epilogue is None:
        return leaves
    lead = len(inner) + 1
    apart = (lambda x: x) if spec.epilogue.is_plain else partial(_reduced_apart, axes=lead)
    wide = tuple(tuple(_merge(apart(x), lead) for x in state) for state in states)
    values = [_row_value(spec, k, blocks[k], inner) for k in spec.epilogue.reads]
    out = spec.epilogue.fun(wide, tuple(values))
    arrays = []
    for x, axes in zip(out, spec.epilogue.axes, strict=True):
        features = [spec.size[a] for a in axes if a not in (*spec.batch, spec.row)]
        shape = leaves[0].shape[:lead]
        x = jnp.broadcast_to(x, (*shape, math.prod(features)))
        arrays.append(x.reshape(*shape, *features))
    return arrays


def _reduced_apart(x: Array, axes: int) -> Array:
    """Return a result of a fold, apart from the row algebra if it has no axes but these.

    XLA's library would compute the row algebra with the reduction, one row at a time.
    """
    alone = x.ndim == axes and jnp.issubdtype(x.dtype, jnp.floating)
    return stored_apart(x) if alone else x


def results_of(spec: FoldSpec, states: Sequence[State], arrays: Sequence[Array]) -> tuple[Any, ...]:
    """Return the results of a fold from the states of all rows; `arrays`: its operands."""
    blocks = [
        None if spec.col in o.axes else read_block(spec, k, arrays[k], {}, {}, spec.batch)
        for k, o in enumerate(spec.operands)
    ]
    done = finish(spec, states, blocks, spec.batch)
    return bundle(spec, [arrange(spec, k, x, spec.batch) for k, x in enumerate(done)])


def _merge(x: Array, lead: int) -> Array:
    return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))


def _row_value(spec: FoldSpec, number: int, block: Array, inner: Sequence[str]) -> Array:
    axes = block_axes(spec, number, inner)
    missing = [k for k, a in enumerate((*inner, spec.row)) if a not in axes]
    return _merge(lax.expand_dims(block, missing), len(inner) + 1)


def arrange(spec: FoldSpec, number: int, x: Array, inner: Sequence[str]) -> Array:
    """Return result `number` of a block in the order of its axes, size 1 for outer batch axes.

    XLA would fuse the transposition into the product that computed the block. The product would
    then have two transposed operands, and be up to ten times slower on a CPU. The barrier prevents
    that.
    """
    axes = result_axes(spec)[number]
    shared = tuple(a for a in (*spec.batch, spec.row) if a in axes)  # sums by key lack some axes
    x = lax.expand_dims(x, [k for k, a in enumerate(shared) if a not in (*inner, spec.row)])
    order = (*shared, *(a for a in axes if a not in shared))
    if list(order) == list(axes):
        return x
    return lax.transpose(lax.optimization_barrier(x), [order.index(a) for a in axes])


def bundle(spec: FoldSpec, arrays: Sequence[Array]) -> tuple[Any, ...]:
    """Return results as a fold does: flat after an epilogue, else one tuple per output."""
    if spec.epilogue is not None:
        return tuple(arrays)
    rest = iter(arrays)
    counts = (len(output_axes(spec, o)) for o in spec.outputs)
    return tuple(tuple(itertools.islice(rest, count)) for count in counts)
