"""Reductions over concatenated columns as reductions over each concatenated part.

max [a, b] = max (max a, max b)      Σ [a, b]·w = Σ a·w₁ + Σ b·w₂      [a, b][:k] = a

Scores concatenated before a softmax (attention sinks, a negative queue, local and global attention)
are pairwise terms of their own. Classes that depend on such scores are restated as new classes of
the same graph. The routes decide which of the two classes is computed from the other.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import Needed, class_operands, cone, live_classes, node_of
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONCAT, CONTRACT, MAP, REDUCE, SLICE, Node, Ref, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.pairwise_terms import elements, is_elementwise
from symjax_rewrite.kernel_selection.folds.slices import entry_along, narrowed, sliced
from symjax_rewrite.kernel_selection.kernel_candidate import ClassRoute

_JOINED = {(REDUCE, monoid) for monoid in ("max", "min", "and", "or")}


class JoinedParts(NamedTuple):
    """Class as parts along one of its indices, each read over the class's indices."""

    along: int
    sizes: tuple[int, ...]
    refs: tuple[Ref, ...]


def _reread(cls: int, source: Ref) -> ClassRoute:
    """Return a class computed by reindexing another class."""

    def make(emitter: Any) -> tuple[Any, tuple[int, ...]]:
        array = emitter.array(source.cls)
        return array.data, tuple(source.axes[s] for s in array.slots)

    return ClassRoute(cls, [source.cls], make)


def restated(t: TermGraph, need: Needed, least: int) -> tuple[Restated, Needed] | None:
    """Restate reductions over concatenated scores; return the new live set too, or None.

    least: minimum number of elements of the scores.
    """
    seeds = {c for c in need.order if _joins_scores(t, c, least)}
    if not seeds:
        return None
    found = Restated(t, need, seeds)
    if not all(found.visit(cls) for cls in need.order) or not found.wanted:
        return None
    outside = {found.to[c].cls if c in found.to else c for c in need.outside}
    live = live_classes(outside, class_operands(t.graph))
    return found, replace(live, known=need.known)


def _joins_scores(t: TermGraph, cls: int, least: int) -> bool:
    """Return True if a class concatenates products with other values."""
    node = node_of(t.graph, cls)
    if node.op != CONCAT or not all(isinstance(s, int) for s in t.graph.classes[cls].sizes):
        return False
    if elements(t, cls) < least:
        return False
    stack = [a.cls for a in node.args if node.attr[0] in a.axes]
    for c in stack:
        inner = node_of(t.graph, c)
        if inner.op == CONTRACT and inner.bound and len(inner.args) > 1:
            return True
        if is_elementwise(inner) and len(stack) < 32:
            stack.extend(a.cls for a in inner.args)
    return False


class Restated:
    """Classes that depend on concatenated scores, restated over the parts, oldest class first.

    to: for an old class, the new class over the old class's indices. joined: old classes that
    concatenate results of the parts. wanted: new classes that a fold must compute to be profitable.
    """

    def __init__(self, t: TermGraph, need: Needed, seeds: set[int]) -> None:
        self.g, self.need, self.seeds = t.graph, need, seeds
        self.parts: dict[int, JoinedParts] = {}
        self.cuts: dict[tuple, Ref] = {}
        self.to: dict[int, Ref] = {}
        self.joined: set[int] = set()
        self.wanted: set[int] = set()

    def visit(self, cls: int) -> bool:
        """Restate a class if necessary; return False if the concatenation must be materialised."""
        node, c = node_of(self.g, cls), self.g.classes[cls]
        if cls in self.seeds:
            index, sizes = node.attr
            refs = tuple(self._moved(a) for a in node.args)
            self.parts[cls] = JoinedParts(index, tuple(map(int, sizes)), refs)
        elif any(a.cls in self.parts for a in node.args):
            if not self._apart(cls, node):
                return False
        elif any(a.cls in self.to for a in node.args):
            args = tuple(self._moved(a) for a in node.args)
            self.to[cls] = self.g.add(node.op, node.attr, args, c.sizes, node.bound, c.dtype)
        return cls not in self.parts or cls not in self.need.outside

    def _moved(self, ref: Ref) -> Ref:
        new = self.to.get(ref.cls)
        return ref if new is None else over(ref, new)

    def _apart(self, cls: int, node: Node) -> bool:
        found = {
            (a.axes[self.parts[a.cls].along], self.parts[a.cls].sizes)
            for a in node.args
            if a.cls in self.parts
        }
        if len(found) != 1:
            return False
        ((index, sizes),) = found
        if is_elementwise(node) and index < node.out:
            self.parts[cls] = JoinedParts(index, sizes, self._each(cls, node, index, sizes))
        elif (joined := self._joined(cls, node, index, sizes)) is not None:
            self.to[cls] = joined
            self.joined.add(cls)
        return cls in self.parts or cls in self.to

    def _each(self, cls: int, node: Node, index: int, sizes: tuple[int, ...]) -> tuple[Ref, ...]:
        """Apply a node to each part of its operands."""
        c, refs, start = self.g.classes[cls], [], 0
        for k, size in enumerate(sizes):
            args = tuple(self._piece(a, index, k, start, size) for a in node.args)
            start += size
            if node.op == REDUCE and index not in args[0].axes and len(node.bound) == 1:
                refs.append(args[0])
                continue
            mine: list[Dim] = [*c.sizes, *node.bound]
            mine[index] = size
            shape, bound = tuple(mine[: node.out]), tuple(mine[node.out :])
            refs.append(self.g.add(node.op, node.attr, args, shape, bound, c.dtype))
        return tuple(refs)

    def _piece(self, ref: Ref, index: int, k: int, start: int, size: int) -> Ref:
        """Return the view of part k along `index`."""
        found = self.parts.get(ref.cls)
        if found is not None and ref.axes[found.along] == index:
            return over(ref, found.refs[k])
        ref = self._moved(ref)
        return narrowed(self.g, ref, index, start, size, self._has_concat, self.cuts)

    def _has_concat(self, cls: int) -> bool:
        """Return True if an elementwise class reads concatenated classes."""

        def operands(c: int) -> list[int]:
            node = node_of(self.g, c)
            return [a.cls for a in node.args] if is_elementwise(node) else []

        return any(node_of(self.g, c).op == CONCAT for c in cone([cls], operands))

    def _joined(self, cls: int, node: Node, index: int, sizes: tuple[int, ...]) -> Ref | None:
        """Return a reduction or slice of a concatenation, from the results of the parts."""
        c = self.g.classes[cls]
        if node.op == SLICE:
            return self._part(node, sizes, c.sizes)
        if index < node.out or (node.op != CONTRACT and (node.op, node.attr) not in _JOINED):
            return None
        refs = self._each(cls, node, index, sizes)
        self.wanted.add(refs[sizes.index(max(sizes))].cls)
        if node.op == CONTRACT:
            return self.g.add(ADD, (1,) * len(refs), refs, c.sizes, (), c.dtype)

        def join(a: Ref, b: Ref) -> Ref:
            return self.g.add(MAP, (node.attr, ()), (a, b), c.sizes, (), c.dtype)

        return reduce(join, refs)

    def _part(self, node: Node, sizes: tuple[int, ...], shape: tuple[Dim, ...]) -> Ref | None:
        """Return a slice that equals one part, or reads one index of a part."""
        (arg,) = node.args
        found = self.parts[arg.cls]
        entry = entry_along(node, found.along)
        if entry is None or entry[1] != 1:
            return None
        start, _, alone = entry
        first = 0
        for part, size in zip(found.refs, sizes, strict=True):
            if alone and first <= start < first + size:
                return over(arg, sliced(self.g, part, found.along, start - first, 1))
            if not alone and (first, size) == (start, shape[arg.axes[found.along]]):
                return over(arg, part)
            first += size
        return None


def rereads(found: Restated, routed: set[int], hidden: set[int]) -> list[ClassRoute]:
    """Choose whether the old or the new class is read from the other, given the routed classes.

    hidden: classes that exist only within a kernel, so that no reader of the old class remains.
    """
    out: list[ClassRoute] = []
    for old, new in found.to.items():
        if new.cls in hidden:
            continue
        if old in found.joined or new.cls in routed:
            out.append(_reread(old, new))
        else:
            out.append(_reread(new.cls, Ref(old, tuple(map(new.axes.index, range(len(new.axes)))))))
    return out
