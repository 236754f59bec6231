"""Products with a banded matrix, computed block by block of its rows.

(tril(A) @ B)[i] = Σ_{k ≤ i} A[i,k]·B[k]

A block of rows reads only the columns that the band has in these rows. Entries outside the band are
zero by their position, so they are left out (README, Numerics levels). A triangular matrix saves at
most half of the work; a tridiagonal matrix saves nearly all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from symjax_rewrite.candidates import Context, Found, Refusal
from symjax_rewrite.codegen import product_lowering, term_lowering
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.batched_products import batch_seconds
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.profile_groups import BandedBlocks
from symjax_rewrite.cost.term_cost import CostModel, is_dot, itemsize
from symjax_rewrite.ir.dataflow import Needed, cone, kind_of, node_of
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.term import DELTA, IOTA, LEAF, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.pairwise_terms import Pair, is_elementwise, reads_twice
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW, TileBuilder
from symjax_rewrite.kernel_selection.kernel_candidate import ClassRoute, Proposal, candidates
from symjax_rewrite.kernel_selection.mask_bounds import Known, band_of, known_operand
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.pallas_kernels.fold.spec import Band
from symjax_rewrite.text_tables import too_slow
from symjax_rewrite.usage_records import ratio_of

BLOCKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # candidate numbers of blocks


class RowBlock(NamedTuple):
    """`rows` rows from `start` on, which read `columns` columns from `low` on."""

    start: int
    low: int
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


def _route(t: TermGraph, cls: int, row: int, blocks: tuple[RowBlock, ...]) -> ClassRoute:
    """Return a product with a matrix that is banded over `row`, computed in blocks of rows."""
    node, dtype = node_of(t.graph, cls), t.graph.classes[cls].dtype

    def make(emitter: Any) -> tuple[Any, tuple[int, ...]]:
        operands = [(emitter.array(a.cls), a.axes) for a in node.args]
        order: tuple[int, ...] = ()

        def product(first: Any, shape: tuple[int, int]) -> Any:
            nonlocal order
            sizes = _space(t, cls)
            sizes[row], sizes[node.out] = shape
            places = {row: first[0], node.out: first[1]}
            cut = [_cut(x.data, [axes[s] for s in x.slots], places, sizes) for x, axes in operands]
            data, made = term_lowering.lower_node(node, cut, tuple(sizes), dtype, t.primitives)
            order = order or made
            return product_lowering.arrange(data, made, order, tuple(sizes))

        first = np.array([(b.start, b.low) for b in blocks], np.int32)
        if len({b.shape for b in blocks}) > 1:
            parts = [product(at, b.shape) for at, b in zip(first, blocks, strict=True)]
            return lax.concatenate(parts, order.index(row)), order
        made = jax.vmap(lambda at: product(at, blocks[0].shape))(first)
        return _joined(made, order.index(row), _space(t, cls)[row]), order

    return ClassRoute(cls, [a.cls for a in node.args], make)


def _cut(data: Any, labels: Sequence[int], places: dict[int, Any], sizes: Sequence[int]) -> Any:
    """Return an operand's block, which begins at `places`, and its labels."""
    starts = [places.get(i, np.int32(0)) for i in labels]
    return lax.dynamic_slice(data, starts, [sizes[i] for i in labels]), tuple(labels)


def _joined(blocks: Any, axis: int, rows: int) -> Any:
    """Join blocks of rows [block, ..], whose last one may begin with rows of the one before."""
    count, size = blocks.shape[0], blocks.shape[axis + 1]
    joined = lax.collapse(jnp.moveaxis(blocks, 0, axis), axis, axis + 2)
    if count * size == rows:
        return joined
    whole = lax.slice_in_dim(joined, 0, rows - size, axis=axis)
    last = lax.slice_in_dim(joined, (count - 1) * size, count * size, axis=axis)
    return lax.concatenate([whole, last], axis)


class BandedProducts:
    """Pass that computes products with banded matrices in blocks, where the profile prices them."""

    name = "banded"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        kernels = context.options.kernels in ("auto", "always")
        bands = context.device.bands
        if not kernels or bands is None or not context.reorders():
            return
        terms = context.terms(program)
        if not terms.t.dim_env:
            selection = _BandedSelection(terms.t, context.device, bands, terms.model)
            yield from selection.found(terms.need)


@dataclass(slots=True)
class _BandedSelection:
    """Search for products with banded matrices in one program."""

    t: TermGraph
    device: Device
    bands: BandedBlocks
    model: CostModel

    def found(self, need: Needed) -> Iterator[Found]:
        t, masked = self.t, _masked(self.t, need)
        for cls in need.order:
            node = node_of(t.graph, cls)
            if not any(a.cls in masked for a in node.args):
                continue
            if not _is_large(t, cls, self.bands.least_flops):
                continue
            for row, band in _bands(t, cls, masked):
                blocks, seconds = self._blocks(cls, row, band)
                where = t.where(cls)
                if margins.pays(*seconds, "banded", self.device):
                    reason = f"zero outside of {_text(band)}: {len(blocks)} blocks"
                    proposal = Proposal([_route(t, cls, row, blocks)], reason, where, seconds)
                    yield from candidates(t, "banded", [proposal])
                    break
                least = margins.margin("banded", self.device)
                gain = ratio_of(*seconds)
                reason = Obstacle.COST(too_slow(gain or 0.0, least))
                yield Refusal("banded", reason, where, ratio=gain)

    def _blocks(
        self, cls: int, row: int, band: Band
    ) -> tuple[tuple[RowBlock, ...], tuple[float, float]]:
        """Return the blocks predicted to be fastest; predicted seconds as written and in blocks."""
        node, sizes = node_of(self.t.graph, cls), _space(self.t, cls)
        rows, columns = sizes[row], sizes[node.out]
        best: tuple[RowBlock, ...] = ()
        least = math.inf
        for count in BLOCKS:
            size = -(-rows // count)
            if size < self.bands.least_rows:
                break
            blocks = tuple(_cut_rows(rows, columns, size, band))
            seconds = self._seconds(cls, row, blocks)
            if not best or margins.pays(least, seconds, "blocks", self.device):
                best, least = blocks, seconds
        written = batch_seconds(node, _space(self.t, cls), self._dtype(cls), self.device)
        if written is None:
            written = self.model.product_seconds(self.t.graph, cls, node)
        return best, (written, least)

    def _dtype(self, cls: int) -> str:
        return self.t.graph.classes[cls].dtype

    def _seconds(self, cls: int, row: int, blocks: tuple[RowBlock, ...]) -> float:
        """Return the seconds of the blocks' products, operand slices and joined results."""
        d, classes, node = self.device, self.t.graph.classes, node_of(self.t.graph, cls)
        sizes, dtype = _space(self.t, cls), self._dtype(cls)
        total = 0.0
        for b in blocks:
            sizes[row], sizes[node.out] = b.shape
            read = sum(
                math.prod(sizes[i] for i in a.axes) * itemsize(classes[a.cls].dtype)
                for a in node.args
            )
            moved = math.prod(sizes[: node.out]) * itemsize(dtype) + read
            product = batch_seconds(node, sizes, dtype, d)
            if product is None:
                product = 2 * math.prod(sizes) / d.peak(dtype)
                product += d.packing_seconds(read, max(sizes))
            total += product + moved / self.bands.copied_bytes_per_s
        return total + 3 * len({b.shape for b in blocks}) * d.launch_s


def _space(t: TermGraph, cls: int) -> list[int]:
    sizes: Any = (*t.graph.classes[cls].sizes, *node_of(t.graph, cls).bound)
    return [int(s) for s in sizes]


def _is_large(t: TermGraph, cls: int, least_flops: float) -> bool:
    node = node_of(t.graph, cls)
    if not is_dot(node) or len(node.bound) != 1 or kind_of(t.graph, cls) != "f":
        return False
    if any(min(a.axes, default=0) < 0 or reads_twice(a) for a in node.args):
        return False
    return 2 * math.prod(_space(t, cls)) >= least_flops


def _masked(t: TermGraph, need: Needed) -> set[int]:
    """Return the classes computed elementwise from index numbers or masks."""
    g = t.graph

    def is_mask(c: int) -> bool:
        op = node_of(g, c).op
        return op in (IOTA, DELTA) or (op == LEAF and g.classes[c].dtype == "bool")

    def users(c: int) -> list[int]:
        return [u for u in need.users.get(c, ()) if is_elementwise(node_of(g, u))]

    return cone(filter(is_mask, need.order), users)


def _bands(t: TermGraph, cls: int, masked: set[int]) -> Iterator[tuple[int, Band]]:
    """Yield each row index over which an operand is banded, with its band."""
    node, sizes = node_of(t.graph, cls), _space(t, cls)
    for ref, other in (node.args, node.args[::-1]):
        if node.out not in ref.axes or ref.cls not in masked:
            continue
        for row in ref.axes:
            if row < node.out and row not in other.axes:
                band = _band(t, ref, row, node.out, sizes[row], sizes[node.out])
                if band.lower is not None or band.upper is not None:
                    yield row, band


def _band(t: TermGraph, ref: Ref, row: int, column: int, rows: int, columns: int) -> Band:
    """Return the band outside which the matrix is zero."""
    names: dict[Any, Any] = {i: f"b{i}" for i in ref.axes} | {row: ROW, column: COLUMN}
    batch = [names[i] for i in ref.axes if i not in (row, column)]
    builder = TileBuilder(t, Pair(t, ROW, COLUMN))
    root = builder.build(ref.over(names))
    known = [_known(t, builder, number, batch) for number in builder.reads]
    return band_of(builder.steps, known, [(root, 0.0)], rows, columns)


def _known(t: TermGraph, builder: TileBuilder, number: int, batch: list[str]) -> Known:
    """Read constant masks; other weights are not read, since reading them would take long."""
    cls, axes = builder.inputs[number]
    if t.graph.classes[cls].dtype != "bool":
        return Known()
    return known_operand(t, number, cls, axes, batch)


def _cut_rows(rows: int, columns: int, size: int, band: Band) -> Iterator[RowBlock]:
    """Yield blocks of `size` rows, all of one shape if the band is bounded on both sides.

    XLA takes 10 to 30 ms to compile the product of each shape, and runs products of one shape as
    one batch.
    """
    if band.lower is not None and band.upper is not None:
        width = min(max(size + band.upper - band.lower, 1), columns)
        for start in range(0, rows, size):
            first = min(start, rows - size)
            yield RowBlock(first, min(max(first + band.lower, 0), columns - width), size, width)
        return
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        low = 0 if band.lower is None else max(0, start + band.lower)
        high = columns if band.upper is None else min(columns, stop + band.upper)
        low = min(low, columns - 1)  # at least one column, so that a row of NaNs stays NaN
        yield RowBlock(start, low, stop - start, max(high, low + 1) - low)


def _text(band: Band) -> str:
    low = "" if band.lower is None else f"{band.lower} ≤ "
    high = "" if band.upper is None else f" ≤ {band.upper}"
    return f"{low}column - row{high}"
