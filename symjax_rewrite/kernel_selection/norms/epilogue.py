"""Elementwise terms that follow a normalised product: bias, activation, gate, residual."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from symjax_rewrite.ir.dataflow import Needed, is_computed_from, kind_of, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP, Ref, over
from symjax_rewrite.kernel_selection.norms.normalized_operand import Normed
from symjax_rewrite.kernel_selection.norms.row_statistics import ProgramBuilder

MAX_INSIDE = 24  # limit on classes of one epilogue


@dataclass(slots=True)
class NormEpilogue:
    """Last class of an elementwise chain behind some products.

    cls: the class. axes: for its slots, the matching indices of the first product. inside: products
    and the classes between. products: members by class, read over the first product's indices.
    """

    g: EGraph
    cls: int
    axes: tuple[int, ...]
    inside: set[int]
    products: dict[int, tuple[int, ...]]
    rows: frozenset[int]

    def build(self, b: ProgramBuilder, made: dict[int, int]) -> int:
        """Return the step of the result; `made` are the steps of the products."""

        @functools.cache
        def step(ref: Ref) -> int:
            if ref.cls in made:
                return made[ref.cls]
            node = node_of(self.g, ref.cls)
            if node.op == CONST:
                return b.constant(node.attr[0])
            if ref.cls in self.inside or ref.cls == self.cls:
                args = [step(over(ref, a)) for a in node.args]
                return b.apply(node, args, self.g.classes[ref.cls].dtype)
            kind = "fulls" if set(ref.axes) & self.rows else "ends"
            return b.operand(kind, ref)

        return step(Ref(self.cls, self.axes))


def epilogue(g: EGraph, need: Needed, first: Normed, members: list[Normed]) -> NormEpilogue:
    """Return the longest elementwise chain after a product.

    No class inside the chain has another reader. Other members that join the chain are products of
    the same kernel.
    """
    by_class = {m.cls: m for m in members}
    identity = tuple(range(len(g.classes[first.cls].sizes)))
    axes: dict[int, tuple[int, ...]] = {first.cls: identity}
    rows = frozenset(first.rows)
    best = NormEpilogue(g, first.cls, identity, {first.cls}, {first.cls: identity}, rows)
    while len(axes) < MAX_INSIDE:
        users = sorted({u for c in axes for u in need.users.get(c, ()) if u not in axes})
        if not users or any(c in need.outside for c in axes if c != best.cls):
            return best
        added = _joined(g, axes, users[0], by_class, first)
        if added is None:
            return best
        axes.update(added)
        last = users[0]
        inside = axes.keys() - {last}
        if not any(c in need.outside or {*need.users.get(c, ())} - axes.keys() for c in inside):
            products = {c: a for c, a in axes.items() if c in by_class}
            best = NormEpilogue(g, last, axes[last], inside, products, rows)
        if last in need.outside:
            return best
    return best


def _joined(
    g: EGraph,
    axes: dict[int, tuple[int, ...]],
    user: int,
    members: dict[int, Normed],
    first: Normed,
) -> dict[int, tuple[int, ...]] | None:
    """Return the axes of a user and its members over the first product's indices, or None.

    None means that the user must wait for other operands.
    """
    node = node_of(g, user)
    if node.op not in (MAP, ADD, CONTRACT) or node.bound or kind_of(g, user) not in "fb":
        return None
    count = len(g.classes[first.cls].sizes)
    if len(g.classes[user].sizes) != count:
        return None
    place: dict[int, int] = {}
    for a in node.args:
        if a.cls in axes:
            found = dict(zip(a.axes, axes[a.cls], strict=True))
            if any(place.setdefault(i, k) != k for i, k in found.items()):
                return None
    if sorted(place.values()) != list(range(count)) or len(place) != count:
        return None
    own = tuple(place[i] for i in range(count))
    added = {user: own}
    for a in node.args:
        if a.cls in axes or node_of(g, a.cls).op == CONST:
            continue
        read = tuple(place[i] for i in a.axes)
        if len(set(read)) < len(read) or kind_of(g, a.cls) not in "fb":
            return None
        if (other := members.get(a.cls)) is not None:
            rows, ends = (tuple(read[i] for i in group) for group in (other.rows, other.ends))
            if (rows, ends) != (first.rows, first.ends):
                return None  # the product has other rows and outputs
            added[a.cls] = read
        elif (
            is_computed_from(g, a.cls, axes)
            or not set(read) & set(first.ends)
            or (set(read) & set(first.rows) and set(read) != set(range(count)))
        ):
            return None
    return added
