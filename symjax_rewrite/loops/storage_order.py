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
from symjax_rewrite.loops.fusion import Surroundings, drop_results, in_order
from symjax_rewrite.loops.loop import Loop, Source


def in_stored_order(loop: Loop, around: Surroundings) -> Loop:
    """Return a loop without the transpositions around it that move the axis of the steps alone."""
    loop = loop.copy()
    for v, source in list(loop.sources.items()):
        moved = source
        while isinstance(moved.value, int) and (e := around.makers.get(moved.value)):
            if not _moves_only(e, order := _order(e), moved.axis):
                break
            moved = replace(moved, value=e.invals[0], axis=order[moved.axis])
        if moved.axis == source.axis or not source.kept:
            loop.sources[v] = moved
        else:
            _read_without_axis(loop, v, moved)
    for k in range(len(loop.makes)):
        while _written_in_place(loop, around, k):
            pass
    drop_results(loop)
    return loop


def _read_without_axis(loop: Loop, v: int, moved: Source) -> None:
    """Read a value that keeps the axis of the steps from another axis, and add the old axis."""
    axis, aval = loop.sources.pop(v).axis, loop.body.avals[v]
    shape = (*aval.shape[:axis], *aval.shape[axis + 1 :])
    entry = loop.body.new_value(aval.update(shape=shape))
    loop.sources[entry] = replace(moved, kept=False)
    loop.substitute({v: loop.graft(lambda x: lax.expand_dims(x, (axis,)), [entry])})
    loop.body.equations = in_order(loop.body.equations)


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
