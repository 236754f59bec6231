"""Specs of folds, as data (may import the ground layer and named_axes.py).

A fold reduces *tiles*, elementwise terms over a pair of axes (row m, column n), along n, without
storing a whole tile. A `FoldSpec` names every axis. The axes of an operand decide its role:

    row operand   [batch.., m, feature..]      column operand   [batch.., n, feature..]
    pair operand  [batch.., m, n]              batch operand    [batch..]  (a scalar per batch)
                                               table            [batch.., feature..]

An operand may lack any batch axis; the operand is then shared along that axis without a copy. The
axes may have any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from symjax_rewrite.pallas_kernels.named_axes import NamedAxes, Operand, checked_axes

Array = Any
TileFunction = Callable[[tuple[Array, ...], tuple[Array, ...], Array, Array], Any]


@dataclass(frozen=True, slots=True)
class Contraction:
    """The tile `Σ_over row·col` of a row operand and a column operand.

    Args:
        row: number of the row operand.
        col: number of the column operand.
        over: the feature axes summed over.
        dtype: dtype of the accumulator and of the result.
        precision: as in `jax.lax.dot`: "default", "high", "highest", or None.
    """

    row: int
    col: int
    over: tuple[str, ...]
    dtype: str = "float32"
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class Tile:
    """The elementwise program from contractions and operands to one or more tiles.

    Args:
        fun: `fun(dots, values, i, j)` of the contractions, the operands named in `reads`, and the
            int32 row and column numbers. All arguments broadcast as in NumPy. The tiles returned
            (one array or a tuple) must broadcast too. Constants inside must be scalars.
        reads: numbers of the operands passed to `fun`: operands without feature axes, and tables,
            whose feature axes come last.
        key: compared by equality and hashing, with `reads`; `fun` itself if left out.
        whole: the row or column axis that the program itself reduces, or None. An example is the
            comparison of a term with its row maximum. A block must hold all of that axis.
        over: feature axes that the program itself sums over. Operands over rows or columns may have
            one of them, as the first axis of what `fun` reads.
        dtypes: the dtypes of the tiles; a trace of `fun` finds them if left out.
    """

    fun: TileFunction = field(compare=False)
    reads: tuple[int, ...] = ()
    key: Hashable = None
    whole: str | None = None
    over: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", self.fun)


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """One sum `Σ_n p·factor·weights`.

    Args:
        weights: number of an operand over the summed axis, [batch.., n, feature..]; None for 1.
        factor: number of a tile; None for 1.
        round_to: dtype that the tile part of the summand is rounded to before the product.
        precision: precision of the product with the weights, as in `jax.lax.dot`.
    """

    weights: int | None = None
    factor: int | None = None
    round_to: str | None = None
    precision: str | None = None


@dataclass(frozen=True, slots=True)
class Extremum:
    """`max_n`, `min_n`, `any_n` or `all_n` of a tile (`kind`); result [batch.., m]."""

    kind: str
    tile: int = 0


@dataclass(frozen=True, slots=True)
class Sums:
    """`Σ_n t·factor·weights` for each term; results [batch.., m, feature..]."""

    terms: tuple[WeightedTerm, ...] = (WeightedTerm(),)
    tile: int = 0


@dataclass(frozen=True, slots=True)
class ExpSums:
    """`max_n t` and `Σ_n e^(t-s)·factor·weights` for each term, in one pass.

    The shift s is the maximum where the maximum is finite, else 0. A row that is all -inf has sums
    0. For another shift r, multiply the sums by `exp(shift_of(max) - r)`. With r = max this gives
    NaN for such a row, as the plain softmax does.

    Args:
        terms: the sums.
        tile: number of the tile.
    """

    terms: tuple[WeightedTerm, ...] = (WeightedTerm(),)
    tile: int = 0


@dataclass(frozen=True, slots=True)
class ArgExtremum:
    """The extreme value of a row and its int32 column, as `jnp.argmax` and `jnp.argmin` choose."""

    larger: bool = True
    tile: int = 0


@dataclass(frozen=True, slots=True)
class TopK:
    """The k largest values of a row and their int32 columns, as `lax.top_k`; [batch.., m, k]."""

    k: int
    tile: int = 0


@dataclass(frozen=True, slots=True)
class KeyedSums:
    """`out[key] += t` over all rows and columns: sums by key; result [kept.., k..], no rows.

    Args:
        keys: numbers of integer tiles, one for each axis `k` of the result.
        sizes: the sizes of these axes.
        kept: the batch axes of the result, in the order of the batch; the others are summed over.
        varies: the batch axes that the keys depend on.
        clips: True if keys out of range count at the nearest place, False if they are dropped.
        tile: number of the tile.
    """

    keys: tuple[int, ...]
    sizes: tuple[int, ...]
    kept: tuple[str, ...] = ()
    varies: tuple[str, ...] = ()
    clips: bool = False
    tile: int = 0


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """`Σ_m t·factor·weights` for each term: sums over rows; results [batch.., n, feature..].

    The weights are row operands [batch.., m, feature..]. If the spec has sums over columns too,
    both use one computation of the tile.
    """

    terms: tuple[WeightedTerm, ...] = (WeightedTerm(),)
    tile: int = 0


FLUSHED = {"float64": 750.0}  # exponentials of less are zero; 104 for other dtypes


def least_maximum(floor: float, dtype: Any) -> float:
    """Return the maximum of a row beside which a fill of at most `floor` (below 0) weighs nothing.

    A cast to half precision may round the fill towards zero by 2⁻⁸ of it.
    """
    return floor * (1 - 2.0**-7) + FLUSHED.get(str(dtype), 110.0)


Output = Extremum | Sums | ExpSums | ArgExtremum | TopK | KeyedSums | ColumnSums


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Elementwise algebra on the results of a row, inside the fold (a division, a cast, a layout).

    Args:
        fun: `fun(results, values)` of the results of each output and the operands named in `reads`.
            Each has shape [.., m, f] with f its merged features or 1, so that all broadcast. It
            returns a tuple of arrays that broadcast likewise.
        axes: the axes of each result, in the requested order: the batch axes, the row axis, and
            none or all feature axes of one of the weights (or of an operand read), in its order.
        reads: numbers of row and batch operands.
        key: compared by equality and hashing, with `axes` and `reads`; `fun` itself if left out.
        dtypes: the dtypes of the results; a trace of `fun` finds them if left out.
        is_plain: it computes nothing: the results keep their values, in another layout or dtype.
    """

    fun: Callable[[tuple, tuple], tuple] = field(compare=False)
    axes: tuple[tuple[str, ...], ...]
    reads: tuple[int, ...] = ()
    key: Hashable = None
    dtypes: tuple[str, ...] = field(default=(), compare=False)
    is_plain: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", self.fun)


@dataclass(frozen=True, slots=True)
class Band:
    """The columns that affect a row: j with `i + lower <= j <= i + upper` and `j < length + extra`.

    A band is a promise, not a mask: outside the band every tile must hold the identity of its
    outputs (-inf under exp and max, 0 under sums). Backends may skip or compute such tiles.

    Args:
        lower: least j - i; None for no bound.
        upper: greatest j - i; None for no bound.
        length: number of an integer batch operand that bounds j; None for no bound.
        extra: added to the length.
        follows: True if the row number is added to the length too (rows that extend a filled
            cache).
        floor: outside the band, tiles hold a finite fill not above it (under exponentials, with a
            maximum subtracted). Backends visit columns outside for rows whose maximum is not above
            the floor by `FLUSHED`; beside any other maximum the fill has weight zero.
        against: number of the operand that holds these maxima; None for the fold's own.
    """

    lower: int | None = None
    upper: int | None = None
    length: int | None = None
    extra: int = 0
    follows: bool = False
    floor: float | None = None
    against: int | None = None


@dataclass(frozen=True, slots=True)
class FoldSpec(NamedAxes):
    """A fold; hashable, and validated when it is built.

    Args:
        sizes: every axis with its size.
        batch: the batch axes, in the order of the results.
        row: the row axis.
        col: the column axis, reduced.
        operands: the inputs.
        contractions: the tiles that are contractions.
        tile: the elementwise program over contractions and operands.
        outputs: the reductions.
        band: the columns that affect each row.
        epilogue: row algebra on the results; without it the results are returned unchanged.
        named: the axes whose size is not known when the program is built. Their sizes are symbolic
            dimensions, or numbers at which the fold is priced.
        few: where sizes are named, the number of pairs up to which one block holds all pairs.

    Raises:
        UsageError: the parts are inconsistent.
    """

    sizes: tuple[tuple[str, int], ...]
    batch: tuple[str, ...]
    row: str
    col: str
    operands: tuple[Operand, ...]
    contractions: tuple[Contraction, ...]
    tile: Tile
    outputs: tuple[Output, ...]
    band: Band = Band()
    epilogue: Epilogue | None = None
    named: tuple[str, ...] = ()
    few: int = 0

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return tuple(self.size[a] for a in self.batch)

    @property
    def rows(self) -> int:
        return self.size[self.row]

    @property
    def cols(self) -> int:
        return self.size[self.col]

    @property
    def contracted(self) -> set[int]:
        """Return the numbers of the operands of contractions."""
        return {k for c in self.contractions for k in (c.row, c.col)}

    @property
    def tables(self) -> list[int]:
        """Return the numbers of the tables that the tile reads."""
        return [k for k in self.tile.reads if self.features(k) and not self.summed(k)]

    @property
    def read_last(self) -> tuple[int, ...]:
        """Return the numbers of the operands that the epilogue reads."""
        return self.epilogue.reads if self.epilogue else ()

    def extent(self, axis: str) -> int:
        """Return the size of an axis; the axes of top-k values and of keys are included."""
        return int(axis[1:]) if axis.startswith(PLACES) else self.size[axis]

    def features(self, operand: int) -> tuple[str, ...]:
        """Return the axes of an operand that are neither batch, row nor column, in its order."""
        shared = {*self.batch, self.row, self.col}
        return tuple(a for a in self.operands[operand].axes if a not in shared)

    def summed(self, operand: int) -> tuple[str, ...]:
        """Return the features of an operand that the tile program sums over."""
        return tuple([a for a in self.features(operand) if a in self.tile.over])

    def width(self, operand: int) -> int:
        """Return the number of features of an operand."""
        return math.prod(self.size[a] for a in self.features(operand))


PLACES = "#"  # prefix of the axes of top-k values and of keys; an axis of size k is called "#k"


def result_axes(spec: FoldSpec) -> tuple[tuple[str, ...], ...]:
    """Return the axes of all results of a fold, flat."""
    return spec.epilogue.axes if spec.epilogue else state_axes(spec)


def state_axes(spec: FoldSpec) -> tuple[tuple[str, ...], ...]:
    """Return the axes of the results before any epilogue, flat."""
    return tuple(axes for output in spec.outputs for axes in output_axes(spec, output))


def output_axes(spec: FoldSpec, output: Output) -> list[tuple[str, ...]]:
    """Return the axes of the results of one output before any epilogue."""
    lead = (*spec.batch, spec.row)
    match output:
        case Extremum():
            return [lead]
        case ArgExtremum():
            return [lead, lead]
        case TopK(k=k):
            return [(*lead, f"{PLACES}{k}")] * 2
        case KeyedSums(kept=kept, sizes=sizes):
            return [(*kept, *(f"{PLACES}{size}" for size in sizes))]
    kept = (*spec.batch, spec.col) if isinstance(output, ColumnSums) else lead
    wide = [() if t.weights is None else spec.features(t.weights) for t in output.terms]
    return [lead] * isinstance(output, ExpSums) + [(*kept, *w) for w in wide]


def terms_of(output: Output) -> tuple[WeightedTerm, ...]:
    """Return the sums of an output; empty if the output has none."""
    return output.terms if isinstance(output, (Sums, ExpSums, ColumnSums)) else ()


def weights_of(spec: FoldSpec) -> tuple[int, ...]:
    """Return the numbers of the operands that are weights of some sum, each once."""
    terms = [t for o in spec.outputs for t in terms_of(o)]
    return tuple(dict.fromkeys(t.weights for t in terms if t.weights is not None))


def runs_across(spec: FoldSpec, operand: int) -> bool:
    """Return True for a pair operand that is stored with rows last, across a block's rows."""
    axes = spec.operands[operand].axes
    return {spec.row, spec.col} <= {*axes} and axes.index(spec.row) > axes.index(spec.col)


def feature_order(spec: FoldSpec, number: int) -> tuple[str, ...]:
    """Return the feature axes in the order of the operand's contraction, else in its own order."""
    orders = (c.over for c in spec.contractions if number in (c.row, c.col))
    return next(orders, spec.features(number))


def has_one_order(spec: FoldSpec, number: int) -> bool:
    """Return True if an operand's features are contracted, and returned, in one order."""
    orders = {c.over for c in spec.contractions if number in (c.row, c.col)}
    orders |= {spec.features(number)} if number in weights_of(spec) else set()
    return len(orders) <= 1


def in_two_parts(spec: FoldSpec, term: WeightedTerm) -> bool:
    """Return True if kernels multiply a term's f32 tile by bf16 weights, the tile in two parts."""
    if term.weights is None or term.round_to is not None:
        return False
    usual = term.precision in (None, "default")
    return usual and spec.operands[term.weights].dtype == "bfloat16"


def one_way(spec: FoldSpec) -> list[tuple[tuple[int, ...], FoldSpec]]:
    """Return folds that reduce columns only and give the outputs of a fold, with output numbers.

    Sums over rows are sums over columns of the transposed tile, if the tile is elementwise. A fold
    whose tile reduces along an axis itself is returned unchanged.
    """
    across = tuple(n for n, o in enumerate(spec.outputs) if isinstance(o, ColumnSums))
    if not across or spec.tile.whole is not None:
        return [(tuple(range(len(spec.outputs))), spec)]
    along = tuple(n for n in range(len(spec.outputs)) if n not in across)
    parts = [(across, _transposed(spec, across))]
    if along:
        parts.append((along, replace(spec, outputs=tuple(spec.outputs[n] for n in along))))
    return parts


def _transposed(spec: FoldSpec, across: tuple[int, ...]) -> FoldSpec:
    """Build the fold of some sums over rows, with rows and columns swapped."""
    sums = [o for n in across if isinstance(o := spec.outputs[n], ColumnSums)]
    inner = spec.tile
    lower, upper = (None if b is None else -b for b in (spec.band.upper, spec.band.lower))

    def tile(dots: tuple[Array, ...], values: tuple[Array, ...], i: Array, j: Array) -> Any:
        return inner.fun(dots, values, j, i)

    return replace(
        spec,
        row=spec.col,
        col=spec.row,
        contractions=tuple(replace(c, row=c.col, col=c.row) for c in spec.contractions),
        tile=Tile(
            tile, inner.reads, key=("transposed", inner.key), over=inner.over, dtypes=inner.dtypes
        ),
        outputs=tuple(Sums(o.terms, o.tile) for o in sums),
        band=Band(lower, upper),
    )


def _validate(spec: FoldSpec) -> None:
    shared = (*spec.batch, spec.row, spec.col)
    check = checked_axes("fold", spec, shared, spec.size)
    for c in spec.contractions:
        for number, axis, other in ((c.row, spec.row, spec.col), (c.col, spec.col, spec.row)):
            axes = spec.operands[number].axes
            check(axis in axes and other not in axes, "a contraction's operand lacks its axis", c)
            check(set(spec.features(number)) == set(c.over), "features left over", c)
    check(spec.tile.whole in (None, spec.row, spec.col), "a tile is whole along", spec.tile.whole)
    for number in spec.tile.reads:
        features = spec.features(number)
        table = not {spec.row, spec.col} & {*spec.operands[number].axes}
        known = table or features == spec.summed(number)[:1]
        check(known, "a tile reads an operand with features", number)
    for output in spec.outputs:
        summed, kept = spec.col, spec.row
        if isinstance(output, ColumnSums):
            summed, kept = kept, summed
        for term in terms_of(output):
            if term.weights is not None:
                axes = spec.operands[term.weights].axes
                check(summed in axes and kept not in axes, "weights lack the axis summed", term)
        if isinstance(output, KeyedSums):
            check({*output.kept} <= {*spec.batch}, "sums by key keep no such axis", output.kept)
        if isinstance(output, (KeyedSums, ColumnSums)):
            check(spec.epilogue is None, "sums over rows leave none for an epilogue", output)
        if isinstance(output, Extremum):
            check(output.kind in ("max", "min", "any", "all"), "no such extremum", output.kind)
    if spec.epilogue is not None:
        features = {(), *map(spec.features, (*weights_of(spec), *spec.epilogue.reads))}
        for axes in spec.epilogue.axes:
            check({*spec.batch, spec.row} <= set(axes), "a result lacks a batch or row axis", axes)
            check(spec.col not in axes and len(set(axes)) == len(axes), "a result's axes", axes)
            wide = tuple(a for a in axes if a not in shared)
            check(wide in features, "a result's features are those of no operand", axes)
        for number in spec.epilogue.reads:
            check(spec.col not in spec.operands[number].axes, "an epilogue reads columns", number)
    length = spec.band.length
    if length is not None:
        check(
            set(spec.operands[length].axes) <= set(spec.batch), "length is no batch operand", length
        )
