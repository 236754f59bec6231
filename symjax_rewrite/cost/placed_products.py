"""Products as XLA sees them: transposes of operands and results are folded into them.

The price of the orders in which a program reads its arrays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.product_layouts import Matrix, added_seconds
from symjax_rewrite.cost.transposed_copies import transposed_seconds
from symjax_rewrite.ir.dataflow import makers_of, numbers, users_of
from symjax_rewrite.ir.flat_program import Equation, Program, Value

DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class StoredOperand:
    """An operand as it is stored: its free axes and its summed axes, each group in one piece.

    value: its number, before transposes. free, summed: sizes in stored order. first: True if the
    summed axes stand first. order: numbers of the summed pairs of axes, in stored order.
    transposed: True if transposes stand between.
    """

    value: int
    free: tuple[int, ...]
    summed: tuple[int, ...]
    first: bool
    order: tuple[int, ...]
    transposed: bool

    @property
    def matrix(self) -> Matrix:
        """Return the operand with each group of axes as one."""
        transposed = self.transposed or len(self.free) + len(self.summed) > 2
        return Matrix(math.prod(self.free), math.prod(self.summed), self.first, transposed)

    def axes(self) -> tuple[int, ...]:
        """Return the summed axes."""
        start = 0 if self.first else len(self.free)
        return tuple(range(start, start + len(self.summed)))


@dataclass(frozen=True, slots=True)
class PlacedProduct:
    """A product of two operands as XLA sees it: transposes of operands and result are folded.

    target: the value that holds it, over the free axes of the left and of the right operand.
    transposed: True if the target is the transpose of the equation's own result.
    """

    equation: Equation
    target: int
    left: StoredOperand
    right: StoredOperand
    transposed: bool

    @property
    def has_vector(self) -> bool:
        """Return True if an operand is a vector, so that the result needs no transposition."""
        return 1 in (self.left.matrix.free, self.right.matrix.free)


def layout_seconds(
    program: Program, device: Device, within: Collection[Equation] | None = None
) -> float:
    """Return the seconds of transposed copies, and of products that read across rows.

    within: the equations that count; None for all.
    """
    across_s = across_seconds(program, device, program.equations if within is None else within)
    return transposed_seconds(program, device, within) + across_s


def across_seconds(program: Program, device: Device, within: Collection[Equation]) -> float:
    """Return the seconds that products take longer since they read operands across their rows.

    within: the products that count. Of products in batches nothing is known.
    """
    if device.layouts is None:
        return 0.0
    makers, users = program.once(makers_of), program.once(users_of)
    seconds, outputs = 0.0, set(numbers(program.outputs))
    for e in filter(is_product, within):
        if not is_plain(e) or has_batch(e):
            continue
        found = placed_product(program, e, makers, users, outputs)
        if found is not None:
            seconds += added_seconds(found.left.matrix, found.right.matrix, device.layouts)
    return seconds


def is_product(e: Equation) -> bool:
    """Return True for a product of arrays."""
    return e.name == "dot_general"


def has_batch(e: Equation) -> bool:
    """Return True for a product in batches."""
    return bool(e.eqn.params["dimension_numbers"][1][0])


def is_plain(e: Equation) -> bool:
    """Return True for sums of products of one real dtype, of static sizes."""
    params = e.eqn.params
    avals: list[Any] = [v.aval for v in (*e.eqn.invars, *e.eqn.outvars)]
    return (
        bool(params["dimension_numbers"][0][0])
        and avals[0].dtype in DTYPES
        and all(a.dtype == avals[0].dtype for a in avals)
        and all(isinstance(n, int) for a in avals for n in a.shape)
    )


def placed_product(
    program: Program,
    e: Equation,
    makers: Mapping[int, Equation],
    users: Mapping[int, list[Equation]],
    outputs: set[int],
) -> PlacedProduct | None:
    """Return a product without batch axes, or None if the axes of an operand stand in no groups."""
    summed, _ = e.eqn.params["dimension_numbers"]
    pairs = zip(e.invals, summed, strict=True)
    left, right = (_side(program, v, tuple(axes), makers) for v, axes in pairs)
    if left is None or right is None or left.order != right.order:
        return None
    target, is_transposed = e.outvals[0], False
    while target not in outputs:  # two transposes are none
        reader, *others = users.get(target, ()) or (None,)
        if reader is None or others or not _is_turn(reader):
            break
        target, is_transposed = reader.outvals[0], not is_transposed
    found = PlacedProduct(e, target, left, right, False)
    if is_transposed and found.has_vector:  # their order is XLA's choice
        return replace(found, target=e.outvals[0])
    return replace(found, left=right, right=left, transposed=True) if is_transposed else found


def _is_turn(e: Equation) -> bool:
    return e.name == "transpose" and tuple(e.eqn.params["permutation"]) == (1, 0)


def _side(
    program: Program, v: Value, axes: tuple[int, ...], makers: Mapping[int, Equation]
) -> StoredOperand | None:
    """Return an operand as stored, looking through transposes that leave its axes in groups."""
    if not isinstance(v, int):
        return None
    shape = program.avals[v].shape
    labels = [axes.index(k) if k in axes else len(axes) + k for k in range(len(shape))]
    found, written = _grouped(v, shape, labels, len(axes)), v
    while v in makers and makers[v].name == "transpose" and isinstance(makers[v].invals[0], int):
        turn = makers[v].eqn.params["permutation"]
        v = makers[v].invals[0]
        assert isinstance(v, int)
        labels = [labels[turn.index(k)] for k in range(len(turn))]
        found = _grouped(v, program.avals[v].shape, labels, len(axes)) or found
    return found and replace(found, transposed=found.value != written)


def _grouped(v: int, shape: tuple[int, ...], labels: list[int], pairs: int) -> StoredOperand | None:
    """Return an operand whose axes have these labels: numbers of pairs, or above these if free."""
    is_summed = [i < pairs for i in labels]
    order = tuple(i for i in labels if i < pairs)
    free = [i for i in labels if i >= pairs]
    first = is_summed[0]
    if free != sorted(free) or is_summed != sorted(is_summed, reverse=first):
        return None
    sizes = list(zip(shape, is_summed, strict=True))
    ours, theirs = (tuple(n for n, s in sizes if s == is_sum) for is_sum in (False, True))
    return StoredOperand(v, ours, theirs, first and bool(ours), order, False)
