"""Conditions under which a sum may be opened: distributed, or flattened into another sum.

If terms of a sum cancel, the error of the opened sum may be large relative to its value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable
from itertools import chain
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import cone, reaches
from symjax_rewrite.ir.index_tests import index_of, indicated
from symjax_rewrite.ir.products import Product, flattest, product_node
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, DELTA, MAP, Node, Ref
from symjax_rewrite.ir.value_analysis import nonnegative
from symjax_rewrite.rewriting.product_trees import read_deltas
from symjax_rewrite.rewriting.rule import RuleContext

MOST_MEETINGS = 64  # of the diagonals of a sum, each of which is tried


def sum_node(ctx: RuleContext, cls: int) -> Node | None:
    """Return the flattest sum of at least two terms in a class; None if it must stay whole."""
    if ctx.is_whole(cls):
        return None
    sums = [n for n in ctx.g.nodes(cls, ADD) if len(n.args) > 1]
    return max(sums, key=lambda n: len(n.args), default=None)


def is_sum_of_products(ctx: RuleContext, cls: int) -> bool:
    """Return True if a class is a contraction over bound indices."""
    return any(n.bound for n in ctx.g.nodes(cls, CONTRACT))


def is_safe(ctx: RuleContext, cls: int, total: Node) -> bool:
    """Return True if the terms have one sign, or all but one contract over the full index space.

    The other term may be broadcast over indices it does not read (one weight, many adapters).
    """
    if cannot_cancel(ctx, cls, total):
        return True
    sizes = ctx.g.classes[cls].sizes
    rounded = [a for a in total.args if is_rounded(ctx, a.cls)]
    if any(len(set(a.axes)) < len(sizes) for a in rounded):
        return False
    return len(total.args) - len(rounded) <= 1 and not _share_products(ctx, rounded, total.args)


def _share_products(ctx: RuleContext, rounded: list[Ref], terms: tuple[Ref, ...]) -> bool:
    """Return True if a product opened for one term is computed for another term too.

    As written, both terms read one rounded value of the product. Terms that cancel then do so for
    any rounding error of that value (`1/p − p·p⁻²` is 0). Distributed, the opened product has a
    rounding error of its own. A product and its transpose (P + Pᵀ) read other elements of it, and
    both are opened.
    """

    def factors(cls: int) -> list[int]:
        node = product_node(ctx.g, cls)
        return [ctx.g.find(a).cls for a in node.args] if node else []

    for a in rounded:
        opened = {c for c in cone([a.cls], factors) if product_node(ctx.g, c)}
        if is_computed_for(ctx, opened, [b.cls for b in terms if b.cls != a.cls]):
            return True
    return False


def is_computed_for(ctx: RuleContext, values: Container[int], classes: Iterable[int]) -> bool:
    """Return True if a class is one of some values, or is computed from one, as first written."""

    def operands(cls: int) -> list[int]:
        return [ctx.g.find(a).cls for a in ctx.g.classes[cls].first.args]

    return reaches(classes, operands, values)


def cannot_cancel(ctx: RuleContext, cls: int, total: Node) -> bool:
    """Return True if the terms of a sum have one sign, or if the numerics level permits it."""
    if ctx.permits("cancels", ctx.g.classes[cls].dtype):
        return True
    signs = {not isinstance(k, complex) and k > 0 for k in total.attr}
    return len(signs) == 1 and all(nonnegative(ctx.g, a.cls) for a in total.args)


def moves_rows(p: Product, f: Ref) -> bool:
    """Return True if a product is a matrix f times an operand, and keeps the operand's size.

    A trace of products does not: a small result of f may be multiplied before the sum.
    """
    if len(p.factors) != 2 or len(p.bound) != 1 or len(set(f.axes)) != len(f.axes):
        return False
    other = next((x for x in p.factors if x is not f), f)
    free = [i for i in f.axes if i < p.out]
    return p.out in f.axes and p.out in other.axes and not set(free) & set(other.axes)


def keeps_its_size(ctx: RuleContext, total: Node) -> bool:
    """Return True if a sum of numbers and diagonals is at least half its terms: I − 11ᵀ/n, n > 2.

    Diagonals of the same two indices at different offsets never meet: I − S, for a shift S.
    """
    steady: list[Any] = []
    diagonals: dict[tuple[int, int], dict[int, list[Any]]] = {}
    for k, a in zip(total.attr, total.args, strict=True):
        numbers = [n.attr[0] for n in ctx.g.nodes(a.cls, CONST)]
        numbers = [x for x in numbers if isinstance(x, (int, float))]
        diagonal = diagonal_of(ctx, a)
        if isinstance(k, complex) or not (numbers or diagonal):
            return False
        if diagonal is None:
            steady.append(k * numbers[0])
        else:
            at = diagonals.setdefault((diagonal.i, diagonal.j), {})
            at.setdefault(diagonal.offset, []).append(k * diagonal.value)
    met = [((), *at.values()) for at in diagonals.values()]
    if math.prod(map(len, met)) > MOST_MEETINGS:
        return False
    sums = [[*steady, *chain.from_iterable(some)] for some in itertools.product(*met)]
    return all(abs(sum(values)) >= 0.5 * sum(map(abs, values)) for values in sums)


class Diagonal(NamedTuple):
    """A value where i = j + offset, i < j, and 0 elsewhere."""

    value: float
    i: int
    j: int
    offset: int


def diagonal_of(ctx: RuleContext, ref: Ref) -> Diagonal | None:
    """Return the diagonal that a term is (an identity, a shift, or a multiple), or None."""
    p = flattest(ctx.g, ref.cls)
    if len(p.factors) != 1 or p.bound or p.scales or isinstance(p.coefficient, complex):
        return None
    f = p.factors[0].over(ref.axes)
    if ctx.has(f.cls, DELTA):
        return _diagonal(p.coefficient, (f.axes[0], 0), (f.axes[1], 0))
    for test in indicated(ctx.g, f):
        left, right = index_of(ctx.g, test.left), index_of(ctx.g, test.right)
        if left and right and test.kind == "eq" and not test.negated:
            return _diagonal(p.coefficient, left, right)
    return None


def _diagonal(value: float, left: tuple[int, int], right: tuple[int, int]) -> Diagonal | None:
    """Return a value where `i + a = j + b`."""
    (i, a), (j, b) = sorted([left, right])
    return Diagonal(value, i, j, b - a) if i != j else None


def is_rounded(ctx: RuleContext, cls: int) -> bool:
    """Return True if a class is a sum of products, whose rounding error is relative to its size.

    An outer product counts as a sum of products of rank one. A selection of single values (a
    diagonal, one-hot labels) rounds nothing. A diagonal between two matrices scales the summed
    terms.
    """
    p = read_deltas(ctx, flattest(ctx.g, cls))
    thin = len(p.factors) > 1 and ctx.elements(cls) > sum(ctx.elements(f.cls) for f in p.factors)
    return (bool(p.bound) or thin) and not any(_picks(ctx, f.cls) for f in p.factors)


def _picks(ctx: RuleContext, cls: int) -> bool:
    args = [n.args[0] for n in ctx.g.nodes(cls, MAP) if n.args]
    return ctx.has(cls, DELTA) or any(ctx.g.classes[a.cls].dtype == "bool" for a in args)
