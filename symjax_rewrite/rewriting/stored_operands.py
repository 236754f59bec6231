"""Operands of reductions: stored in memory, or computed by XLA in the loop of the reduction."""

from __future__ import annotations

from collections.abc import Mapping

from symjax_rewrite.ir.dataflow import numbers
from symjax_rewrite.ir.flat_program import Equation, Program
from symjax_rewrite.ir.primitives import ELEMENTWISE, VIEWS

SAME_ORDER = frozenset({"reshape", "squeeze", "expand_dims"})  # of the elements in memory


def unstored_bytes(program: Program, e: Equation, makers: Mapping[int, Equation]) -> float | None:
    """Return the bytes of an operand that a form of an equation writes first; 0 if it is stored.

    None if no array that the operand is computed from has as many elements: it would be the
    largest.

    Example: of `reduce_sum(exp(x))` the bytes of `exp(x)`, and 0 of `reduce_sum(x)`; None of
    `reduce_sum(exp(x[:, None] - y))`.
    """
    (x,) = numbers(e.invals)
    while x in makers and makers[x].name in SAME_ORDER and numbers(makers[x].invals):
        x, *_ = numbers(makers[x].invals)
    size, seen, stack = program.avals[x].size, {x}, [x]
    for v in stack:
        maker = makers.get(v)
        if maker is not None and maker.name in ELEMENTWISE | VIEWS:
            stack += [a for a in dict.fromkeys(numbers(maker.invals)) if a not in seen]
            seen.update(stack)
        elif v == x:
            return 0.0
        elif getattr(program.avals[v], "size", 0) >= size:
            return size * program.avals[x].dtype.itemsize
    return None
