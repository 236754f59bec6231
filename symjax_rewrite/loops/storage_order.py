"""Transposed operands and results of loops, read and written in the order in which they are stored.

A loop over time reads `moveaxis(x, 1, 0)` of batches of sequences, and its results are moved back.
A kernel reads and writes any axis of an array step by step, so that no transposed copy is made.

    for x_t in xᵀ: h ← a·h + x_t; results h_t; y = hᵀ
    → for x_t in the columns of x: h ← a·h + x_t; columns of y: h_t
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax import lax

from symjax_rewrite.ir.flat_program import Equation
from symjax_rewrite.loops.fusion import Surroundings, drop_results
from symjax_rewrite.loops.loop import Loop


def in_stored_order(loop: Loop, around: Surroundings) -> Loop:
    """Return a loop without the transpositions around it that move the axis of the steps alone."""
    loop = loop.copy()
    for v, source in loop.sources.items():
        while isinstance(source.value, int) and (e := around.makers.get(source.value)):
            if not _moves_only(e, order := _order(e), source.axis):
                break
            source = replace(source, value=e.invals[0], axis=order[source.axis])
        loop.sources[v] = source
    for k in range(len(loop.makes)):
        while _written_in_place(loop, around, k):
            pass
    drop_results(loop)
    return loop


def _order(e: Equation) -> Sequence[int]:
    return e.eqn.params["permutation"] if e.name == "transpose" else ()


def _moves_only(e: Equation, order: Sequence[int], axis: int) -> bool:
    """Return True for a transposition of which the other axes than one keep their order."""
    rest = [a for k, a in enumerate(order) if k != axis]
    return e.name == "transpose" and rest == sorted(rest)


def _written_in_place(loop: Loop, around: Surroundings, k: int) -> bool:
    """Let a loop make the transposition of a result that nothing else reads; True if it does."""
    v, (kind, what) = loop.makes[k], loop.results[k]
    users = around.users.get(v, ())
    if v in around.outputs or len(users) != 1 or kind not in ("ys", "moved", "kept"):
        return False
    number, axis, *is_reversed = (what, 0) if kind == "ys" else what
    order = list(_order(users[0]))
    to = order.index(axis) if order else 0
    if any(is_reversed) or not _moves_only(users[0], order, to):
        return False
    if kind == "kept":
        loop.ys.append(loop.graft(lambda y: lax.squeeze(y, (axis,)), [loop.ys[number]]))
        number = len(loop.ys) - 1
    loop.makes[k], loop.results[k] = users[0].outvals[0], ("moved", (number, to))
    return True
