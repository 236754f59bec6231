"""Symbols of the gradient of plain attention, for rows and for tiles.

A value is a sum of monomials in e^s, dp, e^max and in the sums of a row

    total = Σ e^(s - max)      dotted = Σ e^(s - max)·dp      weighted = Σ e^(s - max)·v

or it is an exponent: s and multiples of max and of log(total). An operation without a rule gives no
symbol (`pallas_kernels/fold/plain_attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Node
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.pallas_kernels.fold.plain_attention import (
    HALVES,
    IS_FINITE,
    TILE_RULES,
    Rules,
    Scores,
    Symbol,
    VisiblePairs,
    converted,
    known_number,
    scaled,
)


class Powers(NamedTuple):
    """The powers of a monomial."""

    score: int = 0
    upstream: int = 0
    top: int = 0
    total: int = 0
    dotted: int = 0
    weighted: int = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """The symbol of a sum of monomials, with their coefficients."""

    terms: tuple[tuple[Powers, float], ...]

    def is_close(self, other: Symbol) -> bool:
        """Return True if two sums differ by the rounding of constants alone."""
        if not isinstance(other, Weights):
            return False
        mine, theirs = dict(self.terms), dict(other.terms)
        alike = (math.isclose(c, theirs[p], rel_tol=1e-5) for p, c in mine.items() if p in theirs)
        return mine.keys() == theirs.keys() and all(alike)


@dataclass(frozen=True, slots=True)
class Exponent:
    """The symbol `s + top·max + total·log(total)`; without s if `score` is False."""

    score: bool = False
    top: float = 0.0
    total: float = 0.0


MAXIMUM = Exponent(top=1.0)
RowSymbol = tuple[Symbol, tuple[str, ...]]  # with the axis of each slot of the class


def monomial(coefficient: float = 1.0, **powers: int) -> Weights:
    """Return the symbol of one monomial."""
    return Weights(((Powers(**powers), coefficient),))


def probability(coefficient: float = 1.0) -> Weights:
    """Return the symbol of the softmax, times a number."""
    return monomial(coefficient, score=1, top=-1, total=-1)


def score_derivative(coefficient: float) -> Weights:
    """Return the symbol of p·(dp - Σ p·dp), times a number."""
    pulled = monomial(coefficient, score=1, top=-1, total=-1, upstream=1)
    return plus(pulled, monomial(-coefficient, score=1, top=-1, total=-2, dotted=1))


def plus(x: Weights, y: Weights) -> Weights:
    """Return the sum of two symbols."""
    terms = dict(x.terms)
    for powers, c in y.terms:
        terms[powers] = terms.get(powers, 0.0) + c
    return _collected(terms)


def times(x: Weights, y: Weights) -> Weights:
    """Return the product of two symbols."""
    terms: dict[Powers, float] = {}
    for p, c in x.terms:
        for q, d in y.terms:
            powers = Powers(*map(sum, zip(p, q, strict=True)))
            terms[powers] = terms.get(powers, 0.0) + c * d
    return _collected(terms)


def _collected(terms: Mapping[Powers, float]) -> Weights:
    return Weights(tuple(sorted((p, c) for p, c in terms.items() if c)))


def power(x: Symbol, exponent: int) -> Symbol:
    """Return the symbol of an integer power of a monomial."""
    if not isinstance(x, Weights) or len(x.terms) != 1:
        return None
    ((powers, c),) = x.terms
    return Weights(((Powers(*[exponent * n for n in powers]), c**exponent),))


def gradient_rules(scores: Scores) -> Rules:
    """Return the rules by primitive, for the gradient of attention with some masked scores."""

    def exponent(x: Symbol) -> Symbol:
        if not isinstance(x, Scores):
            return x
        alike = math.isclose(x.scale, scores.scale, rel_tol=1e-5)
        alike = alike and (x.seen, x.fill) == (scores.seen, scores.fill)
        return Exponent(score=True) if alike else None

    def add(x: Symbol, y: Symbol, **_: Any) -> Symbol:
        if isinstance(x, Weights) and isinstance(y, Weights):
            return plus(x, y)
        if isinstance(x, Exponent) or isinstance(y, Exponent):
            x, y = exponent(x), exponent(y)
            both = isinstance(x, Exponent) and isinstance(y, Exponent)
            if not both or (x.score and y.score):
                return None
            return Exponent(x.score or y.score, x.top + y.top, x.total + y.total)
        return TILE_RULES["add"](x, y)

    def exp(x: Symbol, **_: Any) -> Symbol:
        x = exponent(x)
        if not isinstance(x, Exponent) or not (x.top.is_integer() and x.total.is_integer()):
            return None
        return monomial(score=int(x.score), top=int(x.top), total=int(x.total))

    def chosen(condition: Symbol, *values: Symbol, **_: Any) -> Symbol:
        if condition is IS_FINITE:
            return MAXIMUM if known_number(values[0]) == 0 and values[1] == MAXIMUM else None
        if isinstance(condition, VisiblePairs) and any(isinstance(v, Weights) for v in values):
            outside, inside = values[::-1] if condition.inverse else values
            alike = (condition.upper, condition.length) == (scores.seen.upper, scores.seen.length)
            # e^s is zero outside: every row has a key
            if not alike or known_number(outside) != 0 or not isinstance(inside, Weights):
                return None
            return inside if all(p.score == 1 for p, _ in inside.terms) else None
        return TILE_RULES["select_n"](condition, *values)

    return TILE_RULES | {
        "add": add,
        "sub": lambda x, y, **_: _subtracted(add, x, y),
        "mul": multiplied,
        "div": _divided,
        "neg": lambda x, **_: multiplied(x, -1.0),
        "reciprocal": lambda x, **_: power(x, -1),
        "integer_pow": lambda x, *, y, **_: power(x, y),
        "exp": exp,
        "log": _logarithm,
        "max": _largest,
        "is_finite": lambda x, **_: IS_FINITE if x == MAXIMUM else None,
        "select_n": chosen,
        "convert_element_type": lambda x, *, new_dtype, **_: _cast(x, str(new_dtype)),
    }


def multiplied(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    """Return the symbol of a product."""
    if isinstance(x, Weights) and isinstance(y, Weights):
        return times(x, y)
    for value, other in ((x, y), (y, x)):
        number = other if isinstance(other, float) else known_number(other)
        if number is None or not isinstance(value, (Weights, Exponent)):
            continue
        if isinstance(value, Weights):
            return times(value, monomial(number))
        if value.score and number != 1:
            return None
        return Exponent(value.score, number * value.top, number * value.total)
    if isinstance(y, float):
        return scaled(x, y)
    return TILE_RULES["mul"](x, y)


def _subtracted(add: Any, x: Symbol, y: Symbol) -> Symbol:
    if isinstance(y, (Weights, Exponent)):
        return add(x, multiplied(y, -1.0))
    return TILE_RULES["sub"](x, y)


def _divided(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    if isinstance(y, Weights):
        inverse = power(y, -1)
        return None if inverse is None else multiplied(x, inverse)
    number = known_number(y)
    if isinstance(x, (Weights, Exponent)):
        return multiplied(x, 1 / number) if number else None
    return TILE_RULES["div"](x, y)


def _logarithm(x: Symbol, **_: Any) -> Symbol:
    """Return the logarithm of e^top·total^n."""
    if not isinstance(x, Weights) or len(x.terms) != 1:
        return None
    ((powers, c),) = x.terms
    plain = powers == Powers(top=powers.top, total=powers.total) and c == 1
    return Exponent(False, float(powers.top), float(powers.total)) if plain else None


def _largest(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    if known_number(x) == -math.inf:
        return y
    return x if known_number(y) == -math.inf else None


def _cast(x: Symbol, dtype: str) -> Symbol:
    if isinstance(x, Weights):
        return x if dtype in ("float32", *HALVES) else None
    if isinstance(x, Exponent):
        return x if dtype == "float32" else None
    return converted(x, dtype)


class RowSymbols:
    """Symbols of classes that are elementwise in the results of folds, and the axes of their slots.

    known: symbols and axes of classes; at first of these results.
    """

    def __init__(self, t: TermGraph, rules: Rules, known: Mapping[int, RowSymbol]) -> None:
        self.t, self.rules, self.known = t, rules, dict(known)

    def of(self, cls: int) -> RowSymbol:
        """Return the symbol of a class, None for none, and the axis of each of its slots."""
        if cls not in self.known:
            self.known[cls] = self._made(cls)
        return self.known[cls]

    def extend(self, more: Mapping[int, RowSymbol]) -> None:
        """Add known classes; classes without a symbol so far may have one then."""
        self.known = {c: x for c, x in self.known.items() if x[0] is not None} | dict(more)

    def _made(self, cls: int) -> RowSymbol:
        node, count = node_of(self.t.graph, cls), len(self.t.graph.classes[cls].sizes)
        if node.op == CONST:
            return np.asarray(node.attr[0]), ()
        if node.bound or node.op not in (ADD, CONTRACT, MAP):
            return None, ()
        args = [self.of(a.cls) for a in node.args]
        names: dict[int, str] = {}
        for a, (symbol, axes) in zip(node.args, args, strict=True):
            if symbol is None or len(a.axes) != len(axes):
                return None, ()
            if any(names.setdefault(i, n) != n for i, n in zip(a.axes, axes, strict=True)):
                return None, ()
        if len({*names.values()}) < len(names) or {*names} != {*range(count)}:
            return None, ()
        return self._applied(node, [s for s, _ in args]), tuple(names[i] for i in range(count))

    def _applied(self, node: Node, args: list[Symbol]) -> Symbol:
        if node.op == MAP:
            rule = self.rules.get(node.attr[0])
            return rule(*args, **dict(node.attr[1])) if rule else None
        if node.op == CONTRACT:
            return reduce(lambda x, y: None if x is None else multiplied(x, y), args)
        terms = [multiplied(x, float(c)) for x, c in zip(args, node.attr, strict=True)]
        if any(x is None for x in terms):
            return None
        return reduce(lambda x, y: None if x is None else self.rules["add"](x, y), terms)
