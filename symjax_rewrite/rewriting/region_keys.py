"""Regions and their keys: regions that are equal up to their inputs are solved once.

A key has one row per class of a region, operands first. The order of a class's slots in the term
graph follows the numbers of its operands, which differ between equal layers (the first layer reads
the embedding). So a key orders the slots itself. It orders slots of the roots by colours, which
depend on the content, and slots of an operand as the first term that reads it.

Most equal layers have equal terms in the same order, too. One of them is numbered, and the others
take its key with their own classes (`Numberings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.egraph import EGraph, renamed_attr
from symjax_rewrite.ir.index_tests import is_condition
from symjax_rewrite.ir.term import (
    ADD,
    CONST,
    CONTRACT,
    CONV,
    DELTA,
    INVERSE,
    IOTA,
    LEAF,
    REDUCE,
    SLICE,
    SOLVE,
    UNORDERED,
    Axes,
    Node,
    Ref,
    identity,
)
from symjax_rewrite.ir.term_graph import TermGraph

NULLARY = frozenset({CONST, DELTA, IOTA})
RIGID = frozenset({CONV, INVERSE, SOLVE})  # terms for which the order of slots has a meaning


class Key:
    """The content of a region without its inputs, row by row; hashed once, because it is large."""

    __slots__ = ("_hash", "rows")

    def __init__(self, rows: tuple = ()) -> None:
        self.rows, self._hash = rows, hash(rows)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self.rows == other.rows)


class LeafTag(NamedTuple):
    """The properties that distinguish inputs of regions besides sizes and dtype.

    frozen: it depends on frozen arguments alone. storage: the dtype that it is stored in. computed:
    an equation of the program computes it. inlined: the operations for each element where XLA may
    compute it in the kernel of its readers, else 0. alone: one term reads it.
    """

    frozen: bool
    storage: str
    computed: bool
    inlined: float = 0.0
    alone: bool = False


@dataclass(slots=True)
class Region:
    """A connected algebraic part of a program.

    classes: its classes, operands first. roots: the classes needed outside. fused: those that only
    one elementwise term reads, in whose kernel XLA may compute them. key: equal for regions
    that are the same up to their inputs. leaves: the classes it reads, in the key's order. local:
    the number of every class in the key. slots: the slots of every class in the key's order. tags:
    of every leaf.
    """

    classes: list[int]
    roots: list[int]
    fused: set[int] = field(default_factory=set)
    key: Key = field(default_factory=Key)
    leaves: list[int] = field(default_factory=list)
    local: dict[int, int] = field(default_factory=dict)
    slots: dict[int, Axes] = field(default_factory=dict)
    tags: dict[int, LeafTag] = field(default_factory=dict)

    def take(self, other: Region, to: Mapping[int, int]) -> None:
        """Take the numbering of a region that is written alike.

        to: the class of this region for each class of the other that is not the same.
        """
        self.key = other.key
        self.classes = [to.get(c, c) for c in other.classes]
        self.leaves = [to.get(c, c) for c in other.leaves]
        self.local = {to.get(c, c): number for c, number in other.local.items()}
        self.slots = {to.get(c, c): slots for c, slots in other.slots.items()}
        self.tags = {to.get(c, c): tag for c, tag in other.tags.items()}

    def in_key(self, cls: int, ref: Ref) -> Ref:
        """Return a reference over the slots of a class, over the places of these in the key."""
        return ref.over({slot: k for k, slot in enumerate(self.slots[cls])})


class Numberings:
    """Numbers the regions of a program; regions that are written alike are numbered once.

    Two regions are written alike if their classes, in order, have equal terms of operands at equal
    places. A numbering reads nothing else of a region, so that the numbering of one with every
    class replaced by the class at its place is that of the other.

    tag: returns the tag of a leaf.
    """

    def __init__(self, g: EGraph, need: Needed, tag: Callable[[int], LeafTag]) -> None:
        self.g, self.need, self.tag = g, need, tag
        self._first: dict[tuple, tuple[Region, list[int]]] = {}

    def number(self, region: Region) -> None:
        """Set the key of a region, and the order of its classes and slots."""
        written = self._written(region)
        first = None if written is None else self._first.get(written[0])
        if first is not None and written is not None:
            region.take(first[0], dict(zip(first[1], written[1], strict=True)))
            return
        Numbering(self.g, self.need, region, self.tag).run()
        if written is not None:
            self._first[written[0]] = region, written[1]

    def _written(self, region: Region) -> tuple[tuple, list[int]] | None:
        """Return the terms of a region by places, and the class at each place.

        None if it reads a condition, whose operands belong to its numbering.
        """
        g, uses, roots = self.g, self.need.uses, set(region.roots)
        classes = [*region.classes]
        place = {c: k for k, c in enumerate(classes)}
        rows: list[tuple] = []
        for c in region.classes:
            args, of = [], g.classes[c]
            for a in of.first.args:
                if a.cls not in place:
                    leaf = g.classes[a.cls]
                    if leaf.first.op in NULLARY:  # one class for the whole program
                        place[a.cls] = -1 - a.cls
                    elif is_condition(g, a.cls):
                        return None
                    else:
                        place[a.cls] = len(classes)
                        classes.append(a.cls)
                        rows.append((leaf.sizes, leaf.dtype, self.tag(a.cls)))
                args.append((place[a.cls], a.axes))
            op, attr, _, _, bound = of.first
            info = (of.sizes, of.dtype, min(uses.get(c, 0), 2), c in roots, c in region.fused)
            rows.append((op, attr, tuple(args), bound, *info))
        return tuple(rows), classes


class Numbering:
    """Numbers the classes of a region from its roots; the numbering is the key.

    Of the region only the classes and roots are read. tag: returns the tag of a leaf.
    """

    def __init__(
        self, g: EGraph, need: Needed, region: Region, tag: Callable[[int], LeafTag]
    ) -> None:
        self.g, self.need, self.region, self.tag = g, need, region, tag
        self.inside, self.roots = set(region.classes), set(region.roots)
        self.rows: list[tuple] = []
        self.order: list[int] = []
        rigid = [c for c in region.classes if node_of(g, c).op in RIGID]
        self.fixed = {*rigid, *[a.cls for c in rigid for a in node_of(g, c).args]}
        self.colours = _Colours(g, region.classes)

    def run(self) -> None:
        """Write the key, and the order of the classes and of their slots."""
        region, colours = self.region, self.colours.slots
        for c in region.roots:
            self._order_slots(c, colours[c])
            self._visit(c)
        region.classes, region.key = self.order, Key(tuple(self.rows))

    def _visit(self, start: int) -> None:
        g, local, inside = self.g, self.region.local, self.inside
        stack = [(start, False)]
        while stack:
            c, done = stack.pop()
            if c in local:
                continue
            node = g.classes[c].first
            if not (c in inside or node.op in NULLARY or is_condition(g, c)):
                self._add(c, self._leaf(c))
            elif done:
                self._add(c, self._term(c, node))
            else:
                stack.append((c, True))
                args = self._operands(c, node)
                stack.extend([(a.cls, False) for a in reversed(args)])

    def _add(self, cls: int, row: tuple) -> None:
        self.region.local[cls] = len(self.order)
        self.rows.append(row)
        self.order.append(cls)

    def _order_slots(self, cls: int, keys: Sequence[int]) -> None:
        """Order the slots of a class by keys, unless another term has done so."""
        if cls not in self.region.slots:
            order: Axes = identity(len(keys))
            if len(keys) > 1 and cls not in self.fixed:
                order = tuple(sorted(order, key=keys.__getitem__))
            self.region.slots[cls] = order

    def _operands(self, cls: int, node: Node) -> Sequence[Ref]:
        """Return the operands of a term in the order in which they are numbered."""
        args, like, slots = node.args, self.colours.like, self.region.slots
        if len(args) > 1 and node.op in UNORDERED:
            args = sorted(args, key=lambda a: like.get(a.cls, 0))
        new = [a for a in args if a.cls not in slots]
        if new and slots[cls] == identity(node.out) and len(node.bound) < 2:
            for a in new:
                self._order_slots(a.cls, a.axes)
        elif new:
            bound = list(range(node.out, node.out + len(node.bound)))
            if node.op in (CONTRACT, REDUCE) and cls in self.colours.bound:
                bound.sort(key=lambda i: self.colours.bound[cls][i - node.out])
            rank = {-1: -1, **{i: k for k, i in enumerate((*slots[cls], *bound))}}
            for a in new:
                self._order_slots(a.cls, [rank[i] for i in a.axes])
        return args

    def _leaf(self, cls: int) -> tuple:
        region, of = self.region, self.g.classes[cls]
        tag = region.tags[cls] = self.tag(cls)
        region.leaves.append(cls)
        return LEAF, tuple([of.sizes[s] for s in region.slots[cls]]), of.dtype, tag

    def _in_order(self, a: Ref) -> Axes:
        """Return the indices that an operand reads, in the key's order of its slots."""
        order = self.region.slots[a.cls]
        return a.axes if order == identity(len(order)) else tuple([a.axes[s] for s in order])

    def _term(self, cls: int, node: Node) -> tuple:
        """Return the row of a term; its indices are named in the order of the key."""
        local, slots, of = self.region.local, self.region.slots, self.g.classes[cls]
        mine, attr, out = slots[cls], node.attr, node.out
        parts = [(local[a.cls], self._in_order(a)) for a in node.args]
        name: dict[int, int] = {}
        bound = range(out, out + len(node.bound))
        if mine != identity(out) or len(bound) > 1:
            name = {-1: -1, **{i: k for k, i in enumerate(mine)}}
            keys = [(number, tuple([name.get(i, out) for i in axes])) for number, axes in parts]
        else:
            keys = parts
        order = list(range(len(parts)))
        if len(parts) > 1 and node.op in UNORDERED:  # summed indices have no name yet
            order.sort(key=keys.__getitem__)
        if len(bound) > 1 and node.op in (CONTRACT, REDUCE):
            read = [i for k in order for i in parts[k][1] if i >= out]
            bound = list(dict.fromkeys([*read, *bound]))
        if name:
            name.update(zip(bound, range(out, out + len(bound)), strict=True))
            parts = [(number, tuple([name[i] for i in axes])) for number, axes in parts]
        args = tuple([parts[k] for k in order])
        if node.op == ADD:
            attr = tuple([attr[k] for k in order])
        elif node.op == SLICE:  # the attribute is stored slot by slot
            attr = tuple([attr[s] for s in slots[node.args[0].cls]])
        elif name:
            attr = renamed_attr(node.op, attr, name)
        sizes = tuple([of.sizes[s] for s in mine])
        summed = tuple([node.bound[i - out] for i in bound])
        uses = min(self.need.uses.get(cls, 0), 2)  # one user may absorb it, several users may not
        info = (sizes, of.dtype, uses, cls in self.roots, cls in self.region.fused)
        return (node.op, attr, args, summed, *info)


class _Colours:
    """Hashes of classes and of their indices, which do not depend on numbers of classes.

    They are the same in every process, because no strings are hashed. like: of each class. slots:
    of each of its slots. bound: of each of its bound indices, if it has several.
    """

    def __init__(self, g: EGraph, classes: list[int]) -> None:
        self.like: dict[int, int] = {}
        self.slots: dict[int, list[int]] = {}
        self.bound: dict[int, list[int]] = {}
        for c in classes:  # operands first
            node = node_of(g, c)
            for a in node.args:
                if a.cls not in self.like:
                    sizes = g.classes[a.cls].sizes
                    self.slots[a.cls] = [s if isinstance(s, int) else -1 for s in sizes]
                    self.like[a.cls] = hash(tuple(sorted(self.slots[a.cls])))
            self._colour(c, node)

    def _colour(self, cls: int, node: Node) -> None:
        """Colour a term and its indices; sums of hashes do not depend on the order of operands."""
        like, slots = self.like, self.slots
        made = [0] * (node.out + len(node.bound))
        for a in node.args:
            seed = like[a.cls]
            for i, colour in zip(a.axes, slots[a.cls], strict=True):
                if i >= 0:
                    made[i] += hash((seed, colour))
        below = 0
        for a in node.args:
            below += hash((like[a.cls], sum([made[i] for i in a.axes if i >= 0])))
        slots[cls] = made[: node.out]
        if len(node.bound) > 1:
            self.bound[cls] = made[node.out :]
        like[cls] = hash((below, len(node.bound), len(node.op)))


def region_graph(t: TermGraph, region: Region) -> tuple[EGraph, dict[int, Ref]]:
    """Return a fresh e-graph of just the region, and the reference of each of its classes."""
    g = EGraph()
    to: dict[int, Ref] = {}
    leaf = {c: n for n, c in enumerate(region.leaves)}
    for c in region.classes:
        info = t.graph.classes[c]
        if c in leaf:
            to[c] = g.add(LEAF, leaf[c], (), info.sizes, (), info.dtype)
            continue
        node = node_of(t.graph, c)
        args = tuple([to[a.cls].over(a.axes) for a in node.args])
        attr = node.attr
        if node.op == SLICE:  # the attribute is stored slot by slot
            attr = tuple([attr[i] for i in to[node.args[0].cls].axes])
        to[c] = g.add(node.op, attr, args, info.sizes, node.bound, info.dtype)
    return g, to
