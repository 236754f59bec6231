"""The cost of one node by itself, and the elementwise work of the kernel of several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from symjax_rewrite.cost.node_steps import ElementwiseWork, in_one
from symjax_rewrite.cost.row_steps import RowSteps
from symjax_rewrite.ir.term import Node


class Facts(NamedTuple):
    """The cost of one node by itself: operand classes, bytes written, elementwise work, FLOPs.

    parts: operands of which it reads a part: those of a slice, and those read along a diagonal.
    is_turned: True if it reads an operand in another order of axes.
    is_kernel: True if it is a kernel of its own, not fused into its consumer. peak: FLOP/s.
    packing: seconds beside the arithmetic of a product. pages: seconds beside both arithmetic and
    traffic, for fresh memory, if its value is written. is_called: True for a reduction that a call
    of the library computes. is_group: True for a reduction or a part whose operands are computed
    for it alone in its kernel. in_calls: True if a call computes it too after a reduction that it
    reads. reduces_rows: True if it reduces the last axis of an operand. function: name of its
    function, or "". rows: steps that follow from the order of its axes. joins: True for a product
    that a call which reduces it computes too. row: elements of its last axis.
    """

    node: Node
    args: tuple[int, ...]
    parts: tuple[int, ...]
    is_turned: bool
    is_kernel: bool
    is_free: bool
    bytes: float
    work: ElementwiseWork
    flops: float | None  # None for a fused loop
    peak: float
    packing: float
    pages: float
    is_called: bool
    is_group: bool
    in_calls: bool
    reduces_rows: bool
    function: str
    rows: RowSteps
    joins: bool
    row: float


def work_of(
    classes: list[int], facts: Mapping[int, Facts], read: list[Facts]
) -> tuple[ElementwiseWork, list[Facts]]:
    """Return the elementwise work of the kernel of some classes, and the products of its call.

    It has loops over short rows if it reads broadcasts and has no reduction.

    Args:
        classes: the class that the kernel writes, and those that it computes for it.
        facts: of every class.
        read: facts of what it reads in memory.
    """
    products = [facts[c] for c in classes[1:] if facts[c].joins]
    # A call cuts rows into tiles. What it computes itself is in caches, and not copied.
    computed = [not {*classes}.isdisjoint(p.args) for p in products]
    products = [
        p._replace(packing=0.0) if c else p for p, c in zip(products, computed, strict=True)
    ]
    kernel = [facts[c] for n, c in enumerate(classes) if not n or not facts[c].joins]
    inside = {*classes}
    work = in_one([f.work for f in kernel])
    steps = work.functions
    for f in kernel:
        if f.rows.unit and f.work.reduces == (not inside.isdisjoint(f.args)):
            steps += f.rows.unit
    if not work.reduces and min([f.bytes for f in read], default=math.inf) < kernel[0].bytes:
        steps += sum([f.rows.unrolled for f in kernel])
    return work._replace(functions=steps), products
