"""Equality by cases: a polynomial with tests is zero if it is zero for every choice of their signs.

    max(x, 0) + max(−x, 0) − |x|  →  0 where x > 0, where x < 0, and where x = 0

Cases that exclude each other are left out: signs are linear inequalities in monomials, and
Fourier-Motzkin elimination shows that some have no solution. Where a tested value is zero, it is
solved for one of its atoms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from symjax_rewrite.proofs.algebra.arithmetic import Calculus
from symjax_rewrite.proofs.algebra.forms import ZERO, Atom, Mono, Number, Poly

MOST_CELLS = 100  # choices of signs
MOST_BOUNDS = 200  # inequalities of an elimination

Bound = tuple[Poly, bool]  # p > 0 if strict, else p ≥ 0


def is_zero_by_cases(a: Calculus, p: Poly, cancels: Callable[[Poly], bool]) -> bool:
    """Return True if a polynomial is zero in every case of the signs of the values that it tests.

    cancels: returns True for a polynomial without tests that is zero.
    """
    return SignCases(a, cancels).is_zero(p, [])


def with_known_tests(a: Calculus, p: Poly, known: list[Bound]) -> Poly:
    """Return a polynomial with the tests replaced whose values follow from inequalities."""
    return SignCases(a, lambda _: False).decided(p, known)


def bounds_of(a: Calculus, test: Atom, value: int) -> list[Bound]:
    """Return the inequalities that the value of a test says."""
    kind, p = a.form(test).kind, a.operand(test)
    opposite = a.scale(-1, p)
    if kind == "positive":
        return [(p, True)] if value else [(opposite, False)]
    return [(p, False), (opposite, False)] if kind == "zero" and value else []


@dataclass(slots=True)
class SignCases:
    """The cases of one polynomial.

    cells: how many choices of signs were opened, of `MOST_CELLS`.
    """

    a: Calculus
    cancels: Callable[[Poly], bool]
    cells: int = field(default=0)

    def is_zero(self, p: Poly, known: list[Bound]) -> bool:
        a = self.a
        p = self.decided(p, known)
        tests = [t for t in a.tests(p) if a.form(t).kind in ("positive", "zero")]
        if not tests:
            return self.cancels(p)
        value = a.operand(tests[0])
        opposite = a.scale(-1, value)
        self.cells += 1
        if self.cells > MOST_CELLS or not a.is_real(value):
            return False
        cases: list[tuple[list[Bound], Poly]] = [
            ([(value, True)], p),
            ([(opposite, True)], p),
            ([(value, False), (opposite, False)], p),
        ]
        for number, (more, body) in enumerate(cases):
            facts = [*known, *more]
            if self._excluded(facts):
                continue
            body = self.decided(body, facts)
            if not self.is_zero(_solved(a, body, value) if number == 2 else body, facts):
                return False
        return True

    def decided(self, p: Poly, known: list[Bound]) -> Poly:
        """Return a polynomial with the tests replaced whose values are known."""
        for test in self.a.tests(p):
            kind = self.a.form(test).kind
            value = self._value(kind, self.a.operand(test), known) if kind in _KINDS else None
            if value is not None:
                p = self.a.assume(p, test, value)
        return p

    def _value(self, kind: str, p: Poly, known: list[Bound]) -> int | None:
        above, below = [(p, True)], [(self.a.scale(-1, p), True)]
        at_most, at_least = [(self.a.scale(-1, p), False)], [(p, False)]
        if not self.a.is_real(p):
            return None
        if self._excluded([*known, *above]):
            if kind == "positive" or self._excluded([*known, *at_least, *at_most]):
                return 0
            return 1 if self._excluded([*known, *below]) else None
        if kind == "positive":
            return 1 if self._excluded([*known, *at_most]) else None
        return 0 if self._excluded([*known, *at_least, *at_most]) else None

    def _excluded(self, bounds: Sequence[Bound]) -> bool:
        """Return True if no values of the monomials fulfil some inequalities."""
        a = self.a
        monos = {mono for p, _ in bounds for mono, _ in p if mono}
        signs = {mono: a.sign(((mono, 1),)) for mono in monos}
        known = [(((mono, 1),), sign == 2) for mono, sign in signs.items() if sign]
        rows = [_row(p, strict) for p, strict in (*bounds, *known)]
        return _is_infeasible(rows, sorted(monos))


_KINDS = ("positive", "zero")
Row = tuple[dict[Mono, Number], bool]


def _row(p: Poly, strict: bool) -> Row:
    return dict(p), strict


def _is_infeasible(rows: list[Row], monos: list[Mono]) -> bool:
    """Return True if inequalities in independent variables have no solution."""
    for mono in monos:
        low = [r for r in rows if r[0].get(mono, 0) > 0]
        high = [r for r in rows if r[0].get(mono, 0) < 0]
        rows = [r for r in rows if not r[0].get(mono, 0)]
        rows += [_joined(x, y, mono) for x in low for y in high]
        if len(rows) > MOST_BOUNDS:
            return False
    ends = [(row.get((), 0), strict) for row, strict in rows]
    return any(c < 0 or (strict and c == 0) for c, strict in ends)


def _joined(low: Row, high: Row, mono: Mono) -> Row:
    """Return the positive combination of two inequalities in which a variable cancels."""
    x, y = -high[0][mono], low[0][mono]
    row = {m: x * low[0].get(m, 0) + y * high[0].get(m, 0) for m in low[0] | high[0]}
    return {m: c for m, c in row.items() if c}, low[1] or high[1]


def _solved(a: Calculus, p: Poly, value: Poly) -> Poly:
    """Return a polynomial where a value is zero, with one atom of the value replaced."""
    for mono, c in value:
        rest = a.sub(value, ((mono, c),))
        if len(mono) == 1 and mono[0][1] == 1 and not _reads(a, rest, mono[0][0]):
            return _with_atom(a, p, mono[0][0], a.scale(Fraction(-1) / Fraction(c), rest))
    for mono, c in value:
        if (made := _reduced(a, p, value, mono, c)) == ZERO:
            return made
    return p


def _with_atom(a: Calculus, p: Poly, atom: Atom, value: Poly) -> Poly:
    """Return a polynomial with an atom replaced, inside other forms too."""
    return a.replaced(
        p, {atom.form: lambda at: value if at == atom.at else a.of(Atom(atom.form, at))}
    )


def _reduced(a: Calculus, p: Poly, value: Poly, lead: Mono, c: Number) -> Poly:
    """Return p less multiples of a value that is zero, as a division by one of its terms."""
    for _ in range(len(p) * len(value)):
        term = next((t for t in p if _divides(lead, t[0])), None)
        if term is None:
            break
        factors = dict(term[0])
        for atom, e in lead:
            factors[atom] -= e
        quotient = a.term(Fraction(term[1]) / Fraction(c), factors)
        p = a.sub(p, a.mul(quotient, value))
    return p


def _divides(lead: Mono, mono: Mono) -> bool:
    powers = dict(mono)
    return bool(lead) and all(powers.get(atom, 0) >= e > 0 for atom, e in lead)


def _reads(a: Calculus, p: Poly, atom: Atom) -> bool:
    return any(atom.form in a.reached(x.form) for mono, _ in p for x, _ in mono)
