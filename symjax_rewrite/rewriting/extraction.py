"""Extraction: the choice of one node per class, by a greedy start and hill climbing.

The cost is that of a DAG: a class that is used twice is computed once. The greedy choice minimises
tree cost. The moves that follow switch one class, or every class computable from one shared class
at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from symjax_rewrite.cost.margins import worthwhile
from symjax_rewrite.cost.term_cost import Cost, CostModel, reachable
from symjax_rewrite.ir.egraph import ORIGINAL, EGraph
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.term import ADD, CONTRACT, DELTA, INVERSE, LEAF, Node
from symjax_rewrite.rewriting.choice_cost import ChoiceCost

Choice = dict[int, Node]


@dataclass(slots=True)
class Extraction:
    """The best choice found, and the costs of the written program and of this choice."""

    before: Cost
    after: Cost
    choice: Choice
    taken: bool
    reason: str


def original_choice(g: EGraph) -> Choice:
    """Return the node that every class was created with."""
    written = ((c, n, why) for c in g.live() for n, why in [*g.classes[c].nodes.items()][::-1])
    return {c: n for c, n, why in written if why == ORIGINAL}


def extract(
    g: EGraph, roots: tuple[int, ...], model: CostModel, free: Callable[[int], bool], before: Cost
) -> Extraction:
    """Return the cheapest choice for the roots, and True if it should be taken.

    `before` is the cost of the written program, computed before any union. After a union a class
    may contain one of its own operands (I·a = a).
    """
    original = original_choice(g)
    if g.count == len(original) and not g.unions:
        return Extraction(before, before, original, False, "no other form was found")
    search = _Search(g, roots, model, free)
    greedy, start = map(search.priced, (search.greedy, {**search.greedy, **original}))
    best = search.climb(greedy if greedy.seconds < start.seconds else start)
    choice = _simplified(best, original)
    after = model.evaluate(g, choice, roots, free)
    taken, reason = worthwhile(before, after, model.device, any(map(free, choice)))
    return Extraction(before, after, choice, taken, reason)


def is_emittable(g: EGraph, node: Node, original: bool) -> bool:
    """Return True if a node can be emitted; n-ary products are split first."""
    if original:
        return True
    if node.op == INVERSE:
        return False  # only laws read it; a product with an inverse is not backward stable
    if node.op == ADD:
        dtype = g.classes[node.args[0].cls].dtype
        return all(is_representable(c, dtype) for c in node.attr)
    if node.op != CONTRACT or not node.bound:
        return True
    if len(node.args) > 2:
        return False
    return not any(m.op == DELTA for a in node.args for m in g.classes[a.cls].nodes)


@functools.cache
def is_representable(coefficient: Any, dtype: str) -> bool:
    """Return True if a dtype represents a number to its own precision.

    The product of scales that were written one after the other may under- or overflow.
    """
    if dtype_kind(dtype) not in "fc":
        return True
    info = jax.numpy.finfo(dtype)
    parts = (complex(coefficient).real, complex(coefficient).imag)
    return all(not x or float(info.tiny) <= abs(x) <= float(info.max) for x in parts)


def _options(g: EGraph, cls: int) -> list[Node]:
    return [n for n, r in g.classes[cls].nodes.items() if is_emittable(g, n, r == ORIGINAL)]


def _greedy(
    g: EGraph, model: CostModel, free: Callable[[int], bool], options: dict[int, list[Node]]
) -> Choice:
    """Return the cheapest trees, with operands in memory, by relaxation to a fixed point."""
    best: dict[int, tuple[float, Node]] = {}
    rows = [
        (c, n, 0.0 if free(c) else model.node_seconds(g, c, n), {g.find(a).cls for a in n.args})
        for c, nodes in options.items()
        for n in nodes
    ]
    changed = True
    while changed:
        changed = False
        for cls, node, own, args in rows:
            total = own
            for arg in args:
                total += best[arg][0] if arg in best else math.inf
            if total < best.get(cls, (math.inf,))[0] * (1 - 1e-9):
                best[cls] = (total, node)
                changed = True
    return {c: node for c, (_, node) in best.items()}


class _Search:
    """Hill climbing over choices with the DAG cost."""

    def __init__(
        self, g: EGraph, roots: tuple[int, ...], model: CostModel, free: Callable[[int], bool]
    ) -> None:
        self.g, self.roots, self.model, self.free = g, roots, model, free
        self.options = {c: _options(g, c) for c in g.live()}
        self.greedy = _greedy(g, model, free, self.options)
        self.evaluations, self.most = 0, model.device.search.evaluations

    def priced(self, choice: Choice) -> ChoiceCost:
        """Return the price of a choice."""
        self.evaluations += 1
        return ChoiceCost(self.g, self.roots, self.model, self.free, choice)

    def climb(self, now: ChoiceCost) -> ChoiceCost:
        """Apply moves until no move improves the cost."""
        tried: set[tuple[tuple[int, int], ...]] = set()  # moves from the present choice
        improved = True
        while improved and self.evaluations < self.most:
            improved = False
            for move in self._moves(now):
                key = tuple([(cls, id(node)) for cls, node in move.items()])
                if key in tried:
                    continue
                tried.add(key)
                self.evaluations += 1
                if now.after(move) < now.seconds * (1 - 1e-6):
                    now, improved = now.moved(move), True
                    tried.clear()
                if self.evaluations >= self.most:
                    break
        return now

    def _moves(self, now: ChoiceCost) -> list[Choice]:
        moves: list[Choice] = []
        groups: dict[int, Choice] = {}
        for cls in now.order:
            for node in self.options[cls]:
                if node is not now.choice[cls]:
                    moves.append({cls: node})
                    for arg in {a.cls for a in node.args}:
                        groups.setdefault(arg, {}).setdefault(cls, node)
        return moves + [m for m in groups.values() if len(m) > 1]


def _simplified(now: ChoiceCost, original: Choice) -> Choice:
    """Restore the written node wherever the change saves nothing."""
    for cls in now.order:
        node = original.get(cls)
        if node is None or node == now.choice[cls]:
            continue
        if now.after({cls: node}) <= now.seconds * (1 + 1e-9):
            now = now.moved({cls: node})
    return dict(now.choice)


def changed_classes(g: EGraph, choice: Choice, roots: tuple[int, ...]) -> list[int]:
    """Return the classes that are computed by another node than the written node."""
    order = reachable(choice, roots, lambda cls: False)
    return [
        c for c in order if g.classes[c].nodes.get(choice[c]) != ORIGINAL and choice[c].op != LEAF
    ]
