"""Separability: sums over pairs that equal products of sums over each side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from symjax_rewrite.ir.egraph import EGraph, Justification
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import Product, expand, flattest, is_half, is_ring
from symjax_rewrite.ir.term import ADD, CONTRACT, Node, Ref
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import SEPARABILITY, RuleContext, Sides, axiom
from symjax_rewrite.rewriting.scales import apart, scaled_factor
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
    sides = _sides(p, [a.over(d.axes) for a in total.args])
    if sides is None:
        return
    summed, other = ((side.ref, side.only) for side in sides)
    scale, inside = total.attr[0] ** 2 * p.coefficient, 1.0
    if abs(scale) < 1:  # the squares of the scaled values may be infinite
        scale, inside = math.copysign(1, scale), math.sqrt(abs(scale))
    yield from _separated(ctx, cls, p, summed, other, (scale, inside))


class PairTerm(NamedTuple):
    """One term of a difference over pairs: the indices that the other term does not read."""

    number: int
    ref: Ref
    only: list[int]


def _sides(p: Product, terms: list[Ref]) -> tuple[PairTerm, PairTerm] | None:
    """Return the two terms of a sum over pairs, first one that is summed over all its own indices.

    None if every pair is an output, or if the terms are no pairs.
    """
    u, v = terms
    if len(set(u.axes)) != len(u.axes) or len(set(v.axes)) != len(v.axes):
        return None
    first = PairTerm(0, u, [i for i in u.axes if i not in v.axes])
    second = PairTerm(1, v, [i for i in v.axes if i not in u.axes])
    if not first.only or not second.only:
        return None
    for summed, other in ((second, first), (first, second)):
        if all(i >= p.out for i in summed.only):
            return summed, other
    return None


def _sums(u: Any, v: Any) -> tuple[Any, Any]:
    """Return both sides of the law of differences, for one u against every v."""
    mean = jnp.mean(v, 0)
    left = jnp.sum(u[:, None] - v, 1)
    return left, len(v) * (u - mean) - jnp.sum(v - mean, 0)


@axiom(
    "Σⱼ (a·uᵢ+b·vⱼ) = |J|·(a·uᵢ+μ) + Σ (b·vⱼ−μ),  μ = mean b·v; also summed over i",
    property=SEPARABILITY,
    on=(CONTRACT, ADD),
    sides=(
        Sides("nd,md", _sums, "F"),
        Sides("nd,md", lambda u, v: tuple(map(jnp.sum, _sums(u, v))), "F"),
    ),
)
def pairwise_differences(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Separate sums of a sum of two terms over all pairs, or all partners, shifted by a mean.

    `distribute` refuses these, because the terms may cancel. Shifted by the mean of the summed
    side they do not: |J|·|uᵢ−μ| and Σ|vⱼ−μ| are at most once and twice Σ|uᵢ−vⱼ|, and so is what
    rounding adds. The gradients of squared distances are such sums. With weights the second term
    would not be small, so a weighted sum is not rewritten.
    """
    c = ctx.g.classes[cls]
    if node.op == ADD and len(node.args) != 1:
        return
    if is_half(c.dtype) or is_ring(c.dtype) or c.dtype.startswith("complex"):
        return
    p = expand(ctx.g, cls, lambda d: ctx.uses(d) <= 1 or sum_node(ctx, d) is None)
    inner = [f for f in p.factors if any(i >= p.out for i in f.axes)]
    total = sum_node(ctx, inner[0].cls) if len(inner) == 1 else None
    if total is None or len(total.args) != 2 or ctx.g.classes[inner[0].cls].dtype != c.dtype:
        return
    sides = _sides(p, [a.over(inner[0].axes) for a in total.args])
    if sides is not None:
        weights = [f for f in p.factors if f is not inner[0]]
        yield from _shifted_sums(ctx, cls, p, weights, sides, total.attr)


def _shifted_sums(
    ctx: RuleContext,
    cls: int,
    p: Product,
    weights: list[Ref],
    sides: tuple[PairTerm, PairTerm],
    coefficients: tuple,
) -> Iterator[Ref]:
    """Return the sum over each side, both shifted by the mean of the summed side."""
    c, why = ctx.g.classes[cls], pairwise_differences.reason(cls)
    summed, other = sides
    sizes = (*c.sizes, *p.bound)
    count = _whole(sizes[i] for i in summed.only)
    parted = apart(p)
    if not count or parted is None:
        return
    b, a = (coefficients[side.number] for side in sides)
    whole = ctx.g.term(CONTRACT, (summed.ref,), sizes, c.dtype, why, summed=summed.only)
    mean = _mean(ctx, whole, count, c.dtype, why)
    moved = (
        ctx.g.apply(ADD, (a, b), (other.ref, mean), c.dtype, why),
        ctx.g.apply(ADD, (b, -b), (summed.ref, mean), c.dtype, why),
    )
    ctx.whole.update(ref.cls for ref in moved)
    terms = []
    for ref in moved:
        q = parted[1]._replace(factors=(*weights, ref))
        found = order_product(ctx, q, c.sizes, c.dtype, why)
        if found is None:
            return
        terms.append(found)
    yield ctx.g.add(ADD, (parted[0],) * 2, tuple(terms), c.sizes, (), c.dtype, why)


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


def separable(g: EGraph, cls: int) -> tuple[Ref, Ref] | None:
    """Return the two terms over pairs whose sum over pairs the laws of this file separate."""
    p, dtype = flattest(g, cls), g.classes[cls].dtype
    inner = [f for f in p.factors if any(i >= p.out for i in f.axes)]
    if not inner or is_half(dtype) or dtype_kind(dtype) != "f":
        return None
    squared = len(inner) == 2 and inner[0] == inner[1] and len(p.factors) == 2
    sums = [n for n in g.classes[inner[0].cls].nodes if n.op == ADD and len(n.args) == 2]
    if not sums or not (len(inner) == 1 or (squared and sum(sums[0].attr) == 0)):
        return None
    sides = _sides(p, [a.over(inner[0].axes) for a in sums[0].args])
    return None if sides is None else (sides[0].ref, sides[1].ref)


def _whole(sizes) -> int:
    out = 1
    for s in sizes:
        if not isinstance(s, int):
            return 0
        out *= s
    return out
