"""Regions that are one product with elementwise terms around it: what no law could save (a pass).

Searching such a region costs more than it can give: its product has to be computed, and so have
the sums beside it; only scales could go elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from symjax_rewrite.cost.term_cost import CostModel, is_dot
from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, Node
from symjax_rewrite.rewriting.region_partition import Region


@dataclass(slots=True)
class _Value:
    """What is known of a class: nothing of it is an outer product of smaller values.

    read: the classes of its full size that it is made of. made: whether more than scales are
    between these and it, so that it must be computed.
    """

    read: frozenset[int]
    made: bool = False


def least_seconds(g: EGraph, region: Region, model: CostModel) -> float | None:
    """What a region costs in any form, or None where a law might spare its product some work.

    Args:
        g: the graph the region is of, as the program was lifted.
        region: the region; its operands come first.
        model: prices at the sizes at hand.
    """
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
    """Whether a product sums over nothing that either side could be summed over alone."""
    if not is_dot(node) or node.args[0].cls == node.args[1].cls:
        return False
    summed = set(range(node.out, node.out + len(node.bound)))
    return all(values[a.cls] is not None and summed <= set(a.axes) for a in node.args)


def _elementwise(node: Node, values: dict[int, _Value | None]) -> _Value | None:
    """A sum or product element by element; None where no operand has all of its indices."""
    whole = [values[a.cls] for a in node.args if len(a.axes) == node.out]
    full = [v for v in whole if v is not None]
    if not full:
        return None
    read = frozenset().union(*[v.read for v in full])
    adds = node.op == ADD and len(node.args) > 1
    return _Value(read, adds or len(full) > 1 or any(v.made for v in full))
