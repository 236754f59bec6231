"""Sines and cosines of normal forms: of sums, of multiples, and of quarters of a turn.

sin(x + 2·y)  →  sin(x)·(1 − 2·sin(y)²) + 2·cos(x)·sin(y)·cos(y), by `angle_sum`

Squares of sines are written by cosines (`Calculus.term`), so that such polynomials have one form.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from symjax_rewrite.proofs.algebra.arithmetic import Calculus, operation
from symjax_rewrite.proofs.algebra.forms import ONE, ZERO, Mono, Number, Poly

MOST_ANGLES = 4  # terms of an angle that are taken apart
MOST_MULTIPLE = 4  # multiples of an angle that are taken apart

Pair = tuple[Poly, Poly]  # the sine and the cosine of one angle


def sine(a: Calculus, params: Any, p: Poly) -> Poly:
    """Return the sine of an angle."""
    return a.cases(lambda q: _taken_apart(a, params, q, 0), p)


def cosine(a: Calculus, params: Any, p: Poly) -> Poly:
    """Return the cosine of an angle."""
    return a.cases(lambda q: _taken_apart(a, params, q, 1), p)


def tangent(a: Calculus, params: Any, p: Poly) -> Poly:
    """Return sin/cos of an angle."""
    made = a.mul(sine(a, params, p), a.power(cosine(a, params, p), -1))
    return a.record("tangent", operation("map", p, attr=("tan", params)), made)


def _taken_apart(a: Calculus, params: Any, p: Poly, which: int) -> Poly:
    if len(p) > MOST_ANGLES:
        return _plain(a, params, p)[which]
    found: Pair = (ZERO, ONE)
    for mono, c in p:
        found = _angle_sum(a, found, _of_term(a, params, mono, c))
    if len(p) != 1 or p[0][1] != 1:
        before = operation("map", p, attr=(("sin", "cos")[which], params))
        a.record("angle_sum", before, found[which])
    return found[which]


def _of_term(a: Calculus, params: Any, mono: Mono, c: Number) -> Pair:
    """Return sine and cosine of c·mono: c = n/d as n times an angle, π/2 as known values."""
    c = Fraction(c)
    is_turn = len(mono) == 1 and mono[0][1] == 1 and a.form(mono[0][0]).attr == "pi"
    if is_turn and (2 * c).denominator == 1:
        quarter = int(2 * c) % 4
        return a.constant((0, 1, 0, -1)[quarter]), a.constant((1, 0, -1, 0)[quarter])
    count = abs(c.numerator) if abs(c.numerator) <= MOST_MULTIPLE else 1
    once = _plain(a, params, ((mono, _whole(abs(c) / count)),))
    found = once
    for _ in range(count - 1):
        found = _angle_sum(a, found, once)
    return (a.scale(-1, found[0]), found[1]) if c < 0 else found


def _angle_sum(a: Calculus, x: Pair, y: Pair) -> Pair:
    sin = a.add(a.mul(x[0], y[1]), a.mul(x[1], y[0]))
    return sin, a.sub(a.mul(x[1], y[1]), a.mul(x[0], y[0]))


def _plain(a: Calculus, params: Any, p: Poly) -> Pair:
    """Return sine and cosine of an angle that is not taken apart."""
    sign, angle = a.oriented(p) if len(p) > 1 else (1, p)
    sin, cos = (
        a.made("map", (name, params), angle, real=a.is_real(angle)) for name in ("sin", "cos")
    )
    return a.scale(sign, sin), cos


def _whole(c: Fraction) -> Number:
    return c.numerator if c.denominator == 1 else c
