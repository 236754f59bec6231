"""Sums and maxima over indices, and values at one index, as normal forms.

    Σ_k (a[i]·x[k] + y[k]·[k = e])  →  a[i]·Σ_k x[k] + y[e]

A sum is linear, factors that do not read the index leave it, sums of sums are one sum, and a sum of
a product of unconnected parts is the product of their sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.proofs.algebra import orders
from symjax_rewrite.proofs.algebra.arithmetic import Calculus, Operation, operation
from symjax_rewrite.proofs.algebra.forms import (
    ONE,
    ZERO,
    Atom,
    Branch,
    Index,
    Mono,
    Number,
    Poly,
    atom_reads,
    linear,
    mono_reads,
    names_of,
    number_of,
    plain,
)
from symjax_rewrite.proofs.algebra.functions import as_index, is_count, is_within, positive
from symjax_rewrite.proofs.algebra.power_sums import power_of_index, power_sum, without_index

MOST_OPENED = 4  # powers of a sum that are opened inside another sum
MOST_ENTRIES = 16  # values of an index that are read one by one


def total(a: Calculus, p: Poly, names: Sequence[int]) -> Poly:
    """Return the sum of a polynomial over bound names."""
    if any(a.table.sizes[n] == 0 for n in names):
        return ZERO
    single = [n for n in names if a.table.sizes[n] == 1]
    p, names = (
        a.substitute(p, dict.fromkeys(single, (0, ()))),
        [n for n in names if n not in single],
    )
    out = p
    for name in names:
        before = Operation("sum", (((name,), out),))
        if (entries := entries_of(a, out, name)) is not None:
            out = a.record("entries", before, a.add(*entries))
        elif (parts := parts_of(a, out, name)) is not None:
            out = a.record("range_split", before, a.add(*[total(a, q, (k,)) for k, q in parts]))
        else:
            out = a.add(*[_sum_of_term(a, mono, c, name) for mono, c in out])
    plain_sum = len(p) == 1 and len(out) == 1 and len(out[0][0]) == 1 and out[0][1] == 1
    if names and not plain_sum:
        a.record("sum", Operation("sum", ((tuple(names), p),)), out)
    return out


def entries_of(a: Calculus, p: Poly, name: int) -> list[Poly] | None:
    """Return a polynomial at every value of an index; None if it stays a sum.

    Single values are read where the other side reads them, and where the index is an exponent.
    """
    size = a.table.sizes[name]
    if not isinstance(size, int) or size > MOST_ENTRIES:
        return None
    if not a.reads_entries(p, name) and not _is_exponent(a, p, name):
        return None
    return [a.substitute(p, {name: (k, ())}) for k in range(size)]


def _is_exponent(a: Calculus, p: Poly, name: int) -> bool:
    """Return True if an index is read by the exponent of a power of a base that may be negative."""
    atoms = (atom for mono, _ in p for atom, _ in mono if atom_reads(atom, name))
    return any(a.form(x).kind == "map" and a.form(x).attr[0] == "pow" for x in atoms)


def parts_of(a: Calculus, p: Poly, name: int) -> list[tuple[int, Poly]] | None:
    """Return a polynomial over two parts of an index's range; None if no test divides the range.

    A test divides the range [0, n) at a named size m: [m − k > 0] is 1 in [0, m), 0 in [m, n).
    """
    size = a.table.sizes[name]
    for test in a.tests(p):
        if a.form(test).kind != "positive" or not atom_reads(test, name):
            continue
        index = as_index(a, a.operand(test)) or (0, ())
        stride = dict(index[1]).get(name, 0)
        rest = linear(index[0], [(n, s) for n, s in index[1] if n != name])
        ends = a.table.index_range(rest)
        if abs(stride) != 1 or not rest[1] or ends is None or ends[0] != ends[1]:
            continue
        at = ends[0] if stride < 0 else 1 - ends[0]
        if a.facts.nonnegative(at) and a.facts.nonnegative(size - at):
            low, high = a.table.fresh(at), a.table.fresh(size - at)
            offset, terms = a.table.size_index(at)
            first, second = (a.assume(p, test, int(v)) for v in (stride < 0, stride > 0))
            moved = linear(offset, [*terms, (high, 1)])
            return [
                (low, a.substitute(first, {name: plain(low)})),
                (high, a.substitute(second, {name: moved})),
            ]
    return None


def _is_backwards(a: Calculus, mono: Mono, name: int) -> bool:
    """Return True if all factors but tests read an index backwards."""
    factors = [atom for atom, _ in mono if not a.form(atom).bit]
    strides = [s for x in factors for _, terms in x.at for n, s in terms if n == name]
    return bool(strides) and all(s < 0 for s in strides)


def _sum_of_term(a: Calculus, mono: Mono, c: Number, name: int) -> Poly:
    if _is_backwards(a, mono, name):
        offset, last = a.table.size_index(a.table.sizes[name] - 1)
        there = {name: linear(offset, [*last, (name, -1)])}
        return total(a, a.substitute(((mono, c),), there), (name,))
    outside = {atom: e for atom, e in mono if not atom_reads(atom, name)}
    inside = {atom: e for atom, e in mono if atom_reads(atom, name)}
    factor = a.term(c, outside)
    if not inside:
        return a.mul(factor, a.size(a.table.sizes[name]))
    met = _met_test(a, inside, name)
    if met is not None:
        return a.mul(factor, met)
    bound, opened = [name], ONE
    for atom, e in inside.items():
        if a.form(atom).kind == "sum" and 0 < e <= MOST_OPENED and Fraction(e).denominator == 1:
            for _ in range(int(e)):
                ((names, p),) = a.opened(atom)
                bound += names
                opened = a.mul(opened, p)
        else:
            opened = a.mul(opened, a.term(1, {atom: e}))
    return a.mul(factor, a.add(*[_sum_of_opened(a, m, k, bound) for m, k in opened]))


def _sum_of_opened(a: Calculus, mono: Mono, c: Number, bound: Sequence[int]) -> Poly:
    """Return the sum of a term over several names, after the laws of tests."""
    factors = dict(mono)
    for n in bound:
        inside = {atom: e for atom, e in factors.items() if atom_reads(atom, n)}
        met = _met_test(a, inside, n)
        if met is not None:
            outside = {atom: e for atom, e in factors.items() if atom not in inside}
            rest = a.mul(a.term(c, outside), met)
            names = [x for x in bound if x != n]
            return a.add(*[_sum_of_opened(a, m, k, names) for m, k in rest])
    return a.scale(c, _sum_of_product(a, mono, bound))


def _sum_of_product(a: Calculus, mono: Mono, bound: Sequence[int]) -> Poly:
    """Return Σ over bound names of a product, as a product of sums of its connected parts."""
    factors = [a.term(1, {x: e for x, e in mono if not any(atom_reads(x, n) for n in bound)})]
    for part in _connected(mono, bound):
        inside = tuple([f for f in mono if any(atom_reads(f[0], n) for n in part)])
        if (known := _known_sum(a, inside, part)) is not None:
            factors.append(known)
            continue
        sizes = [a.size(a.table.sizes[n]) for n in part]
        factors += [_sum_atom(a, inside, part)] if inside else sizes
    return a.product(*factors)


def _known_sum(a: Calculus, mono: Mono, names: Sequence[int]) -> Poly | None:
    """Return Σ_k of a power of k, or of a function of sorted values alone; else None."""
    if len(names) != 1:
        return None
    name = names[0]
    before = Operation("sum", ((tuple(names), a.term(1, dict(mono))),))
    if mono and (p := power_of_index(a, mono, name)) is not None:
        return a.record("power_sum", before, power_sum(a, p, a.size(a.table.sizes[name])))
    unsorted = orders.without_order(a, a.term(1, dict(mono)), name)
    return a.record("sum_of_sorted", before, total(a, unsorted, names)) if unsorted else None


def _connected(mono: Mono, bound: Sequence[int]) -> list[list[int]]:
    """Return the bound names in groups that no factor joins."""
    groups: list[set[int]] = [{n} for n in bound]
    for atom, _ in mono:
        read = [g for g in groups if any(atom_reads(atom, n) for n in g)]
        if len(read) > 1:
            groups = [g for g in groups if g not in read] + [set().union(*read)]
    return [sorted(g) for g in groups]


def _sum_atom(a: Calculus, mono: Mono, bound: Sequence[int]) -> Poly:
    p, names = merged(a, ((mono, 1),), bound)
    if len(p) != 1 or p[0][1] != 1:
        return total(a, p, names)
    facts = {"sign": a.sign(p), "real": a.is_real(p), "integer": a.is_integer(p)}
    return a.of(a.table.intern("sum", None, [(names, p)], facts))


def merged(a: Calculus, p: Poly, bound: Sequence[int]) -> tuple[Poly, list[int]]:
    """Merge pairs of bound names t, j that are read as t·|j| + j alone, to one name."""
    names = list(bound)
    for t in list(names):
        for j in list(names):
            size, count = a.table.sizes[j], a.table.sizes[t]
            if t == j or t not in names or j not in names or not isinstance(size, int):
                continue
            if not _reads_together(p, t, j, size):
                continue
            n = a.table.fresh(count * size)
            joined = a.substitute(p, {t: (0, ()), j: plain(n)})
            back = a.substitute(joined, {n: linear(0, [(t, size), (j, 1)])})
            if back == p:
                names = [x for x in names if x not in (t, j)] + [n]
                p = joined
    return p, names


def _reads_together(p: Poly, t: int, j: int, size: int) -> bool:
    """Return True if t is never read by an input without j, as a quick test."""
    for mono, _ in p:
        for atom, _ in mono:
            for _, terms in atom.at:
                strides = dict(terms)
                if t in strides and j in strides and strides[t] != size * strides[j]:
                    return False
            if atom_reads(atom, t) != atom_reads(atom, j):
                return False
    return True


def _met_test(a: Calculus, factors: dict[Atom, Number], name: int) -> Poly | None:
    """Return Σ_k of a test of k times f(k), where the test is one value or a bound of k."""
    for kind in ("zero", "positive"):
        for atom in factors:
            if a.form(atom).kind != kind:
                continue
            others = a.term(1, {x: e for x, e in factors.items() if x != atom})
            cut = _at_zero if kind == "zero" else _in_range
            made = cut(a, a.operand(atom), others, name)
            if made is not None:
                return a.record(
                    made[0], Operation("sum", (((name,), a.term(1, factors)),)), made[1]
                )
    return None


Cut = tuple[str, Poly]  # a law, and the sum that it makes


def _at_zero(a: Calculus, p: Poly, f: Poly, name: int) -> Cut | None:
    """Return f at the value of an index where p is zero; None if it is unknown."""
    here, size = a.index(plain(name)), a.table.sizes[name]
    stride = next((c for mono, c in p if ((mono, 1),) == here), 0)
    rest = a.scale(Fraction(-1, stride), a.sub(p, a.scale(stride, here))) if stride else p
    if not stride or any(mono_reads(mono, name) for mono, _ in rest):
        return None
    if is_within(a, rest, size):
        return "delta", taken(a, f, [name], [rest])
    is_outside = isinstance(size, int) and number_of(rest) is not None
    return ("delta", ZERO) if is_outside else None


def taken(
    a: Calculus, p: Poly, names: Sequence[int], places: Sequence[Poly], key: Any = None
) -> Poly:
    """Return a polynomial at values of some indices, which are integers in their ranges.

    A function of inputs is the function of the inputs at these values. With a key, values may be
    out of range, where the key selects the values.
    """
    if key is None:
        found = [as_index(a, q) for q in places]
        p = a.substitute(p, {n: i for n, i in zip(names, found, strict=True) if i is not None})
        names = [n for n, i in zip(names, found, strict=True) if i is None]
        places = [q for q, i in zip(places, found, strict=True) if i is None]

    def atom_at(atom: Atom) -> Atom | Poly:
        form = a.form(atom)
        read = [k for k, n in enumerate(names) if atom_reads(atom, n)]
        if not read:
            return atom
        if form.kind == "index" and key is None:
            return places[read[0]]
        if form.kind not in orders.UNSPLIT:
            branches = [(n, taken(a, q, names, places, key)) for n, q in a.opened(atom)]
            return a.again(atom, branches)
        if key is not None:
            branches = [(names, a.of(atom)), *[((), q) for q in places]]
            facts = {"real": form.real}
            return a.table.intern("opaque", key, branches, facts, keeps_bound=True)
        branches = [([names[k] for k in read], a.of(atom)), *[((), places[k]) for k in read]]
        return a.table.intern("take", None, branches, form.facts, keeps_bound=True)

    return a.mapped(p, atom_at) if names else p


def _in_range(a: Calculus, p: Poly, f: Poly, name: int) -> Cut | None:
    """Return the sum of f over the values of an index where p is positive; None if unknown."""
    index = as_index(a, p)
    stride = 0 if index is None else dict(index[1]).get(name)
    if index is None or stride not in (1, -1):
        return None
    if stride == -1:
        return _before(a, f, name, index)
    return _from_start(a, f, name, index) or _after(a, f, name, index)


def _before(a: Calculus, p: Poly, name: int, index: Index) -> Cut | None:
    """Return Σ_k [m > k]·c·k^e, for m in the range of k or its end."""
    end = linear(index[0], [(n, s) for n, s in index[1] if n != name])
    if len(p) != 1 or not is_within(a, a.index(end), a.table.sizes[name] + 1):
        return None
    ((mono, c),) = p
    e = power_of_index(a, mono, name)
    if e is None:
        return None
    return "power_sum", a.mul(a.term(c, without_index(mono, name)), power_sum(a, e, a.index(end)))


def _from_start(a: Calculus, p: Poly, name: int, index: Index) -> Cut | None:
    """Return Σ_{k<n} [k + 1 > c]·p(k) = Σ_{k<n−c} p(k + c), for a number c."""
    start, size = 1 - index[0], a.table.sizes[name]
    if len(index[1]) != 1 or not isinstance(size, int) or not 0 < start < size:
        return None
    k = a.table.fresh(size - start)
    moved = a.substitute(p, {name: linear(start, [(k, 1)])})
    return "range_from", total(a, moved, (k,))


def _after(a: Calculus, p: Poly, name: int, index: Index) -> Cut | None:
    """Return Σ_k [k > e]·p(k) = Σ_k p(k) − p(e) − Σ_k [k < e]·p(k), for e in the range of k."""
    rest = linear(-index[0], [(n, -s) for n, s in index[1] if n != name])
    if not rest[1] or rest[0] or not is_within(a, a.index(rest), a.table.sizes[name]):
        return None
    earlier = positive(a, a.sub(a.index(rest), a.index(plain(name))))
    made = a.add(
        total(a, p, (name,)),
        a.scale(-1, a.substitute(p, {name: rest})),
        a.scale(-1, total(a, a.mul(p, earlier), (name,))),
    )
    return "range_after", made


def with_split_ranges(a: Calculus, p: Poly) -> Poly:
    """Return a sum of terms in which sums over a range are split where shorter sums of them end.

    Σ_{k<n} f(k) = Σ_{k<m} f(k) + Σ_{k<n−m} f(k + m), if p has a term with either of these sums.
    """
    ranges = {x: _range_of(a, x) for mono, _ in p for x, e in mono if e == 1}
    sums = [(x, n) for x, n in sorted(ranges.items(), key=lambda item: item[0]) if n is not None]
    for (whole, n), (part, m) in product(sums, sums):
        if not a.facts.nonnegative(n - m - 1):
            continue
        ((names, body),), (((other,), mine),) = a.opened(whole), a.opened(part)
        k, (offset, terms) = a.table.fresh(n - m), a.table.size_index(m)
        end, (shift, more) = linear(offset, [*terms, (k, 1)]), a.table.size_index(n - m)
        for here, there in ((plain(other), end), (linear(shift, [*more, (other, 1)]), plain(k))):
            if a.substitute(body, {names[0]: here}) == mine:
                rest = total(a, a.substitute(body, {names[0]: there}), (k,))
                split = a.add(a.of(part), rest)
                a.record("range_split", Operation("sum", ((names, body),)), split)
                return a.mapped(p, functools.partial(_exchanged, whole, split))
    return p


def with_series(a: Calculus, p: Poly) -> Poly:
    """Return a sum of terms in which geometric series are applied to their ratio.

    q·Σ_{k<n} f(k) = Σ_{k<n} f(k) + f(n) − f(0), if f(k + 1) = q·f(k).
    """
    for series in sorted({x for mono, _ in p for x, e in mono if e == 1}):
        found = _ratio_and_ends(a, series)
        if found is None:
            continue
        (ratio, c), ends = found
        if not ratio and c != 1:
            whole = a.scale(1 / (Fraction(c) - 1), ends)
            a.record("series", operation("same", a.of(series)), whole)
            return a.mapped(p, functools.partial(_exchanged, series, whole))
        after = a.add(a.of(series), ends)
        out = []
        for mono, k in p:
            left = dict(mono)
            divides = all(left.get(x, 0) >= e > 0 for x, e in ratio)
            if ratio and divides and left.get(series) == 1:
                rest = {x: e - dict(ratio).get(x, 0) for x, e in mono if x != series}
                out.append(a.mul(a.term(Fraction(k) / c, rest), after))
            else:
                out.append(((mono, k),))
        made = a.add(*out)
        if made != p:
            a.record("series", operation("mul", ((ratio, c),), a.of(series)), after)
            return made
    return p


def _ratio_and_ends(a: Calculus, atom: Atom) -> tuple[tuple[Mono, Number], Poly] | None:
    """Return the ratio q of a series f over k < n, and f(n) − f(0); None for another series."""
    length = _range_of(a, atom)
    if length is None:
        return None
    (((name,), f),) = a.opened(atom)
    end = a.table.size_index(length)
    later = a.substitute(f, {name: linear(1, [(name, 1)])})
    ratio = a.mul(later, a.power(f, -1))
    if len(ratio) != 1 or mono_reads(ratio[0][0], name):
        return None
    first, last = (a.substitute(f, {name: at}) for at in ((0, ()), end))
    return ratio[0], a.sub(last, first)


def _exchanged(old: Atom, new: Poly, atom: Atom) -> Atom | Poly:
    return new if atom == old else atom


def _range_of(a: Calculus, atom: Atom) -> Dim | None:
    """Return the number of terms of a sum over one index; None for any other form."""
    form = a.form(atom)
    if form.kind != "sum" or len(form.branches[0][0]) != 1:
        return None
    return a.table.dim(form.branches[0][0][0])


# ---------------------------------------------------------------- maxima


def maximum(a: Calculus, branches: Sequence[Branch]) -> Poly:
    """Return the largest value of several polynomials, each over its bound names."""
    opened: list[Branch] = []
    for names, p in branches:
        opened += flattened(a, tuple(names), p)
    least = a.scale(-1, a.infinity())
    kept = [b for b in opened if b[1] != least]
    if not kept:
        return least
    tests = {t for names, p in kept for t in a.tests(p) if not any(atom_reads(t, n) for n in names)}
    if len(kept) > 1 and a.maxima_as_cases and not any(names for names, _ in kept):
        return _as_cases(a, [p for _, p in kept])
    if tests and len(tests) <= 3:
        return _split(a, kept, min(tests))
    kept = _without_repetitions(a, kept)
    out = _standard(a, kept)
    if len(kept) == 1 and (made := _simpler(a, *kept[0])) is not None:
        before = Operation("max", tuple((tuple(n), p) for n, p in branches))
        return a.record("max_of_increasing", before, made)
    plain_max = len(branches) == 1 and len(out) == 1 and len(out[0][0]) == 1
    if not plain_max:
        a.record("max", Operation("max", tuple((tuple(n), p) for n, p in branches)), out)
    return out


def _simpler(a: Calculus, names: Sequence[int], p: Poly) -> Poly | None:
    """Return max f(q) as f(max q), and a maximum of unconnected sums as a sum of maxima."""
    if not names:
        return None
    parts = _connected_terms(p, names)
    if len(parts) > 1:
        return a.add(*[maximum(a, [(tuple(n), q)]) for n, q in parts])
    if (found := orders.increasing(a, p)) is None:
        return None
    function, inner = found
    return function(maximum(a, [(tuple(names), inner)]))


def _connected_terms(p: Poly, names: Sequence[int]) -> list[tuple[list[int], Poly]]:
    """Return the terms of a sum in groups that read no name in common, with these names."""
    out: list[tuple[list[int], Poly]] = []
    for term in p:
        read = [n for n in names if mono_reads(term[0], n)]
        joined = [g for g in out if set(g[0]) & set(read)] if read else out[:1]
        mine = sorted({*read}.union(*(g[0] for g in joined)))
        terms = tuple(sorted((term, *(t for g in joined for t in g[1]))))
        out = [*(g for g in out if g not in joined), (mine, terms)]
    return out


def minimum(a: Calculus, branches: Sequence[Branch]) -> Poly:
    """Return the smallest value: −max of the opposite."""
    return a.scale(-1, maximum(a, [(n, a.scale(-1, p)) for n, p in branches]))


def _as_cases(a: Calculus, ps: list[Poly]) -> Poly:
    out = ps[0]
    for p in ps[1:]:
        difference = a.sub(out, p)
        made = a.add(p, a.mul(positive(a, difference), difference))
        out = a.record("max_by_test", operation("max", out, p), made)
    return out


def _split(a: Calculus, branches: list[Branch], test: Atom) -> Poly:
    yes, no = (
        maximum(a, [(names, a.assume(p, test, value)) for names, p in branches]) for value in (1, 0)
    )
    return a.case(a.of(test), yes, no)


def flattened(a: Calculus, names: tuple[int, ...], p: Poly) -> list[Branch]:
    """Return a branch, or the branches of the maximum that it contains."""
    for mono, c in p:
        if len(mono) == 1 and mono[0][1] == 1 and c > 0 and a.form(mono[0][0]).kind == "max":
            rest = a.sub(p, ((mono, c),))
            return [
                found
                for inner, q in a.opened(mono[0][0])
                for found in flattened(a, (*names, *inner), a.add(rest, a.scale(c, q)))
            ]
    for n in names:
        others = tuple([x for x in names if x != n])
        if (entries := entries_of(a, p, n)) is not None:
            return [found for q in entries for found in flattened(a, others, q)]
        if (parts := parts_of(a, p, n)) is not None:
            return [found for k, q in parts for found in flattened(a, (*others, k), q)]
    read = names_of(p)
    p, kept = merged(a, p, [n for n in names if n in read])
    return [(tuple(kept), p)]


def _without_repetitions(a: Calculus, branches: list[Branch]) -> list[Branch]:
    """Return the branches without equal ones, and without those known to be at most another."""
    seen: dict[object, Branch] = {}
    numbers = [number_of(p) for _, p in branches]
    known = [n for n in numbers if n is not None]
    for branch, number in zip(branches, numbers, strict=True):
        if number is None or number >= max(known):
            seen.setdefault(a.table.intern("max", None, [branch], {}), branch)
    kept = list(seen.values())
    for branch in seen.values() if len(kept) > 1 else ():
        if any(b is not branch and _is_at_most(a, branch, b) for b in kept):
            kept.remove(branch)
    return kept


def _is_at_most(a: Calculus, branch: Branch, other: Branch) -> bool:
    """Return True if the ranges of integers tell that one branch is at most another."""
    return not branch[0] and not other[0] and is_count(a, a.sub(other[1], branch[1]))


def _standard(a: Calculus, branches: list[Branch]) -> Poly:
    """Return a maximum without common terms and factors in its branches."""
    if len(branches) == 1 and not branches[0][0]:
        return branches[0][1]
    bound = {n for names, _ in branches for n in names}
    common = [
        (mono, c)
        for mono, c in branches[0][1]
        if not any(mono_reads(mono, n) for n in bound) and all((mono, c) in p for _, p in branches)
    ]
    rest = [(names, tuple([t for t in p if t not in common])) for names, p in branches]
    factor, rest = orders.common_factor(a, rest, bound)
    sign = max(a.sign(p) for _, p in rest)
    real = all(a.is_real(p) for _, p in rest)
    whole = all(a.is_integer(p) for _, p in rest)
    facts = {"sign": sign, "real": real, "integer": whole}
    atom = a.table.intern("max", None, rest, facts, is_ordered=False)
    return a.add(tuple(common), a.mul(factor, a.of(atom)))
