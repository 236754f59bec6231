"""Index notation: terms as formulas over named indices, `Σ_j x[i,j]·W[j,k]`.

Indices get their letters in the order in which a reader meets them. A class is written by its name
where it has one, else by its node in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import Node, Ref
from symjax_rewrite.spec_texts import dtype_text

LETTERS = "ijklmnpqrstuvwabcdefgh"
SUM, PRODUCT, ATOM = 1, 2, 3  # how tightly a formula binds
Groups = Sequence[Sequence[int]]  # the class slots of each axis of an array

INFIX = {
    "div": "/", "sub": "−", "rem": "%", "pow": "**", "lt": "<", "le": "≤", "gt": ">", "ge": "≥",
    "eq": "=", "ne": "≠", "and": "∧", "or": "∨", "xor": "⊕",
}  # fmt: skip


class Name(NamedTuple):
    """The name of a class, and the slots that each axis of the named array has."""

    text: str
    groups: Groups


class Formula(NamedTuple):
    """A formula and how tightly it binds."""

    text: str
    binds: int

    def within(self, least: int) -> str:
        """Return the text, in parentheses if it binds less tightly."""
        return self.text if self.binds >= least else f"({self.text})"


class SlicedIndex:
    """An index of a slice: one place, or (start, stride) of the places that another index reads."""

    def __init__(self, part: Any, index: object) -> None:
        self.part, self.index = part, index

    def text(self, letter: str) -> str:
        """Return the place, given the letter of the index."""
        if not isinstance(self.part, tuple):
            return str(self.part)
        start, stride = self.part
        scaled = letter if stride == 1 else f"{stride}·{letter}"
        return scaled if start == 0 else f"{scaled}+{start}"


class Letters:
    """The letters of the indices of one statement, given out in the order of reading."""

    def __init__(self, taken: frozenset[str] = frozenset(), left: Sequence[object] = ()) -> None:
        self._free = [x for x in LETTERS if x not in taken][::-1]
        self._letter: dict[object, str] = {}
        self._rank: dict[object, int] = {index: n for n, index in enumerate(left)}

    def of(self, index: object) -> str:
        """Return the letter of an index, a new one at its first use; of a part, its place."""
        if isinstance(index, SlicedIndex):
            return index.text(self.of(index.index) if isinstance(index.part, tuple) else "")
        if index not in self._letter:
            new = self._free.pop() if self._free else f"i{len(self._letter)}"
            self._letter[index] = new
        return self._letter[index]

    def ordered(self, factors: Sequence[Ref]) -> list[Ref]:
        """Return factors in an order in which their indices follow those of the left side.

        Scalars come first, then the factor with the first index of the left side, as in a chain of
        matrices.
        """
        read = {index: n for n, index in enumerate(self._letter)}
        left = {index: len(read) + n for index, n in self._rank.items()} | read
        place = lambda a: min((left.get(i, len(left)) for i in a.axes), default=-1)  # noqa: E731
        return sorted(factors, key=place)


class TermWriter:
    """Writes the classes of one e-graph.

    node_of: the node by which a class is computed. name_of: the name of a class; None if it is
    written in place. label_of: the name of the operation of a native class.
    """

    def __init__(
        self,
        g: EGraph,
        node_of: Callable[[int], Node],
        name_of: Callable[[int], Name | None],
        label_of: Callable[[int], str] = lambda _: "f",
        taken: frozenset[str] = frozenset(),
    ) -> None:
        self.g, self.node_of, self.name_of = g, node_of, name_of
        self.label_of, self.taken = label_of, taken

    def statement(self, name: Name, ref: Ref) -> str:
        """Return `name[i,k] = formula` for a class read over its own slots, by its node."""
        letters = Letters(self.taken, [ref.axes[s] for group in name.groups for s in group])
        right = self.node(ref, letters).text
        return f"{_indexed(name, dict(enumerate(ref.axes)), letters)} = {right}"

    def reading(self, name: Name, ref: Ref) -> str:
        """Return `name[k,i] = other[i,k]` for a named class; the groups of `name` are indices."""
        letters = Letters(self.taken, [i for group in name.groups for i in group])
        right = self.ref(ref, letters).text
        return f"{_indexed(name, {i: i for g in name.groups for i in g}, letters)} = {right}"

    def letters(self) -> Letters:
        """Return letters for a new statement."""
        return Letters(self.taken)

    def formula(self, ref: Ref, left: Sequence[object] = ()) -> str:
        """Return the formula of a class by its node; `left` are indices in a reader's order."""
        return self.node(ref, Letters(self.taken, left)).text

    def ref(self, ref: Ref, letters: Letters) -> Formula:
        """Return an operand: by name, or in place."""
        ref = self.g.find(ref)
        name = self.name_of(ref.cls)
        if name is not None:
            return Formula(_indexed(name, dict(enumerate(ref.axes)), letters), ATOM)
        return self.node(ref, letters)

    def node(self, ref: Ref, letters: Letters) -> Formula:
        """Return the node of a class, with the class's slots read over the given indices."""
        node = self.node_of(ref.cls)
        place = object()
        index = [*ref.axes, *((place, n) for n in range(len(node.bound)))]
        args = [Ref(a.cls, tuple(index[i] if i >= 0 else -1 for i in a.axes)) for a in node.args]
        write = getattr(self, f"_{node.op}", None)
        if write is not None:
            return write(node, args, index, letters)
        inside = ", ".join(self.ref(a, letters).text for a in args)
        label = self.label_of(ref.cls) if node.op == op.NATIVE else node.op
        return Formula(f"{label}({inside})", ATOM)

    def _over(self, node: Node, index: list[Any], letters: Letters) -> str:
        return ",".join(letters.of(i) for i in index[node.out :])

    def _contract(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        texts = [self.ref(a, letters).within(PRODUCT) for a in letters.ordered(args)]
        powers = {text: texts.count(text) for text in texts}
        factors = [x if n == 1 else f"{_closed(x)}{_power(n)}" for x, n in powers.items()]
        body = "·".join(factors) or "1"
        if not node.bound:
            return Formula(body, PRODUCT if len(factors) > 1 else ATOM)
        return Formula(f"Σ_{_subscript(self._over(node, index, letters))} {body}", SUM)

    def _add(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        pairs = zip(node.attr, args, strict=True)
        signed = [(c, a, not isinstance(c, complex) and c < 0) for c, a in pairs]
        out = ""
        for n, (c, a, negative) in enumerate(sorted(signed, key=self._place_in_sum)):
            size, sign = (-c, "−") if negative else (c, "+")
            term = self.ref(a, letters)
            is_last = 0 < n == len(signed) - 1 and not negative and size == 1
            text = term.text if is_last and term.text.startswith("Σ") else term.within(PRODUCT)
            text = text if size == 1 else f"{number(size)}·{text}"
            out += f" {sign} {text}" if out else f"{'−' * negative}{text}"
        return Formula(out, PRODUCT if len(signed) == 1 and not out.startswith("−") else SUM)

    def _place_in_sum(self, term: tuple[Any, Ref, bool]) -> tuple[bool, int, bool]:
        """Return the order of a term: those subtracted last, those of fewer axes later."""
        _, ref, negative = term
        return negative, -len(ref.axes), self.name_of(self.g.find(ref).cls) is None

    def _map(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        name, params = node.attr
        texts = [self.ref(a, letters) for a in args]
        if name == "convert_element_type":
            return Formula(f"{dtype_text(dict(params)['new_dtype'])}({texts[0].text})", ATOM)
        if name == "reciprocal":
            return Formula(f"1/{texts[0].within(ATOM)}", PRODUCT)
        if name in ("integer_pow", "square"):
            power = dict(params).get("y", 2)
            return Formula(f"{texts[0].within(ATOM)}{_power(power)}", ATOM)
        if name in INFIX and len(texts) == 2:
            return Formula(f"{texts[0].within(ATOM)} {INFIX[name]} {texts[1].within(ATOM)}", SUM)
        if name == "select_n" and len(texts) == 3:
            texts = [texts[0], texts[2], texts[1]]
            name = "where"
            if [x.text for x in texts[1:]] == ["True", "False"]:
                return texts[0]
        if name == "max" and "-inf" in (both := [x.text for x in texts]):
            both.remove("-inf")
            return next(x for x in texts if x.text == both[0])
        return Formula(f"{name}({', '.join(x.text for x in texts)})", ATOM)

    def _reduce(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        body = self.ref(args[0], letters).text
        return Formula(f"{node.attr}_{_subscript(self._over(node, index, letters))}({body})", ATOM)

    def _slice(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        parts = zip(node.attr, args[0].axes, strict=True)
        axes: list[Any] = [i if part is None else SlicedIndex(part, i) for part, i in parts]
        return self.ref(Ref(args[0].cls, tuple(axes)), letters)

    def _concat(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        inside = ", ".join(self.ref(a, letters).text for a in args)
        return Formula(f"concat_{letters.of(index[node.attr[0]])}({inside})", ATOM)

    def _take(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        inside = ", ".join(self.ref(a, letters).text for a in args[1:])
        return Formula(f"{self.ref(args[0], letters).within(ATOM)} at ({inside})", SUM)

    def _delta(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        return Formula(f"δ[{letters.of(index[0])},{letters.of(index[1])}]", ATOM)

    def _const(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        return Formula(number(node.attr[0]), ATOM)

    def _iota(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        return Formula(letters.of(index[0]) if index else "iota", ATOM)

    def _inverse(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        return Formula(f"inv({self.ref(args[0], letters).text})", ATOM)

    def _cumsum(self, node: Node, args: list[Ref], index: list[Any], letters: Letters) -> Formula:
        inner = self.ref(args[0], letters).text
        return Formula(f"cumsum_{letters.of(index[node.attr[0]])}({inner})", ATOM)


def _indexed(name: Name, axes: dict[int, Any], letters: Letters) -> str:
    """Return `name[i,(h,d)]`: one entry per axis; an axis of several slots in parentheses."""
    entries = []
    for group in name.groups:
        parts = [axes[s] for s in group if s in axes]
        texts = [letters.of(p) for p in parts]
        entries.append(texts[0] if len(texts) == 1 else f"({','.join(texts)})" if texts else "0")
    return f"{name.text}[{','.join(entries)}]" if entries else name.text


def _closed(text: str) -> str:
    """Return the text of a factor, in parentheses unless it is one name or call."""
    return text if text[-1] in "])" and "·" not in text.split("[")[0] else f"({text})"


def _subscript(letters: str) -> str:
    return letters if len(letters) == 1 else f"{{{letters}}}"


def _power(power: Any) -> str:
    return {2: "²", 3: "³"}.get(power, f"**({power})" if power < 0 else f"**{power}")


def number(value: Any) -> str:
    """Return a constant for a reader.

    Example:
        >>> number(0.125), number(1 / 768), number(2.0), number(float("-inf"))
        ('0.125', '1/768', '2', '-inf')
    """
    if isinstance(value, (bool, complex, int)):
        return str(value)
    if abs(value) == float("inf") or value != value:
        return str(value)
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value))
    if len(short := f"{value:.6g}") <= len("1e-06"):
        return short
    whole = round(1 / value)
    if 8 < abs(whole) < 1e9 and abs(value * whole - 1) < 1e-7:
        return f"1/{whole}" if whole > 0 else f"−1/{-whole}"
    return short
