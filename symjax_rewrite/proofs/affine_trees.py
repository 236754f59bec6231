"""Trees of `lax.associative_scan` as affine recurrences, by the monoid law.

A pair (a, b) is the map h → a·h + b, and maps compose: (a₂, b₂)∘(a₁, b₁) = (a₂·a₁, a₂·b₁ + b₂). The
composition of the steps l…h is written A[l, h], B[l, h]. Every entry of every array in a tree is
followed as one of these, exactly: `A[m+1, h]·A[l, m] = A[l, h]` and `A[m+1, h]·B[l, m] + B[m+1, h]
= B[l, h]`. So the tree is a proof by itself, whatever its shape. May import `ir` and `loops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from symjax_rewrite.ir.flat_program import Program
from symjax_rewrite.loops.associative_scan_detection import MOVES, Prefix, find_prefixes

TEXT = "composition of affine maps is associative: A[m+1,h]·B[l,m] + B[m+1,h] = B[l,h]"


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

    def __radd__(self, other: Any) -> Maps | Unrelated:
        """Return the sum of zero and an entry."""
        return self + other


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
        known = _followed(prefix)
        ends = ((prefix.out, "B"), (prefix.products, "A"))
        for (v, kind), layout in zip(ends, prefix.layouts, strict=False):
            if v is not None and _is_prefix(known.get(v), kind, prefix.length):
                out[v] = Tree(prefix, kind, layout)
    return out


def _is_prefix(entries: np.ndarray | None, kind: str, length: int) -> bool:
    """Return True if entry i is the composition of the steps 0…i."""
    if entries is None or len(entries) != length:
        return False
    return all(x == Maps(kind, 0, i) for i, x in enumerate(entries))


def _entries(kind: str, length: int) -> np.ndarray:
    out = np.empty(length, object)
    for i in range(length):
        out[i] = Maps(kind, i, i)
    return out


def _followed(prefix: Prefix) -> dict[int, np.ndarray]:
    """Return the entries of every array of a tree, along the axis of the steps."""
    known = {
        prefix.factors: _entries("A", prefix.length),
        prefix.added: _entries("B", prefix.length),
    }
    axes = dict.fromkeys(known, prefix.axis)
    for e in prefix.equations:
        found = [known.get(v) if isinstance(v, int) else None for v in e.invals]
        first = next((k for k, x in enumerate(found) if x is not None), None)
        if first is None:
            continue
        axis = axes[e.invals[first]]  # pyright: ignore[reportArgumentType]
        made = _made(e, found, axis)
        if e.name == "transpose" and found[0] is not None:
            made, axis = [found[0]], list(e.eqn.params["permutation"]).index(axis)
        for v, x in zip(e.outvals, made, strict=False):
            known[v], axes[v] = x, axis
    return known


def _made(e: Any, found: list[np.ndarray | None], axis: int) -> list[np.ndarray]:
    """Return the entries of the results of an equation; none if it is not followed."""
    if e.name in ("mul", "add", "add_any"):
        x, y = found if len(found) == 2 else (found[0], found[0])
        if x is None or y is None or len(x) != len(y):
            return []
        out = np.empty(len(x), object)
        for k, (one, other) in enumerate(zip(x, y, strict=True)):
            out[k] = one * other if e.name == "mul" else one + other
        return [out]
    if e.name == "concatenate":
        parts = [x for x in found if x is not None]
        same = len(parts) == len(found) and e.eqn.params["dimension"] == axis
        return [np.concatenate(parts)] if same else []
    x = found[0]
    moves = MOVES.get(e.name, lambda e, axis: [])(e, axis)
    return [] if x is None else [move(x) for move in moves]
