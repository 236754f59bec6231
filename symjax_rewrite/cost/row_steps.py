"""Steps of functions and reductions that follow from the order of axes in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.library_calls import broadcast_operand, is_product_with_vector
from symjax_rewrite.cost.node_steps import VECTORISED
from symjax_rewrite.ir.dataflow import makers_of, users_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.products import HALF
from symjax_rewrite.ir.sizes import Dim, from_jax
from symjax_rewrite.ir.term import Node

# A dot without an axis of its own on either side is a product that a sum reads.
REDUCED = frozenset({"reduce_sum", "reduce_max", "reduce_min", "dot_general"})
BY_ORDER = REDUCED | VECTORISED  # equations whose prices depend on the order of axes in memory

Count = Callable[[tuple[Dim, ...]], float]


class RowSteps(NamedTuple):
    """Steps of an equation beside its arithmetic.

    alone: in any case. unit: of a reduction if its call computes what it reduces, and of a function
    if it reads memory: those for rows of one element, which XLA's loops leave out, and those of
    sums of products. unrolled: of a function in a loop over short rows of broadcasts.
    """

    alone: float = 0.0
    unit: float = 0.0
    unrolled: float = 0.0


def row_steps(
    made: Equation,
    functions: float,
    space: float,
    count: Count,
    makers: Mapping[int, Equation],
    device: Device,
) -> RowSteps:
    """Return the steps of an equation that follow from the order of its axes in memory.

    A function is computed for whole vectors of a row. The library begins a reduction anew with
    every row, and goes element by element down columns of long rows.

    Args:
        made: a reduction that the library computes, or a function.
        functions: steps of the function.
        space: elements.
        count: elements of a shape.
        makers: of every value.
        device: its profile holds the laws.
    """
    folds, is_reduction = device.folds, made.name in REDUCED
    wide: Any = made.eqn.invars[0] if is_reduction else made.eqn.outvars[0]
    sizes = tuple(map(from_jax, wide.aval.shape))
    row = max(count(sizes[-1:]), 1.0)
    if made.name == "dot_general":
        row = _row_of_dot(made, sizes, count)
        return RowSteps(folds.row_sum * space / row if row else 0.0)
    if is_reduction:
        steps = folds.row_sum * space / row
        alone = _column_steps(made, sizes, count, makers, device) * space
    else:
        steps = functions * (math.ceil(row / folds.lanes) * folds.lanes / row - 1)
        alone = 0.0
    if sizes[-1:] == (1,):
        return RowSteps(alone, steps)
    alone += steps
    if is_reduction:
        return RowSteps(alone, _broadcast_steps(made, makers, device) * space)
    if str(wide.aval.dtype) in HALF:
        return RowSteps(alone)
    unrolled = device.functions.unrolled_steps(row, folds.lanes) * count(sizes)
    return RowSteps(alone, 0.0, max(unrolled - functions - alone, 0.0))


def _row_of_dot(made: Equation, sizes: tuple[Dim, ...], count: Count) -> float:
    """Return the elements that a dot sums in a row; 0 without a batch, or along outer axes.

    A dot of whole arrays sums one row: XLA joins the axes that it sums.
    """
    summed = sorted(_summed_axes(made))
    is_inner = summed == [*range(len(sizes) - len(summed), len(sizes))]
    inner = sizes[len(sizes) - len(summed) :]
    return max(count(inner), 1.0) if is_inner and len(summed) < len(sizes) else 0.0


def _summed_axes(made: Equation) -> Sequence[int]:
    """Return the axes of its first operand that a reduction, or a dot, sums."""
    if made.name == "dot_general":
        return made.eqn.params["dimension_numbers"][0][0]
    return made.eqn.params["axes"]


def _column_steps(
    made: Equation,
    sizes: tuple[Dim, ...],
    count: Count,
    makers: Mapping[int, Equation],
    device: Device,
) -> float:
    """Return the steps of an element of a reduction down columns."""
    columns, axes = device.columns, made.eqn.params["axes"]
    if columns is None:
        return 0.0
    outside, width = count(sizes[: min(axes)]), count(sizes[max(axes) + 1 :])
    if not columns.are_slow(outside, 4 * width) or is_product_with_vector(made, makers):
        return 0.0
    return columns.sum_s * device.folds.fused_steps_per_s


def _broadcast_steps(made: Equation, makers: Mapping[int, Equation], device: Device) -> float:
    """Return the steps of an element of a sum of products with an array of fewer outer axes."""
    operand = None if device.fusions is None else broadcast_operand(made, makers)
    if device.fusions is None or operand is None:
        return 0.0
    return device.fusions.broadcast_seconds(operand, 1.0) * device.folds.fused_steps_per_s


def broadcast_sums_seconds(program: Program, device: Device) -> float:
    """Return the seconds that sums of products take longer in calls that compute the products.

    One operand of each lacks an outer axis of the result. A large product would be stored first.
    """
    facts = device.fusions
    if facts is None:
        return 0.0
    makers, users, seconds = program.once(makers_of), program.once(users_of), 0.0
    for e in [e for e in program.equations if e.name == "reduce_sum"]:
        operand = broadcast_operand(e, makers)
        x: Any = e.eqn.invars[0].aval
        is_known = all(isinstance(n, int) for n in x.shape)
        if operand is not None and is_known and len(users[e.reads[0]]) == 1:
            size = math.prod(x.shape)
            longer, stored_s = facts.broadcast_seconds(operand, size), facts.stored_s * size
            seconds += longer if size < facts.least_elements else min(longer, stored_s)
    return seconds


def reduces_rows(node: Node, made: Equation | None) -> bool:
    """Return True for a reduction of the last axis of an operand.

    made: the equation that it is written as, which has the order in memory; None for other forms.
    """
    if made is not None and made.name in REDUCED:
        x: Any = made.eqn.invars[0].aval
        return x.ndim - 1 in _summed_axes(made)
    return any(a.axes and a.axes[-1] >= node.out for a in node.args)
