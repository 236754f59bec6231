"""Separability: sums over pairs that equal products of sums over each side."""

from __future__ import annotations

import math
from collections.abc import Iterator

from symjax_rewrite.ir.products import expand, is_half, is_ring
from symjax_rewrite.ir.sizes import product
from symjax_rewrite.ir.term import ADD, CONTRACT, Node, Ref
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import SEPARABILITY, RuleContext, axiom
from symjax_rewrite.rules.cancellation import sum_node


@axiom(
    law(
        "Σ((u[:, None] − v)**2, (1, 2)) = len(v)*Σ((u − μ)**2, 1) + Σ((v − μ)**2)"
        " − 2*(u − μ)·Σ(v − μ, 0), where μ = mean(v, 0)",
        kinds="F",
        u="nd",
        v="md",
    ),
    law(
        "Σ((u[:, None] − v)**2) = Σ(len(v)*Σ((u − μ)**2, 1) + Σ((v − μ)**2)"
        " − 2*(u − μ)·Σ(v − μ, 0)), where μ = mean(v, 0)",
        kinds="F",
        u="nd",
        v="md",
    ),
    property=SEPARABILITY,
    on=(CONTRACT, ADD),
)
def pairwise_squares(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Separate sums of squared differences over all pairs, or all partners, shifted by a mean.

    The left side does not change if u and v are shifted together, so the right side is computed at
    u−μ, v−μ. At an offset of 1e4 the unshifted form has no correct digit in float32. The mean is
    that of a side that is summed, so the last term is close to zero and nothing cancels. With
    weights the last term would not be close to zero, so a weighted sum is not rewritten.
    """
    dtype = ctx.g.classes[cls].dtype
    if node.op == ADD and len(node.args) != 1:
        return
    if is_half(dtype) or is_ring(dtype) or dtype.startswith("complex"):
        return
    p = expand(ctx.g, cls, lambda d: ctx.uses(d) <= 1 or sum_node(ctx, d) is None)
    if len(p.factors) != 2 or p.factors[0] != p.factors[1]:
        return
    total = sum_node(ctx, p.factors[0].cls)
    if total is None or len(total.args) != 2 or sum(total.attr) != 0:
        return
    u, v = (a.over(p.factors[0].axes) for a in total.args)
    if any(len(set(x.axes)) != len(x.axes) for x in (u, v)):
        return
    own = [(x, [i for i in x.axes if i not in y.axes]) for x, y in ((u, v), (v, u))]
    if not all(only for _, only in own):
        return
    left, right = own if any(i < p.out for i in own[1][1]) else own[::-1]
    if any(i < p.out for i in left[1]):
        return  # every distance is an output
    scale, inside = total.attr[0] ** 2 * p.coefficient, 1.0
    if abs(scale) < 1:  # the squares of the scaled values may be infinite
        scale, inside = math.copysign(1, scale), math.sqrt(abs(scale))
    r = RightSide.of(ctx, pairwise_squares, cls, p.bound)
    shifted = _shifted(r, left[0], left[1], right, inside)
    if shifted is None:
        return
    su, sv = shifted
    summed = [i for i in r.sizes if i >= p.out]
    terms = []
    for k, factors in ((scale, (su, su)), (scale, (sv, sv)), (-2 * scale, (su, sv))):
        ref = r.product(factors, summed, precision=p.precision)
        if ref is None:
            return
        terms.append((k, ref))
    yield r.sum(*terms)


def _shifted(
    r: RightSide, u: Ref, only_u: list[int], right: tuple[Ref, list[int]], scale: float
) -> list[Ref] | None:
    """Return both sides less the mean of the first, times a number."""
    n, m = (product([r.sizes[i] for i in only]) for only in (only_u, right[1]))
    if not (isinstance(n, int) and isinstance(m, int) and n and m):
        return None
    mean = r.sum((1 / n, r.term(CONTRACT, (u,), summed=only_u)))
    sides = [r.sum((1, x), (-1, mean)) for x in (u, right[0])]
    # Scaled after the shift: far from zero a product rounds away what the shift leaves.
    scaled = [r.inside(scale, x) for x in sides]
    r.ctx.whole.update([x.cls for x in (*sides, *scaled)])
    return scaled
