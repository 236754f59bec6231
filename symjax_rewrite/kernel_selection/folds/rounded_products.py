"""Terms whose error is a rounding already: multiples of products that the program rounds.

A program that multiplies v by weights of bfloat16 rounds every dp = dO·v to bfloat16. The
derivative by the scores, p·(dp - Σ p·dp), then has an error of one rounding of dp, times p. One
more rounding, as FlashAttention does (Dao 2023), adds an error of that size, so that kernels
multiply the derivative in bfloat16, not in two parts. Float16 ends too early for derivatives.
"""

from __future__ import annotations

from typing import Any

from symjax_rewrite.ir.dataflow import node_of, postorder
from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.term import ADD, CONST, CONTRACT, MAP

ROUNDED = "bfloat16"
# Of the operations that are linear in some operands: these operands.
_LINEAR = {"select_n": slice(1, None), "convert_element_type": slice(1), "div": slice(1)}


def is_rounded_product(g: EGraph, cls: int) -> bool:
    """Return True if a class sums products, of no precision that is asked for, in bfloat16."""
    node = node_of(g, cls)
    summed = node.op == CONTRACT and bool(node.bound)
    return summed and g.classes[cls].dtype == ROUNDED and has_usual_precision(node.attr)


def has_usual_precision(attr: Any) -> bool:
    """Return True if no precision is asked for a product."""
    asked = attr if isinstance(attr, tuple) else (attr,)
    return all(p is None or str(p).lower() == "default" for p in asked)


def scales_rounded_product(g: EGraph, cls: int, known: dict[int, bool]) -> bool:
    """Return True if every addend of a class is a multiple of a rounded product, or a sum of some.

    Of a sum over an index the summand counts, not an operand that a product reads: Σ_d dO·v is no
    multiple of v. known: results; new ones are added.
    """
    for c in postorder([cls], lambda c: _scaled(g, c), known):
        node, found = node_of(g, c), [known[x] for x in _scaled(g, c)]
        is_zero = node.op == CONST and node.attr[0] == 0
        combined = any(found) if node.op == CONTRACT else bool(found) and all(found)
        known[c] = is_zero or is_rounded_product(g, c) or combined
    return known[cls]


def _scaled(g: EGraph, cls: int) -> list[int]:
    """Return the operands that a class may be a multiple of; of a sum, those that it adds up."""
    node = node_of(g, cls)
    if is_rounded_product(g, cls):
        return []
    if node.op == CONTRACT:
        indices = node.out + len(node.bound)
        return [a.cls for a in node.args if not node.bound or len({*a.axes}) == indices]
    if node.op == ADD:
        return [a.cls for a in node.args]
    linear = _LINEAR.get(node.attr[0], slice(0)) if node.op == MAP else slice(0)
    return [a.cls for a in node.args[linear]]
