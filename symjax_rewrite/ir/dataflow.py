"""Liveness over the term graph: what results depend on, and who reads what."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import Node
from symjax_rewrite.ir.term_graph import TermGraph


@dataclass(slots=True)
class Needed:
    """What of a graph the program's results need, and how often each class is used.

    known: classes that depend on frozen inputs and constants alone.
    """

    order: list[int]
    uses: dict[int, int]
    users: dict[int, list[int]]
    outside: set[int]
    known: frozenset[int] = frozenset()


def node_of(g: EGraph, cls: int) -> Node:
    """The original node of a class."""
    return g.classes[cls].first


def depends(g: EGraph, cls: int, on: Collection[int]) -> bool:
    """Return True if a class is in `on` or computed from one: operands have smaller numbers."""
    least = min(on, default=cls)
    stack, seen = [cls], set()
    while stack:
        c = stack.pop()
        if c in on:
            return True
        if c > least and c not in seen:
            seen.add(c)
            stack.extend(a.cls for a in node_of(g, c).args)
    return False


def cone(g: EGraph, classes: Iterable[int]) -> set[int]:
    """Return some classes and all that they are computed from."""
    stack = list(classes)
    seen = set(stack)
    while stack:
        for a in node_of(g, stack.pop()).args:
            if a.cls not in seen:
                seen.add(a.cls)
                stack.append(a.cls)
    return seen


def needed(t: TermGraph) -> Needed:
    """Classes the outputs and effects depend on, with consumers counted."""
    g = t.graph
    outside: set[int] = set()
    for v in t.program.outputs:
        if isinstance(v, int):
            outside.add(t.view(v).cls)
    stack = list(outside)
    for e in t.program.equations:
        if e.eqn.effects:
            for v in e.outvals:
                stack.append(t.view(v).cls)
            for v in e.invals:
                if isinstance(v, int):
                    stack.append(t.view(v).cls)
                    outside.add(t.view(v).cls)
    users: dict[int, list[int]] = {}
    seen = set(stack)
    classes = g.classes
    while stack:
        cls = stack.pop()
        for arg in {a.cls for a in classes[cls].first.args}:
            known = users.get(arg)
            if known is None:
                users[arg] = [cls]
            else:
                known.append(cls)
            if arg not in seen:
                seen.add(arg)
                stack.append(arg)
    uses = {c: len(users.get(c, ())) + (c in outside) for c in seen}
    return Needed(sorted(seen), uses, users, outside)
