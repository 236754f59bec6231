"""Keys of clusters: of clusters that are equal up to their inputs, one is decided for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.term import ADD, CONST, UNORDERED
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.clustering import Cluster
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    elements,
    is_elementwise,
    is_test_like,
)
from symjax_rewrite.rewriting.region_keys import NULLARY


def in_equal_groups(t: TermGraph, need: Needed, found: Iterable[Cluster]) -> list[list[Cluster]]:
    """Return the clusters in groups of equal ones, as of the layers of a model."""
    groups: dict[Hashable, list[Cluster]] = {}
    for cluster in found:
        groups.setdefault(_key(t, need, cluster), []).append(cluster)
    return [*groups.values()]


def _key(t: TermGraph, need: Needed, cluster: Cluster) -> Hashable:
    """Return the content of a cluster and of the row algebra that reads it.

    Its inputs count by size and dtype, masks and numbers by their values.
    """
    g, (number, fixed) = t.graph, _numbered(t, need, cluster)
    inputs: dict[int, int] = {}

    def place(c: int) -> Hashable:
        if c in number:
            return number[c]
        if c in fixed or node_of(g, c).op == CONST or is_test_like(g, c):
            return ("known", c)
        of, node = g.classes[c], node_of(g, c)
        return (inputs.setdefault(c, -len(inputs)), of.dtype, tuple(of.sizes), node.op, node.bound)

    def row(c: int) -> Hashable:
        of, node, users = g.classes[c], node_of(g, c), need.users.get(c, ())
        attr, args = node.attr, [(place(a.cls), a.axes) for a in node.args]
        if node.op == ADD:
            attr, args = None, zip(args, attr, strict=True)
        # Operands of unordered terms are in the order of their classes, as they were made.
        args = frozenset(Counter(args).items()) if node.op in UNORDERED else tuple(args)
        inner = frozenset([number[u] for u in users if u in number])
        is_read = c in need.outside or len(inner) < len(users)
        own = node.op, attr, node.bound, of.sizes, of.dtype
        return (*own, args, inner, is_read)

    members = [
        (number[m.reduction.cls], m.reduction.kind, m.pair.row, m.pair.column, m.space)
        for m in cluster.members
    ]
    return tuple(map(row, number)), tuple(members)


def _numbered(t: TermGraph, need: Needed, cluster: Cluster) -> tuple[dict[int, int], set[int]]:
    """Number the classes of a cluster and of its row algebra; return those of numbers alone too.

    The layers of a model share a mask that is computed from numbers alone.
    """
    g, reduced = t.graph, sorted([m.reduction.cls for m in cluster.members])
    through = {c for m in cluster.members for c in m.reduction.through}
    most = max(elements(t, c) for c in reduced)

    def is_row(c: int, rows: set[int]) -> bool:
        read = [a.cls for a in node_of(g, c).args]
        given = [a in rows or a < reduced[0] or node_of(g, a).op in NULLARY for a in read]
        return all(given) and is_elementwise(node_of(g, c)) and elements(t, c) <= most

    rows, queue = set(reduced), [*reduced]
    for c in queue:
        later = [u for u in need.users.get(c, ()) if u not in rows and is_row(u, rows)]
        rows.update(later)
        queue += later
    fixed: set[int] = set()
    number: dict[int, int] = {}
    for c in sorted({*cluster.classes()[0], *through, *rows}):
        read = [a.cls for a in node_of(g, c).args]
        if c not in rows and all(a in fixed or node_of(g, a).op in NULLARY for a in read):
            fixed.add(c)
        else:
            number[c] = len(number)
    return number, fixed
