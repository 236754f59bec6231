"""Partition of the whole-program graph into algebraic regions.

A region is a maximal connected set of algebraic terms. Regions end at sums with several consumers
(residual streams) and at opaque terms. These cuts depend on the content alone, so the layers of a
model are cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from symjax_rewrite.cost.node_steps import weight
from symjax_rewrite.ir.dataflow import Needed, connected, node_of, walk
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.index_tests import is_indicator
from symjax_rewrite.ir.primitives import RING, dtype_kind
from symjax_rewrite.ir.sizes import product
from symjax_rewrite.ir.term import (
    ADD,
    CONCAT,
    CONTRACT,
    CONV,
    DELTA,
    INVERSE,
    MAP,
    REDUCE,
    SLICE,
    SOLVE,
    TAKE,
    Node,
)
from symjax_rewrite.ir.term_graph import TermGraph
from symjax_rewrite.ir.value_analysis import selected_case
from symjax_rewrite.rewriting.region_keys import Key, LeafTag, Numberings, Region

ALGEBRAIC = frozenset({CONTRACT, ADD, SLICE, CONCAT, TAKE, INVERSE, SOLVE, CONV})
LINEAR = frozenset({CONTRACT, ADD})
PARTIAL = frozenset({SLICE, CONCAT, INVERSE, SOLVE, TAKE})  # worth a search on any term


def find_regions(
    t: TermGraph,
    need: Needed,
    tag: Callable[[int], LeafTag],
    frozen: bool = False,
    part_of: Callable[[list[int]], list[int]] = lambda classes: classes,
) -> list[Region]:
    """Find the regions worth solving, in program order.

    tag: returns the tag of a leaf.
    frozen: True if some inputs are frozen, so that scales and sums can be folded into them.
    part_of: returns the classes of a region to solve.
    """
    g, users = t.graph, need.users
    regions = []
    keys: dict[Key, Key] = {}
    products, numberings = _products(g, need.order), Numberings(g, need, tag)
    for classes in map(part_of, _groups(t, need)):
        inside = set(classes)
        if not _is_interesting(g, inside, products, frozen) or _is_empty(g, classes):
            continue
        roots = [c for c in classes if c in need.outside or not inside.issuperset(users.get(c, ()))]
        region = Region(classes, roots, {c for c in roots if _is_fused(g, need, c)})
        numberings.number(region)
        region.key = keys.setdefault(region.key, region.key)  # equal keys are one object
        regions.append(region)
    return sorted(regions, key=lambda r: r.classes[-1])


def _groups(t: TermGraph, need: Needed) -> Collection[list[int]]:
    """Return the algebraic classes in groups that no cut divides."""
    g, member = t.graph, _members(t, need)
    whole = _kept_whole(g, need, member)
    joined = {c for c in member if not _is_cut(g, need, c, whole)}
    group_of = connected(
        (arg.cls, c) for c in member for arg in node_of(g, c).args if arg.cls in joined
    )
    groups: dict[int, list[int]] = {}
    for c in sorted(member):
        groups.setdefault(group_of.get(c, c), []).append(c)
    return groups.values()


def _is_fused(g: EGraph, need: Needed, cls: int) -> bool:
    """Return True if one elementwise term reads a value, and nothing else does."""
    users = need.users.get(cls, ())
    if cls in need.outside or need.uses.get(cls) != 1 or len(users) != 1:
        return False
    return _is_elementwise(node_of(g, users[0]))


def _is_elementwise(node: Node) -> bool:
    return node.op == MAP or (node.op in LINEAR and not node.bound)


def is_inlined(g: EGraph, need: Needed, cls: int) -> bool:
    """Return True if one term reads an elementwise value, and nothing else does."""
    single = cls not in need.outside and need.uses.get(cls) == 1
    return single and node_of(g, cls).op == MAP


def inlined_operations(g: EGraph, need: Needed, cls: int) -> float:
    """Return the operations per element of a value that is computed where terms read it.

    Those of the elementwise values of its size count that it alone needs. The result is 0 for a
    value that is written in any case.
    """
    users = need.users.get(cls, ())
    if cls in need.outside or any(node_of(g, u).op not in LINEAR for u in users):
        return 0.0
    total, stack, axes = 0.0, [cls], len(g.classes[cls].sizes)
    for c in stack:
        node = node_of(g, c)
        is_mine = c == cls or (c not in need.outside and need.uses.get(c) == 1)
        if is_mine and _is_elementwise(node):
            total += weight(node)
            stack += [a.cls for a in node.args if len(g.classes[a.cls].sizes) == axes]
    return total


def _members(t: TermGraph, need: Needed) -> set[int]:
    g = t.graph
    member: set[int] = set()
    sliced: set[int] = set()
    for c in reversed(need.order):
        node = node_of(g, c)
        ring = dtype_kind(g.classes[c].dtype) in RING
        elementwise = c in sliced and node.op in (MAP, REDUCE)
        algebraic = ring and (
            node.op in ALGEBRAIC or _masks_rows(g, need, c) or _separates(g, need, c)
        )
        if node.op == SLICE or elementwise or algebraic:
            member.add(c)
        # Elementwise terms of which only a part is read belong to the region of the slice.
        if (
            node.op == TAKE
            or node.op == SLICE
            or elementwise
            or (c in sliced and node.op in LINEAR)
        ):
            sliced.update(a for a in _read_parts(node) if need.uses.get(a) == 1)
    return member


def _masks_rows(g: EGraph, need: Needed, cls: int) -> bool:
    """Return True if a mask is between two products and reads no index that the second one sums."""
    selected = selected_case(g, node_of(g, cls))
    users = need.users.get(cls, ())
    if selected is None or need.uses[cls] != 1 or len(users) != 1:
        return False
    which, case = (node_of(g, cls).args[k] for k in (0, selected))
    user, first = node_of(g, users[0]), node_of(g, case.cls)
    if user.op != CONTRACT or not user.bound or need.uses[case.cls] != 1:
        return False
    if first.op not in LINEAR:
        return False
    read = next(a.axes for a in user.args if a.cls == cls)
    return all(read[i] < user.out for i in which.axes)


def _separates(g: EGraph, need: Needed, cls: int) -> bool:
    """Return True if an extremum is of a sum of two terms that do not both read its indices."""
    node = node_of(g, cls)
    if node.op != REDUCE or need.uses[node.args[0].cls] != 1:
        return False
    source, total = node.args[0], node_of(g, node.args[0].cls)
    if total.op != ADD or len(total.args) != 2:
        return False
    one, other = ({source.axes[i] for i in a.axes} for a in total.args)
    return any(i >= node.out and i not in one & other for i in source.axes)


def _kept_whole(g: EGraph, need: Needed, member: set[int]) -> set[int]:
    """Return the members of which every element is needed for any rewriting of their users.

    Such members are results, or opaque terms read them, directly or through elementwise terms. Or
    they are elementwise in values that the region only reads, and parts of them are needed that
    have all their elements: each part would be computed again for each of its own parts.
    """
    plain, whole = _elementwise_of_leaves(g, need, member), set[int]()
    for c in [c for c in reversed(need.order) if c in member]:  # users first
        users = need.users.get(c, ())
        read_whole = any(u not in member or (u in whole and _is_spread(g, u, c)) for u in users)
        divided = c in plain and _is_divided(g, c, [u for u in users if u in whole])
        if c in need.outside or read_whole or divided:
            whole.add(c)
    return whole


def _is_divided(g: EGraph, cls: int, users: list[int]) -> bool:
    """Return True if several parts of a value have at least as many elements as the value."""
    parts = [u for u in users if node_of(g, u).op == SLICE]
    size, *read = [product(g.classes[u].sizes) for u in (cls, *parts)]
    return len(parts) > 1 and all(isinstance(n, int) for n in (size, *read)) and sum(read) >= size  # pyright: ignore[reportOperatorIssue]


def _elementwise_of_leaves(g: EGraph, need: Needed, member: set[int]) -> set[int]:
    """Return the members that are elementwise, or parts, of such members and of values outside."""
    found: set[int] = set()
    for c in need.order:
        node = node_of(g, c)
        plain = c in member and (_is_elementwise(node) or node.op == SLICE)
        if plain and all(a.cls in found or a.cls not in member for a in node.args):
            found.add(c)
    return found


def _is_spread(g: EGraph, user: int, cls: int) -> bool:
    """Return True if an elementwise term reads every element of one of its operands."""
    node = node_of(g, user)
    read = [a.axes for a in node.args if a.cls == cls] if node.op in LINEAR else []
    return not node.bound and any(min(x, default=0) >= 0 and len(set(x)) == len(x) for x in read)


def _is_cut(g: EGraph, need: Needed, cls: int, whole: set[int]) -> bool:
    """Return True if a value has several consumers and no rewriting of them could avoid it.

    Such a value is a sum, unless it contains a low-rank product or an identity, or is a sum over
    pairs of which not every pair is needed. It may also be a product of which every element is
    needed and that no other product reads; its users cost little compared with the product.
    """
    node = node_of(g, cls)
    if need.uses[cls] < 2 or node.op not in LINEAR:
        return False
    if node.op == ADD:
        hides = any(_is_low_rank(g, a.cls) or _is_sparse(g, a.cls) for a in node.args)
        return len(node.args) > 1 and not hides and (cls in whole or not _sums_pairs(g, need, cls))
    if cls not in whole or _is_low_rank(g, cls):
        return False
    return not any(_mixes(g, u, cls) for u in need.users[cls])


def _sums_pairs(g: EGraph, need: Needed, cls: int) -> bool:
    """Return True if a sum of broadcast terms is only summed, as it is or squared.

    Such sums over pairs may need no pair.
    """
    if any(len({*a.axes}) == len(g.classes[cls].sizes) for a in node_of(g, cls).args):
        return False

    def sums(c: int, user: Node) -> bool:
        if user.op != CONTRACT and not (user.op == ADD and len(user.args) == 1):
            return False
        read = {i for a in user.args if a.cls == c for i in a.axes}
        # Another operand over these indices is a weight of every row or pair.
        return all(a.cls == c or read.isdisjoint(a.axes) for a in user.args)

    users = lambda c: [u for u in need.users.get(c, ()) if not node_of(g, u).bound]  # noqa: E731
    reached = walk([cls], users)
    return all(sums(c, node_of(g, u)) for c in reached for u in need.users.get(c, ()))


def _mixes(g: EGraph, user: int, cls: int) -> bool:
    """Return True if a term multiplies a class with values that have further axes, or solves."""
    node = node_of(g, user)
    if node.op in (INVERSE, SOLVE, CONV):
        return True
    if node.op != CONTRACT or not node.bound:
        return False
    mine = {i for a in node.args if a.cls == cls for i in a.axes}
    return any(i not in mine for a in node.args for i in a.axes)


def _is_low_rank(g: EGraph, cls: int) -> bool:
    node = node_of(g, cls)
    if node.op == ADD and len(node.args) == 1:
        return _is_low_rank(g, node.args[0].cls)
    if node.op != CONTRACT or not node.bound or len(node.args) < 2:
        return False
    out, *parts = [product(g.classes[c].sizes) for c in (cls, *(a.cls for a in node.args))]
    return not all(isinstance(n, int) for n in (out, *parts)) or out > sum(parts)  # pyright: ignore[reportOperatorIssue]


def _is_interesting(g: EGraph, inside: set[int], products: set[int], frozen: bool) -> bool:
    """Return True if a law could apply: products of products or sums, sums of products, parts."""
    for c in inside:
        node = node_of(g, c)
        args = [a.cls for a in node.args if a.cls in inside]
        if frozen and args and node.op in LINEAR:
            return True
        if node.op == CONTRACT and node.bound:
            if args or any(_is_sparse(g, a.cls) for a in node.args):
                return True
            if len(node.args) == 2 and _has_private_bound(node):
                return True
        elif node.op == CONTRACT:
            if any(a.cls in args and len({*a.axes}) < len(a.axes) for a in node.args):
                return True  # a diagonal
        elif node.op == ADD:
            if sum(a in products for a in args) > 1:
                return True
        elif node.op == REDUCE or (
            node.op in PARTIAL and any(a in args for a in _read_parts(node))
        ):
            return True
    return False


def _is_empty(g: EGraph, classes: list[int]) -> bool:
    """Return True if some array has no elements: a sum over no elements is 0.

    Factors must not be taken out of such a sum.
    """
    return any(0 in g.classes[c].sizes or 0 in g.classes[c].first.bound for c in classes)


def _read_parts(node: Node) -> list[int]:
    """Return the classes that a term reads partially, without index values."""
    return [a.cls for a in (node.args[:1] if node.op == TAKE else node.args)]


def _is_sparse(g: EGraph, cls: int) -> bool:
    return node_of(g, cls).op in (DELTA, SOLVE) or is_indicator(g, cls)


def _has_private_bound(node: Node) -> bool:
    a, b = (set(x.axes) for x in node.args)
    return any(i >= node.out for i in a ^ b)


def _products(g: EGraph, order: list[int]) -> set[int]:
    """Return the classes that are contractions, or sums and products of contractions."""
    found: set[int] = set()
    for c in order:
        node = g.classes[c].first
        if (node.op == CONTRACT and node.bound) or (
            node.op in LINEAR and not found.isdisjoint([a.cls for a in node.args])
        ):
            found.add(c)
    return found
