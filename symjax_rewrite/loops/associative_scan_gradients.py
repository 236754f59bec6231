"""Detection of the derivatives of scans that were unrolled into a tree.

Let g be the cotangents of the states h of h ← a·h + b. The cotangents of b are the reversed scan
G_t = g_t + a_{t+1}·G_{t+1}, and the cotangents of a are G_t·h_{t-1}. The equations between the
residuals of the tree and these cotangents are moves along the steps' axis, products and sums. They
are therefore polynomials of a, b and g, and a value that satisfies the defining equations at random
points is taken for the cotangent, as in `associative_scan_detection`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from symjax_rewrite.ir.dataflow import cone, makers_of, numbers, value_operands, walk
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.loops.associative_scan_detection import (
    FOLLOWED,
    Evaluator,
    Polynomials,
    Prefix,
    is_read,
)
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.prime_field import PRIME, equal, reduced, times

MAX_CANDIDATES = 8  # values tried as the cotangents of the states


@dataclass(frozen=True, slots=True)
class Cotangents:
    """The cotangents that a program computes from the cotangents of a tree's states.

    given: the cotangents of the states. made: for the added values ("b") and for the factors ("a"):
    the value, and the other arrays added to it. equations: the equations that loops replace.
    """

    given: int
    made: dict[str, tuple[int, tuple[int, ...]]]
    equations: tuple[Equation, ...]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A tree and the cotangents that are computed from its residuals."""

    prefix: Prefix
    back: tuple[Cotangents, ...]

    def equations(self) -> list[Equation]:
        """Return the equations of the tree and the equations that loops replace."""
        return list(
            dict.fromkeys([*self.prefix.equations, *(e for c in self.back for e in c.equations)])
        )

    def instead(self) -> dict[int, list[int]]:
        """Return the values that the replacing loops compute, each with its operands."""
        steps = [self.prefix.factors, self.prefix.added]
        reads = [*steps, *[c.given for c in self.back]]
        made = {v: [*reads, *others] for c in self.back for v, others in c.made.values()}
        return {self.prefix.out: steps, **made}


def find_differentiated(around: Surroundings, prefixes: list[Prefix]) -> list[Differentiated]:
    """Find the trees whose intermediate values are only read to compute cotangents."""
    found = [d for p in prefixes if (d := _differentiated(around, p)) is not None]
    while found:
        instead = {v: reads for d in found for v, reads in d.instead().items()}
        live = needed(around.program, instead)
        rest = [d for d in found if live.isdisjoint(_inner(d.prefix))]
        if len(rest) == len(found):
            break
        found = rest
    return found


def needed(program: Program, instead: dict[int, list[int]]) -> set[int]:
    """Return the live values, given the operands of values that are computed differently."""
    operands = value_operands(makers_of(program.equations))
    ends = [*program.outputs, *[v for e in program.equations if e.eqn.effects for v in e.invals]]
    return cone(numbers(ends), lambda v: instead[v] if v in instead else operands(v))


def _inner(prefix: Prefix) -> set[int]:
    return {v for e in prefix.equations for v in e.outvals} - {prefix.out}


def _differentiated(around: Surroundings, prefix: Prefix) -> Differentiated | None:
    program = around.program
    a, b = (program.avals[v] for v in (prefix.factors, prefix.added))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return None
    if prefix.products is not None and is_read(around, prefix, prefix.products):
        return None
    prefix = prefix.states_alone()
    own = set(prefix.equations)
    readers = {e for v in _inner(prefix) for e in around.users.get(v, ()) if e not in own}
    if not readers:
        return None
    points = _Points(prefix, program)
    back: list[Cotangents] = []
    explained: set[int] = set()
    for e in [e for e in program.equations if e in readers]:
        if explained.isdisjoint(e.outvals):
            found = _explain(e, around, points)
            if found is None:
                return None
            back.append(found[0])
            explained |= found[1]
    return Differentiated(prefix, tuple(back))


def _explain(
    reader: Equation, around: Surroundings, points: _Points
) -> tuple[Cotangents, set[int]] | None:
    """Explain the equations that read a residual of a tree; return all intermediate values too."""
    for given in islice(_candidates(reader, around, points), MAX_CANDIDATES):
        known = points.evaluated(given)
        made = {} if known.keys().isdisjoint(reader.outvals) else points.cotangents(known, given)
        if made:
            every = around.program.equations
            equations = tuple(e for e in every if not known.keys().isdisjoint(e.outvals))
            return Cotangents(given, made, equations), set(known)
    return None


def _candidates(reader: Equation, around: Surroundings, points: _Points) -> Iterator[int]:
    """Yield values of the states' shape that an equation reads through moves, products and sums."""
    avals, known = around.program.avals, points.known
    aval = avals[points.prefix.out]

    def operands(v: int) -> Sequence[int]:
        e = None if v in known else around.makers.get(v)
        return e.reads if e is not None and e.name in FOLLOWED else ()

    for v in walk(reader.reads, operands):
        if v not in known and (avals[v].shape, avals[v].dtype) == (aval.shape, aval.dtype):
            yield v


class _Points:
    """The polynomials of a tree at random points.

    known: the polynomials of every value of the tree.
    """

    def __init__(self, prefix: Prefix, program: Program) -> None:
        self.prefix, self.program = prefix, program
        shape = program.avals[prefix.added].shape
        self.evaluator = Evaluator(program, shape)
        layout = tuple(range(len(shape)))
        self.known = {v: self._random(v, layout) for v in (prefix.factors, prefix.added)}
        self._evaluate(prefix.equations, self.known)

    def _random(self, v: int, layout: tuple[int, ...]) -> Polynomials:
        p = self.prefix
        return self.evaluator.variables(v, p.length, layout.index(p.axis), layout)

    def _evaluate(self, equations: tuple[Equation, ...], known: dict[int, Polynomials]) -> None:
        new = [e for e in equations if known.keys().isdisjoint(e.outvals)]
        for v, x in self.evaluator.evaluate(new, known):
            known[v] = x

    def evaluated(self, given: int) -> dict[int, Polynomials]:
        """Return the polynomials of values computed from the tree and its states' cotangents."""
        known = {**self.known, given: self._random(given, self.prefix.layouts[0])}
        self._evaluate(tuple(self.program.equations), known)
        return {v: x for v, x in known.items() if v not in self.known}

    def cotangents(
        self, known: dict[int, Polynomials], given: int
    ) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the cotangents of b and of a, each with the other arrays added to it.

        Where zeros are added afterwards, the last of the sums is the cotangent.
        """
        a, b, h = (self.known[v] for v in (self.prefix.factors, self.prefix.added, self.prefix.out))
        g, dtype = known[given].values, self.program.avals[self.prefix.added].dtype
        last: dict[str, tuple[int, tuple[int, ...]]] = {}
        for v, x in known.items():
            if v == given or not x.like(b) or self.program.avals[v].dtype != dtype:
                continue
            if _solves_added(x.values, a.values, g):
                kind = "b"
            elif _solves_factors(x.values, a.values, h.values, g):
                kind = "a"
            else:
                continue
            if kind not in last or last[kind][1] == x.others:
                last[kind] = (v, x.others)
        return last


def _solves_added(x: np.ndarray, a: np.ndarray, g: np.ndarray) -> bool:
    """Return True if x_t = g_t + a_{t+1}·x_{t+1}."""
    return equal(x[-1], g[-1]) and equal(x[:-1], g[:-1] + times(a[1:], x[1:]))


def _solves_factors(x: np.ndarray, a: np.ndarray, h: np.ndarray, g: np.ndarray) -> bool:
    """Return True if x_t = G_t·h_{t-1}.

    The check is h_t·x_t = h_{t-1}·(h_t·g_t + a_{t+1}·x_{t+1}).
    """
    if (x[0] % PRIME).any() or not equal(x[-1], times(g[-1], h[-2])):
        return False
    after = times(h[1:-1], g[1:-1]) + times(a[2:], x[2:])
    return equal(times(h[1:-1], x[1:-1]), times(h[:-2], reduced(after)))
