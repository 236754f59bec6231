"""Equations that compute every step of an axis separately.

`stepped_operands` returns the axes of the operands that correspond to an axis of the result.
`resized` returns the same equation for other entries of that axis, by default for a single one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.primitives import ELEMENTWISE
from symjax_rewrite.jax_internals import JaxprEqn

Axes = Sequence[int | None]  # stepped axis per operand; None: the same at every step

REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or".split())


def stepped_operands(eqn: JaxprEqn, axis: int) -> Axes | None:
    """Return the operand axes that correspond to `axis` of the result; None if not stepwise."""
    if len(eqn.outvars) != 1 or eqn.effects or axis >= len(shape_of(eqn.outvars[0])):
        return None
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(eqn, axis)
    if name in REDUCTIONS:
        gone = eqn.params["axes"]
        return [[i for i in range(len(shape_of(eqn.invars[0]))) if i not in gone][axis]]
    row = _ROWS.get(name)
    return row(eqn, axis) if row else None


def stepped_result(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """Return the axis of the result that corresponds to an axis of an operand, or None."""
    if len(eqn.outvars) != 1 or not hasattr(eqn.outvars[0].aval, "shape"):
        return None
    for k, size in enumerate(shape_of(eqn.outvars[0])):
        if size == shape_of(eqn.invars[operand])[axis]:
            axes = stepped_operands(eqn, k)
            if axes is not None and axes[operand] == axis:
                return k
    return None


def resized(eqn: JaxprEqn, axis: int, size: int = 1) -> Callable[..., list[Any]]:
    """Return the equation for some entries of an axis of its result; operands keep their axes."""
    params = dict(eqn.params)
    name = {"broadcast_in_dim": "shape", "reshape": "new_sizes", "slice": "limit_indices"}.get(
        eqn.primitive.name
    )
    if name is not None:
        sizes = params[name]
        params[name] = (*sizes[:axis], size, *sizes[axis + 1 :])
    return lambda *args: jax_internals.eval_equation(eqn, args, params)


def _elementwise(eqn: JaxprEqn, axis: int) -> Axes | None:
    """Return axes if operands are scalars, or have the result's rank with some axes of size one."""
    shape = shape_of(eqn.outvars[0])
    shapes = [shape_of(v) for v in eqn.invars]
    if any(s and len(s) != len(shape) for s in shapes):
        return None
    return [axis if s and s[axis] == shape[axis] else None for s in shapes]


def _broadcast(eqn: JaxprEqn, axis: int) -> Axes | None:
    if len(eqn.invars) != 1:
        return None
    shape, dims = shape_of(eqn.invars[0]), eqn.params["broadcast_dimensions"]
    place = [i for i, d in enumerate(dims) if d == axis]
    if place and shape[place[0]] == shape_of(eqn.outvars[0])[axis]:
        return [place[0]]
    return [None]


def _reshape(eqn: JaxprEqn, axis: int) -> Axes | None:
    """Return the operand axis if the reshape keeps the axis and the size before it."""
    if eqn.params.get("dimensions") is not None or len(eqn.invars) != 1:
        return None
    new, old = shape_of(eqn.outvars[0]), shape_of(eqn.invars[0])
    if not all(isinstance(d, int) for d in (*new, *old)):
        return None
    before = math.prod(new[:axis])
    for i, size in enumerate(old):
        if size == new[axis] and math.prod(old[:i]) == before:
            return [i]
    return None


def _squeeze(eqn: JaxprEqn, axis: int) -> Axes | None:
    gone = {d % len(shape_of(eqn.invars[0])) for d in eqn.params["dimensions"]}
    return [[i for i in range(len(shape_of(eqn.invars[0]))) if i not in gone][axis]]


def _dot_general(eqn: JaxprEqn, axis: int) -> Axes | None:
    """Return the operand axes: batch axes first, then free axes of the left, then of the right.

    A step may lie along a free axis only if the other operand has no free axis. A product of
    matrices, computed row by row, would read the other matrix in every step.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    left, right = batch
    if axis < len(left):
        return [left[axis], right[axis]]
    free = [
        [k for k in range(len(shape_of(v))) if k not in sums and k not in own]
        for v, sums, own in zip(eqn.invars, contracted, batch, strict=True)
    ]
    if free[0] and free[1]:
        return None
    place = (free[0] or free[1])[axis - len(left)]
    return [place, None] if free[0] else [None, place]


def _slice(eqn: JaxprEqn, axis: int) -> Axes | None:
    p, size = eqn.params, shape_of(eqn.invars[0])[axis]
    stride = 1 if p["strides"] is None else p["strides"][axis]
    whole = p["start_indices"][axis] == 0 and p["limit_indices"][axis] == size and stride == 1
    return [axis] if whole else None


def _concatenate(eqn: JaxprEqn, axis: int) -> Axes | None:
    return None if axis == eqn.params["dimension"] else [axis] * len(eqn.invars)


_ROWS: dict[str, Callable[[JaxprEqn, int], Axes | None]] = {
    "broadcast_in_dim": _broadcast,
    "transpose": lambda eqn, axis: [eqn.params["permutation"][axis]],
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot_general,
    "slice": _slice,
    "concatenate": _concatenate,
}
