"""Pairwise terms: terms over a row index m and a column index n.

A term is *pairwise* where it depends on both m and n. `Pair.open` returns how such a term is
computed from other pairwise terms, from small contractions of row and column operands, and from
terms that lack m or n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symjax_rewrite.cost.term_cost import itemsize
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import kind_of, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import Node, Ref, identity, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds import gather_patterns

UNROLL = 64  # limit on terms of a sum written out inside a tile
PIECE = 8  # terms that a step of a loop over features adds
LONGEST = 2**14  # limit on terms of a sum that is a loop over features
LEAST_DOT = 16  # least length of a sum computed as a product: kernels pad to it
MOST_JOINED = 8  # limit on concatenated parts that a tile selects from
LARGEST_TILE = 256  # limit on terms of one tile
MOST_STEPS = 512  # limit on steps of one tile, its sums written out

BY_FEATURE = ("apply", "sum", "delta", "scattered", "part", "joined")  # kinds that loops compute

COMPARISONS = frozenset(
    "eq ne lt le gt ge sign floor ceil round is_finite nextafter clz population_count".split()
)


Slots = tuple[int, int | None, int]  # a class, and its slots that read the row and the column


class At(NamedTuple):
    """One element of an axis, where a reference reads no index."""

    place: int


def _is_summed(ref: Ref) -> bool:
    """Return True for a reference inside a sum, which reads an index of the sum."""
    return any(isinstance(i, tuple) for i in ref.axes)


def reads_twice(ref: Ref) -> bool:
    """Return True if a reference reads an index along two axes."""
    if len({*ref.axes}) == len(ref.axes):
        return False
    indices = [i for i in ref.axes if not isinstance(i, At)]
    return len(set(indices)) != len(indices)


def elements(t: TermGraph, cls: int) -> int:
    """Return the number of elements of a class."""
    sizes: Any = t.graph.classes[cls].sizes
    return math.prod(map(t.number, sizes) if t.dim_env else sizes)


def bytes_of(t: TermGraph, cls: int) -> int:
    """Return the number of bytes of a class."""
    return itemsize(t.graph.classes[cls].dtype) * elements(t, cls)


def is_product(node: Node) -> bool:
    """Return True if a node multiplies its operands elementwise."""
    return node.op == op.CONTRACT and not node.bound


def is_elementwise(node: Node) -> bool:
    """Return True if a node combines its operands elementwise."""
    return node.op in (op.MAP, op.ADD) or is_product(node)


class Opened(NamedTuple):
    """Computation of a pairwise reference.

    kind: `apply` (a node of pairwise and other args; its attr is in `data`), `dot` (args: row and
    column operand, the tokens of the summed indices in `data`), `sum` (written out or in a loop;
    the token and the number of its terms in `data`), `delta`, `scattered` (a value at the selected
    column, else zero), `lookup` (a table and the integers that it is read at; `data` is the value
    out of range, None for the nearest element), `part` (single indices of another term), `joined`
    (an index and the parts joined along it; the start of each part but the first in `data`),
    `along` (a reduced product; the monoid, and whether it is along rows, in `data`), `chosen` (the
    value at the selected columns), or `leaf`.
    """

    kind: str
    args: tuple[Ref, ...] = ()
    data: Any = None


class Bounds(NamedTuple):
    """Bounds of a tile that is not explored.

    read: at most the elements of the largest value that it reads whole or by row. meets: False if
    no row operand and column operand are combined in it. is_large: True if it is known to be too
    large, since it is or contains a tile that was explored.
    """

    read: int
    meets: bool
    is_large: bool = False


@dataclass(slots=True, eq=False)
class Pair:
    """Terms as pairwise in the indices m and n of one reduction.

    gone: classes that sums leave out, since they are zero. made: reductions found before, whose
    sums are not part of a tile. single: the indices of the term, where there is one row and no row
    index. inside: row values that tiles compute themselves. tables: tiles may look values up in
    tables. loops: tiles may sum features in loops, and more than `UNROLL` of them. chosen: where
    tiles are read at some columns of each row alone, a reference that is zero at other columns, and
    its value there: a reference over its slots, and over names that number the columns. cancels:
    sums may lose digits, as numerics="cancels" permits. rounded: classes known to scale rounded
    products or not (`rounded_products`); None where no sum may round what it multiplies.
    known_bounds: results of `bounds`, for the terms along every two indices.
    """

    t: TermGraph
    row: Any
    column: Any
    gone: frozenset[int] = frozenset()
    made: Container[int] = ()
    single: frozenset | None = None
    inside: frozenset[int] = frozenset()
    tables: bool = False
    loops: bool = False
    chosen: tuple[Ref, Ref] | None = None
    cancels: bool = False
    rounded: dict[int, bool] | None = None
    known_bounds: dict[Slots, Bounds] = field(default_factory=dict)
    _fresh: int = field(default=0, init=False)

    @property
    def g(self) -> EGraph:
        return self.t.graph

    def holds(self, ref: Ref) -> bool:
        """Return True if a reference depends on both indices."""
        if self.single is not None:
            return self.column in ref.axes and self.single.issuperset(ref.axes)
        return self.row in ref.axes and self.column in ref.axes

    def along(self, row: Any, column: Any, single: frozenset | None = None) -> Pair:
        """Return the same terms as pairwise in two other indices."""
        tables = self.tables and single is None
        return Pair(
            self.t, row, column, self.gone, self.made, single, tables=tables, loops=self.loops,
            cancels=self.cancels, rounded=self.rounded, known_bounds=self.known_bounds,
        )  # fmt: skip

    def bounds(self, ref: Ref) -> Bounds:
        """Return bounds of the tile that computes a reference.

        A stream of residuals reaches through all layers, so that each of its classes is opened once
        for all reductions above it.
        """
        if reads_twice(ref):
            return Bounds(elements(self.t, ref.cls), False)
        start, known = self._slots(ref), self.known_bounds
        opened: dict[Slots, tuple[Bounds, list[Slots]]] = {}
        stack = [start]
        while stack:
            key = stack[-1]
            if key not in known and key not in opened:
                opened[key] = self._step_bounds(*key)
                stack += [k for k in opened[key][1] if k not in known]
                continue
            stack.pop()
            if key not in known:
                own, keys = opened[key]
                if keys:
                    reads, meet, large = zip(own, *[known[k] for k in keys], strict=True)
                    own = Bounds(max(reads), any(meet), any(large))
                known[key] = own
        return known[start]

    def note_large(self, ref: Ref) -> None:
        """Record that the tile which computes a reference is too large, and all that contain it."""
        key = self._slots(ref)
        self.known_bounds[key] = self.bounds(ref)._replace(is_large=True)

    def _slots(self, ref: Ref) -> Slots:
        row = None if self.single is not None else ref.axes.index(self.row)
        return ref.cls, row, ref.axes.index(self.column)

    def _step_bounds(self, cls: int, row: int | None, column: int) -> tuple[Bounds, list[Slots]]:
        """Return the bounds of one step of a tile, and its pairwise operands."""
        t, node = self.t, node_of(self.g, cls)
        kind, args = "apply", self._kept(node)[0]
        if not is_elementwise(node) or self.g.classes[cls].dtype[:7] == "complex":
            axes = identity(node.out)
            pair = self.along(row, column, frozenset(axes) if row is None else None)
            kind, args, _ = pair.open(Ref(cls, axes))
        if kind == "leaf":
            return Bounds(elements(t, cls), False), []
        if kind == "lookup":
            args = [a for a in args[1:] if gather_patterns.is_counted(self.g, a.cls)]
        elif kind not in ("apply", "dot"):
            return Bounds(0, True), []
        size, held, both = 0, [], False
        for a in args:
            if row is not None and row not in a.axes:
                continue
            if column not in a.axes:
                size = max(size, elements(t, a.cls) if a.axes else 1)
            elif kind != "dot":
                both = True
                if reads_twice(a):
                    size = max(size, elements(t, a.cls))
                else:
                    place = None if row is None else a.axes.index(row)
                    held.append((a.cls, place, a.axes.index(column)))
        return Bounds(size, not both and kind != "lookup"), held

    def open(self, ref: Ref) -> Opened:
        """Return the computation of a reference that depends on both indices."""
        node = node_of(self.g, ref.cls)
        if reads_twice(ref) or self.g.classes[ref.cls].dtype[:7] == "complex":
            return Opened("leaf")
        if self.chosen is not None and ref == self.chosen[0]:
            value = self.chosen[1]
            axes = [i if isinstance(i, str) else ref.axes[i] for i in value.axes]
            return Opened("chosen", (Ref(value.cls, tuple(axes)),))
        opener = Pair._elementwise if is_elementwise(node) else _OPENERS.get(node.op)
        return (opener and opener(self, ref, node)) or Opened("leaf")

    def reduced(self, ref: Ref) -> Opened:
        """Return the computation of a row value from rows of a tile or from row values."""
        node = node_of(self.g, ref.cls)
        if is_elementwise(node):
            return Opened("apply", tuple([over(ref, a) for a in node.args]), node.attr)
        of_row = self.single is None and self.row not in ref.axes
        whole = Ref(ref.cls, (*ref.axes, self.row if of_row else self.column))
        kind = "sum" if node.op == op.CONTRACT else node.attr
        return Opened("along", tuple([over(whole, a) for a in node.args]), (kind, of_row))

    def _elementwise(self, ref: Ref, node: Node) -> Opened:
        args, attr = self._kept(node)
        return Opened("apply", tuple([over(ref, a) for a in args]), attr)

    def _kept(self, node: Node) -> tuple[Sequence[Ref], Any]:
        """Return the operands of an elementwise term, and its attribute; sums leave out zeros."""
        args, attr = node.args, node.attr
        if node.op != op.ADD or not self.gone:
            return args, attr
        kept = [k for k, a in enumerate(args) if a.cls not in self.gone]
        if 0 < len(kept) < len(args):
            return [args[k] for k in kept], tuple([attr[k] for k in kept])
        return args, attr

    def _part(self, ref: Ref, node: Node) -> Opened | None:
        """Open components of terms that the tile computes: `d[.., 0]` of differences of points."""
        (arg,) = node.args
        inner = node_of(self.g, arg.cls)
        computed = is_elementwise(inner) or inner.op in (op.CONTRACT, op.SLICE)
        if not computed or any(isinstance(entry, tuple) for entry in node.attr):
            return None
        axes: Any = [
            ref.axes[i] if entry is None else At(entry)
            for entry, i in zip(node.attr, arg.axes, strict=True)
        ]
        return Opened("part", (Ref(arg.cls, tuple(axes)),))

    def _joined(self, ref: Ref, node: Node) -> Opened | None:
        """Open components that the tile computes and joins: `stack([dx * f, dy * f], -1)`."""
        along, sizes = node.attr
        index = ref.axes[along]
        loose = all(along not in a.axes for a in node.args)
        if not loose or not all(isinstance(size, int) for size in sizes):
            return None
        if index in (self.row, self.column) or len(sizes) > MOST_JOINED:
            return None
        starts = tuple(itertools.accumulate(sizes[:-1]))
        args = tuple([over(ref, a) for a in node.args])
        if isinstance(index, At):
            return Opened("part", (args[sum(start <= index.place for start in starts)],))
        number = self.g.add(op.IOTA, None, (), (sum(sizes),), (), "int32")
        return Opened("joined", (Ref(number.cls, (index,)), *args), starts)

    def _scattered(self, ref: Ref, node: Node) -> Opened | None:
        """Open a scatter into zeros of one element per row."""
        found = gather_patterns.scattered(self.t, ref.cls)
        if found is None or len(found.along) != 1 or found.bound:
            return None
        (slot,), (place,) = found.along, found.places
        args = (over(ref, place), over(ref, found.value))
        if ref.axes[slot] not in (self.row, self.column) or any(map(self.holds, args)):
            return None
        limit = self.t.jax_size(self.g.classes[ref.cls].sizes[slot]) if found.clips else None
        return Opened("scattered", args, (ref.axes[slot] == self.row, limit))

    def _take(self, ref: Ref, node: Node) -> Opened | None:
        """Open a table lookup at pairs of integers."""
        mode, fill, windows = node.attr
        if any(w is not None for w in windows):
            return None
        _, (table, *places) = self._opened(ref, node)
        return self._lookup(ref, table, tuple(places), fill[0] if mode == "fill" else None)

    def _lookup(self, ref: Ref, table: Ref, places: tuple[Ref, ...], fill: Any) -> Opened | None:
        read = [i for i in table.axes if isinstance(i, tuple)]  # the tokens of the looked-up axes
        if (
            not self.tables
            or self.single is not None
            or any(isinstance(i, tuple) for i in ref.axes)
            or {self.row, self.column} & {*table.axes}
            or len(read) != len(places)
            or 0 in self.g.classes[table.cls].sizes
            or reads_twice(table)
            or not all(map(self.holds, places))
        ):
            return None
        order = sorted(range(len(places)), key=lambda k: table.axes.index(self._token(k)))
        return Opened("lookup", (table, *[places[k] for k in order]), fill)

    def _token(self, k: int) -> Any:
        """Return the token of an index that the last opened term sums over or looks up."""
        return ("sum", self._fresh, k)

    def _opened(self, ref: Ref, node: Node) -> tuple[list[tuple], list[Ref]]:
        """Return the bound indices of a node, renumbered, and its operands over them."""
        self._fresh += 1
        tokens = [self._token(k) for k in range(len(node.bound))]
        axes = [*ref.axes, *tokens]
        return tokens, [a.over(axes) for a in node.args]

    def _contraction(self, ref: Ref, node: Node) -> Opened | None:
        tokens, args = self._opened(ref, node)
        for k, a in enumerate(args if len(args) == 2 and len(tokens) == 1 else ()):
            hot = gather_patterns.one_hot(self.t, a) if self.tables and self.holds(a) else None
            if hot is not None and hot[1] == tokens[0]:
                return self._lookup(ref, args[1 - k], (hot[0],), 0)
        split = self._separable(args, set(tokens))
        if split is not None:
            return Opened("dot", split, (tuple(tokens), node.attr))
        count = node.bound[0] if len(node.bound) == 1 else 0
        if len(args) == 1 and isinstance(count, int) and count >= LEAST_DOT:
            inner = node_of(self.g, args[0].cls)
            factors = [over(args[0], a) for a in inner.args] if is_product(inner) else []
            split = self._separable(factors, set(tokens))
            if split is not None:  # a sum of products becomes a dot that loses no digits
                return Opened("dot", split, (tuple(tokens), "highest"))
        most = LONGEST if self.loops and not _is_summed(ref) else UNROLL
        if not isinstance(count, int) or not 0 < count <= most or ref.cls in self.made:
            return None
        if all(tokens[0] not in a.axes for a in args):
            return None
        return Opened("sum", tuple(args), (tokens[0], count))

    def _separable(self, args: list[Ref], tokens: set) -> tuple[Ref, Ref] | None:
        """Return the row and column operand of a contraction, if it separates."""
        if len(args) != 2:
            return None
        left, right = args if self.column in args[1].axes else args[::-1]
        if self.single is None and self.row not in left.axes:
            return None
        if self.column in left.axes or self.row in right.axes or self.column not in right.axes:
            return None
        if any(not tokens <= set(a.axes) or reads_twice(a) for a in args):
            return None
        if any(kind_of(self.g, a.cls) not in "fiu" for a in args):
            return None
        return left, right


_OPENERS: dict[str, Callable[[Pair, Ref, Node], Opened | None]] = {
    op.DELTA: lambda pair, ref, node: Opened("delta"),
    op.CONTRACT: Pair._contraction,
    op.SLICE: Pair._part,
    op.CONCAT: Pair._joined,
    op.TAKE: Pair._take,
    op.NATIVE: Pair._scattered,
}


def may_open(node: Node) -> bool:
    """Return True if `Pair.open` may find how a node is computed."""
    return is_elementwise(node) or node.op in _OPENERS


@dataclass(slots=True)
class PairwiseTile:
    """Terms that the pairwise terms under a reduction are computed from.

    inner: by reference, the pairwise terms computed from others; True for *heavy* terms, which are
    more than tests of index numbers and of pairs in memory: layers share masks. operands: the
    leaves. whole: leaves that are pairwise themselves. dots: the terms that are contractions.
    nonlinear: some step is no sum. meets: some other term combines a row operand and a column
    operand. compared: classes discontinuous in their operands. counts: the terms of a sum, by its
    index. steps: the number of steps. along: the indices that row values are reduced along inside
    the tile; rows: row values computed inside the tile. looked: table lookups.
    """

    inner: dict[Ref, bool] = field(default_factory=dict)
    operands: list[Ref] = field(default_factory=list)
    whole: list[Ref] = field(default_factory=list)
    dots: list[Ref] = field(default_factory=list)
    nonlinear: bool = False
    meets: bool = False
    compared: set[int] = field(default_factory=set)
    counts: dict[Any, int] = field(default_factory=dict)
    steps: int = 0
    along: set[Any] = field(default_factory=set)
    rows: set[Ref] = field(default_factory=set)
    looked: list[Ref] = field(default_factory=list)

    @property
    def has_dot(self) -> bool:
        return bool(self.dots)

    def heavy(self) -> list[Ref]:
        """Return the pairwise references that cost work."""
        return [r for r, is_heavy in self.inner.items() if is_heavy]


class _TooLargeError(Exception):
    """The terms of a tile are too many."""


def explore(pair: Pair, refs: Iterable[Ref], keys: Iterable[Ref] = ()) -> PairwiseTile | None:
    """Collect the pairwise terms under references and keys; None if the tile is too large."""
    tile = PairwiseTile()
    try:
        for ref in refs:
            _visit(pair, tile, ref)
        for key in keys:
            _visit_key(pair, tile, key)
    except _TooLargeError:
        return None
    return tile


def _visit(pair: Pair, tile: PairwiseTile, ref: Ref) -> bool:
    """Return True if a pairwise reference is heavy."""
    if ref in tile.inner:
        return tile.inner[ref]
    counts = [tile.counts.get(i, 1) for i in ref.axes]
    tile.steps += math.prod(min(n, PIECE) if pair.loops else n for n in counts)
    if len(tile.inner) > LARGEST_TILE or tile.steps > MOST_STEPS:
        raise _TooLargeError
    found = pair.open(ref)
    if max(counts, default=1) > UNROLL and found.kind not in BY_FEATURE:
        raise _TooLargeError
    if found.kind == "leaf":
        tile.whole.append(ref)
        return False
    tile.inner[ref] = heavy = False
    match found.kind:
        case "dot" | "scattered" | "chosen":
            tile.operands.extend(found.args)
            heavy = True
            tile.meets |= found.kind != "dot"
            tile.dots += [ref] if found.kind == "dot" else []
        case "lookup":
            heavy = tile.nonlinear = True
            tile.looked.append(ref)
            tile.operands.append(found.args[0])
            for place in found.args[1:]:
                _visit_key(pair, tile, place)
        case "sum":
            token, count = found.data
            tile.counts[token] = count
            heavy = True  # work, even if its terms are only tests
    if found.kind in ("apply", "sum", "part", "joined"):
        for arg in found.args:
            heavy |= _enter(pair, tile, arg)
    if found.kind == "apply":
        _note_applied(pair, tile, ref.cls, sum(map(pair.holds, found.args)))
    tile.inner[ref] = heavy
    return heavy


def _note_applied(pair: Pair, tile: PairwiseTile, cls: int, both: int) -> None:
    """Record an elementwise class, `both` of whose operands are pairwise."""
    node = node_of(pair.g, cls)
    tile.meets |= both == 0
    if node.op == op.MAP:
        tile.nonlinear |= node.attr[0] != "convert_element_type"
        if node.attr[0] in COMPARISONS and not _asks_whether_finite(pair.g, node):
            tile.compared.add(cls)
    tile.nonlinear |= node.op == op.CONTRACT and both > 1


def _visit_key(pair: Pair, tile: PairwiseTile, place: Ref) -> None:
    """Visit the integers of a lookup or of a sum by key.

    Integers computed from floating-point values are read as the program computed them, since
    rounding may change them.
    """
    if gather_patterns.is_counted(pair.g, place.cls):
        _enter(pair, tile, place)
    else:
        tile.whole.append(place)


def _enter(pair: Pair, tile: PairwiseTile, arg: Ref) -> bool:
    """Return True if an operand of a pairwise term is heavy."""
    if pair.holds(arg):
        return _visit(pair, tile, arg)
    if arg in tile.rows:
        return True
    if arg.cls in pair.inside:
        if pair.loops and _is_summed(arg):
            raise _TooLargeError
        tile.rows.add(arg)
        found = pair.reduced(arg)
        if found.kind == "along":
            if not any(map(pair.holds, found.args)):
                raise _TooLargeError
            tile.along.add(pair.row if found.data[1] else pair.column)
        for a in found.args:
            _enter(pair, tile, a)
        return True
    if node_of(pair.g, arg.cls).op == op.CONST:
        return False
    tile.operands.append(arg)
    carries = pair.row in arg.axes or pair.column in arg.axes
    return carries and not is_test_like(pair.g, arg.cls)


def _asks_whether_finite(g: EGraph, node: Node) -> bool:
    """Return True if a comparison tests for NaN or infinity, which rounding does not change."""
    if node.attr[0] == "is_finite" or (len(node.args) == 2 and node.args[0] == node.args[1]):
        return True
    limits = [node_of(g, a.cls) for a in node.args]
    return any(n.op == op.CONST and math.isinf(abs(n.attr[0])) for n in limits)


def is_test_like(g: EGraph, cls: int) -> bool:
    """Return True if a class depends on index numbers, integers, tests and constants alone."""
    if kind_of(g, cls) in "iub":
        return True
    node = node_of(g, cls)
    if node.op in (op.CONST, op.IOTA, op.DELTA):
        return True
    if is_elementwise(node):
        return all(is_test_like(g, a.cls) for a in node.args)
    return False
