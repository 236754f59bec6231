"""Elementwise operations and sums of products that XLA's library for CPUs takes into one call.

XLA computes other operands of a call in a loop of their own, and stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from symjax_rewrite.ir import term as op
from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.ir.term import Node

KNOWN = frozenset(
    "abs add add_any ceil convert_element_type cosh div erf exp exp2 expm1 floor integer_pow log"
    " log1p logistic max min mul neg pow round rsqrt sign sqrt square sub tanh".split()
)
if jax.__version_info__ >= (0, 11):
    KNOWN |= {"sin", "cos", "tan"}
ENDS = frozenset({"min", "max"})
LACKING = {  # by operation, those whose results it has not
    "convert_element_type": frozenset("and eq ge gt is_finite le lt ne not or xor".split()),
    **{end: ENDS - {end} for end in ENDS},
}
REDUCED = frozenset("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split())
LEAST_ELEMENTS = 1 << 12  # of what a call computes after a reduction, or of an operand of that
WHOLE_ROW = 32  # elements: XLA reduces longer rows of integers in pieces, out of memory


def is_known(name: str, operands: Iterable[str]) -> bool:
    """Return True for an operation that the library has; it has no clamp and no truth values.

    operands: names of the operations that compute its operands.
    """
    return name in KNOWN and (name not in LACKING or LACKING[name].isdisjoint(operands))


def is_outside(node: Node, operands: Iterable[str]) -> bool:
    """Return True for a term that a call reads: the library cannot compute it.

    operands: names of the functions that compute its operands.
    """
    return node.op == op.DELTA or (node.op == op.MAP and not is_known(node.attr[0], operands))


def is_followed(node: Node, is_called: bool) -> bool:
    """Return True for a term that a call computes too if it reads what the call has reduced.

    is_called: whether the term is a reduction of the library's.
    """
    if node.op == op.MAP:
        return is_known(node.attr[0], ())
    return is_called or (node.op in (op.ADD, op.CONTRACT) and not node.bound)


def is_cut(e: Equation) -> bool:
    """Return True for a reduction that XLA cuts in pieces, so that its operand is stored.

    The library reduces floats, and XLA integers and truth values of short rows in one loop. Of
    named sizes nothing is known.
    """
    if e.name not in REDUCED:
        return False
    x: Any = e.eqn.invars[0].aval
    rows = [x.shape[k] for k in e.eqn.params["axes"]]
    is_long = any(isinstance(n, int) and n > WHOLE_ROW for n in rows)
    return is_long and not jnp.issubdtype(x.dtype, jnp.inexact)


def is_product_with_vector(e: Equation, makers: Mapping[int, Equation]) -> bool:
    """Return True for a sum that the library computes as products of vectors and matrices.

    It sums x·a or x/a in float32 over one axis, where `a` varies along this axis and all that
    follow but the last. Measured, no stride is read then: `(x * a[:, None]).sum(0)` takes a
    thirtieth of the time of `x.sum(0)` for 100 rows of 30,000 elements. In float64 it does not.

    makers: of the program's values.
    """
    made = makers.get(e.invals[0]) if isinstance(e.invals[0], int) else None
    if e.name != "reduce_sum" or len(e.eqn.params["axes"]) != 1 or made is None:
        return False
    x: Any = e.eqn.invars[0].aval
    if x.dtype != "float32":
        return False
    summed = {*range(e.eqn.params["axes"][0], x.ndim)}
    places = {"mul": (0, 1), "div": (1,)}.get(made.name, ())
    repeated = (_repeated_axes(made, k, makers) & summed for k in places)
    return any(axes == {x.ndim - 1} < summed for axes in repeated)


def broadcast_operand(e: Equation, makers: Mapping[int, Equation]) -> int | None:
    """Return which operand of the product that a sum reads the library would repeat, or None.

    It sums x·a in float32 as products with their batch along the last axis, element by element,
    where `a` varies along the axes of the sum, and not along all outer axes of its result:
    `(x * a[:, None, :]).sum(0)`. Axes of size 1 are none.

    makers: of the program's values.
    """
    made = makers.get(e.invals[0]) if isinstance(e.invals[0], int) else None
    if e.name != "reduce_sum" or made is None or made.name != "mul":
        return None
    x: Any = e.eqn.invars[0].aval
    summed = {*e.eqn.params["axes"]}
    *outer, last = [k for k, n in enumerate(x.shape) if n != 1] or [-1]
    if x.dtype != "float32" or last in summed or not summed.intersection(outer):
        return None
    for k in (0, 1):
        axes = _repeated_axes(made, k, makers)
        if axes & {*outer} - summed and not axes & summed:
            return k
    return None


def _repeated_axes(e: Equation, k: int, makers: Mapping[int, Equation]) -> set[int]:
    """Return the axes of a result along which operand `k` is repeated."""
    v, avals = e.invals[k], [x.aval for x in (e.eqn.invars[k], e.eqn.outvars[0])]
    given, whole = (getattr(a, "shape", ()) for a in avals)
    axes = e.eqn.params.get("broadcast_dimensions", range(len(whole) - len(given), len(whole)))
    made = makers.get(v) if isinstance(v, int) else None
    is_spread = made is not None and made.name == "broadcast_in_dim"
    inner = _repeated_axes(made, 0, makers) if made is not None and is_spread else set()
    kept = {a for n, a in enumerate(axes) if given[n] == whole[a] and n not in inner}
    return {*range(len(whole))} - kept
