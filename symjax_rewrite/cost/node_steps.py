"""The arithmetic of elementwise nodes: operations, steps of functions, and both in one kernel."""

from collections.abc import Iterable
from typing import NamedTuple

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.profile_groups import FUNCTIONS
from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.term import Node

# Functions that XLA takes for cheap where it fuses (IsExpensive of its instruction fusion): each
# loop that reads them computes them, for every element that it repeats them to.
REPEATED = frozenset({"sin", "cos", "tan"})
VECTORISED = frozenset(name for name, kind in FUNCTIONS.items() if kind in ("short", "long"))


def weight(node: Node) -> float:
    """Return the operations per element of an elementwise node; a function is one operation."""
    if node.op == op.MAP:
        return 1.0
    if node.op in (op.ADD, op.CONTRACT):
        scales = sum(c not in (1, -1) for c in node.attr) if node.op == op.ADD else 0
        return max(len(node.args) - 1, 0) + scales + (1 if node.bound else 0)
    return 1.0 if node.op == op.REDUCE else 0.5


def functions_of(node: Node, device: Device) -> float:
    """Return the steps of a node's function beside its arithmetic, by `folds.fused_steps_per_s`."""
    if node.op != op.MAP:
        return 0.0
    if node.attr[0] != "integer_pow":
        return device.functions.of(node.attr[0])
    division = device.functions.of("div") if is_inverse_power(node) else 0.0
    return (_multiplications(node) - 1.0) * device.folds.chained + division


def _multiplications(node: Node) -> int:
    """Return the multiplications of an integer power, by squaring; at least one."""
    power = abs(dict(node.attr[1])["y"])
    return max(power.bit_length() + power.bit_count() - 2, 1)


def is_inverse_power(node: Node) -> bool:
    """Return True for an integer power that divides."""
    return node.op == op.MAP and node.attr[0] == "integer_pow" and dict(node.attr[1])["y"] < 0


def diagonals(node: Node) -> tuple[int, ...]:
    """Return the operands that a node reads along a diagonal alone."""
    found = [a.cls for a in node.args if len(a.axes) > 1 and len({*a.axes}) < len(a.axes)]
    whole = [a.cls for a in node.args if a.cls in found and len({*a.axes}) == len(a.axes)]
    return tuple([c for c in found if c not in whole])


class ElementwiseWork(NamedTuple):
    """The elementwise work of a kernel.

    operations: of all elements. functions: the steps of functions beside them, by
    `folds.fused_steps_per_s`. widest: elements of the largest array that it computes. reduces: True
    if it reduces one.
    """

    operations: float = 0.0
    functions: float = 0.0
    widest: float = 0.0
    reduces: bool = False


def in_one(parts: Iterable[ElementwiseWork]) -> ElementwiseWork:
    """Return the elementwise work of the kernel that does several pieces of it."""
    operations, functions, widest, reduces = zip(*parts, strict=True)
    return ElementwiseWork(sum(operations), sum(functions), max(widest), any(reduces))
