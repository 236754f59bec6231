"""Entries of arrays: the index at which an axis is read, and equations that only move entries.

    x[::-1][i]  →  x[n − 1 − i];    an axis of 2·4 entries at i, j  →  the entry 4·i + j

An axis that was made of several indices is read as their combination, and split again where an
operand has them apart; if an index is no such combination, an equation has no law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.sizes import Dim, from_jax
from symjax_rewrite.ir.term import Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.proofs.algebra.arithmetic import Calculus
from symjax_rewrite.proofs.algebra.forms import ZERO, Index, Poly, linear


class Reader(Protocol):
    """The reader of a program, `lifting.Lifting`, as far as laws of equations need it."""

    a: Calculus
    t: TermGraph

    def of(self, ref: Ref, at: Sequence[Index]) -> Poly: ...
    def apart(self) -> AbstractContextManager[set]: ...
    def require(self, kind: str, p: Poly) -> None: ...


def place_of(reader: Reader, value: int, axis: int, here: Sequence[Index]) -> Index | None:
    """Return the index at which an axis of a result is read; None if it is of unknown sizes.

    An axis of sizes 2·4 at i, j is read at 4·i + j.
    """
    mine = reader.t.positions[value][axis]
    if len(mine) == 1:
        return here[mine[0]]
    offset, terms, stride = 0, list[tuple[int, int]](), 1
    for position in reversed(mine):
        offset += stride * here[position][0]
        terms += [(n, stride * s) for n, s in here[position][1]]
        size = reader.t.sizes[value][position]
        if not isinstance(size, int):
            return None
        stride *= size
    return linear(offset, terms)


def entry(
    reader: Reader, made: int, source: int, here: Sequence[Index], entries: Mapping[int, Index],
    axes: Callable[[int], int] = int,
) -> Poly | None:  # fmt: skip
    """Return an operand at entries of some axes, and at a result's indices of the others.

    axes: the axis of the result for an axis of the operand. None if the axes do not correspond.
    """
    t, read = reader.t, dict[int, Index]()
    for axis, theirs in enumerate(t.positions[source]):
        if axis in entries:
            parts = _divided(reader.a, entries[axis], [t.sizes[source][q] for q in theirs])
        elif (mine := _same_axis(t, (made, axes(axis)), (source, axis))) is not None:
            parts = [here[i] for i in mine]
        else:
            parts = None
        if parts is None:
            return None
        read.update(zip(theirs, parts, strict=True))
    return reader.of(t.view(source), [read[q] for q in range(len(read))])


def read_at(reader: Reader, source: int, at: Sequence[Index]) -> Poly | None:
    """Return a value at one index for each of its axes; None if it cannot be split as the axis."""
    return entry(reader, source, source, (), dict(enumerate(at)))


def _same_axis(t: TermGraph, *axes: tuple[int, int]) -> Sequence[int] | None:
    """Return the positions of the first of two axes of values; None if the other is another."""
    positions = [t.positions[v][axis] for v, axis in axes]
    ids = [[t.ids[v][i] for i in p] for (v, _), p in zip(axes, positions, strict=True)]
    return positions[0] if ids[0] == ids[1] else None


def _divided(a: Calculus, index: Index, sizes: Sequence[Dim]) -> list[Index] | None:
    """Return the indices whose combination an index is: 4·i + j is i, j of sizes 2, 4."""
    if len(sizes) < 2:
        return [index] * len(sizes)
    *outer, size = sizes
    if not isinstance(size, int):
        return None
    low = [(n, s) for n, s in index[1] if s % size]
    high = [(n, s // size) for n, s in index[1] if s % size == 0]
    inner, rest = linear(index[0] % size, low), linear(index[0] // size, high)
    ends = a.table.index_range(inner)
    if ends is None or not all(isinstance(end, int) and 0 <= end < size for end in ends):
        return None
    before = _divided(a, rest, outer)
    return None if before is None else [*before, inner]


# ---------------------------------------------------------------- equations that move entries


def part(reader: Reader, number: int, here: list[Index]) -> Poly | None:
    """Return an entry of a slice, or of an array with zeros around and between its entries."""
    t, e = reader.t, reader.t.program.equations[number]
    source, (made,), params = e.invals[0], e.outvals, e.eqn.params
    if not isinstance(source, int) or any(isinstance(v, int) or v.val for v in e.invals[1:]):
        return None
    starts = params.get("padding_config") or [(-k, 0, 0) for k in params["start_indices"]]
    strides = params.get("strides") or (1,) * len(starts)
    entries = dict[int, Index]()
    for axis, ((low, _, inside), stride) in enumerate(zip(starts, strides, strict=True)):
        size, place = t.program.avals[source].shape[axis], place_of(reader, made, axis, here)
        is_same = _same_axis(t, (made, axis), (source, axis)) is not None
        if is_same and (low, inside, stride) == (0, 0, 1):
            continue
        if place is None or (place[1] and "padding_config" in params):
            return None
        if not place[1]:
            k, rest = divmod(stride * place[0] - low, 1 + inside)
            entries[axis] = (k, ())
            if rest or not (isinstance(size, int) and 0 <= k < size):
                return ZERO if isinstance(size, int) else None
        else:
            entries[axis] = linear(stride * place[0] - low, [(n, stride * k) for n, k in place[1]])
    return entry(reader, made, source, here, entries)


def joined(reader: Reader, number: int, here: list[Index]) -> Poly | None:
    """Return an entry of a concatenation."""
    t, e = reader.t, reader.t.program.equations[number]
    (made,), axis = e.outvals, e.eqn.params["dimension"]
    place = place_of(reader, made, axis, here)
    if place is None or place[1]:
        return None
    k = place[0]
    for v in e.invals:
        size = t.program.avals[v].shape[axis] if isinstance(v, int) else None
        if not isinstance(size, int) or not isinstance(v, int):
            return None
        if k < size:
            return entry(reader, made, v, here, {axis: (k, ())})
        k -= size
    return None


def reversed_entry(reader: Reader, number: int, here: list[Index]) -> Poly | None:
    """Return an entry of an array with reversed axes."""
    e = reader.t.program.equations[number]
    source, (made,) = e.invals[0], e.outvals
    entries = dict[int, Index]()
    for axis in e.eqn.params["dimensions"]:
        place = place_of(reader, made, axis, here)
        if place is None:
            return None
        last = from_jax(shape_of(e.eqn.outvars[0])[axis]) - 1
        offset, terms = reader.a.table.size_index(last)
        back = [(n, -s) for n, s in place[1]]
        entries[axis] = linear(offset - place[0], [*terms, *back])
    return entry(reader, made, source, here, entries) if isinstance(source, int) else None
