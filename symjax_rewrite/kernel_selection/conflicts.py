"""Which routes stand together: none makes, hides or waits for what another does (a pass).

A route computes several classes at once from all that it reads. Whether something can be computed
then is no longer seen from the terms alone, so it is asked of the program as it will be emitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from symjax_rewrite.ir.term_graph import TermGraph


class Route(Protocol):
    """A kernel and the classes that it computes."""

    def classes(self) -> set[int]:
        """What it computes."""
        ...

    def gives(self) -> set[int]:
        """What of it others may read."""
        ...

    def needs(self, cls: int) -> list[int]:
        """Classes that must be there before one of its own is."""
        ...


class OneClass:
    """A route that computes one class, which others may read."""

    __slots__ = ()
    cls: int

    def classes(self) -> set[int]:
        """The class it computes."""
        return {self.cls}

    def gives(self) -> set[int]:
        """The same."""
        return {self.cls}


def take(t: TermGraph, routed: dict[int, Any], routes: list[Any]) -> int:
    """Add routes to those taken already, as far as they stand together.

    Args:
        t: the program.
        routed: the route of each class that one computes; added to.
        routes: new ones.

    Returns:
        How many were dropped.
    """
    others = {id(r): r for r in routed.values()}.values()
    hidden = {c for r in others for c in r.classes() - r.gives()}
    read = {c for r in others for cls in r.classes() for c in r.needs(cls)}
    taken: list[Any] = []
    for route in routes:
        mine = route.classes()
        hides, reads = mine - route.gives(), {c for cls in mine for c in route.needs(cls)}
        if mine & routed.keys() or hides & read or reads & hidden:
            continue
        routed.update(dict.fromkeys(mine, route))
        taken.append(route)
        hidden |= hides
        read |= reads
    while taken and (faulty := _faulty(t, routed)):
        drop = [r for r in faulty if r in taken] or faulty
        for cls in [c for c, r in routed.items() if r in drop]:
            del routed[cls]
        taken = [r for r in taken if r not in drop]
    return len(routes) - len(taken)


def _faulty(t: TermGraph, routed: dict[int, Any]) -> list[Any]:
    """Routes that wait for each other, or one that hides what is read; none where all stand.

    The walk is that of the emitter: a value is number v ≥ 0, a class of terms is -1 - class.
    """
    e = t.program.equations
    maker = {v: n for n, each in enumerate(e) for v in each.outvals}
    ends = [*t.program.outputs, *(v for each in e if each.eqn.effects for v in each.invals)]
    done: set[int] = set()
    for end in ends:
        if not isinstance(end, int) or end in done:
            continue
        path: dict[int, Iterator[int]] = {end: iter(_before(t, routed, maker, end))}
        while path:
            at = next(reversed(path))
            for x in path[at]:
                cls = -1 - x
                if x < 0 and cls in routed and cls not in routed[cls].gives():
                    return [routed[cls]]
                if x in path:
                    names = list(path)
                    cycle = [routed.get(-1 - y) for y in names[names.index(x) :]]
                    found = [r for r in cycle if r is not None]
                    if found:
                        return found
                elif x not in done:
                    path[x] = iter(_before(t, routed, maker, x))
                    break
            else:
                done.add(at)
                del path[at]
    return []


def _before(t: TermGraph, routed: dict[int, Any], maker: dict[int, int], x: int) -> list[int]:
    """What is there before a value or class is made."""
    if x >= 0:
        cls = t.view(x).cls
        if cls in routed:
            return [-1 - cls]
        invals = t.program.equations[maker[x]].invals if x in maker else ()
        return [v for v in invals if isinstance(v, int)]
    cls = -1 - x
    if cls in routed:
        return [-1 - c for c in routed[cls].needs(cls)]
    if cls in t.leaf_value:
        return [t.leaf_value[cls]]
    if cls in t.made_by:
        number, k = t.made_by[cls]
        return [t.program.equations[number].outvals[k]]
    return [-1 - a.cls for a in t.graph.classes[cls].first.args]
