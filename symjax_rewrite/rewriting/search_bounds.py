"""Bounds of what a search could save: a region that cannot save a share of the program needs none.

A program of many operations on small arrays takes its time in launches, of which XLA fuses those of
elementwise terms and reductions as it chooses. No rewriting of such terms saves a launch for sure,
so only their arithmetic and traffic count as savings, and products with all their seconds.

A region of one product and elementwise terms needs no search either: the product must be computed,
and so must the sums beside it. Only scales could be placed elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symjax_rewrite.cost.term_cost import Cost, CostModel, is_dot
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


def savings_bound(cost: Cost, g: EGraph, region: Region, model: CostModel) -> float:
    """Return the seconds that a region could save at most.

    cost: of the region as written.
    """
    made = set(region.classes).difference(region.leaves)
    products = sum([model.facts_of(g, c, node_of(g, c)).is_kernel for c in made])
    launches_s = max(cost.launches - products, 0) * model.device.launch_s
    return cost.seconds - launches_s - _least_traffic(g, region, made, model)


def _least_traffic(g: EGraph, region: Region, made: set[int], model: CostModel) -> float:
    """Return the seconds to read every input of a region once and to write its results."""
    if any(node_of(g, c).op not in (ADD, CONTRACT, CONST) for c in made):
        return 0.0  # inputs may be read in part, or be results
    moved = sum([model.class_bytes(g, c) for c in region.leaves])
    moved += sum([model.class_bytes(g, c) for c in region.roots if c not in region.fused])
    return moved / model.device.bytes_per_s


def nearest(g: EGraph, classes: Sequence[int], model: CostModel) -> list[int]:
    """Return the classes of a region, or of a large one those nearest to what could save most.

    Seconds are those of `savings_bound`, class by class. From the classes that have nearly all of
    them the region grows by operands and readers.
    """
    search = model.device.search
    most = search.region_classes
    if len(classes) <= most:
        return [*classes]
    near: dict[int, list[int]] = {c: [] for c in classes}
    for c in classes:
        for a in node_of(g, c).args:
            if a.cls in near:
                near[c].append(a.cls)
                near[a.cls].append(c)
    seconds = {c: model.node_seconds(g, c, node_of(g, c)) for c in classes}
    left = search.region_share * sum(seconds.values())
    found: dict[int, None] = {}
    for c in sorted(classes, key=seconds.__getitem__, reverse=True)[: most // 4]:
        if left > 0:
            found[c] = None
            left -= seconds[c]
    queue = [*found]
    for c in queue:
        for other in near[c]:
            if other not in found and len(found) < most:
                found[other] = None
                queue.append(other)
    return sorted(found)


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
