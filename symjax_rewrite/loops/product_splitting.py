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
from symjax_rewrite.cost.profile_groups import LoopFacts
from symjax_rewrite.ir.dataflow import makers_of, users_of
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.primitives import ELEMENTWISE
from symjax_rewrite.jax_internals import JaxprEqn
from symjax_rewrite.loops.fusion import staged
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.loops.normalization import drop_dead, substitute
from symjax_rewrite.loops.stepwise_equations import stepped_operands

# Measured on two cores with LSTMs of widths 32 to 1024 and 1 to 128 rows, jax 0.10.2 and 0.12. With
# weights of a megabyte and few rows a step takes 0.5 to 0.9 of the time. With smaller weights a
# step takes up to 2 times as long.
MAX_PARTS = 8


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

    def of(self, x: Any, start: int, limit: int) -> Any:
        return lax.slice_in_dim(x, start * self.scale, limit * self.scale, axis=self.axis)


@dataclass(slots=True)
class ProductSplit:
    """A value that is only read in parts, and the equations that compute it.

    axis: the axis that is cut. readers: (equation, its parts as [start, limit)). cone: the
    equations computed by parts, in order. places: of every value that the cone computes, and of
    every value that it reads in parts.
    """

    value: int
    axis: int
    readers: list[tuple[Equation, list[tuple[int, int]]]]
    cone: list[Equation]
    places: dict[int, Place]


def in_parts(loop: Loop, device: Device) -> Parts | None:
    """Return a loop with its products split, or None if there is none to split.

    Products of concatenated operands become sums of products. Products that are read in parts
    become products of parts.

    Args:
        loop: a normalised loop; it is not changed.
        device: the device that runs the program; products are cut if it slices sums slowly.
    """
    facts = device.loops
    if not isinstance(loop.length, int) or loop.length < facts.least_cut_steps:
        return None
    if not any(_is_large(e, facts) for e in loop.body.equations):
        return None
    if any(not isinstance(n, int) for e in loop.body.equations for n in _sizes(e)):
        return None
    other = loop.copy()
    leaves = _take_apart(other, facts)
    is_apart = bool(leaves)
    while facts.cut_sums_are_slow and (cut := next(_cuts(other, facts), None)) is not None:
        leaves += _take(other, cut)
    if not leaves:
        return None
    drop_dead(other)
    made = {v for e in other.body.equations for v in e.outvals}
    return Parts(other, [v for v in leaves if v in made], is_apart)


def _sizes(e: Equation) -> list[Any]:
    return [n for v in (*e.eqn.invars, *e.eqn.outvars) for n in getattr(v.aval, "shape", ())]


def _is_large(e: Equation, facts: LoopFacts) -> bool:
    """Return True if an equation is a product with large weights."""
    if e.name != "dot_general":
        return False
    return max(aval_bytes(v.aval) for v in e.eqn.invars) >= facts.least_cut_weights


def _take_apart(loop: Loop, facts: LoopFacts) -> list[int]:
    """Rewrite products of operands concatenated along the sum, some known, as sums of products."""
    leaves: list[int] = []
    while (found := _find_joined(loop, facts)) is not None:
        leaves += _replace_joined(loop, *found)
    return leaves


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
    axis = e.eqn.params["dimension_numbers"][0][1 - side][0]
    sizes = [shape_of(v)[joined.eqn.params["dimension"]] for v in joined.eqn.invars]
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]

    def cut(weights: Any) -> list[Any]:
        parts = zip(sizes, ends, strict=True)
        return [Place(axis).of(weights, end - size, end) for size, end in parts]

    weights, cuts = staged(loop, cut, [e.invals[1 - side]])

    def add(*operands: Any) -> Any:
        pairs = zip(operands[: len(sizes)], operands[len(sizes) :], strict=True)
        pairs = (pair if side == 0 else pair[::-1] for pair in pairs)
        first, *rest = (jax_internals.eval_equation(e.eqn, pair)[0] for pair in pairs)
        return sum(rest, first)

    (total,), sums = staged(loop, add, [*joined.invals, *weights])
    _put(loop, e, [*cuts, *sums])
    assert isinstance(total, int)
    substitute(loop, {e.outvals[0]: total})
    return [v for e in cuts for v in e.outvals]


def _put(loop: Loop, old: Equation, new: list[Equation]) -> None:
    """Write equations in place of an equation."""
    at = next(k for k, e in enumerate(loop.body.equations) if e is old)
    loop.body.equations[at : at + 1] = new


def _cuts(loop: Loop, facts: LoopFacts) -> Iterator[ProductSplit]:
    """Yield values that are only read in parts and are products of weights with few rows."""
    level = loop.levels()
    readers = users_of(loop.body.equations)
    results = {v for v in (*loop.ys, *[c.out for c in loop.carries]) if isinstance(v, int)}
    makers = {v: e for e in loop.body.equations for v in e.outvals if level[v] == 2}
    for value in makers:
        found = None if value in results else _parts_read(loop, value, readers.get(value, []))
        if found is None:
            continue
        axis, parts = found
        cut = ProductSplit(value, axis, parts, [], {value: Place(axis)})
        entries = _grow(loop, cut, level, makers, readers, results) and _adds(cut, level)
        if entries and _is_worth_it(cut, facts):
            yield cut


def _parts_read(
    loop: Loop, value: int, readers: Sequence[Equation]
) -> tuple[int, list[tuple[Equation, list[tuple[int, int]]]]] | None:
    """Return (axis, parts by reader) if a value is read in several disjoint parts of an axis."""
    parts = [_part(e) for e in readers]
    axes = {p[0] for p in parts if p is not None}
    if None in parts or len(axes) != 1:
        return None
    (axis,) = axes
    found = [(e, p[1]) for e, p in zip(readers, parts, strict=True) if p is not None]
    spans = sorted(span for _, spans in found for span in spans)
    if len(spans) < 2 or any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        return None
    total = shape_of(found[0][0].eqn.invars[0])[axis]
    is_even = all(MAX_PARTS * (end - start) >= total for start, end in spans)
    return (axis, found) if is_even else None


def _part(e: Equation) -> tuple[int, list[tuple[int, int]]] | None:
    """Return (axis, parts) that a slice or a split reads of an operand, or None."""
    p, shape = e.eqn.params, shape_of(e.eqn.invars[0])
    if e.name == "split":
        ends = [sum(p["sizes"][: k + 1]) for k in range(len(p["sizes"]))]
        return p["axis"], [(end - n, end) for n, end in zip(p["sizes"], ends, strict=True)]
    if e.name != "slice" or any(s != 1 for s in p["strides"] or ()):
        return None
    spans = list(zip(p["start_indices"], p["limit_indices"], strict=True))
    axes = [k for k, n in enumerate(shape) if spans[k] != (0, n)]
    return (axes[0], [spans[axes[0]]]) if len(axes) == 1 else None


def _grow(
    loop: Loop,
    cut: ProductSplit,
    level: dict[int, int],
    makers: dict[int, Equation],
    readers: dict[int, list[Equation]],
    results: set[int],
) -> bool:
    """Find the equations to compute by parts; return True if all cut values are covered."""
    inside: set[int] = set()
    whole: set[int] = set()
    for e in reversed(loop.body.equations):
        place = cut.places.get(e.outvals[0]) if len(e.outvals) == 1 else None
        if place is None or level[e.outvals[0]] < 2:
            continue
        if e.outvals[0] != cut.value and (
            e.outvals[0] in results or any(id(r) not in inside for r in readers[e.outvals[0]])
        ):
            return False
        operands = _operand_places(e, place, level)
        if operands is None:
            return False
        inside.add(id(e))
        for v, at in zip(e.invals, operands, strict=True):
            if not isinstance(v, int):
                continue
            if at is None:
                whole.add(v)
            elif cut.places.setdefault(v, at) != at or (level[v] == 2 and v not in makers):
                return False
    if not whole.isdisjoint(cut.places):
        return False
    cut.cone = [e for e in loop.body.equations if id(e) in inside]
    return True


def _operand_places(
    e: Equation, place: Place, level: dict[int, int]
) -> Sequence[Place | None] | None:
    """Return the positions of a part in the operands, None per operand read whole; or None."""
    if e.name == "dot_general":
        return _factor_places(e, place, level)
    if e.name == "reshape":
        return _reshaped(e.eqn, place)
    if e.name not in ELEMENTWISE and e.name != "transpose":
        return None
    axes = stepped_operands(e.eqn, place.axis)
    if axes is None:
        return None
    return [None if axis is None else replace(place, axis=axis) for axis in axes]


def _factor_places(
    e: Equation, place: Place, level: dict[int, int]
) -> Sequence[Place | None] | None:
    """Return the part of the weights, if a part of a product reads a part of its weights."""
    summed, batch = e.eqn.params["dimension_numbers"]
    axis = place.axis - len(batch[0])
    for k in range(2):
        gone = (*summed[k], *batch[k])
        free = [d for d in range(len(shape_of(e.eqn.invars[k]))) if d not in gone]
        if 0 <= axis < len(free):
            weights = e.invals[k]
            if not isinstance(weights, int) or level[weights] > 0:
                return None
            places: list[Place | None] = [None, None]
            places[k] = replace(place, axis=free[axis])
            return places
        axis -= len(free)
    return None


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


def _adds(cut: ProductSplit, level: dict[int, int]) -> bool:
    """Return True if products are added to a step's entry before they are cut.

    XLA's CPU backend reads such a sum element by element. A product that is cut directly (a GRU's)
    is as fast whole, or faster.
    """
    return any(level[v] == 1 for v in cut.places)


def _is_worth_it(cut: ProductSplit, facts: LoopFacts) -> bool:
    """Return True if a cut is of products with large weights and few rows."""
    found = [e for e in cut.cone if e.name == "dot_general"]
    for e in found:
        k = next(k for k, v in enumerate(e.invals) if v in cut.places)
        place = cut.places[e.outvals[0]]
        rows = math.prod(shape_of(e.eqn.outvars[0])) // shape_of(e.eqn.outvars[0])[place.axis]
        weights = aval_bytes(e.eqn.invars[k].aval)
        if weights < facts.least_cut_weights or rows > facts.most_cut_rows:
            return False
    return bool(found)


def _take(loop: Loop, cut: ProductSplit) -> list[int]:
    """Write a cut into a loop; return the slices that its products and sums read."""
    made = {v for e in cut.cone for v in e.outvals}
    reads = [v for e in cut.cone for v in e.invals if isinstance(v, int) and v not in made]
    sliced = [v for v in dict.fromkeys(reads) if v in cut.places]
    whole = [v for v in dict.fromkeys(reads) if v not in cut.places]
    spans = [span for _, parts in cut.readers for span in parts]

    def leaf_parts(*leaves: Any) -> list[Any]:
        return [cut.places[v].of(x, *s) for s in spans for v, x in zip(sliced, leaves, strict=True)]

    parts, slices = staged(loop, leaf_parts, list(sliced))

    def products(*operands: Any) -> list[Any]:
        outs, count = [], len(sliced)
        for k, span in enumerate(spans):
            env = dict(zip(whole, operands[len(parts) :], strict=True))
            env.update(zip(sliced, operands[k * count : (k + 1) * count], strict=True))
            for e in cut.cone:
                env[e.outvals[0]] = _run_part(e, cut, env, span)
            outs.append(env[cut.value])
        return outs

    roots, equations = staged(loop, products, [*parts, *whole])
    _put(loop, cut.cone[-1], [*slices, *equations])
    names = [v for e, _ in cut.readers for v in e.outvals]
    gone = {id(e) for e in (*cut.cone, *[e for e, _ in cut.readers])}
    loop.body.equations = [e for e in loop.body.equations if id(e) not in gone]
    substitute(loop, dict(zip(names, roots, strict=True)))
    return [v for e in slices for v in e.outvals]


def _run_part(e: Equation, cut: ProductSplit, env: dict[int, Any], span: tuple[int, int]) -> Any:
    """Run one equation of a cone for one part."""
    args = [env[v] if isinstance(v, int) else v.val for v in e.invals]
    params = dict(e.eqn.params)
    if e.name == "reshape":
        place = cut.places[e.outvals[0]]
        sizes = list(params["new_sizes"])
        sizes[place.axis] = (span[1] - span[0]) * place.scale
        params["new_sizes"] = tuple(sizes)
    return jax_internals.eval_equation(e.eqn, args, params)[0]
