"""Reductions of pairwise terms.

A reduction over columns (or rows, with the roles exchanged), a sum by key over both, or the
selection of one column for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import CONTRACT, IOTA, MAP, NATIVE, REDUCE, SLICE, TAKE, Node, Ref, over
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.kernel_selection.folds import gather_patterns

_MONOIDS = {"max": "max", "min": "min", "and": "all", "or": "any"}


class ReadPart(NamedTuple):
    """Slice of a sorted row: `start + stride·i` at index `axis`, or a single index."""

    start: int
    stride: int
    axis: int | None


@dataclass(slots=True)
class Exit:
    """Class that reduces terms or selects from one, over its own indices.

    kind: `sum`, `max`, `min`, `any`, `all`, `argmax`, `argmin`, `top_k`, `sorted`, `at` or `keyed`.
    args: the reduced terms (of a sum: the factors of its summand). bound: indices reduced over.
    choice: the element that a gather selects. through: classes between the args and this class that
    it alone reads: a sort of which only `part` is read, a sum that is summed further. keys: of a
    sum by key, the integers that give the indices `along` of the result. clips: True if keys out of
    range are clipped.
    """

    cls: int
    kind: str
    args: tuple[Ref, ...]
    bound: tuple[int, ...]
    sizes: dict[int, Any]
    choice: gather_patterns.Choice | None = None
    places: int = 0  # k of a top-k, or number of sorted entries
    output: int = 0  # of a top-k or a sort: 0 for values, 1 for indices
    through: tuple[int, ...] = ()
    part: ReadPart | None = None
    keys: tuple[Ref, ...] = ()
    along: tuple[int, ...] = ()
    clips: bool = False

    def reads(self) -> tuple[Ref, ...]:
        """Return the references it is computed from."""
        return (*self.args, *self.keys)


def exit_of(t: TermGraph, cls: int) -> Exit | None:
    """Return the class as a reduction, or None."""
    g = t.graph
    node = node_of(g, cls)
    if node.op == NATIVE:
        return _native_exit(t, cls, node)
    if node.op == SLICE:
        return _sorted_exit(t, cls, node)
    if node.op == CONTRACT and not node.bound:
        return _diagonal(g, cls, node)
    if not node.bound or node.op not in (REDUCE, CONTRACT, TAKE):
        return None
    sizes = dict(enumerate((*g.classes[cls].sizes, *node.bound)))
    bound = tuple(range(node.out, node.out + len(node.bound)))
    if node.op == TAKE:
        found = gather_patterns.choice(node, node.bound[0])
        return found and Exit(cls, "at", (found.table,), bound, sizes, choice=found)
    if node.op == CONTRACT:
        return _keyed_product(t, cls, node, sizes) or Exit(cls, "sum", node.args, bound, sizes)
    kind = _MONOIDS.get(str(node.attr))
    dtype = g.classes[cls].dtype
    if kind is None or (kind in ("any", "all") and dtype != "bool"):
        return None
    return Exit(cls, kind, node.args, bound, sizes)


def _diagonal(g: EGraph, cls: int, node: Node) -> Exit | None:
    """Return `x[i, i]` as the selection of column i for row i."""
    axes = list(node.args[0].axes)
    twice = [i for i in set(axes) if axes.count(i) == 2]
    if len(node.args) != 1 or len(axes) != len(set(axes)) + 1 or not twice:
        return None
    size = g.classes[cls].sizes[twice[0]]
    axes[len(axes) - 1 - axes[::-1].index(twice[0])] = node.out
    place = g.add(IOTA, None, (), (size,), (), "int32")
    table = Ref(node.args[0].cls, tuple(axes))
    chosen = gather_patterns.Choice(
        table, node.out, size, Ref(place.cls, (twice[0],)), "clip", None
    )
    sizes = dict(enumerate((*g.classes[cls].sizes, size)))
    return Exit(cls, "at", (table,), (node.out,), sizes, choice=chosen)


def _keyed_product(t: TermGraph, cls: int, node: Node, sizes: dict[int, Dim]) -> Exit | None:
    """Return `Σ [key[i, j] = n]·x[i, j, ..]` as a sum by key."""
    for k, a in enumerate(node.args):
        found = gather_patterns.one_hot(t, a)
        rest = node.args[:k] + node.args[k + 1 :]
        if found is None or found[1] >= node.out or not rest:
            continue
        key, along = found
        if sum(i >= node.out for i in key.axes) > 1 and all(along not in r.axes for r in rest):
            return _by_key(t, cls, rest, sizes, ((along,), (key,), False))
    return None


def _by_key(
    t: TermGraph,
    cls: int,
    args: tuple[Ref, ...],
    sizes: dict[int, Dim],
    keyed: tuple[tuple[int, ...], tuple[Ref, ...], bool],
) -> Exit:
    """Return a sum by key; a summand that is itself a sum is merged into it."""
    along, keys, clips = keyed
    through: tuple[int, ...] = ()
    while len(args) == 1 and (inner := _summed(t.graph, args[0], sizes)) is not None:
        args, sizes, passed = inner
        through += passed
    bound = tuple(range(len(t.graph.classes[cls].sizes), len(sizes)))
    return Exit(cls, "keyed", args, bound, sizes, None, 0, 0, through, None, keys, along, clips)


def _summed(
    g: EGraph, ref: Ref, sizes: dict[int, Any]
) -> tuple[tuple[Ref, ...], dict[int, Dim], tuple[int, ...]] | None:
    """Return the summand of a sum behind casts, its further indices, and the classes between."""
    passed = []
    node = node_of(g, ref.cls)
    while node.op == MAP and node.attr[0] == "convert_element_type":
        passed.append(ref.cls)
        ref = over(ref, node.args[0])
        node = node_of(g, ref.cls)
    kinds = {dtype_kind(g.classes[c].dtype) for c in (*passed, ref.cls)}
    if node.op != CONTRACT or not node.bound or kinds != {"f"}:
        return None
    count = len(sizes)
    sizes = {**sizes, **{count + n: size for n, size in enumerate(node.bound)}}
    whole: Any = Ref(ref.cls, (*ref.axes, *range(count, len(sizes))))
    return tuple([over(whole, a) for a in node.args]), sizes, (*passed, ref.cls)


def _native_exit(t: TermGraph, cls: int, node: Node) -> Exit | None:
    if cls not in t.made_by:
        return None
    number, output = t.made_by[cls]
    e = t.program.equations[number]
    scattered = gather_patterns.keyed(t, cls)
    if scattered is not None:
        sizes = dict(enumerate((*t.graph.classes[cls].sizes, *scattered.bound)))
        keyed = scattered.along, scattered.places, scattered.clips
        return _by_key(t, cls, (scattered.value,), sizes, keyed) if scattered.bound else None
    if e.name not in ("argmax", "argmin", "top_k") or not isinstance(e.invals[0], int):
        return None
    v, out = e.invals[0], e.outvals[output]
    groups, out_groups = t.positions[v], t.positions[out]
    axes = e.eqn.params["axes"] if e.name != "top_k" else (e.eqn.params["axis"],)
    axis = int(axes[0]) % len(groups)
    if len(axes) != 1 or len(groups[axis]) != 1:
        return None
    rows = [a for a in range(len(groups)) if a != axis]
    kept = out_groups if e.name != "top_k" else [out_groups[a] for a in rows]
    index = len(t.sizes[out])
    to = {groups[axis][0]: index}
    for a, group in zip(rows, kept, strict=True):
        mine, theirs = groups[a], group
        if [t.sizes[v][q] for q in mine] != [t.sizes[out][q] for q in theirs]:
            return None
        to.update(zip(mine, theirs, strict=True))
    view = t.view(v)
    arg = Ref(view.cls, tuple([to[i] for i in view.axes]))
    sizes = {**dict(enumerate(t.sizes[out])), index: t.sizes[v][groups[axis][0]]}
    places = int(e.eqn.params["k"]) if e.name == "top_k" else 0
    if places and not out_groups[axis]:
        return None
    return Exit(cls, e.name, (arg,), (index,), sizes, None, places, output)


def _sorted_exit(t: TermGraph, cls: int, node: Node) -> Exit | None:
    """Return the first entries of a sorted row (values or indices) as a reduction."""
    sort = node.args[0]
    if sort.cls not in t.made_by or node_of(t.graph, sort.cls).op != NATIVE:
        return None
    number, output = t.made_by[sort.cls]
    e = t.program.equations[number]
    if e.name != "sort" or e.eqn.params["num_keys"] != 1 or output > 1:
        return None
    v, out, axis = e.invals[0], e.outvals[output], int(e.eqn.params["dimension"])
    if not isinstance(v, int) or len(t.positions[v][axis]) != 1 or not t.positions[out][axis]:
        return None
    if output and not _counts_along_axis(t, e.invals[1], axis):
        return None
    along, column = t.positions[out][axis][0], len(t.graph.classes[cls].sizes)
    entries, to = dict(enumerate(node.attr)), {t.positions[v][axis][0]: column}
    entry = entries.pop(along)
    if entry is None or any(x is not None for x in entries.values()):
        return None
    for mine, theirs in zip(t.positions[v], t.positions[out], strict=True):
        if [t.sizes[v][q] for q in mine] != [t.sizes[out][q] for q in theirs]:
            return None
        to.update({q: sort.axes[p] for q, p in zip(mine, theirs, strict=True) if p != along})
    sizes = {**dict(enumerate(t.graph.classes[cls].sizes)), column: t.sizes[out][along]}
    kept = sort.axes[along] if isinstance(entry, tuple) else None
    start, stride = entry if isinstance(entry, tuple) else (entry, 1)
    count, size = 1 if kept is None else sizes[kept], sizes[column]
    if not isinstance(count, int) or not isinstance(size, int) or not count or stride < 1:
        return None
    places = start + stride * (count - 1) + 1
    part = ReadPart(start, stride, kept)
    view = t.view(v)
    arg = Ref(view.cls, tuple([to[i] for i in view.axes]))
    return Exit(cls, "sorted", (arg,), (column,), sizes, None, places, output, (sort.cls,), part)


def _counts_along_axis(t: TermGraph, v: Any, axis: int) -> bool:
    """Return True if a value holds the index of an axis."""
    if not isinstance(v, int) or t.views[v] is None:
        return False
    view = t.view(v)
    return node_of(t.graph, view.cls).op == IOTA and view.axes == t.positions[v][axis]
