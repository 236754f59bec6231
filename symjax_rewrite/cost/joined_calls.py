"""Calls of XLA's library that go on after a reduction, to what reads it or to another reduction.

Such a call stores nothing between both, so that a rewriting of one of them is no gain by its own
price: what it cuts off is stored.
"""

from __future__ import annotations

import math

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.library_calls import LEAST_ELEMENTS
from symjax_rewrite.cost.node_facts import Facts
from symjax_rewrite.cost.term_cost import CostModel, is_dot, is_thin, itemsize
from symjax_rewrite.ir.dataflow import Needed, node_of, reaches
from symjax_rewrite.ir.term_graph import TermGraph


def kept_bytes(t: TermGraph, need: Needed, model: CostModel, products_alone: bool = False) -> float:
    """Return the bytes of the values that a program does not store since calls go on.

    products_alone: of those alone that it does not store since calls compute products.
    """
    facts = {c: model.facts_of(t.graph, c, node_of(t.graph, c)) for c in need.order}
    if not any(f.joins if products_alone else f.is_called for f in facts.values()):
        return 0.0
    ended = {
        c: f._replace(in_calls=f.in_calls and products_alone, joins=False) for c, f in facts.items()
    }
    roots = tuple(sorted(need.outside))
    without, written = (model.written(x, roots, set()) for x in (ended, facts))
    return sum(facts[c].bytes for c in without - written)


def scratch_seconds(t: TermGraph, need: Needed, model: CostModel) -> float:
    """Return the seconds of fresh memory for what calls of a program store inside of them.

    A call that divides a product of weights by their sums, exp(s) v / Σ exp(s), stores the weights
    for both. The allocator returns large ones to the system after every call.
    """
    memory = model.device.memory
    if memory.scratch_bytes == math.inf or not model.has_calls:
        return 0.0
    facts = {c: model.facts_of(t.graph, c, node_of(t.graph, c)) for c in need.order}
    stored = sum(facts[w].bytes for w in _weights(t, need, facts, model.device))
    share = min(max(8 * stored / memory.scratch_bytes - 7, 0.0), 1.0)
    return share * stored / memory.fresh_bytes_per_s


def _weights(t: TermGraph, need: Needed, facts: dict[int, Facts], device: Device) -> set[int]:
    """Return the values that a product and a sum of one call read.

    Of short rows, or for few features, the call stores them too if it divides before the product,
    but not those of a batch that are more than the allocator keeps.
    """
    folds = device.folds

    def fused(c: int) -> tuple[int, ...]:
        f = facts[c]
        return () if f.is_group or f.is_kernel else f.args

    def is_summed(c: int, weights: Facts, product: Facts) -> bool:
        f = facts[c]
        is_large = f.bytes >= LEAST_ELEMENTS * itemsize(t.graph.classes[c].dtype)
        is_long = weights.bytes >= folds.least_head_columns * f.bytes
        in_batch = len(t.graph.classes[c].sizes) > 1
        is_beyond = in_batch and weights.bytes > device.memory.kept_bytes
        is_wide = product.bytes >= folds.kept_features * f.bytes
        return f.is_called and is_large and is_long and (is_wide or is_beyond)

    found = set[int]()
    for c, f in facts.items():
        if not is_dot(f.node) or is_thin(f.node):
            continue
        beside = [a for r in need.users.get(c, ()) if facts[r].in_calls for a in facts[r].args]
        for w in f.args:
            sums = {r for r in need.users.get(w, ()) if is_summed(r, facts[w], f)}
            if sums and reaches(beside, fused, sums):
                found.add(w)
    return found
