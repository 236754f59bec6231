"""Sums of products: a reference multiplied out over the indices that it is read at.

    (a + 2·b)[i, j] · c[i]  →  1·a[i, j]·c[i] + 2·b[i, j]·c[i]

A recogniser supplies predicates that permit (`opens`) or refuse (`keeps`) an expansion, and its own
interpretation of the terms. Indices are the numbers that the caller gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, Node, Ref, over


class ProductTerm(NamedTuple):
    """coefficient · Π factors."""

    coefficient: float
    factors: tuple[Ref, ...]

    def times(self, other: ProductTerm) -> ProductTerm:
        """Return the product of two terms, the factors of this one first."""
        return ProductTerm(self.coefficient * other.coefficient, self.factors + other.factors)


@dataclass(slots=True)
class SumOfProducts:
    """The expansion of references into sums of products.

    Expanded are constants, sums with real coefficients, products without bound indices, and maps of
    one operand that are read as this operand (casts). Any other reference is a factor. So is a
    reference whose expansion gives too many terms or factors, or is nested too deeply.

    opens: True if a reference, with its class's original node, may be expanded.
    keeps: True if an expansion into some terms is accepted; None accepts every expansion.
    opened: the classes that were expanded.
    """

    g: EGraph
    opens: Callable[[Ref, Node], bool]
    keeps: Callable[[SumOfProducts, Ref, Node, list[ProductTerm]], bool] | None = None
    most_terms: int = 8
    most_factors: int = 64
    most_depth: int = 100
    opened: set[int] = field(default_factory=set)
    known: dict[Ref, list[ProductTerm]] = field(default_factory=dict)
    depth: int = 0

    def terms(self, ref: Ref) -> list[ProductTerm]:
        """Return the terms of a reference; itself alone if it is not expanded."""
        found = self.known.get(ref)
        if found is None:
            self.depth += 1
            found = self._opened(ref)
            self.depth -= 1
            if found is None:
                found = [ProductTerm(1, (ref,))]
            else:
                self.opened.add(ref.cls)
            self.known[ref] = found
        return found

    def is_factor(self, ref: Ref) -> bool:
        """Return True if a reference is not expanded."""
        return self.terms(ref) == [ProductTerm(1, (ref,))]

    def product(self, refs: Iterable[Ref]) -> list[ProductTerm] | None:
        """Return the terms of a product of references; None if there are too many."""
        out = [ProductTerm(1, ())]
        for ref in refs:
            terms = self.terms(ref)
            out = [a.times(b) for a in out for b in terms]
            if len(out) > self.most_terms or any(len(t.factors) > self.most_factors for t in out):
                return None
        return out

    def _opened(self, ref: Ref) -> list[ProductTerm] | None:
        node = self.g.classes[ref.cls].first
        if self.depth > self.most_depth or not self.opens(ref, node):
            return None
        found = self._of_node(ref, node)
        if found is None or (self.keeps is not None and not self.keeps(self, ref, node, found)):
            return None
        return found

    def _of_node(self, ref: Ref, node: Node) -> list[ProductTerm] | None:
        if node.op == CONST:
            return [ProductTerm(float(node.attr[0]), ())]
        if node.op == ADD:
            return self._sum(ref, node)
        args = [over(ref, a) for a in node.args]
        return self.product(args) if node.op == CONTRACT else self.terms(args[0])

    def _sum(self, ref: Ref, node: Node) -> list[ProductTerm] | None:
        if any(isinstance(c, complex) for c in node.attr):
            return None
        out: list[ProductTerm] = []
        for coefficient, arg in zip(node.attr, node.args, strict=True):
            scale = ProductTerm(float(coefficient), ())
            out += [scale.times(t) for t in self.terms(over(ref, arg))]
        return out if len(out) <= self.most_terms else None
