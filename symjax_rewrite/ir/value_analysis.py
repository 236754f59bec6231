"""Facts about classes beyond equality: sign, zeros, log-linear form.

A union is symmetric, so an unsafe or partial law never makes one: exp(a+b) = exp a·exp b, a/a = 1
or a dropped max shift would let extraction replace a stable form by an unstable form. These laws
are stated here as facts, which are read and never written back.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import cone, reaches
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, DELTA, MAP, REDUCE, SLICE, TAKE, Node, Ref

_NONNEGATIVE_MAPS = frozenset({"exp", "exp2", "abs", "square", "sqrt", "logistic", "cosh", "rsqrt"})
_KEEPS_SIGN = frozenset({"reciprocal", "convert_element_type", "floor", "ceil", "round", "cbrt"})


MAX_DEPTH = 100  # depth of analysed terms; a deeper term is an unknown value


def selected_case(g: EGraph, node: Node) -> int | None:
    """Return the operand that a selection returns where it is not 0; None if it is no mask."""
    if node.op != MAP or node.attr[0] != "select_n" or len(node.args) != 3:
        return None
    zero = [k for k in (1, 2) if is_zero(g, node.args[k].cls)]
    return 3 - zero[0] if len(zero) == 1 else None


def is_zero(g: EGraph, cls: int) -> bool:
    """Return True if a class is the constant zero."""
    return any(n.op == CONST and n.attr[0] == 0 for n in g.classes[cls].nodes)


def nonnegative(g: EGraph, cls: int, depth: int = 0) -> bool:
    """Return True if every value of a class is known to be ≥ 0 (or NaN)."""
    known = g.facts("nonnegative")
    if cls not in known:
        known[cls] = False  # during the recursion
        ordered = not g.classes[cls].dtype.startswith("complex")
        nodes = g.classes[cls].nodes if ordered and depth < MAX_DEPTH else ()
        known[cls] = any(_nonnegative_node(g, n, depth + 1) for n in nodes)
    return known[cls]


def _nonnegative_node(g: EGraph, n: Node, depth: int) -> bool:
    if n.op == CONST:
        value = n.attr[0]
        return not isinstance(value, complex) and value >= 0
    if n.op == DELTA:
        return True
    if n.op == CONTRACT:
        return all(v % 2 == 0 or nonnegative(g, a.cls, depth) for a, v in Counter(n.args).items())
    if n.op == ADD:
        coefficients = n.attr
        return all(not isinstance(c, complex) and c > 0 for c in coefficients) and _all(g, n, depth)
    if n.op == TAKE and n.attr[0] == "fill":
        fill = n.attr[1][0]  # NaN is not negative
        if isinstance(fill, complex) or fill < 0:
            return False
    if n.op in (REDUCE, SLICE, TAKE):
        return nonnegative(g, n.args[0].cls, depth)
    if n.op != MAP:
        return False
    name = n.attr[0]
    if name == "max":
        return any(nonnegative(g, a.cls, depth) for a in n.args)
    if name == "select_n":
        return all(nonnegative(g, a.cls, depth) for a in n.args[1:])
    return name in _NONNEGATIVE_MAPS or (name in (*_KEEPS_SIGN, "min", "div") and _all(g, n, depth))


def _all(g: EGraph, n: Node, depth: int) -> bool:
    return all(nonnegative(g, a.cls, depth) for a in n.args)


class LogLinear(NamedTuple):
    """A class as `Π factor^power · exp(Σ coefficient·term)`, over the class's slots.

    The forms are equal as real functions wherever all of it is defined. Rounding and overflow may
    differ, so a form that uses this one must evaluate shifted exponents.
    """

    factors: tuple[tuple[Ref, Fraction], ...]
    exponent: tuple[tuple[Ref, float], ...]

    def times(self, other: LogLinear, power: Fraction = Fraction(1)) -> LogLinear:
        """Return self · other^power."""
        factors = _added(self.factors, other.factors, power)
        return LogLinear(factors, _added(self.exponent, other.exponent, float(power)))

    def over(self, axes: tuple[int, ...]) -> LogLinear:
        """Return the same form with slot s read at index axes[s]."""
        factors = tuple((r.over(axes), p) for r, p in self.factors)
        return LogLinear(factors, tuple((r.over(axes), c) for r, c in self.exponent))


def _added(a: Iterable[tuple], b: Iterable[tuple], times: Any) -> tuple:
    """Return linear combination a + times·b, without terms that are zero."""
    total = dict(a)
    for ref, k in b:
        total[ref] = total.get(ref, 0) + k * times
    return tuple((ref, k) for ref, k in total.items() if k)


_POWERS = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": Fraction(-1)}


def log_linear(g: EGraph, cls: int, depth: int = 0) -> LogLinear:
    """Return the log-linear form of a class; a class with no such structure is one factor.

    Example:
        >>> g = EGraph()
        >>> a, b = (g.add("leaf", k, (), (3,), (), "float32") for k in (0, 1))
        >>> s = g.add("add", (1, -1), (a, b), (3,), (), "float32")
        >>> e = g.add("map", ("exp", ()), (s,), (3,), (), "float32")
        >>> log_linear(g, e.cls).exponent
        ((Ref(cls=2, axes=(0,)), 1.0),)
    """
    known = g.facts("log_linear")
    if cls not in known:
        own = Ref(cls, tuple(range(len(g.classes[cls].sizes))))
        known[cls] = LogLinear(((own, Fraction(1)),), ())  # during the recursion
        if depth < MAX_DEPTH:
            known[cls] = _log_linear(g, cls, depth) or known[cls]
    return known[cls]


def _log_linear(g: EGraph, cls: int, depth: int) -> LogLinear | None:
    node = g.classes[cls].first

    def of(a: Ref) -> LogLinear:
        return log_linear(g, a.cls, depth + 1).over(a.axes)

    if node.op == CONTRACT and not node.bound:
        return functools.reduce(LogLinear.times, map(of, node.args), LogLinear((), ()))
    if node.op != MAP:
        return None
    name = node.attr[0]
    if name == "exp":
        return LogLinear((), tuple(sum_terms(g, node.args[0])))
    if name == "div":
        return of(node.args[0]).times(of(node.args[1]), Fraction(-1))
    if name in _POWERS:
        return LogLinear((), ()).times(of(node.args[0]), _POWERS[name])
    return None


def sum_terms(g: EGraph, ref: Ref) -> list[tuple[Ref, float]]:
    """Return the terms of a sum: the shifted term and its shifts, each with its coefficient.

    A shift has fewer indices than the sum and is computed from the rest of it (a maximum, a
    log-sum-exp). Only such sums are split: `s + (1 - mask)·(-1e9)` written as `(s + 1e9·mask) -
    1e9` would lose every digit of s.
    """
    return [(term.over(ref.axes), k) for term, k in _terms_of(g, ref.cls, 0).items()]


def _terms_of(g: EGraph, cls: int, depth: int) -> dict[Ref, float]:
    known = g.facts("sum_terms")
    if cls not in known:
        node = g.classes[cls].first
        own = {Ref(cls, tuple(range(len(g.classes[cls].sizes)))): 1.0}
        known[cls] = own  # during the recursion
        real = node.op == ADD and not any(isinstance(c, complex) for c in node.attr)
        if real and depth < MAX_DEPTH:
            parts = list(zip(node.args, node.attr, strict=True))
            known[cls] = _taken_apart(g, parts, depth) or own
    return known[cls]


def _taken_apart(g: EGraph, parts: list[tuple[Ref, float]], depth: int) -> dict[Ref, float] | None:
    """Return the terms of a sum that has shifts, or is a multiple of such a sum; else None."""

    def opened(ref: Ref, scale: float) -> dict[Ref, float]:
        inner = _terms_of(g, ref.cls, depth + 1).items()
        return {t.over(ref.axes): scale * k for t, k in inner}

    if len(parts) == 1:
        inner = opened(*parts[0])
        return inner if len(inner) > 1 else None
    shifts = [p for p in parts if _is_shift(g, p[0], [q[0] for q in parts if q is not p])]
    if not shifts:
        return None
    kept = [p for p in parts if p not in shifts]
    if len(kept) == 1:
        out = opened(*kept[0])
    else:
        args, coefficients = zip(*kept, strict=True)
        out = {g.apply(ADD, coefficients, args, g.classes[args[0].cls].dtype): 1.0}
    for term, c in shifts:
        out[term] = out.get(term, 0.0) + c
    return out


def _is_shift(g: EGraph, term: Ref, others: list[Ref]) -> bool:
    """Return True if a term has fewer indices than the others, and is their maximum or log-sum.

    A mean is no shift: if scores are large, `s - mean` is rounded, and every reader of it sees the
    rounded value.
    """
    rank = len({i for r in others for i in r.axes})
    if len(term.axes) >= rank:
        return False
    wide = _elementwise_cone(g, others, rank)
    least = min(wide, default=term.cls + 1)

    def operands(state: tuple[int, bool]) -> list[tuple[int, bool]]:
        cls, reduced = state
        if cls in wide:
            return []
        node = g.classes[cls].first
        reduced = reduced or node.op == REDUCE or (node.op == MAP and node.attr[0] == "log")
        return [(a.cls, reduced) for a in node.args if a.cls >= least]

    return reaches([(term.cls, False)], operands, {(c, True) for c in wide})


def _elementwise_cone(g: EGraph, refs: list[Ref], rank: int) -> set[int]:
    """Return full-rank classes that terms are elementwise in, and the contractions under them."""

    def full(args: Iterable[Ref]) -> list[int]:
        return [a.cls for a in args if len(g.classes[a.cls].sizes) >= rank]

    def operands(cls: int) -> list[int]:
        node = g.classes[cls].first
        return full(node.args) if node.op in (MAP, ADD, CONTRACT) and not node.bound else []

    return cone(full(refs), operands)
