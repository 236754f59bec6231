"""Trees of `lax.associative_scan` as affine recurrences, by the monoid law.

A pair (a, b) is the map h → a·h + b, and maps compose: (a₂, b₂)∘(a₁, b₁) = (a₂·a₁, a₂·b₁ + b₂). The
composition of the steps l…h is written A[l, h], B[l, h]. Every entry of every array in a tree is
followed as one of these, exactly: `A[m+1, h]·A[l, m] = A[l, h]` and `A[m+1, h]·B[l, m] + B[m+1, h]
= B[l, h]`. So a tree of any shape is a proof by itself. May import `ir` and `loops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.loops.associative_scan_detection import (
    Evaluator,
    Polynomials,
    Prefix,
    find_prefixes,
)


@dataclass(frozen=True, slots=True)
class Maps:
    """An entry of an array in a tree: "A" or "B" of the steps low…high, or a product A·B.

    of: for a product, the steps of its second factor.
    """

    kind: str
    low: int
    high: int
    of: tuple[int, int] = (0, 0)

    def __mul__(self, other: Any) -> Maps | Unrelated:
        """Return the product of two entries."""
        for later, earlier in ((self, other), (other, self)):
            if not isinstance(earlier, Maps) or later.kind != "A" or earlier.kind == "AB":
                continue
            if earlier.high + 1 == later.low:
                if earlier.kind == "A":
                    return Maps("A", earlier.low, later.high)
                return Maps("AB", later.low, later.high, (earlier.low, earlier.high))
        return Unrelated()

    def __add__(self, other: Any) -> Maps | Unrelated:
        """Return the sum of two entries, or of an entry and zero."""
        if isinstance(other, int) and other == 0:
            return self
        for product, shift in ((self, other), (other, self)):
            if not isinstance(shift, Maps) or not isinstance(product, Maps):
                continue
            same = (shift.low, shift.high) == (product.low, product.high)
            if same and shift.kind == "B" and product.kind == "AB":
                return Maps("B", product.of[0], product.high)
        return Unrelated()

    __rmul__, __radd__ = __mul__, __add__


class Unrelated:
    """An entry that is no composition of steps."""

    def __mul__(self, other: Any) -> Unrelated:
        return self

    __rmul__ = __add__ = __radd__ = __mul__


@dataclass(frozen=True, slots=True)
class Tree:
    """A value that is an affine recurrence: after step i of `axis` it is A[0, i] or B[0, i].

    layout: the axis of `factors` for each axis of the value. kind: "A" or "B".
    """

    prefix: Prefix
    kind: str
    layout: tuple[int, ...]


def find_trees(program: Program) -> dict[int, Tree]:
    """Return the values of a program that are affine recurrences computed by trees."""
    out: dict[int, Tree] = {}
    for prefix in find_prefixes(program):
        known = _followed(program, prefix)
        ends = ((prefix.out, "B"), (prefix.products, "A"))
        for (v, kind), layout in zip(ends, prefix.layouts, strict=False):
            if v in known and _is_prefix(known[v].values, kind, prefix.length):
                out[v] = Tree(prefix, kind, layout)
    return out


def _is_prefix(entries: np.ndarray, kind: str, length: int) -> bool:
    """Return True if entry i is the composition of the steps 0…i."""
    return list(entries) == [Maps(kind, 0, i) for i in range(length)]


def _followed(program: Program, prefix: Prefix) -> dict[int, Polynomials]:
    """Return the entries of every array of a tree, along the axis of the steps."""
    known = {}
    for kind, v in (("A", prefix.factors), ("B", prefix.added)):
        layout = tuple(range(len(program.avals[v].shape)))
        steps = np.array([Maps(kind, i, i) for i in range(prefix.length)], object)
        known[v] = Polynomials(steps, prefix.axis, layout)
    for v, x in _Exact(program).evaluate(prefix.equations, known):
        known[v] = x
    return known


class _Exact(Evaluator):
    """Evaluates arrays of `Maps` in place of polynomials at points."""

    def combined(self, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if name not in ("mul", "add", "add_any"):
            return np.full(len(x), Unrelated(), object)
        return x * y if name == "mul" else x + y
