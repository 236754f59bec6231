"""Elementwise functions of normal forms: exponentials, logarithms, tests, selections.

exp(x + 2·y)  →  exp(x)·exp(y)², by `exp_of_sum`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from symjax_rewrite.ir.sizes import Dim, simplify
from symjax_rewrite.proofs.algebra.arithmetic import Calculus, operation
from symjax_rewrite.proofs.algebra.exact_numbers import prime_powers
from symjax_rewrite.proofs.algebra.forms import (
    ONE,
    ZERO,
    Atom,
    Index,
    Mono,
    Number,
    Poly,
    linear,
    number_of,
)
from symjax_rewrite.proofs.algebra.trigonometry import cosine, sine, tangent

ODD = frozenset("sin tan asin atan sinh asinh erf erf_inv cbrt sign".split())
EVEN = frozenset(["cos"])
TRIGONOMETRIC = {"sin": sine, "cos": cosine, "tan": tangent}


def exp(a: Calculus, p: Poly) -> Poly:
    """Return exp of a polynomial, as a product of powers of exp of its terms."""
    out = ONE
    for mono, c in p:
        out = a.mul(out, _exp_of_term(a, mono, c))
    if len(p) > 1 or (p and p[0][1] != 1):
        a.record("exp_of_sum", operation("exp", p), out)
    return out


def _exp_of_term(a: Calculus, mono: Mono, c: Number) -> Poly:
    whole = operation("exp", ((mono, c),))
    bit = next((atom for atom, _ in mono if a.form(atom).bit), None)
    if bit is not None:
        inside = _exp_of_term(a, tuple([f for f in mono if f[0] != bit]), c)
        test = a.of(bit)
        return a.record("exp_of_case", whole, a.add(a.mul(test, inside), a.sub(ONE, test)))
    if len(mono) == 1 and mono[0][1] == 1:
        atom = mono[0][0]
        kind, name = a.form(atom).kind, str(a.form(atom).attr)
        if kind == "infinity" and c < 0:
            return ZERO
        if kind == "mask" and c > 0:
            return a.record("masked", whole, a.operand(atom))
        if kind == "log":
            return a.record("exp_of_log", whole, a.power(a.operand(atom), Fraction(c)))
        if kind == "symbol" and name.startswith("log ") and Fraction(c).denominator == 1:
            return a.constant(Fraction(int(name[4:])) ** int(c))
    inner: Poly = ((mono, 1),)
    facts = {"sign": 2 if a.is_real(inner) else 0, "real": a.is_real(inner)}
    return a.term(1, {a.table.intern("exp", None, [((), inner)], facts): c})


def log(a: Calculus, p: Poly) -> Poly:
    """Return log of a polynomial, as a sum of multiples of logs of its factors."""
    return a.cases(lambda q: _log(a, q), p)


def _log(a: Calculus, p: Poly) -> Poly:
    if not p:
        return _log_atom(a, p)
    content, inner = a.content(p, only_positive=True)
    ((mono, c),) = content
    parts, rest = [_log_of_number(a, Fraction(c))], inner
    for atom, e in mono:
        parts.append(a.scale(e, _log_of_positive(a, atom)))
    if len(inner) == 1 and inner[0][1] == 1:
        free = dict(inner[0][0])
        for atom, e in inner[0][0]:
            if a.form(atom).sign == 2:
                parts.append(a.scale(e, _log_of_positive(a, atom)))
                del free[atom]
        rest = a.term(1, free)
        if len(free) == 1 and a.form(next(iter(free))).sign == 1:
            ((atom, e),) = free.items()
            parts.append(a.scale(e, _log_atom(a, a.of(atom))))
            rest = ONE
    if rest != ONE:
        parts.append(_log_atom(a, rest))
    made = a.add(*parts)
    if len(parts) > 2 or rest == ONE or c != 1:
        a.record("log_of_product", operation("log", p), made)
    return made


def _log_atom(a: Calculus, p: Poly) -> Poly:
    return a.made("log", None, p, real=a.is_real(p))


def _log_of_number(a: Calculus, c: Fraction) -> Poly:
    powers = prime_powers(c)
    if powers is None:
        return a.constant(a.numbers.met(Fraction(math.log(c))))
    return a.add(*[a.scale(k, a.prime_log(p)) for p, k in powers.items()])


def _log_of_positive(a: Calculus, atom: Atom) -> Poly:
    form = a.form(atom)
    if form.kind == "exp":
        return a.operand(atom)
    if form.kind == "prime":
        return a.prime_log(form.attr)
    return _log_atom(a, a.operand(atom) if form.kind == "power" else a.of(atom))


# ---------------------------------------------------------------- tests


def positive(a: Calculus, p: Poly) -> Poly:
    """Return [p > 0]: 1 where the test holds, else 0."""
    return a.cases(lambda q: _positive(a, q), p)


def _positive(a: Calculus, p: Poly) -> Poly:
    decided = _decided(a, p)
    if decided is not None:
        return decided
    if (logs := _compared_exponents(a, p)) is not None:
        return a.record("monotone", operation("positive", p), positive(a, logs))
    if a.is_integer(p):
        return _positive_integer(a, p)
    content, inner = a.content(p, only_positive=True)
    made = a.test("positive", inner)
    return made if content == ONE else a.record("positive_factor", operation("positive", p), made)


def _positive_integer(a: Calculus, p: Poly) -> Poly:
    """Return [p > 0] of integers: in lowest terms, and with a number ≤ 0."""
    varying = tuple([t for t in p if t[0]])
    number = next((c for mono, c in p if not mono), 0)
    gcd = math.gcd(*(int(c) for _, c in varying))
    reduced = a.add(a.scale(Fraction(1, gcd), varying), a.constant(-(-number // gcd)))
    least = next((c for mono, c in reduced if not mono), 0)
    if least <= 0:
        made = a.test("positive", reduced)
    else:
        made = a.sub(ONE, a.test("positive", a.sub(ONE, reduced)))
    if made != a.test("positive", p):
        a.record("integer_test", operation("positive", p), made)
    return made


def zero(a: Calculus, p: Poly) -> Poly:
    """Return [p = 0]."""
    return a.cases(lambda q: _zero(a, q), p)


def _zero(a: Calculus, p: Poly) -> Poly:
    if not p:
        return ONE
    if number_of(p) is not None or a.sign(p) == 2 or a.sign(a.scale(-1, p)) == 2:
        return ZERO
    if any(_decided(a, q) == ONE for q in (p, a.scale(-1, p))):
        return ZERO
    if (logs := _compared_exponents(a, p)) is not None:
        return a.record("monotone", operation("zero", p), zero(a, logs))
    inner = a.content(p, only_positive=True)[1]
    return a.of(a.even("zero", None, inner, {"bit": True, "integer": True, "sign": 1}))


def _compared_exponents(a: Calculus, p: Poly) -> Poly | None:
    """Return log x − log y of a difference x − y of products of exponentials, else None."""
    if len(p) != 2 or not any(mono for mono, _ in p) or not a.is_real(p):
        return None
    above, below = sorted(p, key=lambda term: -Fraction(term[1]))
    kinds = {a.form(atom).kind for mono, _ in p for atom, _ in mono}
    if above[1] < 0 or below[1] > 0 or kinds != {"exp"}:
        return None
    return a.sub(log(a, (above,)), log(a, a.scale(-1, (below,))))


def _decided(a: Calculus, p: Poly) -> Poly | None:
    """Return [p > 0] if it is known: by signs, or by the ranges of integers."""
    if not p:
        return ZERO
    if a.sign(p) == 2:
        return ONE
    if a.sign(a.scale(-1, p)):
        return ZERO
    low, high = value_range(a, p)
    if low is not None and a.facts.nonnegative(low - 1):
        return ONE
    return ZERO if high is not None and a.facts.nonnegative(-1 * high) else None


def value_range(a: Calculus, p: Poly) -> tuple[Dim | None, Dim | None]:
    """Return the least and the largest value of a sum of integers; None for one not known."""
    low, high = 0, 0
    read: list[tuple[Mono, Number]] = []
    for mono, c in p:
        ends = _atom_range(a, mono[0][0]) if len(mono) == 1 and mono[0][1] == 1 else None
        if ends is None:
            read.append((mono, c))
            continue
        mine, other = ends if c > 0 else ends[::-1]
        whole = Fraction(c).denominator == 1
        low = None if not whole or low is None or mine is None else low + int(c) * mine
        high = None if not whole or high is None or other is None else high + int(c) * other
    index = as_index(a, tuple(read))
    ends = None if index is None else a.table.index_range(index)
    if ends is None:
        return None, None
    return (
        None if low is None else simplify(low + ends[0]),
        None if high is None else simplify(high + ends[1]),
    )


def _atom_range(a: Calculus, atom: Atom) -> tuple[Dim | None, Dim | None] | None:
    """Return the range of an integer atom; None of an index, of a size and of other values."""
    form = a.form(atom)
    if form.kind in ("index", "size") or not form.integer:
        return None
    if form.kind != "max":
        return (0 if form.sign else None), (1 if form.bit else form.most)
    lows, highs = zip(*[value_range(a, p) for _, p in a.opened(atom)], strict=True)
    known = [x for x in lows if x is not None]
    return _largest(a, known) or next(iter(known), None), _largest(a, highs)


def _largest(a: Calculus, sizes: Sequence[Dim | None]) -> Dim | None:
    """Return the largest of some numbers, if it is known which one it is."""
    known = [x for x in sizes if x is not None]
    if len(known) < len(sizes):
        return None
    return next((x for x in known if all(a.facts.nonnegative(x - y) for y in known)), None)


def is_within(a: Calculus, p: Poly, size: Dim) -> bool:
    """Return True if the values of p are known to be integers in [0, size)."""
    low, high = value_range(a, p)
    if low is None or high is None or not a.is_integer(p):
        return False
    return a.facts.nonnegative(low) and a.facts.nonnegative(size - 1 - high)


def as_index(a: Calculus, p: Poly) -> Index | None:
    """Return a sum of indices and sizes as an index expression; None if it is another value."""
    offset, terms = 0, []
    for mono, c in p:
        if Fraction(c).denominator != 1:
            return None
        kinds = [a.form(atom).kind for atom, _ in mono]
        if not mono:
            offset = int(c)
        elif kinds == ["index"] and mono[0][1] == 1:
            terms.append((mono[0][0].at[0][1][0][0], int(c)))
        elif set(kinds) == {"size"}:
            sizes = tuple(sorted((a.form(x).attr, int(e)) for x, e in mono))
            if sizes not in a.table.monomials:
                return None
            terms.append((-1 - a.table.monomials.index(sizes), int(c)))
        else:
            return None
    return linear(offset, terms)


# ---------------------------------------------------------------- selections and other functions


def select(a: Calculus, test: Poly, yes: Poly, no: Poly) -> Poly:
    """Return `yes` where a test is 1 and `no` where it is 0; −∞ becomes a mask."""
    least = a.scale(-1, a.infinity())
    if yes == least and no == least:
        return least
    if no == least:
        return a.add(yes, mask(a, test))
    if yes == least:
        return a.add(no, mask(a, a.sub(ONE, test)))
    whole = operation("select", test, yes, no)
    for is_number, kept, other in ((test, yes, no), (a.sub(ONE, test), no, yes)):
        if _is_no_number_with(a, is_number, other):
            return a.record("not_a_number", whole, kept)
    return a.record("select", whole, a.case(test, yes, no))


def _is_no_number_with(a: Calculus, test: Poly, p: Poly) -> bool:
    """Return True if a test is [q is a number], and p has a term in every value that q reads."""
    terms = [mono[0][0] for mono, _ in p if len(mono) == 1 and not a.form(mono[0][0]).bit]
    if len(test) != 1 or test[0][1] != 1 or [a.form(x).kind for x, _ in test[0][0]] != ["zero"]:
        return False
    inside = [x for mono, _ in a.operand(test[0][0][0][0]) for x, _ in mono]
    if [a.form(x).attr for x in inside] != [("is_number", ())]:
        return False
    return all(x in terms for mono, _ in a.operand(inside[0]) for x, _ in mono)


def sign(a: Calculus, p: Poly, params: Any) -> Poly:
    """Return the sign of a real number: −1, 0 or 1."""
    if not a.maxima_as_cases or not a.is_real(p):
        return applied(a, "sign", params, p, integer=True)
    made = a.sub(positive(a, p), positive(a, a.scale(-1, p)))
    return a.record("sign", operation("map", p, attr=("sign", params)), made)


def mask(a: Calculus, test: Poly) -> Poly:
    """Return 0 where a test is 1 and −∞ where it is 0."""
    if test in (ONE, ZERO):
        return ZERO if test == ONE else a.scale(-1, a.infinity())
    return a.made("mask", None, test)


def applied(a: Calculus, name: str, params: Any, *operands: Poly, integer: bool = False) -> Poly:
    """Return a function that has the laws of cases, of parity and of angles alone."""
    if a.angle_sums and name in TRIGONOMETRIC:
        return TRIGONOMETRIC[name](a, params, *operands)
    if name in OF_TWO:
        return OF_TWO[name](a, *operands)
    if name in ROUNDED and (number := number_of(operands[0])) is not None:
        return a.constant(ROUNDED[name](Fraction(number)))
    if len(operands) == 1:
        return a.cases(lambda p: _applied(a, name, params, integer, p), operands[0])
    return _applied(a, name, params, integer, *operands)


def _applied(a: Calculus, name: str, params: Any, integer: bool, *operands: Poly) -> Poly:
    p = operands[0] if operands else ZERO
    if name in ODD | EVEN:
        if not p and name in ODD:
            return ZERO
        if p and a.oriented(p)[0] < 0:
            made = applied(a, name, params, a.scale(-1, p), integer=integer)
            made = a.scale(-1, made) if name in ODD else made
            return a.record("parity", operation("map", p, attr=(name, params)), made)
    real = all(map(a.is_real, operands)) and name != "complex"
    real = real or name in ("real", "imag")
    return a.made("map", (name, params), *operands, real=real, integer=integer)


def absolute(a: Calculus, p: Poly) -> Poly:
    """Return the absolute value of a polynomial."""
    return a.cases(lambda q: _absolute(a, q), p)


def _absolute(a: Calculus, p: Poly) -> Poly:
    if not a.is_real(p):
        return applied(a, "abs", (), p)
    if a.sign(p):
        return p
    if len(p) == 1:
        out = a.constant(abs(Fraction(p[0][1])))
        for atom, e in p[0][0]:
            even = Fraction(e).denominator == 1 and e % 2 == 0
            same = a.form(atom).sign or even
            out = a.mul(out, a.power(a.of(atom) if same else a.absolute(atom), e))
        return out
    content, inner = a.content(p, only_positive=True)
    if a.maxima_as_cases:
        positive_part = a.mul(positive(a, inner), inner)
        return a.mul(content, a.sub(a.scale(2, positive_part), inner))
    return a.mul(content, a.of(a.even("abs", None, inner, {"sign": 1})))


def logistic(a: Calculus, p: Poly) -> Poly:
    """Return 1/(1 + exp(−p))."""
    made = a.power(a.add(ONE, exp(a, a.scale(-1, p))), -1)
    return a.record("logistic", operation("logistic", p), made)


def tanh(a: Calculus, p: Poly) -> Poly:
    """Return 1 − 2/(exp(2p) + 1)."""
    inverse = a.power(a.add(ONE, exp(a, a.scale(2, p))), -1)
    made = a.sub(ONE, a.scale(2, inverse))
    return a.record("tanh", operation("map", p, attr=("tanh", ())), made)


def pow_of(a: Calculus, base: Poly, e: Poly) -> Poly:
    """Return base^e: a power if the exponent is a number, else exp(e·log base) of base > 0."""
    if (number := number_of(e)) is not None:
        return a.power(base, Fraction(number))
    if a.sign(base) == 2:
        return exp(a, a.mul(e, log(a, base)))
    whole = _applied(a, "pow", (), False, base, e)
    added = next((int(c) for mono, c in e if not mono), 0)
    rest = a.add(e, a.constant(-added))
    if added > 0 and is_count(a, rest):
        return a.record(
            "powers", operation("same", whole), a.mul(a.power(base, added), pow_of(a, base, rest))
        )
    return whole


def is_count(a: Calculus, p: Poly) -> bool:
    """Return True if the values of p are known to be integers that are not negative."""
    low, _ = value_range(a, p) if a.is_integer(p) else (None, None)
    return low is not None and a.facts.nonnegative(low)


def angle_of(a: Calculus, y: Poly, x: Poly) -> Poly:
    """Return atan2(y, x) without a common positive factor; atan(y/x) where x > 0."""
    whole = operation("map", y, x, attr=("atan2", ()))
    if not (a.is_real(x) and a.is_real(y)):
        return _applied(a, "atan2", (), False, y, x)
    if a.sign(x) == 2:
        return a.record("angle", whole, arctangent(a, a.mul(y, a.power(x, -1))))
    if not (x or y):
        return ZERO
    below = a.power(a.content(x or y, only_positive=True)[0], -1)
    made = _applied(a, "atan2", (), False, a.mul(y, below), a.mul(x, below))
    return made if below == ONE else a.record("angle", whole, made)


def arctangent(a: Calculus, p: Poly) -> Poly:
    """Return the arc tangent of a polynomial."""
    return applied(a, "atan", ((), "f"), p)


OF_TWO = {"pow": pow_of, "atan2": angle_of}
ROUNDED = {"floor": math.floor, "ceil": math.ceil, "truncate": math.trunc}


def conjugate(a: Calculus, p: Poly) -> Poly:
    """Return the complex conjugate, by terms and factors."""
    return a.mapped(p, lambda atom: _conjugate_atom(a, atom))


def _conjugate_atom(a: Calculus, atom: Atom) -> Atom | Poly:
    form = a.form(atom)
    if form.real:
        return atom
    if form.kind == "imaginary":
        return a.scale(-1, a.of(atom))
    if form.kind == "map" and form.attr[0] == "conj":
        return a.operand(atom)
    if form.kind == "exp":
        return exp(a, conjugate(a, a.operand(atom)))
    return _applied(a, "conj", (), False, a.of(atom))
