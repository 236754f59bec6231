"""Upper bounds of the savings of a search: a region with a small bound is not searched.

A program of many operations on small arrays takes its time in launches. XLA fuses elementwise terms
and reductions as it chooses, so a rewriting of them saves no launch for sure. Only their arithmetic
and traffic count as savings; of products all seconds count.

A region of products and elementwise terms needs no search if no other order of its products is much
cheaper: the products must be computed, and so must the sums beside them. Only scales could be
placed elsewhere.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product, starmap
from typing import Any

from symjax_rewrite.cost.term_cost import Cost, CostModel, is_dot, itemsize
from symjax_rewrite.ir.dataflow import cone, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import (
    ADD,
    CONCAT,
    CONST,
    CONTRACT,
    SLICE,
    TAKE,
    Axes,
    Node,
    Ref,
    identity,
)
from symjax_rewrite.rewriting.contraction_order import Pairs, best_order, rows_of
from symjax_rewrite.rewriting.region_keys import Region

MOVES = frozenset({SLICE, CONCAT, TAKE})  # terms that move parts of their operands

FIRST_BOUND = 64  # the name of the first bound index of a region
MOST_FACTORS = 12  # of a product that has a bound
MOST_PAIRS = 500  # subproducts tried for a bound
MOST_SHARED = 8  # products that are read twice


@dataclass(slots=True)
class _Value:
    """The facts about a class that contains no outer product of smaller values.

    read: the classes of its full size from which it is computed. parts: those of which it holds
    parts. made: True if more than scales are between these classes and it, so that it must be
    computed.
    """

    read: frozenset[int]
    parts: frozenset[int]
    made: bool = False

    @classmethod
    def of(cls, c: int, parts: Iterable[int] = ()) -> _Value:
        """Return the value of a class that holds parts of other classes, or of itself."""
        return cls(frozenset({c}), frozenset(parts) or frozenset({c}))


def savings_bound(cost: Cost, g: EGraph, region: Region, model: CostModel) -> float:
    """Return the seconds that a region could save at most.

    cost: of the region as written.
    """
    made = set(region.classes).difference(region.leaves)
    products = sum([model.facts_of(g, c, node_of(g, c)).is_kernel for c in made])
    launches_s = max(cost.launches - products, 0) * model.device.launch_s
    return cost.seconds - launches_s - _least_traffic(g, region, made, model)


def products_seconds(g: EGraph, classes: Iterable[int], model: CostModel) -> float:
    """Return the seconds that the products among some classes take at least."""
    nodes = [(c, node) for c in classes if is_dot(node := node_of(g, c))]
    facts = [model.facts_of(g, c, node) for c, node in nodes]
    return sum([(f.flops or 0.0) / f.peak + f.packing + model.device.launch_s for f in facts])


def _least_traffic(g: EGraph, region: Region, made: set[int], model: CostModel) -> float:
    """Return the seconds to read every input of a region once and to write its results."""
    if any(node_of(g, c).op not in (ADD, CONTRACT, CONST) for c in made):
        return 0.0  # inputs may be read in part, or be results
    moved = sum([model.class_bytes(g, c) for c in region.leaves])
    moved += sum([model.class_bytes(g, c) for c in region.roots if c not in region.fused])
    return moved / model.device.bytes_per_s


def nearest(g: EGraph, classes: Sequence[int], model: CostModel) -> list[int]:
    """Return the classes of a region; of a large region those nearest to the largest savings.

    Seconds are those of `savings_bound`, class by class. From the classes that have nearly all of
    them the region grows by operands and readers.
    """
    search = model.device.search
    most = search.region_classes
    if len(classes) <= most:
        return [*classes]
    near: dict[int, list[int]] = {c: [] for c in classes}
    for c in classes:
        for a in node_of(g, c).args:
            if a.cls in near:
                near[c].append(a.cls)
                near[a.cls].append(c)
    seconds = {c: model.node_seconds(g, c, node_of(g, c)) for c in classes}
    left = search.region_share * sum(seconds.values())
    found: dict[int, None] = {}
    for c in sorted(classes, key=seconds.__getitem__, reverse=True)[: most // 4]:
        if left > 0:
            found[c] = None
            left -= seconds[c]
    queue = [*found]
    for c in queue:
        for other in near[c]:
            if other not in found and len(found) < most:
                found[other] = None
                queue.append(other)
    return sorted(found)


Ordered = dict[tuple, float | None]  # seconds of products in their best orders, by factors


def least_seconds(
    g: EGraph, region: Region, model: CostModel, ordered: Ordered, by_factors: bool = False
) -> float | None:
    """Return the cost of a region in any form, or None if a law might save work of a product.

    ordered: the products of this model whose best order is known; others are added. by_factors:
    True for another bound, where products are summed with arrays of their size: the reader of such
    a sum multiplies an array of this size, the sum or its summand.
    """
    values: dict[int, _Value | None] = {c: _Value.of(c) for c in region.leaves}
    needed = cone(region.roots, lambda c: () if c in values else _operands(node_of(g, c)))
    flat = _FlatProducts(g, region, model, needed, ordered)
    for c in region.classes:
        node = node_of(g, c)
        if c in values:
            continue
        if c not in needed:  # sums alone read it
            if is_dot(node):
                return None
            continue
        if node.op == CONST:
            values[c] = None
        elif node.op in MOVES:
            if not flat.moves(c, node):
                return None
            known = [v for a in node.args if (v := values[a.cls]) is not None]
            values[c] = _Value.of(c, frozenset().union(*[v.parts for v in known]))
            continue
        elif node.op not in (ADD, CONTRACT) or not all(_reads_plainly(a.axes) for a in node.args):
            return None
        elif is_dot(node):
            if not _is_full_product(node, values):
                return None
            values[c] = _Value.of(c)
        elif node.bound:
            values[c] = _Value.of(c)
            continue
        else:
            values[c] = value = _elementwise(node, values)
            if by_factors and value is not None and flat.has_summand(c, node, values):
                values[c] = replace(value, read=frozenset({c}), made=False)
                continue
        if not flat.add(c, node):
            return None
    total = flat.seconds(values)
    if total is None:
        return None
    d = model.device
    beside = {*[a.cls for c in flat.products for a in node_of(g, c).args], *region.roots}
    for c in beside.difference(flat.products):
        value = values[c]
        if value is not None and value.made:
            moved = sum([model.class_bytes(g, x) for x in (c, *value.read)])
            total += moved / d.bytes_per_s + d.launch_s
    return total


def _operands(node: Node) -> list[int]:
    """Return the operands of a term; a sum that is no product needs none of them for sure."""
    is_sum = node.bound and node.op not in MOVES and not is_dot(node)
    return [] if is_sum else [a.cls for a in node.args]


Factors = list[tuple[int, Axes]]  # classes, with the names of the indices that they read
Parts = tuple[int, frozenset[int]]  # a factor, with the classes of which it holds parts


class _FlatProducts:
    """The products of a region as products of factors.

    Names of indices are numbers: first the slots of the class, and from `FIRST_BOUND` the indices
    that are summed. Of a sum with one product among its terms the product counts. A result that
    other products read, or a product that is read twice, is a factor of these, or is opened: both
    are kept. Of a sum of several products each is made, if they have no common factor and no
    product reads the sum. Operands of slices, concatenations and gathers count as results, and
    their results as inputs.

    needed: the classes that the roots need. ordered: as in `least_seconds`. whole: the classes
    needed as a whole.
    """

    def __init__(
        self, g: EGraph, region: Region, model: CostModel, needed: set[int], ordered: Ordered
    ) -> None:
        self.g, self.region, self.model, self.ordered = g, region, model, ordered
        self.roots = set(region.roots)
        self.whole, sliced = set(region.roots), defaultdict[int, float](float)
        for c in needed.difference(region.leaves):
            node = node_of(g, c)
            read = [a.cls for a in node.args]
            if node.op in MOVES:
                self.roots.update(read)
            if node.op == SLICE:
                sliced[read[0]] += model.class_bytes(g, c)
            else:
                self.whole.update(read)
        self.whole.update([c for c, size in sliced.items() if size >= model.class_bytes(g, c)])
        reads = Counter([c for r in needed for c in self._read(r)])
        self.shared = {c for c, n in reads.items() if n > 1}.difference(self.roots)
        self.products: list[int] = []
        self.tops: list[tuple[int, Factors, Factors]] = []
        self.factors: dict[int, tuple[Factors, Factors]] = {}  # closed and opened
        self.sizes: list[Dim] = []  # of the indices that are summed
        self.sums: dict[int, list[int]] = {}  # the products in each sum of several

    def _read(self, cls: int) -> list[int]:
        return [] if cls in self.region.leaves else [a.cls for a in node_of(self.g, cls).args]

    def add(self, cls: int, node: Node) -> bool:
        """Add a class after its operands; return False if there is no bound."""
        bound = [FIRST_BOUND + len(self.sizes) + k for k in range(len(node.bound))]
        names = [*range(node.out), *bound]
        self.sizes += node.bound
        inner = [a for a in node.args if a.cls in self.factors]
        if len({a.cls for a in inner}) < len(inner):
            return False
        terms = [c for a in node.args for c in self.sums.get(a.cls, ())]
        if terms or (node.op == ADD and len(inner) > 1):
            self._add_sum(cls, [*terms, *[a.cls for a in inner]])
            return not node.bound and (node.op == ADD or not inner)
        if node.bound:
            self.products.append(cls)
        elif not inner:
            return True
        made: tuple[Factors, Factors] = ([], [])
        for a in inner if node.op == ADD else node.args:
            to = [names[i] for i in a.axes]
            itself = [(a.cls, identity(len(to)))]
            for found, factors in zip(made, self.factors.get(a.cls, (itself, itself)), strict=True):
                over = [
                    tuple([to[i] if i < FIRST_BOUND else i for i in axes]) for _, axes in factors
                ]
                found += zip([f for f, _ in factors], over, strict=True)
        if len(made[1]) > MOST_FACTORS or _opens_twice(self.factors, inner):
            return False
        self.factors[cls] = made
        if cls in self.roots or cls in self.shared:
            self.tops.append((cls, *made))
            self.factors[cls] = [(cls, identity(node.out))], made[1]
        return True

    def has_summand(self, cls: int, node: Node, values: Mapping[int, _Value | None]) -> bool:
        """Return True for a sum within the region, one of whose terms is an array of its size."""
        if node.op != ADD or len(node.args) < 2 or cls in self.roots:
            return False
        full = [a.cls for a in node.args if len(a.axes) == node.out and values[a.cls] is not None]
        return any(c not in self.factors and c not in self.sums for c in full)

    def _add_sum(self, cls: int, terms: list[int]) -> None:
        """Add a class that is elementwise in a sum of products, each of which is made."""
        self.sums[cls] = terms
        for c in terms:
            if c not in self.roots and c not in self.shared:
                self.tops.append((c, *self.factors[c]))
            self.roots.add(c)

    def moves(self, cls: int, node: Node) -> bool:
        """Return True if no work is saved before or after a slice, concatenation or gather."""
        g, size = self.g, self.model.class_bytes
        products = [a.cls for a in node.args if a.cls in self.factors]
        if node.op == SLICE:
            return self.whole.issuperset(products)
        if node.op == TAKE:
            return not products and size(g, cls) <= size(g, node.args[0].cls)
        return not products and all(node_of(g, a.cls).op != CONST for a in node.args)

    def seconds(self, values: Mapping[int, _Value | None]) -> float | None:
        """Return the seconds of all products in their best orders; None if some might be shared.

        values: of the factors.
        """
        if len(self.products) == 1:
            (c,) = self.products
            return self.model.product_seconds(self.g, c, node_of(self.g, c))
        factors = {f for _, closed, _ in self.tops for f, axes in closed if axes}
        if not self.products or len({self.g.classes[c].dtype for c in factors}) > 1:
            return None
        parts = [
            [(f, v.parts) for f, axes in closed if axes and (v := values[f])]
            for _, closed, _ in self.tops
        ]
        if any(map(_repeats, parts)) or any(starmap(_repeats, combinations(parts, 2))):
            return None
        held = {
            top: frozenset().union(*[p for _, p in of])
            for (top, *_), of in zip(self.tops, parts, strict=True)
        }
        for terms in self.sums.values():
            if any(held[c] & held[other] for c, other in combinations(terms, 2)):
                return None  # a common factor
        ways: dict[int, list[float]] = {}
        for cls, closed, opened in self.tops:
            kept = self._ordered(cls, closed)
            made = kept if closed == opened else self._ordered(cls, opened)
            if kept is None or made is None:
                return None
            ways[cls] = [kept, made]
        return self._least(ways)

    def _least(self, ways: Mapping[int, list[float]]) -> float | None:
        """Return the seconds of all products, those that are read twice stored or made each time.

        ways: by product, its seconds with stored factors, and with all factors opened.
        """
        shared = [c for c in ways if c not in self.roots]
        read = {c: {f for f, _ in closed}.intersection(shared) for c, closed, _ in self.tops}
        if len(shared) > MOST_SHARED:
            return None

        def total(stored: set[int]) -> float:
            made = [c for c in ways if c in self.roots or c in stored]
            return sum([min(ways[c]) if read[c] <= stored else ways[c][1] for c in made])

        choices = product(*[[(), (c,)] for c in shared])
        return min([total(set(chain.from_iterable(choice))) for choice in choices])

    def _ordered(self, cls: int, factors: Factors) -> float | None:
        """Return the seconds of a product in its best order; only sums count."""
        of = self.g.classes[cls]
        sizes: Any = dict(enumerate(of.sizes)) | dict(enumerate(self.sizes, FIRST_BOUND))
        read = sorted({*range(len(of.sizes)), *[i for _, axes in factors for i in axes]})
        bit = {i: 1 << n for n, i in enumerate(read)}
        masks = tuple([sum([bit[i] for i in axes]) for _, axes in factors])
        key = (of.dtype, len(of.sizes), tuple([sizes[i] for i in read]), masks)
        if key not in self.ordered:
            self.ordered[key] = _best_seconds(self.model, *key)
        return self.ordered[key]


def _best_seconds(
    model: CostModel, dtype: str, out: int, sizes: tuple[int, ...], masks: Sequence[int]
) -> float | None:
    """Return the seconds of a product in its best order; None if it has too many orders.

    out: the number of its outputs, the first indices. masks: the indices of each factor.
    """
    size, joins = itemsize(dtype), model.joins(dtype)

    @functools.cache
    def count(mask: int) -> int:
        size = 1
        while mask:
            last = mask.bit_length() - 1
            size *= sizes[last]
            mask ^= 1 << last
        return size

    def seconds(left: int, right: int, kept: int) -> float:
        if not left & right & ~kept:
            return 0.0
        moved = size * (count(left) + count(right)), size * count(kept)
        rows = rows_of(left, right, kept, count)
        return joins(2 * count(left | right), *moved, rows)

    found = best_order(masks, (1 << out) - 1, seconds, Pairs.of(MOST_PAIRS))
    return None if found is None else found[1]


def _repeats(one: Sequence[Parts], other: Sequence[Parts] = ()) -> bool:
    """Return True if a product of two factors may occur twice in a product, or in each of two.

    Values that are parts of one factor alone, or of the same two factors, count as one.
    """
    places: dict[int, list[int]] = {}
    factors = [*one, *other]
    for k, (_, parts) in enumerate(factors):
        for c in parts:
            places.setdefault(c, []).append(k)
    found: set[Any] = set()
    for c, p in places.items():
        if p[0] < len(one) <= p[-1] if other else len(p) > 1:
            names = {factors[k][0] for k in p}
            found.add(names.pop() if len(names) == 1 else tuple(p) if len(p) == 2 else (c,))
    return len(found) > 1


def _opens_twice(factors: Mapping[int, tuple[Factors, Factors]], inner: Sequence[Ref]) -> bool:
    """Return True if two operands are computed from the same product."""
    opened = [i for a in inner for i in {i for _, axes in factors[a.cls][1] for i in axes}]
    return any(n > 1 and i >= FIRST_BOUND for i, n in Counter(opened).items())


def _reads_plainly(axes: tuple[int, ...]) -> bool:
    return len(set(axes)) == len(axes) and min(axes, default=0) >= 0


def _is_full_product(node: Node, values: dict[int, _Value | None]) -> bool:
    """Return True if no summed index of a product could be summed on one side alone."""
    if not is_dot(node) or node.args[0].cls == node.args[1].cls:
        return False
    summed = set(range(node.out, node.out + len(node.bound)))
    return all(values[a.cls] is not None and summed <= set(a.axes) for a in node.args)


def _elementwise(node: Node, values: dict[int, _Value | None]) -> _Value | None:
    """Return an elementwise sum or product; None if no operand has all of its indices."""
    whole = [values[a.cls] for a in node.args if len(a.axes) == node.out]
    full = [v for v in whole if v is not None]
    if not full:
        return None
    read = frozenset().union(*[v.read for v in full])
    parts = frozenset().union(*[v.parts for v in full])
    adds = node.op == ADD and len(node.args) > 1
    return _Value(read, parts, adds or len(full) > 1 or any(v.made for v in full))
