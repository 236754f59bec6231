"""Slices of terms that do not materialise the whole terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from symjax_rewrite.ir.dataflow import node_of
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import CONCAT, SLICE, Node, Ref, over
from symjax_rewrite.kernel_selection.folds.pairwise_terms import is_elementwise

MOST_DEPTH = 64  # limit on elementwise steps in a chain computed at sliced indices


def sliced(g: EGraph, ref: Ref, index: int, entry: Any, size: int) -> Ref:
    """Return `size` elements of an index from `(start, stride)` on, or the element `entry`."""
    if index not in ref.axes:
        return ref
    attr = tuple([entry if i == index else None for i in ref.axes])
    arg = ref.moved(index, -1) if isinstance(entry, int) else ref
    sizes = dict(zip(ref.axes, g.classes[ref.cls].sizes, strict=True)) | {index: size}
    return g.term(SLICE, [arg], sizes, g.classes[ref.cls].dtype, attr=attr)


def narrowed(
    g: EGraph,
    ref: Ref,
    index: int,
    start: int,
    size: int,
    opens: Callable[[int], bool],
    known: dict[tuple, Ref],
    depth: int = 0,
) -> Ref:
    """Slice one index of a reference without materialising a concatenation along it.

    opens: returns True for elementwise classes that read sliced operands instead. known: slices
    that were made before. depth: number of classes that were opened on the way.
    """
    if index not in ref.axes:
        return ref
    key = (ref, index, start, size)
    if key not in known:
        node = node_of(g, ref.cls)
        part = _part_of(node, ref, index, start, size)
        if part is None and is_elementwise(node) and depth < MOST_DEPTH and opens(ref.cls):
            refs = [
                narrowed(g, over(ref, a), index, start, size, opens, known, depth + 1)
                for a in node.args
            ]
            part = g.apply(node.op, node.attr, refs, g.classes[ref.cls].dtype)
        known[key] = part or sliced(g, ref, index, (start, 1), size)
    return known[key]


def _part_of(node: Node, ref: Ref, index: int, start: int, size: int) -> Ref | None:
    """Return the operand of a concatenation that equals a slice of it."""
    if node.op == CONCAT and ref.axes[node.attr[0]] == index:
        first = 0
        for a, length in zip(node.args, node.attr[1], strict=True):
            if (first, length) == (start, size):
                return over(ref, a)
            first += length
    return None


def entry_along(node: Node, slot: int) -> tuple[int, int, bool] | None:
    """Return (start, stride, True if one element alone) of a slice along one slot; else None."""
    entry = node.attr[slot]
    if entry is None or any(x is not None for k, x in enumerate(node.attr) if k != slot):
        return None
    return (*entry[:2], False) if isinstance(entry, tuple) else (entry, 1, True)
