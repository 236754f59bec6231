"""Dataflow: makers and users of values, operands, and liveness.

The walks are over any graph of hashable nodes; `operands(x)` returns the nodes that x is computed
from: for the classes of a term graph (`class_operands`), or the numbered values of equations
(`value_operands`).
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import TypeVar

from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.primitives import dtype_kind, quantizes
from symjax_rewrite.ir.term import Node, is_cast
from symjax_rewrite.ir.term_graph import TermGraph

T = TypeVar("T", bound=Hashable)


class CycleError(Exception):
    """A node is computed from itself (internal).

    cycle: the nodes of the cycle, each computed from the next one.
    """

    def __init__(self, cycle: list) -> None:
        super().__init__("a cycle of operands")
        self.cycle = cycle


# ---------------------------------------------------------------- any graph


def cone(
    roots: Iterable[T], operands: Callable[[T], Iterable[T]], without: Container[T] = ()
) -> set[T]:
    """Return the roots and everything they are computed from; with users, all that depends on them.

    without: nodes to leave out, with everything reached through them alone.
    """
    seen = {x for x in roots if x not in without}
    stack = list(seen)
    while stack:
        for x in operands(stack.pop()):
            if x not in seen and x not in without:
                seen.add(x)
                stack.append(x)
    return seen


def walk(roots: Iterable[T], operands: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield the roots and everything they are computed from, each once, the nearest first."""
    found = [*dict.fromkeys(roots)]
    seen = {*found}
    for x in found:
        yield x
        for y in operands(x):
            if y not in seen:
                seen.add(y)
                found.append(y)


def reaches(
    roots: Iterable[T], operands: Callable[[T], Iterable[T]], targets: Container[T]
) -> bool:
    """Return True if a root is one of the targets or is computed from one."""
    return any(x in targets for x in walk(roots, operands))


def postorder(
    roots: Iterable[T], operands: Callable[[T], Collection[T]], done: Iterable[T] = ()
) -> list[T]:
    """Return the roots and everything they are computed from, each node after its operands.

    The first root, and of operands the last, is entered first. `done` nodes are left out, with
    everything reached through them alone.

    Raises:
        CycleError: a node is computed from itself.
    """
    order: list[T] = []
    seen = set(done)
    path: list[T] = []  # nodes entered whose operands are not all in order
    within: set[T] = set()  # the same nodes as a set
    stack: list[T | None] = [*reversed([*roots])]
    while stack:
        x = stack.pop()
        if x is None:  # the operands of the last node entered are in order
            x = path.pop()
            within.discard(x)
        elif x in seen:
            continue
        elif x in within:
            raise CycleError(path[path.index(x) :])
        elif below := operands(x):
            within.add(x)
            path.append(x)
            stack.append(None)
            stack += [y for y in below if y not in seen]
            continue
        seen.add(x)
        order.append(x)
    return order


def connected(links: Iterable[tuple[T, T]]) -> dict[T, T]:
    """Return, for each node of some links, one node that stands for all that are connected.

    Example:
        >>> found = connected([(1, 2), (3, 4), (2, 5)])
        >>> found[1] == found[2] == found[5] != found[3]
        True
    """
    parent: dict[T, T] = {}

    def root(x: T) -> T:
        above = parent.setdefault(x, x)
        while above != x:
            parent[x] = x = parent[above]
            above = parent[x]
        return x

    for a, b in links:
        parent[root(a)] = root(b)
    return {x: root(x) for x in parent}


# ---------------------------------------------------------------- classes of a term graph


@dataclass(slots=True)
class Needed:
    """The live set of a term graph, and how often each class is used.

    known: classes that depend on frozen inputs and constants alone.
    """

    order: list[int]
    uses: dict[int, int]
    users: dict[int, list[int]]
    outside: set[int]
    known: frozenset[int] = frozenset()


def node_of(g: EGraph, cls: int) -> Node:
    """Return the original node of a class."""
    return g.classes[cls].first


def kind_of(g: EGraph, cls: int) -> str:
    """Return the kind of a class's dtype, as `dtype_kind`."""
    return dtype_kind(g.classes[cls].dtype)


def is_float_cast(g: EGraph, cls: int) -> bool:
    """Return True if a class is another floating-point class in another dtype, but for rounding."""
    node = node_of(g, cls)
    if not is_cast(node) or kind_of(g, cls) != "f":
        return False
    inner = g.classes[node.args[0].cls].dtype
    return dtype_kind(inner) == "f" and not quantizes(inner)


def class_operands(g: EGraph) -> Callable[[int], list[int]]:
    """Return a function that gives the classes that a class's original node reads."""
    classes = g.classes
    return lambda cls: [a.cls for a in classes[cls].first.args]


def is_computed_from(g: EGraph, cls: int, targets: Collection[int]) -> bool:
    """Return True if a class is one of the targets or is computed from one.

    Original nodes read classes of smaller numbers, so classes below the least target are skipped.
    """
    least = min(targets)
    operands = class_operands(g)
    return reaches([cls], lambda c: operands(c) if c > least else (), targets)


def live_classes(
    outside: set[int], operands: Callable[[int], Iterable[int]], ends: Iterable[int] = ()
) -> Needed:
    """Return the live set where classes are read from outside the graph.

    outside: classes that results or effects read. ends: further classes that are computed, though
    nothing reads them.
    """
    stack = [*outside, *ends]
    users: dict[int, list[int]] = {}
    seen = set(stack)
    while stack:
        cls = stack.pop()
        for arg in set(operands(cls)):
            users.setdefault(arg, []).append(cls)
            if arg not in seen:
                seen.add(arg)
                stack.append(arg)
    uses = {c: len(users.get(c, ())) + (c in outside) for c in seen}
    return Needed(sorted(seen), uses, users, outside)


def needed(t: TermGraph) -> Needed:
    """Return the live set of a program's term graph: classes that outputs and effects depend on."""
    read, made = list(numbers(t.program.outputs)), []
    for e in t.program.equations:
        if e.eqn.effects:
            made += e.outvals
            read += numbers(e.invals)
    outside = {t.view(v).cls for v in read}
    return live_classes(outside, class_operands(t.graph), [t.view(v).cls for v in made])


# ---------------------------------------------------------------- values of equations


def numbers(values: Iterable[Value]) -> list[int]:
    """Return the numbers of the values that are not literals."""
    return [v for v in values if isinstance(v, int)]


def makers_of(equations: Iterable[Equation]) -> dict[int, Equation]:
    """Return, for each value, the equation that makes it."""
    return {v: e for e in equations for v in e.outvals}


def users_of(equations: Iterable[Equation]) -> dict[int, list[Equation]]:
    """Return, for each value, the equations that read it, in order, each once."""
    users: dict[int, list[Equation]] = {}
    for e in equations:
        for v in e.reads if len(e.reads) < 2 else dict.fromkeys(e.reads):
            if v in users:
                users[v].append(e)
            else:
                users[v] = [e]
    return users


def value_operands(makers: Mapping[int, Equation]) -> Callable[[int], Sequence[int]]:
    """Return a function that gives the values that the maker of a value reads."""
    return lambda v: () if (e := makers.get(v)) is None else e.reads


def live(
    equations: Iterable[Equation],
    ends: Iterable[Value],
    makers: Mapping[int, Equation] | None = None,
) -> set[int]:
    """Return the values that some values and all effects depend on, these values included."""
    equations = list(equations)
    makers = makers_of(equations) if makers is None else makers
    ends = [*ends, *[v for e in equations if e.eqn.effects for v in (*e.invals, *e.outvals)]]
    return cone(numbers(ends), value_operands(makers))


def making(
    equations: Iterable[Equation], values: Iterable[Value], known: Container[int] = ()
) -> list[Equation]:
    """Return the equations, in order, that compute some values from values already known."""
    equations = list(equations)
    found = cone(numbers(values), value_operands(makers_of(equations)), known)
    return [e for e in equations if not found.isdisjoint(e.outvals)]


def dependents(
    equations: Iterable[Equation], values: Iterable[int], roots: Container[Equation] = ()
) -> list[Equation]:
    """Return the equations that depend on some values or on the roots, and the roots.

    equations: each equation after the equations that make its operands.
    """
    made, found = set(values), []
    for e in equations:
        if not made.isdisjoint(e.reads) or e in roots:
            found.append(e)
            made.update(e.outvals)
    return found
