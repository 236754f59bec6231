"""Normal forms: polynomials over atoms that read indices, and their table.

An *index expression* is `offset + Σ stride·name`. An *atom* is a form read at index expressions. A
*monomial* is a product of powers of atoms, a *polynomial* a sum of monomials with rational
coefficients. A *form* is an input, or a function of polynomials: `exp`, a power of a sum, a
reduction over bound indices, a test, an opaque operation. Forms are numbered, and two forms that
differ only in the names of their indices or in the order of a sum or product have one number: free
indices become slots in a canonical order, found by colour refinement.

So equal polynomials are equal tuples, which `ir.sum_of_products` need not give: it multiplies out
references with float coefficients, as a kernel computes them. May import `ir.sizes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, islice, permutations, product
from typing import Any, NamedTuple

from symjax_rewrite.ir.sizes import Dim, simplify
from symjax_rewrite.ir.sizes import Poly as SizePoly

Index = tuple[int, tuple[tuple[int, int], ...]]  # offset, ((name, stride), ...)
Number = int | Fraction

TIES = 240  # orders of indices tried for a canonical form
FIRST_NAME = 1000


class Atom(NamedTuple):
    """A form, read at an index expression in each of its slots."""

    form: int
    at: tuple[Index, ...]


Mono = tuple[tuple[Atom, Number], ...]
Poly = tuple[tuple[Mono, Number], ...]
Branch = tuple[tuple[int, ...], Poly]  # bound names, or codes of their sizes, and a polynomial
Branches = Sequence[tuple[Sequence[int], Poly]]

ZERO: Poly = ()
ONE: Poly = (((), 1),)


@dataclass(frozen=True, slots=True)
class Form:
    """A function of `slots` indices; bound indices of a branch are numbered from `slots` on.

    kind: "leaf", "sum", "power", "exp", ... attr: its parameters. symmetries: orders of the slots
    that give the same form. real, integer: its values. bit: its values are 0 and 1. sign: 2 if all
    values are positive, 1 if none is negative, else 0. most: no value of an integer is larger.
    """

    kind: str
    attr: Any
    branches: tuple[Branch, ...]
    slots: int
    symmetries: tuple[tuple[int, ...], ...] = ()
    real: bool = True
    integer: bool = False
    bit: bool = False
    sign: int = 0
    most: Dim | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that hold for all values, as `FormTable.intern` takes them."""
        return {name: getattr(self, name) for name in ("real", "integer", "bit", "sign", "most")}


def plain(name: int) -> Index:
    """Return the index expression of a name."""
    return (0, ((name, 1),))


def plain_name(index: Index) -> int | None:
    """Return the name of an index expression that is one name, else None."""
    if index[0] == 0 and len(index[1]) == 1 and index[1][0][1] == 1 and index[1][0][0] >= 0:
        return index[1][0][0]
    return None


def linear(offset: int, terms: Iterable[tuple[int, int]]) -> Index:
    """Return an index expression; equal names are added."""
    total: dict[int, int] = {}
    for name, stride in terms:
        total[name] = total.get(name, 0) + stride
    return offset, tuple(sorted((n, s) for n, s in total.items() if s))


def substituted(index: Index, to: Mapping[int, Index]) -> Index:
    """Return an index expression with names replaced by expressions."""
    offset, terms = index
    if not any(name in to for name, _ in terms):
        return index
    out = []
    for name, stride in terms:
        inner = to.get(name)
        if inner is None:
            out.append((name, stride))
        else:
            offset += stride * inner[0]
            out += [(n, s * stride) for n, s in inner[1]]
    return linear(offset, out)


def names_of(p: Poly) -> dict[int, None]:
    """Return the names that a polynomial reads, in order of first use."""
    return {
        name: None
        for mono, _ in p
        for atom, _ in mono
        for _, terms in atom.at
        for name, _ in terms
        if name >= 0
    }


def number_of(p: Poly) -> Number | None:
    """Return the number that a polynomial is, or None."""
    if len(p) > 1 or (p and p[0][0]):
        return None
    return p[0][1] if p else 0


def mono_reads(mono: Mono, name: int) -> bool:
    """Return True if a monomial reads an index."""
    return any(atom_reads(atom, name) for atom, _ in mono)


def atom_reads(atom: Atom, name: int) -> bool:
    """Return True if an atom reads an index."""
    return any(n == name for _, terms in atom.at for n, _ in terms)


@dataclass(slots=True)
class FormTable:
    """The table of forms, index names and sizes of one proof.

    sizes: the size of every name. dims: symbolic sizes by code (−1, −2, …; a code ≥ 0 is the size
    itself). monomials: products of named sizes, by their (negative) names in index expressions.
    """

    forms: list[Form] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)
    sizes: dict[int, Dim] = field(default_factory=dict)
    dims: list[SizePoly] = field(default_factory=list)
    monomials: list[Any] = field(default_factory=list)
    _names: Iterator[int] = field(default_factory=lambda: count(FIRST_NAME))

    def fresh(self, size: Dim) -> int:
        """Return a new index name of a size."""
        name = next(self._names)
        self.sizes[name] = size
        return name

    def code(self, size: Dim) -> int:
        """Return the code of a size."""
        if isinstance(size, int):
            return size
        if size not in self.dims:
            self.dims.append(size)
        return -1 - self.dims.index(size)

    def dim(self, code: int) -> Dim:
        """Return the size of a code."""
        return code if code >= 0 else self.dims[-1 - code]

    def size_index(self, size: Dim) -> Index:
        """Return a size as an index expression, in which products of named sizes are names."""
        if isinstance(size, int):
            return size, ()
        offset, terms = 0, []
        for monomial, c in size.terms:
            if not monomial:
                offset = int(c)
                continue
            if monomial not in self.monomials:
                self.monomials.append(monomial)
            terms.append((-1 - self.monomials.index(monomial), int(c)))
        return linear(offset, terms)

    def index_range(self, index: Index) -> tuple[Dim, Dim] | None:
        """Return the smallest and largest value of an index expression; None if unknown."""
        low: Dim = index[0]
        high: Dim = index[0]
        for name, stride in index[1]:
            if name < 0:
                whole = SizePoly({self.monomials[-1 - name]: stride})
                low, high = low + whole, high + whole
                continue
            size = self.sizes.get(name)
            if size is None:
                return None
            end = (size - 1) * stride
            low, high = (low, high + end) if stride > 0 else (low + end, high)
        return simplify(low), simplify(high)

    def atom(self, form: int, at: Sequence[Index]) -> Atom:
        """Return an atom; of the equal orders of a symmetric form's slots the least is taken."""
        symmetries = self.forms[form].symmetries
        if not symmetries:
            return Atom(form, tuple(at))
        return Atom(form, min(tuple(at[k] for k in order) for order in symmetries))

    def with_symmetry(self, atom: Atom, order: tuple[int, ...]) -> Atom:
        """Record that an order of the slots of a form gives the same form; return the atom."""
        form = self.forms[atom.form]
        known = form.symmetries or (tuple(range(form.slots)),)
        if order not in known:
            self.forms[atom.form] = replace(form, symmetries=(*known, order))
        return self.atom(atom.form, atom.at)

    def leaf(self, kind: str, attr: Any, slots: int, **facts: Any) -> int:
        """Return the number of a form without branches."""
        key = (kind, attr, slots)
        if key not in self.known:
            self.known[key] = len(self.forms)
            self.forms.append(Form(kind, attr, (), slots, **facts))
        return self.known[key]

    def intern(
        self,
        kind: str,
        attr: Any,
        branches: Branches,
        facts: Mapping[str, Any],
        is_ordered: bool = True,
        keeps_bound: bool = False,
    ) -> Atom:
        """Return the atom of a function of polynomials over session names.

        kind, attr: the kind of function and its parameters. branches: for each operand, the names
        that it binds, and its polynomial. facts: the fields `real`, `integer`, `bit`, `sign`,
        `most` of the form. is_ordered: False if the operands commute. keeps_bound: True if the
        order of bound indices matters.
        """
        encoded, orders = _canonical(self, branches, is_ordered, keeps_bound)
        key = (kind, attr, encoded, len(orders[0]))
        form = self.known.get(key)
        if form is None:
            form = self.known[key] = len(self.forms)
            place = {name: k for k, name in enumerate(orders[0])}
            symmetries = tuple(tuple(place[n] for n in order) for order in orders)
            symmetries = symmetries if len(symmetries) > 1 else ()
            self.forms.append(Form(kind, attr, encoded, len(orders[0]), symmetries, **facts))
        return self.atom(form, [plain(n) for n in orders[0]])


def _canonical(
    table: FormTable, branches: Branches, is_ordered: bool, keeps_bound: bool
) -> tuple[tuple[Branch, ...], list[tuple[int, ...]]]:
    """Return branches over slots, and the orders of the free names that give this encoding."""
    bound = {n: b for b, (names, _) in enumerate(branches) for n in names}
    free = [n for n in dict.fromkeys(n for _, p in branches for n in names_of(p)) if n not in bound]
    colour: dict[int, Any] = dict.fromkeys(free, (0, 0, 0, 0))
    for b, (names, _) in enumerate(branches):
        for k, n in enumerate(names):
            place = k if keeps_bound else 0
            colour[n] = (1, b if is_ordered else 0, table.code(table.sizes[n]), place)
    colour = _refined(colour, branches, is_ordered)
    groups: dict[Any, list[int]] = defaultdict(list)
    for name in colour:
        groups[bound.get(name, -1) if is_ordered else -1, colour[name]].append(name)
    ordered = [groups[key] for key in sorted(groups)]
    best: tuple[Branch, ...] | None = None
    orders: list[tuple[int, ...]] = []
    for choice in islice(product(*(permutations(g) for g in ordered)), TIES):
        order = [n for group in choice for n in group]
        slots = tuple(n for n in order if n not in bound)
        encoded = _encoded(table, branches, order, slots, bound, is_ordered, keeps_bound)
        if best is None or encoded < best:
            best, orders = encoded, [slots]
        elif encoded == best and slots not in orders:
            orders.append(slots)
    assert best is not None
    return best, orders


def _ranked(keys: Mapping[int, Any]) -> dict[int, int]:
    rank = {key: k for k, key in enumerate(sorted(set(keys.values())))}
    return {n: rank[key] for n, key in keys.items()}


def _refined(colour: dict[int, Any], branches: Branches, is_ordered: bool) -> dict[int, int]:
    """Refine the colours of names by the atoms and monomials that read them."""
    colours = _ranked(colour)
    for _ in range(3):
        if len(set(colours.values())) == len(colours):
            break
        seen: dict[int, list] = {n: [] for n in colours}
        for b, (_, p) in enumerate(branches):
            for mono, c in p:
                factors = [_factor_colour(atom, e, colours) for atom, e in mono]
                around = (b if is_ordered else 0, c, tuple(sorted(factors)))
                for (atom, _), mine in zip(mono, factors, strict=True):
                    for place, (offset, terms) in enumerate(atom.at):
                        for name, stride in terms:
                            if name >= 0:
                                seen[name].append((around, mine, place, offset, stride))
        colours = _ranked({n: (colours[n], tuple(sorted(s))) for n, s in seen.items()})
    return colours


def _factor_colour(atom: Atom, e: Number, colours: Mapping[int, int]) -> Any:
    at = [
        (offset, tuple(sorted((colours.get(n, n), s) for n, s in terms)))
        for offset, terms in atom.at
    ]
    return (atom.form, e, tuple(at))


def _encoded(
    table: FormTable,
    branches: Branches,
    order: list[int],
    slots: tuple[int, ...],
    bound: Mapping[int, int],
    is_ordered: bool,
    keeps_bound: bool,
) -> tuple[Branch, ...]:
    label = {n: k for k, n in enumerate(slots)}
    out = []
    for b, (names, p) in enumerate(branches):
        mine = list(names) if keeps_bound else [n for n in order if bound.get(n) == b]
        to = {n: plain(k) for n, k in label.items()}
        to |= {n: plain(len(slots) + k) for k, n in enumerate(mine)}
        out.append((tuple(table.code(table.sizes[n]) for n in mine), _renamed(table, p, to)))
    return tuple(out if is_ordered else sorted(out))


def _renamed(table: FormTable, p: Poly, to: Mapping[int, Index]) -> Poly:
    """Return a polynomial with names replaced by other names."""
    out = []
    for mono, c in p:
        factors = [
            (table.atom(atom.form, [substituted(i, to) for i in atom.at]), e) for atom, e in mono
        ]
        out.append((tuple(sorted(factors)), c))
    return tuple(sorted(out))
