"""Gradients through a row's maximum that are zero in exact arithmetic.

A softmax does not depend on its shift, so the derivative by the maximum is a sum that cancels. The
program as written spreads this sum over the positions of the maximum. A fold omits the sum, and no
tile is compared with its own maximum.

The sum is a rational function of the values it is computed from. It is tested at a random point
(Schwartz 1980, Zippel 1979), in float64: a rational function that is not zero is zero only at few
points. Of a sum over an index only its linearity counts, so a few points with random weights stand
for the index.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from symjax_rewrite.ir.dataflow import (
    Needed,
    is_float_cast,
    kind_of,
    live_classes,
    node_of,
    postorder,
)
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP, REDUCE, Node, Ref, is_cast

POINTS = 3  # that stand for an index
MOST_ELEMENTS = 3**10  # of a term's index space, at these points
STEEPEST = 2.0**20  # coefficients beyond it, or below its reciprocal, hide other terms
NOISE = 1e-12  # relative to the terms of a sum that cancels


def vanishing(g: EGraph, need: Needed) -> set[int]:
    """Return the classes that spread a vanishing derivative over the positions of a maximum."""
    out: set[int] = set()
    at = _Samples(g)
    for cls in need.order:
        node = node_of(g, cls)
        if kind_of(g, cls) != "f" or node.bound:
            continue
        if node.op == MAP and node.attr[0] == "div" and _is_tie_count(g, node.args[1].cls):
            if at.cancels(node.args[0].cls):
                out.add(cls)
        elif node.op == CONTRACT:
            gone = [a for a in node.args if a.cls in out]
            rest = [a for a in node.args if a.cls not in out]
            if (gone and all(_is_tie(g, a.cls) for a in rest)) or _spread(g, node, at):
                out.add(cls)
    return out


def _spread(g: EGraph, node: Node, at: _Samples) -> bool:
    """Return True for a vanishing sum times the reciprocal of a count of ties."""
    counts = [a for a in node.args if _is_reciprocal_count(g, a.cls)]
    return bool(counts) and any(at.cancels(a.cls) for a in node.args if a not in counts)


def _is_reciprocal_count(g: EGraph, cls: int) -> bool:
    node = node_of(g, cls)
    return node.op == MAP and node.attr[0] == "reciprocal" and _is_tie_count(g, node.args[0].cls)


def _is_tie_count(g: EGraph, cls: int) -> bool:
    """Return True if a class counts the positions of a maximum along a row (at least one)."""
    node = node_of(g, cls)
    return node.op == CONTRACT and len(node.args) == 1 and _is_tie(g, node.args[0].cls)


def _is_tie(g: EGraph, cls: int) -> bool:
    """Return True if a class is 1 where a term is its own maximum (or minimum), else 0."""
    node = node_of(g, cls)
    if is_cast(node):
        return _is_tie(g, node.args[0].cls)
    is_equality = node.op == MAP and node.attr[0] == "eq"
    pairs = (node.args, node.args[::-1]) if is_equality else ()
    return any(_is_extremum(g, top, of) for of, top in pairs)


def _is_extremum(g: EGraph, top: Ref, of: Ref) -> bool:
    """Return True if a value is the maximum, or minimum, of a term along some of its indices."""
    node = node_of(g, top.cls)
    if node.op != REDUCE or node.attr not in ("max", "min") or node.args[0].cls != of.cls:
        return False
    place = dict(enumerate(top.axes))
    return all(place.get(i, j) == j for i, j in zip(node.args[0].axes, of.axes, strict=True))


class _Sample(NamedTuple):
    """A class at a random point, over its slots, and the size of the terms summed in it."""

    value: np.ndarray
    size: np.ndarray


@dataclass(slots=True)
class _Samples:
    """The classes of a graph at one random point.

    Sums, products, quotients and powers are computed; any other class is a random array.
    """

    g: EGraph
    known: dict[int, _Sample] = field(default_factory=dict)
    weights: dict[Dim, np.ndarray] = field(default_factory=dict)

    def cancels(self, cls: int) -> bool:
        """Return True if a class is a sum, or a product with a sum, that is zero everywhere."""
        if node_of(self.g, cls).op not in (ADD, CONTRACT):
            return False
        for c in postorder([cls], self._operands, self.known):
            node = node_of(self.g, c)
            self.known[c] = self._computed(c, node) if self._is_opened(c) else self._random(c)
        value, size = self.known[cls]
        return bool(np.all(np.abs(value) <= NOISE * size))

    def _operands(self, cls: int) -> list[int]:
        return [a.cls for a in node_of(self.g, cls).args] if self._is_opened(cls) else []

    def _is_opened(self, cls: int) -> bool:
        node = node_of(self.g, cls)
        large = POINTS ** (node.out + len(node.bound)) > MOST_ELEMENTS
        if large or kind_of(self.g, cls) != "f":
            return False
        if node.op == ADD:
            return all(1 / STEEPEST <= abs(k) <= STEEPEST for k in node.attr)
        if is_float_cast(self.g, cls):  # exact arithmetic does not see it
            return True
        powers = ("reciprocal", "integer_pow", "div")
        return node.op == CONTRACT or (node.op == MAP and node.attr[0] in powers)

    def _random(self, cls: int) -> _Sample:
        shape = (POINTS,) * len(self.g.classes[cls].sizes)
        made = np.random.default_rng(cls).uniform(0.5, 1.5, shape)
        return _Sample(made, made)

    def _computed(self, cls: int, node: Node) -> _Sample:
        if node.op == ADD:
            values, sizes = zip(*[self._read(a, node.out) for a in node.args], strict=True)
            return _Sample(_sum(node.attr, values), _sum(map(abs, node.attr), sizes))
        if node.op == CONTRACT:
            return _Sample(*(self._contracted(node, which) for which in (0, 1)))
        below = self._read(node.args[-1], node.out)
        if is_cast(node):
            return below
        power = dict(node.attr[1]).get("y", -1)
        with np.errstate(all="ignore"):
            value = below.value**power
            made = _Sample(value, np.abs(value / below.value) * below.size)
        if node.attr[0] != "div":
            return made
        top = self._read(node.args[0], node.out)
        return _Sample(top.value * made.value, top.size * made.size)

    def _read(self, ref: Ref, out: int) -> _Sample:
        """Return an operand over the outputs of a term, with size 1 where it reads no index."""
        read = sorted(set(ref.axes))
        shape = [POINTS if i in read else 1 for i in range(out)]
        found = (np.einsum(x, list(ref.axes), read) for x in self.known[ref.cls])
        return _Sample(*(x.reshape(shape) for x in found))

    def _contracted(self, node: Node, which: int) -> np.ndarray:
        terms: list = []
        for a in node.args:
            terms += [self.known[a.cls][which], list(a.axes)]
        for k, size in enumerate(node.bound):
            terms += [self._weights(size), [node.out + k]]
        return np.einsum(*terms, list(range(node.out)))

    def _weights(self, size: Dim) -> np.ndarray:
        """Return the weights of a sum over an index of some size; they add up to about 1."""
        if size not in self.weights:
            some = np.random.default_rng(len(self.weights)).uniform(0.5, 1.5, POINTS)
            self.weights[size] = some / POINTS
        return self.weights[size]


def _sum(coefficients: Iterable[Any], arrays: Iterable[np.ndarray]) -> Any:
    return sum(k * x for k, x in zip(coefficients, arrays, strict=True))


def without(g: EGraph, need: Needed, gone: frozenset[int]) -> Needed:
    """Return the live set where sums leave out the classes in `gone`."""

    def operands(cls: int) -> list[int]:
        node = node_of(g, cls)
        left_out = gone if node.op == ADD and len(node.args) > 1 else ()
        return [a.cls for a in node.args if a.cls not in left_out]

    return live_classes(need.outside, operands)
