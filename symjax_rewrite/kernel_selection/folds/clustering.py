"""Clusters of reductions that share pairwise terms, and the order in which folds compute them.

Reductions that share a pairwise term form a *cluster*. Either all of them become folds and the term
is never materialised, or the term is materialised and none becomes a fold. One fold computes the
reductions of a cluster that wait for the same earlier results and reduce in the same direction.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import Needed, node_of
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import product
from symjax_rewrite.ir.term import (
    ADD,
    CONCAT,
    CONST,
    CONTRACT,
    LEAF,
    MAP,
    NATIVE,
    REDUCE,
    SLICE,
    Ref,
)
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    LEAST_DOT,
    Pair,
    PairwiseTile,
    elements,
    explore,
    is_elementwise,
    is_test_like,
)
from symjax_rewrite.kernel_selection.folds.reduction_forms import Form, forms, reads, split_sum
from symjax_rewrite.kernel_selection.folds.reductions import Exit, exit_of
from symjax_rewrite.kernel_selection.folds.vanishing_gradients import vanishing, without

_EXACT = {"max", "min"}  # independent of the order of reduction
_RANDOM = ("random_", "threefry", "rng_")


@dataclass(slots=True, eq=False)
class ClusterMember:
    """Reduction that a fold could compute: its pair of indices and the parts of its tile.

    space: the indices of the tile. form: its chosen form. level: number of folds that precede it.
    """

    exit: Exit
    pair: Pair
    tile: PairwiseTile
    space: tuple[int, ...]
    form: Form = ()
    level: int = 0

    @property
    def pairs(self) -> int:
        """Return the number of elements of the tile."""
        return prod(int(self.exit.sizes[i]) for i in self.space)  # pyright: ignore[reportArgumentType]


@dataclass(slots=True)
class Cluster:
    """Reductions that share pairwise terms; `ids` names the indices they share.

    light: classes computed from index numbers and tests alone that some reduction reduces directly.
    seconds: predicted, of its terms as written and of the folds that replace them.
    """

    members: list[ClusterMember] = field(default_factory=list)
    light: set[int] = field(default_factory=set)
    ids: dict[tuple[int, int], int] = field(default_factory=dict)
    reason: str = ""
    seconds: tuple[float, float] | None = None

    @property
    def pairs(self) -> int:
        """Return the number of elements of the largest tile."""
        return max(c.pairs for c in self.members)

    def shared(self, c: ClusterMember) -> list[Ref]:
        """Return the pairwise references through which a member shares indices with others."""
        return [r for r, heavy in c.tile.inner.items() if heavy or r.cls in self.light]


class Scope(NamedTuple):
    """Limits and options of the search.

    least: minimum number of elements of a tile. single: include scores of one row, as of one
    decoder query. tables: tiles may look values up in tables and sum by key. sort_share: minimum
    ratio between the length of a sorted row and the number of places kept.
    """

    least: int
    single: bool
    tables: bool
    sort_share: float = 0.0


def _sorted_size(found: Exit) -> int:
    """Return the length of the row whose sorted places a reduction keeps."""
    return int(found.sizes[found.bound[0]])  # pyright: ignore[reportArgumentType]


def clusters(t: TermGraph, need: Needed, scope: Scope) -> list[Cluster]:
    """Find the clusters of a program, in program order.

    Args:
        t: the lifted program.
        need: its live set.
        scope: limits and options of the search.
    """
    gone = frozenset(vanishing(t.graph, need))
    need = without(t.graph, need, gone) if gone else need
    found: list[ClusterMember] = []
    made: set[int] = set()  # reductions found so far; a tile reads only earlier ones
    for cls in need.order:
        if _is_less(t, cls, 0 if scope.single else scope.least):
            continue
        candidate = _candidate(t, cls, scope, gone, made)
        if candidate is not None:
            found.append(candidate)
            made.add(cls)
    passed = {x for c in found for x in c.exit.through}
    found = [c for c in found if c.exit.cls not in passed]
    if not found:
        return []
    bare = [c for c in found if not any(c.tile.inner.values())]
    found = [c for c in found if any(c.tile.inner.values())]
    parent = list(range(len(found)))

    def root(k: int) -> int:
        while parent[k] != k:
            k = parent[k]
        return k

    first: dict[int, int] = {}
    for k, c in enumerate(found):
        for ref in c.tile.heavy():
            other = root(first.setdefault(ref.cls, k))
            parent[root(k)] = other
    groups: dict[int, Cluster] = {}
    for k, c in enumerate(found):
        groups.setdefault(root(k), Cluster()).members.append(c)
    out = [c for c in groups.values() if any(_makes_work(m) for m in c.members)]
    for c in bare:
        _join(out, c)
    reaches = _reaches(t, need, out)
    for number, cluster in enumerate(out):
        cluster.ids = _shared_indices(cluster)
        _turn(cluster)
        cluster.reason = _refused(t, need, cluster, reaches, number)
    return out


def _join(found: list[Cluster], c: ClusterMember) -> None:
    """Add a reduction of tests alone to a cluster that computes the same tests."""
    mine = {r.cls for r in c.tile.inner}
    for cluster in found:
        if any(r.cls in mine for m in cluster.members for r in m.tile.inner):
            cluster.light |= mine
            cluster.members.append(c)
            return


def _makes_work(c: ClusterMember) -> bool:
    """Return True if a tile is more than sums of products, which the algebraic rules handle."""
    return c.exit.kind not in ("sum", "at") or c.tile.nonlinear


def _is_less(t: TermGraph, cls: int, least: int) -> bool:
    """Return True if a class is no reduction, or has fewer elements than `least`."""
    node = node_of(t.graph, cls)
    if node.op not in (REDUCE, CONTRACT) or not node.bound:
        return node.op in (LEAF, CONST, MAP, ADD)
    space = product((*t.graph.classes[cls].sizes, *node.bound))
    return isinstance(space, int) and space < least


def _candidate(
    t: TermGraph,
    cls: int,
    scope: Scope,
    gone: frozenset[int],
    made: set[int],
) -> ClusterMember | None:
    info = t.graph.classes[cls]
    if dtype_kind(info.dtype) not in "fiub":
        return None
    found = exit_of(t, cls)
    if found is None or not all(isinstance(s, int) and s > 0 for s in found.sizes.values()):
        return None
    if not any(_may_open(t, a) for a in found.args):
        return None
    size: Callable[[int], int] = lambda i: found.sizes[i]  # type: ignore[assignment,return-value] # noqa: E731
    plain: ClusterMember | None = None  # products among the values pair their features too
    if found.kind == "sorted" and found.places * scope.sort_share > _sorted_size(found):
        return None
    if found.kind == "keyed" and not scope.tables:
        return None
    for column in sorted(found.bound, key=size, reverse=True):
        carried = {i for a in found.args if column in a.axes for i in a.axes} - {column}
        if found.kind == "keyed":
            carried = carried.intersection(found.bound, *(k.axes for k in found.keys))
        rows = sorted(carried, key=lambda i: (i in found.bound, -size(i), i))
        for row in rows:
            pair = Pair(t, row, column, gone, made, tables=scope.tables)
            paired = _paired(found, pair, scope.least)
            if paired is not None and _makes_work(paired):
                return paired
            plain = plain or paired
    may_be_alone = scope.single and found.kind != "keyed"
    alone = _single(t, found, scope.least, gone, made) if may_be_alone else None
    return alone if alone is not None and _makes_work(alone) else plain or alone


def _single(
    t: TermGraph, found: Exit, least: int, gone: frozenset[int], made: set[int]
) -> ClusterMember | None:
    """Return a member for a reduction over scores of one row, such as one decoder query."""
    if len(found.bound) != 1 or found.kind == "at":  # one index is read where it is made
        return None
    (column,) = found.bound
    if int(found.sizes[column]) < LEAST_DOT:  # pyright: ignore[reportArgumentType]
        return None  # components of a vector are written out
    spaces = [frozenset(a.axes) for a in found.args if column in a.axes]
    space = min(spaces, key=len, default=None)
    if space is None or not all(space <= s for s in spaces):
        return None
    paired = _paired(found, Pair(t, None, column, gone, made, space), 0)
    if paired is None or not paired.tile.dots:
        return None
    widest = max(max(elements(t, r.cls) for r in paired.tile.operands), paired.pairs)
    return paired if widest >= least else None


def _may_open(t: TermGraph, ref: Ref) -> bool:
    node = node_of(t.graph, ref.cls)
    return bool(ref.axes) and node.op in (MAP, ADD, CONTRACT, SLICE, CONCAT, NATIVE)


def _paired(found: Exit, pair: Pair, least: int) -> ClusterMember | None:
    t = pair.t
    held = [a for a in found.args if pair.holds(a)]
    if not all(map(pair.holds, found.keys)):
        return None
    space = tuple(sorted({i for a in (*held, *found.keys) for i in a.axes}))
    if prod(int(found.sizes[i]) for i in space) < least:  # pyright: ignore[reportArgumentType]
        return None
    if not held or any(len(set(a.axes)) != len(a.axes) for a in held):
        return None
    if any(b not in space for b in found.bound):
        return None
    if not any(set(space) == set(a.axes) for a in held):
        return None  # the product is larger than its factors
    tile = explore(pair, held, found.keys)
    if tile is None or not tile.meets or (found.kind == "at" and tile.looked):
        return None
    if found.kind == "keyed" and any(i not in space for a in found.args for i in a.axes):
        return None
    made = ClusterMember(found, pair, tile, space)
    read = [*tile.whole, *(r for r in tile.operands if pair.is_of_row(r))]
    if made.pairs < max(elements(t, cls) for cls in (found.cls, *(r.cls for r in read))):
        return None
    whole = [r for r in tile.whole if dtype_kind(t.graph.classes[r.cls].dtype) == "f"]
    if not tile.dots and any(len(r.axes) == len(space) for r in whole):
        return None  # the value is already in memory
    if found.kind == "sum" and split_sum(pair, found) is None:
        return None
    tile.nonlinear |= len(held) > 1
    return made


def _shared_indices(cluster: Cluster) -> dict[tuple[int, int], int]:
    """Return the number of the index at every (heavy class, slot), over the whole cluster."""
    parent: dict[Any, Any] = {}

    def root(x: Any) -> Any:
        parent.setdefault(x, x)
        while parent[x] != x:
            x = parent[x]
        return x

    for k, c in enumerate(cluster.members):
        for ref in cluster.shared(c):
            for slot, i in enumerate(ref.axes):
                if isinstance(i, int):
                    parent[root((ref.cls, slot))] = root(("index", k, i))
    number: dict[Any, int] = {}
    return {x: number.setdefault(root(x), len(number)) for x in parent if not isinstance(x[0], str)}


def _turn(cluster: Cluster) -> None:
    """Align sums by key, which have no rows, with the direction of another reduction.

    Without another reduction, keys are read in their stored order.
    """
    others = {direction(cluster, c)[:2] for c in cluster.members if c.exit.kind != "keyed"}
    for c in cluster.members:
        if c.exit.kind != "keyed":
            continue
        row, column, *_ = direction(cluster, c)
        as_it_is, turned = (row, column) in others, (column, row) in others
        axes = c.exit.keys[0].axes
        if as_it_is == turned:
            order = [i for i in axes if i in (c.pair.row, c.pair.column)]
            turned = order == [c.pair.column, c.pair.row]
        if turned:
            c.pair = c.pair.of(c.pair.column, c.pair.row, None, c.pair.inside)
            tile = explore(c.pair, [a for a in c.exit.args if c.pair.holds(a)], c.exit.keys)
            assert tile is not None  # the size does not depend on the direction
            tile.nonlinear = c.tile.nonlinear
            c.tile = tile


def frame(cluster: Cluster, c: ClusterMember) -> dict[int, Any]:
    """Return the cluster's name of every index of a candidate's tile."""
    out: dict[int, Any] = {}
    for ref in cluster.shared(c):
        for slot, i in enumerate(ref.axes):
            if isinstance(i, int):
                out[i] = cluster.ids[ref.cls, slot]
    if len(set(out.values())) != len(out):  # read in both directions, so its names are not shared
        out = {}
    return {i: out.get(i, (c.exit.cls, i)) for i in c.space}


def _reaches(t: TermGraph, need: Needed, found: list[Cluster]) -> dict[int, int]:
    """Return for every class, as bits, the clusters it depends on; -1 marks random numbers."""
    own: dict[int, int] = {}
    for number, cluster in enumerate(found):
        for c in cluster.members:
            own[c.exit.cls] = own.get(c.exit.cls, 0) | 2 << number
    out: dict[int, int] = {}
    for cls in need.order:
        node = node_of(t.graph, cls)
        bits = own.get(cls, 0)
        for a in node.args:
            bits |= out.get(a.cls, 0)
        if node.op == NATIVE and _name(t, cls).startswith(_RANDOM):
            bits |= 1
        out[cls] = bits
    return out


def _name(t: TermGraph, cls: int) -> str:
    """Return the name of a class in a reason."""
    node = node_of(t.graph, cls)
    if node.op == MAP:
        return str(node.attr[0])
    if cls in t.made_by:
        return t.program.equations[t.made_by[cls][0]].name
    return str(node.op)


def _refused(
    t: TermGraph, need: Needed, cluster: Cluster, reaches: dict[int, int], number: int
) -> str:
    """Return the reason to refuse a cluster, or an empty string."""
    inner = {r.cls for c in cluster.members for r in c.tile.heavy()}
    exits = {c.exit.cls for c in cluster.members}
    passed = {x for c in cluster.members for x in c.exit.through}
    for cls in sorted(inner):
        if cls in need.outside:
            return "the pairwise term is itself a result"
        allowed = inner | exits | passed
        others = [u for u in need.users.get(cls, ()) if u not in allowed]
        if others:
            return f"the pairwise term is also used by {_name(t, others[0])}"
    for cls in passed:
        if cls in need.outside or any(u not in exits | passed for u in need.users.get(cls, ())):
            return f"another result of {_name(t, cls)} over the pairwise term is used"
    for c in cluster.members:
        for ref in c.tile.whole:
            if reaches[ref.cls] & 1:
                return "the pairwise term depends on random numbers"
    return _compared(t, cluster, lambda cls: bool(reaches[cls] & 2 << number))


def _compared(t: TermGraph, cluster: Cluster, reaches: Callable[[int], bool]) -> str:
    """Include in tiles the reductions they are compared with; return the reason if impossible.

    A term and its maximum computed by two kernels may differ by rounding. The maximum, and the
    count of elements equal to it, are therefore reduced in the kernel that compares, from tiles
    that hold whole rows.
    """
    jumps = {x for c in cluster.members for x in c.tile.compared if reaches(x)}
    if not jumps:
        return ""
    name = _name(t, min(jumps))
    reason = f"{name} compares the pairwise term with its own reduction"
    inside = _inside(t, cluster, jumps)
    if inside is None:
        return reason
    for c in cluster.members:
        if not c.tile.compared & jumps:
            continue
        c.pair = c.pair.computing(inside)
        tile = explore(c.pair, [a for a in c.exit.args if c.pair.holds(a)], c.exit.keys)
        if tile is None or len(tile.along) != 1 or c.exit.kind == "at":
            return reason
        if any(reaches(r.cls) and r.cls in inside for r in tile.operands):
            return reason
        tile.nonlinear = True
        c.tile = tile
    return ""


def _inside(t: TermGraph, cluster: Cluster, jumps: set[int]) -> frozenset[int] | None:
    """Return the reductions behind discontinuities, and the row algebra between them.

    These are the reductions that discontinuous terms compare with, and those that count the terms.
    """
    exits = {c.exit.cls: c for c in cluster.members}
    pairwise = {r.cls for c in cluster.members for r in c.tile.inner}
    counts = {
        cls
        for cls, c in exits.items()
        if c.tile.compared & jumps and all(is_test_like(t.graph, a.cls) for a in c.exit.args)
    }
    limits = {a.cls for x in jumps for a in node_of(t.graph, x).args} - pairwise
    rows = {r.cls for c in cluster.members for r in c.tile.operands} - pairwise
    compared = [_between(t, cls, exits.keys() | pairwise) for cls in limits]
    if not all(compared):
        return None
    found = set().union(*compared, *(_between(t, cls, counts) for cls in rows)) - pairwise
    for e in (exits[cls].exit for cls in found & exits.keys()):
        if len(e.bound) != 1 or (e.kind not in _EXACT and e.cls not in counts):
            return None
    return frozenset(found)


def _between(t: TermGraph, cls: int, roots: Set[int]) -> set[int]:
    """Return a class and the classes below it that are elementwise in `roots`, with the roots."""
    found: dict[int, bool] = {}
    first = min(roots, default=cls + 1)

    def leads(cls: int) -> bool:
        if cls < first:
            return False
        if cls not in found:
            node = node_of(t.graph, cls)
            below = [leads(a.cls) for a in node.args] if is_elementwise(node) else []
            found[cls] = cls in roots or any(below)
        return found[cls]

    leads(cls)
    return {cls for cls, holds in found.items() if holds}


def schedule(t: TermGraph, need: Needed, taken: list[Cluster]) -> dict[int, int]:
    """Choose the form of every candidate; return the number of folds that precede each class.

    A result that no fold waits for is scheduled as late as a fold over the same pairs: the
    gradients by keys and by values share one fold.
    """
    least: dict[int, int] = {}
    depth = _levels(t, need, taken, least)
    for cluster in taken:
        alike: dict[tuple, list[ClusterMember]] = {}
        for m in cluster.members:
            if m.exit.kind != "at":
                alike.setdefault(direction(cluster, m), []).append(m)
        for group in alike.values():
            for level, later in pairwise(sorted({m.level for m in group})):
                early = {m.exit.cls: later for m in group if m.level == level}
                before = {m: m.level for c in taken for m in c.members}
                depth = _levels(t, need, taken, {**least, **early})
                if all(m.level == old for m, old in before.items() if m.exit.cls not in early):
                    least |= early
                else:
                    depth = _levels(t, need, taken, least)
    return depth


def direction(cluster: Cluster, m: ClusterMember) -> tuple:
    """Return a key equal for members that reduce the same pairs in the same direction."""
    ids = frame(cluster, m)
    row, column = ids.get(m.pair.row), ids[m.pair.column]
    along = frozenset(ids[i] for i in m.tile.along)
    return row, column, frozenset(ids.values()) - {row, column}, along


def _levels(
    t: TermGraph, need: Needed, taken: list[Cluster], least: dict[int, int]
) -> dict[int, int]:
    """Return the earliest level of every candidate, none before the `least` of its class."""
    members = {m.exit.cls: m for cluster in taken for m in cluster.members}
    depth: dict[int, int] = {}

    def depth_of(cls: int) -> int:
        found = depth.get(cls)
        if found is None:  # a sum computed in the tile
            found = max((depth_of(a.cls) for a in node_of(t.graph, cls).args), default=0)
            depth[cls] = found
        return found

    for cls in need.order:
        m = members.get(cls)
        if m is None:
            depth[cls] = max((depth[a.cls] for a in node_of(t.graph, cls).args), default=0)
            continue
        best: tuple[int, int, Form] | None = None
        for form in forms(m.pair, m.exit):
            read = reads(m.pair, form)
            if read is None:
                continue
            level = max((depth_of(r.cls) for r in read), default=0)
            level = max(level, least.get(cls, 0))
            rows = [depth_of(r.cls) for piece in form for r in piece.rows()]
            if best is None or level < best[0]:
                best = (level, max([level + 1, *rows]), form)
        assert best is not None  # the written form always exists
        m.level, depth[cls], m.form = best
    return depth
