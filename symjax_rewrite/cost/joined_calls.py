"""Calls of XLA's library that reduce again what they have reduced (`FoldFacts.calls_go_on`).

Such a call stores nothing between both reductions, so that a rewriting of one of them is no gain by
its own price: what it cuts off is stored.
"""

from __future__ import annotations

from symjax_rewrite.cost.term_cost import CostModel
from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.term_graph import TermGraph


def joins_calls(t: TermGraph, need: Needed, model: CostModel) -> bool:
    """Return True if a call of a program reduces what it has reduced."""
    if not model.device.folds.calls_go_on:
        return False
    facts = {c: model.facts_of(t.graph, c, node_of(t.graph, c)) for c in need.order}
    if sum([f.is_called for f in facts.values()]) < 2:
        return False
    written = model.written(facts, tuple(sorted(need.outside)), set())
    inside: set[int] = set()  # calls
    for c in reversed(need.order):
        f = facts[c]
        if c in inside and f.is_called and c not in written:
            return True
        if f.is_called or (c in inside and c not in written):
            inside.update(f.args)
    return False
