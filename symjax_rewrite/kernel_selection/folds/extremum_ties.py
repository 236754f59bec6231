"""Positions where a term equals its own maximum, and sums with such ties along several indices.

The derivative of a maximum is nonzero only at these ties. A tie depends on all of its row. A sum
with ties along both rows and columns (as in the Chamfer distance) is split into two sums. Each of
them is computed from whole rows or from whole columns.
"""

from __future__ import annotations

from typing import Any

from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.sizes import product
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, REDUCE, Node, Ref, over
from symjax_rewrite.kernel_selection.folds.pairwise_terms import is_elementwise, is_product

Along = frozenset[int]  # slots of a class that its maximum is taken along
Sweep = tuple[frozenset[int], Along]  # the indices of a tie, and its maximum's slots


def is_tie(g: EGraph, cls: int) -> bool:
    """Return True if a class is 1 where a term is its own maximum (or minimum), else 0."""
    return _along(g, cls) is not None


def _along(g: EGraph, cls: int) -> Along | None:
    """Return the slots that the maximum in a tie is taken along; None where a class is no tie."""
    node = node_of(g, cls)
    if node.op == MAP and node.attr[0] == "convert_element_type":
        found = _along(g, node.args[0].cls)
        return None if found is None else frozenset(node.args[0].axes[i] for i in found)
    if node.op != MAP or node.attr[0] != "eq":
        return None
    for a, b in (node.args, node.args[::-1]):
        top = node_of(g, b.cls)
        if top.op == REDUCE and top.attr in ("max", "min") and top.args[0].cls == a.cls:
            place = {i: b.axes[i] for i in range(top.out)}
            axes = top.args[0].axes
            if all(place.get(i, j) == j for i, j in zip(axes, a.axes, strict=True)):
                return frozenset(j for i, j in zip(axes, a.axes, strict=True) if i not in place)
    return None


def opposed(g: EGraph, need: Needed, least: int) -> dict[int, list[tuple[Ref, ...]]]:
    """Return sums with ties along several indices, each as sums with ties along one index.

    least: minimum number of elements of a term.
    """
    found: dict[int, set[Sweep]] = {}
    out: dict[int, list[tuple[Ref, ...]]] = {}
    for cls in need.order:
        node = node_of(g, cls)
        tie = _along(g, cls) if node.op == MAP else None
        if tie:
            found[cls] = {(frozenset(range(node.out)), tie)}
        elif not any(a.cls in found for a in node.args):
            continue
        elif is_elementwise(node):
            found[cls] = set().union(*(_read(found, a) for a in node.args))
        elif node.op == CONTRACT:
            apart = _Apart(g, found, node.args).factors(node.args)
            pairs = product((*g.classes[cls].sizes, *node.bound))
            if apart and isinstance(pairs, int) and pairs >= least:
                out[cls] = apart
    return out


def _read(found: dict[int, set[Sweep]], ref: Ref) -> set[Sweep]:
    """Return the ties in an operand, over the indices of the reading term."""
    read = lambda slots: frozenset(ref.axes[s] for s in slots)  # noqa: E731
    return {(read(axes), read(along)) for axes, along in found.get(ref.cls, ())}


class _Apart:
    """Decomposition of a summand into terms with ties along one index each."""

    def __init__(self, g: EGraph, found: dict[int, set[Sweep]], args: tuple[Ref, ...]) -> None:
        self.g, self.found = g, found
        ties = set().union(*(_read(found, a) for a in args))
        self.rank = max((len(axes) for axes, _ in ties), default=0)  # fewer: ties of row values

    def sweeps(self, ref: Ref) -> set[Along]:
        """Return the slots that the ties in an operand are taken along."""
        return {along for axes, along in _read(self.found, ref) if len(axes) == self.rank}

    def factors(self, args: tuple[Ref, ...]) -> list[tuple[Ref, ...]] | None:
        """Return the factors of each sum; None where no split is needed or possible."""
        place = self.place(args)
        parts = None if place is None else self.parts(args[place])
        if place is None or parts is None:
            return None
        return [(*args[:place], part, *args[place + 1 :]) for part in parts.values()]

    def place(self, args: tuple[Ref, ...]) -> int | None:
        """Return the position of an operand with ties along several indices, or None.

        None is also returned where a second operand has ties.
        """
        places = [k for k, a in enumerate(args) if self.sweeps(a)]
        return places[0] if len(places) == 1 and len(self.sweeps(args[places[0]])) > 1 else None

    def parts(self, ref: Ref) -> dict[Along, Ref] | None:
        """Split a term into a sum, by the index that the ties in each part are taken along."""
        sweeps, inner = self.sweeps(ref), node_of(self.g, ref.cls)
        if len(sweeps) < 2:
            return {next(iter(sweeps), frozenset()): ref}
        if not is_elementwise(inner):
            return None
        args = tuple([over(ref, a) for a in inner.args])
        if inner.op == ADD:
            return self.summed(inner, args)
        place = self.place(args)
        if place is None or not (is_product(inner) or self.is_linear(inner, place)):
            return None
        parts = self.parts(args[place])
        return parts and {
            along: self.term(inner.op, inner.attr, (*args[:place], part, *args[place + 1 :]))
            for along, part in parts.items()
        }

    def summed(self, inner: Node, args: tuple[Ref, ...]) -> dict[Along, Ref] | None:
        """Split a sum into parts; terms without ties join a part with ties."""
        groups: dict[Along, list[tuple[Any, Ref]]] = {}
        for c, arg in zip(inner.attr, args, strict=True):
            parts = self.parts(arg)
            if parts is None:
                return None
            for along, part in parts.items():
                groups.setdefault(along, []).append((c, part))
        alone = groups.pop(frozenset(), [])
        next(iter(groups.values())).extend(alone)
        return {
            along: self.term(ADD, tuple([c for c, _ in terms]), tuple([r for _, r in terms]))
            for along, terms in groups.items()
        }

    def is_linear(self, inner: Node, place: int) -> bool:
        """Return True if a map is linear in an operand."""
        name, others = inner.attr[0], [node_of(self.g, a.cls) for a in inner.args[1:]]
        zeros = [n.op == CONST and n.attr[0] == 0 for n in others]
        if name == "select_n" and place > 0:
            return all(zero or k == place - 1 for k, zero in enumerate(zeros))
        return name == "div" and place == 0

    def term(self, op: str, attr: Any, args: tuple[Ref, ...]) -> Ref:
        """Add an elementwise term as a class of its own."""
        g = self.g
        size_of = {i: s for a in args for i, s in zip(a.axes, g.classes[a.cls].sizes, strict=True)}
        used = sorted(size_of, key=str)
        local = tuple(Ref(a.cls, tuple(used.index(i) for i in a.axes)) for a in args)
        dtype = g.classes[args[-1].cls].dtype
        made = g.add(op, attr, local, tuple(size_of[i] for i in used), (), dtype)
        return Ref(made.cls, tuple(used[i] for i in made.axes))
