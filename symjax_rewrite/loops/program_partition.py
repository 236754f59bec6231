"""The partition of a program into two parts by data dependence.

The first part reads the known inputs alone. The second part reads the other inputs and the values
that the first part keeps. A value that the second part needs is kept or rematerialised. The choice
is a minimum cut of the first part, weighted by bytes (Ford & Fulkerson 1956; for derivatives He &
Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion aware", 2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import aval_bytes
from symjax_rewrite.cost.profile_groups import SLOW_MAPS
from symjax_rewrite.ir.dataflow import cone
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS
from symjax_rewrite.jax_internals import ClosedJaxpr, JaxprEqn, Var
from symjax_rewrite.loops.linear_zeros import run_with_zeros, with_zero

FUSED = (ELEMENTWISE | VIEWS | {"iota", "slice", "concatenate", "pad", "rev"}) - SLOW_MAPS
CHEAP = FUSED | SLOW_MAPS | {"reduce_sum", "reduce_max", "reduce_min"}
RECOMPUTED = (FUSED, CHEAP, None)  # primitives that a last part computes again; None: all
MEMORY = 1.05  # bound on the bytes of kept values, relative to those that are kept as written


@dataclass(frozen=True, slots=True)
class CutProgram:
    """The two parts of a program.

    first: equations that read known inputs alone. last: rematerialised equations, then the other
    equations. results: outputs that the first part gives. kept: values of the first part that the
    last part reads.
    """

    closed: ClosedJaxpr
    known: int
    first: list[JaxprEqn]
    last: list[JaxprEqn]
    results: list[Any]
    kept: list[Var]

    def run_first(self, values: Sequence[Any]) -> list[Any]:
        """Compute the results of the first part, then the kept values, from the known inputs."""
        env = self._constants()
        env.update(zip(self.closed.jaxpr.invars[: self.known], values, strict=True))
        run_with_zeros(self.first, env)
        return jax_internals.read_atoms([*self.results, *self.kept], env)

    def run_last(self, kept: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Compute the other outputs from the kept values and the other inputs; None is zero."""
        env = self._constants()
        env.update(zip(self.kept, kept, strict=True))
        env.update(zip(self.closed.jaxpr.invars[self.known :], values, strict=True))
        run_with_zeros(self.last, env)
        outvars = self.closed.jaxpr.outvars[len(self.results) :]
        outs = zip(jax_internals.read_atoms(outvars, env), outvars, strict=True)
        return [with_zero(x, v.aval) for x, v in outs]

    def _constants(self) -> dict[Any, Any]:
        return dict(zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True))


def split(
    closed: ClosedJaxpr,
    known: int,
    again: Container[str] | None,
    results: int = 0,
    free: Collection[Var] = (),
) -> CutProgram | None:
    """Cut a program by dependence on its inputs after the first `known` ones.

    Args:
        closed: the program; equations with effects stay in its last part.
        known: number of leading inputs that the first part reads.
        again: primitives that the results need and the last part may rematerialise; None: all.
        results: number of leading outputs that the first part must give.
        free: values that cost nothing to keep.

    Returns:
        The parts; None if one of the results depends on the other inputs.
    """
    jaxpr = closed.jaxpr
    fixed = {*jaxpr.invars[:known], *jaxpr.constvars}
    first, last = [], []
    for eqn in jaxpr.eqns:
        if not eqn.effects and fixed.issuperset(_variables(eqn.invars)):
            first.append(eqn)
            fixed.update(eqn.outvars)
        else:
            last.append(eqn)
    if not fixed.issuperset(_variables(jaxpr.outvars[:results])):
        return None
    wanted = _variables([v for e in last for v in e.invars]) + _variables(jaxpr.outvars[results:])
    wanted = [v for v in dict.fromkeys(wanted) if v in fixed]
    needed = {id(e) for e in _needed(first, jaxpr.outvars[:results], ())}
    may_again = [
        e for e in first
        if again is None or e.primitive.name in again or (results and id(e) not in needed)
    ]  # fmt: skip
    cut = _minimum_cut(jaxpr, wanted, may_again, free)
    recomputed = _needed(first, wanted, cut)
    order = [*jaxpr.invars[:known], *(v for e in first for v in e.outvars)]
    kept = [v for v in order if v in cut]
    outvars = [*jaxpr.outvars[:results], *kept]
    made = _needed(first, outvars, ())
    return CutProgram(
        closed, known, made, [*recomputed, *last], list(jaxpr.outvars[:results]), kept
    )


def smallest_split(
    closed: ClosedJaxpr,
    known: int,
    results: int,
    free: Collection[Var],
    bound: float,
    choices: Sequence[Container[str] | None] = RECOMPUTED,
) -> CutProgram | None:
    """Cut at the fewest bytes, with the first of `choices` that keeps few bytes, else the last.

    bound: bytes that are kept as written; values `free` are not counted.
    """
    parts = None
    for again in choices:
        parts = split(closed, known, again, results, free)
        if parts is None:
            return None
        if sum(aval_bytes(v.aval) for v in parts.kept if v not in free) <= MEMORY * bound:
            break
    return parts


def without_barrier(closed: ClosedJaxpr, known: int) -> ClosedJaxpr:
    """Remove the barrier on the inputs after the first `known` inputs."""
    late = set(closed.jaxpr.invars[known:])

    def run(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        read = (v for v in eqn.invars if not jax_internals.is_literal(v))
        if eqn.primitive.name == "optimization_barrier" and late.intersection(read):
            return args
        return jax_internals.eval_equation(eqn, args)

    without = lambda *values: jax_internals.eval_each(closed, values, run)  # noqa: E731
    return jax_internals.make_jaxpr(without, *closed.in_avals)[0]


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [v for v in atoms if not jax_internals.is_literal(v)]


def _needed(eqns: Sequence[JaxprEqn], atoms: Sequence[Any], given: Collection[Var]) -> list:
    """Return the equations, in order, that compute some values from the given values."""
    wanted = set(_variables(atoms)).difference(given)
    found = []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in _variables(eqn.invars) if v not in given)
    return found[::-1]


def _minimum_cut(
    jaxpr: jax_internals.Jaxpr,
    wanted: Sequence[Var],
    again: Sequence[JaxprEqn],
    free: Collection[Var],
) -> set[Var]:
    """Choose the values to keep, at fewest bytes, so that the equations `again` give `wanted`.

    Every value is an edge of the network with its bytes as capacity. Of several minimum cuts, the
    cut nearest to the wanted values rematerialises least. Of two cuts with equal bytes, the
    cut with more inputs is taken, because inputs are stored anyway.
    """
    makers = {v: e for e in again for v in e.outvars}
    inputs, constants = set(jaxpr.invars), set(jaxpr.constvars)
    network = _Network()
    source, sink = network.node(), network.node()
    edges: dict[Var, tuple[int, int]] = {}

    def ends(v: Var) -> tuple[int, int]:
        if v not in edges:
            edges[v] = network.node(), network.node()
            room = 2 * int(aval_bytes(v.aval)) - (v in inputs)
            network.add(*edges[v], 0 if v in free else max(room, 0))
            stack.append(v)
        return edges[v]

    stack: list[Var] = []
    for v in wanted:
        if v not in constants:
            network.add(ends(v)[1], sink, None)
    while stack:
        v = stack.pop()
        if v not in makers:
            network.add(source, edges[v][0], None)
            continue
        for read in dict.fromkeys(_variables(makers[v].invars)):
            if read not in constants:
                network.add(ends(read)[1], edges[v][0], None)
    network.fill(source, sink)
    reach = network.reaching(sink)
    return {v for v, (a, b) in edges.items() if b in reach and a not in reach}


class _Network:
    """A flow network with maximum flow by Dinic's algorithm."""

    def __init__(self) -> None:
        self.out: list[list[int]] = []  # edges by node; edge k ^ 1 is the reverse of edge k
        self.head: list[int] = []
        self.room: list[float] = []

    def node(self) -> int:
        self.out.append([])
        return len(self.out) - 1

    def add(self, a: int, b: int, room: int | None) -> None:
        """Add an edge of capacity `room`; `None` is unbounded."""
        for start, end, size in ((a, b, float("inf") if room is None else room), (b, a, 0)):
            self.out[start].append(len(self.head))
            self.head.append(end)
            self.room.append(size)

    def fill(self, source: int, sink: int) -> None:
        """Augment the flow until it is maximal."""
        while True:
            level = self._levels(source)
            if sink not in level:
                return
            left = [list(edges) for edges in self.out]
            while path := self._path(source, sink, level, left):
                flow = min(self.room[k] for k in path)
                for k in path:
                    self.room[k] -= flow
                    self.room[k ^ 1] += flow

    def _levels(self, source: int) -> dict[int, int]:
        level, queue = {source: 0}, deque([source])
        while queue:
            a = queue.popleft()
            for k in self.out[a]:
                if self.room[k] > 0 and self.head[k] not in level:
                    level[self.head[k]] = level[a] + 1
                    queue.append(self.head[k])
        return level

    def _path(
        self, source: int, sink: int, level: dict[int, int], left: list[list[int]]
    ) -> list[int]:
        """Find an augmenting path in the level graph; drop edges that lead to no such path."""
        path: list[int] = []
        at = source
        while at != sink:
            while left[at]:
                k = left[at][-1]
                if self.room[k] > 0 and level.get(self.head[k]) == level[at] + 1:
                    break
                left[at].pop()
            else:
                if not path:
                    return []
                at = self.head[path.pop() ^ 1]
                left[at].pop()
                continue
            path.append(k)
            at = self.head[k]
        return path

    def reaching(self, sink: int) -> set[int]:
        """Return the nodes with a residual path to the sink."""
        into = lambda node: [self.head[k] for k in self.out[node] if self.room[k ^ 1] > 0]  # noqa: E731
        return cone([sink], into)
