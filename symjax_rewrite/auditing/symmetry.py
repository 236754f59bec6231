"""Symmetry of values under an exchange of two indices: `value(j, i) = ±value(i, j)`.

A value is symmetric by how it is computed, not by its elements: `x_i·x_j`, `|x_i − x_j|`; and
antisymmetric: `x_i − x_j` (Newton's third law).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import ADD, CONTRACT, DELTA, MAP, REDUCE, Node, Ref
from symjax_rewrite.kernel_selection.folds.tile_symmetry import COMMUTING, PARITY

ODD = dict.fromkeys(("neg", "reciprocal", "convert_element_type", "copy"), 1)
MOST_PERMUTED = 3  # bound indices of a product that are tried in every order
MOST_TERMS = 8  # operands of a sum or product that are matched with each other

Sign = int | None  # 1 or -1; None: neither is known


class Parity:
    """The symmetries of the classes of one graph."""

    def __init__(self, g: EGraph) -> None:
        self.g = g
        self._known: dict[tuple[int, tuple[int, ...]], Sign] = {}

    def exchanges(self, cls: int) -> Iterator[tuple[int, int, int]]:
        """Yield pairs of slots of a class, with the sign that their exchange gives it."""
        sizes = self.g.classes[cls].sizes
        for i, j in combinations(range(len(sizes)), 2):
            order = list(range(len(sizes)))
            order[i], order[j] = j, i
            if sizes[i] == sizes[j] and (sign := self.of(cls, tuple(order))) is not None:
                yield i, j, sign

    def of(self, cls: int, order: tuple[int, ...]) -> Sign:
        """Return the sign of a class where slot s reads the index of slot `order[s]`."""
        if order == tuple(range(len(order))):
            return 1
        key = cls, order
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._sign(node_of(self.g, cls), order)
        return self._known[key]

    def _sign(self, node: Node, order: tuple[int, ...]) -> Sign:
        if node.op == DELTA:
            return 1
        if node.op not in (ADD, CONTRACT, MAP, REDUCE):
            return None
        count = len(node.bound)
        bound = range(node.out, node.out + count)
        orders = permutations(bound) if 1 < count <= MOST_PERMUTED else [tuple(bound)]
        for summed in orders:
            if any(node.bound[a - node.out] != n for a, n in zip(summed, node.bound, strict=True)):
                continue
            moved = [a.over([*order, *summed]) for a in node.args]
            if (sign := self._combined(node, moved)) is not None:
                return sign
        return None

    def _combined(self, node: Node, moved: Sequence[Ref]) -> Sign:
        """Return the sign of a node whose operands are exchanged."""
        if len(moved) > MOST_TERMS:
            return None
        if node.op == ADD:
            return next((s for s in (1, -1) if self._pairs(node, moved, s)), None)
        if node.op == CONTRACT:
            return self._product(list(moved), list(node.args))
        signs = [self.same(a, b) for a, b in zip(moved, node.args, strict=True)]
        name = node.attr[0] if node.op == MAP else node.attr
        if None in signs and name in COMMUTING and len(moved) == 2:
            signs = [self.same(a, b) for a, b in zip(moved, reversed(node.args), strict=True)]
        if None in signs:
            return None
        parity = (PARITY | ODD).get(name) if len(signs) == 1 else None
        if all(s == 1 for s in signs) or parity == 0:
            return 1
        return -1 if parity else None

    def _pairs(self, node: Node, moved: Sequence[Ref], sign: int) -> bool:
        """Return True if the exchanged terms of a sum are its terms, times a sign."""
        left: list[tuple[Any, Ref]] = list(zip(node.attr, node.args, strict=True))
        for c, ref in zip(node.attr, moved, strict=True):
            found = (t for t in left if (s := self.same(ref, t[1])) and c * s == sign * t[0])
            pair = next(found, None)
            if pair is None:
                return False
            left.remove(pair)
        return True

    def _product(self, moved: list[Ref], left: list[Ref]) -> Sign:
        total = 1
        for ref in moved:
            found = ((s, k) for k, r in enumerate(left) if (s := self.same(ref, r)) is not None)
            sign, k = next(found, (0, -1))
            if k < 0:
                return None
            total *= sign
            del left[k]
        return total

    def same(self, a: Ref, b: Ref) -> Sign:
        """Return the sign s for which a = s·b, both over the same indices."""
        if a.cls != b.cls or sorted(a.axes) != sorted(b.axes):
            return None
        if a.axes == b.axes:
            return 1
        if len(set(b.axes)) != len(b.axes):
            return None
        return self.of(a.cls, tuple(b.axes.index(i) for i in a.axes))
