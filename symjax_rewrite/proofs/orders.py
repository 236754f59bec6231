"""Extrema, their places, and sorted values: laws of increasing functions.

    argmax_k softmax(x)[k]  →  argmax_k x[k];   sort(−2·x)[j]  →  −2·sort(x)[n−1−j]

An increasing function of all entries keeps their order, and leaves maxima and sorted values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from symjax_rewrite.proofs import functions, reductions
from symjax_rewrite.proofs.arithmetic import Calculus, Operation
from symjax_rewrite.proofs.forms import (
    ZERO,
    Atom,
    Branch,
    Form,
    Poly,
    atom_reads,
    mono_reads,
    names_of,
    plain,
)

Function = Callable[[Poly], Poly]


def peeled(a: Calculus, p: Poly, names: Sequence[int]) -> tuple[Function, Poly] | None:
    """Return (f, q) with p = f(q), where f is increasing and q reads the names; None if p is q."""
    outside = tuple([t for t in p if not any(mono_reads(t[0], n) for n in names)])
    if outside:
        return (lambda q: a.add(q, outside)), a.sub(p, outside)
    factor, ((_, rest),) = reductions.common_factor(a, [((), p)], set(names))
    if rest != p:
        return (lambda q: a.mul(factor, q)), rest
    return increasing(a, p)


def increasing(a: Calculus, p: Poly) -> tuple[Function, Poly] | None:
    """Return (f, q) with p = f(q), where f is exp, log or a power, or −f(−x) of one."""
    if len(p) != 1 or not a.is_real(p) or not p[0][0]:
        return None
    ((mono, c),) = p
    sign = 1 if c > 0 else -1
    ((atom, e), *others), up = mono, a.scale(sign, p)
    kinds = {a.form(x).kind for x, _ in mono}
    if kinds == {"exp"}:
        inner = functions.log(a, up)
        return (lambda q: a.scale(sign, functions.exp(a, a.scale(sign, q)))), a.scale(sign, inner)
    if others or c not in (1, -1):
        return None
    if kinds == {"log"} and e == 1:
        return (lambda q: a.scale(sign, functions.log(a, a.scale(sign, q)))), a.scale(
            sign, a.operand(atom)
        )
    base = a.operand(atom) if kinds == {"power"} else a.of(atom)
    known = a.sign(base)
    if (e == 1 and kinds != {"power"}) or not known or (e < 0 and known < 2):
        return None
    turn = sign if e > 0 else -sign
    return (lambda q: a.scale(sign, a.power(a.scale(turn, q), e))), a.scale(turn, base)


def unwrapped(a: Calculus, p: Poly, names: Sequence[int]) -> tuple[list[Function], Poly]:
    """Return increasing functions, the outermost first, and the polynomial that they are of."""
    outer: list[Function] = []
    while (found := peeled(a, p, names)) is not None:
        outer.append(found[0])
        p = found[1]
    return outer, p


def place(a: Calculus, kind: str, name: int, p: Poly, rest: Sequence[Branch] = ()) -> Poly:
    """Return the first place of the largest value (`argmax`), or the j-th place in sorted order."""
    inner = unwrapped(a, p, [name])[1]
    facts = {"sign": 1, "integer": True, "most": a.table.sizes[name] - 1}
    made = a.of(a.table.intern(kind, None, [((name,), inner), *rest], facts, keeps_bound=True))
    if inner != p:
        a.record("order", Operation(kind, (((name,), p), *map(_bare, rest))), made)
    return made


def _bare(branch: Branch) -> Branch:
    return tuple(branch[0]), branch[1]


def sorted_value(a: Calculus, name: int, p: Poly, at: Poly) -> Poly:
    """Return entry `at` of the sorted values of a polynomial over a name."""
    before = Operation("sorted", (((name,), p), ((), at)))
    last = a.size(a.table.sizes[name] - 1)
    outer, inner = unwrapped(a, p, [name])
    opposite = a.scale(-1, inner)
    mine, other = (
        a.table.intern("oriented", None, [((name,), q)], {}, keeps_bound=True)
        for q in (inner, opposite)
    )
    made = _sorted(a, name, inner, at, last)
    if other < mine:
        made = a.scale(-1, _sorted(a, name, opposite, a.sub(last, at), last))
    for function in reversed(outer):
        made = function(made)
    plain_sort = len(made) == 1 and made[0][1] == 1 and not outer and mine <= other
    return made if plain_sort else a.record("sort", before, made)


def _sorted(a: Calculus, name: int, p: Poly, at: Poly, last: Poly) -> Poly:
    if at == last:
        return reductions.maximum(a, [((name,), p)])
    if at == ZERO:
        return reductions.minimum(a, [((name,), p)])
    atom = sorted_atom(a, p)
    if atom is not None:
        body, (_, read) = a.opened(atom)
        if read == a.index(plain(name)) and a.table.sizes[body[0][0]] == a.table.sizes[name]:
            return sorted_value(a, body[0][0], body[1], at)
    facts = {"sign": a.sign(p), "real": a.is_real(p), "integer": a.is_integer(p)}
    branches = [((name,), p), ((), at)]
    return a.of(a.table.intern("sorted", None, branches, facts, keeps_bound=True))


def sorted_atom(a: Calculus, p: Poly) -> Atom | None:
    """Return the atom of a polynomial that is one entry of sorted values."""
    if len(p) == 1 and p[0][1] == 1 and len(p[0][0]) == 1 and p[0][0][0][1] == 1:
        atom = p[0][0][0][0]
        return atom if a.form(atom).kind == "sorted" else None
    return None


def without_order(a: Calculus, p: Poly, name: int) -> Poly | None:
    """Return f(x[j]) of f(sort(x)[j]), of a name j; None if p reads j in another way."""
    found: set[Atom | None] = set()

    def to(atom: Atom) -> Atom | Poly:
        if not atom_reads(atom, name):
            return atom
        form = a.form(atom)
        if form.kind != "sorted":
            if not form.branches or form.kind in reductions.UNSPLIT:
                found.add(None)
                return atom
            return a.again(atom, [(names, a.mapped(q, to)) for names, q in a.opened(atom)])
        ((other,), body), (_, at) = a.opened(atom)
        is_whole = at == a.index(plain(name)) and a.table.sizes[other] == a.table.sizes[name]
        found.add(atom if is_whole and name not in names_of(body) else None)
        return a.substitute(body, {other: plain(name)})

    made = a.mapped(p, to)
    return made if len(found) == 1 and None not in found else None


def taken_at_place(a: Calculus, p: Poly, name: int, at: Poly) -> Poly | None:
    """Return the value at the place of an extremum or of the j-th of sorted values, if known."""
    atom = at[0][0][0][0] if len(at) == 1 and at[0][1] == 1 and len(at[0][0]) == 1 else None
    if atom is None or a.form(atom).kind not in ("argmax", "order"):
        return None
    ((bound,), body), *rest = a.opened(atom)
    if a.table.sizes[bound] != a.table.sizes[name]:
        return None
    body = a.substitute(body, {bound: plain(name)})
    for sign in (1, -1):
        if unwrapped(a, a.scale(sign, p), [name])[1] != body:
            continue
        if a.form(atom).kind == "argmax":
            made = a.scale(sign, reductions.maximum(a, [((name,), a.scale(sign, p))]))
        else:
            made = a.scale(sign, sorted_value(a, name, a.scale(sign, p), rest[0][1]))
        before = Operation("take", (((name,), p), ((), at)))
        return a.record("value_at_place", before, made)
    return None


def place_again(a: Calculus, form: Form, branches: list[Branch]) -> Poly:
    """Make the place of an extremum, or in sorted order, of other operands."""
    ((name,), p), *rest = branches
    return place(a, form.kind, name, p, rest)


def sorted_again(a: Calculus, _: Any, branches: list[Branch]) -> Poly:
    """Make an entry of sorted values of other operands."""
    ((name,), p), (_, at) = branches
    return sorted_value(a, name, p, at)
