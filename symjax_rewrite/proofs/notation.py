"""Normal forms as text in index notation: `Σ_k exp(x[i,k])·w[k]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import Any

from symjax_rewrite.proofs.algebra.arithmetic import Calculus, Operation
from symjax_rewrite.proofs.algebra.forms import Atom, Index, Mono, Number, Poly, names_of
from symjax_rewrite.proofs.reading.conditions import Condition

LETTERS = "ijklmnopqrstuvwabcdefgh"
MOST_CHARACTERS = 2_000
SUM, PRODUCT, ATOM = range(3)  # binding strengths
TEMPLATES = {
    "abs": "|{}|", "positive": "[{} > 0]", "zero": "[{} = 0]", "same": "{}", "select": "where({})",
}  # fmt: skip
SIGNS = {"nonzero": "≠ 0", "positive": "> 0", "nonnegative": "≥ 0"}


@dataclass(slots=True)
class Notation:
    """Texts of normal forms of one proof.

    leaves: names of inputs by number. letters: the letter of every index name so far.
    """

    a: Calculus
    leaves: Mapping[int, str]
    letters: dict[int, str] = field(default_factory=dict)

    def poly(self, p: Poly, strength: int = SUM) -> str:
        """Return a polynomial as text, in parentheses if it binds less than `strength`."""
        parts: list[str] = []
        for mono, c in p:
            text = self.mono(mono, abs(Fraction(c)))
            sign = "−" if c < 0 else "+"
            parts.append(f" {sign} {text}" if parts else (text if c > 0 else f"−{text}"))
        out = _cut("".join(parts) or "0")
        is_sum = len(p) > 1 or (p and p[0][1] < 0)
        is_product = bool(p) and (len(p[0][0]) > 1 or (p[0][0] and abs(p[0][1]) != 1))
        if p and not is_sum and not is_product and len(p[0][0]) == 1:
            is_product = self._binds_weakly(p[0][0][0][0])
        weak = SUM if is_sum else PRODUCT if is_product else ATOM
        return f"({out})" if weak < strength else out

    def _binds_weakly(self, atom: Atom) -> bool:
        return self.a.form(atom).kind == "sum"

    def mono(self, mono: Mono, c: Number) -> str:
        """Return a coefficient times a product of powers."""
        above = [self._power(atom, e) for atom, e in mono if e > 0]
        below = [self._power(atom, -e) for atom, e in mono if e < 0]
        number = Fraction(c)
        if number.denominator > 10**6:
            above.insert(0, f"{float(number):.7g}")
        else:
            if number.numerator != 1:
                above.insert(0, str(number.numerator))
            if number.denominator != 1:
                below.insert(0, str(number.denominator))
        top = "·".join(above) or "1"
        if not below:
            return top
        return f"{top}/{below[0]}" if len(below) == 1 else f"{top}/({'·'.join(below)})"

    def _power(self, atom: Atom, e: Number) -> str:
        if e != 1 and self.a.form(atom).kind == "exp" and e.denominator == 1:
            return f"exp({e}·{self.poly(self.a.operand(atom), PRODUCT)})"
        text = self.atom(atom)
        if e == Fraction(1, 2):
            return f"sqrt({text})"
        base = f"({text})" if self._binds_weakly(atom) else text
        if e == 1:
            return base
        return f"{base}^{e}" if e.denominator == 1 else f"{base}^({e})"

    def index(self, index: Index) -> str:
        """Return an index expression."""
        offset, terms = index
        parts = [f"{'' if s == 1 else f'{s}·'}{self.letter(n)}" for n, s in terms]
        if offset or not parts:
            parts.append(str(offset))
        return "+".join(parts).replace("+-", "−")

    def letter(self, name: int) -> str:
        """Return the letter of an index name, or a product of named sizes."""
        if name < 0:
            sizes = self.a.table.monomials[-1 - name]
            return "·".join(n if e == 1 else f"{n}^{e}" for n, e in sizes)
        if name not in self.letters:
            used = set(self.letters.values())
            free = (f"{x}{turn or ''}" for turn in count() for x in LETTERS)
            self.letters[name] = next(letter for letter in free if letter not in used)
        return self.letters[name]

    def atom(self, atom: Atom) -> str:
        """Return an atom."""
        form = self.a.form(atom)
        read = ",".join(self.index(i) for i in atom.at)
        match form.kind:
            case "leaf":
                name = self.leaves.get(form.attr, f"v{form.attr}")
                return f"{name}[{read}]" if atom.at else name
            case "carry":
                return f"h{form.attr[1]}[{read}]" if atom.at else f"h{form.attr[1]}"
            case "index":
                return read
            case "size" | "prime" | "symbol":
                return str(form.attr)
            case "imaginary" | "infinity" | "nan":
                return {"imaginary": "i", "infinity": "∞", "nan": "NaN"}[form.kind]
        return self._function(form.kind, form.attr, self.a.opened(atom))

    def _function(
        self, kind: str, attr: Any, operands: Sequence[tuple[tuple[int, ...], Poly]]
    ) -> str:
        names = [n for bound, _ in operands for n in bound]
        for _, p in operands:
            for n in names_of(p):
                if n not in names:
                    self.letter(n)
        bound = [",".join(self.letter(n) for n in names) for names, _ in operands]
        out = self._applied(kind, attr, operands, bound)
        for n in names:
            self.letters.pop(n, None)
        return _cut(out)

    def _applied(
        self, kind: str, attr: Any, operands: Sequence[tuple[tuple[int, ...], Poly]],
        bound: list[str],
    ) -> str:  # fmt: skip
        if kind == "sum" or (kind == "max" and len(operands) == 1):
            sign = "Σ" if kind == "sum" else "max"
            return f"{sign}_{bound[0]} {self.poly(operands[0][1], PRODUCT)}"
        if kind == "mul":
            return "·".join(self.poly(p, ATOM) for _, p in operands)
        inner = [self.poly(p) for _, p in operands]
        named = [f"{b} ↦ {t}" if b else t for b, t in zip(bound, inner, strict=True)]
        if kind in TEMPLATES:
            return TEMPLATES[kind].format(", ".join(inner))
        match kind:
            case "power":
                return f"({inner[0]})" if attr in (None, 1) else f"({inner[0]})^({attr})"
            case "add":
                return " + ".join(inner)
            case "max":
                texts = [f"max_{b} {t}" if b else t for b, t in zip(bound, inner, strict=True)]
                return f"max({', '.join(texts)})"
            case "square":
                return f"{attr[0]}({inner[0]})^2"
            case "map" if isinstance(attr, tuple) and attr:
                return f"{attr[0]}({', '.join(inner)})"
            case "opaque":
                return f"{_opaque_name(attr)}({'; '.join(named)})"
        return f"{kind}({'; '.join(named)})"

    def equation(self, at: Sequence[Index], p: Poly) -> str:
        """Return a value as a function of its indices."""
        self.letters.clear()
        read = ",".join(map(self.index, at))
        return f"[{read}] ↦ {self.poly(p)}" if at else self.poly(p)

    def condition(self, condition: Condition) -> str:
        """Return a condition on the values of inputs."""
        self.letters.clear()
        return f"{self.poly(condition.p)} {SIGNS[condition.kind]}"

    def operation(self, before: Operation) -> str:
        """Return the left side of a law."""
        return self._function(before.name, before.attr, before.operands)


def _opaque_name(attr: Any) -> str:
    """Return the name of an operation without laws."""
    while isinstance(attr, tuple) and attr:
        parts = list(attr)
        attr = parts[1] if parts[0] == "native" and len(parts) > 1 else parts[0]
    return str(attr)


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS // 2]} … {text[-MOST_CHARACTERS // 2 :]}"
