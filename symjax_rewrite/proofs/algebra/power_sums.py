"""Sums of powers of an index: Σ_{k<n} k^p as a polynomial of n (Faulhaber's formula)."""

from __future__ import annotations

from fractions import Fraction
from math import comb

from symjax_rewrite.proofs.algebra.arithmetic import Calculus
from symjax_rewrite.proofs.algebra.forms import Atom, Mono, Number, Poly, atom_reads

MOST_POWER = 8


def power_of_index(a: Calculus, mono: Mono, name: int) -> int | None:
    """Return p if all factors of a term that read an index are its power p; else None."""
    inside = [(atom, e) for atom, e in mono if atom_reads(atom, name)]
    if not inside:
        return 0
    ((atom, e), *others) = inside
    is_power = not others and a.form(atom).kind == "index" and e == int(e) and 0 < e <= MOST_POWER
    return int(e) if is_power else None


def power_sum(a: Calculus, p: int, count: Poly) -> Poly:
    """Return 0^p + 1^p + … + (count − 1)^p, of a count that is not negative."""
    terms = [
        a.scale(Fraction(comb(p + 1, j), p + 1) * b, a.power(count, p + 1 - j))
        for j, b in enumerate(_bernoulli(p))
    ]
    return a.add(*terms)


def _bernoulli(p: int) -> list[Fraction]:
    """Return the Bernoulli numbers B_0 … B_p, with B_1 = −1/2."""
    out = [Fraction(1)]
    for n in range(1, p + 1):
        out.append(-sum((comb(n + 1, k) * out[k] for k in range(n)), Fraction(0)) / (n + 1))
    return out


def without_index(mono: Mono, name: int) -> dict[Atom, Number]:
    """Return the factors of a term that do not read an index."""
    return {atom: e for atom, e in mono if not atom_reads(atom, name)}
