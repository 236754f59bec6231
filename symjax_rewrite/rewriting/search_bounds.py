"""Lower bounds for regions of one product and elementwise terms, which need no search.

A search of such a region costs more than it can save. The product must be computed, and so must the
sums beside it. Only scales could be placed elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from symjax_rewrite.cost.term_cost import CostModel, is_dot
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, Node
from symjax_rewrite.rewriting.region_keys import Region


@dataclass(slots=True)
class _Value:
    """The facts about a class that contains no outer product of smaller values.

    read: the classes of its full size from which it is computed. made: True if more than scales are
    between these classes and it, so that it must be computed.
    """

    read: frozenset[int]
    made: bool = False


def least_seconds(g: EGraph, region: Region, model: CostModel) -> float | None:
    """Return the cost of a region in any form, or None if a law might save work of its product."""
    values: dict[int, _Value | None] = {c: _Value(frozenset({c})) for c in region.leaves}
    product: int | None = None
    for c in region.classes:
        if c in values:
            continue
        node = node_of(g, c)
        if node.op == CONST:
            values[c] = None
        elif node.op not in (ADD, CONTRACT) or not all(_reads_plainly(a.axes) for a in node.args):
            return None
        elif node.bound:
            if product is not None or not _is_full_product(node, values):
                return None
            product = c
            values[c] = _Value(frozenset({c}))
        else:
            values[c] = _elementwise(node, values)
    if product is None:
        return None
    d = model.device
    total = model.product_seconds(g, product, node_of(g, product))
    beside = {*[a.cls for a in node_of(g, product).args], *region.roots}
    for c in beside - {product}:
        value = values[c]
        if value is not None and value.made:
            moved = sum([model.class_bytes(g, x) for x in (c, *value.read)])
            total += moved / d.bytes_per_s + d.launch_s
    return total


def _reads_plainly(axes: tuple[int, ...]) -> bool:
    return len(set(axes)) == len(axes) and min(axes, default=0) >= 0


def _is_full_product(node: Node, values: dict[int, _Value | None]) -> bool:
    """Return True if no summed index of a product could be summed on one side alone."""
    if not is_dot(node) or node.args[0].cls == node.args[1].cls:
        return False
    summed = set(range(node.out, node.out + len(node.bound)))
    return all(values[a.cls] is not None and summed <= set(a.axes) for a in node.args)


def _elementwise(node: Node, values: dict[int, _Value | None]) -> _Value | None:
    """Return an elementwise sum or product; None if no operand has all of its indices."""
    whole = [values[a.cls] for a in node.args if len(a.axes) == node.out]
    full = [v for v in whole if v is not None]
    if not full:
        return None
    read = frozenset().union(*[v.read for v in full])
    adds = node.op == ADD and len(node.args) > 1
    return _Value(read, adds or len(full) > 1 or any(v.made for v in full))
