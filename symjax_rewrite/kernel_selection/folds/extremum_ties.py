"""Positions where a term equals its own maximum, and sums with such ties along several indices.

The derivative of a maximum is nonzero only at these ties. A tie depends on all of its row. A sum
with ties along both rows and columns (as in the Chamfer distance) is split into two sums. Each of
them is computed from whole rows or from whole columns.
"""

from __future__ import annotations

from operator import or_
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.sizes import product
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP, REDUCE, Node, Ref, is_cast, over
from symjax_rewrite.ir.value_analysis import is_zero
from symjax_rewrite.kernel_selection.folds.pairwise_terms import is_elementwise, is_product

Along = frozenset[int]  # slots of a class that its maximum is taken along
Sweep = tuple[frozenset[int], Along]  # the indices of a tie, and its maximum's slots


def is_tie(g: EGraph, cls: int) -> bool:
    """Return True if a class is 1 where a term is its own maximum (or minimum), else 0."""
    return _along(g, cls) is not None


def _along(g: EGraph, cls: int) -> Along | None:
    """Return the slots that the maximum in a tie is taken along; None where a class is no tie."""
    node = node_of(g, cls)
    if is_cast(node):
        found = _along(g, node.args[0].cls)
        return found and frozenset(node.args[0].axes[i] for i in found)
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
            apart = _Apart.of(g, found, node.args).split(node.args)
            pairs = product((*g.classes[cls].sizes, *node.bound))
            if apart and isinstance(pairs, int) and pairs >= least:
                out[cls] = list(apart.values())
    return out


def _read(found: dict[int, set[Sweep]], ref: Ref) -> set[Sweep]:
    """Return the ties in an operand, over the indices of the reading term."""
    read = lambda slots: frozenset(ref.axes[s] for s in slots)  # noqa: E731
    return {(read(axes), read(along)) for axes, along in found.get(ref.cls, ())}


class _Apart(NamedTuple):
    """Decomposition of a summand into terms with ties along one index each.

    rank: number of indices of the ties; ties of row values have fewer.
    """

    g: EGraph
    found: dict[int, set[Sweep]]
    rank: int

    @classmethod
    def of(cls, g: EGraph, found: dict[int, set[Sweep]], args: tuple[Ref, ...]) -> _Apart:
        """Return the decomposition of a product of some operands."""
        ties = set().union(*(_read(found, a) for a in args))
        return cls(g, found, max((len(axes) for axes, _ in ties), default=0))

    def sweeps(self, ref: Ref) -> set[Along]:
        """Return the slots that the ties in an operand are taken along."""
        return {along for axes, along in _read(self.found, ref) if len(axes) == self.rank}

    def split(self, args: tuple[Ref, ...]) -> dict[Along, tuple[Ref, ...]] | None:
        """Return the factors of each sum; None where no split is needed or possible.

        None is also returned where a second operand has ties.
        """
        places = [k for k, a in enumerate(args) if self.sweeps(a)]
        if len(places) != 1 or len(self.sweeps(args[places[0]])) < 2:
            return None
        (k,) = places
        parts = self.parts(args[k])
        if parts is None:
            return None
        return {along: (*args[:k], x, *args[k + 1 :]) for along, x in parts.items()}

    def parts(self, ref: Ref) -> dict[Along, Ref] | None:
        """Split a term into a sum, by the index that the ties in each part are taken along."""
        sweeps, inner = self.sweeps(ref), node_of(self.g, ref.cls)
        if len(sweeps) < 2:
            return {next(iter(sweeps), frozenset()): ref}
        if not is_elementwise(inner):
            return None
        args = tuple([over(ref, a) for a in inner.args])
        dtype = self.g.classes[args[-1].cls].dtype
        split: dict[Along, Any] = {}  # the attribute and the operands of each part
        if inner.op == ADD:
            groups = self.groups(inner, args) or {}
            split = {along: zip(*terms, strict=True) for along, terms in groups.items()}
        elif is_product(inner) or self.is_linear(inner, args):
            factors = self.split(args) or {}
            split = {along: (inner.attr, refs) for along, refs in factors.items()}
        apply = self.g.apply
        return {k: apply(inner.op, attr, refs, dtype) for k, (attr, refs) in split.items()} or None

    def groups(self, inner: Node, args: tuple[Ref, ...]) -> dict[Along, list] | None:
        """Return the terms of a sum by their ties; terms without ties join those of another."""
        groups: dict[Along, list[tuple[Any, Ref]]] = {}
        for c, arg in zip(inner.attr, args, strict=True):
            parts = self.parts(arg)
            if parts is None:
                return None
            for along, part in parts.items():
                groups.setdefault(along, []).append((c, part))
        alone = groups.pop(frozenset(), [])
        next(iter(groups.values())).extend(alone)
        return groups

    def is_linear(self, inner: Node, args: tuple[Ref, ...]) -> bool:
        """Return True if a map is linear in its operands with ties: a quotient, or a selection."""
        zeros = [is_zero(self.g, a.cls) for a in args]
        tied = [bool(self.sweeps(a)) for a in args]
        if inner.attr[0] == "select_n":
            return not tied[0] and all(map(or_, zeros[1:], tied[1:]))
        return inner.attr[0] == "div" and not tied[1]
