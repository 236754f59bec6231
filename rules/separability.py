"""Separability: sums over pairs that equal products of sums over each side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from symjax_rewrite.ir.egraph import Justification
from symjax_rewrite.ir.products import Product, expand, is_half, is_ring
from symjax_rewrite.ir.term import ADD, CONTRACT, Node, Ref
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import SEPARABILITY, RuleContext, Sides, axiom
from symjax_rewrite.rewriting.scales import scaled_factor
from symjax_rewrite.rules.distributivity import sum_node


def _distances(u: Any, v: Any) -> tuple[Any, Any]:
    """Return both sides of the law, for one u against every v."""
    mean = jnp.mean(v, 0)
    a, b = u - mean, v - mean
    left = jnp.sum((u[:, None] - v) ** 2, (1, 2))
    return left, len(v) * jnp.sum(a**2, 1) + jnp.sum(b**2) - 2 * a @ jnp.sum(b, 0)


@axiom(
    "Σⱼ (uᵢ−vⱼ)² = |J|·(uᵢ−μ)² + Σ (vⱼ−μ)² − 2·(uᵢ−μ)·Σ (vⱼ−μ),  μ = mean v; also summed over i",
    property=SEPARABILITY,
    on=(CONTRACT, ADD),
    sides=(
        Sides("nd,md", _distances, "F"),
        Sides("nd,md", lambda u, v: tuple(map(jnp.sum, _distances(u, v))), "F"),
    ),
)
def pairwise_squares(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Separate sums of squared differences over all pairs, or all partners, shifted by a mean.

    The left side does not change if u and v are shifted together, so the right side is computed at
    u−μ, v−μ. At an offset of 1e4 the unshifted form has no correct digit in float32. The mean is
    that of a side that is summed, so the last term is close to zero and nothing cancels. With
    weights the last term would not be close to zero, so a weighted sum is not rewritten.
    """
    c = ctx.g.classes[cls]
    if node.op == ADD and len(node.args) != 1:
        return
    if is_half(c.dtype) or is_ring(c.dtype) or c.dtype.startswith("complex"):
        return
    p = expand(ctx.g, cls, lambda d: ctx.uses(d) <= 1 or sum_node(ctx, d) is None)
    if len(p.factors) != 2 or p.factors[0] != p.factors[1]:
        return
    d = p.factors[0]
    total = sum_node(ctx, d.cls)
    if total is None or len(total.args) != 2 or sum(total.attr) != 0:
        return
    u, v = (a.over(d.axes) for a in total.args)
    if len(set(u.axes)) != len(u.axes) or len(set(v.axes)) != len(v.axes):
        return
    only_u = [i for i in u.axes if i not in v.axes]
    only_v = [i for i in v.axes if i not in u.axes]
    if not only_u or not only_v:
        return
    summed, other = (v, only_v), (u, only_u)
    if any(i < p.out for i in only_v):
        summed, other = other, summed
    if any(i < p.out for i in summed[1]):
        return  # every distance is an output
    scale, inside = total.attr[0] ** 2 * p.coefficient, 1.0
    if abs(scale) < 1:  # the squares of the scaled values may be infinite
        scale, inside = math.copysign(1, scale), math.sqrt(abs(scale))
    yield from _separated(ctx, cls, p, summed, other, (scale, inside))


def _mean(ctx: RuleContext, total: Ref, count: int, dtype: str, why: Justification) -> Ref:
    """Return the mean of one side, by which both are shifted."""
    return ctx.g.apply(ADD, (1 / count,), (total,), dtype, why)


def _separated(
    ctx: RuleContext, cls: int, p: Product, left: tuple, right: tuple, scales: tuple[float, float]
) -> Iterator[Ref]:
    """Return the sums over each side.

    One of the two scales multiplies the squares, and the other multiplies the shifted values.
    """
    c = ctx.g.classes[cls]
    (u, only_u), (v, only_v) = left, right
    scale, inside = scales
    why = pairwise_squares.reason(cls)
    sizes = (*c.sizes, *p.bound)
    n_u, n_v = (_whole(sizes[i] for i in only) for only in (only_u, only_v))
    if not n_u or not n_v:
        return
    total = ctx.g.term(CONTRACT, (u,), sizes, c.dtype, why, summed=only_u)
    mean = _mean(ctx, total, n_u, c.dtype, why)
    su, sv = (ctx.g.apply(ADD, (1, -1), (a, mean), c.dtype, why) for a in (u, v))
    ctx.whole.update((su.cls, sv.cls))
    # Scaled after the shift: far from zero a product rounds away what the shift leaves.
    su, sv = (scaled_factor(ctx.g, a, inside, why) for a in (su, sv))
    ctx.whole.update((su.cls, sv.cls))
    terms = []
    for factors in ((su, su), (sv, sv), (su, sv)):
        q = Product(1, factors, p.out, p.bound, p.precision)
        ref = order_product(ctx, q, c.sizes, c.dtype, why)
        if ref is None:
            return
        terms.append(ref)
    yield ctx.g.add(ADD, (scale, scale, -2 * scale), tuple(terms), c.sizes, (), c.dtype, why)


def _whole(sizes) -> int:
    out = 1
    for s in sizes:
        if not isinstance(s, int):
            return 0
        out *= s
    return out
