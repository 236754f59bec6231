"""Sums of a sparse operand that is nonzero at a few places of each row: only these are read.

Σ_m S[n,m]·g[n,m]·w[m] = Σ_k v[n,k]·g[n,p[n,k]]·w[p[n,k]]        S[n, p[n,k]] += v[n,k]

The derivative by the k nearest neighbours of a row is such an S: it is nonzero at k columns. Its
cofactors are computed at these columns alone, and summed in place or by column. One-hot labels and
values selected by a label are S with one place in each row: their sums by column are sums of
segments. Cofactors of zeros are not read, as for labels and masks (README, Numerics levels).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.candidates import Context, Found, Refusal
from symjax_rewrite.cost import margins
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.profile_groups import FoldFacts
from symjax_rewrite.cost.term_cost import is_dot, is_thin
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.ir.index_tests import comparisons, indicated, label_of
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.step_program import Step
from symjax_rewrite.ir.term import Node, Ref, is_cast, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.ir.value_analysis import is_zero, selected_case
from symjax_rewrite.kernel_selection.folds import gather_patterns
from symjax_rewrite.kernel_selection.folds.gathered_columns import Columns
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    Pair,
    PairwiseTile,
    elements,
    explore,
    is_elementwise,
    is_test_like,
    reads_twice,
)
from symjax_rewrite.kernel_selection.folds.slices import narrowed
from symjax_rewrite.kernel_selection.folds.tile_program import COLUMN, ROW, TileBuilder
from symjax_rewrite.kernel_selection.kernel_candidate import ClassRoute, Proposal, candidates
from symjax_rewrite.loops.carry_dependence import holds
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.algebra import giving_way_to_rules
from symjax_rewrite.text_tables import too_slow

MOST_ELEMENTS = 2**31 - 1  # limit on a result summed by column: places are int32


@dataclass(frozen=True, slots=True)
class Sparse:
    """Class that is zero except at some places of each row.

    along: the slot that the places index. place, value: over the class's other slots and the names
    in `extra`, which have sizes. clips: places out of range are clipped; else they are dropped.
    labels: the places are compared with the index; sums over a row are gathers of the rules then.
    """

    cls: int
    along: int
    place: Ref
    value: Ref
    extra: tuple[tuple[str, int], ...]
    clips: bool
    labels: bool = False


@dataclass(frozen=True, slots=True)
class SparseSum:
    """Sum over the nonzero places of a class, for a reader of classes.

    columns: the program of the summand. roots: the steps of its factors. names: of each index of
    the result; COLUMN is among them where the sum is by column. clips: as in `Sparse`.
    """

    columns: Columns
    roots: list[int]
    names: tuple[str, ...]
    dtype: str
    clips: bool

    def __call__(self, emitter: Any) -> tuple[Any, tuple[int, ...]]:
        size, lead = self.columns.builder.sizes, self.columns.names
        dtype = np.dtype(self.dtype)
        made, place = self.columns.steps(emitter)
        is_float = dtype_kind(str(dtype)) == "f"
        wide = jax_internals.joint_dtype(dtype, np.float32) if is_float else dtype
        total: Any = jnp.ones((), wide)
        for root in self.roots:
            total = total * made[root]
        total = jnp.broadcast_to(total, tuple(size[n] for n in lead))
        if not self.clips:
            total = jnp.where(self.columns.inside(place), total, jnp.zeros((), total.dtype))
        if COLUMN in self.names:
            total, kept = self._by_column(total, place)
        else:
            kept = [n for n in lead if n in self.names]
            total = jnp.sum(total, axis=tuple(k for k, n in enumerate(lead) if n not in kept))
        order = [kept.index(n) for n in self.names]
        return jax.lax.transpose(total, order).astype(dtype), tuple(range(len(order)))

    def _by_column(self, total: Any, place: Any) -> tuple[Any, list[str]]:
        """Return sums by column, and their axes: the shared axes, the columns, the other axes."""
        size, lead = self.columns.builder.sizes, self.columns.names
        by_row = self.columns.place.axes
        shared = [n for n in lead if n in self.names and n in by_row]
        summed = [n for n in lead if n not in self.names and n in by_row]
        wide = [n for n in lead if n in self.names and n not in by_row]
        gone = [n for n in lead if n not in self.names and n not in by_row]
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

    least: minimum number of elements of a class. share: minimum ratio between the terms of a sum
    and the summed terms; product_share: of a product of matrices. supports: for classes that are
    zero at the zeros of a sparse class, the sparse class over their indices. cuts: slices already
    built.
    """

    def __init__(self, t: TermGraph, need: Needed, least: int, folds: FoldFacts) -> None:
        self.t, self.g, self.need, self.least = t, t.graph, need, least
        self.share, self.product_share = folds.least_sparse_share, folds.least_sparse_product
        self.cuts: dict[tuple, Ref] = {}
        self.sources = {cls: s for cls in need.order if (s := self._sparse(cls)) is not None}
        self.supports: dict[int, Ref] = {}
        for cls in need.order if self.sources else ():
            held = self._support(cls)
            if held is not None:
                self.supports[cls] = held

    def _sparse(self, cls: int) -> Sparse | None:
        """Return a class as one that is zero except at some places, or None."""
        kind = node_of(self.g, cls).op
        if kind not in (op.MAP, op.NATIVE) or elements(self.t, cls) < max(self.least, 1):
            return None
        if kind == op.MAP:
            return self._labelled(cls)
        return self._scattered(cls) if cls in self.t.made_by else None

    def _labelled(self, cls: int) -> Sparse | None:
        """Return `[x = v]`, or a value where x = v and zero elsewhere, as a sparse class."""
        node, dtype = node_of(self.g, cls), self.g.classes[cls].dtype
        sizes = self.g.classes[cls].sizes
        found = label_of(self.g, indicated(self.g, self.g.ref(cls)))
        value = self.g.add(op.CONST, (1, dtype, "1"), (), (), (), dtype) if found else None
        if selected_case(self.g, node) == 2:
            found = label_of(self.g, comparisons(self.g, node.args[0]))
            value = node.args[2]
        if found is None or value is None or len(sizes) < 2:
            return None
        place, along = found
        size, held = sizes[along], np.iinfo(self.g.classes[place.cls].dtype).max
        if not isinstance(size, int) or size > held or along in (*place.axes, *value.axes):
            return None
        return Sparse(cls, along, place, value, (), clips=False, labels=True)

    def _scattered(self, cls: int) -> Sparse | None:
        """Return a scatter into zeros as a sparse class."""
        found = gather_patterns.scattered(self.t, cls)
        if found is None or len(found.along) != 1:
            return None
        count = len(self.g.classes[cls].sizes)
        (along,), (place,), value, bound = found.along, found.places, found.value, list(found.bound)
        for n in range(len(bound)):
            cut = self._window(value, count + n)
            if cut is not None:
                (start, size), value = cut
                opens = lambda cls: True  # noqa: E731
                place = narrowed(self.g, place, count + n, start, size, opens, self.cuts)
                bound[n] = size
        names: dict[int, Any] = {i: i for i in range(count)}
        names |= {count + n: f"k{n}" for n in range(len(bound))}
        extra: Any = tuple((f"k{n}", size) for n, size in enumerate(bound))
        place, value = place.over(names), value.over(names)
        if along in place.axes or along in value.axes or count < 2:
            return None
        return Sparse(cls, along, place, value, extra, found.clips)

    def _window(self, ref: Ref, index: int) -> tuple[tuple[int, int], Ref] | None:
        """Return (start, size) of a padded reference's interior, and the unpadded operand."""
        node = node_of(self.g, ref.cls)
        if node.op != op.CONCAT or ref.axes[node.attr[0]] != index or ref.axes.count(index) != 1:
            return None
        start = 0
        for k, (arg, size) in enumerate(zip(node.args, node.attr[1], strict=True)):
            if all(is_zero(self.g, a.cls) for a in (*node.args[:k], *node.args[k + 1 :])):
                return (start, int(size)), over(ref, arg)
            start += int(size)
        return None

    def support(self, ref: Ref) -> Ref | None:
        """Return a sparse reference at whose zeros a reference is zero."""
        held = self.supports.get(ref.cls)
        return None if held is None else over(ref, held)

    def _support(self, cls: int) -> Ref | None:
        """Return `support` of a class over its indices, once it is known for its operands."""
        node = node_of(self.g, cls)
        if cls in self.sources:
            return self.g.ref(cls)
        args = node.args
        if node.op == op.CONTRACT:
            found = (self.support(a) for a in args)
            return next((s for s in found if s and all(i < node.out for i in s.axes)), None)
        if node.op == op.MAP and node.attr[0] == "div":
            args = args[:1]
        elif node.op == op.MAP and node.attr[0] == "select_n":
            args = [a for a in args[1:] if not is_zero(self.g, a.cls)]
        elif node.op != op.ADD and not is_cast(node):
            return None
        shared = {self.support(a) for a in args}
        return shared.pop() if len(shared) == 1 else None

    def route(self, cls: int) -> tuple[Sparse, ClassRoute] | None:
        """Return a sum over the nonzero places of a sparse class, with this class, or None."""
        node, of = node_of(self.g, cls), self.g.classes[cls]
        if node.op != op.CONTRACT or not node.bound or dtype_kind(of.dtype) not in "fiu":
            return None
        sizes: dict[int, Any] = dict(enumerate((*of.sizes, *node.bound)))
        if not all(isinstance(s, int) and s for s in sizes.values()):
            return None
        supports = [held for a in node.args if (held := self.support(a)) and not reads_twice(held)]
        routes = (self._route(cls, node, sizes, held) for held in supports)
        return next((route for route in routes if route is not None), None)

    def _route(
        self, cls: int, node: Node, sizes: dict[int, int], held: Ref
    ) -> tuple[Sparse, ClassRoute] | None:
        source = self.sources[held.cls]
        column = held.axes[source.along]
        if source.labels and column >= node.out:
            return None
        lead = [i for i in sizes if i != column]
        row = max((i for i in held.axes if i != column), key=sizes.__getitem__)
        extra = dict(source.extra)
        terms = math.prod(sizes[i] for i in lead) * math.prod(extra.values())
        is_product = is_dot(node) and not is_thin(node)
        share = self.product_share if is_product else self.share
        if terms * share > math.prod(sizes.values()):
            return None
        if column < node.out and math.prod(sizes[i] for i in range(node.out)) > MOST_ELEMENTS:
            return None
        pair = Pair(self.t, row, column, chosen=(held, source.value))
        tile = explore(pair, [a for a in node.args if pair.holds(a)])
        if tile is None or tile.looked or not self._is_steady(tile):
            return None
        names: dict[Any, Any] = {i: f"b{i}" for i in sizes} | {row: ROW, column: COLUMN}
        place = source.place.over({
            i: i if isinstance(i, str) else names[held.axes[i]] for i in source.place.axes
        })  # fmt: skip
        named = replace(pair, chosen=(held.over(names), source.value))
        builder = TileBuilder(
            self.t, named, sizes={**{names[i]: s for i, s in sizes.items()}, **extra}
        )
        roots = [builder.build(a.over(names)) for a in node.args]
        value = builder.number.get(held.over(names))
        if extra and not _is_linear(builder.steps, roots, value):
            return None  # values at equal places of a row would be summed after the product
        columns = Columns(builder, (*(names[i] for i in lead), *extra), place)
        mine = tuple(names[i] for i in range(node.out))
        total = SparseSum(columns, roots, mine, self.g.classes[cls].dtype, source.clips)
        return source, ClassRoute(cls, columns.needs(), total)

    def _is_steady(self, tile: PairwiseTile) -> bool:
        """Return True if no step compares a value with its reduction computed elsewhere."""
        return all(
            a.cls in self.given or any(a.cls == r.cls for r in tile.inner)
            for cls in tile.compared
            for a in node_of(self.g, cls).args
        )

    @functools.cached_property
    def given(self) -> set[int]:
        """Return the classes that are elementwise in inputs."""
        found: set[int] = set()
        for cls in self.need.order:
            node = node_of(self.g, cls)
            is_mine = is_elementwise(node) and all(a.cls in found for a in node.args)
            if is_mine or node.op == op.LEAF or is_test_like(self.g, cls):
                found.add(cls)
        return found


def _is_linear(steps: Sequence[Step], roots: list[int], value: int | None) -> bool:
    """Return True if a product of steps is linear in the value of one step."""
    degrees: list[float] = []
    for n, step in enumerate(steps):
        degrees.append(1 if n == value else _degree(step, [degrees[a] for a in step.args], steps))
    return sum(degrees[n] for n in roots) == 1


def _degree(step: Step, of: list[float], steps: Sequence[Step]) -> float:
    """Return a step's degree in a value, by those of its operands; infinite for no polynomial.

    A cast to a smaller float rounds each value of a sum.
    """
    kind, attr = step.data if step.kind == "apply" else (step.kind, ("",))
    if not any(of):
        return 0
    if kind == op.CONTRACT:
        return sum(of)
    if kind in (op.ADD, "diagonal"):
        return max(of)
    name = attr[0] if kind == op.MAP else ""
    if name == "div" and not of[1]:
        return of[0]
    if name == "select_n" and not of[0]:
        return max(of)
    before = steps[step.args[0]].dtype
    is_exact = dtype_kind(before) + dtype_kind(step.dtype) == "ff" and holds(step.dtype, before)
    return of[0] if name == "convert_element_type" and is_exact else math.inf


class SparseReductions:
    """Pass that restricts sums to the nonzero places of a sparse class."""

    name = "sparse"

    def candidates(self, program: Program, context: Context) -> Iterator[Found]:
        found = [*self._found(program, context)]
        compared = context.options.kernels == "auto"
        yield from giving_way_to_rules(found, program, context) if compared else found

    def _found(self, program: Program, context: Context) -> Iterator[Found]:
        kernels, auto = context.options.kernels, context.options.kernels == "auto"
        if kernels == "off" or not context.reorders():
            return
        device, folds = context.device, context.device.folds
        if auto and (not folds.reads_places or jax_internals.may_be_partitioned()):
            return
        terms = context.terms(program)
        t, g, least = terms.t, terms.t.graph, folds.least_sparse_pairs if auto else 0
        if t.dim_env:
            return
        finder = _Finder(t, terms.need, least, folds)
        by_source: dict[Sparse, list[ClassRoute]] = {}
        for source, route in filter(None, map(finder.route, terms.need.order)):
            by_source.setdefault(source, []).append(route)
        proposals = []
        for source, routes in by_source.items():
            written = sum(terms.model.node_seconds(g, r.cls, node_of(g, r.cls)) for r in routes)
            seconds = written, sum(_seconds(r, device) for r in routes)
            if auto and not margins.pays(*seconds, "fold", device):
                gain = seconds[0] / seconds[1]
                reason = Obstacle.COST(too_slow(gain, device.margins.fold))
                yield Refusal(self.name, reason, t.where(source.cls), ratio=gain)
                continue
            count = math.prod(size for _, size in source.extra)
            row = g.classes[source.cls].sizes[source.along]
            reason = f"sums over a row read the {count} of {row} places that are not zero"
            proposals.append(Proposal(routes, reason, t.where(source.cls), seconds))
        yield from candidates(t, self.name, proposals)


def _seconds(route: ClassRoute, device: Device) -> float:
    """Return the seconds of a sum over nonzero places: lookups of its operands, and its sums.

    A lookup finds a row of all indices that the places do not depend on, and reads on.
    """
    folds, made = device.folds, route.make
    assert isinstance(made, SparseSum)
    size, held = made.columns.builder.sizes, made.columns.place.axes
    places = math.prod(size[n] for n in made.columns.names if n in held)
    terms = math.prod(size[n] for n in made.columns.names)
    lookups = 1 + len(route.reads)  # a kernel each
    each = folds.lookup * lookups + (folds.keyed if COLUMN in made.names else 1.0)
    steps = places * each + (terms - places) * min(each, folds.row_term)
    return steps / folds.fused_steps_per_s + lookups * device.launch_s
