"""Affine recurrences h(t+1) = a(t)·h(t) + b(t) as forms, and products as recurrences.

Π_{k<n} exp(x[k])  →  exp(Σ_k x[k])
"""

from __future__ import annotations

from collections.abc import Sequence

from symjax_rewrite.proofs.algebra import functions, reductions
from symjax_rewrite.proofs.algebra.arithmetic import Calculus, operation
from symjax_rewrite.proofs.algebra.forms import ONE, ZERO, Branches, Form, Poly, mono_reads, plain


def recurrence(a: Calculus, factor: Poly, shift: Poly, start: Poly, step: int, at: Poly) -> Poly:
    """Return h(at) of h(0) = start, h(t+1) = factor(t)·h(t) + shift(t)."""
    if shift == ZERO and start == ZERO:
        return ZERO
    steps = [bound_names(a, [step], p) for p in (factor, shift)]
    return affine_again(a, None, [*steps, ((), start), ((), at)])


def affine_again(a: Calculus, form: Form | None, branches: Branches) -> Poly:
    """Make an affine recurrence of its factors, its shifts, its start and its place.

    h(e + 1) becomes a(e)·h(e) + b(e), for an index e. With one factor a for all steps and no shift,
    h(e) is a^e·h(0).
    """
    (_, start), (_, place) = branches[2:]
    if place == ZERO:
        return start
    (names, factor), (_, shift) = branches[:2]
    if shift == ZERO and not any(mono_reads(mono, names[0]) for mono, _ in factor):
        return a.mul(start, functions.pow_of(a, factor, place))
    facts = {"real": all(a.is_real(p) for _, p in branches)}
    made = a.of(a.table.intern("recurrence", None, branches, facts, keeps_bound=True))
    index, (least, _) = functions.as_index(a, place), functions.value_range(a, place)
    if index is None or least is None or not a.facts.nonnegative(least - 1):
        return made
    last = (index[0] - 1, index[1])
    factor, shift = (a.substitute(p, {names[0]: last}) for names, p in branches[:2])
    before = affine_again(a, form, [*branches[:3], ((), a.index(last))])
    return a.record("unfold", operation("same", made), a.add(a.mul(factor, before), shift))


def bound_names(a: Calculus, names: Sequence[int], p: Poly) -> tuple[list[int], Poly]:
    """Return a polynomial as a branch of a form, which binds some names."""
    fresh = [a.table.fresh(a.table.sizes[n]) for n in names]
    return fresh, a.substitute(p, dict(zip(names, map(plain, fresh), strict=True)))


def product(a: Calculus, p: Poly, k: int, count: Poly) -> Poly:
    """Return Π_{k < count} p(k): exponentials as the exponential of a sum, others as a recurrence.

    Σ_{k < count} is a sum over all k with the test [count − k > 0].
    """
    if len(p) != 1:
        return recurrence(a, p, ZERO, ONE, k, count)
    exponents = [(atom, e) for atom, e in p[0][0] if a.form(atom).kind == "exp"]
    if not exponents:
        return recurrence(a, p, ZERO, ONE, k, count)
    inside = functions.positive(a, a.sub(count, a.index(plain(k))))
    terms = [a.scale(e, a.operand(atom)) for atom, e in exponents]
    power = functions.exp(a, reductions.total(a, a.mul(inside, a.add(*terms)), (k,)))
    rest = a.term(p[0][1], {x: e for x, e in p[0][0] if (x, e) not in exponents})
    return power if rest == ONE else a.mul(power, recurrence(a, rest, ZERO, ONE, k, count))
