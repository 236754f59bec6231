"""Splitting of products that a step reads in parts into products of parts.

A cell with one product for its gates, `split(x·W + h·U)`, adds values known before the loop to
values that depend on its carry, and then cuts the sum. This equals `split(x·W) + h·split(U)`. The
weights are cut once, and the entries of all steps are cut before the loop. A step then has smaller
products, which XLA runs in parallel. A product of concatenated operands is first rewritten as a sum
of products, `[x, h]·W = x·W₁ + h·W₂`, so that the known product can be hoisted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax import lax

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import aval_bytes, shape_of
from symjax_rewrite.cost.loop_facts import LoopFacts
from symjax_rewrite.ir.dataflow import makers_of, numbers, users_of
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.primitives import ELEMENTWISE
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.loops.loop import Loop, get
from symjax_rewrite.loops.normalization import drop_dead
from symjax_rewrite.loops.stepwise_equations import resized, stepped_operands

# Measured on two cores with LSTMs of widths 32 to 1024 and 1 to 128 rows, jax 0.10.2 and 0.12. With
# weights of a megabyte and few rows a step takes 0.5 to 0.9 of the time. With smaller weights a
# step takes up to 2 times as long.
MAX_PARTS = 8

Span = tuple[int, int]  # [start, limit)


class Parts(NamedTuple):
    """A loop with split products.

    leaves: slices of values that are known before the steps; all of them must leave the loop.
    is_apart: True if a product of concatenated operands was split; some part of this product must
    leave.
    """

    loop: Loop
    leaves: list[int]
    is_apart: bool


@dataclass(frozen=True, slots=True)
class Place:
    """The position of the part [start, limit) of a cut in a value: `scale` times that on `axis`."""

    axis: int
    scale: int = 1

    def of(self, x: Any, span: Span) -> Any:
        return lax.slice_in_dim(x, span[0] * self.scale, span[1] * self.scale, axis=self.axis)


def in_parts(loop: Loop, device: Device) -> Parts | None:
    """Return a normalised loop with its products split, or None; the loop given stays as it is.

    Products are cut into parts if the device slices sums slowly.
    """
    facts = device.loops
    if not isinstance(loop.length, int) or loop.length < facts.least_cut_steps:
        return None
    if not any(_is_large(e, facts) for e in loop.body.equations):
        return None
    if not all(isinstance(n, int) for n in _sizes(loop)):
        return None
    other = loop.copy()
    leaves: list[int] = []
    while (found := _find_joined(other, facts)) is not None:
        leaves += _replace_joined(other, *found)
    is_apart = bool(leaves)
    while facts.cut_sums_are_slow and (cut := _find_cut(other, facts)) is not None:
        leaves += cut.take()
    if not leaves:
        return None
    drop_dead(other)
    made = {v for e in other.body.equations for v in e.outvals}
    return Parts(other, [v for v in leaves if v in made], is_apart)


def _sizes(loop: Loop) -> Iterator[Any]:
    for e in loop.body.equations:
        for v in (*e.eqn.invars, *e.eqn.outvars):
            yield from getattr(v.aval, "shape", ())


def _is_large(e: Equation, facts: LoopFacts) -> bool:
    """Return True if an equation is a product with large weights."""
    if e.name != "dot_general":
        return False
    return max(aval_bytes(v.aval) for v in e.eqn.invars) >= facts.least_cut_weights


def _find_joined(loop: Loop, facts: LoopFacts) -> tuple[Equation, int, Equation] | None:
    """Find a product with large weights, the side of its concatenated operand, and its maker."""
    level = loop.levels()
    makers = makers_of(loop.body.equations)
    for e in [e for e in loop.body.equations if _is_large(e, facts)]:
        for side in range(2):
            weights, other = e.invals[1 - side], e.invals[side]
            joined = makers.get(other) if isinstance(other, int) else None
            if joined is None or not isinstance(weights, int) or level[weights] > 0:
                continue
            known = {level[v] < 2 for v in joined.invals if isinstance(v, int)}
            if known == {True, False} and _joins_summed(e.eqn, side, joined.eqn):
                return e, side, joined
    return None


def _joins_summed(eqn: JaxprEqn, side: int, joined: JaxprEqn) -> bool:
    """Return True if an operand is concatenated along the summed axis, in a lossless dtype."""
    aval: Any = eqn.outvars[0].aval
    if joined.primitive.name != "concatenate" or aval.dtype.itemsize < 4:
        return False
    summed = eqn.params["dimension_numbers"][0][side]
    return len(summed) == 1 and summed[0] == joined.params["dimension"]


def _replace_joined(loop: Loop, e: Equation, side: int, joined: Equation) -> list[int]:
    """Rewrite a product with a concatenation as a sum of products; return the slices of weights."""
    axis = e.eqn.params["dimension_numbers"][0][1 - side][0]
    sizes = [shape_of(v)[joined.eqn.params["dimension"]] for v in joined.eqn.invars]

    def cut(weights: Any) -> list[Any]:
        return [Place(axis).of(weights, span) for span in _spans(sizes)]

    weights, cuts = loop.staged(cut, [e.invals[1 - side]])

    def add(*operands: Any) -> Any:
        pairs = zip(operands[: len(sizes)], operands[len(sizes) :], strict=True)
        pairs = (pair if side == 0 else pair[::-1] for pair in pairs)
        first, *rest = (jax_internals.eval_equation(e.eqn, pair)[0] for pair in pairs)
        return sum(rest, first)

    (total,), sums = loop.staged(add, [*joined.invals, *weights])
    _put(loop, e, [*cuts, *sums])
    assert isinstance(total, int)
    loop.substitute({e.outvals[0]: total})
    return [v for e in cuts for v in e.outvals]


def _put(loop: Loop, old: Equation, new: list[Equation]) -> None:
    equations = loop.body.equations
    at = equations.index(old)
    loop.body.equations = [*equations[:at], *new, *equations[at + 1 :]]


def _spans(sizes: Sequence[int]) -> list[Span]:
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def _find_cut(loop: Loop, facts: LoopFacts) -> ProductSplit | None:
    """Find a value that is only read in parts and is made of products of weights with few rows."""
    level, readers = loop.levels(), users_of(loop.body.equations)
    ends = set(numbers(loop.ends))
    for value in [v for e in loop.body.equations for v in e.outvals if level[v] == 2]:
        parts = None if value in ends else _parts_read(readers.get(value, []))
        if parts is not None:
            cut = ProductSplit(loop, value, *parts, level)
            if cut.is_complete(readers) and cut.adds() and cut.is_worth_it(facts):
                return cut
    return None


def _parts_read(readers: Sequence[Equation]) -> tuple[int, list[tuple[Equation, Span]]] | None:
    """Return (axis, parts by reader) if a value is read in several disjoint parts of an axis."""
    parts = [_part(e) for e in readers]
    axes = {p[0] for p in parts if p is not None}
    if None in parts or len(axes) != 1:
        return None
    (axis,) = axes
    found = [(e, s) for e, p in zip(readers, parts, strict=True) for s in (p[1] if p else ())]
    spans = sorted(span for _, span in found)
    if len(spans) < 2 or any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        return None
    total = shape_of(readers[0].eqn.invars[0])[axis]
    is_even = all(MAX_PARTS * (end - start) >= total for start, end in spans)
    return (axis, found) if is_even else None


def _part(e: Equation) -> tuple[int, list[Span]] | None:
    """Return (axis, parts) that a slice or a split reads of an operand, or None."""
    p, shape = e.eqn.params, shape_of(e.eqn.invars[0])
    if e.name == "split":
        return p["axis"], _spans(p["sizes"])
    if e.name != "slice" or any(s != 1 for s in p["strides"] or ()):
        return None
    spans = list(zip(p["start_indices"], p["limit_indices"], strict=True))
    axes = [k for k, n in enumerate(shape) if spans[k] != (0, n)]
    return (axes[0], [spans[axes[0]]]) if len(axes) == 1 else None


class ProductSplit:
    """A value that is only read in parts, and the equations that compute it.

    readers: the equations that read it, with their parts. cone: the equations computed by parts, in
    order. places: of every value that the cone computes, and of every value that it reads in parts.
    """

    def __init__(
        self,
        loop: Loop,
        value: int,
        axis: int,
        readers: list[tuple[Equation, Span]],
        level: dict[int, int],
    ) -> None:
        self.loop, self.value, self.readers, self.level = loop, value, readers, level
        self.cone: list[Equation] = []
        self.places = {value: Place(axis)}

    def is_complete(self, readers: dict[int, list[Equation]]) -> bool:
        """Find the equations to compute by parts; return True if all cut values are covered."""
        inside: set[Equation] = set()
        whole: set[int] = set()
        ends = set(numbers(self.loop.ends))
        for e in reversed(self.loop.body.equations):
            v = e.outvals[0] if len(e.outvals) == 1 else -1
            if v not in self.places or self.level[v] < 2:
                continue
            if v != self.value and (v in ends or not inside.issuperset(readers[v])):
                return False
            operands = self._operand_places(e, self.places[v])
            if operands is None:
                return False
            inside.add(e)
            for u, at in zip(e.invals, operands, strict=True):
                if isinstance(u, int) and at is None:
                    whole.add(u)
                elif isinstance(u, int) and at is not None and self.places.setdefault(u, at) != at:
                    return False
        self.cone = [e for e in self.loop.body.equations if e in inside]
        made = {e.outvals[0] for e in self.cone}
        covered = all(self.level[v] < 2 or v in made for v in self.places)
        return covered and whole.isdisjoint(self.places)

    def _operand_places(self, e: Equation, place: Place) -> Sequence[Place | None] | None:
        """Return a part's position in each operand, None if it is read whole; or None."""
        if e.name == "dot_general":
            return self._factor_places(e, place)
        if e.name == "reshape":
            return _reshaped(e.eqn, place)
        if e.name not in ELEMENTWISE and e.name != "transpose":
            return None
        axes = stepped_operands(e.eqn, place.axis)
        if axes is None:
            return None
        return [None if axis is None else replace(place, axis=axis) for axis in axes]

    def _factor_places(self, e: Equation, place: Place) -> Sequence[Place | None] | None:
        """Return the part of the weights, if a part of a product reads a part of its weights."""
        summed, batch = e.eqn.params["dimension_numbers"]
        axis = place.axis - len(batch[0])
        for k, weights in enumerate(e.invals):
            gone = (*summed[k], *batch[k])
            free = [d for d in range(len(shape_of(e.eqn.invars[k]))) if d not in gone]
            if 0 <= axis < len(free):
                if not isinstance(weights, int) or self.level[weights] > 0:
                    return None
                part = replace(place, axis=free[axis])
                return [part, None] if k == 0 else [None, part]
            axis -= len(free)
        return None

    def adds(self) -> bool:
        """Return True if products are added to a step's entry before they are cut.

        XLA's CPU backend reads such a sum element by element. A product that is cut directly (a
        GRU's) is as fast whole, or faster.
        """
        return any(self.level[v] == 1 for v in self.places)

    def is_worth_it(self, facts: LoopFacts) -> bool:
        """Return True if a cut is of products with large weights and few rows."""
        found = [e for e in self.cone if e.name == "dot_general"]
        for e in found:
            k = next(k for k, v in enumerate(e.invals) if v in self.places)
            shape, axis = shape_of(e.eqn.outvars[0]), self.places[e.outvals[0]].axis
            rows = math.prod(shape) // shape[axis]
            weights = aval_bytes(e.eqn.invars[k].aval)
            if weights < facts.least_cut_weights or rows > facts.most_cut_rows:
                return False
        return bool(found)

    def take(self) -> list[int]:
        """Write the cut into the loop; return the slices that its products and sums read."""
        made = {v for e in self.cone for v in e.outvals}
        reads = dict.fromkeys(v for e in self.cone for v in e.reads if v not in made)
        sliced = [v for v in reads if v in self.places]
        whole = [v for v in reads if v not in self.places]
        spans = [span for _, span in self.readers]

        def leaf_parts(*leaves: Any) -> list[Any]:
            given = list(zip(sliced, leaves, strict=True))
            return [self.places[v].of(x, span) for span in spans for v, x in given]

        parts, slices = self.loop.staged(leaf_parts, sliced)

        def products(*operands: Any) -> list[Any]:
            outs, count = [], len(sliced)
            for k, span in enumerate(spans):
                env = dict(zip(whole, operands[len(parts) :], strict=True))
                env.update(zip(sliced, operands[k * count : (k + 1) * count], strict=True))
                for e in self.cone:
                    args = [get(env, v) for v in e.invals]
                    place = self.places[e.outvals[0]]
                    size = (span[1] - span[0]) * place.scale
                    (env[e.outvals[0]],) = resized(e.eqn, place.axis, size)(*args)
                outs.append(env[self.value])
            return outs

        roots, equations = self.loop.staged(products, [*parts, *whole])
        _put(self.loop, self.cone[-1], [*slices, *equations])
        readers = list(dict.fromkeys(e for e, _ in self.readers))
        gone = {*self.cone, *readers}
        self.loop.body.equations = [e for e in self.loop.body.equations if e not in gone]
        names = [v for e in readers for v in e.outvals]
        self.loop.substitute(dict(zip(names, roots, strict=True)))
        return [v for e in slices for v in e.outvals]


def _reshaped(eqn: JaxprEqn, place: Place) -> Sequence[Place | None] | None:
    """Return the place before a reshape, if the axis stays whole or is an outer factor."""
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params["dimensions"] is not None:
        return None
    before = math.prod(new[: place.axis])
    for axis, size in enumerate(old):
        inner, rest = divmod(size, new[place.axis])
        if size > 1 and not rest and math.prod(old[:axis]) == before:
            after = new[place.axis + 1 :]
            if any(math.prod(after[:k]) == inner for k in range(len(after) + 1)):
                return [Place(axis, place.scale * inner)]
    return None
