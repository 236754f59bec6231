"""Equations that compute every step of an axis separately.

`stepped_operands` returns the axes of the operands that correspond to an axis of the result.
`resized` returns the same equation for other entries of that axis, by default for a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from symjax_rewrite import jax_internals
from symjax_rewrite.cost.equation_cost import shape_of
from symjax_rewrite.ir.axis_factorization import related_axes
from symjax_rewrite.ir.primitives import ELEMENTWISE
from symjax_rewrite.jax_internals import JaxprEqn

Axes = Sequence[int | None]  # stepped axis per operand; None: the same at every step

SPREADING = ELEMENTWISE | {"broadcast_in_dim"}  # an axis of the result may be of no operand
STEPWISE = SPREADING | frozenset(
    """reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or transpose reshape squeeze
    dot_general slice concatenate""".split()
)


def stepped_operands(eqn: JaxprEqn, axis: int) -> Axes | None:
    """Return the operand axes that correspond to `axis` of the result; None if not stepwise.

    A step of a product may lie along a free axis only if the other operand has no free axis. A
    product of matrices, computed row by row, would read the other matrix in every step.
    """
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or eqn.effects or name not in STEPWISE:
        return None
    operands, result = related_axes(eqn)
    if axis >= len(result):
        return None
    found = [mine.index(result[axis]) if result[axis] in mine else None for mine in operands]
    if name not in SPREADING and found == [None] * len(found):
        return None
    if name == "dot_general" and None in found:
        free = result[len(eqn.params["dimension_numbers"][1][0]) :]
        return None if all(any(a in free for a in mine) for mine in operands) else found
    return found


def stepped_result(eqn: JaxprEqn, operand: int, axis: int) -> int | None:
    """Return the axis of the result that corresponds to an axis of an operand, or None."""
    if len(eqn.outvars) != 1 or not hasattr(eqn.outvars[0].aval, "shape"):
        return None
    for k in range(len(shape_of(eqn.outvars[0]))):
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
