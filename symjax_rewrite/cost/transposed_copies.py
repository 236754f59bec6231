"""The price of transposed copies: transposes in a program, and those that XLA makes for products.

A product reads each operand with its batch axes first, and then its free and its summed axes, each
in one piece and in either order. XLA folds a transposition that only products read into them, and
computes elementwise functions where they are read: what a copy moves are the arrays in memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.cost.profile_groups import ProductLayouts
from symjax_rewrite.ir.dataflow import makers_of, numbers, users_of
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE


def transposed_seconds(program: Program, device: Device) -> float:
    """Return the seconds of the transposed copies in a program, without those inside loops."""
    if device.layouts is None:
        return 0.0
    users, outputs = users_of(program.equations), {*numbers(program.outputs)}
    folded = {
        e.outvals[0]
        for e in program.equations
        if e.name == "transpose"
        and e.outvals[0] not in outputs
        and all(r.name == "dot_general" for r in users.get(e.outvals[0], ()))
    }
    shared = {v for v, readers in users.items() if len(readers) > 1}
    copies = _Copies(makers_of(program.equations), shared, device, device.layouts)
    seconds = 0.0
    for e in program.equations:
        if e.name == "transpose" and e.outvals[0] not in folded:
            order = range(len(e.eqn.params["permutation"]))
            seconds += copies.of(e.outvals[0], e.eqn.outvars[0].aval, order)
        elif e.name == "dot_general":
            seconds += sum(_operand(e, side, copies) for side in range(2))
    return seconds


def _operand(e: Equation, side: int, copies: _Copies) -> float:
    """Return the seconds of the copy of an operand that a product needs."""
    summed, batch = (both[side] for both in e.eqn.params["dimension_numbers"])
    aval: Any = e.eqn.invars[side].aval
    free = [k for k in range(aval.ndim) if k not in summed and k not in batch]
    ways = ((*batch, *free, *summed), (*batch, *summed, *free))
    return min(copies.of(e.invals[side], aval, way, is_operand=True) for way in ways)


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of values in other orders of their axes.

    shared: the values that several equations read, so that one order does not serve all.
    """

    makers: Mapping[int, Equation]
    shared: Collection[int]
    device: Device
    layouts: ProductLayouts

    def of(self, v: object, aval: Any, order: Sequence[int], is_operand: bool = False) -> float:
        """Return the seconds to move what a value is computed from in memory; 0 if in order."""
        shape = aval.shape
        if not all(isinstance(n, int) for n in shape):
            return 0.0
        long = [k for k in order if shape[k] != 1]
        maker = self.makers.get(v) if isinstance(v, int) else None
        if maker is not None and maker.name == "transpose":
            order = [maker.eqn.params["permutation"][k] for k in order]
            return self._through(maker, order, is_operand)
        if long == sorted(long):
            return 0.0
        is_stored = is_operand and v in self.shared
        if maker is not None and not is_stored and maker.name in ELEMENTWISE:
            return self._through(maker, order, is_operand)
        if maker is not None and not is_stored and maker.name == "broadcast_in_dim":
            axes = maker.eqn.params["broadcast_dimensions"]
            return self._through(maker, [axes.index(k) for k in order if k in axes], is_operand)
        is_result = maker is not None and maker.name == "dot_general" and not is_operand
        across = is_result and long[-1] != max(long)
        rate = self.layouts.result_s if across else self.layouts.copy_s
        elements = math.prod(shape)
        return elements * rate + self.device.page_seconds(elements * aval.dtype.itemsize)

    def _through(self, maker: Equation, order: Sequence[int], is_operand: bool) -> float:
        """Return the seconds for what a value is computed from where it is read."""
        read = {
            r: x.aval
            for r, x in zip(maker.invals, maker.eqn.invars, strict=True)
            if isinstance(r, int)
        }
        whole = [(r, aval) for r, aval in read.items() if getattr(aval, "ndim", 0) == len(order)]
        return sum(self.of(r, aval, order, is_operand) for r, aval in whole)
