"""Detection of scans that `lax.associative_scan` unrolled into a tree of equations.

The tree of steps h ← a·h + b has slices, pads, concatenations, products and sums. Every array entry
in it is therefore a polynomial of the entries of a and b, for every shape of the tree. The
polynomials are evaluated exactly at random points of a prime field, and an array that satisfies
h_t = a_t·h_{t-1} + b_t at these points is taken for the states (`prime_field`). The probability of
a wrong answer is below 1e-16 at 2¹⁶ steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.dataflow import making
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.loops.fusion import Surroundings
from symjax_rewrite.loops.prime_field import PRIME, equal, reduced, times

MIN_LENGTH = 8  # no shorter tree is faster as a loop
POINTS = 4  # random points at which polynomials are evaluated


class Polynomials(NamedTuple):
    """The values of an array at the points, plus other arrays.

    values: int[n, POINTS] along `axis`. layout: for every axis, the corresponding axis of the
    steps' arrays. others: arrays of the program that are added. seeds: the arrays whose entries
    are its variables.
    """

    values: np.ndarray
    axis: int
    layout: tuple[int, ...]
    seeds: frozenset[int] = frozenset()
    others: tuple[int, ...] = ()

    def like(self, other: Polynomials) -> bool:
        """Return True if both have the same axes and the same length."""
        return (self.axis, self.layout, len(self.values)) == (
            other.axis,
            other.layout,
            len(other.values),
        )


@dataclass(frozen=True, slots=True)
class Prefix:
    """A tree that is a scan: `out[i]` is the state that the steps 0…i compute from zero.

    factors, added: the values a and b of the steps. products: the value of all products a_0…a_i, if
    the program has this value. axis: the axis of the steps in a and b. layouts: of `out` and
    `products`, see `Polynomials`. equations: the equations of the tree.
    """

    factors: int
    added: int
    axis: int
    length: int
    out: int
    products: int | None
    layouts: tuple[tuple[int, ...], ...]
    equations: tuple[Equation, ...]

    def states_alone(self) -> Prefix:
        """Return the part of the tree that computes `out`."""
        own = making(self.equations, [self.out], {self.factors, self.added})
        return replace(self, products=None, layouts=self.layouts[:1], equations=tuple(own))


def _is_same_dtype(e: Equation) -> bool:
    """Return True for a conversion that only makes a weak type a strong one."""
    return e.eqn.params["new_dtype"] == getattr(e.eqn.invars[0].aval, "dtype", None)


class Evaluator:
    """Evaluates the values of a program as polynomials, at the same points.

    shape: of arrays that may be added to polynomials without being polynomials; None for no array.
    """

    def __init__(self, program: Program, shape: tuple[Any, ...] | None = None) -> None:
        self.program, self.shape = program, shape
        self.draw = np.random.default_rng(0)

    def variables(self, v: int, length: int, axis: int, layout: tuple[int, ...]) -> Polynomials:
        """Return an array whose entries are variables."""
        values = self.draw.integers(1, PRIME, (length, POINTS))
        return Polynomials(values, axis, layout, frozenset([v]))

    def evaluate(
        self, equations: Iterable[Equation], known: dict[int, Polynomials]
    ) -> Iterator[tuple[int, Polynomials]]:
        """Yield the results of equations on known values; a caller adds to `known`."""
        for e in equations:
            found = [known.get(v) if isinstance(v, int) else None for v in e.invals]
            if any(found) and not e.eqn.effects:
                yield from zip(e.outvals, self._follow(e, found), strict=False)

    def _follow(self, e: Equation, found: list[Polynomials | None]) -> list[Polynomials]:
        if e.name in _ARITHMETIC:
            made = self._arithmetic(e, found)
            return [] if made is None else [made]
        x, *rest = found
        if x is None or x.others:
            return []
        if e.name == "convert_element_type" and _is_same_dtype(e):
            return [x]
        if e.name == "transpose":
            order = e.eqn.params["permutation"]
            layout = tuple(x.layout[i] for i in order)
            return [x._replace(axis=order.index(x.axis), layout=layout)]
        if e.name == "concatenate":
            parts = [y for y in rest if y is not None and not y.others]
            same = len(parts) == len(rest) and x.axis == e.eqn.params["dimension"]
            if not same or any((y.axis, y.layout) != (x.axis, x.layout) for y in parts):
                return []
            seeds = x.seeds.union(*[y.seeds for y in parts])
            values = np.concatenate([x.values, *[y.values for y in parts]])
            return [x._replace(values=values, seeds=seeds)]
        moves = MOVES.get(e.name, lambda e, axis: [])(e, x.axis)
        return [x._replace(values=move(x.values)) for move in moves]

    def _arithmetic(self, e: Equation, found: list[Polynomials | None]) -> Polynomials | None:
        x, y = found if len(found) == 2 else (found[0], found[0])
        if x is not None and y is not None:
            others = x.others + y.others
            if not x.like(y) or (others and e.name not in _SUMS):
                return None
            values = self.combined(e.name, x.values, y.values)
            return x._replace(values=values, others=others, seeds=x.seeds | y.seeds)
        x, v = (x, e.invals[1]) if x is not None else (y, e.invals[0])
        if x is None or e.name not in _SUMS or not isinstance(v, int):
            return None
        shapes = {self.program.avals[u].shape for u in (v, *e.outvals)}
        return x._replace(others=(*x.others, v)) if shapes == {self.shape} else None

    def combined(self, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the result of an arithmetic operation; `y` is `x` if the operand is one."""
        return reduced(_ARITHMETIC[name](x, y))


def find_prefixes(program: Program) -> list[Prefix]:
    """Find the trees of a program that are scans of affine steps."""
    evaluator = Evaluator(program)
    known = _seeds(program, evaluator)
    if len(known) < 2:
        return []
    seeds = set(known)
    whole: dict[tuple[int, int | None], tuple[int, tuple[int, ...]]] = {}
    for v, x in evaluator.evaluate(program.equations, known):
        steps = _steps_of(x, known)
        if steps is not None:
            whole.setdefault(steps, (v, x.layout))
        longest = max(len(known[s].values) for s in x.seeds)
        if v not in seeds or len(x.values) < longest:  # else it is the steps of another tree
            known[v] = x
    return list(_complete(program, known, whole))


def _seeds(program: Program, evaluator: Evaluator) -> dict[int, Polynomials]:
    """Return the arrays whose even and odd entries are both read."""
    parities: dict[tuple[int, int], set[int]] = {}
    for e in program.equations:
        if e.name != "slice":
            continue
        strides, v = e.eqn.params["strides"] or (), e.invals[0]
        axes = [k for k, s in enumerate(strides) if s != 1]
        if len(axes) == 1 and strides[axes[0]] == 2 and isinstance(v, int):
            start = e.eqn.params["start_indices"][axes[0]]
            parities.setdefault((v, axes[0]), set()).add(start)
    seeds = {}
    for (v, axis), starts in parities.items():
        shape = program.avals[v].shape
        length = shape[axis]
        if {0, 1} <= starts and isinstance(length, int) and length >= MIN_LENGTH:
            seeds[v] = evaluator.variables(v, length, axis, tuple(range(len(shape))))
    return seeds


def _steps_of(x: Polynomials, known: dict[int, Polynomials]) -> tuple[int, int | None] | None:
    """Return (a, b) of the steps whose states an array has; (a, None) if it has their products."""
    h = x.values
    if len(x.seeds) > 2 or any(len(known[s].values) != len(h) for s in x.seeds):
        return None
    for a, *rest in permutations(x.seeds):
        b = rest[0] if rest else None
        after = times(known[a].values[1:], h[:-1])
        after = after if b is None else after + known[b].values[1:]
        if equal(h[0], known[a if b is None else b].values[0]) and equal(h[1:], after):
            return a, b
    return None


def _complete(
    program: Program,
    known: dict[int, Polynomials],
    whole: dict[tuple[int, int | None], tuple[int, tuple[int, ...]]],
) -> Iterator[Prefix]:
    """Yield the trees of the states that were found."""
    for (a, b), (out, layout) in whole.items():
        if b is not None and known[a].axis == known[b].axis:
            products, *layouts = whole.get((a, None), (None,))
            ends = [v for v in (out, products) if v is not None]
            tree = tuple(making(program.equations, ends, {a, b}))
            layouts = (layout, *layouts)
            length, axis = len(known[a].values), known[a].axis
            yield Prefix(a, b, axis, length, out, products, layouts, tree)


def is_read(around: Surroundings, prefix: Prefix, v: int) -> bool:
    """Return True if a value is read outside the tree."""
    own = set(prefix.equations)
    return v in around.outputs or any(e not in own for e in around.users.get(v, ()))


_SUMS = ("add", "add_any")
_ARITHMETIC: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": lambda x, y: x + (PRIME - y),
    "mul": np.multiply,
    "neg": lambda x, _: PRIME - x,
}

Move = Callable[[np.ndarray], np.ndarray]  # of entries, with the moved axis first


def _slice(e: Equation, axis: int) -> list[Move]:
    p, shape = e.eqn.params, shape_of(e.eqn.invars[0])
    strides = p["strides"] or (1,) * len(shape)
    where = list(zip(p["start_indices"], p["limit_indices"], strides, strict=True))
    if any(w != (0, shape[k], 1) for k, w in enumerate(where) if k != axis):
        return []
    return [lambda x: x[slice(*where[axis])]]


def _pad(e: Equation, axis: int) -> list[Move]:
    fill, config = e.invals[1], e.eqn.params["padding_config"]
    if isinstance(fill, int) or np.asarray(fill.val) != 0:
        return []
    if any(tuple(c) != (0, 0, 0) for k, c in enumerate(config) if k != axis):
        return []
    low, high, inside = map(int, config[axis])

    def padded(x: np.ndarray) -> np.ndarray:
        size = max(len(x) + inside * (len(x) - 1), 0)
        out = np.zeros((max(low, 0) + size + max(high, 0), *x.shape[1:]), x.dtype)
        out[max(low, 0) : max(low, 0) + size : inside + 1] = x
        return out[max(-low, 0) : len(out) - max(-high, 0)]

    return [padded]


def _split(e: Equation, axis: int) -> list[Move]:
    if e.eqn.params["axis"] != axis:
        return []
    ends = np.cumsum(e.eqn.params["sizes"])
    return [
        lambda x, start=end - size, end=end: x[start:end]
        for end, size in zip(ends, e.eqn.params["sizes"], strict=True)
    ]


MOVES: dict[str, Callable[[Equation, int], list[Move]]] = {
    "slice": _slice,
    "pad": _pad,
    "split": _split,
}
FOLLOWED = frozenset({*_ARITHMETIC, *MOVES, "concatenate", "transpose"})
