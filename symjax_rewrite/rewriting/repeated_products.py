"""Products that are computed once for every copy of an operand (a pass).

`tile(x) @ W`, or a projection of what was repeated for every beam: as a term the product has only
the indices its value depends on, as an equation it has them all. Computed over its own indices
and read at all of them, it is the same array for a fraction of the work.
"""

from __future__ import annotations

from symjax_rewrite.cost.term_cost import CostModel, is_dot, itemsize
from symjax_rewrite.ir.dataflow import Needed
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import CONTRACT, CONV
from symjax_rewrite.ir.term_graph import TermGraph


def spread_products(t: TermGraph, need: Needed, model: CostModel) -> list[tuple[int, float]]:
    """Classes of products whose equations repeat them, and the seconds this costs, if any.

    Args:
        t: the lifted program.
        need: its needed classes.
        model: prices at the sizes at hand.
    """
    found = []
    for cls in need.order:
        node = t.graph.classes[cls].first
        if node.op not in (CONTRACT, CONV) or cls not in t.made_by:
            continue
        number, k = t.made_by[cls]
        written = t.sizes[t.program.equations[number].outvals[k]]
        c = t.graph.classes[cls]
        if len(written) == len(c.sizes) or not (is_dot(node) or node.op == CONV):
            continue
        own, all_of_it = _count(c.sizes, model), _count(written, model)
        if not own or own == all_of_it:
            continue
        once = model.node_seconds(t.graph, cls, node) - model.device.launch_s
        copy = all_of_it * itemsize(c.dtype) / model.device.bytes_per_s
        saved = once * (all_of_it / own - 1) - copy - model.device.launch_s
        if saved > 0:
            found.append((cls, saved))
    return found


def _count(sizes: tuple[Dim, ...], model: CostModel) -> float:
    out = 1.0
    for s in sizes:
        out *= model.at(s)
    return out
