"""What a fold computes, as data (may import the ground layer and `monoid`).

A fold reduces *tiles*, elementwise terms over a pair of axes (row m, column n), along n, and never
makes a tile whole. A `FoldSpec` names every axis; what an operand is follows from its axes:

    row operand   [batch.., m, feature..]      column operand   [batch.., n, feature..]
    pair operand  [batch.., m, n]              batch operand    [batch..]  (a scalar per batch)
                                               table            [batch.., feature..]

An operand may lack any batch axis, and is then shared along it, never repeated. Axes may stand in
any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from symjax_rewrite.pallas_kernels.backend import checker

Array = Any
TileFunction = Callable[[tuple[Array, ...], tuple[Array, ...], Array, Array], Any]


@dataclass(frozen=True, slots=True)
class Operand:
    """One input array: the name of each of its axes, in order, and its dtype."""

    axes: tuple[str, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Contraction:
    """The tile `Σ_over row·col` of a row operand and a column operand.

    Args:
        row: number of the row operand.
        col: number of the column operand.
        over: the feature axes summed over.
        dtype: what is accumulated and returned.
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
        fun: `fun(dots, values, i, j)`: the contractions, the operands named in `reads`, the
            int32 row and column numbers. All broadcast against each other as in NumPy; so must
            the tiles returned (one array or a tuple). Constants inside must be scalars.
            `from_scalars` makes one out of a function of scalars, a scalar jaxpr for instance.
        reads: numbers of the operands without feature axes that `fun` is given, and of tables,
            whose feature axes come last.
        key: what equality and hashing compare beside `reads`; `fun` itself if left out.
        form: what the program is, where a library call exists for it (see `fold_library`).
        whole: the row axis, the column axis or none: what the program itself reduces along (a term
            is compared with its own maximum), so that a block must hold all of it.
    """

    fun: TileFunction = field(compare=False)
    reads: tuple[int, ...] = ()
    key: Hashable = None
    form: Hashable = None
    whole: str | None = None

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", self.fun)


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """One sum `Σ_n p·factor·weights`.

    Args:
        weights: number of an operand of what is summed over, [batch.., n, feature..]; None for 1.
        factor: number of a tile; None for 1.
        round_to: dtype the summand's tile part is rounded to before it meets the weights.
        precision: of that product, as in `jax.lax.dot`.
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

    The shift s is the maximum where that is finite, else 0: a row that is all -inf has sums 0. For
    a shift r of one's own multiply the sums by `exp(shift_of(max) - r)`; with r = max this gives
    NaN for such a row, as the plain softmax does.

    Args:
        terms: the sums.
        tile: number of the tile.
        any_shift: the first result may be any finite shift instead of the maximum.
    """

    terms: tuple[WeightedTerm, ...] = (WeightedTerm(),)
    tile: int = 0
    any_shift: bool = False


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
        clips: whether keys out of range count at the nearest place, or nowhere.
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

    The weights are row operands [batch.., m, feature..]. Beside sums over columns the tile is made
    once for both.
    """

    terms: tuple[WeightedTerm, ...] = (WeightedTerm(),)
    tile: int = 0


Output = Extremum | Sums | ExpSums | ArgExtremum | TopK | KeyedSums | ColumnSums


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Row algebra on the results, done where they are made (a division, a cast, a layout).

    Args:
        fun: `fun(results, values)`: per output its results, then the operands named in `reads`,
            each as [.., m, f] with f its merged features or 1, so that they broadcast. Returns a
            tuple, broadcastable likewise.
        axes: the axes of each result, in the order wanted: the batch axes, the row axis, and none
            or all feature axes of one of the weights (or of an operand read), in its order.
        reads: numbers of row and batch operands.
        key: what equality and hashing compare beside these; `fun` itself if left out.
    """

    fun: Callable[[tuple, tuple], tuple] = field(compare=False)
    axes: tuple[tuple[str, ...], ...]
    reads: tuple[int, ...] = ()
    key: Hashable = None

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", self.fun)


@dataclass(frozen=True, slots=True)
class Band:
    """Columns that matter: j with `i + lower <= j <= i + upper` and `j < length + extra`.

    A promise, not a mask: outside it every tile must hold what its outputs ignore (-inf under
    exp and max, 0 under sums), and backends may skip such tiles or compute them.

    Args:
        lower: least j - i; None for no bound.
        upper: greatest j - i; None for no bound.
        length: number of an integer batch operand that bounds j; None for no bound.
        extra: what is added to it.
        follows: whether the row number is added to it too (rows that continue a filled cache).
    """

    lower: int | None = None
    upper: int | None = None
    length: int | None = None
    extra: int = 0
    follows: bool = False


@dataclass(frozen=True, slots=True)
class FoldSpec:
    """A fold; hashable, and valid once it exists.

    Args:
        sizes: every axis with its size.
        batch: the batch axes, in the order of the results.
        row: the row axis.
        col: the column axis, reduced.
        operands: the inputs.
        contractions: the tiles that are small contractions.
        tile: the elementwise program over them.
        outputs: what is reduced.
        band: which columns matter.
        epilogue: row algebra on the results; without it they are returned as they are.

    Raises:
        UsageError: the parts do not fit.
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

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def size(self) -> dict[str, int]:
        """Axis name to size."""
        return dict(self.sizes)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Sizes of the batch axes."""
        return tuple(self.size[a] for a in self.batch)

    @property
    def rows(self) -> int:
        """Size of the row axis."""
        return self.size[self.row]

    @property
    def cols(self) -> int:
        """Size of the column axis."""
        return self.size[self.col]

    def extent(self, axis: str) -> int:
        """Size of an axis, also of one along which a top-k lists its values or keys count."""
        return int(axis[1:]) if axis.startswith(PLACES) else self.size[axis]

    def features(self, operand: int) -> tuple[str, ...]:
        """The axes of an operand that are neither batch, row nor column, in its order."""
        shared = {*self.batch, self.row, self.col}
        return tuple(a for a in self.operands[operand].axes if a not in shared)

    def shape(self, operand: int) -> tuple[int, ...]:
        """The shape of an operand."""
        return tuple(self.size[a] for a in self.operands[operand].axes)

    def width(self, operand: int) -> int:
        """How many features an operand has."""
        return math.prod(self.size[a] for a in self.features(operand))


PLACES = "#"  # the axis of a top-k is called "#k", one that keys say likewise


def result_axes(spec: FoldSpec) -> tuple[tuple[str, ...], ...]:
    """The axes of everything a fold returns, flat."""
    return spec.epilogue.axes if spec.epilogue else state_axes(spec)


def state_axes(spec: FoldSpec) -> tuple[tuple[str, ...], ...]:
    """The axes of the results before any epilogue, flat."""
    lead, axes = (*spec.batch, spec.row), []
    for output in spec.outputs:
        match output:
            case Extremum():
                axes.append(lead)
            case ArgExtremum():
                axes += [lead, lead]
            case TopK(k=k):
                axes += [(*lead, f"{PLACES}{k}")] * 2
            case KeyedSums(kept=kept, sizes=sizes):
                axes.append((*kept, *(f"{PLACES}{size}" for size in sizes)))
            case _:
                axes += [lead] * isinstance(output, ExpSums)
                kept = (*spec.batch, spec.col) if isinstance(output, ColumnSums) else lead
                for term in output.terms:
                    wide = () if term.weights is None else spec.features(term.weights)
                    axes.append((*kept, *wide))
    return tuple(axes)


def terms_of(output: Output) -> tuple[WeightedTerm, ...]:
    """The sums of an output, if it has any."""
    return output.terms if isinstance(output, (Sums, ExpSums, ColumnSums)) else ()


def weights_of(spec: FoldSpec) -> tuple[int, ...]:
    """Numbers of the operands that are weights of some sum, each once."""
    terms = [t for o in spec.outputs for t in terms_of(o)]
    return tuple(dict.fromkeys(t.weights for t in terms if t.weights is not None))


def in_two_parts(spec: FoldSpec, term: WeightedTerm) -> bool:
    """True if kernels multiply the f32 tile of a term, in two parts, by weights in bf16."""
    if term.weights is None or term.round_to is not None:
        return False
    usual = term.precision in (None, "default")
    return usual and spec.operands[term.weights].dtype == "bfloat16"


def one_way(spec: FoldSpec) -> list[tuple[tuple[int, ...], FoldSpec]]:
    """The folds that reduce columns only and give the outputs of a fold, with their numbers.

    Sums over rows are sums over columns of the tile turned round. That holds for tiles that are
    elementwise: one that reduces along an axis itself stays as it is.
    """
    across = tuple(n for n, o in enumerate(spec.outputs) if isinstance(o, ColumnSums))
    if not across or spec.tile.whole is not None:
        return [(tuple(range(len(spec.outputs))), spec)]
    along = tuple(n for n in range(len(spec.outputs)) if n not in across)
    parts = [(across, _turned(spec, across))]
    if along:
        parts.append((along, replace(spec, outputs=tuple(spec.outputs[n] for n in along))))
    return parts


def _turned(spec: FoldSpec, across: tuple[int, ...]) -> FoldSpec:
    """The fold of some sums over rows with rows and columns in each other's place."""
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
        tile=Tile(tile, inner.reads, key=("turned", inner.key)),
        outputs=tuple(Sums(o.terms, o.tile) for o in sums),
        band=Band(lower, upper),
    )


def from_scalars(fun: TileFunction) -> TileFunction:
    """A tile function from one of scalars, by mapping it over rows, columns and batches.

    Example:
        >>> tile = from_scalars(lambda dots, values, i, j: dots[0] * 2.0)
        >>> tile((jnp.ones((2, 3)),), (), jnp.zeros((2, 1), int), jnp.zeros((1, 3), int)).shape
        (2, 3)
    """

    def mapped(dots: tuple, values: tuple, i: Array, j: Array) -> Any:
        args = (dots, values, i, j)
        rank = max((jnp.ndim(x) for x in jax.tree.leaves(args)), default=0)
        return _map_axes(fun, rank, args)

    return mapped


def _map_axes(fun: Callable, rank: int, args: tuple) -> Any:
    """Map over `rank` leading axes; an array of fewer, or of size 1 there, is shared."""
    if rank == 0:
        return fun(*args)
    leaves, tree = jax.tree.flatten(args)
    size = max(x.shape[0] for x in leaves if jnp.ndim(x) == rank)
    varies = [jnp.ndim(x) == rank and (x.shape[0] > 1 or size == 1) for x in leaves]
    first = [
        lax.squeeze(x, (0,)) if jnp.ndim(x) == rank and not v else x
        for x, v in zip(leaves, varies, strict=True)
    ]

    def inner(*flat: Array) -> Any:
        return _map_axes(fun, rank - 1, jax.tree.unflatten(tree, flat))

    return jax.vmap(inner, in_axes=[0 if v else None for v in varies], axis_size=size)(*first)


def _validate(spec: FoldSpec) -> None:
    check = checker("fold")
    size, shared = spec.size, {*spec.batch, spec.row, spec.col}
    check(len(size) == len(spec.sizes) and len(shared) == len(spec.batch) + 2, "axes repeat", size)
    check(shared <= set(size), "an axis has no size", shared - set(size))
    for operand in spec.operands:
        axes = operand.axes
        check(len(set(axes)) == len(axes), "an operand reads an axis twice", axes)
        check(set(axes) <= set(size), "an operand's axis has no size", axes)
    for c in spec.contractions:
        for number, axis, other in ((c.row, spec.row, spec.col), (c.col, spec.col, spec.row)):
            axes = spec.operands[number].axes
            check(axis in axes and other not in axes, "a contraction's operand lacks its axis", c)
            check(set(spec.features(number)) == set(c.over), "features left over", c)
    check(spec.tile.whole in (None, spec.row, spec.col), "a tile is whole along", spec.tile.whole)
    for number in spec.tile.reads:
        table = not {spec.row, spec.col} & {*spec.operands[number].axes}
        check(table or not spec.features(number), "a tile reads an operand with features", number)
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
