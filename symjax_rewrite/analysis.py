"""What is known of a class beyond equality: its sign, and its log-linear form (imports the graph).

Unsafe and partial laws never union: exp(a+b) = exp a·exp b, a/a = 1 or dropping a max shift would
make an unstable form extractable in place of a stable one, since a union is symmetric. They live
here, as facts that are read and never written back.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from symjax_rewrite.egraph import EGraph
from symjax_rewrite.ir import ADD, CONST, CONTRACT, DELTA, MAP, REDUCE, SLICE, TAKE, Node, Ref

_NONNEGATIVE_MAPS = frozenset({"exp", "exp2", "abs", "square", "sqrt", "logistic", "cosh", "rsqrt"})
_KEEPS_SIGN = frozenset({"reciprocal", "convert_element_type", "floor", "ceil", "round", "cbrt"})


def nonnegative(g: EGraph, cls: int, path: tuple[int, ...] = ()) -> bool:
    """Whether every value of a class is known to be ≥ 0 (or NaN); `path` is being asked already."""
    if cls in path:
        return False
    return any(_nonnegative_node(g, n, (*path, cls)) for n in g.classes[cls].nodes)


def _nonnegative_node(g: EGraph, n: Node, path: tuple[int, ...]) -> bool:
    if n.op == CONST:
        value = n.attr[0]
        return not isinstance(value, complex) and value >= 0
    if n.op == DELTA:
        return True
    if n.op == CONTRACT:
        return all(v % 2 == 0 or nonnegative(g, ref.cls, path) for ref, v in _powers(n.args))
    if n.op == ADD:
        coefficients = n.attr
        return all(not isinstance(c, complex) and c > 0 for c in coefficients) and _all(g, n, path)
    if n.op in (REDUCE, SLICE, TAKE):
        return nonnegative(g, n.args[0].cls, path)
    if n.op != MAP:
        return False
    name = n.attr[0]
    if name == "max":
        return any(nonnegative(g, a.cls, path) for a in n.args)
    if name == "select_n":
        return all(nonnegative(g, a.cls, path) for a in n.args[1:])
    return name in _NONNEGATIVE_MAPS or (name in (*_KEEPS_SIGN, "min", "div") and _all(g, n, path))


def _powers(args: Iterable[Ref]) -> list[tuple[Ref, int]]:
    count: dict[Ref, int] = {}
    for a in args:
        count[a] = count.get(a, 0) + 1
    return list(count.items())


def _all(g: EGraph, n: Node, path: tuple[int, ...]) -> bool:
    return all(nonnegative(g, a.cls, path) for a in n.args)


class LogLinear(NamedTuple):
    """A class as `Π factor^power · exp(Σ coefficient·term)`, over the class's slots.

    Equal as real functions wherever all of it is defined; nothing is said about rounding or
    overflow, so a form that reads it must evaluate exponents shifted.
    """

    factors: tuple[tuple[Ref, Fraction], ...]
    exponent: tuple[tuple[Ref, float], ...]

    def times(self, other: LogLinear, power: Fraction = Fraction(1)) -> LogLinear:
        """self · other^power."""
        factors = dict(self.factors)
        for ref, p in other.factors:
            factors[ref] = factors.get(ref, Fraction(0)) + p * power
        exponent = dict(self.exponent)
        for ref, c in other.exponent:
            exponent[ref] = exponent.get(ref, 0.0) + c * float(power)
        return LogLinear(
            tuple((r, p) for r, p in factors.items() if p),
            tuple((r, c) for r, c in exponent.items() if c),
        )

    def over(self, axes: tuple[int, ...]) -> LogLinear:
        """The same form with slot s read at index axes[s]."""
        move = lambda ref: Ref(ref.cls, tuple(axes[i] for i in ref.axes))  # noqa: E731
        return LogLinear(
            tuple((move(r), p) for r, p in self.factors),
            tuple((move(r), c) for r, c in self.exponent),
        )


_ONE = LogLinear((), ())
_POWERS = {"sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": Fraction(-1)}


def log_linear(g: EGraph, cls: int) -> LogLinear:
    """The log-linear form of a class; a class with no such structure is one factor.

    Example:
        >>> g = EGraph()
        >>> a, b = (g.add("leaf", k, (), (3,), (), "float32") for k in (0, 1))
        >>> s = g.add("add", (1, -1), (a, b), (3,), (), "float32")
        >>> e = g.add("map", ("exp", ()), (s,), (3,), (), "float32")
        >>> log_linear(g, e.cls).exponent
        ((Ref(cls=0, axes=(0,)), 1.0), (Ref(cls=1, axes=(0,)), -1.0))
    """
    node = next(iter(g.classes[cls].nodes))
    if node.op == CONTRACT and not node.bound:
        out = _ONE
        for a in node.args:
            out = out.times(log_linear(g, a.cls).over(a.axes))
        return out
    if node.op == MAP and node.attr[0] in ("exp", "exp2", "div", *_POWERS):
        name = node.attr[0]
        first = node.args[0]
        if name == "exp":
            return LogLinear((), tuple(sum_terms(g, first, 1.0)))
        if name == "div":
            top, bottom = (log_linear(g, a.cls).over(a.axes) for a in node.args)
            return top.times(bottom, Fraction(-1))
        if name in _POWERS:
            return _ONE.times(log_linear(g, first.cls).over(first.axes), _POWERS[name])
    own = Ref(cls, tuple(range(len(g.classes[cls].sizes))))
    return LogLinear(((own, Fraction(1)),), ())


def sum_terms(g: EGraph, ref: Ref, scale: float) -> list[tuple[Ref, float]]:
    """A sum's terms with their coefficients, nested sums opened."""
    node = next(iter(g.classes[ref.cls].nodes))
    if node.op != ADD:
        return [(ref, scale)]
    out: dict[Ref, float] = {}
    for c, a in zip(node.attr, node.args, strict=True):
        over = Ref(a.cls, tuple(ref.axes[i] for i in a.axes))
        for term, k in sum_terms(g, over, scale * c):
            out[term] = out.get(term, 0.0) + k
    return list(out.items())
