"""Gradients through a row's maximum that are zero in exact arithmetic.

A softmax does not depend on its shift, so the derivative by the maximum is a sum that cancels. The
program as written spreads this sum over the positions of the maximum. The cancellation is proved
here from Σ(a+b) = Σa + Σb and Σ r·a = r·Σa alone. A fold then omits the sum, and no tile is
compared with its own maximum.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import Needed, live_classes, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP, Node, Ref, over
from symjax_rewrite.kernel_selection.folds.extremum_ties import is_tie

MAX_TERMS = 32  # limit on terms of an expanded sum
MAX_DEPTH = 40
MOST_FLAT = 3  # limit on indices of nested sums merged into one sum

Monomial = frozenset  # of (factor, power)
Sum = dict[Any, float]  # monomial: coefficient


class Whole(NamedTuple):
    """Denominator that is a sum and is not expanded."""

    ref: Ref


class TooLargeError(Exception):
    """Expansion with more than `MAX_TERMS` terms (internal)."""


def vanishing(g: EGraph, need: Needed) -> set[int]:
    """Return the classes that spread a vanishing derivative over the positions of a maximum."""
    out: set[int] = set()
    for cls in need.order:
        node = node_of(g, cls)
        if dtype_kind(g.classes[cls].dtype) != "f" or node.bound:
            continue
        if node.op == MAP and node.attr[0] == "div" and _is_tie_count(g, node.args[1].cls):
            if _cancels(g, node.args[0]):
                out.add(cls)
        elif node.op == CONTRACT:
            gone = [a for a in node.args if a.cls in out]
            rest = [a for a in node.args if a.cls not in out]
            if (gone and all(is_tie(g, a.cls) for a in rest)) or _spread(g, node):
                out.add(cls)
    return out


def _spread(g: EGraph, node: Node) -> bool:
    """Return True for a vanishing sum times the reciprocal of a count of ties."""
    counts = [a for a in node.args if _is_reciprocal_count(g, a.cls)]
    rest = [a for a in node.args if a not in counts]
    return bool(counts) and any(_cancels(g, a) for a in rest if node_of(g, a.cls).op != MAP)


def _is_reciprocal_count(g: EGraph, cls: int) -> bool:
    node = node_of(g, cls)
    return node.op == MAP and node.attr[0] == "reciprocal" and _is_tie_count(g, node.args[0].cls)


def _is_tie_count(g: EGraph, cls: int) -> bool:
    """Return True if a class counts the positions of a maximum along a row (at least one)."""
    node = node_of(g, cls)
    return node.op == CONTRACT and len(node.args) == 1 and is_tie(g, node.args[0].cls)


def _cancels(g: EGraph, ref: Ref) -> bool:
    if node_of(g, ref.cls).op not in (ADD, CONTRACT):
        return False
    try:
        return not _cleared(g, _multiplied_out(g, ref, MAX_DEPTH))
    except TooLargeError:
        return False


def _cleared(g: EGraph, terms: Sum) -> Sum:
    """Return the terms multiplied by the sums in their denominators, expanded."""
    while True:
        least: dict[Whole, Fraction] = {}
        for m in terms:
            for f, p in m:
                if isinstance(f, Whole):
                    least[f] = min(p, least.get(f, Fraction(0)))
        below = next((f for f, p in least.items() if p < 0), None)
        if below is None:
            return terms
        inside = _multiplied_out(g, below.ref, MAX_DEPTH)
        cleared: Sum = {}
        for m, k in terms.items():
            power = next((p for f, p in m if f == below), Fraction(0)) - least[below]
            product: Sum = {Monomial((f, p) for f, p in m if f != below): k}
            for _ in range(int(power)):
                product = _times(product, inside)
            for n, j in product.items():
                _put(cleared, n, j)
        terms = cleared


def _multiplied_out(g: EGraph, ref: Ref, depth: int) -> Sum:
    """Expand a reference into a sum of products."""
    if depth == 0:
        raise TooLargeError
    node = node_of(g, ref.cls)
    if node.op == ADD and not any(isinstance(c, complex) for c in node.attr):
        total: Sum = {}
        for c, a in zip(node.attr, node.args, strict=True):
            for m, k in _multiplied_out(g, over(ref, a), depth - 1).items():
                _put(total, m, float(c) * k)
        return total
    if node.op == CONTRACT:
        tokens = tuple(("bound", ref, k) for k in range(len(node.bound)))
        axes: Any = (*ref.axes, *tokens)
        inner = Ref(ref.cls, axes)
        product: Sum = {Monomial(): 1.0}
        for a in node.args:
            product = _times(product, _multiplied_out(g, over(inner, a), depth - 1))
        return _summed(product, tokens) if tokens else product
    if node.op == MAP and node.attr[0] in ("reciprocal", "integer_pow"):
        power = -1 if node.attr[0] == "reciprocal" else int(dict(node.attr[1])["y"])
        below = _multiplied_out(g, over(ref, node.args[0]), depth - 1)
        if len(below) == 1:
            ((m, k),) = below.items()
            return {Monomial((f, p * power) for f, p in m): k**power}
        if power < 0:
            return {Monomial([(Whole(over(ref, node.args[0])), Fraction(power))]): 1.0}
    if node.op == MAP and node.attr[0] == "div":
        top, bottom = (_multiplied_out(g, over(ref, a), depth - 1) for a in node.args)
        if len(bottom) == 1:
            ((m, k),) = bottom.items()
            return _times(top, {Monomial((f, -p) for f, p in m): 1 / k})
        below = Whole(over(ref, node.args[1]))
        return _times(top, {Monomial([(below, Fraction(-1))]): 1.0})
    return {Monomial([(ref, Fraction(1))]): 1.0}


def _put(total: Sum, m: Any, k: float) -> None:
    """Add a term; drop it if the coefficients cancel up to rounding."""
    old = total.pop(m, 0.0)
    if abs(old + k) > 1e-9 * max(abs(old), abs(k)):
        total[m] = old + k
    if len(total) > MAX_TERMS:
        raise TooLargeError


def _times(a: Sum, b: Sum) -> Sum:
    out: Sum = {}
    for m, k in a.items():
        for n, j in b.items():
            powers = dict(m)
            for f, p in n:
                powers[f] = powers.get(f, Fraction(0)) + p
            _put(out, Monomial((f, p) for f, p in powers.items() if p), k * j)
    return out


def _summed(product: Sum, tokens: tuple) -> Sum:
    """Sum over bound indices; move factors that lack them outside; merge equal sums."""
    out: Sum = {}
    for m, k in product.items():
        inside = [(f, p) for f, p in m if _reads(f, tokens)]
        outside = [(f, p) for f, p in m if not _reads(f, tokens)]
        powers = dict(outside)
        total = _flat(inside, tokens)
        powers[total] = powers.get(total, 0) + 1
        _put(out, Monomial((f, p) for f, p in powers.items() if p), k)
    return out


def _flat(inside: list[tuple[Any, Fraction]], tokens: tuple) -> tuple:
    """Merge Σ a·(Σ b·c) into one sum of a·b·c, in a canonical order."""
    indices, powers = list(tokens), {}
    for f, p in inside:
        inner = [(f, p)]
        if not isinstance(f, (Ref, Whole)) and p == 1 and len(indices) + f[1] <= MOST_FLAT:
            fresh = {_name(f[3], n): ("flat", len(indices) + n) for n in range(f[1])}
            indices += fresh.values()
            inner = [(_renamed(g, fresh), q) for g, q in f[2]]
        for g, q in inner:
            powers[g] = powers.get(g, Fraction(0)) + q
    level = 1 + max((f[3] for f in powers if not isinstance(f, (Ref, Whole))), default=0)
    best: Any = None
    for order in permutations(indices) if len(indices) <= MOST_FLAT else [indices]:
        name = {token: _name(level, n) for n, token in enumerate(order)}
        renamed = [(_renamed(f, name), p) for f, p in powers.items() if p]
        key = sorted(map(repr, renamed))
        if best is None or key < best[0]:
            best = (key, Monomial(renamed))
    return ("sum", len(indices), best[1], level)


def _name(level: int, number: int) -> str:
    """Return the name of a sum's index; nested sums have lower levels, and so other names."""
    return f"#{level}.{number}"


def _reads(factor: Any, tokens: tuple) -> bool:
    if isinstance(factor, Whole):
        factor = factor.ref
    if isinstance(factor, Ref):
        return any(i in tokens for i in factor.axes)
    return any(_reads(f, tokens) for f, _ in factor[2])


def _renamed(factor: Any, name: dict) -> Any:
    if isinstance(factor, Whole):
        return Whole(_renamed(factor.ref, name))
    if isinstance(factor, Ref):
        return Ref(factor.cls, tuple([name.get(i, i) for i in factor.axes]))
    inside = Monomial((_renamed(f, name), p) for f, p in factor[2])
    return ("sum", factor[1], inside, factor[3])


def without(g: EGraph, need: Needed, gone: frozenset[int]) -> Needed:
    """Return the live set where sums leave out the classes in `gone`."""

    def operands(cls: int) -> list[int]:
        node = node_of(g, cls)
        left_out = gone if node.op == ADD and len(node.args) > 1 else ()
        return [a.cls for a in node.args if a.cls not in left_out]

    return live_classes(need.outside, operands)
