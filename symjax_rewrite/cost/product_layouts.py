"""The price of a matrix product by the layouts of its operands."""

from __future__ import annotations

import math
from dataclasses import dataclass

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.cost.profile_groups import ProductLayouts
from symjax_rewrite.cost.term_cost import itemsize
from symjax_rewrite.ir.flat_program import Equation

LEAST_RESULT = 6  # elements of a product for each of its operands' that are moved


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand of a product in memory.

    free, summed: elements along the axes that the result has, and along the others. first: True if
    the summed axes stand first. transposed: True if a transpose, or a summed group of axes for
    which XLA makes one, stands between the memory and the product.
    """

    free: int
    summed: int
    first: bool
    transposed: bool

    @property
    def elements(self) -> int:
        return self.free * self.summed


def product_seconds(left: Matrix, right: Matrix, dtype: str, device: Device) -> float:
    """Return the seconds of a product whose operands are read in the order of memory."""
    made = left.free * right.free
    read = (left.elements + right.elements) * itemsize(dtype)
    busy = 2 * made * left.summed / device.peak(dtype)
    if min(left.free, right.free) > 1:
        busy += device.packing_seconds(read, max(left.free, right.free, left.summed))
    moved = read + made * itemsize(dtype)
    return max(busy, moved / device.bytes_per_s) + device.launch_s


def added_seconds(left: Matrix, right: Matrix, facts: ProductLayouts) -> float:
    """Return the seconds that a product takes longer since an operand is read across its rows.

    XLA chooses the order of a vector and a matrix itself, before it folds transposes. The share of
    the time rises from zero to one up to twice the least sum, so that prices have no jump.
    """
    share = min(max(left.summed / facts.least_sum - 1, 0.0), 1.0)
    if left.free == 1:
        slow = right.transposed and not right.first and right.summed >= facts.long_sum
        return share * right.elements * facts.across_s if slow else 0.0
    if right.free == 1 and not left.transposed:
        return 0.0
    if not left.first:
        return 0.0
    added = share * left.elements * facts.across_each(left.free)
    if right.first or right.free == 1:
        return added
    return added + share * right.elements * facts.across_s


def swapped_seconds(e: Equation, facts: ProductLayouts) -> float:
    """Return the seconds that a product takes longer where XLA writes its result transposed.

    e: a product of matrices, or of batches of matrices; of named sizes nothing is known.
    """
    axes = e.eqn.params["dimension_numbers"]
    sides: list[Matrix] = []
    for x, summed, batch in zip(e.eqn.invars, *axes, strict=True):
        shape = shape_of(x)
        if not all(isinstance(n, int) for n in shape):
            return 0.0
        first = bool(set(summed) - {len(shape) - 1}) and min(summed) == len(batch)
        over = math.prod(shape[k] for k in summed)
        free = math.prod(n for k, n in enumerate(shape) if k not in summed and k not in batch)
        sides.append(Matrix(free, over, first, False))
    batches = math.prod(shape_of(e.eqn.invars[0])[k] for k in axes[1][0])
    left, right = sides
    added = added_seconds(right, left, facts) - added_seconds(left, right, facts)
    if batches > 1:
        added += facts.batched_s * (right.first - left.first)
    return batches * added


def column_seconds(
    name: str, sizes: tuple[int, int, int], dtype: str, unstored: float, device: Device
) -> tuple[float, float]:
    """Return the seconds of reducing the columns of matrices: as XLA does it, and row by row.

    name: `reduce_sum`, or of an extremum. sizes: matrices, rows, columns. unstored: bytes of the
    matrices that row by row are written first.
    """
    facts, width = device.columns, itemsize(dtype)
    _, rows, columns = sizes
    count = math.prod(sizes)
    by_rows = count * width / device.bytes_per_s + device.launch_s
    if facts is None or columns * width <= facts.row_bytes:
        return by_rows, by_rows
    each = facts.sum_s if name == "reduce_sum" else facts.extremum_s
    if name != "reduce_sum":
        by_rows += rows * device.loops.step_s
    written = device.memory.passes_of_write * unstored / device.bytes_per_s
    return count * each, by_rows + written + device.page_seconds(unstored)


def copy_seconds(count: float, device: Device) -> float:
    """Return the seconds of writing a copy of so many bytes."""
    return count / device.bytes_per_s + device.launch_s


def moves_operands(moved: int, made: int) -> bool:
    """Return True if copies of operands cost less than a transposition of their product.

    moved, made: elements of the copies, and of the product. A result that fits no cache is read
    across its rows, and by each of its readers.
    """
    return made >= LEAST_RESULT * moved
