"""Sorted values, and the equations `argmax`, `argmin`, `sort` and `top_k`.

sort(−2·x)[j]  →  −2·sort(x)[n−1−j];   x[argmax(exp(x))]  →  max_k x[k]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from symjax_rewrite.ir.sizes import from_jax
from symjax_rewrite.proofs.algebra import orders, reductions
from symjax_rewrite.proofs.algebra.arithmetic import Calculus, Operation
from symjax_rewrite.proofs.algebra.forms import ZERO, Atom, Branch, Index, Poly, plain
from symjax_rewrite.proofs.reading.entries import Reader, entry, place_of

SORTS = frozenset("argmax argmin sort top_k".split())


def ordered(reader: Reader, number: int, output: int, here: list[Index]) -> Poly | None:
    """Return an output of an equation that orders numbers along an axis; None without laws."""
    a, program = reader.a, reader.t.program
    e = program.equations[number]
    keys, params, made = e.invals[0], e.eqn.params, e.outvals[output]
    if not isinstance(keys, int) or params.get("num_keys", 1) != 1:
        return None
    shape = program.avals[keys].shape
    axis = params.get("dimension", params.get("axes", (params.get("axis", -1),))[0]) % len(shape)
    k = a.table.fresh(from_jax(shape[axis]))
    if e.name.startswith("arg"):
        read = entry(reader, made, keys, here, {axis: plain(k)}, lambda n: n - (n > axis))
        if read is None or not a.is_real(read):
            return None
        return orders.place(a, "argmax", k, a.scale(1 if e.name == "argmax" else -1, read))
    at = place_of(reader, made, axis, here)
    read = entry(reader, made, keys, here, {axis: plain(k)})
    if at is None or read is None or not a.is_real(read):
        return None
    sign = -1 if e.name == "top_k" else 1
    read, j = a.scale(sign, read), a.index(at)
    if output == 0:
        return a.scale(sign, sorted_value(a, k, read, j))
    if not params.get("is_stable", True):
        return None
    place = orders.place(a, "order", k, read, [((), j)])
    if e.name == "top_k":
        return place
    other = e.invals[output]
    if not isinstance(other, int):
        return None
    carried = entry(reader, made, other, here, {axis: plain(k)})
    return None if carried is None else taken(a, carried, [k], [place])


def sorted_value(a: Calculus, name: int, p: Poly, at: Poly) -> Poly:
    """Return entry `at` of the sorted values of a polynomial over a name."""
    before = Operation("sorted", (((name,), p), ((), at)))
    last = a.size(a.table.sizes[name] - 1)
    outer, inner = orders.unwrapped(a, p, [name])
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
        if orders.unwrapped(a, a.scale(sign, p), [name])[1] != body:
            continue
        if a.form(atom).kind == "argmax":
            made = a.scale(sign, reductions.maximum(a, [((name,), a.scale(sign, p))]))
        else:
            made = a.scale(sign, sorted_value(a, name, a.scale(sign, p), rest[0][1]))
        before = Operation("take", (((name,), p), ((), at)))
        return a.record("value_at_place", before, made)
    return None


def sorted_again(a: Calculus, _: Any, branches: list[Branch]) -> Poly:
    """Make an entry of sorted values of other operands."""
    ((name,), p), (_, at) = branches
    return sorted_value(a, name, p, at)


def taken(a: Calculus, p: Poly, names: Sequence[int], places: Sequence[Poly]) -> Poly:
    """Return a polynomial at values of some indices, which may be places of sorted values."""
    known = taken_at_place(a, p, names[0], places[0]) if len(names) == 1 else None
    return reductions.taken(a, p, names, places) if known is None else known
