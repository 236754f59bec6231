"""Values that a kernel reads in two orders of axes, as x + xᵀ does.

A class has its axes in any order, so one of two readings of the same class alone tells that it is
read across its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.ir.term import ADD, CONTRACT, MAP, REDUCE, Node

IN_ORDER = frozenset({ADD, CONTRACT, MAP, REDUCE})  # nodes whose operands have the node's indices


def is_turned(node: Node) -> bool:
    """Return True for a node that reads an operand in another order of axes than its own."""
    return any(len(a.axes) > 1 and tuple(sorted(a.axes)) != a.axes for a in node.args)


def crossed_steps(facts: Mapping[int, Any], kernel: Sequence[int], device: Device) -> float:
    """Return the steps that a kernel takes longer since it reads values in two orders of axes.

    A value of the kernel is computed again for the second order, out of operands that are read
    across their rows; the largest one stands for all.

    Args:
        facts: of every class (`node_facts.Facts`).
        kernel: the classes that it computes, each after those that read it.
        device: has laws of layouts.
    """
    assert device.layouts is not None
    orders: dict[int, tuple[Any, ...]] = {kernel[0]: tuple(range(facts[kernel[0]].node.out))}
    most = 0.0
    for cls in kernel:
        node, here = facts[cls].node, orders.get(cls)
        if here is None or node.op not in IN_ORDER:
            continue
        for a in node.args:
            order = tuple([here[i] if i < node.out else (cls, i) for i in a.axes])
            other = orders.setdefault(a.cls, order)
            if order != other and order[-1] != other[-1] and {*order} == {*other}:
                each = device.layouts.crossed_each(facts[a.cls].row)
                most = max(most, each * facts[a.cls].bytes / 4)
    return most * device.folds.fused_steps_per_s
