"""Comparisons with an index (`x = i`, `i ≥ j + 2`), and values that are 1 where one holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import dtype_kind, holds
from symjax_rewrite.ir.term import ADD, CONST, IOTA, MAP, Node, Ref, is_cast, is_choice

_COMPARISONS = ("eq", "ge", "gt", "le", "lt")
_TESTING = frozenset({MAP, IOTA, ADD})  # kinds of conditions


class IndexTest(NamedTuple):
    """A condition `[left kind right]`, both sides over the reader's indices; negated or not."""

    left: Ref
    kind: str
    right: Ref
    negated: bool = False


def comparisons(g: EGraph, ref: Ref) -> Iterator[IndexTest]:
    """Yield the comparisons that a value is."""
    for n in g.classes[ref.cls].nodes:
        if n.op == MAP and n.attr[0] in _COMPARISONS:
            left, right = (a.over(ref.axes) for a in n.args)
            yield IndexTest(left, n.attr[0], right)


def indicated(g: EGraph, ref: Ref) -> Iterator[IndexTest]:
    """Yield the comparisons of which a value is the indicator."""
    for n in g.classes[ref.cls].nodes:
        negated = _is_negated(g, n)
        if negated is not None:
            for test in comparisons(g, n.args[0].over(ref.axes)):
                yield test._replace(negated=negated)


def _is_negated(g: EGraph, n: Node) -> bool | None:
    """Return False for an indicator of a condition, True for one of its negation, else None."""
    if is_cast(n):
        return None if g.classes[n.args[0].cls].dtype != "bool" else False
    if not is_choice(n):
        return None
    cases = [_number(g, a.cls) for a in n.args[1:]]
    return {(0, 1): False, (1, 0): True}.get(tuple(cases))


def _number(g: EGraph, cls: int) -> Any:
    return next((n.attr[0] for n in g.classes[cls].nodes if n.op == CONST), None)


def index_of(g: EGraph, ref: Ref) -> tuple[int, int] | None:
    """Return `(index, offset)` of a value that is an index plus a constant, or None."""
    for n in g.classes[ref.cls].nodes:
        if n.op == IOTA:
            return ref.axes[0], 0
        if n.op == ADD and n.attr == (1, 1) and len(n.args) == 2:
            offset = next((_number(g, a.cls) for a in n.args if not a.axes), None)
            base = next((a for a in n.args if a.axes), None)
            if base is None or not isinstance(offset, int):
                continue
            c = g.classes[base.cls]
            if any(m.op == IOTA for m in c.nodes) and holds(c.dtype, offset, c.sizes[0]):
                return ref.axes[base.axes[0]], offset
    return None


def label_of(g: EGraph, tests: Iterable[IndexTest]) -> tuple[Ref, int] | None:
    """Return `(x, v)` of the first test `[x = v]` of an integer value and an index, or None."""
    for test in tests:
        if test.kind != "eq" or test.negated:
            continue
        for label, other in ((test.left, test.right), (test.right, test.left)):
            found = index_of(g, other)
            if found and not found[1] and dtype_kind(g.classes[label.cls].dtype) in "iu":
                return label, found[0]
    return None


def is_indicator(g: EGraph, cls: int) -> bool:
    """Return True if a class is 1 where a comparison with an index holds and 0 elsewhere."""
    return any(_reads_index(g, t) for t in indicated(g, g.ref(cls)))


def is_condition(g: EGraph, cls: int) -> bool:
    """Return True if a class is an index, a comparison with one, or the indicator of one."""
    if _TESTING.isdisjoint([n.op for n in g.classes[cls].nodes]):
        return False
    ref = g.ref(cls)
    compared = any(_reads_index(g, t) for t in comparisons(g, ref))
    return compared or index_of(g, ref) is not None or is_indicator(g, cls)


def _reads_index(g: EGraph, test: IndexTest) -> bool:
    return any(index_of(g, side) is not None for side in (test.left, test.right))
