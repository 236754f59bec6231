"""Evaluation of a fold by cells: near cells by the fold's tile, cells apart by expansions.

A cell's charges are moved to its Chebyshev nodes, translated between the nodes of cells apart, and
interpolated from the nodes to the cell's points. Polynomials of a cell are polynomials of its
halves, so that moving between levels adds no error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite.kernel_selection.far_fields import chebyshev
from symjax_rewrite.kernel_selection.far_fields.cells import Chunks, Grid, apart, chunks, runs
from symjax_rewrite.kernel_selection.far_fields.radial_terms import FarForm, Monomial, Vector
from symjax_rewrite.pallas_kernels.fold.spec import FoldSpec, Sums
from symjax_rewrite.pallas_kernels.fold.tile import (
    Block,
    lift_block,
    read_block,
    results_of,
)

Array = Any
SAMPLED = 32  # rows summed exactly, to bound the largest value from below
ROUNDING = 2.0  # factor by which squared distances exceed thresholds


class Charge(NamedTuple):
    """A product of sources by column, and the operand that weights it."""

    columns: tuple[Vector, ...]
    weights: int | None
    part: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class FarField:
    """The plan: a fold, its form, a grid, and the relative tolerance."""

    spec: FoldSpec
    form: FarForm
    grid: Grid
    rtol: float


class SortedPoints(NamedTuple):
    """Points sorted by cell.

    order: the points in this order. starts: of each cell, and one past the last. unit: coordinates
    in [-1, 1] of their cells, in this order, [points, dims].
    """

    order: Array
    starts: Array
    unit: Array


class Box(NamedTuple):
    """The lower corner of the grid, [dims], and the side of a cell."""

    low: Array
    side: Array


class Sorted(NamedTuple):
    """A far field with its operands, sorted into cells; charges: [columns, features]."""

    far: FarField
    arrays: Sequence[Array]
    box: Box
    rows: SortedPoints
    columns: SortedPoints
    charges: dict[Charge, Array]


def approximate(
    far: FarField, all_pairs: Callable[[Sequence[Array]], tuple[Any, ...]], arrays: Sequence[Array]
) -> tuple[Any, ...]:
    """Return the fold's results within the tolerance, by cells if their bound holds."""
    points = Sorted(far, arrays, *_placed(far, arrays), _charges(far, arrays))
    return lax.cond(_holds(points), lambda: _by_cells(points), lambda: all_pairs(arrays))


def _read(spec: FoldSpec, arrays: Sequence[Array], vector: Vector) -> Array:
    """Return a vector as an array over rows or columns, or as a scalar."""
    axes, data, at = list(spec.operands[vector.operand].axes), arrays[vector.operand], vector.at
    for axis, k in at:
        data = lax.index_in_dim(data, k, axes.index(axis), keepdims=False)
        axes.remove(axis)
    return data


def _by_row(spec: FoldSpec, arrays: Sequence[Array], vector: Vector, rows: SortedPoints) -> Array:
    """Return a vector by row or a scalar, rows sorted by cell: [rows, 1]."""
    return jnp.broadcast_to(_read(spec, arrays, vector), (spec.rows,))[rows.order][:, None]


def _placed(far: FarField, arrays: Sequence[Array]) -> tuple[Box, SortedPoints, SortedPoints]:
    sides = [
        jnp.stack([_read(far.spec, arrays, pair[k]) for pair in far.form.points], -1)
        for k in (0, 1)
    ]
    whole = sides[:1] if far.form.same else sides
    low = jnp.min(jnp.stack([x.min(0) for x in whole]), 0)
    high = jnp.max(jnp.stack([x.max(0) for x in whole]), 0)
    room = 1 + 16 * jnp.finfo(low.dtype).eps
    box = Box(low, (high - low).max() * room / far.grid.side)
    made = [_place(far.grid, box, x) for x in whole]
    return box, made[0], made[-1]


def _place(grid: Grid, box: Box, points: Array) -> SortedPoints:
    scaled = (points - box.low) / box.side
    cell = jnp.clip(jnp.floor(scaled), 0, grid.side - 1)
    strides = jnp.asarray(grid.side ** np.arange(grid.dims)[::-1], jnp.int32)
    number = cell.astype(jnp.int32) @ strides
    order = jnp.argsort(number)
    starts = jnp.searchsorted(number[order], jnp.arange(grid.cells + 1, dtype=jnp.int32))
    return SortedPoints(order, starts.astype(jnp.int32), (2 * (scaled - cell) - 1)[order])


def _charges(far: FarField, arrays: Sequence[Array]) -> dict[Charge, Array]:
    """Return each product of sources by column that some sum weights: [columns, features]."""
    spec, out = far.spec, {}
    for charge in dict.fromkeys(c for _, c, *_ in _terms(far)):
        total = jnp.ones((spec.cols, 1), arrays[far.form.points[0][0].operand].dtype)
        for vector in charge.columns:
            total = total * _read(spec, arrays, vector)[:, None]
        if charge.weights is not None:
            vector = Vector(charge.weights, charge.part)
            axes = [a for a in spec.operands[charge.weights].axes if a not in dict(charge.part)]
            data = jnp.moveaxis(_read(spec, arrays, vector), axes.index(spec.col), 0)
            total = total * data.reshape(spec.cols, -1)
        out[charge] = total
    return out


def _terms(far: FarField) -> list[tuple]:
    """Return for every term of every sum: kernel, charge, row sources, coefficient, and the sum."""
    spec, out = far.spec, []
    parts = list(np.ndindex(*spec.batch_shape))
    for o, output in enumerate(spec.outputs):
        assert isinstance(output, Sums)
        for w, term in enumerate(output.terms):
            for part, polynomial in zip(parts, far.form.sums[o][w], strict=True):
                at = dict(zip(spec.batch, part, strict=True))
                for monomial, c in polynomial.items():
                    axes = () if term.weights is None else spec.operands[term.weights].axes
                    own = tuple((a, k) for a, k in at.items() if a in axes)
                    charge = Charge(monomial.columns, term.weights, own)
                    kernel = monomial._replace(rows=(), columns=())
                    out.append((kernel, charge, monomial.rows, c, (o, w, part)))
    return out


def _holds(points: Sorted) -> Array:
    """Return True if cells have room for their points and the bound is within the tolerance."""
    far, arrays, box, rows, columns, _ = points
    grid, near = far.grid, runs(far.grid.dims, far.grid.side)
    counts = jnp.diff(rows.starts)
    held = columns.starts[near[:, 2] + 1] - columns.starts[near[:, 1]]
    fits = (counts.max() <= grid.rows) & (held.max() <= grid.run)
    fits &= jnp.diff(columns.starts).max() <= grid.columns
    fits &= box.side**2 > ROUNDING * far.form.above
    errors = _errors(points)
    values = _sampled(far, arrays)
    for key, value in values.items():
        fits &= errors[key] <= far.rtol * value
    return fits


def _sampled(far: FarField, arrays: Sequence[Array]) -> dict[tuple[int, int], Array]:
    """Return the largest value of each sum in some rows, computed exactly."""
    spec = far.spec
    count = min(SAMPLED, spec.rows)
    at = np.linspace(0, spec.rows - 1, count).astype(np.int32)
    some, extent = _taken(spec, arrays, at), {spec.row: count}
    blocks = [read_block(spec, k, x, {}, extent, spec.batch) for k, x in enumerate(some)]
    j = jnp.arange(spec.cols, dtype=jnp.int32)[None]
    states = lift_block(spec, Block(blocks, jnp.asarray(at)[:, None], j, spec.batch))
    return {(o, w): jnp.abs(x).max() for o, s in enumerate(states) for w, x in enumerate(s)}


def _taken(spec: FoldSpec, arrays: Sequence[Array], order: Array) -> list[Array]:
    """Return operands with some of their rows."""
    out = []
    for operand, x in zip(spec.operands, arrays, strict=True):
        if spec.row in operand.axes:
            x = jnp.take(x, order, axis=operand.axes.index(spec.row))
        out.append(x)
    return out


def _errors(points: Sorted) -> dict[tuple[int, int], Array]:
    """Return a bound of the error of each sum, over all rows."""
    far, arrays, box, rows, columns, charges = points
    cell_of = jnp.searchsorted(rows.starts, jnp.arange(far.spec.rows), side="right") - 1
    totals: dict[tuple, Array] = defaultdict(lambda: jnp.zeros(()))
    sums = {c: _cell_sums(jnp.abs(q), columns) for c, q in charges.items()}
    made: dict[tuple, Array] = {}
    for kernel, charge, scales, c, (o, w, part) in _terms(far):
        if (kernel, charge) not in made:
            made[kernel, charge] = _cell_errors(far.grid, box, kernel, sums[charge])
        mine = abs(c) * made[kernel, charge][cell_of]
        for vector in scales:
            mine = mine * jnp.abs(_by_row(far.spec, arrays, vector, rows))
        totals[o, w, part] = totals[o, w, part] + mine
    out: dict[tuple[int, int], Array] = {}
    for (o, w, _), error in totals.items():
        out[o, w] = jnp.maximum(out.get((o, w), 0.0), error.max())
    return out


def _cell_sums(q: Array, columns: SortedPoints) -> Array:
    """Return the sum of charges in each cell: [cells, features]."""
    cells = columns.starts.shape[0] - 1
    cell_of = jnp.searchsorted(columns.starts, jnp.arange(q.shape[0]), side="right") - 1
    return jax.ops.segment_sum(q[columns.order], cell_of, cells, indices_are_sorted=True)


def _cell_errors(grid: Grid, box: Box, kernel: Monomial, sums: Array) -> Array:
    """Return a bound of the error in each cell of the finest level: [cells, features]."""
    total: Array = jnp.zeros_like(sums)
    for level, (side, coarser) in enumerate(grid.levels):
        offsets, targets, sources = zip(*apart(grid.dims, side, coarser), strict=True)
        each = chebyshev.largest_errors(kernel, grid.order, np.array(offsets))
        error = jnp.asarray(np.repeat(each, [t.size for t in targets]), sums.dtype)
        scale = (box.side * 2**level) ** chebyshev.degree(kernel)
        found = scale * error[:, None] * sums[np.concatenate(sources)]
        own = jnp.zeros_like(sums).at[np.concatenate(targets)].add(found)
        total = total + _spread(own, grid, level)
        if coarser:
            sums = _halves(sums, side, grid.dims).sum(1)
    return total


def _halves(x: Array, side: int, dims: int) -> Array:
    """Return values of cells [side^dims, ..] by the cell above: [(side/2)^dims, 2^dims, ..]."""
    half = side // 2
    cut = x.reshape(*(n for _ in range(dims) for n in (half, 2)), *x.shape[1:])
    order = [*range(0, 2 * dims, 2), *range(1, 2 * dims, 2), *range(2 * dims, cut.ndim)]
    return cut.transpose(order).reshape(half**dims, 2**dims, *x.shape[1:])


def _joined(x: Array, side: int, dims: int) -> Array:
    """Return values by the cell above [(side/2)^dims, 2^dims, ..] as values of cells."""
    half, rest = side // 2, x.shape[2:]
    cut = x.reshape(*(half,) * dims, *(2,) * dims, *rest)
    order = [k for d in range(dims) for k in (d, dims + d)]
    return cut.transpose(*order, *range(2 * dims, cut.ndim)).reshape(side**dims, *rest)


def _spread(x: Array, grid: Grid, level: int) -> Array:
    """Return values of the cells of a level as values of the cells of the finest level."""
    for k in range(level, 0, -1):
        copies = jnp.broadcast_to(x[:, None], (x.shape[0], 2**grid.dims, *x.shape[1:]))
        x = _joined(copies, grid.levels[k - 1][0], grid.dims)
    return x


def _by_cells(points: Sorted) -> tuple[Any, ...]:
    """Return the fold's results: near cells summed pair by pair, cells apart by expansions."""
    spec, states = points.far.spec, [[*s] for s in _near(points)]
    for (o, w), value in _apart(points).items():
        states[o][w] = states[o][w] + value.reshape(states[o][w].shape).astype(states[o][w].dtype)
    back = jnp.argsort(points.rows.order)
    placed = [tuple(jnp.take(x, back, axis=len(spec.batch)) for x in s) for s in states]
    return results_of(spec, placed, points.arrays)


def _near(points: Sorted) -> Any:
    """Return the states of the sums over the cells near each row, rows sorted by cell."""
    far, arrays, _, rows, columns, _ = points
    spec, grid = far.spec, far.grid
    sorted_ = [
        _padded(spec, operand.axes, x, rows.order, columns.order, grid)
        for operand, x in zip(spec.operands, arrays, strict=True)
    ]
    i, j = (
        jnp.pad(order.astype(jnp.int32), (0, room), constant_values=-1)
        for order, room in ((rows.order, grid.rows), (columns.order, grid.run))
    )
    extent = {spec.row: grid.rows, spec.col: grid.run}

    def block(cell: Array, first: Array, last: Array) -> Any:
        top, left = rows.starts[cell], columns.starts[first]
        place = {spec.row: top, spec.col: left}
        blocks = [read_block(spec, k, x, place, extent, spec.batch) for k, x in enumerate(sorted_)]
        here = lax.dynamic_slice(i, (top,), (grid.rows,))
        there = lax.dynamic_slice(j, (left,), (grid.run,))
        mine = jnp.arange(grid.rows) < rows.starts[cell + 1] - top
        real = jnp.arange(grid.run) < columns.starts[last + 1] - left
        own = replace(spec, tile=replace(spec.tile, fun=_masked(spec, real), key=object()))
        found = lift_block(own, Block(blocks, here[:, None], there[None], spec.batch))
        return top, mine, found

    def step(states: Any, run: Array) -> tuple[Any, None]:
        top, mine, found = block(*run)
        return jax.tree.map(
            lambda s, x: _added(s, x, top, mine, len(spec.batch)), states, found
        ), None

    shapes = jax.eval_shape(lambda: block(*jnp.zeros(3, jnp.int32))[2])
    lead, wide = len(spec.batch), spec.rows + grid.rows
    empty = jax.tree.map(
        lambda s: jnp.zeros((*s.shape[:lead], wide, *s.shape[lead + 1 :]), s.dtype), shapes
    )
    states, _ = lax.scan(step, empty, jnp.asarray(runs(grid.dims, grid.side)))
    return jax.tree.map(lambda s: lax.slice_in_dim(s, 0, spec.rows, axis=lead), states)


def _padded(
    spec: FoldSpec, axes: Sequence[str], x: Array, rows: Array, columns: Array, grid: Grid
) -> Array:
    """Return an operand with its rows and columns sorted by cell, and room for one more cell."""
    for axis, order, room in ((spec.row, rows, grid.rows), (spec.col, columns, grid.run)):
        if axis in axes:
            at = axes.index(axis)
            widths = [(0, room if k == at else 0) for k in range(x.ndim)]
            x = jnp.pad(jnp.take(x, order, axis=at), widths)
    return x


def _masked(spec: FoldSpec, real: Array) -> Any:
    def fun(dots: tuple, values: tuple, i: Array, j: Array) -> tuple:
        made = spec.tile.fun(dots, values, i, j)
        made = made if isinstance(made, (tuple, list)) else (made,)
        return tuple(jnp.where(real, x, jnp.zeros((), x.dtype)) for x in made)

    return fun


def _added(state: Array, found: Array, top: Array, mine: Array, axis: int) -> Array:
    """Return the states with those of a cell's rows added."""
    wide = mine.reshape(*(1,) * axis, -1, *(1,) * (found.ndim - axis - 1))
    old = lax.dynamic_slice_in_dim(state, top, found.shape[axis], axis)
    new = old + jnp.where(wide, found, jnp.zeros((), found.dtype))
    return lax.dynamic_update_slice_in_dim(state, new, top, axis)


def _apart(points: Sorted) -> dict[tuple[int, int], Array]:
    """Return the sums over cells apart: [batch.., rows, features], rows sorted by cell."""
    far, arrays, box, rows, columns, charges = points
    spec, grid = far.spec, far.grid
    moments = {c: _moments(grid, columns, q[columns.order]) for c, q in charges.items()}
    local: dict[tuple, Array] = defaultdict(lambda: jnp.zeros(()))
    wanted = list(dict.fromkeys((kernel, charge) for kernel, charge, *_ in _terms(far)))
    made = dict(zip(wanted, _translated(grid, box, wanted, moments), strict=True))
    for kernel, charge, scales, c, where in _terms(far):
        local[where, scales] = local[where, scales] + c * made[kernel, charge]
    totals: dict[tuple, Array] = {}
    for (where, scales), expansion in local.items():
        value = _interpolated(grid, rows, expansion)
        for vector in scales:
            value = value * _by_row(spec, arrays, vector, rows)
        totals[where] = totals.get(where, 0.0) + value
    out = {}
    for o, w in {(o, w) for o, w, _ in totals}:
        parts = [totals[o, w, part] for part in np.ndindex(*spec.batch_shape)]
        out[o, w] = jnp.stack(parts)
    return out


def _by_cell(place: SortedPoints, room: int) -> tuple[Array, Array]:
    """Return the places of the points of each cell [cells, room], and True where there is one."""
    at = place.starts[:-1, None] + jnp.arange(room, dtype=jnp.int32)
    real = at < place.starts[1:, None]
    return jnp.where(real, at, 0), real


def _moments(grid: Grid, columns: SortedPoints, q: Array) -> Array:
    """Return the charges of each cell at its nodes: [cells, features, nodes]."""
    at, real = _by_cell(columns, grid.columns)
    weights = chebyshev.basis(grid.order, columns.unit)[at]  # [cells, room, dims, order]
    data = jnp.where(real[..., None], q[at], 0)
    for d in range(grid.dims - 1):
        data = (data[..., None] * weights[:, :, d, None]).reshape(*at.shape, -1)
    made = jnp.einsum("cpm,cpk->cmk", data, weights[:, :, -1])
    return made.reshape(grid.cells, q.shape[1], grid.nodes)


def _translated(
    grid: Grid, box: Box, wanted: Sequence[tuple[Monomial, Charge]], moments: dict[Charge, Array]
) -> list[Array]:
    """Return the sums over cells apart at nodes of the finest level: [cells, features, nodes]."""
    dims = grid.dims
    up = jnp.asarray(chebyshev.parent_basis(grid.order, dims), box.side.dtype)
    levels = [moments]
    for side, coarser in grid.levels:
        if coarser:
            halves = {c: _halves(q, side, dims) for c, q in levels[-1].items()}
            levels.append({c: jnp.einsum("phfk,hkm->pfm", q, up) for c, q in halves.items()})
    totals = [jnp.zeros_like(levels[-1][charge]) for _, charge in wanted]
    for level in reversed(range(len(levels))):
        side, coarser = grid.levels[level]
        if coarser:
            totals = [_joined(jnp.einsum("pfm,hkm->phfk", x, up), side, dims) for x in totals]
        length = box.side * 2**level
        totals = _level(grid, length, wanted, levels[level], totals, chunks(dims, side, coarser))
    return totals


def _level(
    grid: Grid,
    length: Array,
    wanted: Sequence[tuple[Monomial, Charge]],
    moments: dict[Charge, Array],
    totals: list[Array],
    pairs: Chunks,
) -> list[Array]:
    """Return sums at nodes with those over the cells apart at one level added."""
    tables = {
        kernel: _matrices(kernel, grid.order, length, pairs.offsets)
        for kernel in dict.fromkeys(kernel for kernel, _ in wanted)
    }

    def step(totals: list[Array], some: tuple[Array, ...]) -> tuple[list[Array], None]:
        at, targets, sources = some
        out = []
        for (kernel, charge), total in zip(wanted, totals, strict=True):
            given = moments[charge].at[sources].get(mode="fill", fill_value=0)
            flat = given.reshape(len(at), -1, grid.nodes)
            made = jnp.einsum("bcl,blk->bck", flat, tables[kernel][at]).reshape(given.shape)
            out.append(total.at[targets].add(made, mode="drop"))
        return out, None

    return lax.scan(step, totals, (pairs.at, pairs.targets, pairs.sources))[0]


def _matrices(kernel: Monomial, order: int, side: Array, offsets: np.ndarray) -> Array:
    """Return a term between the nodes of a vector cell and of a cell: [offsets, nodes, nodes]."""
    dims, at = offsets.shape[1], chebyshev.nodes(order) / 2
    places = np.stack(np.meshgrid(*(at,) * dims, indexing="ij"), -1).reshape(-1, dims)
    squares, product = 0.0, 1.0
    for d in range(dims):
        inner = jnp.asarray(places[None, :, d] - places[:, None, d], side.dtype) * side
        gap = inner - (jnp.asarray(offsets[:, d], side.dtype) * side)[:, None, None]
        squares = squares + gap * gap
        for _ in range(kernel.differences.count(d)):
            product = product * gap
    for shift, power in kernel.radials:
        product = product * _raised(squares + shift, power)
    return product * jnp.ones_like(squares)


def _raised(x: Array, power: Fraction) -> Array:
    """Return a power whose denominator is a power of two, by roots and products."""
    if power < 0 and power.denominator > 1:
        return _raised(lax.rsqrt(x), -2 * power)
    if power < 0:
        return 1 / _raised(x, -power)
    while power.denominator > 1:
        x, power = jnp.sqrt(x), power * 2
    return lax.integer_pow(x, int(power))


def _interpolated(grid: Grid, rows: SortedPoints, expansion: Array) -> Array:
    """Return an expansion at the points of each cell: [rows, features], sorted by cell."""
    at, real = _by_cell(rows, grid.rows)
    weights = chebyshev.basis(grid.order, rows.unit)[at]  # [cells, room, dims, order]
    cells, feats, _ = expansion.shape
    data = expansion.reshape(cells, -1, grid.order)
    data = jnp.einsum("cmk,cpk->cpm", data, weights[:, :, -1])
    for d in reversed(range(grid.dims - 1)):
        data = data.reshape(*at.shape, -1, grid.order)
        data = jnp.sum(data * weights[:, :, d, None], -1)
    out = jnp.zeros((rows.unit.shape[0], feats), expansion.dtype)
    return out.at[jnp.where(real, at, rows.unit.shape[0])].set(data, mode="drop")
