"""Sums of a sparse operand that is nonzero at a few places of each row: only these are read.

Σ_m S[n,m]·g[n,m]·w[m] = Σ_k v[n,k]·g[n,p[n,k]]·w[p[n,k]]        S[n, p[n,k]] += v[n,k]

The derivative by the k nearest neighbours of a row is such an S: it is nonzero at k columns. Its
cofactors are computed at these columns alone, and summed in place or by column. Cofactors of zeros
are not read, as for labels and masks (README, Numerics levels).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found
from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.term import (
    ADD,
    CONCAT,
    CONST,
    CONTRACT,
    LEAF,
    MAP,
    NATIVE,
    SLICE,
    Node,
    Ref,
    over,
)
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds import gather_patterns
from symjax_rewrite.kernel_selection.folds.builder import read_over
from symjax_rewrite.kernel_selection.folds.gathered_columns import Columns
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    Pair,
    PairwiseTile,
    elements,
    explore,
    is_elementwise,
    is_test_like,
)
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW, TileBuilder
from symjax_rewrite.kernel_selection.kernel_candidate import OneClass, candidates
from symjax_rewrite.usage_records import RouteUse

MOST_CUT = 64  # limit on elementwise steps in a chain computed at sliced indices
MOST_ELEMENTS = 2**31 - 1  # limit on a result summed by column: places are int32


@dataclass(frozen=True, slots=True)
class Sparse:
    """Class that is zero except at some places of each row.

    along: the slot that the places index. place, value: over the class's other slots and the names
    in `extra`, which have sizes. clips: places out of range are clipped; else they are dropped.
    """

    cls: int
    along: int
    place: Ref
    value: Ref
    extra: tuple[tuple[str, int], ...]
    clips: bool


@dataclass(slots=True)
class SparseRoute(OneClass):
    """Sum over the nonzero places of a class.

    columns: the program of the summand. roots: the steps of its factors. place: the columns, by
    name. names: of each index of the class; COLUMN is among them where the sum is by column.
    """

    cls: int
    source: Sparse
    columns: Columns
    roots: list[int]
    place: Ref
    names: tuple[str, ...]
    backend: str = "gathered"

    def needs(self, cls: int) -> list[int]:
        """Return the classes that must be computed before this class."""
        del cls
        return [*self.columns.operands(), self.place.cls]

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        """Return the value over the class's indices, and its slots."""
        size, lead = self.columns.builder.sizes, self.columns.names
        over = tuple(n for n in lead if n in self.place.axes)
        place = read_over(emitter, self.place, over, tuple(size[n] for n in over))
        dtype = np.dtype(emitter.t.graph.classes[cls].dtype)
        made = self.columns.steps(emitter, jnp.clip(place, 0, size[COLUMN] - 1), over)
        total: Any = jnp.ones((), jnp.promote_types(dtype, np.float32))
        for root in self.roots:
            total = total * made[root]
        total = jnp.broadcast_to(total, tuple(size[n] for n in lead))
        if not self.source.clips:
            inside = self.columns.spread((place >= 0) & (place < size[COLUMN]), over)
            total = jnp.where(inside, total, jnp.zeros((), total.dtype))
        if COLUMN not in self.names:
            gone = tuple(k for k, n in enumerate(lead) if n not in self.names)
            kept = [n for n in lead if n in self.names]
            total = jnp.sum(total, axis=gone)
        else:
            total, kept = self._by_column(total, self.columns.spread(place, over))
        order = [kept.index(n) for n in self.names]
        return jax.lax.transpose(total, order).astype(dtype), tuple(range(len(order)))

    def _by_column(self, total: Any, place: Any) -> tuple[Any, list[str]]:
        """Return sums by column, and their axes: the shared axes, the columns, the other axes."""
        size, lead = self.columns.builder.sizes, self.columns.names
        shared = [n for n in lead if n in self.names and n in self.place.axes]
        summed = [n for n in lead if n not in self.names and n in self.place.axes]
        wide = [n for n in lead if n in self.names and n not in self.place.axes]
        gone = [n for n in lead if n not in (*shared, *summed, *wide)]
        order = [lead.index(n) for n in (*shared, *summed, *wide, *gone)]
        total, place = (jax.lax.transpose(x, order) for x in (total, place))
        total = jnp.sum(total, axis=tuple(range(len(lead) - len(gone), len(lead))))
        counts = [math.prod(size[n] for n in each) for each in (shared, summed, wide)]
        columns = size[COLUMN]
        here = tuple(size[n] for n in (*shared, *summed))
        at = jnp.broadcast_to(place.reshape(place.shape[: len(here)]), here).reshape(*counts[:2])
        at = at.astype(jnp.int32)
        first = columns * jnp.arange(counts[0], dtype=jnp.int32)[:, None]
        at = jnp.clip(at, 0, columns - 1) + first  # values out of range are zero, or clipped
        empty = jnp.zeros((counts[0] * columns, counts[2]), total.dtype)
        made = empty.at[at.reshape(-1)].add(total.reshape(-1, counts[2]), mode="promise_in_bounds")
        kept = [*shared, COLUMN, *wide]
        return made.reshape([size[n] for n in kept]), kept


class _Finder:
    """Search for sums of sparse classes.

    least: minimum number of elements of a class. share: minimum ratio between the terms of a
    product and the summed terms. supports: for classes that are zero at the zeros of a sparse
    class, the sparse class over their indices. given: classes that are elementwise in inputs. cuts:
    slices already built.
    """

    def __init__(self, t: TermGraph, need: Needed, least: int, share: float) -> None:
        self.t, self.g, self.need, self.least, self.share = t, t.graph, need, least, share
        self.known: dict[int, Sparse | None] = {}
        self.cuts: dict[tuple[Ref, int, int, int], Ref] = {}
        self.supports: dict[int, Ref] = {}
        for cls in need.order:
            held = self._support(cls)
            if held is not None:
                self.supports[cls] = held
        self.given: set[int] = set()
        for cls in need.order if self.supports else ():
            if self._is_given(cls):
                self.given.add(cls)

    def sparse(self, cls: int) -> Sparse | None:
        """Return a class as one that is zero except at some places, or None."""
        if cls not in self.known:
            self.known[cls] = self._sparse(cls)
        return self.known[cls]

    def _sparse(self, cls: int) -> Sparse | None:
        if node_of(self.g, cls).op != NATIVE or cls not in self.t.made_by:
            return None
        found = gather_patterns.scattered(self.t, cls)
        if found is None or len(found.along) != 1 or elements(self.t, cls) < max(self.least, 1):
            return None
        count = len(self.g.classes[cls].sizes)
        (along,), (place,), value, bound = found.along, found.places, found.value, list(found.bound)
        for n in range(len(bound)):
            cut = self._window(value, count + n)
            if cut is not None:
                (start, size), value = cut
                bound[n], place = size, self._cut(place, count + n, start, size)
        names = {i: i for i in range(count)} | {count + n: f"k{n}" for n in range(len(bound))}
        extra = tuple((f"k{n}", int(size)) for n, size in enumerate(bound))  # pyright: ignore[reportArgumentType]
        place, value = (Ref(r.cls, tuple([names[i] for i in r.axes])) for r in (place, value))  # pyright: ignore[reportArgumentType]
        if along in place.axes or along in value.axes or count < 2:
            return None
        return Sparse(cls, along, place, value, extra, found.clips)

    def _window(self, ref: Ref, index: int) -> tuple[tuple[int, int], Ref] | None:
        """Return (start, size) of a padded reference's interior, and the unpadded operand."""
        node = node_of(self.g, ref.cls)
        if node.op != CONCAT or ref.axes[node.attr[0]] != index or ref.axes.count(index) != 1:
            return None
        start = 0
        for k, (arg, size) in enumerate(zip(node.args, node.attr[1], strict=True)):
            others = [node_of(self.g, a.cls) for a in (*node.args[:k], *node.args[k + 1 :])]
            if all(n.op == CONST and n.attr[0] == 0 for n in others):
                return (start, int(size)), over(ref, arg)
            start += int(size)
        return None

    def _cut(self, ref: Ref, index: int, start: int, size: int, depth: int = 0) -> Ref:
        """Slice a reference along an index; elementwise nodes read sliced operands."""
        if index not in ref.axes:
            return ref
        key = (ref, index, start, size)
        if key in self.cuts:
            return self.cuts[key]
        node, of = node_of(self.g, ref.cls), self.g.classes[ref.cls]
        local = {i: n for n, i in enumerate(dict.fromkeys(ref.axes))}
        sizes = dict(zip(ref.axes, of.sizes, strict=True)) | {index: size}
        args, attr, op = (ref,), tuple((start, 1) if i == index else None for i in ref.axes), SLICE
        if is_elementwise(node) and depth < MOST_CUT:
            cut = [self._cut(over(ref, a), index, start, size, depth + 1) for a in node.args]
            args, op, attr = tuple(cut), node.op, node.attr
        inner = tuple(Ref(a.cls, tuple([local[i] for i in a.axes])) for a in args)
        made = self.g.add(op, attr, inner, tuple(sizes[i] for i in local), (), of.dtype)
        self.cuts[key] = Ref(made.cls, tuple([[*local][i] for i in made.axes]))
        return self.cuts[key]

    def support(self, ref: Ref) -> Ref | None:
        """Return a sparse reference at whose zeros a reference is zero."""
        held = self.supports.get(ref.cls)
        return None if held is None else over(ref, held)

    def _support(self, cls: int) -> Ref | None:
        """Return `support` of a class over its indices, once it is known for its operands."""
        node = node_of(self.g, cls)
        if self.sparse(cls) is not None:
            return Ref(cls, tuple(range(node.out)))
        args = node.args
        if node.op == CONTRACT:
            found = (self.support(a) for a in args)
            return next((s for s in found if s and all(i < node.out for i in s.axes)), None)
        if node.op == MAP and node.attr[0] == "div":
            args = args[:1]
        elif node.op == MAP and node.attr[0] == "select_n":
            cases = [node_of(self.g, a.cls) for a in args[1:]]
            zero = [c.op == CONST and c.attr[0] == 0 for c in cases]
            args = [a for a, is_zero in zip(args[1:], zero, strict=True) if not is_zero]
        elif node.op != ADD and not (node.op == MAP and node.attr[0] == "convert_element_type"):
            return None
        shared = {self.support(a) for a in args}
        return shared.pop() if len(shared) == 1 else None

    def route(self, cls: int) -> SparseRoute | None:
        """Return a sum over the nonzero places of a sparse class, or None."""
        node, of = node_of(self.g, cls), self.g.classes[cls]
        if node.op != CONTRACT or not node.bound or dtype_kind(of.dtype) != "f":
            return None
        sizes = dict(enumerate((*of.sizes, *node.bound)))
        for arg in node.args:
            held = self.support(arg)
            source = None if held is None else self.sparse(held.cls)
            if held is None or source is None or len({*held.axes}) < len(held.axes):
                continue
            if not all(isinstance(s, int) and s for s in sizes.values()):
                continue
            made = self._route(cls, node, {i: int(str(s)) for i, s in sizes.items()}, held, source)
            if made is not None:
                return made
        return None

    def _route(
        self, cls: int, node: Node, sizes: dict[int, int], held: Ref, source: Sparse
    ) -> SparseRoute | None:
        column = held.axes[source.along]
        lead = [i for i in sizes if i != column]
        row = max((i for i in held.axes if i != column), key=sizes.__getitem__)
        extra = dict(source.extra)
        terms = math.prod(sizes[i] for i in lead) * math.prod(extra.values())
        if terms * self.share > math.prod(sizes.values()):
            return None
        if column < node.out and math.prod(sizes[i] for i in range(node.out)) > MOST_ELEMENTS:
            return None
        chosen = (source.cls, source.value)
        pair = Pair(self.t, row, column, frozenset(), set(), chosen=chosen)
        tile = explore(pair, [a for a in node.args if pair.holds(a)])
        if tile is None or tile.looked or not self._is_steady(tile):
            return None
        names: dict[Any, Any] = {i: f"b{i}" for i in sizes} | {row: ROW, column: COLUMN}
        place = Ref(source.place.cls, tuple([
            i if isinstance(i, str) else names[held.axes[i]] for i in source.place.axes
        ]))  # fmt: skip  # pyright: ignore[reportArgumentType]
        size = {**{names[i]: s for i, s in sizes.items()}, **extra}
        builder = TileBuilder(self.t, pair, sizes=size)
        roots = [builder.build(a.over(names)) for a in node.args]
        columns = Columns(builder, (*(names[i] for i in lead), *extra))
        mine = tuple(names[i] for i in range(node.out))
        return SparseRoute(cls, source, columns, roots, place, mine)

    def _is_steady(self, tile: PairwiseTile) -> bool:
        """Return True if no step compares a value with its reduction computed elsewhere."""
        return all(
            a.cls in self.given or any(a.cls == r.cls for r in tile.inner)
            for cls in tile.compared
            for a in node_of(self.g, cls).args
        )

    def _is_given(self, cls: int) -> bool:
        """Return True if a class is elementwise in inputs, once this is known for its operands."""
        node = node_of(self.g, cls)
        if node.op == LEAF or is_test_like(self.g, cls):
            return True
        return is_elementwise(node) and all(a.cls in self.given for a in node.args)


class SparseReductions:
    """Pass that restricts sums to the nonzero places of a sparse class."""

    name = "sparse"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        """Yield the sums that read only the nonzero places."""
        kernels, auto = context.options.kernels, context.options.kernels == "auto"
        if kernels == "off" or not context.reorders():
            return
        folds = context.device.folds
        if auto and (not folds.reads_places or jax_internals.may_be_partitioned()):
            return
        terms = context.terms(program)
        if terms.t.dim_env:
            return
        least = folds.least_pairs if auto else 0
        routes = sparse_routes(terms.t, terms.need, least, folds.least_sparse_share)
        by_source: dict[Sparse, list[SparseRoute]] = {}
        for route in routes:
            by_source.setdefault(route.source, []).append(route)
        groups = [(group, [_use(terms.t, source)]) for source, group in by_source.items()]
        yield from candidates(terms.t, self.name, groups)


def sparse_routes(t: TermGraph, need: Needed, least: int, share: float) -> list[SparseRoute]:
    """Return the sums that are taken over the nonzero places of a sparse class."""
    finder = _Finder(t, need, least, share)
    found = (finder.route(cls) for cls in need.order)
    return [route for route in found if route is not None]


def _use(t: TermGraph, source: Sparse) -> RouteUse:
    """Return the report entry of a class that is not materialised."""
    count = math.prod(size for _, size in source.extra)
    row = t.graph.classes[source.cls].sizes[source.along]
    reason = f"sums over a row read the {count} of {row} places that are not zero"
    return RouteUse("sparse", True, reason, t.where(source.cls))
