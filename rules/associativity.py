"""Associativity: products may be computed in any order.

`Σ_j (Σ_k a_ik b_kj) c_jl = Σ_k a_ik (Σ_j b_kj c_jl)`. The law `Σ_k a·b = a·Σ_k b (k ∉ a)` is the
same statement about a factor that does not carry the summed index. Together they give matrix-chain
order, low-rank products kept factored, scale hoisting, deferred normalisation and the
mixture-of-experts sandwich.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from symjax_rewrite.ir.products import Product, expand_node, is_half
from symjax_rewrite.ir.term import ADD, CONTRACT, DELTA, Node, Ref
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, RuleContext, axiom
from symjax_rewrite.rules.cancellation import is_sum_of_products


@axiom(
    law("(a·b)·c = a·(b·c)", a="ij", b="jk", c="kr"),
    property=ASSOCIATIVITY,
    on=(CONTRACT, ADD),
    source="Godbole 1973 (optimal matrix chains)",
)
def contraction_order(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Find the cheapest order of the flattened product; shared factors may stay unopened."""
    if node.op == ADD and len(node.args) != 1:
        return
    r, seen = RightSide.of(ctx, contraction_order, cls), set[Product]()
    for may_open in openers(ctx, cls):
        p = expand_node(ctx.g, cls, node, may_open)
        if p in seen or not _worth(ctx, p, node):
            continue
        seen.add(p)
        if (ref := r.ordered(p)) is not None:
            yield ref


def openers(ctx: RuleContext, cls: int) -> list:
    """Return predicates of the factors to open: no factors, those used once, or all."""
    if is_half(ctx.g.classes[cls].dtype):  # no scale may leave a sum
        is_sum = functools.partial(is_sum_of_products, ctx)
        return [lambda d: ctx.uses(d) <= 1 and is_sum(d), is_sum]
    return [lambda d: False, lambda d: ctx.uses(d) <= 1, lambda d: True]


def _worth(ctx: RuleContext, p: Product, node: Node) -> bool:
    if not p.bound:
        return False
    if len(p.factors) > 2 or p.factors != node.args:
        return True
    if any(n.op == DELTA for f in p.factors for n in ctx.g.classes[f.cls].nodes):
        return True
    reads = [set(f.axes) for f in p.factors]
    shared = set[int].intersection(*reads) if len(reads) > 1 else set[int]()
    return any(i >= p.out and i not in shared for f in p.factors for i in f.axes)
