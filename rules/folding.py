"""Folding into frozen weights: scales and shifts of a layer become part of its weights.

The rules are instances of `Σ_k a·b = a·Σ_k b` and of distributivity. They apply only if the target
weight is computed beforehand (`.prepare`), so that folding costs nothing at run time. BatchNorm
after a convolution or a linear layer is removed this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax import lax

from symjax_rewrite.ir.products import Product, expand_node, is_half
from symjax_rewrite.ir.term import ADD, CONTRACT, CONV, Node, Ref
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import REDUNDANCY, RuleContext, axiom
from symjax_rewrite.rules.cancellation import is_sum_of_products, sum_node


def _scaled_by_frozen(
    ctx: RuleContext, cls: int, node: Node
) -> tuple[Ref, list[Ref], Product] | None:
    """Return `(x, scales)` of an elementwise product of frozen scales and one varying operand."""
    if not ctx.has_frozen or node.bound or ctx.frozen(cls) or is_half(ctx.g.classes[cls].dtype):
        return None
    p = expand_node(ctx.g, cls, node, lambda d: ctx.uses(d) <= 1 and not is_sum_of_products(ctx, d))
    varying = [f for f in p.factors if not ctx.frozen(f.cls)]
    if p.bound or len(varying) != 1 or len(p.factors) < 2 or ctx.uses(varying[0].cls) > 1:
        return None
    return varying[0], [f for f in p.factors if ctx.frozen(f.cls)], p


@axiom(
    law("s*(x·W + b) = s*(x·W) + s*b", kinds="F", x="nd", W="*do", b="*o", s="*o"),
    property=REDUNDANCY,
    on=(CONTRACT,),
)
def fold_scale(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Move a frozen elementwise factor into a sum, towards the weights in its terms."""
    found = _scaled_by_frozen(ctx, cls, node)
    total = sum_node(ctx, found[0].cls) if found else None
    if found is None or total is None:
        return
    (x, scales, p), r = found, RightSide.of(ctx, fold_scale, cls)
    terms = []
    for k, arg in zip(total.attr, total.args, strict=True):
        made = r.term(CONTRACT, (*scales, arg.over(x.axes)), attr=p.precision)
        terms.append((k * p.coefficient, made))
    yield r.sum(*terms)


@axiom(
    law("(x·W + b) + c = x·W + (b + c)", x="nd", W="*do", b="*o", c="*o"),
    property=REDUNDANCY,
    on=(ADD,),
)
def fold_shift(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Merge the frozen terms of a sum into one term."""
    terms = list(zip(node.attr, node.args, strict=True))
    frozen = [t for t in terms if ctx.frozen(t[1].cls)]
    rest = [t for t in terms if not ctx.frozen(t[1].cls)]
    if len(frozen) > 1 and rest:
        r = RightSide.of(ctx, fold_shift, cls)
        shift = r.sum(*frozen)
        yield r.sum(*rest, (1, shift))


def _convolve(x: Any, w: Any) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)


@axiom(
    law("s*conv(x, w) = conv(x, s*w)", kinds="F", x="bhwc", w="*qrcf", s="*f", conv=_convolve),
    property=REDUNDANCY,
    on=(CONTRACT,),
)
def fold_into_kernel(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Scale the kernel of a convolution by a frozen scale of its output features."""
    found = _scaled_by_frozen(ctx, cls, node)
    if found is None or found[2].coefficient != 1:
        return
    other, scales, _ = found
    for conv in ctx.g.nodes(other.cls, CONV):
        if not ctx.frozen(conv.args[1].cls):
            continue
        x, w = conv.args
        features = {other.axes[i]: i for i in w.axes if i < conv.out}
        if any(not set(s.axes) <= set(features) for s in scales):
            continue
        r = RightSide.of(ctx, fold_into_kernel.reason(cls), other.cls, conv.bound)
        kernel = r.term(CONTRACT, (w, *(s.over(features) for s in scales)))
        summed = range(conv.out, conv.out + len(conv.bound))
        made = r.term(CONV, (x, kernel), conv.attr, out=r.out, summed=summed)
        yield made.over(other.axes)
