"""Keys of clusters: of clusters that are equal up to their inputs, one is decided for all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.term import CONST
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.clustering import Cluster
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    elements,
    is_elementwise,
    is_test_like,
)


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
    g, reduced = t.graph, sorted([m.reduction.cls for m in cluster.members])
    through = {c for m in cluster.members for c in m.reduction.through}
    most = max(elements(t, c) for c in reduced)

    def is_row(c: int, rows: set[int]) -> bool:
        known = [a.cls in rows or a.cls < reduced[0] for a in node_of(g, c).args]
        return all(known) and is_elementwise(node_of(g, c)) and elements(t, c) <= most

    rows, queue = set(reduced), [*reduced]
    for c in queue:
        later = [u for u in need.users.get(c, ()) if u not in rows and is_row(u, rows)]
        rows.update(later)
        queue += later
    inside = sorted({*cluster.classes()[0], *through, *rows})
    number = {c: n for n, c in enumerate(inside)}
    inputs: dict[int, int] = {}

    def place(c: int) -> Hashable:
        if c in number:
            return number[c]
        if node_of(g, c).op == CONST or is_test_like(g, c):
            return ("known", c)
        of, node = g.classes[c], node_of(g, c)
        return (inputs.setdefault(c, -len(inputs)), of.dtype, tuple(of.sizes), node.op, node.bound)

    def row(c: int) -> Hashable:
        of, node = g.classes[c], node_of(g, c)
        args = [(place(a.cls), a.axes) for a in node.args]
        users = sorted([number.get(u, -1) for u in need.users.get(c, ())])
        own = node.op, node.attr, tuple(node.bound), tuple(of.sizes), of.dtype
        return (*own, tuple(args), tuple(users), c in need.outside)

    members = [
        (number[m.reduction.cls], m.reduction.kind, m.pair.row, m.pair.column, m.space)
        for m in cluster.members
    ]
    return tuple(map(row, inside)), tuple(members)
