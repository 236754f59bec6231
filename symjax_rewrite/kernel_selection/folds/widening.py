"""Row values that folds exchange, held in f32.

XLA holds intermediate values of a loop in f32 and sums in f32, also where a program is written in
bf16 or f16. A fold that rounded every score, maximum and normaliser would be less accurate than the
program it replaces, since the error of a row value affects the whole row. So tiles are computed in
f32, and row values stay in f32 from one fold to the next. A cast written in the program still
rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from symjax_rewrite.codegen import term_lowering
from symjax_rewrite.ir.dataflow import Needed, cone, kind_of, node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import held_dtype, is_half, is_rounded
from symjax_rewrite.ir.term import ADD, DELTA, MAP, is_cast
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.clustering import Cluster, ClusterMember
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    COMPARISONS,
    elements,
    is_elementwise,
)
from symjax_rewrite.kernel_selection.kernel_candidate import ClassRoute

_CHOICES = ("select_n", "max", "min", "clamp", "convert_element_type")  # their result is an operand


def wide_rows(
    t: TermGraph, need: Needed, found: Mapping[int, Cluster]
) -> tuple[frozenset[int], set[int]]:
    """Return the row values that folds exchange in f32, and the clusters that round as written.

    Exponentials are shifted by a maximum. The program may read this maximum in half precision
    beside sums of these exponentials. Both must use the same shift, so the tiles of such a cluster
    round as written.
    """
    narrow: set[int] = set()
    while True:
        held = {n: c for n, c in found.items() if n not in narrow}
        members = [m for c in held.values() for m in c.members]
        rows = _rows(t, need, members)
        read = {n for n, c in held.items() if _reads_shift(t.graph, need, c, rows, members)}
        if not read:
            return rows, narrow
        narrow |= read


def _rows(t: TermGraph, need: Needed, members: Sequence[ClusterMember]) -> frozenset[int]:
    """Return the half-precision row values of folds, and classes elementwise in them."""
    reduced = {m.reduction.cls: m for m in members}
    pairwise = _pairwise(members)
    rows: set[int] = set()
    if not any(_is_row(t.graph, m) or _is_sum_of_halves(t.graph, m) for m in members):
        return frozenset()
    for cls in need.order:
        if cls in reduced:
            wide = _is_row(t.graph, reduced[cls])
        else:
            wide = cls not in pairwise and _follows(t, cls, rows, reduced)
        if wide:
            rows.add(cls)
    return frozenset(rows)


def _pairwise(members: Sequence[ClusterMember]) -> set[int]:
    return {r.cls for m in members for r in m.tile.inner}


def _is_row(g: EGraph, m: ClusterMember) -> bool:
    """Return True if a reduction gives one half-precision number for each row."""
    info = g.classes[m.reduction.cls]
    slots = range(len(info.sizes))
    return (
        is_half(info.dtype) and m.reduction.kind in ("sum", "max", "min") and {*slots} <= {*m.space}
    )


def _follows(t: TermGraph, cls: int, rows: set[int], reduced: dict[int, ClusterMember]) -> bool:
    """Return True if a class is elementwise in wide row values, and no larger than they are."""
    g = t.graph
    node, dtype = node_of(g, cls), g.classes[cls].dtype
    if not is_elementwise(node) or dtype_kind(dtype) != "f":
        return False
    if node.op == MAP and node.attr[0] in (*COMPARISONS, "reduce_precision"):
        return False  # it compares, or is a cast written in the program
    if any(node_of(g, a.cls).op == DELTA for a in node.args):
        return False
    if is_rounded(node, [g.classes[a.cls].dtype for a in node.args], dtype):
        return False
    if is_cast(node) and is_half(dtype):
        return _would_be_half(g, node.args[0].cls, rows, reduced)
    size = max((elements(t, a.cls) for a in node.args if a.cls in rows), default=0)
    return size > 0 and elements(t, cls) <= size


def _would_be_half(g: EGraph, cls: int, rows: set[int], reduced: dict[int, ClusterMember]) -> bool:
    """Return True if a class is in f32 only because `jnp.sum` casts its operand to f32 and back."""
    node = node_of(g, cls)
    while node.op == ADD and len(node.args) == 1 and abs(node.attr[0]) == 1:
        cls = node.args[0].cls
        node = node_of(g, cls)
    if cls in reduced:
        return _is_sum_of_halves(g, reduced[cls])
    arg = node.args[0].cls if is_cast(node) else -1
    return arg in rows and is_half(g.classes[arg].dtype)


def _is_sum_of_halves(g: EGraph, m: ClusterMember) -> bool:
    if m.reduction.kind != "sum":
        return False
    nodes = [node_of(g, a.cls) for a in m.reduction.args]
    return all(is_cast(n) and is_half(g.classes[n.args[0].cls].dtype) for n in nodes)


def _reads_shift(
    g: EGraph,
    need: Needed,
    cluster: Cluster,
    rows: frozenset[int],
    members: Sequence[ClusterMember],
) -> bool:
    """Return True if a cluster's maximum is read in half precision outside of folds."""
    shifts = {m.reduction.cls for m in cluster.members if m.reduction.kind in ("max", "min")} & rows
    held = rows | _pairwise(members)

    def users(cls: int) -> list[int]:
        return need.users.get(cls, []) if is_half(g.classes[cls].dtype) else []

    def passes(cls: int) -> bool:
        """Return True if a class returns one of its operands."""
        node = node_of(g, cls)
        return cls in rows and node.op == MAP and node.attr[0] in _CHOICES

    found = cone(shifts, lambda cls: filter(passes, users(cls)))
    if any(cls in need.outside and is_half(g.classes[cls].dtype) for cls in found):
        return True
    readers = {u for cls in found for u in users(cls)} - held
    return any(kind_of(g, u) == "f" for u in readers)


class WideRow(ClassRoute):
    """Class elementwise in row values of folds; `make` computes it from them in f32."""

    __slots__ = ()

    @classmethod
    def of(cls, g: EGraph, row: int) -> WideRow:
        """Return the route of a class."""
        node, info = node_of(g, row), g.classes[row]

        def make(emitter: Any) -> tuple[Any, tuple[int, ...]]:
            operands = []
            for a in node.args:
                x = emitter.wide_array(a.cls)
                held = x._replace(data=x.data.astype(held_dtype(str(x.data.dtype))))
                operands.append(emitter.operand(a, held))
            sizes, dtype = term_lowering.jax_sizes(info.sizes, emitter.env), held_dtype(info.dtype)
            return term_lowering.lower_node(node, operands, sizes, dtype, emitter.t.primitives)

        return cls(row, [a.cls for a in node.args], make)

    wide_classes = ClassRoute.gives

    def array(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        data, slots = emitter.wide_array(cls)
        return data.astype(np.dtype(emitter.t.graph.classes[cls].dtype)), slots

    def held(self, emitter: Any, cls: int) -> tuple[Any, tuple[int, ...]]:
        return self.make(emitter)
