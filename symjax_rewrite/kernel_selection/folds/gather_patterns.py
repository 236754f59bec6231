"""Gathers and scatters of single elements, read as terms.

`x[m, label[m]]` selects a column for each row. Its transpose writes a value into the selected
column and zero everywhere else. `table[key[m, n]]` looks a value up for each pair. Its transpose
sums the values of pairs with equal keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.dataflow import cone, kind_of, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import Node, Ref, is_cast, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.ir.value_analysis import is_zero

ADDED = ("scatter-add",)  # values at one place are summed
SCATTERS = (*ADDED, "scatter")  # of which the last keeps one


class Choice(NamedTuple):
    """`table[.., place[..], ..]`, one element for each index of the result.

    table: the operand, over the result's indices and the bound index that places select. place:
    integers over the result's indices. fill: value out of range; with None the nearest is read.
    """

    table: Ref
    place: Ref
    fill: Any = None


def choice(node: Node) -> Choice | None:
    """Return a gather that reads one element along one index."""
    if node.op != op.TAKE or len(node.args) != 2 or len(node.bound) != 1:
        return None
    mode, fill, windows = node.attr
    table, place = node.args
    if any(w is not None for w in windows) or node.out not in table.axes:
        return None
    return Choice(table, place, fill[0] if mode == "fill" else None)


class Keyed(NamedTuple):
    """`out[.., k, ..] = Σ value` over the bound indices whose places are k.

    along: the result's indices that places determine. places: one reference of integers for each,
    over the result's other indices and the bound indices, which are numbered after the result's.
    value: over the same indices. bound: sizes of the bound indices. clips: integers out of range
    select the nearest place; otherwise they are dropped.
    """

    along: tuple[int, ...]
    places: tuple[Ref, ...]
    value: Ref
    bound: tuple[Dim, ...]
    clips: bool


def scattered(t: TermGraph, cls: int, sets: bool = True) -> Keyed | None:
    """Return a scatter into zeros that adds; if `sets`, also one that has one place in each row."""
    found = _scatter(t, cls, SCATTERS if sets else ADDED)
    return scattered(t, cls, sets=False) if sets and found is not None and found.bound else found


def aligned(
    t: TermGraph, v: int, out: int, axes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> dict[int, int] | None:
    """Map positions of a value to positions of another, axis by axis; None if sizes differ."""
    to: dict[int, int] = {}
    for mine, theirs in axes:
        if [t.sizes[v][q] for q in mine] != [t.sizes[out][q] for q in theirs]:
            return None
        to.update(zip(mine, theirs, strict=True))
    return to


def _scatter(t: TermGraph, cls: int, names: tuple[str, ...]) -> Keyed | None:
    e = t.maker_of(cls)
    if e is None or e.name not in names or not all(isinstance(v, int) for v in e.invals):
        return None
    zeros, w, u = (int(v) for v in e.invals if isinstance(v, int))
    if not is_zero(t.graph, t.view(zeros).cls):
        return None
    d, out = e.eqn.params["dimension_numbers"], e.outvals[0]
    shape, updates = (t.program.avals[v].shape for v in (out, u))
    spread = [a for a in range(len(updates)) if a not in d.update_window_dims]
    windows = [a for a in range(len(shape)) if a not in
               (*d.inserted_window_dims, *d.operand_batching_dims)]  # fmt: skip
    found = _free(t, w, d.scatter_dims_to_operand_dims, spread, u)
    if found is None:
        return None
    free, mine = found  # maps axes of the result to axes of the updates
    at = [axis for _, axis in free]
    for a, b in zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True):
        mine[a] = spread[b]
    for a, b in zip(windows, sorted(map(int, d.update_window_dims)), strict=True):
        if updates[b] != (1 if a in at else shape[a]):
            return None
        if a not in at:
            mine[a] = b
    axes = [a for a in range(len(shape)) if a not in at]
    if sorted(mine) != axes or any(len(t.positions[out][a]) != 1 for a in at):
        return None
    pairs = [(t.positions[u][b], t.positions[out][a]) for a, b in mine.items()]
    back = aligned(t, u, out, pairs)  # from positions in the updates to indices of the result
    if back is None:
        return None
    loose = [q for q in range(len(t.sizes[u])) if q not in back]
    back.update({q: len(t.sizes[out]) + n for n, q in enumerate(loose)})
    return Keyed(
        tuple([t.positions[out][a][0] for a in at]),
        tuple([place.over(back) for place, _ in free]),
        t.view(u).over(back),
        tuple([t.sizes[u][q] for q in loose]),
        "CLIP" in str(e.eqn.params["mode"]),
    )


def one_hot(t: TermGraph, ref: Ref) -> tuple[Ref, int] | None:
    """Return `(place, index)` of a reference that is 1 where place equals index, else 0."""
    node = node_of(t.graph, ref.cls)
    if not is_cast(node):
        return None
    test = node_of(t.graph, node.args[0].cls)
    if test.op != op.MAP or test.attr[0] != "eq":
        return None
    sides = [over(over(ref, node.args[0]), a) for a in test.args]
    for place, number in (sides, sides[::-1]):
        index = counts_along(t.graph, number)
        integer = kind_of(t.graph, place.cls) in "iu"
        if index is not None and integer and index not in place.axes:
            return place, index
    return None


def is_counted(g: EGraph, cls: int) -> bool:
    """Return True if integers are computed from integers alone, without rounding."""

    def is_integer(c: int) -> bool:
        return kind_of(g, c) in "iub"

    def operands(c: int) -> list[int]:
        node = node_of(g, c)
        opened = is_integer(c) and node.op in (op.MAP, op.ADD, op.CONTRACT) and not node.bound
        return [a.cls for a in node.args] if opened else []

    return all(map(is_integer, cone([cls], operands)))


def _free(
    t: TermGraph, w: int, axes: tuple[int, ...], spread: list[int], u: int
) -> tuple[list[tuple[Ref, int]], dict[int, int]] | None:
    """Return the index arrays that select, each with its axis; and the axes that are batched.

    An index array that counts up along an axis of the result only says that the two axes are
    batched. `spread` are the axes of the updates u that the arrays are broadcast over.
    """
    parts, positions = _parts(t, w, len(axes)), t.positions[u]
    if parts is None:
        return None
    to = aligned(t, w, u, zip(t.positions[w][:-1], [positions[b] for b in spread], strict=True))
    if to is None:
        return None
    free: list[tuple[Ref, int]] = []
    in_step: dict[int, int] = {}
    for part, axis in zip(parts, map(int, axes), strict=True):
        if any(i not in to for i in part.axes):
            return None
        place = part.over(to)
        counted = counts_along(t.graph, place)
        home = [b for b in spread if positions[b] == (counted,)]
        if counted is not None and home and home[0] not in in_step.values():
            in_step[axis] = home[0]
        else:
            free.append((place, axis))
    return free, in_step


def _parts(t: TermGraph, w: int, count: int) -> list[Ref] | None:
    """Return the index arrays stacked along the last axis of a value, over its positions."""
    view = t.view(w)
    if count == 1:
        return [view]
    node = node_of(t.graph, view.cls)
    last = t.positions[w][-1]
    if node.op != op.CONCAT or len(last) != 1 or len(node.args) != count:
        return None
    index, sizes = node.attr
    if view.axes[index] != last[0] or any(s != 1 for s in sizes):
        return None
    return [over(view, a) for a in node.args]


def counts_along(g: EGraph, ref: Ref) -> int | None:
    """Return the index that an integer reference enumerates, if there is one."""
    node = node_of(g, ref.cls)
    if node.op == op.IOTA:
        return ref.axes[0]
    if node.op != op.MAP:
        return None
    args = [over(ref, a) for a in node.args]
    if is_cast(node):
        return counts_along(g, args[0])
    if node.attr[0] == "select_n" and len(args) == 3:  # a wrapped negative index; none occurs here
        test = node_of(g, args[0].cls)
        if test.op == op.MAP and test.attr[0] == "lt":
            tested, least = over(args[0], test.args[0]), node_of(g, test.args[1].cls)
            if least.op == op.CONST and least.attr[0] <= 0 and counts_along(g, tested) is not None:
                return counts_along(g, args[1])
    return None
