"""The price of transposed copies: transposes in a program, and those that XLA makes for products.

A product reads each operand with its batch axes first, and then its free and its summed axes, each
in one piece and in either order. An operand in no such order is copied, on the left with its summed
axes last and on the right with its free axes last. XLA folds a transposition that only products and
gathers read into them, and computes elementwise functions where they are read, so a copy moves
their operands in memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.cost.product_layouts import swapped_seconds
from symjax_rewrite.cost.profile_groups import SLOW_MAPS, ProductLayouts
from symjax_rewrite.ir.dataflow import cone, makers_of, numbers, users_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE
from symjax_rewrite.ir.transposed_values import TransposedValue, transposed_value

FOLDING = frozenset({"dot_general", "gather"})  # that read an operand in any order of its axes
FUSED = (ELEMENTWISE - SLOW_MAPS) | {"broadcast_in_dim", "transpose"}  # into each reader


def transposed_seconds(
    program: Program, device: Device, within: Collection[Equation] | None = None
) -> float:
    """Return the seconds of the transposed copies in a program, without those inside loops.

    within: the equations whose copies count; None for all.
    """
    if device.layouts is None:
        return 0.0
    users, outputs = program.once(users_of), {*numbers(program.outputs)}
    folded = {
        e.outvals[0]
        for e in program.equations
        if e.name == "transpose"
        and e.outvals[0] not in outputs
        and all(r.name in FOLDING or _undoes(r, e) for r in users.get(e.outvals[0], ()))
    }
    makers = program.once(makers_of)
    copies = _Copies(program.avals, makers, _shared(users), device, device.layouts)
    seconds = 0.0
    for e in program.equations if within is None else within:
        if e.name == "transpose" and e.outvals[0] not in folded:
            seconds += _transposition(e, transposed_value(e, makers, users, outputs), copies)
        elif _multiplies(e):
            if e.outvals[0] in outputs or any(map(_is_other, users.get(e.outvals[0], ()))):
                seconds += copies.of(e.outvals[0], e.eqn.outvars[0].aval, range(_rank(e)))
        elif e.name == "dot_general":
            seconds += sum(_operands(e, copies).values())
    return seconds


def copied_operands(program: Program, device: Device) -> Iterator[tuple[list[Equation], int]]:
    """Yield the operands that are stored beside a copy in another order of axes, with its readers.

    A value that only one product reads is computed in the order that the product needs.
    """
    if device.layouts is None:
        return
    users, makers = program.once(users_of), program.once(makers_of)
    copies = _Copies(program.avals, makers, _shared(users), device, device.layouts)
    readers: dict[int, list[Equation]] = {}
    for e in program.equations:
        for v in _operands(e, copies) if e.name == "dot_general" and not _multiplies(e) else ():
            if v in copies.shared or v not in makers or makers[v].name not in FUSED:
                readers.setdefault(v, []).append(e)
    yield from ((found, v) for v, found in readers.items())


def _shared(users: Mapping[int, Sequence[Equation]]) -> set[int]:
    """Return the values that several equations read."""
    return {v for v, readers in users.items() if len(readers) > 1}


def least_copy_seconds(device: Device) -> float:
    """Return the seconds of the largest copy that is too small for a decision."""
    facts = device.layouts
    return 0.0 if facts is None else facts.least_elements * facts.copy_s


def _undoes(second: Equation, first: Equation) -> bool:
    """Return True if two transposes in turn are none."""
    if second.name != "transpose":
        return False
    order = first.eqn.params["permutation"]
    return [order[k] for k in second.eqn.params["permutation"]] == [*range(len(order))]


def _transposition(e: Equation, found: TransposedValue | None, copies: _Copies) -> float:
    """Return the seconds of a transposition.

    found: the transposed products that it can be computed from. XLA transposes a product alone,
    which `placed_products` prices where it has no batch, and reads a function of products across
    its rows; `product_orientation` has the other form.
    """
    copy_s = copies.of(e.outvals[0], e.eqn.outvars[0].aval, range(_rank(e)))
    if found is None:
        return copy_s
    aval: Any = e.eqn.invars[0].aval
    if not found.equations and aval.ndim == 2:
        return 0.0
    inside_s = sum(swapped_seconds(p, copies.layouts) for p in found.products)
    inside_s += sum(copies.of(v, aval, found.order) for v in found.stored)
    return min(copy_s, inside_s) if found.equations else inside_s


def _multiplies(e: Equation) -> bool:
    """Return True for a product that sums nothing, which XLA computes as a multiplication."""
    return e.name == "dot_general" and not e.eqn.params["dimension_numbers"][0][0]


def _is_other(e: Equation) -> bool:
    return e.name != "transpose"


def _rank(e: Equation) -> int:
    return len(shape_of(e.eqn.outvars[0]))


def _factors(e: Equation, order: Sequence[int]) -> Iterator[tuple[int, Any, tuple[int, ...]]]:
    """Yield the factors of a multiplication with the orders in which it reads their axes.

    order: of the result's axes: those of the batch, of the left and of the right factor.
    """
    first = 0
    for v, x, batch in zip(
        e.invals, e.eqn.invars, e.eqn.params["dimension_numbers"][1], strict=True
    ):
        free = [k for k in range(len(shape_of(x))) if k not in batch]
        axes = dict(enumerate(batch)) | dict(enumerate(free, start=first + len(batch)))
        first += len(free)
        if isinstance(v, int):
            yield v, x.aval, tuple([axes[k] for k in order if k in axes])


def _operands(e: Equation, copies: _Copies) -> dict[int, float]:
    """Return the operands of which a product needs copies, and the seconds of these.

    XLA computes a product without free axes as one reduction, which reads both in either order.
    """
    summed, batch = e.eqn.params["dimension_numbers"]
    is_reduction = _rank(e) == len(batch[0])

    def seconds_of(side: int, way: int) -> float:
        x: Any = e.eqn.invars[side].aval
        ours, many = summed[side], batch[side]
        free = [k for k in range(x.ndim) if k not in ours and k not in many]
        last = (*ours, *many) if is_reduction else (*many, *ours, *free)
        order = last if way else (*many, *free, *ours)
        return copies.of(e.invals[side], x, order, is_operand=True)

    if is_reduction:
        sides = min(([seconds_of(side, way) for side in (0, 1)] for way in (0, 1)), key=sum)
    else:  # an operand that is in one of the orders is not copied
        made = [seconds_of(side, side) for side in (0, 1)]
        sides = [s if s and seconds_of(side, 1 - side) else 0.0 for side, s in enumerate(made)]
    seconds: dict[int, float] = {}
    for v, s in zip(e.invals, sides, strict=True):
        if s and isinstance(v, int):
            seconds[v] = seconds.get(v, 0.0) + s
    return seconds


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of values in other orders of their axes.

    avals: of all values. shared: the values that several equations read, so that one order does not
    serve all.
    """

    avals: Sequence[Any]
    makers: Mapping[int, Equation]
    shared: Collection[int]
    device: Device
    layouts: ProductLayouts

    def of(self, v: object, aval: Any, order: Sequence[int], is_operand: bool = False) -> float:
        """Return the seconds to move the arrays that a value is computed from; 0 if in order.

        An operand that is read in several ways is moved once.
        """
        if not isinstance(v, int):
            return 0.0  # a literal is a scalar
        seconds, seen = 0.0, set()
        stack: list[tuple[int, Any, tuple[int, ...], bool]] = [(v, aval, tuple(order), False)]
        for v, aval, order, is_mapped in stack:
            counted = all(isinstance(n, int) and n for n in aval.shape)  # neither named nor empty
            if (v, order) in seen or not counted:
                continue
            seen.add((v, order))
            maker = self.makers.get(v)
            long = [k for k in order if aval.shape[k] != 1]
            in_order = long == sorted(long)
            inner = self._inner_order(v, maker, order, in_order, is_operand)
            if maker is not None and _multiplies(maker) and not (is_operand and v in self.shared):
                stack += [(*factor, is_mapped) for factor in _factors(maker, order)]
            elif inner is not None and maker is not None:
                maps = is_mapped or maker.name in ELEMENTWISE
                stack += [(r, x, inner, maps) for r, x in _whole(maker, len(inner))]
            elif not in_order:
                each = self._rate(v, aval.shape, long, is_mapped)
                seconds += aval.size * (max(each, self._written(v)) if is_operand else each)
                seconds += self.device.page_seconds(aval.size * aval.dtype.itemsize)
        return seconds

    def _rate(self, v: int, shape: Sequence[int], order: Sequence[int], is_mapped: bool) -> float:
        """Return the seconds to move an element of a value to another order of its long axes.

        is_mapped: True if a function of the value is computed in that order.
        """
        if self._is_of_smaller(v):  # computed once more, in this order
            return self._written(v) + self._strided_seconds(v, order[-1])
        each = self.layouts.moved_each(shape, order)
        return max(each, self.layouts.mapped_each(shape, order)) if is_mapped else each

    def _written(self, v: int) -> float:
        """Return the seconds to write an element of a value."""
        return self.avals[v].dtype.itemsize / self.device.bytes_per_s

    def _inner_order(
        self,
        v: int,
        maker: Equation | None,
        order: tuple[int, ...],
        in_order: bool,
        is_operand: bool,
    ) -> tuple[int, ...] | None:
        """Return the order in which a value is read where it is used; None if it is stored."""
        if maker is None:
            return None
        if maker.name == "transpose":
            return tuple([maker.eqn.params["permutation"][k] for k in order])
        if in_order or (is_operand and v in self.shared):
            return None
        if maker.name in ELEMENTWISE:
            return order
        if maker.name == "broadcast_in_dim":
            axes = maker.eqn.params["broadcast_dimensions"]
            return tuple([axes.index(k) for k in order if k in axes])
        return None

    def _strided_seconds(self, v: int, axis: int) -> float:
        """Return the seconds of an element in which smaller arrays are read at a stride.

        axis: of the value, along which it is computed.
        """
        stored = (x for x in cone([(v, axis)], self._with_axis) if not self._is_fused(x[0]))
        strides = (math.prod(self.avals[u].shape[k + 1 :]) for u, k in stored)
        return sum(map(self.layouts.copied_each, strides))

    def _with_axis(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the values that a fused value is computed from and that have one of its axes."""
        v, axis = place
        if not self._is_fused(v):
            return []
        e = self.makers[v]
        if e.name == "transpose":
            axis = e.eqn.params["permutation"][axis]
        elif e.name == "broadcast_in_dim":
            axes = e.eqn.params["broadcast_dimensions"]
            axis = axes.index(axis) if axis in axes else -1
        shapes = ((u, self.avals[u].shape) for u in e.reads)
        return [(u, axis) for u, shape in shapes if shape and axis >= 0 and shape[axis] != 1]

    def _is_of_smaller(self, v: int) -> bool:
        """Return True for a value that XLA computes anew, cheaply and from smaller arrays."""
        found = cone([v], lambda u: self.makers[u].reads if self._is_fused(u) else ())
        stored = [self.avals[u].size for u in found if not self._is_fused(u)]
        return all(size < self.avals[v].size for size in stored)

    def _is_fused(self, v: int) -> bool:
        maker = self.makers.get(v)
        return maker is not None and maker.name in FUSED


def _whole(maker: Equation, axes: int) -> list[tuple[int, Any]]:
    """Return the values of so many axes that an equation reads."""
    read = zip(maker.invals, maker.eqn.invars, strict=True)
    return [(r, x.aval) for r, x in read if isinstance(r, int) and len(shape_of(x)) == axes]
