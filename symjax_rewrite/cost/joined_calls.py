"""Calls of XLA's library that go on after a reduction, to what reads it or to another reduction.

Such a call stores nothing between both, so that a rewriting of one of them is no gain by its own
price: what it cuts off is stored.
"""

from __future__ import annotations

from symjax_rewrite.cost.term_cost import CostModel
from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.term_graph import TermGraph


def joins_calls(t: TermGraph, need: Needed, model: CostModel) -> bool:
    """Return True if a call of a program goes on after a reduction."""
    facts = {c: model.facts_of(t.graph, c, node_of(t.graph, c)) for c in need.order}
    if not any(f.is_called for f in facts.values()):
        return False
    _, groups = model.grouped(facts, tuple(sorted(need.outside)), set())
    return any(f.is_called and groups.get(c, c) != c for c, f in facts.items())
