"""The price of transposed copies: transposes in a program, and those that XLA makes for products.

A product reads each operand with its batch axes first, and then its free and its summed axes, each
in one piece and in either order. XLA folds a transposition that only products read into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from symjax_rewrite.cost.device_profiles import Device
from symjax_rewrite.ir.dataflow import numbers, users_of
from symjax_rewrite.ir.flat_program import Equation, Program


def transposed_seconds(program: Program, device: Device) -> float:
    """Return the seconds of the transposed copies in a program, without those inside loops."""
    if device.layouts is None:
        return 0.0
    users, outputs = users_of(program.equations), {*numbers(program.outputs)}
    folded = {
        e.outvals[0]: e
        for e in program.equations
        if e.name == "transpose"
        and e.outvals[0] not in outputs
        and all(r.name == "dot_general" for r in users.get(e.outvals[0], ()))
    }
    elements = 0
    for e in program.equations:
        if e.name == "transpose" and e.outvals[0] not in folded:
            order = e.eqn.params["permutation"]
            elements += _moved(e.eqn.invars[0].aval, order)
        elif e.name == "dot_general":
            elements += sum(_operand(e, side, folded) for side in range(2))
    return elements * device.layouts.result_s


def _operand(e: Equation, side: int, folded: Mapping[int, Equation]) -> int:
    """Return the elements of the copy of an operand that a product needs."""
    summed, batch = (both[side] for both in e.eqn.params["dimension_numbers"])
    aval: Any = e.eqn.invars[side].aval
    free = [k for k in range(aval.ndim) if k not in summed and k not in batch]
    v = e.invals[side]
    if isinstance(v, int) and v in folded:
        aval = folded[v].eqn.invars[0].aval
        order = folded[v].eqn.params["permutation"]
        batch, free, summed = ([order[k] for k in axes] for axes in (batch, free, summed))
    ways = ((*free, *summed), (*summed, *free))
    return min(_moved(aval, (*batch, *way)) for way in ways)


def _moved(aval: Any, order: Sequence[int]) -> int:
    """Return the elements that a copy in another order of axes moves; 0 if none moves."""
    shape = aval.shape
    if not all(isinstance(n, int) for n in shape):
        return 0
    long = [k for k in order if shape[k] != 1]
    return 0 if long == sorted(long) else math.prod(shape)
