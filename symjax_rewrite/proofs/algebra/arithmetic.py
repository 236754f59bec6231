"""Sums, products and powers of normal forms, and the laws that they use.

    (x + y)·x  →  x² + x·y, by `distributivity`

Every operation returns a normal form and, where a law was needed, records the application: the
operation, its operands and the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from symjax_rewrite.ir.sizes import Assumptions, Dim
from symjax_rewrite.proofs.algebra.exact_numbers import ExactNumber, Numbers, prime_powers
from symjax_rewrite.proofs.algebra.forms import (
    ONE,
    ZERO,
    Atom,
    Branch,
    Form,
    FormTable,
    Index,
    Mono,
    Number,
    Poly,
    names_of,
    plain,
    plain_name,
    substituted,
)

MOST_TERMS = 400
MOST_POWER = 8
MOST_CASES = 5  # tests by which one function is split into cases


class OutOfBudgetError(Exception):
    """A normal form became too large (internal)."""


class Operation(NamedTuple):
    """An operation on normal forms, as the left side of a step.

    name: of the operation. operands: for each, the names it binds, and a polynomial. attr: its
    parameters.
    """

    name: str
    operands: tuple[Branch, ...]
    attr: Any = None


def operation(name: str, *operands: Poly, attr: Any = None) -> Operation:
    """Return an operation whose operands bind no index."""
    return Operation(name, tuple([((), p) for p in operands]), attr)


class Law(NamedTuple):
    """An application of one of `laws.LAWS`: the operation, its normal form, the user's line."""

    name: str
    before: Operation
    after: Poly
    where: str


# By form: its value as a function of the indices at which it is read.
Leaves = Mapping[int, Callable[[tuple[Index, ...]], Poly]]
# Of the algebra, the form, its branches with fresh names for bound indices: the form rebuilt.
Builder = Callable[["Calculus", Form, list[Branch]], Poly]


@dataclass(slots=True)
class Calculus:
    """Normal forms of one proof.

    builders: how a form of each kind is rebuilt from its operands. laws: the applications so far.
    where: the user's line on which the algebra works. most_laws: the budget. facts: about sizes.
    maxima_as_cases: True to write max(a, b) as b + [a > b]·(a − b). entries: inputs, with an axis
    of which single entries are read; None if loops are not unfolded and sums not opened.
    angle_sums: True to take sines and cosines of sums apart.
    """

    builders: Mapping[str, Builder]
    table: FormTable = field(default_factory=FormTable)
    numbers: Numbers = field(default_factory=Numbers)
    laws: dict[tuple[str, Operation], Law] = field(default_factory=dict)
    where: str = ""
    most_laws: int = 20_000
    maxima_as_cases: bool = False
    facts: Assumptions = field(default_factory=Assumptions)
    entries: frozenset[tuple[Any, int]] | None = None
    angle_sums: bool = False
    _rebuilt: dict[tuple[int, tuple[Index, ...]], Poly] = field(default_factory=dict)
    _reached: dict[int, frozenset[int]] = field(default_factory=dict)

    def record(self, name: str, before: Operation, after: Poly) -> Poly:
        """Record an application of a law; return the result."""
        if len(self.laws) >= self.most_laws:
            raise OutOfBudgetError(f"{self.most_laws} applications of laws")
        self.laws.setdefault((name, before), Law(name, before, after, self.where))
        return after

    def form(self, atom: Atom) -> Form:
        """Return the form of an atom."""
        return self.table.forms[atom.form]

    def opened(self, atom: Atom) -> list[Branch]:
        """Return the operands of an atom: fresh names for bound indices, and a polynomial."""
        out = []
        for codes, p in self.form(atom).branches:
            names = tuple([self.table.fresh(self.table.dim(c)) for c in codes])
            to = dict(enumerate((*atom.at, *map(plain, names))))
            out.append((names, self.substitute(p, to)))
        return out

    def operand(self, atom: Atom) -> Poly:
        """Return the only operand of an atom."""
        return self.opened(atom)[0][1]

    def again(self, atom: Atom, branches: list[Branch]) -> Poly:
        """Return the form of an atom made of other operands."""
        form = self.form(atom)
        return self.builders[form.kind](self, form, branches)

    def reached(self, form: int) -> frozenset[int]:
        """Return a form and all forms inside it."""
        if form not in self._reached:
            inner = {x.form for _, p in self.table.forms[form].branches for m, _ in p for x, _ in m}
            self._reached[form] = frozenset({form}).union(*map(self.reached, inner))
        return self._reached[form]

    def reads_entries(self, p: Poly, name: int) -> bool:
        """Return True if p reads, at an index, an axis of which single entries are read too."""

        def is_read(form: Form, slot: int) -> bool:
            if form.kind == "leaf":
                return (form.attr, slot) in (self.entries or ())
            return any(self.reads_entries(q, slot) for _, q in form.branches)

        return bool(self.entries) and any(
            is_read(self.form(atom), slot)
            for mono, _ in p
            for atom, _ in mono
            for slot, index in enumerate(atom.at)
            if any(n == name for n, _ in index[1])
        )

    # ------------------------------------------------------------ substitution

    def mapped(self, p: Poly, to: Callable[[Atom], Atom | Poly]) -> Poly:
        """Return a polynomial with its atoms replaced by atoms or polynomials."""
        parts = []
        for mono, c in p:
            factors: dict[Atom, Number] = {}
            rest: list[Poly] = []
            for atom, e in mono:
                made = to(atom)
                if isinstance(made, Atom):
                    factors[made] = factors.get(made, 0) + e
                else:
                    rest.append(self.power(made, e))
            parts.append(self.product(self.term(c, factors), *rest))
        return self.add(*parts)

    def replaced(self, p: Poly, leaves: Leaves) -> Poly:
        """Return a polynomial with some forms replaced by polynomials of their indices."""

        def value(atom: Atom) -> Atom | Poly:
            if atom.form in leaves:
                return leaves[atom.form](atom.at)
            form = self.form(atom)
            if self.reached(atom.form).isdisjoint(leaves):
                return atom
            if form.kind == "iteration" and not leaves.keys().isdisjoint(form.attr[2]):
                return atom  # the carries stand in its step; outside it reads none
            return self.again(atom, [(n, self.replaced(q, leaves)) for n, q in self.opened(atom)])

        return self.mapped(p, value)

    def substitute(self, p: Poly, to: Mapping[int, Index]) -> Poly:
        """Return a polynomial with names replaced by index expressions."""
        if not any(n in to for n in names_of(p)):
            return p
        return self.mapped(p, lambda x: self.at(x.form, tuple([substituted(i, to) for i in x.at])))

    def at(self, form: int, at: tuple[Index, ...]) -> Atom | Poly:
        """Return a form read at index expressions; inner ones reach the inputs."""
        f = self.table.forms[form]
        if f.kind == "index":
            return self.index(at[0])
        names = [plain_name(i) for i in at]
        is_plain = None not in names and len(set(names)) == len(names)
        if is_plain and f.kind in ("positive", "zero"):  # sizes of indices may decide a test
            is_plain = any(n not in self.table.sizes for n in names)
        if is_plain or not f.branches:
            return self.table.atom(form, at)
        if (form, at) not in self._rebuilt:
            self._rebuilt[form, at] = ONE  # never read: a form does not contain itself
            atom = Atom(form, at)
            self._rebuilt[form, at] = self.again(atom, self.opened(atom))
        return self._rebuilt[form, at]

    # ------------------------------------------------------------ numbers and sizes

    def number(self, value: float | complex, dtype: str) -> Poly:
        """Return a number of a program."""
        if isinstance(value, complex):
            imaginary = self.mul(self.number(value.imag, dtype), self.imaginary())
            return self.add(self.number(value.real, dtype), imaginary)
        if isinstance(value, bool | int):
            return self.constant(int(value))
        exact = self.numbers.read(value, dtype) if value else ExactNumber(Fraction(0))
        out = self.constant(exact.coefficient)
        if exact.radicand != 1:
            out = self.mul(out, self.power(self.constant(exact.radicand), Fraction(1, 2)))
        for name, e in exact.constants:
            atom = self.prime_log(2) if name == "log2" else self.symbol(name)
            out = self.mul(out, self.power(atom, e))
        return out

    def constant(self, c: Number) -> Poly:
        """Return a rational number."""
        return (((), c),) if c else ZERO

    def leaf(self, kind: str, attr: Any = None, at: Sequence[Index] = (), **facts: Any) -> Poly:
        """Return a form without operands, at index expressions."""
        return self.of(Atom(self.table.leaf(kind, attr, len(at), **facts), tuple(at)))

    def symbol(self, name: str) -> Poly:
        """Return a positive real constant of a name."""
        return self.leaf("symbol", name, sign=2)

    def prime_log(self, prime: int) -> Poly:
        """Return the logarithm of a prime number."""
        return self.symbol(f"log {prime}")

    def imaginary(self) -> Poly:
        """Return the imaginary unit."""
        return self.leaf("imaginary", real=False)

    def infinity(self) -> Poly:
        """Return the symbol of infinity, of which only exp(−∞) = 0 and max(−∞, a) = a are used."""
        return self.leaf("infinity", sign=2)

    def size(self, size: Dim) -> Poly:
        """Return a size as a number."""
        return self.index(self.table.size_index(size))

    def index(self, index: Index) -> Poly:
        """Return the value of an index expression."""
        parts = [self.constant(index[0])]
        for name, stride in index[1]:
            if name < 0:
                sizes = {}
                for size, e in self.table.monomials[-1 - name]:
                    sign = 2 if size.isidentifier() else 1  # floordiv(n, 2) may be 0
                    form = self.table.leaf("size", size, 0, integer=True, sign=sign)
                    sizes[Atom(form, ())] = e
                parts.append(self.term(stride, sizes))
            else:
                here = self.leaf("index", None, [plain(name)], integer=True, sign=1)
                parts.append(self.scale(stride, here))
        return self.add(*parts)

    def of(self, atom: Atom) -> Poly:
        """Return an atom as a polynomial."""
        return ((((atom, 1),), 1),)

    def made(self, kind: str, attr: Any, *operands: Poly, **facts: Any) -> Poly:
        """Return a function of polynomials that binds no index."""
        return self.of(self.table.intern(kind, attr, [((), p) for p in operands], facts))

    # ------------------------------------------------------------ sums and products

    def add(self, *parts: Poly) -> Poly:
        """Return the sum of polynomials."""
        total: dict[Mono, Number] = {}
        for p in parts:
            for mono, c in p:
                total[mono] = total[mono] + c if mono in total else c
        if len(total) > MOST_TERMS:
            raise OutOfBudgetError(f"{MOST_TERMS} terms of a sum")
        return tuple(sorted((m, self._met(c)) for m, c in total.items() if c))

    def _met(self, c: Number) -> Number:
        return c if isinstance(c, int) else self.numbers.met(c)

    def scale(self, c: Number, p: Poly) -> Poly:
        """Return a multiple of a polynomial."""
        return tuple([(mono, self._met(c * k)) for mono, k in p]) if c else ZERO

    def sub(self, p: Poly, q: Poly) -> Poly:
        """Return a difference."""
        return self.add(p, self.scale(-1, q))

    def mul(self, p: Poly, q: Poly) -> Poly:
        """Return a product, multiplied out."""
        if p == ONE or q == ONE:
            return q if p == ONE else p
        if len(p) * len(q) > MOST_TERMS:
            raise OutOfBudgetError(f"{MOST_TERMS} terms of a product")
        out: list[Poly] = []
        for term in p if len(p) <= len(q) else q:
            other = q if len(p) <= len(q) else p
            out += [self._cancelled(term, other) or self.distributed(term, other)]
        made = self.add(*out)
        if len(p) > 1 or len(q) > 1:
            self.record("distributivity", operation("mul", p, q), made)
        elif p and q and any(atom in dict(q[0][0]) for atom, _ in p[0][0]):
            self.record("powers", operation("mul", p, q), made)
        return made

    def product(self, *parts: Poly) -> Poly:
        """Return the product of polynomials."""
        return functools.reduce(self.mul, parts, ONE)

    def distributed(self, term: tuple[Mono, Number], q: Poly) -> Poly:
        """Return a term times every term of a polynomial."""
        return self.add(*[self.term(c * term[1], _joined(term[0], mono)) for mono, c in q])

    def _cancelled(self, term: tuple[Mono, Number], q: Poly) -> Poly | None:
        """Return a term times a sum that the term has a negative power of; None if it has none."""
        below = {a for a, e in term[0] if e < 0 and self.form(a).kind == "power"}
        if not below or len(q) < 2:
            return None
        content, inner = self.content(q, only_positive=False)
        sign, base = self.oriented(inner)
        (mono, _), *_ = self._power_atom(base, 1)
        if mono[0][0] not in below or len(content) != 1:
            return None
        factors = _joined(term[0], content[0][0], ((mono[0][0], 1),))
        return self.term(sign * term[1] * content[0][1], factors)

    def term(self, c: Number, factors: Mapping[Atom, Number]) -> Poly:
        """Return c·Π atom^exponent, with the laws of atoms of some kinds applied."""
        kept: list[tuple[Atom, Number]] = []
        more: list[Poly] = []
        for atom, e in factors.items():
            form = self.form(atom)
            if e == 0 or not c:
                continue
            if form.bit and e > 0:
                e = 1
            elif form.kind == "prime":
                whole = e.numerator // e.denominator
                c, e = c * Fraction(form.attr) ** whole, e - whole
            elif form.kind == "imaginary":
                more.append(self.constant(-1) if e % 4 in (2, 3) else ONE)
                e = e % 2
            elif self.angle_sums and _is_sine(form) and e > 1 and e.denominator == 1:
                more.append(self.power(self._square_of_sine(atom), e // 2))
                e = e % 2
            elif _is_opened(form, e):
                more.append(self.power(self.operand(atom), e))
                e = 0
            if e:
                kept.append((atom, _whole(e)))
        out: Poly = ((tuple(sorted(kept)), self._met(_whole(c))),) if c else ZERO
        return self.product(out, *more) if more else out

    def _square_of_sine(self, atom: Atom) -> Poly:
        """Return sin² as 1 − cos²."""
        form, angle = self.form(atom), self.operand(atom)
        cos = self.made("map", ("cos", *form.attr[1:]), angle, real=form.real)
        made = self.sub(ONE, self.power(cos, 2))
        before = operation("map", angle, attr=form.attr)
        return self.record("pythagoras", before._replace(name="square"), made)

    # ------------------------------------------------------------ powers

    def power(self, p: Poly, e: Number) -> Poly:
        """Return a power with a rational exponent."""
        e = _whole(e)
        if e == 1 or e == 0:
            return p if e == 1 else ONE
        if not p and e > 0:
            return ZERO
        if _expands(p, e):
            return self.product(*[p] * int(e))
        if len(p) == 1:
            return self._power_of_term(p, e)
        return self.cases(lambda q: self._power_of_sum(q, e), p)

    def _power_of_term(self, p: Poly, e: Number) -> Poly:
        ((mono, c),) = p
        if isinstance(e, int):
            made = self.term(Fraction(c) ** e, {atom: k * e for atom, k in mono})
            if len(mono) > 1 or (mono and c != 1):
                self.record("power_of_product", operation("power", p, attr=e), made)
            return made
        out, rest = ONE, {}
        for atom, k in mono:
            if self.form(atom).sign > 0:
                out = self.mul(out, self.term(1, {atom: k * e}))
            elif self.form(atom).real and _whole(k) == k and k % 2 == 0:
                out = self.mul(out, self.power(self.absolute(atom), k * e))
            else:
                rest[atom] = k
        out = self.mul(out, self._root(abs(Fraction(c)), e))
        if rest or c < 0:
            inner = self.term(1 if c > 0 else -1, rest)
            out = self.mul(out, self._power_atom(inner, e))
        if out != self._power_atom(p, e):
            self.record("root_of_product", operation("power", p, attr=e), out)
        return out

    def absolute(self, atom: Atom) -> Poly:
        """Return the absolute value of a real atom."""
        p = self.of(atom)
        if self.maxima_as_cases:
            return self.sub(self.scale(2, self.mul(self.test("positive", p), p)), p)
        return self.made("abs", None, p, sign=1)

    def test(self, kind: str, p: Poly) -> Poly:
        """Return a test that is 1 or 0, of which nothing is known."""
        return self.made(kind, None, p, bit=True, integer=True, sign=1)

    def oriented(self, p: Poly) -> tuple[int, Poly]:
        """Return (s, s·p) with a sign s = ±1 that is the same for p and −p."""
        opposite = self.scale(-1, p)
        mine, other = (self.table.intern("oriented", None, [((), q)], {}) for q in (p, opposite))
        return (1, p) if mine <= other else (-1, opposite)

    def even(self, kind: str, attr: Any, p: Poly, facts: Mapping[str, Any]) -> Atom:
        """Return an atom of a function f with f(−p) = f(p)."""
        _, p = self.oriented(p)
        made = self.table.intern(kind, attr, [((), p)], facts)
        other = self.table.intern(kind, attr, [((), self.scale(-1, p))], facts)
        if made.form != other.form or made.at == other.at:
            return made
        order = tuple(made.at.index(i) for i in other.at)
        return self.table.with_symmetry(made, order)

    def _root(self, c: Fraction, e: Number) -> Poly:
        """Return a power of a positive rational, as powers of primes."""
        powers = prime_powers(c) if c.denominator < 10**12 else None
        if powers is None:
            return self.constant(self.numbers.met(Fraction(float(c) ** float(e))))
        forms = {p: Atom(self.table.leaf("prime", p, 0, sign=2), ()) for p in powers}
        return self.term(1, {forms[p]: k * e for p, k in powers.items()})

    def _power_of_sum(self, p: Poly, e: Number) -> Poly:
        if len(p) <= 1:
            return self.power(p, e) if p else self._power_atom(p, e)
        content, inner = self.content(p, only_positive=not isinstance(e, int))
        base = inner
        if isinstance(e, int):
            sign, base = self.oriented(inner)
            content = self.scale(sign, content)
        if content == ONE:
            return self._power_atom(base, e)
        made = self.mul(self.power(content, e), self._power_atom(base, e))
        return self.record("common_factor", operation("power", p, attr=e), made)

    def _power_atom(self, base: Poly, e: Number) -> Poly:
        facts = {"sign": self.sign(base), "real": self.is_real(base)}
        return ((((self.table.intern("power", None, [((), base)], facts), e),), 1),)

    def content(self, p: Poly, only_positive: bool) -> tuple[Poly, Poly]:
        """Return (a, b) with p = a·b, where a is one term and b has no common factor."""
        common: dict[Atom, Number] = {}
        monos = [dict(mono) for mono, _ in p]
        for atom in {a for mono in monos for a in mono}:
            form = self.form(atom)
            if form.sign == 2 or not (only_positive or form.bit):
                common[atom] = min(mono.get(atom, 0) for mono in monos)
        b = self.mul(p, self.term(1, {atom: -e for atom, e in common.items()}))
        lead = min(abs(Fraction(k)) for _, k in b)
        return self.term(lead, common), self.scale(1 / lead, b)

    # ------------------------------------------------------------ signs and cases

    def is_real(self, p: Poly) -> bool:
        """Return True if a polynomial has real values."""
        return all(self.form(atom).real for mono, _ in p for atom, _ in mono)

    def is_integer(self, p: Poly) -> bool:
        """Return True if a polynomial has integer values."""
        return all(
            Fraction(c).denominator == 1
            and all(self.form(a).integer and _whole(e) == e and e > 0 for a, e in mono)
            for mono, c in p
        )

    def sign(self, p: Poly) -> int:
        """Return 2 if a polynomial is positive, 1 if it is not negative, 0 if unknown."""
        signs = [self._sign_of_term(mono, c) for mono, c in p]
        if not signs or min(signs) == 0:
            return 0 if signs else 1
        return max(signs)

    def _sign_of_term(self, mono: Mono, c: Number) -> int:
        out = 2 if c > 0 else 0
        for atom, e in mono:
            form = self.form(atom)
            if form.sign == 2:
                continue
            even = form.real and _whole(e) == e and e % 2 == 0
            out = min(out, 1 if form.sign == 1 or even else 0)
        return out

    def cases(self, function: Callable[[Poly], Poly], p: Poly) -> Poly:
        """Return a function of a polynomial, by cases of the tests that the polynomial reads.

        f([c]·a + (1 − [c])·b) = [c]·f(a) + (1 − [c])·f(b).
        """
        tests = self.tests(p)
        if not tests or len(tests) > MOST_CASES:
            return function(p)
        test = tests[0]
        yes, no = (self.assume(p, test, value) for value in (1, 0))
        if_yes, if_no = self.cases(function, yes), self.cases(function, no)
        bit = self.of(test)
        made = self.case(bit, if_yes, if_no)
        return self.record("cases", operation("select", bit, if_yes, if_no), made)

    def case(self, bit: Poly, yes: Poly, no: Poly) -> Poly:
        """Return `yes` where a test is 1 and `no` where it is 0."""
        return self.add(self.mul(bit, yes), self.mul(self.sub(ONE, bit), no))

    def tests(self, p: Poly) -> list[Atom]:
        """Return the tests that are factors of the terms of a polynomial."""
        return sorted({a for mono, _ in p for a, _ in mono if self.form(a).bit})

    def assume(self, p: Poly, test: Atom, value: int) -> Poly:
        """Return a polynomial with a test replaced by its value."""
        return self.mapped(p, lambda x: (ONE if value else ZERO) if x == test else x)


def _joined(*monos: Iterable[tuple[Atom, Number]]) -> dict[Atom, Number]:
    """Return the exponents of a product of monomials."""
    out: dict[Atom, Number] = {}
    for mono in monos:
        for atom, e in mono:
            out[atom] = out.get(atom, 0) + e
    return out


def _expands(p: Poly, e: Number) -> bool:
    """Return True if a power is multiplied out."""
    return e.denominator == 1 and 0 < e <= MOST_POWER and len(p) ** int(e) <= MOST_TERMS


def _is_sine(form: Form) -> bool:
    return form.kind == "map" and form.attr[0] == "sin"


def _is_opened(form: Form, e: Number) -> bool:
    """Return True for an even power of an absolute value, or a power of a sum to multiply out."""
    is_even = form.kind == "abs" and e > 0 and e % 2 == 0
    return is_even or (form.kind == "power" and _expands(form.branches[0][1], e))


def _whole(e: Number) -> Number:
    return e.numerator if isinstance(e, Fraction) and e.denominator == 1 else e
