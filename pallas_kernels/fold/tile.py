"""One tile of a fold: reading blocks, the tile program, and each output's monoid.

May import `monoid` and the spec. Shared by the reference (one tile that covers everything) and the
`xla` backend (many). A block keeps the batch axes named in `inner` and is at one place of all
others; its axes stand in the order (inner batch axes, row, column, features).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels import monoid
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
    result_axes,
    terms_of,
)
from symjax_rewrite.pallas_kernels.monoid import Monoid, State

Array = Any
MOST_COLUMNS = 2**30  # a row is shorter: sums of a length and offsets stay within int32
EXTREMA = {"max": monoid.MAX, "min": monoid.MIN, "any": monoid.ANY, "all": monoid.ALL}


def block_axes(spec: FoldSpec, number: int, inner: Sequence[str]) -> tuple[str, ...]:
    """The axes of an operand's block, in a block's order."""
    axes = spec.operands[number].axes
    kept = [a for a in (*inner, spec.row, spec.col) if a in axes]
    return (*kept, *spec.features(number))


def read_block(
    spec: FoldSpec,
    number: int,
    array: Array,
    place: Mapping[str, Any],
    extent: Mapping[str, int],
    inner: Sequence[str],
) -> Array:
    """An operand's block at `place` with `extent`; axes not named there are read whole."""
    axes = spec.operands[number].axes
    starts = [jnp.asarray(place.get(a, 0), jnp.int32) for a in axes]
    sizes = [extent.get(a, spec.size[a]) for a in axes]
    if tuple(sizes) != array.shape:
        array = lax.dynamic_slice(array, starts, sizes)
    target = block_axes(spec, number, inner)
    dropped = tuple(k for k, a in enumerate(axes) if a not in target)
    kept = [a for a in axes if a in target]
    return lax.transpose(lax.squeeze(array, dropped), [kept.index(a) for a in target])


def _letters(spec: FoldSpec) -> dict[str, str]:
    names = [*spec.batch, spec.row, spec.col, *(a for a, _ in spec.sizes)]
    unique = dict.fromkeys(names)
    return {
        a: chr(ord("a") + k) if k < 26 else chr(ord("A") + k - 26) for k, a in enumerate(unique)
    }


class Block(NamedTuple):
    """What one tile is computed from.

    arrays: a block of each operand.
    i: int32 row numbers [rows, 1].
    j: int32 column numbers [1, columns].
    inner: the batch axes that the blocks hold.
    first: the first row that no block before held; None where all are new.
    """

    arrays: Sequence[Array]
    i: Array
    j: Array
    inner: Sequence[str]
    first: Array | None = None


def _einsum(
    spec: FoldSpec,
    sides: Sequence[tuple[Array, Sequence[str]]],
    out: Sequence[str],
    precision: str | None,
    dtype: Any,
) -> Array:
    letter = _letters(spec)
    names = ["".join(letter[a] for a in axes) for axes in (*(axes for _, axes in sides), out)]
    return jnp.einsum(
        f"{','.join(names[:-1])}->{names[-1]}",
        *(x for x, _ in sides),
        precision=precision,
        preferred_element_type=jnp.dtype(dtype),
    )


def contract(spec: FoldSpec, contraction: Contraction, block: Block) -> Array:
    """The tile of a contraction, with a size-1 axis for each inner batch axis neither side has."""
    sides = [
        (block.arrays[k], block_axes(spec, k, block.inner))
        for k in (contraction.row, contraction.col)
    ]
    full = (*block.inner, spec.row, spec.col)
    present = [a for a in full if any(a in axes for _, axes in sides)]
    tile = _einsum(spec, sides, present, contraction.precision, contraction.dtype)
    return lax.expand_dims(tile, [k for k, a in enumerate(full) if a not in present])


def tiles(spec: FoldSpec, block: Block) -> tuple[Array, ...]:
    """Every tile the tile program gives, broadcast to (inner batch axes, rows, columns)."""
    dots = tuple(contract(spec, c, block) for c in spec.contractions)
    full = (*block.inner, spec.row, spec.col)
    values = []
    for number in spec.tile.reads:
        axes = block_axes(spec, number, block.inner)
        missing = [k for k, a in enumerate(full) if a not in axes]
        values.append(lax.expand_dims(block.arrays[number], missing))
    out = spec.tile.fun(dots, tuple(values), block.i, block.j)
    shape = (*(spec.size[a] for a in block.inner), block.i.shape[0], block.j.shape[1])
    return tuple(
        jnp.broadcast_to(t, shape) for t in (out if isinstance(out, (tuple, list)) else (out,))
    )


def accumulator(dtype: Any) -> jnp.dtype:
    """The dtype in which values of `dtype` are summed: at least f32, or i32."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.promote_types(dtype, jnp.float32)
    return dtype


def row_length(length: Array) -> Array:
    """A length as int32; one beyond any array, in whatever integers, is far outside still."""
    limits = jnp.iinfo(length.dtype)
    low, high = max(limits.min, -MOST_COLUMNS), min(limits.max, MOST_COLUMNS)
    low, high = (jnp.asarray(x, length.dtype) for x in (low, high))
    return jnp.minimum(jnp.maximum(length, low), high).astype(jnp.int32)


def _measure(
    spec: FoldSpec, term: WeightedTerm, made: Sequence[Array], block: Block
) -> monoid.Measure:
    def measure(p: Array) -> Array:
        if term.factor is not None:
            p = p * made[term.factor].astype(p.dtype)
        total = accumulator(p.dtype)
        if term.weights is None:
            return jnp.sum(p, axis=-1, dtype=total)
        p, weights = _multiplied(term, p, block.arrays[term.weights])
        tile_axes = (*block.inner, spec.row, spec.col)
        sides = [(p, tile_axes), (weights, block_axes(spec, term.weights, block.inner))]
        out = (*block.inner, spec.row, *spec.features(term.weights))
        dtype = jnp.promote_types(total, weights.dtype)
        return _einsum(spec, sides, out, term.precision, dtype)

    return measure


def _multiplied(term: WeightedTerm, p: Array, weights: Array) -> tuple[Array, Array]:
    """A tile and its weights in the dtypes they are multiplied in."""
    if term.round_to is not None:
        return p.astype(term.round_to), weights
    weights = weights.astype(jnp.promote_types(accumulator(p.dtype), weights.dtype))
    return p.astype(weights.dtype), weights


def _column_sum(
    spec: FoldSpec, term: WeightedTerm, p: Array, made: Sequence[Array], block: Block
) -> Array:
    """`Σ_m p·factor·w` over the rows of a block that none before held: [inner.., n, feature..]."""
    new = None if block.first is None else block.i >= block.first
    p = p.astype(accumulator(p.dtype))
    if term.factor is not None:
        p = p * made[term.factor].astype(p.dtype)
    if new is not None:
        p = jnp.where(new, p, jnp.zeros((), p.dtype))
    total = p.dtype
    if term.weights is None:
        return jnp.sum(p, axis=-2, dtype=total)
    axes, features = block_axes(spec, term.weights, block.inner), spec.features(term.weights)
    p, weights = _multiplied(term, p, block.arrays[term.weights])
    # A product over the rows of both is slower than one of weights turned round, which are narrow.
    turned = (*(a for a in axes if a not in (spec.row, *features)), *features, spec.row)
    weights = lax.transpose(weights, [axes.index(a) for a in turned])
    if new is not None:
        weights = jnp.where(new[:, 0], weights, jnp.zeros((), weights.dtype))
    sides = [(lax.optimization_barrier(weights), turned), (p, (*block.inner, spec.row, spec.col))]
    out = (*block.inner, *features, spec.col)
    dtype = jnp.promote_types(total, weights.dtype)
    made_turned = lax.optimization_barrier(_einsum(spec, sides, out, term.precision, dtype))
    return jnp.moveaxis(made_turned, -1, len(block.inner))


def monoid_of(output: Output) -> Monoid:
    """The monoid an output is reduced by."""
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
    """What the output's monoid lifts from one tile."""
    tile = made[output.tile]
    if isinstance(output, (ArgExtremum, TopK)):
        return tile, block.j
    if isinstance(output, Extremum):
        return (tile.astype(bool) if output.kind in ("any", "all") else tile,)
    if isinstance(output, KeyedSums):
        tile = tile.astype(accumulator(tile.dtype))
        return tile, [lambda x: _sum_by_key(spec, output, x, made, block)]
    if isinstance(output, ExpSums):
        tile = tile.astype(accumulator(tile.dtype))
    return tile, [_measure(spec, t, made, block) for t in terms_of(output)]


def numbered(places: Sequence[Array], sizes: Sequence[int]) -> tuple[Array, Array]:
    """Places along several axes as int32 places along all of them, and whether they are inside."""
    at, inside = jnp.zeros((), jnp.int32), jnp.ones((), bool)
    for place, size in zip(places, sizes, strict=True):
        if place.dtype.itemsize < 4:  # may be too small for the sizes
            place = place.astype(jnp.int32)
        inside = inside & (place >= 0) & (place < size)
        at = at * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    return at, inside


def _sum_by_key(
    spec: FoldSpec, output: KeyedSums, tile: Array, made: Sequence[Array], block: Block
) -> Array:
    """`out[key] += tile` for one tile: [kept inner axes.., k..]."""
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
    """An array without axes that it does not depend on."""
    for axis in reversed(axes):
        x = lax.index_in_dim(x, 0, axis, keepdims=False)
    return x


def _scattered(tile: Array, at: Array, size: int, lead: Sequence[str], output: KeyedSums) -> Array:
    """A tile [lead.., m, n] summed by the places [varying lead.., m, n]; [kept.., size]."""
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
    """The monoid that reduces an output where XLA compiles it.

    Compared with the tile in the loop that finds it, an extremum is written out as a tile of its
    own, at times several times as slowly; hence the barrier (which Triton does not have).
    """
    if isinstance(output, ArgExtremum):
        return monoid.arg_extremum(output.larger, apart=lax.optimization_barrier)
    return monoid_of(output)


def _column_sums(
    spec: FoldSpec, output: ColumnSums, made: Sequence[Array], block: Block
) -> list[Array]:
    """What a block adds to its columns, for each term."""
    return [_column_sum(spec, t, made[output.tile], made, block) for t in output.terms]


def lift_block(spec: FoldSpec, block: Block) -> tuple[State, ...]:
    """The state of each output after this tile alone."""
    made = tiles(spec, block)

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
    """The state of each output after one more tile."""
    made = tiles(spec, block)

    def absorb(output: Output, state: State) -> State:
        if isinstance(output, ColumnSums):
            parts = _column_sums(spec, output, made, block)
            return _added_at(state, parts, block.j[0, 0], len(block.inner))
        return _streamed(output).extend(state, *_lifted(spec, output, made, block))

    return tuple(map(absorb, spec.outputs, states))


def _added_at(state: Sequence[Array], parts: Sequence[Array], start: Any, axis: int) -> State:
    """The sums of all columns with what a block adds to its own, where these lie."""
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
    """Everything a fold returns for a block, flat, each as [inner batch axes, rows, features]."""
    leaves = [x for state in states for x in state]
    if spec.epilogue is None:
        return leaves
    lead = len(inner) + 1
    wide = tuple(tuple(_merge(x, lead) for x in state) for state in states)
    values = [_row_value(spec, k, blocks[k], inner) for k in spec.epilogue.reads]
    out = spec.epilogue.fun(wide, tuple(values))
    arrays = []
    for x, axes in zip(out, spec.epilogue.axes, strict=True):
        features = [spec.size[a] for a in axes if a not in (*spec.batch, spec.row)]
        shape = leaves[0].shape[:lead]
        x = jnp.broadcast_to(x, (*shape, math.prod(features)))
        arrays.append(x.reshape(*shape, *features))
    return arrays


def _merge(x: Array, lead: int) -> Array:
    return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))


def _row_value(spec: FoldSpec, number: int, block: Array, inner: Sequence[str]) -> Array:
    axes = block_axes(spec, number, inner)
    missing = [k for k, a in enumerate((*inner, spec.row)) if a not in axes]
    return _merge(lax.expand_dims(block, missing), len(inner) + 1)


def arrange(spec: FoldSpec, number: int, x: Array, inner: Sequence[str]) -> Array:
    """Result `number` of a block in the order of its axes, with size 1 for outer batch axes.

    XLA would move the transposition into the product that made the block: a product of two
    transposed operands, up to ten times slower on a CPU. The barrier keeps it apart.
    """
    axes = result_axes(spec)[number]
    shared = tuple(a for a in (*spec.batch, spec.row) if a in axes)  # of sums by key not all
    x = lax.expand_dims(x, [k for k, a in enumerate(shared) if a not in (*inner, spec.row)])
    order = (*shared, *(a for a in axes if a not in shared))
    if list(order) == list(axes):
        return x
    return lax.transpose(lax.optimization_barrier(x), [order.index(a) for a in axes])


def bundle(spec: FoldSpec, arrays: Sequence[Array]) -> tuple[Any, ...]:
    """What a fold returns: flat after an epilogue, else one tuple per output."""
    if spec.epilogue is not None:
        return tuple(arrays)
    rest = iter(arrays)
    counts = [len(terms_of(o)) + isinstance(o, ExpSums) for o in spec.outputs]
    for k, output in enumerate(spec.outputs):
        counts[k] += {Extremum: 1, KeyedSums: 1, ArgExtremum: 2, TopK: 2}.get(type(output), 0)
    return tuple(tuple(next(rest) for _ in range(count)) for count in counts)
