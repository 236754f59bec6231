"""Dependence of a loop's carries on themselves: affine or not, and the reason if not.

`h ← a·h + b` composes: (a₂,b₂)∘(a₁,b₁) = (a₂a₁, a₂b₁+b₂). Such a loop is a prefix over a monoid and
its steps may be grouped in any order. A carry is affine if h passes only through sums, through
products with values that do not depend on h, and through moves of entries. A carry is diagonal if
no entry reads another entry. Carries that others read but that read none of these are solved first
and do not prevent the others from being affine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import or_

import jax.numpy as jnp
import numpy as np

from symjax_rewrite.ir.dataflow import cone, numbers
from symjax_rewrite.ir.flat_program import Equation, Value
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS, dtype_kind
from symjax_rewrite.loops.loop import Loop
from symjax_rewrite.spec_texts import spec_text

FREE, SUM, DIAGONAL, MATRIX, MAX_PLUS, OTHER = range(6)
NAMES = {
    SUM: "a running sum",
    DIAGONAL: "affine",
    MATRIX: "affine by a matrix",
    MAX_PLUS: "max-plus",
}

_SUMS = frozenset("add add_any sub neg copy stop_gradient convert_element_type".split())
_MOVES = VIEWS | frozenset(
    "slice concatenate pad rev reduce_sum cumsum dynamic_slice split".split()
)


@dataclass(frozen=True, slots=True)
class Degree:
    """The dependence of a value on the carries being solved, and the reason if not affine."""

    kind: int = FREE
    why: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Carries that depend on each other.

    carries: their numbers. degree: their joint dependence on themselves.
    """

    carries: tuple[int, ...]
    degree: Degree


def composes(loop: Loop) -> bool:
    """Return True if the steps of a loop compose: every carry is a sum, affine or a maximum."""
    return all(g.degree.kind in NAMES for g in groups_of(loop))


def groups_of(loop: Loop) -> Iterator[Group]:
    """Yield the carries of a loop in groups that depend on each other, in solving order."""
    reads = dependencies(loop)
    for group in _components(reads):
        if not any(reads[k] & group for k in group):
            yield Group(tuple(group), Degree())
            continue
        degrees = _degrees(loop, {loop.carries[k].inner for k in group})
        outs = numbers([loop.carries[k].out for k in group])
        worst = _worst([degrees[v] for v in outs if v in degrees])
        if len(group) > 1 and worst.kind in (SUM, DIAGONAL):
            worst = Degree(MATRIX, "its carries read each other")
        yield Group(tuple(sorted(group)), worst)


def _worst(degrees: list[Degree]) -> Degree:
    return max(degrees, key=lambda d: d.kind, default=Degree())


def describe(loop: Loop, groups: Iterable[Group] | None = None) -> str:
    """Return one line on how the carries of a loop, in groups, depend on themselves."""
    parts = []
    for group in groups_of(loop) if groups is None else groups:
        avals = [loop.body.avals[loop.carries[k].inner] for k in group.carries]
        kind = group.degree.kind
        name = NAMES.get(kind, f"not affine: {group.degree.why}" if kind == OTHER else "given")
        state = "the state" if len(avals) == 1 else "states"
        parts.append(f"{state} {', '.join(map(spec_text, avals))}: {name}")
    return "; ".join(dict.fromkeys(parts)) or "no carry"


def is_zero(start: Value) -> bool:
    """Return True if a carry starts from the number 0."""
    if isinstance(start, int):
        return False
    return not np.any(start.val) and not np.any(np.signbit(start.val))


def dependencies(loop: Loop) -> dict[int, set[int]]:
    """Return for every carry the carries that its next value reads."""
    read = {c.inner: 1 << k for k, c in enumerate(loop.carries)}  # by value, a bit for each carry
    for e in loop.body.equations:
        if mask := functools.reduce(or_, [read.get(v, 0) for v in e.reads], 0):
            read.update(dict.fromkeys(e.outvals, mask))
    masks = [read.get(c.out, 0) if isinstance(c.out, int) else 0 for c in loop.carries]
    every = range(len(masks))
    return {k: {j for j in every if mask >> j & 1} for k, mask in enumerate(masks)}


def _components(reads: dict[int, set[int]]) -> list[set[int]]:
    """Return the strongly connected components of the carries, operands first."""
    reach = {k: cone([k], reads.__getitem__) for k in reads}
    groups: list[set[int]] = []
    for k in sorted(reads, key=lambda k: (len(reach[k]), k)):
        if not any(k in g for g in groups):
            groups.append({j for j in reach[k] if k in reach[j]})
    return groups


def _degrees(loop: Loop, moving: set[int]) -> dict[int, Degree]:
    """Return the dependence of every value of a body on some carries; other carries are known."""
    degrees = {v: Degree(SUM) for v in moving}
    least = {str(loop.body.avals[v].dtype) for v in moving}
    known = Degree()
    for e in loop.body.equations:
        if degrees.keys().isdisjoint(e.reads):
            continue
        found = [degrees[v] for v in e.reads if v in degrees]
        degree = next((d for d in found if d.kind == OTHER), None)
        if degree is None:
            operands = [degrees.get(v, known) if type(v) is int else known for v in e.invals]
            degree = _degree(e, operands, least)
        for v in e.outvals:
            degrees[v] = degree
    return degrees


def _has_infinite_factor(e: Equation) -> bool:
    """Return True if a number that is not finite scales a value: prefixes may make it NaN."""
    for k, v in enumerate(e.invals):
        if not isinstance(v, int):
            number = complex(np.asarray(v.val).item())
            if e.name == "div" and k == 1 and not number:
                return True
            if not np.isfinite(number):
                return True
    return False


def _degree(e: Equation, operands: list[Degree], least: set[str]) -> Degree:
    moving = [d for d in operands if d.kind != FREE]
    worst, name = _worst(moving), e.name
    if worst.kind == MAX_PLUS and name not in (*_SUMS, "max", "min"):
        return Degree(OTHER, f"{name} of a maximum")
    scaled = Degree(max(DIAGONAL, worst.kind))
    if name == "convert_element_type" and (rounded := _rounded(e, least)):
        return Degree(OTHER, f"it is rounded to {rounded}")
    if name in _SUMS:
        is_negated = name == "neg" or (name == "sub" and operands[1].kind != FREE)
        return scaled if is_negated else worst
    if name in ("max", "min"):
        maximum = worst.kind in (SUM, MAX_PLUS)
        return Degree(MAX_PLUS) if maximum else Degree(OTHER, f"a {name} of the scaled carry")
    if name in ("mul", "div") and _has_infinite_factor(e):
        return Degree(OTHER, "an infinite multiple of the carry")
    if name in ("mul", "dot_general"):
        if len(moving) > 1:
            return Degree(OTHER, "a product of the carry with itself")
        return scaled if name == "mul" else Degree(MATRIX)
    if name == "div":
        return scaled if operands[1].kind == FREE else Degree(OTHER, "a quotient by the carry")
    if name == "select_n":
        return worst if operands[0].kind == FREE else Degree(OTHER, "a choice by the carry")
    if name in _MOVES and operands[0].kind != FREE:
        return worst if name in VIEWS else Degree(MATRIX)
    what = f"{name} of the carry"
    return Degree(OTHER, what if name in ELEMENTWISE else f"{what} is no sum or product")


def _rounded(e: Equation, least: set[str]) -> str:
    """Return the dtype that a cast rounds to, if narrower than the carries'; else ""."""
    old, new = (str(getattr(v.aval, "dtype", "")) for v in (e.eqn.invars[0], e.eqn.outvars[0]))
    if dtype_kind(new) in "iub":
        return "" if dtype_kind(old) in "iu" else "integers"
    if {dtype_kind(old), dtype_kind(new), *map(dtype_kind, least)} != {"f"}:
        return ""
    return "" if holds(new, old) or all(holds(new, dtype) for dtype in least) else new


def holds(wide: str, narrow: str) -> bool:
    """Return True if a float dtype represents every number of another."""
    x, y = jnp.finfo(wide), jnp.finfo(narrow)
    return x.nmant >= y.nmant and x.maxexp >= y.maxexp
