"""Symbols of attention: formulas for the values of tiles and rows (imports the ground layer alone).

A program is interpreted over symbols, so that every spelling of the same function is found and no
other. A symbol stands for a set of values that one formula describes: scores, index numbers, the
pairs of a mask, a sum of monomials in e^s, dp, e^max and in the sums of a row

    total = Σ e^(s - max)      dotted = Σ e^(s - max)·dp      weighted = Σ e^(s - max)·v

or an exponent: s and multiples of max and of log(total). An operation without a rule gives no
symbol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from symjax_rewrite import jax_internals
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn

HALVES = ("bfloat16", "float16")
LEAST_FILL = float(np.finfo(np.float32).min) / 2  # a masked score at most; e^(score - max) is 0


@dataclass(frozen=True, slots=True)
class VisiblePairs:
    """The symbol of the pairs within bounds: a causal mask, a window, or a mask of lengths.

    Args:
        upper: the greatest key - query; None for no bound.
        lower: the least key - query; None for no bound.
        length: number of the operand that, with `extra` added, bounds the keys; None for no bound.
        extra: added to the length.
        inverse: True for all other pairs; not of a single bound on key - query.
    """

    upper: int | None = None
    lower: int | None = None
    length: int | None = None
    extra: int = 0
    inverse: bool = False

    def is_within(self, other: VisiblePairs) -> bool:
        """Return True if every pair is one of another mask too, of masks that are not inverse."""
        above = other.upper is not None and (self.upper is None or self.upper > other.upper)
        below = other.lower is not None and (self.lower is None or self.lower < other.lower)
        counted = (self.length, self.extra) == (other.length, other.extra)
        return not above and not below and (other.length is None or counted)


@dataclass(frozen=True, slots=True)
class Scores:
    """The symbol `scale · dot`, with `fill` for pairs that are not `seen`."""

    scale: float
    seen: VisiblePairs = VisiblePairs()
    fill: float = -math.inf


@dataclass(frozen=True, slots=True)
class Number:
    """The symbol `row·i + column·j + constant + sign·(operand number length)`, of integers."""

    row: int
    column: int
    constant: int
    sign: int = 0
    length: int | None = None


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

    def is_of_rows(self) -> bool:
        """Return True for one monomial in e^max and the total, which is positive."""
        ((powers, c), *more) = self.terms or ((Powers(), 0.0),)
        return not more and c > 0 and powers == Powers(top=powers.top, total=powers.total)


@dataclass(frozen=True, slots=True)
class Exponent:
    """The symbol `s + top·max + total·log(total)`; without s if `score` is False."""

    score: bool = False
    top: float = 0.0
    total: float = 0.0


MAXIMUM = Exponent(top=1.0)
MAGNITUDE, IS_FINITE = object(), object()  # of the maximum: |max|, and "max is finite"
SAME = frozenset("broadcast_in_dim reshape squeeze copy stop_gradient reduce_precision".split())
Symbol = Any  # one of the above, a concrete array, or None for none


def monomial(coefficient: float = 1.0, **powers: int) -> Weights:
    """Return the symbol of one monomial."""
    return Weights(((Powers(**powers), coefficient),))


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


Rules = dict[str, Callable[..., Symbol]]


def interpreted(closed: ClosedJaxpr, inputs: Sequence[Symbol], rules: Rules) -> list[Symbol]:
    """Return the symbols of a program's results."""

    def run(eqn: JaxprEqn, args: list[Symbol]) -> list[Symbol]:
        if any(a is None for a in args):
            return [None] * len(eqn.outvars)
        args = [np.asarray(a) if _is_concrete(a) else a for a in args]
        if all(map(_is_concrete, args)):
            with jax.ensure_compile_time_eval():
                return jax_internals.eval_equation(eqn, args)
        if eqn.primitive.name in SAME:
            return [args[0]]
        rule = rules.get(eqn.primitive.name)
        return [rule(*args, **eqn.params) if rule else None] * len(eqn.outvars)

    return jax_internals.eval_inlined(closed, inputs, run)


def _is_concrete(x: Symbol) -> bool:
    """Return True for an array, or a number as a literal holds it."""
    return isinstance(x, (bool, int, float)) or hasattr(x, "dtype")


def converted(x: Symbol, dtype: str) -> Symbol:
    """Return the symbol of a cast: scores and exponents stay f32, integers wide, sums floats."""
    kinds = dict.fromkeys((Scores, Exponent), ("float32",))
    kinds |= {Number: ("int32", "int64"), Weights: ("float32", *HALVES)}
    return x if dtype in kinds.get(type(x), ()) else None


def known_number(x: Symbol) -> float | None:
    """Return the value of a number or of a concrete array of one element, else None."""
    if isinstance(x, float):
        return x
    concrete = isinstance(x, (np.ndarray, jax.Array)) and x.size == 1
    return float(np.asarray(x, np.float64).reshape(())) if concrete else None


def scaled(x: Symbol, factor: float) -> Symbol:
    """Return the symbol of a value times a number."""
    match x:
        case Scores(scale, seen) if seen == VisiblePairs() and math.isfinite(factor):
            return Scores(scale * factor)
        case Number() if factor.is_integer():
            n = int(factor)
            return Number(n * x.row, n * x.column, n * x.constant, n * x.sign, x.length)
        case Exponent(score, top, total) if factor == 1 or not score:
            return Exponent(score, factor * top, factor * total)
        case Weights():
            return times(x, monomial(factor))
    return None


def multiplied(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    """Return the symbol of a product."""
    if isinstance(x, Weights) and isinstance(y, Weights):
        return times(x, y)
    factor = known_number(y) if known_number(x) is None else known_number(x)
    return None if factor is None else scaled(x if known_number(x) is None else y, factor)


def _divided(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    if isinstance(y, Weights):
        return multiplied(x, power(y, -1))
    divisor = known_number(y)
    return scaled(x, 1 / divisor) if divisor and not isinstance(x, Number) else None


def _added(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    match _numbered(x), _numbered(y):
        case Number() as a, Number() as b if not (a.sign and b.sign):
            length = a.length if a.sign else b.length
            constant, sign = a.constant + b.constant, a.sign + b.sign
            return Number(a.row + b.row, a.column + b.column, constant, sign, length)
        case Weights() as a, Weights() as b:
            return plus(a, b)
        case Exponent() as a, Exponent() as b if not (a.score and b.score):
            return Exponent(a.score or b.score, a.top + b.top, a.total + b.total)
    zero = [s for s in (x, y) if known_number(s) == 0]
    if zero:
        return y if zero[0] is x else x
    return None


def _numbered(x: Symbol) -> Symbol:
    known = known_number(x)
    whole = known is not None and known.is_integer()
    return Number(0, 0, int(known)) if whole and known is not None else x


def _subtracted(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    known = known_number(y)
    return _added(x, np.asarray(-known) if known is not None else scaled(y, -1.0))


def _not_above(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    """Return the pairs with x ≤ y."""
    match _subtracted(y, x):
        case Number(1, -1, slack, 0):
            return VisiblePairs(slack)
        case Number(-1, 1, slack, 0):  # -slack ≤ key - query
            return VisiblePairs(lower=-slack)
        case Number(0, -1, slack, 1, length):
            return VisiblePairs(length=length, extra=slack + 1)
        case Number(0, 1, slack, -1, length):  # length - slack ≤ key
            return VisiblePairs(length=length, extra=-slack, inverse=True)
    return None


def _less(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    if x is MAGNITUDE:
        return IS_FINITE if known_number(y) == math.inf else None
    return _complement(_not_above(y, x))


def _complement(x: Symbol, **_: Any) -> Symbol:
    match x:
        case VisiblePairs(int(upper), None, None):
            return VisiblePairs(lower=upper + 1)
        case VisiblePairs(None, int(lower), None):
            return VisiblePairs(upper=lower - 1)
        case VisiblePairs():
            return replace(x, inverse=not x.inverse)
    return None


def _and(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    match known_number(x), known_number(y):
        case 1.0, _:
            return y
        case _, 1.0:
            return x
    if x == y or not (isinstance(x, VisiblePairs) and isinstance(y, VisiblePairs)):
        return x if x == y else None
    uppers = [z.upper for z in (x, y) if z.upper is not None]
    lowers = [z.lower for z in (x, y) if z.lower is not None]
    counted = [z for z in (x, y) if z.length is not None]
    if x.inverse or y.inverse or len(counted) > 1:
        return None
    upper, lower = min(uppers, default=None), max(lowers, default=None)
    return replace(counted[0] if counted else x, upper=upper, lower=lower)


def _or(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    return _complement(_and(_inverted(x), _inverted(y)))


def _inverted(x: Symbol) -> Symbol:
    known = known_number(x)
    return _complement(x) if known is None else np.asarray(1.0 - known)


def _chosen(condition: Symbol, *values: Symbol, **_: Any) -> Symbol:
    """Return `where(condition, values[1], values[0])`."""
    if condition is IS_FINITE:  # the shift is the maximum but where the row has no plain result
        return MAXIMUM if known_number(values[0]) == 0 and values[1] == MAXIMUM else None
    if not isinstance(condition, VisiblePairs):
        return None
    found = _inside(condition, values, Scores)
    if found is not None:
        seen, outside, inside = found
        fill = known_number(outside)
        return None if fill is None else _masked(inside, seen, fill)
    truth = all(str(getattr(v, "dtype", "")) == "bool" for v in values)
    known = tuple(map(known_number, values))
    if truth and known in ((0.0, 1.0), (1.0, 0.0)):
        return condition if known == (0.0, 1.0) else _complement(condition)
    return None


def _inside(
    condition: VisiblePairs, values: Sequence[Symbol], kind: type
) -> tuple[VisiblePairs, Symbol, Symbol] | None:
    """Return the pairs where a selection has a symbol of a kind, the value elsewhere, the symbol.

    values: where the condition does not hold, and where it does.
    """
    either = (condition, *values), (_complement(condition), *values[::-1])
    return next((x for x in either if isinstance(x[2], kind) and not x[0].inverse), None)


def _masked(scores: Scores, seen: VisiblePairs, fill: float) -> Symbol:
    """Return scores with a fill outside of `seen`, if all masked pairs have the same fill."""
    alike = scores.seen == VisiblePairs() or scores.fill == fill
    both = _and(scores.seen, seen) if alike and fill <= LEAST_FILL else None
    return None if both is None else Scores(scores.scale, both, fill)


def _largest(x: Symbol, y: Symbol, **_: Any) -> Symbol:
    """Return `max`, of which -inf is the unit."""
    if known_number(x) == -math.inf:
        return y
    return x if known_number(y) == -math.inf else None


def _magnitude(x: Symbol, **_: Any) -> Symbol:
    if isinstance(x, Weights) and x.is_of_rows():
        return x
    return MAGNITUDE if x == MAXIMUM else None


def _exponential(x: Symbol, **_: Any) -> Symbol:
    """Return e^x."""
    if not isinstance(x, Exponent) or not (x.top.is_integer() and x.total.is_integer()):
        return None
    return monomial(score=int(x.score), top=int(x.top), total=int(x.total))


def _logarithm(x: Symbol, **_: Any) -> Symbol:
    """Return the logarithm of e^top·total^n."""
    if not isinstance(x, Weights) or not x.is_of_rows() or x.terms[0][1] != 1:
        return None
    powers = x.terms[0][0]
    return Exponent(False, float(powers.top), float(powers.total))


RULES: Rules = {
    "mul": multiplied, "div": _divided, "add": _added, "sub": _subtracted,
    "neg": lambda x, **_: scaled(x, -1.0),
    "reciprocal": lambda x, **_: power(x, -1), "integer_pow": lambda x, *, y, **_: power(x, y),
    "exp": _exponential, "log": _logarithm, "max": _largest, "abs": _magnitude,
    "le": _not_above, "lt": _less,
    "ge": lambda x, y, **_: _not_above(y, x), "gt": lambda x, y, **_: _less(y, x),
    "and": _and, "or": _or, "not": _complement, "select_n": _chosen,
    "is_finite": lambda x, **_: IS_FINITE if x == MAXIMUM else None,
    "convert_element_type": lambda x, *, new_dtype, **_: converted(x, str(new_dtype)),
}  # fmt: skip


def rules_of(scores: Scores) -> Rules:
    """Return the rules by primitive where these scores alone are exponents of attention."""

    def exponent(x: Symbol) -> Symbol:
        if not isinstance(x, Scores):
            return x
        alike = math.isclose(x.scale, scores.scale, rel_tol=1e-5)
        alike = alike and (x.seen, x.fill) == (scores.seen, scores.fill)
        return Exponent(score=True) if alike else None

    def add(x: Symbol, y: Symbol, **_: Any) -> Symbol:
        if isinstance(x, Exponent) or isinstance(y, Exponent):
            x, y = exponent(x), exponent(y)
        return _added(x, y)

    def subtract(x: Symbol, y: Symbol, **_: Any) -> Symbol:
        return add(x, scaled(y, -1.0)) if isinstance(y, Exponent) else _subtracted(x, y)

    def choose(condition: Symbol, *values: Symbol, **_: Any) -> Symbol:
        if not isinstance(condition, VisiblePairs):
            return _chosen(condition, *values)
        found = _inside(condition, values, Weights)
        if found is None:
            return _chosen(condition, *values)
        seen, outside, inside = found
        # e^s is zero outside: every row has a key
        if not scores.seen.is_within(seen) or known_number(outside) != 0:
            return None
        return inside if all(p.score == 1 for p, _ in inside.terms) else None

    mine = {"add": add, "sub": subtract, "select_n": choose}
    return RULES | mine | {"exp": lambda x, **_: _exponential(exponent(x))}
