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
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import REDUNDANCY, RuleContext, Sides, axiom
from symjax_rewrite.rules.distributivity import sum_node


def _scaled_by_frozen(
    ctx: RuleContext, cls: int, node: Node
) -> tuple[Ref, list[Ref], Product] | None:
    """Return `(x, scales)` of an elementwise product of frozen scales and one varying operand."""
    if node.bound or ctx.frozen(cls) or is_half(ctx.g.classes[cls].dtype):
        return None
    p = expand_node(ctx.g, cls, node, lambda d: ctx.uses(d) <= 1 and not _has_sum(ctx, d))
    varying = [f for f in p.factors if not ctx.frozen(f.cls)]
    if p.bound or len(varying) != 1 or len(p.factors) < 2 or ctx.uses(varying[0].cls) > 1:
        return None
    return varying[0], [f for f in p.factors if ctx.frozen(f.cls)], p


def _has_sum(ctx: RuleContext, cls: int) -> bool:
    return any(n.op == CONTRACT and n.bound for n in ctx.g.classes[cls].nodes)


@axiom(
    "s·(x·W + b) = s·(x·W) + s·b  (s, b frozen)",
    property=REDUNDANCY,
    on=(CONTRACT,),
    sides=(Sides("nd,*do,*o,*o", lambda x, W, b, s: (s * (x @ W + b), s * (x @ W) + s * b), "F"),),
)
def fold_scale(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Move a frozen elementwise factor into a sum, towards the weights in its terms."""
    g, c = ctx.g, ctx.g.classes[cls]
    found = _scaled_by_frozen(ctx, cls, node)
    total = sum_node(ctx, found[0].cls) if found else None
    if found is None or total is None:
        return
    other, scales, p = found
    why = fold_scale.reason(cls)
    terms = []
    for arg in total.args:
        factors = (*scales, arg.over(other.axes))
        terms.append(g.add(CONTRACT, p.precision, factors, c.sizes, (), c.dtype, why))
    coefficients = tuple(k * p.coefficient for k in total.attr)
    yield g.add(ADD, coefficients, tuple(terms), c.sizes, (), c.dtype, why)


@axiom(
    "(x·W + b) + c = x·W + (b + c)  (b, c frozen)",
    property=REDUNDANCY,
    on=(ADD,),
    sides=(Sides("nd,*do,*o,*o", lambda x, W, b, c: ((x @ W + b) + c, x @ W + (b + c))),),
)
def fold_shift(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Merge the frozen terms of a sum into one term."""
    frozen = [k for k, a in enumerate(node.args) if ctx.frozen(a.cls)]
    if len(frozen) < 2 or len(frozen) == len(node.args):
        return
    g, c = ctx.g, ctx.g.classes[cls]
    why = fold_shift.reason(cls)
    shift = g.add(
        ADD,
        tuple(node.attr[k] for k in frozen),
        tuple(node.args[k] for k in frozen),
        c.sizes,
        (),
        c.dtype,
        why,
    )
    rest = [k for k in range(len(node.args)) if k not in frozen]
    coefficients = (*(node.attr[k] for k in rest), 1)
    args = (*(node.args[k] for k in rest), shift)
    yield g.add(ADD, coefficients, args, c.sizes, (), c.dtype, why)


@axiom(
    "s·(x·W) = x·(s·W)  (s, W frozen)",
    property=REDUNDANCY,
    on=(CONTRACT,),
    sides=(Sides("nd,*do,*o", lambda x, W, s: (s * (x @ W), x @ (s * W)), "F"),),
)
def fold_into_product(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Scale the frozen weight in a product by a frozen scale of the product."""
    found = _scaled_by_frozen(ctx, cls, node)
    if found is None or not _has_sum(ctx, found[0].cls):
        return
    c = ctx.g.classes[cls]
    p = expand_node(ctx.g, cls, node, lambda d: ctx.uses(d) <= 1)
    ref = order_product(ctx, p, c.sizes, c.dtype, fold_into_product.reason(cls))
    if ref is not None:
        yield ref


def _convolve(x: Any, w: Any) -> Any:
    return lax.conv(x, w, (1, 1), "SAME")


@axiom(
    "s·conv(x, w) = conv(x, s·w)  (s, w frozen)",
    property=REDUNDANCY,
    on=(CONTRACT,),
    sides=(
        Sides(
            "bchw,*fcrs,*f",
            lambda x, w, s: (
                s[:, None, None] * _convolve(x, w),
                _convolve(x, s[:, None, None, None] * w),
            ),
            "F",
        ),
    ),
)
def fold_into_kernel(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Scale the kernel of a convolution by a frozen scale of its output features."""
    g, c = ctx.g, ctx.g.classes[cls]
    found = _scaled_by_frozen(ctx, cls, node)
    if found is None or found[2].coefficient != 1:
        return
    other, scales, _ = found
    for conv in list(g.classes[other.cls].nodes):
        if conv.op != CONV or not ctx.frozen(conv.args[1].cls):
            continue
        x, w = conv.args
        features = {other.axes[i]: i for i in w.axes if i < conv.out}
        if any(not set(s.axes) <= set(features) for s in scales):
            continue
        why = fold_into_kernel.reason(cls)
        out_sizes = g.classes[other.cls].sizes
        factors = (w, *(s.over(features) for s in scales))
        kernel = g.term(CONTRACT, factors, (*out_sizes, *conv.bound), c.dtype, why)
        made = g.add(CONV, conv.attr, (x, kernel), out_sizes, conv.bound, c.dtype, why)
        yield made.over(other.axes)
