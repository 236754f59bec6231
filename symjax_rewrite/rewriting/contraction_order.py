"""The cheapest order of a contraction, by dynamic programming over connected subsets.

It imports nothing of the package. It follows Moerkotte & Neumann, "Analysis of Two Existing and One
New Dynamic Programming Algorithm for the Generation of Optimal Bushy Join Trees without Cross
Products" (VLDB 2006). A chain of n factors has n²/2 connected subsets and n³/6 pairs, so the search
is fast even for a chain of thirty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

MAX_SQUARED = 6  # factors of a product that may be searched for a square
ORDERS = 2  # the pairs for all orders of a region, in multiples of the pairs for one order
Tree = int | tuple["Tree", "Tree"]
CostOf = Callable[[int, int, int], float]  # (left indices, right indices, kept indices) to seconds


class Repeats(NamedTuple):
    """The keys by which products of factors are recognised as equal up to names of indices.

    kinds: for each factor a key; products of factors with other keys differ. form_of: returns a key
    of the product of some factors, summed over all but the kept indices; equal products have equal
    keys.
    """

    kinds: Sequence[Hashable]
    form_of: Callable[[list[int], int], Hashable]


@dataclass(slots=True)
class Pairs:
    """The budget of pairs of subsets: for each order, and for all remaining orders of a region.

    Without the total, a region of many long products would spend the budget of one order on each.
    """

    each: int
    left: int

    @classmethod
    def of(cls, each: int) -> Pairs:
        """Return the budget of a region in which one order may try `each` pairs."""
        return cls(each, ORDERS * each)


def best_order(
    factors: Sequence[int],
    out: int,
    cost_of: CostOf,
    pairs: Pairs,
    free: int = 0,
    repeats: Repeats | None = None,
) -> tuple[Tree, float] | None:
    """Return the cheapest tree over all factors.

    Args:
        factors: for each factor, the bit set of the indices it carries.
        out: the bit set of the output indices.
        cost_of: seconds of one join, from index bit sets.
        pairs: the number of pairs of subsets that may still be tried.
        free: the bit set of factors whose joins among themselves cost nothing (frozen weights).
        repeats: keys that recognise a join of two equal products, which is computed once (AᵀB AᵀB
            is a square). None: no product is recognised.

    Returns:
        The tree (leaves are factor numbers) and its cost; None if the budget is exhausted.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for k, mask in enumerate(factors):
        groups.setdefault((mask, bool(free >> k & 1)), []).append(k)
    if len(groups) == len(factors):
        return _order(factors, out, cost_of, pairs, free, repeats)
    # Factors over the same indices are multiplied first, because the result is no larger than they
    # are.
    members = list(groups.values())
    trees, masks, cost, free = _multiplied(groups, out, cost_of)
    found = _order(masks, out, cost_of, pairs, free, repeats and _grouped(repeats, members))
    return None if found is None else (_put(found[0], trees), found[1] + cost)


def _grouped(repeats: Repeats, members: list[list[int]]) -> Repeats:
    """Return the same keys for groups of factors that are multiplied beforehand."""
    kinds = [tuple(sorted([repeats.kinds[k] for k in ids], key=repr)) for ids in members]
    form_of = repeats.form_of
    return Repeats(
        kinds, lambda inside, kept: form_of([k for n in inside for k in members[n]], kept)
    )


def _multiplied(
    groups: dict[tuple[int, bool], list[int]], out: int, cost_of: CostOf
) -> tuple[list[Tree], list[int], float, int]:
    """Return each group's tree and indices, their total cost, and the bit set of free groups."""
    trees: list[Tree] = []
    masks, cost, free = [], 0.0, 0
    for n, ((mask, is_free), ids) in enumerate(groups.items()):
        outside = out
        for other in groups:
            outside |= other[0] if other != (mask, is_free) else 0
        tree: Tree = ids[0]
        for k in ids[1:]:
            kept = mask & outside if k == ids[-1] else mask
            cost += 0.0 if is_free else cost_of(mask, mask, kept)
            tree = (tree, k)
        trees.append(tree)
        masks.append(mask & outside if len(ids) > 1 else mask)
        free |= is_free << n
    return trees, masks, cost, free


def _put(tree: Tree, leaves: list[Tree]) -> Tree:
    return leaves[tree] if isinstance(tree, int) else (_put(tree[0], leaves), _put(tree[1], leaves))


def _order(
    factors: Sequence[int],
    out: int,
    cost_of: CostOf,
    pairs: Pairs,
    free: int,
    repeats: Repeats | None,
) -> tuple[Tree, float] | None:
    components = _components(factors)
    solved: list[tuple[Tree, int, float]] = []
    for members in components:
        found = _connected_order(factors, members, out, cost_of, pairs, free, repeats)
        if found is None:
            return None
        solved.append(found)
    solved.sort(key=lambda t: bin(t[1]).count("1"))
    tree, indices, total = solved[0]
    for other, more, cost in solved[1:]:
        kept = (indices | more) & out
        total += cost + cost_of(indices, more, kept)
        tree, indices = (tree, other), kept
    return tree, total


def _components(factors: Sequence[int]) -> list[int]:
    left = list(range(len(factors)))
    out = []
    while left:
        members, indices = 1 << left[0], factors[left[0]]
        grew = True
        while grew:
            grew = False
            for k in left:
                if not members >> k & 1 and factors[k] & indices:
                    members |= 1 << k
                    indices |= factors[k]
                    grew = True
        left = [k for k in left if not members >> k & 1]
        out.append(members)
    return out


class _Subsets:
    """The index bit sets of subsets of factors, each computed once."""

    def __init__(self, local: list[int], out: int) -> None:
        self.local, self.out = local, out
        self.full = (1 << len(local)) - 1
        self._union: dict[int, int] = {1 << i: mask for i, mask in enumerate(local)}
        self._kept: dict[int, int] = {}

    def union(self, subset: int) -> int:
        """Return every index of the subset."""
        got = self._union.get(subset)
        if got is None:
            low = subset & -subset
            got = self._union[subset] = self._union[low] | self.union(subset ^ low)
        return got

    def kept(self, subset: int) -> int:
        """Return the indices that the output or a factor outside the subset reads."""
        got = self._kept.get(subset)
        if got is None:
            rest = self.full ^ subset
            outside = self.out | (self.union(rest) if rest else 0)
            got = self._kept[subset] = self.union(subset) & outside
        return got


class _Squares:
    """The pairs of subsets with equal products: of repeated factors, at the same positions."""

    def __init__(self, subsets: _Subsets, ids: list[int], repeats: Repeats) -> None:
        self.subsets, self.ids, self.repeats = subsets, ids, repeats
        kinds = [repeats.kinds[k] for k in ids]
        number = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        self.kinds = [number[kind] for kind in kinds]
        count = Counter(self.kinds)
        self.single = sum(1 << i for i, kind in enumerate(self.kinds) if count[kind] == 1)
        self._forms: dict[int, Hashable] = {}

    def is_one(self, left: int, right: int) -> bool:
        """Return True if two subsets that sum over an index have one product."""
        count = left.bit_count()
        if (left | right) & self.single or count != right.bit_count() or count > MAX_SQUARED:
            return False
        if self._kinds_of(left) != self._kinds_of(right):
            return False
        if self.subsets.union(left) == self.subsets.kept(left):
            return False
        return self._form(left) == self._form(right)

    def _kinds_of(self, subset: int) -> list[int]:
        return sorted([kind for i, kind in enumerate(self.kinds) if subset >> i & 1])

    def _form(self, subset: int) -> Hashable:
        if subset not in self._forms:
            inside = [k for i, k in enumerate(self.ids) if subset >> i & 1]
            self._forms[subset] = self.repeats.form_of(inside, self.subsets.kept(subset))
        return self._forms[subset]


def _connected_order(
    factors: Sequence[int],
    members: int,
    out: int,
    cost_of: CostOf,
    pairs: Pairs,
    free: int,
    repeats: Repeats | None,
) -> tuple[Tree, int, float] | None:
    ids = [k for k in range(len(factors)) if members >> k & 1]
    n = len(ids)
    free = sum(1 << i for i, k in enumerate(ids) if free >> k & 1)
    if n == 1:
        return ids[0], factors[ids[0]] & out, 0.0
    local = [factors[k] for k in ids]
    neighbours = [sum(1 << j for j in range(n) if j != i and local[i] & local[j]) for i in range(n)]
    most = min(pairs.each, pairs.left)
    found = list(islice(_connected_pairs(n, neighbours), most + 1))
    pairs.left -= len(found)
    if len(found) > most:
        return None
    found.sort()
    subsets = _Subsets(local, out)
    squares = None if repeats is None else _Squares(subsets, ids, repeats)
    kept = {1 << i: subsets.kept(1 << i) for i in range(n)}
    best: dict[int, tuple[float, Tree]] = {1 << i: (0.0, ids[i]) for i in range(n)}
    for both, left, right in found:
        a, b = best[left], best[right]
        once = squares is not None and squares.is_one(left, right)
        total = a[0] if once else a[0] + b[0]
        known = best.get(both)
        if known is None:
            kept[both] = subsets.kept(both)
        elif known[0] <= total:
            continue
        if both & ~free:
            total += cost_of(kept[left], kept[right], kept[both])
        if known is None or total < known[0]:
            best[both] = (total, (a[1], b[1]))
    cost, tree = best[subsets.full]
    return tree, kept[subsets.full], cost


def _connected_pairs(n: int, neighbours: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield every pair of disjoint connected subsets joined by an edge, once, after their union.

    In sorted order, each pair comes after the pairs that form either side, because the bit set of a
    proper subset is a smaller number.
    """
    around = {0: 0}

    def touched(subset: int) -> int:
        got = around.get(subset)
        if got is None:
            low = subset & -subset
            got = around[subset] = touched(subset ^ low) | neighbours[low.bit_length() - 1]
        return got

    def grown(subset: int, banned: int) -> Iterator[int]:
        """Yield the subset, and every connected superset of it without banned factors."""
        yield subset
        stack = [(subset, banned | subset)]
        while stack:
            inside, banned = stack.pop()
            sub = fringe = touched(inside) & ~banned
            banned |= fringe
            while sub:
                more = inside | sub
                yield more
                stack.append((more, banned))
                sub = (sub - 1) & fringe

    for i in range(n):
        low = 1 << i
        for subset in grown(low, low - 1):
            banned = low - 1 | subset
            rest = fringe = touched(subset) & ~banned
            while rest:
                first = rest & -rest
                rest ^= first
                for other in grown(first, banned | fringe & (first - 1)):
                    yield subset | other, subset, other
