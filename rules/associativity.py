"""Associativity: products may be computed in any order.

`Σ_j (Σ_k a_ik b_kj) c_jl = Σ_k a_ik (Σ_j b_kj c_jl)`. The law `Σ_k a·b = a·Σ_k b (k ∉ a)` is the
same statement about a factor that does not carry the summed index. Together they give matrix-chain
order, low-rank products kept factored, scale hoisting, deferred normalisation and the
mixture-of-experts sandwich.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from symjax_rewrite.cost.term_cost import is_dot
from symjax_rewrite.ir.products import Product, expand_node, is_half, product_node
from symjax_rewrite.ir.term import ADD, CONTRACT, DELTA, Node, Ref
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, RuleContext, axiom, built
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
    for may_open in openers(ctx, cls, node):
        p = expand_node(ctx.g, cls, node, may_open)
        if p in seen or not _worth(ctx, p, node):
            continue
        seen.add(p)
        yield from built(r.ordered, p)


def openers(ctx: RuleContext, cls: int, node: Node) -> list[Callable[[int], bool]]:
    """Return predicates of the factors to open: none, those used once, or all that may pay."""
    if is_half(ctx.g.classes[cls].dtype):  # no scale may leave a sum
        is_sum = functools.partial(is_sum_of_products, ctx)
        return [lambda d: ctx.uses(d) <= 1 and is_sum(d), is_sum]
    opened = _opened(ctx, cls, node)
    shared = {d for d in opened if ctx.uses(d) > 1}
    found: list[Callable[[int], bool]] = [lambda _: False]
    if len(shared) < len(opened):
        found.append(lambda d: ctx.uses(d) <= 1)
    return [*found, opened.__contains__] if shared else found


def _opened(ctx: RuleContext, cls: int, node: Node) -> set[int]:
    """Return the factors of a product, and the factors of these, that may be opened.

    Who opens a shared product computes one product more, and saves its share of the shared one.
    More than one such product is opened only if the launches do not outlast all that may be saved.
    """
    g, model = ctx.g, ctx.model
    saved_s, launches = _seconds(ctx, cls), 1
    share = {cls: 1.0}
    queue = [(cls, node)]
    for c, reader in queue:
        for d in [g.find(a).cls for a in reader.args]:
            inner = None if d in share else product_node(g, d)
            if inner is None:
                continue
            uses = max(ctx.uses(d), 1)
            part = share[c] / uses
            if uses > 1 and is_dot(inner) and not ctx.frozen(d):
                more_s = part * _seconds(ctx, d)
                if launches > 1 and saved_s + more_s <= (launches + 1) * model.device.launch_s:
                    continue
                saved_s, launches = saved_s + more_s, launches + 1
            share[d] = part
            queue.append((d, inner))
    return {d for d in share if d != cls}


def _seconds(ctx: RuleContext, cls: int) -> float:
    return ctx.model.node_seconds(ctx.g, cls, ctx.g.classes[cls].first)


def _worth(ctx: RuleContext, p: Product, node: Node) -> bool:
    if not p.bound or _is_scaled_sum(ctx, p, node):
        return False
    if len(p.factors) > 2 or p.factors != node.args:
        return True
    if any(ctx.has(f.cls, DELTA) for f in p.factors):
        return True
    reads = [set(f.axes) for f in p.factors]
    shared = set[int].intersection(*reads) if len(reads) > 1 else set[int]()
    return any(i >= p.out and i not in shared for f in p.factors for i in f.axes)


def _is_scaled_sum(ctx: RuleContext, p: Product, node: Node) -> bool:
    """Return True for a number times one sum, as written.

    With the number inside, XLA's library multiplies all terms, by an array of the number where
    several sums have it: correlations of bootstrap samples took 1.1 to 1.4 times as long.
    """
    inner = product_node(ctx.g, ctx.g.find(node.args[0]).cls) if node.op == ADD else None
    if inner is None or len(inner.args) != 1 or len(p.factors) != 1:
        return False
    return inner.bound == p.bound and ctx.g.find(inner.args[0]).cls == p.factors[0].cls
