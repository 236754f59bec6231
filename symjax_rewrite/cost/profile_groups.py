"""The groups of a device profile: every figure with its unit, its meaning and its source.

A default is the figure that all profiles share. A group that is None states that the device does
not support the operations that the group prices. May import `profile_fields`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from symjax_rewrite.cost.profile_fields import (
    BATCHES,
    ELEMENTWISE,
    FACT,
    FOLDS,
    JUDGED,
    LAWS,
    NO_SCRIPT,
    ON_GPU,
    ORIENTATION,
    RESIDUALS,
    TURNS,
    fact,
    quantity,
)

# Elementwise functions by the field of `FunctionSteps` that prices them; others are one step.
FUNCTIONS = {
    name: kind
    for kind, names in {
        "root": "sqrt reciprocal div",
        "short": "exp exp2 log log2 tanh logistic erf rsqrt cosh",
        "long": "expm1 log1p erfc erf_inv sinh asinh acosh atanh",
        "periodic": "sin cos",
        "power": "pow",
        "scalar": "tan asin acos atan atan2 cbrt rem lgamma digamma polygamma igamma igammac "
        "bessel_i0e bessel_i1e regularized_incomplete_beta zeta",
    }.items()
    for name in names.split()
}
SLOW_MAPS = frozenset(FUNCTIONS)

Kind = Literal[
    "rewrite", "dominating", "fold", "streamed", "norm", "scan", "hoist", "tree", "banded",
    "blocks", "remake", "order", "orientation", "measured", "told", "even", "far_field", "rested",
    "batched",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Margins:
    """The least predicted speedup of a candidate, by its kind; and other shares."""

    rewrite: float = quantity("1", "a region of terms in another form", RESIDUALS, 1.25)
    dominating: float = quantity("1", "a form that needs less of every resource", JUDGED, 1.15)
    fold: float = quantity("1", "reductions over pairs as folds", RESIDUALS, 1.25)
    streamed: float = quantity(
        "1", "the same as loops on a GPU without the kernels: times of their blocks are estimates",
        JUDGED, 2.5,
    )  # fmt: skip
    far_field: float = quantity(
        "1", "a fold by cells: folds of few steps are priced too high", JUDGED, 2.5
    )
    fresh: float = quantity(
        "1", "times that fresh memory may take less than priced, on a system at rest", JUDGED, 2.0
    )
    rested: float = quantity("1", "a fold that pays by fresh memory, at rest", JUDGED, 1.2)
    even: float = quantity("1", "a fold at those named sizes where it gains least", JUDGED, 1.0)
    norm: float = quantity("1", "a norm and a linear layer as a kernel", JUDGED, 1.25)
    scan: float = quantity("1", "a loop as a scan", TURNS, 1.25)
    hoist: float = quantity("1", "work of all steps outside a loop", RESIDUALS, 1.25)
    batched: float = quantity("1", "all steps of a loop at once", BATCHES, 2.5)
    tree: float = quantity("1", "a tree of affine steps as a loop", JUDGED, 1.25)
    banded: float = quantity("1", "a product with a banded matrix in blocks", RESIDUALS, 1.15)
    blocks: float = quantity("1", "more blocks than fewer", NO_SCRIPT, 1 / 0.95)
    memory: float = quantity(
        "1", "a form without which the program would not fit into the device's memory", JUDGED, 0.5
    )
    spared: float = quantity(
        "1", "a margin falls by so many times the share of the memory that is saved", JUDGED, 2.0
    )
    remake: float = quantity("1", "states recomputed instead of stored", JUDGED, 1.25)
    order: float = quantity("1", "products in another order instead of folds", JUDGED, 1.0)
    orientation: float = quantity("1", "a product with its operands swapped", RESIDUALS, 1.25)
    measured: float = quantity("1", "a program that was timed", JUDGED, 1 / 0.97)
    estimate: float = quantity("1", "an estimated figure may be off by this factor", JUDGED, 2.0)
    figure: float = quantity("1", "the same of a measured figure", JUDGED, 1.1)
    told: float = quantity("1", "a form that is refused, to be reported", JUDGED, 1.02)
    faster: float = quantity("1", "share of the time above which nothing is gained", JUDGED, 0.999)
    larger: float = quantity(
        "1", "share of the memory by which the largest value may grow", JUDGED, 0.01
    )
    share_of_program: float = quantity("1", "share of a program's time to gain", JUDGED, 0.01)
    share_of_loop: float = quantity("1", "share of a loop's time to save", JUDGED, 0.08)


@dataclass(frozen=True, slots=True)
class FunctionSteps:
    """Elementwise functions, in steps of a loop that stays in cache (`folds.fused_steps_per_s`)."""

    root: float = quantity("steps/element", "square roots and divisions", ELEMENTWISE, 4)
    short: float = quantity("steps/element", "exp, log, tanh, erf", ELEMENTWISE, 4)
    long: float = quantity("steps/element", "expm1, log1p, erfc, inverse functions", ELEMENTWISE, 8)
    periodic: float = quantity("steps/element", "sin and cos", ELEMENTWISE, 8)
    power: float = quantity("steps/element", "powers that are no integers", ELEMENTWISE, 16)
    scalar: float = quantity(
        "steps/element", "tan, arcs, cbrt, remainders, gamma functions", ELEMENTWISE, 16
    )
    unrolled: float = quantity(
        "steps/element", "exp and the like over short rows of broadcasts: not in vectors", LAWS, 0
    )
    unrolled_row: int = quantity("elements", "of such a row, at most", LAWS, 0)

    def of(self, name: str) -> float:
        """Return the steps of an elementwise primitive; 0 for one that is a single step."""
        kind = FUNCTIONS.get(name)
        return 0.0 if kind is None else getattr(self, kind)

    def unrolled_steps(self, row: float, lanes: int) -> float:
        """Return the steps of a function over rows of broadcasts that is unrolled; 0 if not."""
        return self.unrolled if lanes / 2 < row <= self.unrolled_row else 0.0


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Caches and the allocator."""

    step_cache_bytes: float = quantity(
        "bytes", "operands of a step that stay in a cache until the next step", NO_SCRIPT, 16 << 20
    )
    cached_step: float = quantity("1", "factor of the bandwidth, cached products", NO_SCRIPT, 2.0)
    packed_bytes_per_s: float = quantity(
        "bytes/s", "operands of a product of matrices, copied in blocks beside its arithmetic",
        LAWS, math.inf,
    )  # fmt: skip
    product_row_s: float = quantity(
        "s/row",
        "the longest axis of a product of matrices, and rows that one with a vector sums down, "
        "however short the others are",
        LAWS,
        0.0,
    )
    short_row_bytes: float = quantity(
        "bytes", "rows that a product with a vector sums down at half the bandwidth", LAWS, 1 << 11
    )
    cached_rows: float = quantity("elements", "of such rows; fewer stay cached", LAWS, math.inf)
    cached_terms: float = quantity(
        "1", "factor of the bandwidth, cached pairwise terms", FOLDS, 1.0
    )
    kept_bytes: float = quantity(
        "bytes", "temporaries that the allocator keeps for the next call", FOLDS, math.inf
    )
    scratch_bytes: float = quantity(
        "bytes", "that a call of the library stores of one value, and the allocator keeps", LAWS,
        math.inf,
    )  # fmt: skip
    constant_bytes: float = quantity(
        "bytes", "frozen values of a program; more: arguments", JUDGED, -1
    )
    fresh_bytes_per_s: float = quantity("bytes/s", "further temporaries", FOLDS, math.inf)
    spread_bytes_per_s: float = quantity("bytes/s", "copies of a smaller value", LAWS, 0.0)
    passes_of_write: float = quantity("1", "passes over memory of a write", FACT, 1.0)
    beside: float = quantity(
        "1",
        "share of the shorter one of arithmetic and traffic of an elementwise kernel that takes "
        "time beside the longer one: so little that it decides between equal times alone",
        JUDGED,
        0.0,
    )


@dataclass(frozen=True, slots=True)
class FoldFacts:
    """Reductions over pairs, as XLA runs them and as folds. Steps are elementwise operations."""

    fused_steps_per_s: float = quantity("steps/s", "steps in a loop that stays in cache", FOLDS)
    product_share: float = quantity(
        "1", "of the rate of products of matrices that products over pairs reach", FOLDS, 1.0
    )
    batch_share: float = quantity(
        "1", "times the rate of small products that large ones of a batch reach; 1: no law", LAWS, 1
    )
    batch_small: float = quantity("operations", "of a small product of a batch", LAWS, 1 << 18)
    batch_large: float = quantity("operations", "of a large one", LAWS, 1 << 23)
    streams: bool = fact("folds run as loops over blocks, no kernels", False)
    writes_blocks: bool = fact("a tile in no kernel is written between operations", True)
    single_rows: bool = quantity("yes/no", "pairs of one row are worth a fold", JUDGED, True)
    reads_places: bool = fact("sums over sparse terms read their places alone", False)
    streams_products: bool = fact(
        "XLA fuses a product into one elementwise chain and one reduction of it", False
    )
    streams_batches: bool = fact(
        "the same of products in batches, and of those with as many rows as columns", False
    )
    square_features: float = quantity(
        "features", "a product with as many rows as columns sums so few: it is fused too", LAWS, 0
    )
    library_rows: float = quantity(
        "rows", "softmax(q kᵀ) v of so many, times its batch, is one call of XLA's library",
        NO_SCRIPT, math.inf,
    )  # fmt: skip
    library_columns: float = quantity(
        "columns", "of which that call stores the weights of all rows", NO_SCRIPT, 0
    )
    library_heads: bool = fact(
        "in a batch that call stores the weights of one of its parts (a head) at a time", False
    )
    heads_at_once: float = quantity("heads", "whose weights it stores, by threads", LAWS, 2)
    batch_terms: float = quantity(
        "terms", "of all heads that the call stores otherwise, or of values that heads share", LAWS,
        1,
    )  # fmt: skip
    head_features: float = quantity(
        "features", "of a head's result: with so few that call stores no weights in a batch, of "
        "rows of `least_head_columns` to `head_columns`",
        NO_SCRIPT, 0,
    )  # fmt: skip
    head_columns: float = quantity("columns", "of rows of such heads, at most", NO_SCRIPT, 0)
    least_head_columns: float = quantity("columns", "the same, at least", NO_SCRIPT, 0)
    kept_features: float = quantity(
        "features", "of a head's result, from which on that call stores no weights of such rows",
        LAWS, 64,
    )  # fmt: skip
    calls_go_on: bool = fact(
        "a call of the library that reduces again stores nothing that it reduced before", False
    )
    library_features: float = quantity(
        "features", "of the result, from which on that call stores no term that is computed "
        "element by element",
        LAWS, math.inf,
    )  # fmt: skip
    library_shifted: float = quantity(
        "features", "the same, where the greatest score of a row is subtracted", LAWS, math.inf
    )
    transposed_bytes_per_s: float = quantity(
        "bytes/s", "blocks of pair operands transposed by loops", NO_SCRIPT, math.inf
    )
    piece_s: float = quantity(
        "s/piece", "contiguous pieces of blocks that loops read or write", LAWS, 0.0
    )
    least_pairs: int = quantity("pairs", "fewer fit into caches", JUDGED, 1 << 20)
    least_sparse_pairs: int = quantity("pairs", "the same, sparse reductions", JUDGED, 1 << 12)
    least_sparse_share: float = quantity(
        "1", "least terms of a sparse product, per sum", JUDGED, 16
    )
    least_sparse_product: float = quantity(
        "1", "the same, where it runs as a product of matrices", JUDGED, 64
    )
    least_of_sort: float = quantity("1", "least length of a sorted row, per kept one", JUDGED, 4)
    block_s: float = quantity(
        "s", "beside a block's products, where loops and no kernel run a fold", FOLDS, 0.0
    )
    threaded_pairs: float = quantity(
        "pairs", "of a block whose operations threads share; a smaller one costs less", LAWS, 1
    )
    kernel_share: float = quantity(
        "1", "of the rate of a library's products that those of a fold's kernel reach, beside its "
        "elementwise steps", ON_GPU, 1.0,
    )  # fmt: skip
    single_share: float = quantity("1", "the same of products in TF32", ON_GPU, 1.0)
    single_steps: float = quantity(
        "1", "of the rate of steps in a loop: in a fold's kernel without products of halves",
        ON_GPU, 1.0,
    )  # fmt: skip
    kernel_s: float = quantity("s", "of a fold's kernel, beside its launch", ON_GPU, 0.0)
    kernel_bytes: float = quantity(
        "1", "of the rate at which elementwise work reads memory, that of a fold's kernel", ON_GPU,
        1.0,
    )  # fmt: skip
    library_share: float = quantity("1", "the same of cuDNN's attention", ON_GPU, 1.0)
    mosaic_share: float = quantity(
        "1", "the same of the kernel by Mosaic; `auto` takes that kernel where this is measured",
        ON_GPU, 1.0,
    )  # fmt: skip
    argmax: float = quantity("steps/element", "an argmax or argmin by XLA", LAWS, 80)
    argmax_passes: float = quantity(
        "steps/element", "the same as two reductions; infinite: not faster", ORIENTATION, math.inf
    )
    argmax_least: int = quantity("elements", "shorter rows XLA unrolls", ORIENTATION, 32)
    top_k: float = quantity("steps/element", "a top-k by XLA, without its places", FOLDS, 24)
    top_k_place: float = quantity(
        "steps/place", "a top-k by XLA, for every doubling of its row", FOLDS, 320
    )
    sort: float = quantity(
        "steps/element", "a sort by XLA, for every doubling of its row and three", FOLDS, 190
    )
    keyed: float = quantity("steps/element", "a sum by key by XLA", FOLDS, 64)
    lookup: float = quantity("steps/element", "a table lookup by XLA", FOLDS, 17)
    chained: float = quantity(
        "1",
        "of a step, by an operation other than a function in the tile of a fold, and in a kernel "
        "that reduces nothing",
        LAWS,
        1.0,
    )
    looped: float = quantity(
        "1", "of a step, by such an operation in a tile's loop over features", LAWS, 1.0
    )
    held_sum: float = quantity(
        "steps/element", "a sum of parts of a gradient, stored for it beyond the caches", LAWS, 0
    )
    chained_reads: int = quantity(
        "1", "values that such a tile reads; half as long again for as many more", LAWS, 64
    )
    lanes: int = quantity("elements", "columns of a block in one vector; fewer waste it", FACT, 1)
    stored_tile: float = quantity(
        "steps/pair", "a block of a fold's tile, stored for one of several sums of it", FOLDS, 0
    )
    down_tile: float = quantity(
        "steps/pair", "a reduction in a fold's block down its columns, which are few", LAWS, 0
    )
    row_sum: float = quantity(
        "steps/row", "a row in memory that XLA's library reduces, beside its elements", LAWS, 0
    )
    features_at_once: float = quantity("1", "features that XLA adds at a time", LAWS, 1)
    row_term: float = quantity(
        "steps/element", "further elements of a row that XLA looks up or adds by key", LAWS, 12
    )
    fold_lookup: float = quantity("steps/element", "a table lookup in a fold's block", FOLDS, 20)
    fold_keyed: float = quantity("steps/element", "a sum by key in a fold's block", FOLDS, 50)
    fold_row: float = quantity("steps", "a fold's top-k, for a block's row", FOLDS, 20_000)
    fold_place: float = quantity("steps/place", "a fold's top-k, for a block's row", FOLDS, 3900)
    fold_search: float = quantity("steps/pair", "a fold's top-k of short rows, at most", LAWS, 300)

    def chained_step(self, reads: int) -> float:
        """Return the steps of an operation in a tile that reads so many values."""
        return min(self.chained * (1 + max(reads / self.chained_reads - 1, 0.0) / 2), 1.0)

    def plain_steps(self, kind: str, rows: float, length: float, places: float = 0) -> float:
        """Return steps of XLA's own reduction of rows of a length; 0 for a sum or a maximum.

        places: how many elements of a row a top-k returns.
        """
        doublings = math.log2(max(length, 2))
        place = self.argmax if length >= self.argmax_least else 0.0
        each = {
            "argmax": place,
            "argmin": place,
            "top_k": self.top_k,
            "sorted": self.sort * (doublings + 3),
            "keyed": self.keyed,
        }
        return rows * (length * each.get(kind, 0.0) + places * self.top_k_place * doublings)


@dataclass(frozen=True, slots=True)
class BandedBlocks:
    """Products with banded matrices, in blocks of rows."""

    least_flops: float = quantity("FLOP", "products of fewer are done in no time", JUDGED, 1 << 25)
    least_rows: int = quantity("rows", "of a block", JUDGED, 32)
    copied_bytes_per_s: float = quantity(
        "bytes/s", "operands cut, and results joined", NO_SCRIPT, 8e9
    )


@dataclass(frozen=True, slots=True)
class ProductLayouts:
    """Matrix products in float32 and float64, by the layouts of their operands.

    Seconds are of both cores, at the lower end of the measured ones.
    """

    long_sum: int = quantity(
        "elements", "a vector times a matrix stored transposed is slow from this sum on",
        ORIENTATION,
    )  # fmt: skip
    across_s: float = quantity(
        "s/element", "a left operand that is summed over its first axis", ORIENTATION, 0.5e-9
    )
    batched_s: float = quantity(
        "s/matrix", "a transposed one on the left, in a batch: the fast library takes none", LAWS,
        4.5e-7,
    )  # fmt: skip
    conflict_bytes: int = quantity(
        "bytes", "the same of rows a multiple of this: a column's lines share places in a cache",
        LAWS, 1 << 11,
    )  # fmt: skip
    conflict_s: float = quantity("s/element", "its time then", LAWS, 2e-9)
    result_s: float = quantity("s/element", "a result transposed apart", ORIENTATION, 1.5e-9)
    copy_s: float = quantity(
        "s/element", "an array in memory read in another order of axes", ORIENTATION, 0.5e-9
    )
    crossed_s: float = quantity(
        "s/element", "read in two orders of axes at once, as in x + xᵀ, of long columns", LAWS, 6e-9
    )
    crossed_rows: int = quantity("elements", "of a column that is long", LAWS, 1 << 11)
    mapped_s: float = quantity(
        "s/element", "a function in another order of axes, of long columns", LAWS, 2.2e-9
    )
    mapped_rows: int = quantity("elements", "of a column that is long", LAWS, 1 << 12)
    moved_row: int = quantity(
        "elements", "a longer row that is moved as a whole takes as long", ORIENTATION, 16
    )
    least_sum: int = quantity("elements", "shorter sums are fast in all layouts", ORIENTATION, 64)
    least_elements: int = quantity(
        "elements", "smaller operands are worth nothing", JUDGED, 1 << 15
    )

    def across_each(self, row: int) -> float:
        """Return the seconds of an element of rows, of so many in float32, that are read across."""
        return self.across_s if 4 * row % self.conflict_bytes else self.conflict_s

    def crossed_each(self, rows: float) -> float:
        """Return the seconds of an element of a square that is read in two orders of axes at once.

        rows: of the square. The more they are, the sooner a line of a cache is lost.
        """
        return min(rows / self.crossed_rows, 1.0) * self.crossed_s

    def copied_each(self, stride: int) -> float:
        """Return the seconds of an element of an array in float32 that is copied at a stride.

        A line of the cache serves several neighbours that are near.
        """
        if 4 * stride % self.conflict_bytes == 0:
            return self.conflict_s
        return min(1.0, (stride - 1) / (self.moved_row - 1)) * self.copy_s

    def mapped_each(self, shape: Sequence[int], order: Sequence[int]) -> float:
        """Return the seconds of an element of a function of an array in another order of its axes.

        order: of the axes longer than 1. A loop computes the function along the last one. Where it
        reads the array at a stride, lines of a cache are lost before their neighbours are read.
        """
        stride, column = math.prod(shape[order[-1] + 1 :]), shape[order[-1]]
        near = min(1.0, (stride - 1) / (self.moved_row - 1))
        return near * min(1.0, column / self.mapped_rows) * self.mapped_s

    def moved_each(self, shape: Sequence[int], order: Sequence[int]) -> float:
        """Return the seconds of an element of an array that is copied in another order of its axes.

        order: of the axes longer than 1. Whole rows along the last axes are moved fast.
        """
        long = sorted(order)
        moved = [k for k, inner in zip(long, order, strict=True) if k != inner]
        if not moved:
            return 0.0
        stride = math.prod(shape[order[-1] + 1 :])
        if stride > 1:
            return self.copied_each(stride)
        return min(1.0, self.moved_row / math.prod(shape[max(moved) + 1 :])) * self.copy_s


@dataclass(frozen=True, slots=True)
class ColumnReductionFacts:
    """Reductions in float32 and float64 down the columns of a matrix stored by rows."""

    row_bytes: float = quantity(
        "bytes", "longer rows of the result are reduced by element", ORIENTATION, 1 << 16
    )
    matrices: int = quantity("1", "of more XLA reduces one in each thread", ORIENTATION, 3)
    sum_s: float = quantity("s/element", "a sum, a longer row", ORIENTATION, 4e-9)
    extremum_s: float = quantity("s/element", "an extremum, a longer row", ORIENTATION, 1.8e-9)

    def are_slow(self, matrices: float, row_bytes: float) -> bool:
        """Return True for reductions that go element by element."""
        return matrices <= self.matrices and row_bytes > self.row_bytes


@dataclass(frozen=True, slots=True)
class ColumnScanFacts:
    """Cumulative operations: as a tree over the axis, whichever it is, and down it row by row."""

    tree_s: float = quantity("s/element", "as a tree", ORIENTATION, 4e-9)
    element_s: float = quantity("s/element", "row by row", ORIENTATION, 1.2e-9)
    step_s: float = quantity("s", "a row, beside its elements", LAWS, 4e-9)
    most_steps: int = quantity("steps", "sums in order of more lose digits", JUDGED, 1 << 13)


@dataclass(frozen=True, slots=True)
class SortFacts:
    """Sorts of which only the ends are read."""

    selects: bool = fact("selection in float32 is faster than a sort", False)
    least_share: float = quantity("1", "length of a row, per place that is read", JUDGED, 2)
    least_elements: int = quantity("elements", "fewer are sorted in no time", JUDGED, 256)


@dataclass(frozen=True, slots=True)
class NormFacts:
    """Norms before linear layers."""

    kernel_share: float = quantity("1", "share of the matmul peak in Pallas", ON_GPU, 0.6)
    scaled_share: float = quantity("1", "the same, where it multiplies weights by γ", ON_GPU, 0.5)
    drawn: float = quantity(
        "1", "share of the memory bandwidth that a program draws, times the multiprocessors",
        ON_GPU, 3.0,
    )  # fmt: skip
    kernel_s: float = quantity("s", "of one kernel, beside its launch", ON_GPU, 0.0)
    cut_share: float | None = quantity(
        "1", "least size of weights per result for one joined product, cut; None: apart", JUDGED, 8
    )


@dataclass(frozen=True, slots=True)
class SearchBounds:
    """Bounds of the search for cheaper forms."""

    few_regions: int = quantity("regions", "if small, so few are searched in any case", JUDGED, 4)
    small_region: int = quantity("classes", "a region of so few is small", JUDGED, 100)
    region_classes: int = quantity("classes", "of a larger region a part is searched", JUDGED, 500)
    region_share: float = quantity("1", "share of its seconds where that begins", JUDGED, 0.99)
    evaluations: int = quantity("1", "choices that are priced for a region", JUDGED, 600)
    large_program: int = quantity("equations", "with fewer, terms are read in any case", JUDGED, 32)
