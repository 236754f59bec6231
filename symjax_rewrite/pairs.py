"""Pairwise regions: terms over a row index m and a column index n, and how they are left (a face).

A term is *pairwise* where it carries both m and n. `Pair.open` says how such a term is computed
from others of its kind, from small contractions of row and column operands, and from what lacks
m or n. An `Exit` is where a pairwise term is left: a reduction over n (or m, with the roles of
rows and columns exchanged), or the choice of one column for each row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from symjax_rewrite import gathers
from symjax_rewrite.canonical import TermGraph
from symjax_rewrite.dims import Dim
from symjax_rewrite.egraph import EGraph
from symjax_rewrite.ir import (
    ADD,
    CONCAT,
    CONST,
    CONTRACT,
    DELTA,
    IOTA,
    MAP,
    NATIVE,
    REDUCE,
    SLICE,
    TAKE,
    Node,
    Ref,
)
from symjax_rewrite.ops import dtype_kind
from symjax_rewrite.regions import node_of

UNROLL = 64  # terms of a sum inside a tile that are written out at most
LEAST_DOT = 16  # elements of a sum that are worth a small product: kernels pad to as many
MOST_PIECES = 8  # that are chosen from in a tile
LARGEST_TILE = 256  # terms of one tile at most
MOST_STEPS = 512  # of one tile, its sums written out
LEAST_OF_SORT = 4  # of which at most this part is kept: a top-k of more is no faster

_MONOIDS = {"max": "max", "min": "min", "and": "all", "or": "any"}
_COMPARISONS = frozenset(
    "eq ne lt le gt ge sign floor ceil round is_finite nextafter clz population_count".split()
)


def over(ref: Ref, arg: Ref) -> Ref:
    """An operand of a reference's node, over the indices the reference reads."""
    return Ref(arg.cls, tuple([ref.axes[i] for i in arg.axes]))


class At(NamedTuple):
    """One element of an axis, where a reference reads no index."""

    place: int


def reads_twice(ref: Ref) -> bool:
    """Whether a reference reads an index along two axes."""
    indices = [i for i in ref.axes if not isinstance(i, At)]
    return len(set(indices)) != len(indices)


def elements(t: TermGraph, cls: int) -> int:
    """How many elements a class has."""
    return math.prod(int(s) for s in t.graph.classes[cls].sizes)  # pyright: ignore[reportArgumentType]


def is_product(node: Node) -> bool:
    """Whether a node multiplies its operands element by element."""
    return node.op == CONTRACT and not node.bound


def is_elementwise(node: Node) -> bool:
    """Whether a node combines its operands element by element."""
    return node.op in (MAP, ADD) or is_product(node)


class Part(NamedTuple):
    """What is read of a sorted row: `start + stride·i` at index `axis`; no axis: one place."""

    start: int
    stride: int
    axis: int | None


@dataclass(slots=True)
class Exit:
    """A class that reduces terms or chooses from one, over its own indices.

    kind: `sum`, `max`, `min`, `any`, `all`, `argmax`, `argmin`, `top_k`, `sorted` or `at`.
    args: what is reduced (of a sum: the product of it). bound: indices reduced over.
    choice: what a gather chooses. through: the class of a sort of which only `part` is read.
    """

    cls: int
    kind: str
    args: tuple[Ref, ...]
    bound: tuple[int, ...]
    sizes: dict[int, Dim]
    choice: gathers.Choice | None = None
    places: int = 0  # of a top-k or a sort: how many
    output: int = 0  # of a top-k or a sort: values or places
    through: int | None = None
    part: Part | None = None


def exit_of(t: TermGraph, cls: int) -> Exit | None:
    """The class as an exit, if it reduces something."""
    g = t.graph
    node = node_of(g, cls)
    if node.op == NATIVE:
        return _native_exit(t, cls, node)
    if node.op == SLICE:
        return _sorted_exit(t, cls, node)
    if node.op == CONTRACT and not node.bound:
        return _diagonal(g, cls, node)
    if not node.bound or node.op not in (REDUCE, CONTRACT, TAKE):
        return None
    sizes = dict(enumerate((*g.classes[cls].sizes, *node.bound)))
    bound = tuple(range(node.out, node.out + len(node.bound)))
    if node.op == TAKE:
        found = gathers.choice(node, node.bound[0])
        return found and Exit(cls, "at", (found.table,), bound, sizes, choice=found)
    if node.op == CONTRACT:
        return Exit(cls, "sum", node.args, bound, sizes)
    kind = _MONOIDS.get(str(node.attr))
    dtype = g.classes[cls].dtype
    if kind is None or (kind in ("any", "all") and dtype != "bool"):
        return None
    return Exit(cls, kind, node.args, bound, sizes)


def _diagonal(g: EGraph, cls: int, node: Node) -> Exit | None:
    """`x[i, i]`: the column chosen for each row is the one of its own number."""
    axes = list(node.args[0].axes)
    twice = [i for i in set(axes) if axes.count(i) == 2]
    if len(node.args) != 1 or len(axes) != len(set(axes)) + 1 or not twice:
        return None
    size = g.classes[cls].sizes[twice[0]]
    axes[len(axes) - 1 - axes[::-1].index(twice[0])] = node.out
    place = g.add(IOTA, None, (), (size,), (), "int32")
    table = Ref(node.args[0].cls, tuple(axes))
    chosen = gathers.Choice(table, node.out, size, Ref(place.cls, (twice[0],)), "clip", None)
    sizes = dict(enumerate((*g.classes[cls].sizes, size)))
    return Exit(cls, "at", (table,), (node.out,), sizes, choice=chosen)


def _native_exit(t: TermGraph, cls: int, node: Node) -> Exit | None:
    if cls not in t.made_by:
        return None
    number, output = t.made_by[cls]
    e = t.program.equations[number]
    if e.name not in ("argmax", "argmin", "top_k") or not isinstance(e.invals[0], int):
        return None
    v, out = e.invals[0], e.outvals[output]
    groups, out_groups = t.positions[v], t.positions[out]
    axes = e.eqn.params["axes"] if e.name != "top_k" else (e.eqn.params["axis"],)
    axis = int(axes[0]) % len(groups)
    if len(axes) != 1 or len(groups[axis]) != 1:
        return None
    rows = [a for a in range(len(groups)) if a != axis]
    kept = out_groups if e.name != "top_k" else [out_groups[a] for a in rows]
    index = len(t.sizes[out])
    to = {groups[axis][0]: index}
    for a, group in zip(rows, kept, strict=True):
        mine, theirs = groups[a], group
        if [t.sizes[v][q] for q in mine] != [t.sizes[out][q] for q in theirs]:
            return None
        to.update(zip(mine, theirs, strict=True))
    view = t.view(v)
    arg = Ref(view.cls, tuple([to[i] for i in view.axes]))
    sizes = {**dict(enumerate(t.sizes[out])), index: t.sizes[v][groups[axis][0]]}
    places = int(e.eqn.params["k"]) if e.name == "top_k" else 0
    if places and not out_groups[axis]:
        return None
    return Exit(cls, e.name, (arg,), (index,), sizes, None, places, output)


def _sorted_exit(t: TermGraph, cls: int, node: Node) -> Exit | None:
    """The first places of a sorted row, or of the numbers that were sorted along."""
    sort = node.args[0]
    if sort.cls not in t.made_by or node_of(t.graph, sort.cls).op != NATIVE:
        return None
    number, output = t.made_by[sort.cls]
    e = t.program.equations[number]
    if e.name != "sort" or e.eqn.params["num_keys"] != 1 or output > 1:
        return None
    v, out, axis = e.invals[0], e.outvals[output], int(e.eqn.params["dimension"])
    if not isinstance(v, int) or len(t.positions[v][axis]) != 1 or not t.positions[out][axis]:
        return None
    if output and not _counts_along_axis(t, e.invals[1], axis):
        return None
    along, column = t.positions[out][axis][0], len(t.graph.classes[cls].sizes)
    entries, to = dict(enumerate(node.attr)), {t.positions[v][axis][0]: column}
    entry = entries.pop(along)
    if entry is None or any(x is not None for x in entries.values()):
        return None
    for mine, theirs in zip(t.positions[v], t.positions[out], strict=True):
        if [t.sizes[v][q] for q in mine] != [t.sizes[out][q] for q in theirs]:
            return None
        to.update({q: sort.axes[p] for q, p in zip(mine, theirs, strict=True) if p != along})
    sizes = {**dict(enumerate(t.graph.classes[cls].sizes)), column: t.sizes[out][along]}
    kept = sort.axes[along] if isinstance(entry, tuple) else None
    start, stride = entry if isinstance(entry, tuple) else (entry, 1)
    count, size = 1 if kept is None else sizes[kept], sizes[column]
    if not isinstance(count, int) or not isinstance(size, int) or not count or stride < 1:
        return None
    places = start + stride * (count - 1) + 1
    if places * LEAST_OF_SORT > size:
        return None
    part = Part(start, stride, kept)
    view = t.view(v)
    arg = Ref(view.cls, tuple([to[i] for i in view.axes]))
    return Exit(cls, "sorted", (arg,), (column,), sizes, None, places, output, sort.cls, part)


def _counts_along_axis(t: TermGraph, v: Any, axis: int) -> bool:
    """Whether a value holds the index of an axis."""
    if not isinstance(v, int) or t.views[v] is None:
        return False
    view = t.view(v)
    return node_of(t.graph, view.cls).op == IOTA and view.axes == t.positions[v][axis]


class Opened(NamedTuple):
    """How a pairwise reference is computed.

    kind: `apply` (a node of pairwise and other args; its attr is in `data`), `dot` (args: row and
    column operand, the tokens of what is summed over in `data`), `sum` (written out), `delta`,
    `hit` (a value where the column is the one chosen), `part` (another at places), `pieces` (an
    index and what is joined along it; where each begins but the first in `data`), `along` (a
    product reduced; the monoid, and whether along rows, in `data`), or `leaf`.
    """

    kind: str
    args: tuple[Ref, ...] = ()
    data: Any = None


class Pair:
    """The reading of terms as pairwise in the indices m and n of one exit.

    gone: classes that sums leave out, since they are zero. made: exits found before, whose sums are
    not written out. single: where there is one row, which has no index: the indices of the term.
    inside: row values that tiles compute for themselves.
    """

    def __init__(
        self,
        t: TermGraph,
        row: Any,
        column: Any,
        gone: frozenset[int],
        made: set[int],
        single: frozenset | None = None,
        inside: frozenset[int] = frozenset(),
    ) -> None:
        self.t, self.g, self.row, self.column, self.gone = t, t.graph, row, column, gone
        self.made, self.single, self.inside = made, single, inside
        self._fresh = 0

    def holds(self, ref: Ref) -> bool:
        """Whether a reference carries both indices."""
        if self.single is not None:
            return self.column in ref.axes and self.single.issuperset(ref.axes)
        return self.row in ref.axes and self.column in ref.axes

    def computing(self, inside: frozenset[int]) -> Pair:
        """The same reading where tiles compute some row values for themselves."""
        return Pair(self.t, self.row, self.column, self.gone, self.made, self.single, inside)

    def is_of_row(self, ref: Ref) -> bool:
        """Whether a reference carries the row; without an index of rows, whether it may."""
        if self.single is not None:
            return self.column not in ref.axes
        return self.row in ref.axes

    def open(self, ref: Ref) -> Opened:
        """How a reference that carries both is computed."""
        node = node_of(self.g, ref.cls)
        if reads_twice(ref) or self.g.classes[ref.cls].dtype[:7] == "complex":
            return Opened("leaf")
        if is_elementwise(node):
            return self._elementwise(ref, node)
        if node.op == DELTA:
            return Opened("delta")
        if node.op == CONTRACT:
            return self._contraction(ref, node)
        if node.op == SLICE:
            return self._part(ref, node)
        if node.op == CONCAT:
            return self._pieces(ref, node)
        if node.op == NATIVE:
            hit = gathers.hit(self.t, ref)
            return Opened("leaf") if hit is None else self._hit(hit)
        return Opened("leaf")

    def reduced(self, ref: Ref) -> Opened:
        """How a row value is computed from whole rows of a tile, or from other row values."""
        node = node_of(self.g, ref.cls)
        if is_elementwise(node):
            return Opened("apply", tuple([over(ref, a) for a in node.args]), node.attr)
        of_row = self.single is None and self.row not in ref.axes
        whole = Ref(ref.cls, (*ref.axes, self.row if of_row else self.column))
        kind = "sum" if node.op == CONTRACT else node.attr
        return Opened("along", tuple([over(whole, a) for a in node.args]), (kind, of_row))

    def _elementwise(self, ref: Ref, node: Node) -> Opened:
        kept = [k for k, a in enumerate(node.args) if a.cls not in self.gone]
        if node.op != ADD or len(kept) in (0, len(node.args)):
            return Opened("apply", tuple([over(ref, a) for a in node.args]), node.attr)
        attr = tuple([node.attr[k] for k in kept])
        return Opened("apply", tuple([over(ref, node.args[k]) for k in kept]), attr)

    def _part(self, ref: Ref, node: Node) -> Opened:
        """Components of terms that are computed here: `d[.., 0]` of differences of points."""
        (arg,) = node.args
        inner = node_of(self.g, arg.cls)
        computed = is_elementwise(inner) or inner.op in (CONTRACT, SLICE)
        if not computed or any(isinstance(entry, tuple) for entry in node.attr):
            return Opened("leaf")
        axes = [
            At(entry) if entry is not None else ref.axes[i]
            for entry, i in zip(node.attr, arg.axes, strict=True)
        ]
        return Opened("part", (Ref(arg.cls, tuple(axes)),))  # pyright: ignore[reportArgumentType]

    def _pieces(self, ref: Ref, node: Node) -> Opened:
        """Components that are computed here side by side: `stack([dx * f, dy * f], -1)`."""
        along, sizes = node.attr
        index = ref.axes[along]
        loose = all(along not in a.axes for a in node.args) and all(
            isinstance(size, int) for size in sizes
        )
        if not loose or index in (self.row, self.column) or len(sizes) > MOST_PIECES:
            return Opened("leaf")
        starts = tuple(itertools.accumulate(sizes[:-1]))
        args = tuple([over(ref, a) for a in node.args])
        if isinstance(index, At):
            return Opened("part", (args[sum(start <= index.place for start in starts)],))
        number = self.g.add(IOTA, None, (), (sum(sizes),), (), "int32")
        return Opened("pieces", (Ref(number.cls, (index,)), *args), starts)

    def _hit(self, hit: gathers.Hit) -> Opened:
        args = (hit.place, hit.value)
        if hit.along not in (self.row, self.column) or any(map(self.holds, args)):
            return Opened("leaf")
        return Opened("hit", args, (hit.along == self.row, hit.limit))

    def _contraction(self, ref: Ref, node: Node) -> Opened:
        self._fresh += 1
        tokens = [("sum", self._fresh, k) for k in range(len(node.bound))]
        axes: list[Any] = [*ref.axes, *tokens]
        args = [Ref(a.cls, tuple([axes[i] for i in a.axes])) for a in node.args]
        split = self._separable(args, set(tokens))
        if split is not None:
            return Opened("dot", split, (tuple(tokens), node.attr))
        count = node.bound[0] if len(node.bound) == 1 else 0
        if len(args) == 1 and isinstance(count, int) and count >= LEAST_DOT:
            inner = node_of(self.g, args[0].cls)
            factors = [over(args[0], a) for a in inner.args] if is_product(inner) else []
            split = self._separable(factors, set(tokens))
            if split is not None:  # a sum of products is a dot that loses no digits
                return Opened("dot", split, (tuple(tokens), "highest"))
        if isinstance(count, int) and 0 < count <= UNROLL and ref.cls not in self.made:
            unread = all(tokens[0] not in a.axes for a in args)
            return Opened("leaf") if unread else Opened("sum", tuple(args), (tokens[0], count))
        return Opened("leaf")

    def _separable(self, args: list[Ref], tokens: set) -> tuple[Ref, Ref] | None:
        """Row and column operand of a contraction, where it has them."""
        if len(args) != 2:
            return None
        left, right = args if self.column in args[1].axes else args[::-1]
        if self.single is None and self.row not in left.axes:
            return None
        if self.column in left.axes or self.row in right.axes or self.column not in right.axes:
            return None
        if any(not tokens <= set(a.axes) or reads_twice(a) for a in args):
            return None
        if any(dtype_kind(self.g.classes[a.cls].dtype) not in "fiu" for a in args):
            return None
        return left, right


@dataclass(slots=True)
class Tile:
    """What the pairwise terms under an exit are made of.

    inner: pairwise classes computed from others, by reference; heavy: those among them that
    are more than tests of index numbers. operands: what is read. whole: those that are pairwise
    themselves. dots: features summed over, for each contraction. nonlinear: whether some step is
    no sum. compared: classes that jump where their operands change a little. counts: how often
    an index of a sum is written out; steps: how many there are then. along: the indices that
    row values are reduced along inside the tile; rows: these and what is made of them.
    """

    inner: dict[Ref, bool] = field(default_factory=dict)
    operands: list[Ref] = field(default_factory=list)
    whole: list[Ref] = field(default_factory=list)
    dots: dict[int, int] = field(default_factory=dict)
    nonlinear: bool = False
    meets: bool = False
    compared: set[int] = field(default_factory=set)
    maps: int = 0
    counts: dict[Any, int] = field(default_factory=dict)
    steps: int = 0
    along: set[Any] = field(default_factory=set)
    rows: set[Ref] = field(default_factory=set)

    def heavy(self) -> Iterator[Ref]:
        """Pairwise references that cost something."""
        return (r for r, is_heavy in self.inner.items() if is_heavy)


def explore(pair: Pair, refs: list[Ref]) -> Tile | None:
    """Everything pairwise under some references; None where it is too much."""
    tile = Tile()
    for ref in refs:
        if _visit(pair, tile, ref) is None:
            return None
    return tile


def _visit(pair: Pair, tile: Tile, ref: Ref) -> bool | None:
    """Whether a pairwise reference is heavy; None where the tile grows too large."""
    if ref in tile.inner:
        return tile.inner[ref]
    tile.steps += math.prod(tile.counts.get(i, 1) for i in ref.axes)
    if len(tile.inner) > LARGEST_TILE or tile.steps > MOST_STEPS:
        return None
    found = pair.open(ref)
    if found.kind == "sum":
        tile.counts[found.data[0]] = found.data[1]
    dtype = pair.g.classes[ref.cls].dtype
    if found.kind == "leaf":
        tile.whole.append(ref)
        return not is_test_like(pair.g, ref.cls)
    heavy = False
    tile.inner[ref] = heavy
    if found.kind in ("dot", "hit"):
        tile.operands.extend(found.args)
        tile.meets = heavy = True
        if found.kind == "dot":
            sizes = pair.g.classes[found.args[0].cls].sizes
            at = zip(found.args[0].axes, sizes, strict=True)
            tile.dots[ref.cls] = math.prod(int(s) for i, s in at if i in found.data[0])  # pyright: ignore[reportArgumentType]
    if found.kind == "sum":  # work, even of tests
        heavy = True
    for arg in found.args if found.kind in ("apply", "sum", "part", "pieces") else ():
        inside = _enter(pair, tile, arg)
        if inside is None:
            return None
        heavy |= inside
    node = node_of(pair.g, ref.cls)
    if found.kind == "apply":
        both = sum(map(pair.holds, found.args))
        tile.meets |= both == 0
        is_map = node.op == MAP and node.attr[0] != "convert_element_type"
        tile.nonlinear |= is_map or (node.op == CONTRACT and both > 1)
        tile.maps += is_map and dtype_kind(dtype) == "f"
        if (
            node.op == MAP
            and node.attr[0] in _COMPARISONS
            and not asks_whether_finite(pair.g, node)
        ):
            tile.compared.add(ref.cls)
    tile.inner[ref] = heavy
    return heavy


def _enter(pair: Pair, tile: Tile, arg: Ref) -> bool | None:
    """Whether an operand of a pairwise term is heavy; None where the tile grows too large."""
    if pair.holds(arg):
        return _visit(pair, tile, arg)
    if arg in tile.rows:
        return True
    if arg.cls in pair.inside:
        tile.rows.add(arg)
        found = pair.reduced(arg)
        if found.kind == "along":
            if not any(map(pair.holds, found.args)):
                return None
            tile.along.add(pair.row if found.data[1] else pair.column)
        return None if None in [_enter(pair, tile, a) for a in found.args] else True
    if node_of(pair.g, arg.cls).op == CONST:
        return False
    tile.operands.append(arg)
    carries = pair.row in arg.axes or pair.column in arg.axes
    return carries and not is_test_like(pair.g, arg.cls)


def asks_whether_finite(g: EGraph, node: Node) -> bool:
    """Whether a comparison is a test for NaN or infinity, which no rounding changes."""
    if node.attr[0] == "is_finite" or (len(node.args) == 2 and node.args[0] == node.args[1]):
        return True
    limits = [node_of(g, a.cls) for a in node.args]
    return any(n.op == CONST and math.isinf(abs(n.attr[0])) for n in limits)


def is_test_like(g: EGraph, cls: int) -> bool:
    """Whether a class is made of index numbers, integers, tests and constants alone."""
    if dtype_kind(g.classes[cls].dtype) in "iub":
        return True
    node = node_of(g, cls)
    if node.op in (CONST, IOTA, DELTA):
        return True
    if is_elementwise(node):
        return all(is_test_like(g, a.cls) for a in node.args)
    return False
