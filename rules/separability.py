"""Separability: sums and extrema over pairs that equal terms of sums and extrema of each side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax import lax
from jax.numpy import finfo

from symjax_rewrite.ir.egraph import EGraph
from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import Product, expand, flattest, is_half, product_node
from symjax_rewrite.ir.sizes import product
from symjax_rewrite.ir.term import ADD, CONTRACT, REDUCE, Node, Ref
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import SEPARABILITY, RuleContext, axiom
from symjax_rewrite.rewriting.scales import apart
from symjax_rewrite.rules.cancellation import sum_node

OPPOSITE = {"max": "min", "min": "max"}


class PairTerm(NamedTuple):
    """One term of a sum of two: its coefficient, and the indices that the other does not read."""

    coefficient: Any
    ref: Ref
    only: list[int]


@axiom(
    law("Σ((u[:, None] − v)**2, (1, 2)) = len(v)*Σ((u − μ)**2, 1) + Σ((v − μ)**2)"
        " − 2*(u − μ)·Σ(v − μ, 0), where μ = mean(v, 0)", kinds="F", u="nd", v="md"),
    law("Σ((u[:, None] − v)**2) = Σ(len(v)*Σ((u − μ)**2, 1) + Σ((v − μ)**2)"
        " − 2*(u − μ)·Σ(v − μ, 0)), where μ = mean(v, 0)", kinds="F", u="nd", v="md"),
    property=SEPARABILITY,
    on=(CONTRACT, ADD),
)  # fmt: skip
def pairwise_squares(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Separate sums of squared differences over all pairs, or all partners, shifted by a mean.

    The left side does not change if u and v are shifted together, so the right side is computed at
    u−μ, v−μ. At an offset of 1e4 the unshifted form has no correct digit in float32. The mean is
    that of a side that is summed, so the last term is close to zero and nothing cancels. With
    weights the last term would not be close to zero, so a weighted sum is not rewritten.
    """
    p = _product(ctx, cls, node)
    if p is None or len(p.factors) != 2 or p.factors[0] != p.factors[1]:
        return
    total = sum_node(ctx, p.factors[0].cls)
    if total is None or len(total.args) != 2 or sum(total.attr) != 0:
        return
    sides = _sides(p, p.factors[0], total)
    if sides is None:
        return
    scale, inside = total.attr[0] ** 2 * p.coefficient, 1.0
    if abs(scale) < 1:  # the squares of the scaled values may be infinite
        scale, inside = math.copysign(1, scale), math.sqrt(abs(scale))
    r = RightSide.of(ctx, pairwise_squares, cls, p.bound)
    if not all(_count(r, side) for side in sides):
        return
    mean = _mean(r, sides[0])
    shifted = [r.sum((1, side.ref), (-1, mean)) for side in sides]
    # Scaled after the shift: far from zero a product rounds by more than the differences.
    su, sv = scaled = [r.inside(inside, x) for x in shifted]
    ctx.whole.update([x.cls for x in (*shifted, *scaled)])
    terms = []
    for k, factors in ((scale, (su, su)), (scale, (sv, sv)), (-2 * scale, (su, sv))):
        terms.append((k, r.product(factors, p.summed, precision=p.precision)))
    yield r.sum(*terms)


@axiom(
    law("Σ(u[:, None] − v, 1) = len(v)*(u − μ) − Σ(v − μ, 0), where μ = mean(v, 0)",
        kinds="F", u="nd", v="md"),
    law("Σ(u[:, None] − v) = Σ(len(v)*(u − μ) − Σ(v − μ, 0)), where μ = mean(v, 0)",
        kinds="F", u="nd", v="md"),
    property=SEPARABILITY,
    on=(CONTRACT, ADD),
)  # fmt: skip
def pairwise_differences(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Separate sums of a sum of two terms over all pairs, or all partners, shifted by a mean.

    `distribute` refuses these, because the terms may cancel. Shifted by the mean of the summed
    side they do not: |J|·|uᵢ−μ| and Σ|vⱼ−μ| are at most once and twice Σ|uᵢ−vⱼ|, which bounds the
    rounding error. The gradients of squared distances are such sums. With weights the second term
    would not be small, so a weighted sum is not rewritten.
    """
    p = _product(ctx, cls, node)
    inner = [] if p is None else [f for f in p.factors if any(i >= p.out for i in f.axes)]
    total = sum_node(ctx, inner[0].cls) if len(inner) == 1 else None
    if p is None or total is None or len(total.args) != 2:
        return
    r = RightSide.of(ctx, pairwise_differences, cls, p.bound)
    sides, (scale, rest) = _sides(p, inner[0], total), apart(p)
    is_cast = ctx.g.classes[inner[0].cls].dtype != r.dtype
    if is_cast or sides is None or not _count(r, sides[0]):
        return
    mean = _mean(r, sides[0])
    (b, v, _), (a, u, _) = sides
    both = r.sum((a, u), (b, mean)), r.sum((b, v), (-b, mean))
    ctx.whole.update([x.cls for x in both])
    terms = []
    for shifted in both:
        factors = tuple([shifted if f is inner[0] else f for f in p.factors])
        terms.append((scale, r.ordered(rest._replace(factors=factors))))
    yield r.sum(*terms)


def separable(g: EGraph, cls: int) -> tuple[Ref, Ref] | None:
    """Return the two terms over pairs whose sum over pairs the laws of this file separate."""
    p = flattest(g, cls)
    inner = [f for f in p.factors if any(i >= p.out for i in f.axes)]
    if not inner or not _is_wide_float(g.classes[cls].dtype):
        return None
    squared = len(inner) == 2 and inner[0] == inner[1] and len(p.factors) == 2
    sums = [n for n in g.nodes(inner[0].cls, ADD) if len(n.args) == 2]
    if not sums or not (len(inner) == 1 or (squared and sum(sums[0].attr) == 0)):
        return None
    sides = _sides(p, inner[0], sums[0])
    return None if sides is None else (sides[0].ref, sides[1].ref)


def _is_wide_float(dtype: str) -> bool:
    """Return True for floats of at least 32 bits."""
    return dtype_kind(dtype) == "f" and not is_half(dtype)


def _product(ctx: RuleContext, cls: int, node: Node) -> Product | None:
    """Return a class as a product that keeps the sums that others read, if a mean may shift it.

    The product is that of the class, so it is made at one node alone.
    """
    if not _is_wide_float(ctx.g.classes[cls].dtype) or node is not product_node(ctx.g, cls):
        return None
    known = ctx.g.facts("keeps sums")
    if cls not in known:
        known[cls] = expand(ctx.g, cls, lambda d: ctx.uses(d) <= 1 or sum_node(ctx, d) is None)
    return known[cls]


def _sides(p: Product, factor: Ref, total: Node) -> tuple[PairTerm, PairTerm] | None:
    """Return the two terms of a factor, first one that is summed over all indices of its own.

    The result is None if every pair is an output, or if the terms are not over pairs.
    """
    u, v = (a.over(factor.axes) for a in total.args)
    if any(len(set(x.axes)) != len(x.axes) for x in (u, v)):
        return None
    refs = zip(total.attr, (u, v), (v, u), strict=True)
    first, second = (PairTerm(k, x, [i for i in x.axes if i not in y.axes]) for k, x, y in refs)
    for summed, other in ((second, first), (first, second)):
        if first.only and second.only and all(i >= p.out for i in summed.only):
            return summed, other
    return None


def _count(r: RightSide, side: PairTerm) -> int:
    """Return the number of entries of a side's own indices; 0 if it is not known."""
    count = product([r.sizes[i] for i in side.only])
    return count if isinstance(count, int) else 0


def _mean(r: RightSide, side: PairTerm) -> Ref:
    """Return the mean of a side over its own indices, rounded to one bit less than its dtype holds.

    Both terms must be shifted by one value, because only the error of this value leaves no trace in
    their sum. XLA fuses the mean into each of its readers, and LLVM would contract x − Σy·(1/n) to
    a fused multiply-add in some of them, which shifts by the sum's exact multiple: for 7 points at
    an offset of 1e4 the result was off by 1e-4. The bits of a rounded value are masked, so nothing
    is contracted with the product below.
    """
    mean = r.sum((1 / _count(r, side), r.term(CONTRACT, (side.ref,), summed=side.only)))
    bits = finfo(r.dtype)
    kept = (("exponent_bits", bits.nexp), ("mantissa_bits", bits.nmant - 1))
    return r.map("reduce_precision", mean, params=kept)


def _largest(a: Any, *axes: int) -> Any:
    return lax.reduce_max(a, axes or tuple(range(a.ndim)))


def _least(a: Any, *axes: int) -> Any:
    return lax.reduce_min(a, axes or tuple(range(a.ndim)))


@axiom(
    law("max(a[:, None] + b, 1) = a + max(b, 1)", kinds="f", a="n", b="nm", max=_largest),
    law("min(a[:, None] − b) = min(a) − max(b)", kinds="f", a="n", b="m", max=_largest, min=_least),
    property=SEPARABILITY,
    on=(REDUCE,),
    again=True,
)  # fmt: skip
def separable_extremum(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Take the terms of a sum of two out of an extremum along the indices that they do not read.

    Rounding is monotonic, so both sides are equal bit for bit. Integers, which wrap, stay.
    """
    r = RightSide.of(ctx, separable_extremum, cls, node.bound)
    bound = [i for i in r.sizes if i >= node.out]
    nonempty = all(isinstance(r.sizes[i], int) and r.sizes[i] for i in bound)
    if node.attr not in OPPOSITE or dtype_kind(r.dtype) != "f" or not nonempty:
        return
    source = ctx.g.find(node.args[0])
    for total in ctx.g.nodes(source.cls, ADD):
        if len(total.args) == 2:
            pair = [(k, a.over(source.axes)) for k, a in zip(total.attr, total.args, strict=True)]
            shared = [i for i in bound if all(i in a.axes for _, a in pair)]
            if len(shared) < len(bound):
                best = r.sum(*(_extremum(r, node.attr, k, a, bound, shared) for k, a in pair))
                yield r.term(REDUCE, (best,), node.attr, summed=shared) if shared else best


def _extremum(
    r: RightSide, monoid: str, k: Any, a: Ref, bound: list[int], shared: list[int]
) -> tuple[Any, Ref]:
    """Return a term's coefficient, and its extremum along the indices that it alone reads."""
    own = [i for i in bound if i in a.axes and i not in shared]
    name = monoid if k > 0 else OPPOSITE[monoid]
    return k, r.term(REDUCE, (a,), name, summed=own) if own else a
