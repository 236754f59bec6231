"""Sizes: integers, or polynomials over named sizes.

A `Dim` is a Python `int` or a `Poly`. Inner loops multiply and compare ints; a `Poly` does the same
with small dictionaries. SymPy appears only in `to_sympy`, whose result is for reading.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.errors import UsageError

Monomial = tuple[tuple[str, int], ...]
NARROW = 4  # largest ratio of the ends of a range of sizes for which its ends stand


class Poly:
    """A polynomial with int or float coefficients over named sizes.

    Example:
        >>> T, d = Poly.var("T"), Poly.var("d")
        >>> str(2 * T * d + d), (T * d).at({"T": 3, "d": 4})
        ('2*T*d + d', 12)
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, float]) -> None:
        self.terms = tuple(sorted((m, c) for m, c in terms.items() if c != 0))
        self._hash = hash(self.terms)

    @classmethod
    def var(cls, name: str) -> Poly:
        """Return the polynomial of one named size."""
        return cls({((name, 1),): 1})

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Poly, int, float)):
            return NotImplemented
        return self.terms == _poly(other).terms

    def __add__(self, other: Dim | float) -> Poly:
        out = dict(self.terms)
        for m, c in _poly(other).terms:
            out[m] = out.get(m, 0) + c
        return Poly(out)

    __radd__ = __add__

    def __neg__(self) -> Poly:
        return self * -1

    def __sub__(self, other: Dim | float) -> Poly:
        return self + _poly(other) * -1

    def __rsub__(self, other: Dim | float) -> Poly:
        return _poly(other) - self

    def __mul__(self, other: Dim | float) -> Poly:
        out: dict[Monomial, float] = {}
        for m1, c1 in self.terms:
            for m2, c2 in _poly(other).terms:
                m = _monomial_product(m1, m2)
                out[m] = out.get(m, 0) + c1 * c2
        return Poly(out)

    __rmul__ = __mul__

    def variables(self) -> set[str]:
        """Return the names in the polynomial."""
        return {name for m, _ in self.terms for name, _ in m}

    def at(self, env: Mapping[str, Any]) -> Any:
        """Return the value with every name replaced (by numbers, or by JAX dimensions)."""
        total: Any = 0
        for m, c in self.terms:
            names = [name for name, power in m for _ in range(power)]
            total = total + functools.reduce(lambda x, name: x * env[name], names, c)
        return total

    def divide(self, other: Dim) -> Dim | None:
        """Return the quotient by a single-term divisor if it is exact, else None."""
        divisor = _poly(other)
        if len(divisor.terms) != 1:
            return 1 if divisor == self else None
        ((dm, dc),) = divisor.terms
        need, out = dict(dm), {}
        for m, c in self.terms:
            have = dict(m)
            if c % dc or any(have.get(n, 0) < p for n, p in need.items()):
                return None
            left = {n: p - need.get(n, 0) for n, p in have.items()}
            out[tuple(sorted((n, p) for n, p in left.items() if p))] = c // dc
        return simplify(Poly(out))

    def __str__(self) -> str:
        parts = []
        for m, c in sorted(self.terms, key=lambda t: (-sum(p for _, p in t[0]), t[0])):
            factors = [n if p == 1 else f"{n}**{p}" for n, p in m]
            if c != 1 or not factors:
                factors.insert(0, str(c))
            parts.append("*".join(factors))
        return " + ".join(parts).replace("+ -", "- ") or "0"

    __repr__ = __str__


Dim = int | Poly


def _poly(value: Dim | float) -> Poly:
    return value if isinstance(value, Poly) else Poly({(): value})


@functools.cache
def _monomial_product(a: Monomial, b: Monomial) -> Monomial:
    return tuple(sorted((Counter(dict(a)) + Counter(dict(b))).items()))


def simplify(dim: Dim) -> Dim:
    """Return an int if the polynomial is a constant, else the polynomial."""
    return dim if not isinstance(dim, Poly) or dim.variables() else dim.at({})


def from_jax(size: Any) -> Dim:
    """Return the Dim of an entry of a JAX shape."""
    if jax_internals.is_symbolic(size):
        return simplify(Poly(dict(jax_internals.dim_monomials(size))))
    return int(size)


def product(sizes: Iterable[Dim]) -> Dim:
    """Return the product of sizes; 1 for no sizes."""
    return functools.reduce(lambda out, s: s * out if out != 1 else s, sizes, 1)


def divide(a: Dim, b: Dim) -> Dim | None:
    """Return a / b if it is exact, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return _poly(a).divide(b)


def value(dim: Dim, env: Mapping[str, int]) -> int:
    """Return a size as a number at a sample of the named sizes."""
    if isinstance(dim, int):
        return dim
    return dim.at(defaultdict(lambda: 64, env))  # opaque factors such as `floordiv(b, 2)`


class Assumptions:
    """Facts about the named sizes: every size is ≥ 1, and the user's facts hold.

    Args:
        facts: comparisons such as `"r < d/8"`, `"T >= 1"`, `"T == 4*d"`.

    Raises:
        UsageError: a fact is not a comparison of two polynomials in named sizes.
    """

    def __init__(self, facts: Iterable[str] = ()) -> None:
        if not isinstance(facts, Iterable):
            raise UsageError("not facts about sizes", expected="'r < d/8'", got=repr(facts))
        self.facts = tuple(facts)
        self._lower: list[tuple[Poly, int]] = []  # (polynomial, bound): polynomial >= bound
        for fact in self.facts:
            match = re.fullmatch(r"\s*(.+?)\s*(<=|>=|==|<|>)\s*(.+?)\s*", str(fact))
            if not match:
                raise UsageError("not a fact about sizes", expected="'r < d/8'", got=repr(fact))
            left, op, right = _parse(match[1], fact), match[2], _parse(match[3], fact)
            if op in ("<", "<="):
                left, right = right, left
            self._lower.append((left - right, 1 if op in ("<", ">") else 0))
            if op == "==":
                self._lower.append((right - left, 0))
        pairs = itertools.combinations(list(self._lower), 2)  # a < b and b < c give a < c
        self._lower += [(p + q, b + c) for (p, b), (q, c) in pairs if (p + q).terms]

    def with_constraints(self, dims: Iterable[Any]) -> Assumptions:
        """Return these facts and the constraints that JAX knows of symbolic dimensions.

        Constraints that are no comparison of two polynomials are left out.
        """
        found = dict.fromkeys(f for d in dims for f in jax_internals.facts_of(d))
        more = [f for f in found if f not in self.facts and is_fact(f)]
        return Assumptions((*self.facts, *more)) if more else self

    def nonnegative(self, p: Dim | float) -> bool:
        """Return True if p ≥ 0 is provable for all sizes allowed (False: not proved).

        Sizes with a constant upper bound in which p is linear are tried at both ends. Every other
        name is replaced by its lower bound plus a term ≥ 0, and all coefficients of the result must
        be ≥ 0.
        """
        if not isinstance(p, Poly) or not isinstance(p := simplify(p), Poly):
            return p >= 0
        for name, ends in self._ends().items():
            powers = {power for m, _ in p.terms for n, power in m if n == name}
            if powers == {1}:
                env = {n: Poly.var(n) for n in p.variables()}
                return all(self.nonnegative(p.at(env | {name: end})) for end in ends)
        if any(
            all(c >= -1e-9 for _, c in _substitute(p, substitution).terms)
            for substitution in self._substitutions()
        ):
            return True
        return any(all(c >= -1e-9 for _, c in rest.terms) for rest in self._remainders(p))

    def _remainders(self, p: Poly) -> Iterator[Poly]:
        """Yield p less a positive multiple of one fact that cancels a negative term of p."""
        negative = [(m, c) for m, c in p.terms if c < 0]
        for fact, bound in self._lower:
            known = fact - bound
            for m, c in negative:
                for n, d in known.terms:
                    factor = Poly({m: 1}).divide(Poly({n: 1})) if d < 0 else None
                    if factor is not None:
                        yield _substitute(p - (c / d) * (factor * known), {})

    def _ends(self) -> dict[str, tuple[float, float]]:
        """Return the constant bounds of names that have an upper one, by facts `c ± a·x ≥ b`."""
        low: dict[str, float] = {}
        high: dict[str, float] = {}
        for fact, bound in self._lower:
            names = [(m, c) for m, c in fact.terms if m]
            match names:
                case [(((name, 1),), slope)]:
                    end = (bound - sum(c for m, c in fact.terms if not m)) / slope
                    if slope > 0:
                        low[name] = max(end, low.get(name, end))
                    else:
                        high[name] = min(end, high.get(name, end))
        return {name: (max(low.get(name, 1), 1), end) for name, end in high.items()}

    def are_narrow(self, names: Iterable[str]) -> bool:
        """Return True if every name is known to within a factor of `NARROW`."""
        ends = self._ends()
        return all(n in ends and ends[n][1] <= NARROW * ends[n][0] for n in names)

    def _substitutions(self) -> Iterable[dict[str, Poly]]:
        """Yield lower bounds of a name by others: facts `a·x - rest ≥ b`, and means of two."""
        yield {}
        bounds: dict[str, list[Poly]] = {}
        for fact, bound in self._lower:
            for m, c in fact.terms:
                rest = Poly({k: v for k, v in fact.terms if k != m})
                if len(m) == 1 and m[0][1] == 1 and c > 0 and m[0][0] not in rest.variables():
                    bounds.setdefault(m[0][0], []).append((bound - rest) * (1 / c))
        for name, lows in bounds.items():
            slack = Poly.var(f"{name}'")
            for k, low in enumerate(lows):
                yield {name: low + slack}
                yield from ({name: (low + other) * 0.5 + slack} for other in lows[:k])

    def samples(self, names: Iterable[str]) -> list[dict[str, int]]:
        """Return concrete sizes that satisfy the facts, deterministic.

        They go from small to large. Of names in narrow ranges they are the middle and the corners.
        """
        ordered = sorted(names)
        if ordered and self.are_narrow(ordered):
            ends = self._ends()
            out = _corners({n: ends[n] for n in ordered})
        else:
            out = [
                {
                    name: max(2, scale * (ratio if k % 2 else 1) // (1 + k))
                    for k, name in enumerate(ordered)
                }
                for scale in (64, 1024, 16)
                for ratio in (1, 8, 64)
            ]
        good = [env for env in out if self.holds(env)]
        return good or self._search(ordered) or out[:1]

    def _search(self, ordered: list[str]) -> list[dict[str, int]]:
        """Return sizes by trial of five values for each of the first five names."""
        trials = itertools.product((2, 16, 128, 1024, 8192), repeat=len(ordered[:5]))
        rest = dict.fromkeys(ordered[5:], 64)
        envs = (dict(zip(ordered[:5], trial, strict=True)) | rest for trial in trials)
        return [e for e in envs if self.holds(e)][:9]

    def contradictory(self) -> bool:
        """Return True if one fact, or the sum of two, is false for all sizes ≥ 1."""
        pairs = itertools.combinations(self._lower, 2)
        for p, bound in (*self._lower, *[(p + q, b + c) for (p, b), (q, c) in pairs]):
            opposite = dict(_substitute(-1 * p, {}).terms)  # the fact is p > 0 if it has a bound
            if min(opposite.values(), default=0) >= 0 and (bound > 0 or opposite.get((), 0) > 0):
                return True
        return False

    def holds(self, env: Mapping[str, int]) -> bool:
        """Return True if the facts hold at some sizes; facts about other names count as true."""
        known = [(p, b) for p, b in self._lower if p.variables() <= set(env)]
        return all(p.at(env) >= b for p, b in known)


def _corners(ends: Mapping[str, tuple[float, float]]) -> list[dict[str, int]]:
    """Return the geometric middle of some ranges, and the corners of the first three."""
    middle = {n: round(math.sqrt(low * high)) for n, (low, high) in ends.items()}
    whole = {n: (math.ceil(low), math.floor(high)) for n, (low, high) in ends.items()}
    corners = [dict(zip(ends, c, strict=False)) for c in itertools.product(*[*whole.values()][:3])]
    both = [{n: ends[k] for n, ends in whole.items()} for k in (0, 1)] if len(ends) > 3 else []
    return [middle, *({**middle, **corner} for corner in corners), *both]


def consistent(facts: str | Iterable[str]) -> Assumptions:
    """Return a fact or several as assumptions.

    Raises:
        UsageError: a fact is malformed, or no sizes fulfil two of the facts.
    """
    known = Assumptions((facts,) if isinstance(facts, str) else facts)
    if known.contradictory():
        raise UsageError("no sizes fulfil these facts", got=", ".join(map(repr, known.facts)))
    return known


def is_fact(text: str) -> bool:
    """Return True if a text is a comparison that `Assumptions` understands."""
    try:
        Assumptions((text,))
    except UsageError:
        return False
    return True


def _substitute(p: Poly, replaced: dict[str, Poly]) -> Poly:
    """Replace names by their bounds, and every other name n by n + 1."""
    names = p.variables().union(*(q.variables() for q in replaced.values()))
    shifted = {n: Poly.var(n) if n.endswith("'") else Poly.var(n) + 1 for n in names}
    return _poly(p.at(shifted | {n: q.at(shifted) for n, q in replaced.items()}))


_FACTOR = r"\s*(?:[A-Za-z_]\w*|\d+(?:\.\d+)?)\s*"
_TERM = rf"{_FACTOR}(?:[*/]{_FACTOR})*"
_SUM = re.compile(rf"\s*[+-]?{_TERM}(?:[+-]{_TERM})*")


def _parse(text: str, fact: str) -> Poly:
    if not _SUM.fullmatch(text):
        what = "not a polynomial in named sizes"
        raise UsageError(what, expected="such as '4*d + 1'", got=repr(fact))
    total = _poly(0)
    for sign, term in re.findall(r"([+-]?)\s*([^+-]+)", text):
        value = _poly(-1 if sign == "-" else 1)
        for op, factor in re.findall(r"([*/]?)\s*([A-Za-z_]\w*|\d+(?:\.\d+)?)\s*", term.strip()):
            if op == "/" and (factor[0].isalpha() or float(factor) == 0):
                raise UsageError("sizes are divided by numbers above 0 alone", got=repr(fact))
            if op == "/":
                value = value * (1 / float(factor))
            else:
                value = value * (Poly.var(factor) if factor[0].isalpha() else float(factor))
        total = total + value
    return total


def to_sympy(dim: Dim | float) -> Any:
    """Return the size as a SymPy expression with positive integer symbols."""
    import sympy

    dim = _poly(dim)
    names = {n: sympy.Symbol(n, positive=True, integer=True) for n in dim.variables()}
    return sympy.sympify(dim.at(names))
