"""Numbers of a program as exact numbers: rationals, roots of rationals, and known constants.

A number of a program is a rounded real. `0.08838835` and `1/sqrt(128.)` mean one number, and so do
`0.6931472` and `log(2.)`. A number is therefore read as the simplest real within its dtype's
rounding: an integer, a reciprocal, a short decimal, a root, a known constant. Any other number is
kept, and equals the numbers of the proof that differ from it by rounding alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

ROUNDING = {"float64": 2.0**-50, "float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}
DIGITS = {"float64": 12, "float32": 5, "float16": 3, "bfloat16": 2}  # of decimals
LARGEST_ROOT = 1 << 17
EXACT = 10**9  # denominators up to which a rational is not rounded


@dataclass(frozen=True, slots=True)
class ExactNumber:
    """coefficient · √radicand · Π constant^power, of constants "log2" and "pi"."""

    coefficient: Fraction
    radicand: Fraction = Fraction(1)
    constants: tuple[tuple[str, Fraction], ...] = ()


_HALF = Fraction(1, 2)
_KNOWN: tuple[tuple[float, ExactNumber], ...] = tuple(
    (value, ExactNumber(Fraction(1), Fraction(radicand), constants))
    for value, radicand, constants in (
        (math.log(2), 1, (("log2", Fraction(1)),)),
        (1 / math.log(2), 1, (("log2", Fraction(-1)),)),
        (math.pi, 1, (("pi", Fraction(1)),)),
        (1 / math.pi, 1, (("pi", Fraction(-1)),)),
        (math.sqrt(math.pi), 1, (("pi", _HALF),)),
        (1 / math.sqrt(math.pi), 1, (("pi", -_HALF),)),
        (math.sqrt(2 * math.pi), 2, (("pi", _HALF),)),
        (math.sqrt(2 / math.pi), 2, (("pi", -_HALF),)),
    )
)
_MULTIPLES = tuple(Fraction(1, n) for n in (1, 2, 3, 4, 8, 16)) + (
    Fraction(2), Fraction(3), Fraction(4), Fraction(8), Fraction(16),
)  # fmt: skip


@dataclass(slots=True)
class Numbers:
    """Numbers of one proof that are not simple; two that differ by rounding alone are one."""

    raw: list[Fraction] = field(default_factory=list)
    rounding: float = ROUNDING["float64"]

    def read(self, value: float, dtype: str) -> ExactNumber:
        """Return a finite number of a program as an exact number."""
        eps = ROUNDING.get(dtype, 0.0)
        self.rounding = max(self.rounding, 4 * eps)
        sign, size = (-1 if value < 0 else 1), abs(value)
        simple = _simple(size, eps, DIGITS.get(dtype, 17))
        if simple is not None:
            return ExactNumber(sign * simple)
        for known, exact in _KNOWN:
            for c in _MULTIPLES:
                if abs(size - float(c) * known) <= eps * size:
                    return ExactNumber(sign * c, exact.radicand, exact.constants)
        root = _root(size, eps)
        if root is not None:
            return ExactNumber(Fraction(sign), root)
        return ExactNumber(Fraction(sign) * self.met(Fraction(size)))

    def met(self, number: Fraction) -> Fraction:
        """Return a number, or one met before that differs from it by rounding alone."""
        if number.denominator <= EXACT:
            return number
        near = Fraction(self.rounding) * abs(number)
        for simple in (Fraction(round(number)), number.limit_denominator(64)):
            if simple and abs(simple - number) <= near:
                return simple
        for other in self.raw:
            if abs(other - number) <= near:
                return other
        self.raw.append(number)
        return number


def _simple(size: float, eps: float, digits: int) -> Fraction | None:
    """Return an integer, a binary fraction, a reciprocal or a short decimal near a number."""
    exact = Fraction(size)
    if exact.denominator <= 1 << 10:
        return exact
    reciprocal = round(1 / size)
    if reciprocal <= LARGEST_ROOT and abs(1 / size - reciprocal) <= eps * reciprocal:
        return Fraction(1, reciprocal)
    decimal = Fraction(f"{size:.{digits}g}")
    return decimal if abs(decimal - exact) <= eps * size else None


def _root(size: float, eps: float) -> Fraction | None:
    """Return n or 1/n if a number is its square root."""
    for flipped in (False, True):
        square = (1 / size if flipped else size) ** 2
        n = round(square) if square <= LARGEST_ROOT else 0
        if n > 1 and abs(square - n) <= 4 * eps * n:
            return Fraction(1, n) if flipped else Fraction(n)
    return None


def prime_powers(number: Fraction) -> dict[int, int] | None:
    """Return a positive rational as powers of primes; None if it has large factors."""
    out: dict[int, int] = {}
    for part, sign in ((number.numerator, 1), (number.denominator, -1)):
        for p in (2, 3, 5, 7, *range(11, 1000, 2)):
            while part % p == 0:
                out[p] = out.get(p, 0) + sign
                part //= p
        if part > 1:
            if part > 10**6:  # it may be a product of primes above 1000
                return None
            out[part] = out.get(part, 0) + sign
    return {p: k for p, k in out.items() if k}
