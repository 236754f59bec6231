"""Increasing functions, and places of extrema: laws of the order of values.

    argmax_k softmax(x)[k]  →  argmax_k x[k]

An increasing function of all entries keeps their order. The laws of sorted values are in `sorting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from symjax_rewrite.proofs.algebra import functions
from symjax_rewrite.proofs.algebra.arithmetic import Calculus, Operation
from symjax_rewrite.proofs.algebra.forms import (
    Atom,
    Branch,
    Form,
    Number,
    Poly,
    atom_reads,
    mono_reads,
    names_of,
    plain,
)

Function = Callable[[Poly], Poly]
UNSPLIT = frozenset("leaf index carry opaque recurrence iteration".split())


def common_factor(
    a: Calculus, branches: list[Branch], bound: set[int]
) -> tuple[Poly, list[Branch]]:
    """Return a positive factor of all branches, and the branches without it."""
    terms = [t for _, p in branches for t in p]
    common: dict[Atom, Number] = {}
    for atom in {x for mono, _ in terms for x, _ in mono}:
        if a.form(atom).sign == 2 and not any(atom_reads(atom, n) for n in bound):
            common[atom] = min(dict(mono).get(atom, 0) for mono, _ in terms)
    inverse = a.term(1, {atom: -e for atom, e in common.items()})
    rest = [(names, a.mul(p, inverse)) for names, p in branches]
    c = min((abs(Fraction(k)) for _, p in rest for _, k in p), default=Fraction(1))
    rest = [(names, a.scale(1 / c, p)) for names, p in rest]
    return a.term(c, common), rest


def peeled(a: Calculus, p: Poly, names: Sequence[int]) -> tuple[Function, Poly] | None:
    """Return (f, q) with p = f(q), where f is increasing and q reads the names; None if p is q."""
    outside = tuple([t for t in p if not any(mono_reads(t[0], n) for n in names)])
    if outside:
        return (lambda q: a.add(q, outside)), a.sub(p, outside)
    factor, ((_, rest),) = common_factor(a, [((), p)], set(names))
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


def without_order(a: Calculus, p: Poly, name: int) -> Poly | None:
    """Return f(x[j]) of f(sort(x)[j]), of a name j; None if p reads j in another way."""
    found: set[Atom | None] = set()

    def to(atom: Atom) -> Atom | Poly:
        if not atom_reads(atom, name):
            return atom
        form = a.form(atom)
        if form.kind != "sorted":
            if not form.branches or form.kind in UNSPLIT:
                found.add(None)
                return atom
            return a.again(atom, [(names, a.mapped(q, to)) for names, q in a.opened(atom)])
        ((other,), body), (_, at) = a.opened(atom)
        is_whole = at == a.index(plain(name)) and a.table.sizes[other] == a.table.sizes[name]
        found.add(atom if is_whole and name not in names_of(body) else None)
        return a.substitute(body, {other: plain(name)})

    made = a.mapped(p, to)
    return made if len(found) == 1 and None not in found else None


def place_again(a: Calculus, form: Form, branches: list[Branch]) -> Poly:
    """Make the place of an extremum, or in sorted order, of other operands."""
    ((name,), p), *rest = branches
    return place(a, form.kind, name, p, rest)
