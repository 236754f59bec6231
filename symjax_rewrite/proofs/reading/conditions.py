"""Conditions under which a program is defined: no division by zero, no root of a negative number.

Two programs are equal *everywhere* only if they are defined at the same points. `x/x` is 1 wherever
it is defined, and is no proof of 1 at x = 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from symjax_rewrite.proofs.algebra.arithmetic import Calculus
from symjax_rewrite.proofs.algebra.forms import ZERO, Atom, Poly, names_of
from symjax_rewrite.proofs.algebra.functions import positive, zero
from symjax_rewrite.proofs.algebra.sign_cases import bounds_of, with_known_tests


class Condition(NamedTuple):
    """A test that a polynomial must meet at all indices: "nonzero", "positive", "nonnegative"."""

    kind: str
    p: Poly


Given = tuple[tuple[Atom, int], ...]
Conditions = dict[int, Condition]  # by the number of their closed form


def undecided(a: Calculus, conditions: Iterable[Condition]) -> Conditions:
    """Return the conditions that do not always hold, in a standard form."""
    out: Conditions = {}
    for condition in conditions:
        for found in _simplified(a, condition):
            names = tuple(n for n in names_of(found.p))
            form = a.table.intern("condition", found.kind, [(names, found.p)], {}).form
            out[form] = found
    return out


def _simplified(a: Calculus, condition: Condition, given: Given = ()) -> Iterable[Condition]:
    """Yield the conditions on the factors of a value whose sign is unknown.

    given: tests with their values, where the value is read.
    """
    kind, p = condition
    sign = a.sign(p)
    if sign == 2 or (sign == 1 and kind == "nonnegative"):
        return
    if kind == "positive":
        yield from _simplified(a, Condition("nonnegative", p), given)
        yield from _simplified(a, Condition("nonzero", p), given)
        return
    tests = a.tests(p)
    if tests:
        for value in (0, 1):
            case = Condition(kind, a.assume(p, tests[0], value))
            yield from _simplified(a, case, (*given, (tests[0], value)))
        return
    if given and _holds(a, condition, given):
        return
    inner = a.content(p, only_positive=True)[1] if p else p
    if kind != "nonzero" or len(inner) != 1:
        yield Condition(kind, inner)
        return
    for atom, _ in inner[0][0]:
        form = a.form(atom)
        if form.kind == "power":
            yield from _simplified(a, Condition(kind, a.operand(atom)), given)
        elif form.sign < 2:
            yield Condition(kind, a.of(atom))


def _holds(a: Calculus, condition: Condition, given: Given) -> bool:
    """Return True if a condition follows from the values of tests: x ≠ 0 where [x > 0] is 1."""
    kind, p = condition
    fails = zero(a, p) if kind == "nonzero" else positive(a, a.scale(-1, p))
    for test, value in given:
        fails = a.assume(fails, test, value)
    known = [bound for test, value in given for bound in bounds_of(a, test, value)]
    return with_known_tests(a, fails, known) == ZERO
