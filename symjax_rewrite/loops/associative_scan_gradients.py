"""Detection of the derivatives of scans that were unrolled into a tree.

Let g be the cotangents of the states h of h ← a·h + b. The cotangents of b are the reversed scan
G_t = g_t + a_{t+1}·G_{t+1}, and the cotangents of a are G_t·h_{t-1}. The equations between the
residuals of the tree and these cotangents are moves along the steps' axis, products and sums. They
are therefore polynomials of a, b and g for every shape of the tree. The polynomials are evaluated
exactly at random points of a prime field, and a value that satisfies the defining equations at
these points is taken for the cotangent (Schwartz 1980; Zippel 1979, "Probabilistic algorithms for
sparse polynomials"). The probability of a wrong answer is below 1e-16 at 2¹⁶ steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.ir.dataflow import cone, makers_of, numbers, value_operands
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.loops.associative_scan_detection import Prefix, is_read
from symjax_rewrite.loops.axis_moves import MOVES, entry_moves
from symjax_rewrite.loops.fusion import Surroundings

BITS = 31
PRIME = (1 << BITS) - 1
POINTS = 4  # random points at which polynomials are evaluated
MAX_CANDIDATES = 8  # values tried as the cotangents of the states


class Polynomials(NamedTuple):
    """The values of an array at the points, plus other arrays.

    values: uint64[n, POINTS] along `axis`. layout: for every axis, the corresponding axis of the
    tree. others: arrays of the program that are added.
    """

    values: np.ndarray
    axis: int
    layout: tuple[int, ...]
    others: tuple[int, ...] = ()

    def like(self, other: Polynomials) -> bool:
        """Return True if both have the same axes and the same length."""
        return (self.axis, self.layout, len(self.values)) == (
            other.axis,
            other.layout,
            len(other.values),
        )


@dataclass(frozen=True, slots=True)
class Cotangents:
    """The cotangents that a program computes from the cotangents of a tree's states.

    given: the cotangents of the states. made: for the added values ("b") and for the factors ("a"):
    the value, and the other arrays added to it. equations: the equations that loops replace.
    """

    given: int
    made: tuple[tuple[str, int, tuple[int, ...]], ...]
    equations: tuple[Equation, ...]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A tree and the cotangents that are computed from its residuals."""

    prefix: Prefix
    back: tuple[Cotangents, ...]

    def equations(self) -> list[Equation]:
        """Return the equations of the tree and the equations that loops replace."""
        every = [*self.prefix.equations, *(e for c in self.back for e in c.equations)]
        return list({id(e): e for e in every}.values())

    def reads(self) -> list[int]:
        """Return the values that the replacing loops read, except arrays added to their results."""
        return [self.prefix.factors, self.prefix.added, *[c.given for c in self.back]]

    def instead(self) -> dict[int, list[int]]:
        """Return the values that the replacing loops compute, each with its other operands."""
        reads = self.reads()
        made = {v: [*reads, *others] for c in self.back for _, v, others in c.made}
        return {self.prefix.out: reads[:2], **made}


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
    """Return the intermediate values of a tree."""
    return {v for e in prefix.equations for v in e.outvals} - {prefix.out}


def _differentiated(around: Surroundings, prefix: Prefix) -> Differentiated | None:
    program = around.program
    a, b = (program.avals[v] for v in (prefix.factors, prefix.added))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return None
    if prefix.products is not None and is_read(around, prefix, prefix.products):
        return None
    prefix = prefix.states_alone()
    own = {id(e) for e in prefix.equations}
    inner = _inner(prefix)
    readers = [e for v in inner for e in around.users.get(v, ()) if id(e) not in own]
    if not readers:
        return None
    place = {id(e): n for n, e in enumerate(program.equations)}
    points = _Points(prefix, program)
    back: list[Cotangents] = []
    explained: set[int] = set()
    for e in sorted({id(e): e for e in readers}.values(), key=lambda e: place[id(e)]):
        if explained.isdisjoint(e.outvals):
            found = _explain(e, around, prefix, points)
            if found is None:
                return None
            back.append(found[0])
            explained |= found[1]
    return Differentiated(prefix, tuple(back))


def _explain(
    reader: Equation, around: Surroundings, prefix: Prefix, points: _Points
) -> tuple[Cotangents, set[int]] | None:
    """Explain the equations that read a residual of a tree; return all intermediate values too."""
    for given in _candidates(reader, around, prefix.out, points.known):
        known = points.evaluated(given)
        if known.keys().isdisjoint(reader.outvals):
            continue
        made = tuple(points.cotangents(known, given))
        if made:
            equations = [
                e for e in around.program.equations if not known.keys().isdisjoint(e.outvals)
            ]
            return Cotangents(given, made, tuple(equations)), set(known)
    return None


def _candidates(
    reader: Equation, around: Surroundings, out: int, known: dict[int, Polynomials]
) -> Iterator[int]:
    """Yield values of the states' shape that an equation reads through moves, products and sums."""
    aval = around.program.avals[out]
    queue = [v for v in reader.invals if isinstance(v, int) and v not in known]
    seen: set[int] = set()
    count = 0
    while queue and count < MAX_CANDIDATES:
        v = queue.pop(0)
        e = around.makers.get(v)
        if v in seen:
            continue
        seen.add(v)
        own = around.program.avals[v]
        if (own.shape, own.dtype) == (aval.shape, aval.dtype):
            count += 1
            yield v
        if e is not None and (e.name in _ARITHMETIC or e.name in MOVES):
            queue += [u for u in e.invals if isinstance(u, int) and u not in known]


class _Points:
    """The polynomials of a tree at random points.

    known: the polynomials of every value of the tree.
    """

    def __init__(self, prefix: Prefix, program: Program) -> None:
        self.prefix, self.program = prefix, program
        self.draw = np.random.default_rng(0)
        layout = tuple(range(len(self.shape)))
        self.known = {v: self._random(layout) for v in (prefix.factors, prefix.added)}
        self._evaluate(prefix.equations, self.known)

    def _random(self, layout: tuple[int, ...]) -> Polynomials:
        values = self.draw.integers(1, PRIME, (self.prefix.length, POINTS), dtype=np.uint64)
        return Polynomials(values, layout.index(self.prefix.axis), layout)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the shape of the tree's arrays."""
        return self.program.avals[self.prefix.added].shape

    def evaluated(self, given: int) -> dict[int, Polynomials]:
        """Return the polynomials of values computed from the tree and its states' cotangents."""
        known = {**self.known, given: self._random(self.prefix.layouts[0])}
        self._evaluate(self.program.equations, known)
        return {v: x for v, x in known.items() if v not in self.known}

    def _evaluate(self, equations: Iterable[Equation], known: dict[int, Polynomials]) -> None:
        for e in equations:
            if e.eqn.effects or e.outvals[0] in known:
                continue
            found = [known.get(v) if isinstance(v, int) else None for v in e.invals]
            if any(found):
                made = self._follow(e, found)
                known.update(zip(e.outvals, made, strict=False))

    def _follow(self, e: Equation, found: list[Polynomials | None]) -> list[Polynomials]:
        if e.name in _ARITHMETIC:
            made = self._arithmetic(e, found)
        elif e.name == "concatenate":
            made = _joined(e, found)
        elif e.name == "transpose":
            made = _turned(e, found)
        else:
            return _moved(e, found)
        return [] if made is None else [made]

    def _arithmetic(self, e: Equation, found: list[Polynomials | None]) -> Polynomials | None:
        x, y = found if len(found) == 2 else (found[0], found[0])
        if x is not None and y is not None:
            others = x.others + y.others
            if not x.like(y) or (others and e.name not in _SUMS):
                return None
            values = _reduced(_ARITHMETIC[e.name](x.values, y.values))
            return x._replace(values=values, others=others)
        x, v = (x, e.invals[1]) if x is not None else (y, e.invals[0])
        whole = self.program.avals[e.outvals[0]].shape == self.shape
        if x is None or e.name not in _SUMS or not isinstance(v, int) or not whole:
            return None
        if self.program.avals[v].shape != self.shape:
            return None
        return x._replace(others=(*x.others, v))

    def cotangents(
        self, known: dict[int, Polynomials], given: int
    ) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Yield the cotangents of b and of a, with the other arrays added to them.

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
        for kind, (v, others) in last.items():
            yield kind, v, others


def _solves_added(x: np.ndarray, a: np.ndarray, g: np.ndarray) -> bool:
    """Return True if x_t = g_t + a_{t+1}·x_{t+1}."""
    return _equal(x[-1], g[-1]) and _equal(x[:-1], g[:-1] + _times(a[1:], x[1:]))


def _solves_factors(x: np.ndarray, a: np.ndarray, h: np.ndarray, g: np.ndarray) -> bool:
    """Return True if x_t = G_t·h_{t-1}.

    The check is h_t·x_t = h_{t-1}·(h_t·g_t + a_{t+1}·x_{t+1}).
    """
    if (x[0] % np.uint64(PRIME)).any() or not _equal(x[-1], _times(g[-1], h[-2])):
        return False
    after = _times(h[1:-1], g[1:-1]) + _times(a[2:], x[2:])
    return _equal(_times(h[1:-1], x[1:-1]), _times(h[:-2], _reduced(after)))


def _reduced(x: np.ndarray) -> np.ndarray:
    """Return a congruent value that is at most the prime; a division takes ten times as long."""
    for _ in range(2):
        x = (x & np.uint64(PRIME)) + (x >> np.uint64(BITS))
    return x


def _times(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return _reduced(x * y)


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return bool((x % np.uint64(PRIME) == y % np.uint64(PRIME)).all())


_SUMS = ("add", "add_any")
_ARITHMETIC: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": lambda x, y: x + (np.uint64(PRIME) - y),
    "mul": np.multiply,
    "neg": lambda x, _: np.uint64(PRIME) - x,
}


def _moved(e: Equation, found: list[Polynomials | None]) -> list[Polynomials]:
    x = found[0]
    moves = None if x is None or x.others else entry_moves(e, x.axis)
    if x is None or moves is None:
        return []
    return [x._replace(values=move(x.values, 0)) for move in moves]


def _turned(e: Equation, found: list[Polynomials | None]) -> Polynomials | None:
    x, order = found[0], e.eqn.params["permutation"]
    if x is None or x.others:
        return None
    return x._replace(axis=order.index(x.axis), layout=tuple(x.layout[i] for i in order))


def _joined(e: Equation, found: list[Polynomials | None]) -> Polynomials | None:
    parts = [x for x in found if x is not None and not x.others]
    if len(parts) != len(found):
        return None
    places = {(x.axis, x.layout) for x in parts}
    if len(places) > 1 or parts[0].axis != e.eqn.params["dimension"]:
        return None
    return parts[0]._replace(values=np.concatenate([x.values for x in parts]))
