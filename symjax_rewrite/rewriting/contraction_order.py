"""The cheapest order of a contraction, by dynamic programming over connected subsets.

It imports nothing of the package. It follows Moerkotte & Neumann, "Analysis of Two Existing and One
New Dynamic Programming Algorithm for the Generation of Optimal Bushy Join Trees without Cross
Products" (VLDB 2006). A chain of n factors has n²/2 connected subsets and n³/6 pairs, so the search
is fast even for a chain of thirty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import or_
from typing import NamedTuple

MAX_SQUARED = 8  # factors of a product that may be searched for a square
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

    def grouped(self, members: list[list[int]]) -> Repeats:
        """Return the same keys for groups of factors that are multiplied beforehand."""
        kinds = [tuple(sorted([self.kinds[k] for k in ids], key=repr)) for ids in members]
        form_of = self.form_of
        return Repeats(
            kinds, lambda inside, kept: form_of([k for n in inside for k in members[n]], kept)
        )


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
    least: float = 0.0,
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
        least: seconds that every join costs at least that sums over an index.

    Returns:
        The tree (leaves are factor numbers) and its cost; None if the budget is exhausted.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for k, mask in enumerate(factors):
        groups.setdefault((mask, bool(free >> k & 1)), []).append(k)
    search = _Orders(factors, out, cost_of, pairs, free, repeats, least)
    if len(groups) == len(factors):
        return search.order()
    # Factors over the same indices are multiplied first, because the result is no larger than they
    # are.
    trees, search, cost = _multiplied(groups, search)
    found = search.order()
    return None if found is None else (renumbered(found[0], trees), found[1] + cost)


def _multiplied(
    groups: dict[tuple[int, bool], list[int]], search: _Orders
) -> tuple[list[Tree], _Orders, float]:
    """Return each group's tree, the search for an order of the groups, and the trees' cost."""
    trees: list[Tree] = []
    masks, cost, free = [], 0.0, 0
    for n, ((mask, is_free), ids) in enumerate(groups.items()):
        others = [other for other, _ in groups if (other, _) != (mask, is_free)]
        kept = mask & functools.reduce(or_, others, search.out)
        tree: Tree = ids[0]
        for k in ids[1:]:
            cost += 0.0 if is_free else search.cost_of(mask, mask, kept if k == ids[-1] else mask)
            tree = (tree, k)
        trees.append(tree)
        masks.append(kept if len(ids) > 1 else mask)
        free |= is_free << n
    repeats = search.repeats and search.repeats.grouped(list(groups.values()))
    return trees, replace(search, factors=masks, free=free, repeats=repeats), cost


def renumbered(tree: Tree, leaves: Sequence[Tree]) -> Tree:
    """Return a tree with each leaf replaced."""
    if isinstance(tree, int):
        return leaves[tree]
    return renumbered(tree[0], leaves), renumbered(tree[1], leaves)


@dataclass(frozen=True, slots=True)
class _Orders:
    """The search of `best_order`; fields are its arguments."""

    factors: Sequence[int]
    out: int
    cost_of: CostOf
    pairs: Pairs
    free: int
    repeats: Repeats | None
    least: float

    def order(self) -> tuple[Tree, float] | None:
        """Return the cheapest tree over all factors and its cost; None if the budget ran out."""
        solved: list[tuple[Tree, int, float]] = []
        for members in _components(self.factors):
            found = self._connected(members)
            if found is None:
                return None
            solved.append(found)
        solved.sort(key=lambda t: t[1].bit_count())
        tree, indices, total = solved[0]
        for other, more, cost in solved[1:]:
            kept = (indices | more) & self.out
            total += cost + self.cost_of(indices, more, kept)
            tree, indices = (tree, other), kept
        return tree, total

    def _connected(self, ids: list[int]) -> tuple[Tree, int, float] | None:
        """Return the cheapest tree over factors that are connected, its indices and its cost."""
        n, local = len(ids), [self.factors[k] for k in ids]
        free = sum(1 << i for i, k in enumerate(ids) if self.free >> k & 1)
        if n == 1:
            return ids[0], local[0] & self.out, 0.0
        most = min(self.pairs.each, self.pairs.left)
        if n == 2 and most > 0:  # one order: most products have two factors
            self.pairs.left -= 1
            (a, b), both = local, (local[0] | local[1]) & self.out
            left, right = a & (self.out | b), b & (self.out | a)
            return (ids[0], ids[1]), both, 0.0 if free == 3 else self.cost_of(left, right, both)
        found = list(islice(_connected_pairs(local), most + 1))
        self.pairs.left -= len(found)
        if len(found) > most:
            return None
        found.sort()
        kept_of, is_square = self._subsets(ids, local)
        kept = {1 << i: kept_of(1 << i) for i in range(n)}
        best: dict[int, tuple[float, Tree]] = {1 << i: (0.0, ids[i]) for i in range(n)}
        for both, left, right in found:
            a, b = best[left], best[right]
            once = is_square is not None and is_square(left, right)
            total = a[0] if once else a[0] + b[0]
            known = best.get(both)
            if known is None:
                kept[both] = kept_of(both)
            elif known[0] <= total:
                continue
            if both & ~free:
                mine, other, rest = kept[left], kept[right], kept[both]
                if known is not None and known[0] <= total + self.least and mine & other & ~rest:
                    continue
                total += self.cost_of(mine, other, rest)
            if known is None or total < known[0]:
                best[both] = (total, (a[1], b[1]))
        full = (1 << n) - 1
        cost, tree = best[full]
        return tree, kept[full], cost

    def _subsets(
        self, ids: list[int], local: list[int]
    ) -> tuple[Callable[[int], int], Callable[[int, int], bool] | None]:
        """Return functions of subsets of factors: the kept indices, and if two are one product."""
        full, union = (1 << len(local)) - 1, _unions(local)

        @functools.cache
        def kept(subset: int) -> int:
            return union(subset) & (self.out | union(full ^ subset))

        if self.repeats is None:
            return kept, None
        kinds, form_of = [self.repeats.kinds[k] for k in ids], self.repeats.form_of
        number = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        single = sum(1 << i for i, kind in enumerate(kinds) if kinds.count(kind) == 1)

        @functools.cache
        def kinds_of(subset: int) -> list[int]:
            return sorted([number[kind] for i, kind in enumerate(kinds) if subset >> i & 1])

        @functools.cache
        def form(subset: int) -> Hashable:
            return form_of([k for i, k in enumerate(ids) if subset >> i & 1], kept(subset))

        def is_square(left: int, right: int) -> bool:
            """Return True if two subsets that sum over an index have one product."""
            count = left.bit_count()
            if (left | right) & single or count != right.bit_count() or count > MAX_SQUARED:
                return False
            summed = union(left) != kept(left)
            return summed and kinds_of(left) == kinds_of(right) and form(left) == form(right)

        return kept, is_square


def _unions(masks: Sequence[int]) -> Callable[[int], int]:
    """Return a function of a subset of some masks, as a bit set, that gives their union."""

    @functools.cache
    def union(subset: int) -> int:
        low = subset & -subset
        return union(subset ^ low) | masks[low.bit_length() - 1] if subset else 0

    return union


def _components(factors: Sequence[int]) -> list[list[int]]:
    """Return the factors in groups that share indices, directly or through other factors."""
    left = list(range(len(factors)))
    out = []
    while left:
        indices, before = factors[left[0]], -1
        while indices != before:
            before = indices
            for k in left:
                indices |= factors[k] if factors[k] & indices else 0
        out.append([k for k in left if factors[k] & indices or k == left[0]])
        left = [k for k in left if k not in out[-1]]
    return out


def _connected_pairs(factors: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield every pair of disjoint connected subsets joined by an edge, once, after their union.

    In sorted order, each pair comes after the pairs that form either side, because the bit set of a
    proper subset is a smaller number.
    """
    n = len(factors)
    edges = [
        sum(1 << j for j in range(n) if j != i and f & factors[j]) for i, f in enumerate(factors)
    ]
    touched = _unions(edges)

    def grown(factor: int, banned: int) -> Iterator[tuple[int, int]]:
        """Yield every connected set of a factor and others that are not banned.

        The second of each pair is the set of all factors that share an index with one of the set.
        """
        near = edges[factor.bit_length() - 1]
        yield factor, near
        stack = [(factor, near, banned | factor)]
        while stack:
            inside, near, banned = stack.pop()
            sub = fringe = near & ~banned
            banned |= fringe
            while sub:
                more = inside | sub, near | touched(sub)
                yield more
                stack.append((*more, banned))
                sub = (sub - 1) & fringe

    for i in range(n):
        low = 1 << i
        for subset, near in grown(low, low - 1):
            banned = low - 1 | subset
            rest = fringe = near & ~banned
            while rest:
                first = rest & -rest
                rest ^= first
                for other, _ in grown(first, banned | fringe & (first - 1)):
                    yield subset | other, subset, other


def rows_of(left: int, right: int, kept: int, count: Callable[[int], float]) -> float:
    """Return the length of a product's longest axis, times its batch; 0 beside a vector.

    left, right, kept: indices of the operands and of the result, as masks. count: the number of
    elements over some indices.
    """
    free = count(kept & ~left), count(kept & ~right)
    if min(free) <= 1:
        return 0.0
    return count(left & right & kept) * max(*free, count(left & right & ~kept))
