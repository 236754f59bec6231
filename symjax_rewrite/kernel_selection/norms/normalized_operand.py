"""Normal form of a normalised operand: row factors, one value, columns, shifts.

A[m, k] = Σ_t c_t · Π rows(m) · x[m, k] · Π columns(k)  +  Σ_s c_s · Π rows(m) · Π columns(k)

The normal form covers every norm in any spelling as an operand of a contraction over k: products
are expanded, casts between floating types are ignored, and the remaining factors either depend on k
or not. No norm is matched by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import (
    class_operands,
    is_computed_from,
    is_float_cast,
    kind_of,
    node_of,
    postorder,
)
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.products import HALF, is_half
from symjax_rewrite.ir.sum_of_products import ProductTerm, SumOfProducts
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Node, Ref, over
from symjax_rewrite.kernel_selection.folds.tile_program import unwidened
from symjax_rewrite.obstacles import Obstacle

MAX_DEPTH = 24  # limit on levels of nested products and sums that are opened
MAX_PARTS = 8  # limit on terms of an expanded operand
MAX_FACTORS = 16  # limit on factors of one such term


class Column(NamedTuple):
    """Term coefficient · Π columns, over x's slots."""

    coefficient: float
    columns: tuple[Ref, ...]


class Shift(NamedTuple):
    """Term without x: coefficient · Π rows · Π columns, over x's slots."""

    coefficient: float
    rows: tuple[Ref, ...]
    columns: tuple[Ref, ...]


@dataclass(slots=True)
class Normed:
    """Contraction Σ_k A·W whose operand A is in normal form.

    cls: its class. x, weight: over its indices. contracted: its bound indices, in x's order. rows:
    its output indices that x reads, in x's order. ends: its other output indices. scale, gain,
    shifts: over x's slots. opened: classes between x and the contraction.
    """

    cls: int
    x: Ref
    weight: Ref
    contracted: tuple[int, ...]
    rows: tuple[int, ...]
    ends: tuple[int, ...]
    scale: tuple[Ref, ...]
    gain: tuple[Column, ...]
    shifts: tuple[Shift, ...]
    opened: frozenset[int]
    dtype: str

    @property
    def columns(self) -> list[int]:
        """Return the classes of all column factors."""
        return [f.cls for c in (*self.gain, *self.shifts) for f in c.columns]

    def moves_value(self, s: Shift) -> bool:
        """Return True if a shift moves x itself: it has x's only column factor."""
        return len(self.gain) == 1 and s.columns == self.gain[0].columns

    def added_rows(self, s: Shift) -> tuple[Ref, ...] | None:
        """Return the rows that a shift adds to x before the scale; None if it adds none to x."""
        left = list(s.rows)
        for r in self.scale:
            if r not in left:
                return None
            left.remove(r)
        return tuple(left) if self.moves_value(s) else None

    @property
    def key(self) -> tuple:
        """Return a key equal for contractions of the same operand with any weights."""
        slots = tuple(self.x.axes.index(i) for i in self.contracted)
        return (self.x.cls, slots, self.scale, self.gain, self.shifts, self.dtype)


def opener(g: EGraph, is_full: Callable[[Ref], bool], scaled: bool = True) -> SumOfProducts:
    """Return a form that opens products, sums and casts.

    Args:
        g: the graph.
        is_full: selects the references to open.
        scaled: open a value scaled by a number below 1. Without that number
            the value may be out of range.
    """

    def opens(ref: Ref, node: Node) -> bool:
        opened = node.op == ADD or multiplies_slots(node) or is_float_cast(g, ref.cls)
        return opened and is_full(ref)

    def keeps(form: SumOfProducts, ref: Ref, node: Node, terms: list[ProductTerm]) -> bool:
        if node.op == MAP:
            (first, *more) = terms
            is_value = not more and len(first.factors) == 1 and first.coefficient == 1
            return not (is_value and is_half(g.classes[ref.cls].dtype))
        if _cancel(terms):
            return False
        reads = [over(ref, a) for a in node.args]
        if node.op == CONTRACT or len(reads) == 1:
            small = node.op == ADD and abs(node.attr[0]) < 1
            return scaled or not small or not form.is_factor(reads[0])
        # A sum of terms that are all leaves is one leaf.
        return not all(is_full(r) and form.is_factor(r) for r in reads)

    return SumOfProducts(g, opens, keeps, MAX_PARTS, MAX_FACTORS, MAX_DEPTH)


def _cancel(parts: list[ProductTerm]) -> bool:
    """Return True if parts of equal factors differ in sign: computed apart, they lose digits."""
    signs: dict[tuple[Ref, ...], set[bool]] = {}
    for p in parts:
        signs.setdefault(tuple(sorted(p.factors)), set()).add(p.coefficient > 0)
    return any(len(s) > 1 for s in signs.values())


def multiplies_slots(node: Node) -> bool:
    """Return True if a node multiplies elementwise and reads no operand along a diagonal."""
    if node.op != CONTRACT or node.bound:
        return False
    return all(len(set(a.axes)) == len(a.axes) for a in node.args)


def as_stored(g: EGraph, ref: Ref) -> Ref:
    """Return the value behind an exact cast to f32: a kernel widens its operands."""
    found = unwidened(g, ref)
    return found if g.classes[found.cls].dtype in HALF else ref


def has_sums(g: EGraph, cls: int, cache: dict[int, bool]) -> bool:
    """Return True if a class depends on a sum."""
    for c in postorder([cls], class_operands(g), cache):
        node = node_of(g, c)
        is_sum = node.op == CONTRACT and bool(node.bound)
        cache[c] = is_sum or any(cache[a.cls] for a in node.args)
    return cache[cls]


def normal_form(g: EGraph, cls: int, cache: dict[int, bool]) -> Normed | str | None:
    """Return a contraction in normal form, the reason it has none, or None without a norm."""
    node = node_of(g, cls)
    if node.op != CONTRACT or not node.bound or len(node.args) != 2:
        return None
    reason = None
    for scaled in (False, True):
        for a, w in (node.args, node.args[::-1]):
            found = _side(g, cls, node, a, w, cache, scaled)
            if isinstance(found, Normed):
                # Else the row factors are computed from a multiple of the value.
                if scaled or any(is_computed_from(g, f.cls, (found.x.cls,)) for f in found.scale):
                    return found
            elif scaled:
                reason = reason or found
    return reason


def _side(
    g: EGraph, cls: int, node: Node, a: Ref, w: Ref, cache: dict[int, bool], open_scaled: bool
) -> Normed | str | None:
    bound = set(range(node.out, node.out + len(node.bound)))
    rows, ends = set(a.axes) - bound, set(w.axes) - bound
    if a.cls == w.cls or not bound <= set(a.axes) & set(w.axes) or rows & ends or not ends:
        return None
    if any(len(set(r.axes)) < len(r.axes) or kind_of(g, r.cls) != "f" for r in (a, w)):
        return None

    def is_full(ref: Ref) -> bool:
        read = set(ref.axes)
        if not read & bound:
            return False
        if rows:
            return bool(read & rows)
        return has_sums(g, ref.cls, cache) or is_float_cast(g, ref.cls)

    form = opener(g, is_full, open_scaled)
    parts = form.terms(a)
    scaled = [f for p in parts for f in p.factors if _is_row(g, f, bound)]
    if not scaled or (rows and not any(f.axes for f in scaled)):  # a scalar scales no row
        return _nonlinear(g, a, bound, is_full) or _other_axis(g, parts, bound, rows)
    x = _value(g, parts, scaled, bound, rows)
    if not isinstance(x, Ref):
        return x or _nonlinear(g, a, bound, is_full)
    if set(x.axes) != bound | rows or len(set(x.axes)) < len(x.axes):
        return "the norm is not over the contracted axes alone"
    return _collect(g, cls, x, w, parts, bound, form.opened)


def _is_row(g: EGraph, f: Ref, bound: set[int]) -> bool:
    return not set(f.axes) & bound and node_of(g, f.cls).op != CONST


def _value(
    g: EGraph, parts: list[ProductTerm], scaled: list[Ref], bound: set[int], rows: set[int]
) -> Ref | str | None:
    """Return the factor x that all parts with a full factor share, or why there is none."""
    found: set[Ref] = set()
    for p in parts:
        mine = [f for f in p.factors if set(f.axes) & bound]
        if rows:
            mine = [f for f in mine if set(f.axes) & rows]
        else:
            mine = [f for f in mine if any(is_computed_from(g, s.cls, (f.cls,)) for s in scaled)]
        if len(mine) > 1:
            partial = any(set(f.axes) < bound | rows for f in mine)
            return "the norm is not over the contracted axes alone" if partial else None
        found.update(mine)
    if len(found) > 1:
        return "another value is added to the normalised one before the product"
    return found.pop() if found else None


def _collect(
    g: EGraph, cls: int, x: Ref, w: Ref, parts: list[ProductTerm], bound: set[int], opened: set[int]
) -> Normed | str:
    slot = {i: s for s, i in enumerate(x.axes)}
    gain: list[Column] = []
    shifts: list[Shift] = []
    scales: set[tuple[Ref, ...]] = set()
    for p in parts:
        rows = tuple(sorted(f.over(slot) for f in p.factors if not set(f.axes) & bound))
        columns = [f for f in p.factors if set(f.axes) & bound and f != x]
        columns = tuple(sorted(as_stored(g, f.over(slot)) for f in columns))
        if x in p.factors:
            scales.add(rows)
            gain.append(Column(p.coefficient, columns))
        else:
            shifts.append(Shift(p.coefficient, rows, columns))
    if len(scales) != 1:
        return "two row scales of one value are added"
    dtype, *others = {g.classes[a.cls].dtype for a in node_of(g, cls).args}
    if others:
        return Obstacle.DTYPES("the operands of the product have two dtypes")
    if any(is_computed_from(g, f.cls, (x.cls,)) for c in gain for f in c.columns):
        return "the statistics are not over the axis that the product sums"
    return Normed(
        cls,
        x,
        w,
        contracted=tuple(i for i in x.axes if i in bound),
        rows=tuple(i for i in x.axes if i not in bound),
        ends=tuple(i for i in w.axes if i not in bound),
        scale=scales.pop(),
        gain=tuple(gain),
        shifts=tuple(shifts),
        opened=frozenset(opened - {x.cls}),
        dtype=dtype,
    )


def _nonlinear(g: EGraph, a: Ref, bound: set[int], is_full: Callable[[Ref], bool]) -> str | None:
    """Return the reason for a refusal if a norm lies behind an elementwise function."""
    stack, seen = [a], {a}
    while stack and len(seen) < 4 * MAX_PARTS:
        ref = stack.pop()
        node = node_of(g, ref.cls)
        if node.bound or node.op not in (MAP, CONTRACT, ADD):
            continue
        for arg in (over(ref, arg) for arg in node.args):
            if not is_full(arg):
                continue
            is_map = node.op == MAP and not is_float_cast(g, ref.cls)
            if is_map and _is_normed(g, arg, bound, is_full):
                return Obstacle.ELEMENTWISE(
                    f"a nonlinearity ({node.attr[0]}) stands between the norm and the product"
                )
            if arg not in seen:
                seen.add(arg)
                stack.append(arg)
    return None


def _is_normed(g: EGraph, arg: Ref, bound: set[int], is_full: Callable[[Ref], bool]) -> bool:
    parts = opener(g, is_full).terms(arg)
    rows = [f for p in parts for f in p.factors if _is_row(g, f, bound)]
    return any(has_sums(g, f.cls, {}) for f in rows)


def _other_axis(g: EGraph, parts: list[ProductTerm], bound: set[int], rows: set[int]) -> str | None:
    """Return the reason if a column factor is a statistic of the value over an axis that stays."""
    for p in parts:
        full = [f for f in p.factors if set(f.axes) & bound and set(f.axes) & rows]
        columns: list[Any] = [f for f in p.factors if not set(f.axes) & rows]
        if len(full) == 1 and any(is_computed_from(g, c.cls, (full[0].cls,)) for c in columns):
            return "the statistics are not over the axis that the product sums"
        if len(full) > 1 and any(set(f.axes) < bound | rows for f in full):
            return "the norm is not over the contracted axes alone"
    return None
