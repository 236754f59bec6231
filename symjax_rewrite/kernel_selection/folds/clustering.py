"""Clusters of reductions that share pairwise terms, and the order in which folds compute them.

Reductions that share a pairwise term form a *cluster*. Either all of them become folds and the term
is never materialised, or the term is materialised and none becomes a fold. One fold computes the
reductions of a cluster that wait for the same earlier results and reduce in the same direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import (
    Needed,
    class_operands,
    cone,
    connected,
    is_computed_from,
    kind_of,
    node_of,
    postorder,
)
from symjax_rewrite.ir.sizes import Dim, product
from symjax_rewrite.ir.term import ADD, CONCAT, CONTRACT, MAP, NATIVE, SLICE, Ref
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds.pairwise_terms import (
    LEAST_DOT,
    Pair,
    PairwiseTile,
    elements,
    explore,
    is_elementwise,
    is_test_like,
    may_open,
    reads_twice,
)
from symjax_rewrite.kernel_selection.folds.reductions import (
    REDUCING,
    Form,
    Reduction,
    forms,
    over_pairs,
    reads,
    reduction_of,
    split_sum,
)
from symjax_rewrite.kernel_selection.folds.vanishing_gradients import vanishing, without
from symjax_rewrite.obstacles import Obstacle

_OPENED = {MAP, ADD, CONTRACT, SLICE, CONCAT, NATIVE}
_EXACT = {"max", "min"}  # independent of the order of reduction
_RANDOM = ("random_", "threefry", "rng_")


@dataclass(slots=True, eq=False)
class ClusterMember:
    """Reduction that a fold could compute: its pair of indices and the parts of its tile.

    space: the indices of the tile. form: its chosen form. level: number of folds that precede it.
    """

    reduction: Reduction
    pair: Pair
    tile: PairwiseTile
    space: tuple[int, ...]
    form: Form = ()
    level: int = 0

    @property
    def pairs(self) -> int:
        return self.count(self.space)

    def count(self, indices: Iterable[int]) -> int:
        """Return the number of points over some indices."""
        return prod(self.pair.t.number(self.reduction.sizes[i]) for i in indices)

    def explored(self) -> PairwiseTile | None:
        """Return the tile of the current pair, or None if it is too large."""
        return explore(self.pair, filter(self.pair.holds, self.reduction.args), self.reduction.keys)

    def makes_work(self) -> bool:
        """Return True if the tile is more than sums of products, which algebraic rules handle."""
        return self.reduction.kind not in ("sum", "at") or self.tile.nonlinear


@dataclass(slots=True)
class Cluster:
    """Reductions that share pairwise terms; `ids` names the indices they share.

    light: classes computed from index numbers and tests alone that some reduction reduces directly.
    seconds: predicted, of its terms as written and of the folds that replace them. by_size: True if
    it is refused for its price at named sizes. memory: a clause on the memory that it saves.
    declined: why another kernel may not compute its folds. arrays: classes that its folds read and
    give, which are in memory.
    """

    members: list[ClusterMember] = field(default_factory=list)
    light: set[int] = field(default_factory=set)
    ids: dict[tuple[int, int], int] = field(default_factory=dict)
    reason: str = ""
    seconds: tuple[float, float] | None = None
    by_size: bool = False
    memory: str = ""
    declined: str = ""
    arrays: frozenset[int] = frozenset()

    @property
    def pairs(self) -> int:
        return max(c.pairs for c in self.members)

    @property
    def where(self) -> str:
        """Return the user's line of its first reduction."""
        first = self.members[0]
        return first.pair.t.where(first.reduction.cls)

    def extent(self) -> Dim:
        """Return the number of pairs, as an expression in named sizes."""
        widest = max(self.members, key=lambda m: m.pairs)
        return product(widest.reduction.sizes[i] for i in widest.space)

    def classes(self) -> tuple[set[int], set[int]]:
        """Return the pairwise classes that tiles compute, and the classes that they read."""
        inner = {r.cls for m in self.members for r in m.tile.inner}
        return inner, {r.cls for m in self.members for r in m.tile.operands}

    def shared(self, c: ClusterMember) -> list[Ref]:
        """Return the pairwise references through which a member shares indices with others."""
        return [r for r, heavy in c.tile.inner.items() if heavy or r.cls in self.light]


class Scope(NamedTuple):
    """Limits and options of the search.

    least: minimum number of elements of a tile. single: include scores of one row, as of one
    decoder query. tables: tiles may look values up in tables and sum by key. loops: tiles may
    sum features in loops. sort_share: minimum ratio between the length of a sorted row and the
    number of places kept. cancels: sums may lose digits. rounds: sums may round
    multiples of products that the program rounds.
    """

    least: int
    single: bool
    tables: bool
    loops: bool = False
    sort_share: float = 0.0
    cancels: bool = False
    rounds: bool = False


def clusters(t: TermGraph, need: Needed, scope: Scope) -> list[Cluster]:
    """Find the clusters of a program, in program order."""
    gone = frozenset(vanishing(t.graph, need))
    need = without(t.graph, need, gone) if gone else need
    made: dict[int, ClusterMember] = {}  # found so far; a tile reads only earlier reductions
    terms = Pair(
        t, None, None, gone, made,
        tables=scope.tables, loops=scope.loops, cancels=scope.cancels,
        rounded={} if scope.rounds else None,
    )  # fmt: skip
    for cls in need.order:
        candidate = _candidate(terms, cls, scope)
        if candidate is not None:
            made[cls] = candidate
    passed = {x for c in made.values() for x in c.reduction.through}
    found = [c for cls, c in made.items() if cls not in passed]
    heavy = {k: c for k, c in enumerate(found) if c.tile.heavy()}
    group_of = connected((k, ("class", r.cls)) for k, c in heavy.items() for r in c.tile.heavy())
    groups: dict[Any, Cluster] = {}
    for k, c in heavy.items():
        groups.setdefault(group_of[k], Cluster()).members.append(c)
    out = [c for c in groups.values() if any(m.makes_work() for m in c.members)]
    for k, c in enumerate(found):
        if k not in heavy:
            _join(out, c)
    natives = [c for c in need.order if node_of(t.graph, c).op == NATIVE]
    draws = [c for c in natives if _name(t, c).startswith(_RANDOM)]
    random = cone(draws, lambda cls: need.users.get(cls, ()))
    for cluster in out:
        cluster.ids = _shared_indices(cluster)
        _align(cluster)
        cluster.reason = _refused(t, need, cluster, random)
    return out


def _join(found: list[Cluster], c: ClusterMember) -> None:
    """Add a reduction of tests alone to a cluster that computes the same tests."""
    mine = {r.cls for r in c.tile.inner}
    for cluster in found:
        if mine & cluster.classes()[0]:
            cluster.light |= mine
            cluster.members.append(c)
            return


def _candidate(terms: Pair, cls: int, scope: Scope) -> ClusterMember | None:
    t = terms.t
    if node_of(t.graph, cls).op not in REDUCING or kind_of(t.graph, cls) not in "fiub":
        return None
    found = reduction_of(t, cls)
    if found is None or not all(map(t.is_positive, found.sizes.values())):
        return None
    if not any(a.axes and node_of(t.graph, a.cls).op in _OPENED for a in found.args):
        return None
    keyed = found.kind == "keyed"
    has_names = not all(isinstance(s, int) for s in found.sizes.values())
    if has_names and found.kind in ("keyed", "top_k", "sorted"):
        return None

    def size(i: int) -> int:
        return t.number(found.sizes[i])

    if found.kind == "sorted" and found.places * scope.sort_share > size(found.bound[0]):
        return None
    if keyed and not scope.tables:
        return None
    plain: ClusterMember | None = None  # products among the values pair their features too
    opened = [a for a in found.args if keyed or may_open(node_of(t.graph, a.cls))]
    for column in sorted(found.bound, key=size, reverse=True):
        carried = {i for a in opened if column in a.axes for i in a.axes} - {column}
        if keyed:
            carried = carried.intersection(found.bound, *(k.axes for k in found.keys))
        for row in sorted(carried, key=lambda i: (i in found.bound, -size(i), i)):
            pair = terms.along(row, column)
            nested = over_pairs(t.graph, found, row, column)
            paired = None if nested is found else _paired(nested, pair, scope.least)
            if paired is None or paired.tile.has_dot or len(paired.tile.counts) > 1:
                paired = _paired(found, pair, scope.least)
            if paired is not None and paired.makes_work():
                return _along_storage(paired, scope.least)
            plain = plain or paired
    alone = _single(terms, found, scope.least) if scope.single and not keyed else None
    return alone if alone is not None and alone.makes_work() else plain or alone


def _along_storage(m: ClusterMember, least: int) -> ClusterMember:
    """Return a member, with rows and columns exchanged if its stored pairs lie that way.

    The exchange is free where both indices are reduced. Stored pairs are read along their rows.
    """
    row, column = m.pair.row, m.pair.column
    if row not in m.reduction.bound or m.reduction.kind == "keyed":
        return m
    along = across = 0
    for r in m.tile.whole:
        size = elements(m.pair.t, r.cls)
        if r.axes.index(row) < r.axes.index(column):
            along += size
        else:
            across += size
    if across <= along:
        return m
    exchanged = _paired(m.reduction, replace(m.pair, row=column, column=row), least)
    return exchanged if exchanged is not None and exchanged.makes_work() else m


def _single(terms: Pair, found: Reduction, least: int) -> ClusterMember | None:
    """Return a member for a reduction over scores of one row, such as one decoder query."""
    if len(found.bound) != 1 or found.kind == "at":  # one index is read where it is made
        return None
    t, (column,) = terms.t, found.bound
    if t.number(found.sizes[column]) < LEAST_DOT:
        return None  # components of a vector are written out
    spaces = [frozenset(a.axes) for a in found.args if column in a.axes]
    space = min(spaces, key=len, default=None)
    if space is None or not all(space <= s for s in spaces):
        return None
    paired = _paired(found, terms.along(None, column, space), 0)
    if paired is None or not paired.tile.has_dot:
        return None
    widest = max(max(elements(t, r.cls) for r in paired.tile.operands), paired.pairs)
    return paired if widest >= least else None


def _paired(found: Reduction, pair: Pair, least: int) -> ClusterMember | None:
    t = pair.t
    held = [a for a in found.args if pair.holds(a)]
    if not held or not all(map(pair.holds, found.keys)):
        return None
    space = tuple(sorted({i for a in (*held, *found.keys) for i in a.axes}))
    pairs = prod([t.number(found.sizes[i]) for i in space])
    if pairs < max(least, elements(t, found.cls)):
        return None
    if any(map(reads_twice, held)):
        return None
    if any(b not in space for b in found.bound):
        return None
    if not any(set(space) == set(a.axes) for a in held):
        return None  # the product is larger than its factors
    bounds = [pair.bounds(a) for a in held]
    if any(b.is_large or b.read > pairs for b in bounds):
        return None
    if not (found.keys or any(b.meets for b in bounds)):
        return None
    tile = explore(pair, held, found.keys)
    if tile is None and len(held) == 1 and not found.keys:
        pair.note_large(held[0])
    if tile is None or not _meets(found, pair, tile, space) or (found.kind == "at" and tile.looked):
        return None
    if found.kind == "keyed" and any(i not in space for a in found.args for i in a.axes):
        return None
    made = ClusterMember(found, pair, tile, space)
    if pair.single is None:
        of_row = [r for r in tile.operands if pair.row in r.axes]
    else:
        of_row = [r for r in tile.operands if pair.column not in r.axes]
    read = {r.cls for r in (*tile.whole, *[r for r in of_row if pair.column in r.axes])}
    if pairs < max((elements(t, cls) for cls in read), default=0):
        return None
    terms = pairs * max(tile.counts.values(), default=1)  # of the largest pairwise term
    if terms < max((elements(t, r.cls) for r in of_row), default=0):
        return None
    whole = [r for r in tile.whole if kind_of(t.graph, r.cls) == "f"]
    if not tile.has_dot and any(len(r.axes) == len(space) for r in whole):
        return None  # the value is already in memory
    if found.kind == "sum" and split_sum(pair, found) is None:
        return None
    tile.nonlinear |= len(held) > 1
    return made


def _meets(found: Reduction, pair: Pair, tile: PairwiseTile, space: tuple[int, ...]) -> bool:
    """Return True if rows and columns meet in the tile, in more than a small product.

    A product that is smaller than the tile and no larger than its operands is not computed again:
    in `sum(((x @ w)[:, None] - (x @ w)[None]) ** 2, 2)`, the points `x @ w`.
    """
    t, pairs = pair.t, prod(pair.t.number(found.sizes[i]) for i in space)
    read = max((elements(t, r.cls) for r in tile.operands), default=0)
    return tile.meets or any(elements(t, r.cls) >= min(pairs, read + 1) for r in tile.dots)


def _shared_indices(cluster: Cluster) -> dict[tuple[int, int], int]:
    """Return the number of the index at every (heavy class, slot), over the whole cluster."""
    links: Iterable[tuple[Any, Any]] = (
        (("index", k, i), (ref.cls, slot))
        for k, c in enumerate(cluster.members)
        for ref in cluster.shared(c)
        for slot, i in enumerate(ref.axes)
        if isinstance(i, int)
    )
    roots, number = connected(links), {}
    return {x: number.setdefault(r, len(number)) for x, r in roots.items() if x[0] != "index"}


def _align(cluster: Cluster) -> None:
    """Align sums by key, which have no rows, with the direction of another reduction.

    Without another reduction, keys are read in their stored order.
    """
    others = {direction(cluster, c)[:2] for c in cluster.members if c.reduction.kind != "keyed"}
    for c in cluster.members:
        if c.reduction.kind != "keyed":
            continue
        row, column, *_ = direction(cluster, c)
        as_it_is, exchanged = (row, column) in others, (column, row) in others
        if as_it_is == exchanged:
            axes = c.reduction.keys[0].axes
            order = [i for i in axes if i in (c.pair.row, c.pair.column)]
            exchanged = order == [c.pair.column, c.pair.row]
        if exchanged:
            c.pair = replace(c.pair, row=c.pair.column, column=c.pair.row, single=None)
            tile, nonlinear = c.explored(), c.tile.nonlinear
            assert tile is not None  # the size does not depend on the direction
            c.tile, tile.nonlinear = tile, nonlinear


def frame(cluster: Cluster, c: ClusterMember) -> dict[int, Any]:
    """Return the cluster's name of every index of a candidate's tile."""
    out: dict[int, Any] = {}
    for ref in cluster.shared(c):
        for slot, i in enumerate(ref.axes):
            if isinstance(i, int):
                out[i] = cluster.ids[ref.cls, slot]
    if len(set(out.values())) != len(out):  # read in both directions, so its names are not shared
        out = {}
    return {i: out.get(i, (c.reduction.cls, i)) for i in c.space}


def _name(t: TermGraph, cls: int) -> str:
    node = node_of(t.graph, cls)
    if node.op == MAP:
        return str(node.attr[0])
    e = t.maker_of(cls)
    return str(node.op) if e is None else e.name


def _refused(t: TermGraph, need: Needed, cluster: Cluster, random: set[int]) -> str:
    """Return the reason to refuse a cluster, or an empty string.

    random: classes that depend on random numbers.
    """
    inner = {r.cls for c in cluster.members for r in c.tile.heavy()}
    reduced = {c.reduction.cls for c in cluster.members}
    passed = {x for c in cluster.members for x in c.reduction.through}
    for cls in sorted(inner):
        if cls in need.outside:
            return Obstacle.READER("the pairwise term is itself a result")
        others = [u for u in need.users.get(cls, ()) if u not in inner | reduced | passed]
        if others:
            return Obstacle.READER(f"the pairwise term is also used by {_name(t, others[0])}")
    weights = {a.cls for c in cluster.members for a in c.reduction.args if not c.pair.holds(a)}
    if stored := inner & weights:
        kept = _name(t, min(stored))
        return Obstacle.READER(f"the pairwise term of {kept} is also read as a whole operand")
    for cls in passed:
        if cls in need.outside or any(u not in reduced | passed for u in need.users.get(cls, ())):
            return Obstacle.READER(
                f"another result of {_name(t, cls)} over the pairwise term is used"
            )
    if any(ref.cls in random for c in cluster.members for ref in c.tile.whole):
        return Obstacle.RANDOM("the pairwise term depends on random numbers")
    return _compared(t, need, cluster)


def _compared(t: TermGraph, need: Needed, cluster: Cluster) -> str:
    """Include in tiles the reductions they are compared with; return the reason if impossible.

    A term and its maximum computed by two kernels may differ by rounding. The maximum, and the
    count of elements equal to it, are therefore reduced in the kernel that compares, from tiles
    that hold whole rows.
    """
    reduced = [c.reduction.cls for c in cluster.members]
    compared = {x for c in cluster.members for x in c.tile.compared}
    if not any(is_computed_from(t.graph, x, reduced) for x in compared):
        return ""
    after = cone(reduced, lambda cls: need.users.get(cls, ()))
    jumps = compared & after
    if not jumps:
        return ""
    reason = f"{_name(t, min(jumps))} compares the pairwise term with its own reduction"
    inside = _inside(t, cluster, jumps)
    if inside is None:
        return reason
    for c in cluster.members:
        if not c.tile.compared & jumps:
            continue
        c.pair = replace(c.pair, inside=inside)
        tile = c.explored()
        if tile is None or len(tile.along) != 1 or c.reduction.kind == "at":
            return reason
        if any(r.cls in after and r.cls in inside for r in tile.operands):
            return reason
        tile.nonlinear = True
        c.tile = tile
    return ""


def _inside(t: TermGraph, cluster: Cluster, jumps: set[int]) -> frozenset[int] | None:
    """Return the reductions behind discontinuities, and the row algebra between them.

    These are the reductions that discontinuous terms compare with, and those that count the terms.
    """
    reduced = {c.reduction.cls: c for c in cluster.members}
    pairwise, operands = cluster.classes()
    counts = {
        cls
        for cls, c in reduced.items()
        if c.tile.compared & jumps and all(is_test_like(t.graph, a.cls) for a in c.reduction.args)
    }
    limits = {a.cls for x in jumps for a in node_of(t.graph, x).args} - pairwise
    rows = operands - pairwise
    compared = [_between(t, cls, reduced.keys() | pairwise) for cls in limits]
    if not all(compared):
        return None
    found = set().union(*compared, *(_between(t, cls, counts) for cls in rows)) - pairwise
    for e in (reduced[cls].reduction for cls in found & reduced.keys()):
        if len(e.bound) != 1 or (e.kind not in _EXACT and e.cls not in counts):
            return None
    return frozenset(found)


def _between(t: TermGraph, cls: int, roots: Set[int]) -> set[int]:
    """Return a class and the classes below it that are elementwise in `roots`, with the roots."""
    first = min(roots, default=cls + 1)

    def operands(c: int) -> list[int]:
        node = node_of(t.graph, c)
        return [a.cls for a in node.args] if c >= first and is_elementwise(node) else []

    found: set[int] = set()
    for c in postorder([cls], operands):
        if c in roots or not found.isdisjoint(operands(c)):
            found.add(c)
    return found


def schedule(t: TermGraph, need: Needed, taken: list[Cluster]) -> dict[int, int]:
    """Choose the form of every candidate; return the number of folds that precede each class.

    A result that no fold waits for is scheduled as late as a fold over the same pairs: the
    gradients by keys and by values share one fold.
    """
    least: dict[int, int] = {}
    members = [m for c in taken for m in c.members]
    later = cone([m.reduction.cls for m in members], lambda c: need.users.get(c, ()))
    order = [c for c in need.order if c in later]  # no fold precedes any other class
    ways = {m.reduction.cls: (m, _ways(m)) for m in members}
    read = (c for _, found in ways.values() for way in found for c in (*way.reads, *way.rows))
    before_folds = cone([*read, *ways], class_operands(t.graph))
    read_by_folds = [c for c in order if c in before_folds]
    _levels(t, need, read_by_folds, ways, least)
    for cluster in taken:
        alike: dict[tuple, list[ClusterMember]] = {}
        for m in cluster.members:
            if m.reduction.kind != "at":
                alike.setdefault(direction(cluster, m), []).append(m)
        for group in alike.values():
            for level, later in pairwise(sorted({m.level for m in group})):
                early = {m.reduction.cls: later for m in group if m.level == level}
                before = {m: m.level for m in members}
                _levels(t, need, read_by_folds, ways, {**least, **early})
                if all(m.level == old for m, old in before.items() if m.reduction.cls not in early):
                    least |= early
                else:
                    _levels(t, need, read_by_folds, ways, least)
    return _levels(t, need, order, ways, least)


def direction(cluster: Cluster, m: ClusterMember) -> tuple:
    """Return a key equal for members that reduce the same pairs in the same direction."""
    ids = frame(cluster, m)
    row, column = ids.get(m.pair.row), ids[m.pair.column]
    along = frozenset(ids[i] for i in m.tile.along)
    return row, column, frozenset(ids.values()) - {row, column}, along


def _ways(m: ClusterMember) -> list[_Way]:
    """Return the forms of a candidate whose reads are known."""
    pair, reduction = m.pair, m.reduction
    found = [(form, reads(pair, reduction, m.tile, form)) for form in forms(pair, reduction)]
    return [
        _Way(form, [r.cls for r in read], [r.cls for addend in form for r in addend.rows()])
        for form, read in found
        if read is not None
    ]


class _Way(NamedTuple):
    """A form of a candidate, with the classes that it reads, and those of its rows."""

    form: Form
    reads: list[int]
    rows: list[int]


def _levels(
    t: TermGraph,
    need: Needed,
    order: list[int],
    ways: dict[int, tuple[ClusterMember, list[_Way]]],
    least: dict[int, int],
) -> dict[int, int]:
    """Return the earliest level of every candidate, none before the `least` of its class.

    order: the classes that are or depend on candidates; all others are of level 0. ways: by class,
    its candidate and the forms of this.
    """
    depth = dict.fromkeys(need.order, 0)

    def depth_of(cls: int) -> int:
        if cls not in depth:  # a sum computed in the tile
            depth[cls] = max((depth_of(a.cls) for a in node_of(t.graph, cls).args), default=0)
        return depth[cls]

    for cls in order:
        if cls not in ways:
            depth[cls] = max([depth[a.cls] for a in node_of(t.graph, cls).args], default=0)
            continue
        m, choices = ways[cls]
        levels = [max([least.get(cls, 0), *map(depth_of, way.reads)]) for way in choices]
        after = [
            max([level + 1, *map(depth_of, way.rows)])
            for level, way in zip(levels, choices, strict=True)
        ]
        best = levels.index(min(levels))
        m.level, depth[cls], m.form = levels[best], after[best], choices[best].form
    return depth
