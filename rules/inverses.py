"""Inverses: the product with an inverse becomes a solve.

`INVERSE` of A over its slots (p, q) is the contragredient C(p, q) = (A⁻¹)(q, p). C is a
homomorphism, C(A·B) = C(A)·C(B). C of a transpose is the transpose of C, which the index notation
expresses without a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.numpy.linalg import inv, solve

from symjax_rewrite.ir.egraph import Justification
from symjax_rewrite.ir.products import Product, expand_node, flattest, scaled
from symjax_rewrite.ir.term import CONTRACT, DELTA, INVERSE, MAP, SOLVE, Node, Ref
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import REDUNDANCY, RuleContext, Sides, axiom


def regular(a: Any) -> Any:
    """Return a matrix plus a dominant diagonal, which has an inverse, for the sides of laws."""
    return a + (1 + 8 * jnp.max(jnp.abs(a), initial=0)) * jnp.eye(len(a), dtype=a.dtype)


def _identity_of(a: Any) -> Any:
    return jnp.eye(len(a), dtype=a.dtype)


@axiom(
    "solve(A, b) = A⁻¹·b; solve(A, I) = A⁻¹",
    property=REDUNDANCY,
    on=(SOLVE,),
    sides=(
        Sides("ii,ij", lambda a, b: (solve(regular(a), b), inv(regular(a)) @ b), "F"),
        Sides("ii", lambda a: (solve(regular(a), _identity_of(a)), inv(regular(a))), "F"),
    ),
)
def solve_is_inverse(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a solve as a product with an inverse, so that laws about products apply.

    The rule does not apply if an inverse of the same matrix is computed in any case. A product with
    this inverse would be less accurate than the written solve.
    """
    g, c = ctx.g, ctx.g.classes[cls]
    matrix, right = node.args
    if not _is_delta(ctx, right.cls) and _is_inverted(ctx, matrix.cls):
        return
    why = solve_is_inverse.reason(cls)
    made = _inverse(ctx, matrix.cls, c.dtype, why)
    inverse = made.over(matrix.axes)
    if _is_delta(ctx, right.cls):
        i, j = right.axes
        yield inverse.moved(node.out, i if j == node.out else j)
    else:
        yield g.add(CONTRACT, None, (inverse, right), c.sizes, node.bound, c.dtype, why)


def _is_inverted(ctx: RuleContext, matrix: int) -> bool:
    """Return True if the inverse of a matrix class is an operation of the program."""
    users = ctx.g.uses[matrix]
    return any(n.op == SOLVE and _is_delta(ctx, ctx.g.find(n.args[1]).cls) for _, n in users)


def _inverse(ctx: RuleContext, matrix: int, dtype: str, why: Justification) -> Ref:
    """Return the inverse of a matrix class over the class's slots."""
    sizes = ctx.g.classes[matrix].sizes
    simple = _simple_inverse(ctx, matrix, dtype, why)
    if simple is not None:
        return simple
    return ctx.g.add(INVERSE, (0, 1), (Ref(matrix, (0, 1)),), sizes, (), dtype, why)


def _simple_inverse(ctx: RuleContext, matrix: int, dtype: str, why: Justification) -> Ref | None:
    """Return (A⁻¹)⁻¹ = A, (c·A)⁻¹ = A⁻¹/c or diag(d)⁻¹ = diag(1/d) as contragredients, or None."""
    g = ctx.g
    sizes = g.classes[matrix].sizes
    if len(sizes) != 2:
        return None
    for n in g.classes[matrix].nodes:
        if n.op == INVERSE:
            return g.find(n.args[0])
    p = flattest(g, matrix)
    main = [f for f in p.factors if _is_delta(ctx, f.cls)] or [f for f in p.factors if f.axes]
    rest = [f for f in p.factors if f is not main[0]] if main else []
    if p.bound or not main or set(main[0].axes) != {0, 1}:
        return None
    diagonal = _is_delta(ctx, main[0].cls)
    if any(len(f.axes) > (1 if diagonal else 0) for f in rest) or (
        p.coefficient == 1 and not rest and not diagonal
    ):
        return None
    inner = main[0]
    if not diagonal:
        made = g.add(INVERSE, (0, 1), (Ref(inner.cls, (0, 1)),), sizes, (), dtype, why)
        inner = made.over(inner.axes)
    factors = (inner, *(reciprocal(ctx, f, dtype, why) for f in rest))
    if len(factors) > 1:
        inner = g.add(CONTRACT, None, factors, sizes, (), dtype, why)
    return scaled(g, inner, 1 / p.coefficient, sizes, why)


def reciprocal(ctx: RuleContext, f: Ref, dtype: str, why: Justification) -> Ref:
    """Return 1/f, elementwise."""
    return ctx.g.apply(MAP, ("reciprocal", ()), (f,), dtype, why)


def _is_delta(ctx: RuleContext, cls: int) -> bool:
    return any(n.op == DELTA for n in ctx.g.classes[cls].nodes)


@axiom(
    "A⁻¹·b = solve(A, b)",
    property=REDUNDANCY,
    on=(CONTRACT,),
    again=True,
    needs=(INVERSE,),
    sides=(Sides("ii,ir", lambda a, b: (inv(regular(a)) @ b, solve(regular(a), b)), "F"),),
)
def solve_instead(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a product with an inverse as a solve: a third of the work, and backward stable."""
    g = ctx.g
    if not node.bound:
        return
    p = expand_node(g, cls, node, lambda d: not _is_inverse(ctx, d) and ctx.uses(d) <= 1)
    for k, f in enumerate(p.factors):
        f = g.find(f)
        matrix = _inverse_of(ctx, f)
        if matrix is None or len(set(f.axes)) != 2:
            continue
        summed = [i for i in f.axes if i >= p.out]
        if len(summed) != 1 or len(p.factors) < 2:
            continue
        ref = _solved(ctx, cls, p, k, matrix, summed[0])
        if ref is not None:
            yield scaled(g, ref, p.coefficient, g.classes[cls].sizes, solve_instead.reason(cls))


def _solved(ctx: RuleContext, cls: int, p: Product, k: int, matrix: Ref, summed: int) -> Ref | None:
    """Return solve(matrix, product of the other factors), which keeps the summed index."""
    g, c = ctx.g, ctx.g.classes[cls]
    why = solve_instead.reason(cls)
    free = next(i for i in matrix.axes if i != summed)
    rest = [f for j, f in enumerate(p.factors) if j != k]
    if free >= p.out or any(free in f.axes for f in rest):
        return None
    if not any(summed in f.axes for f in rest):
        return None
    # The other factors, with the summed index in place of the free index, which has the same size.
    inner = p._replace(coefficient=1, factors=tuple(f.moved(summed, free) for f in rest), scales=())
    right = order_product(ctx, inner.without(summed), c.sizes, c.dtype, why)
    if right is None:
        return None
    args = (matrix.moved(summed, p.out), right.moved(free, p.out))
    return g.add(SOLVE, None, args, c.sizes, (c.sizes[free],), c.dtype, why)


def _is_inverse(ctx: RuleContext, cls: int) -> bool:
    return any(n.op == INVERSE for n in ctx.g.classes[cls].nodes)


def _inverse_of(ctx: RuleContext, f: Ref) -> Ref | None:
    """Return the matrix A of a factor C, read over the factor's indices, or None."""
    for n in ctx.g.classes[f.cls].nodes:
        if n.op == INVERSE and len(n.args[0].axes) == 2:
            return n.args[0].over(f.axes)
    return None


def _inverted(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    a, b = regular(a), regular(b)
    return inv(a @ b) @ c, inv(b) @ (inv(a) @ c)


@axiom(
    "(A·B)⁻¹·c = B⁻¹·(A⁻¹·c)",
    property=REDUNDANCY,
    on=(INVERSE,),
    sides=(Sides("ii,ii,ir", _inverted, "F"),),
)
def inverse_of_product(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite the inverse of a product of square matrices as the product of inverses.

    Backward stable solves keep the error within that of computing A·B: both are bounded by
    ε·‖A‖·‖B‖·‖(AB)⁻¹‖.
    """
    g, c = ctx.g, ctx.g.classes[cls]
    if len(c.sizes) != 2:
        return
    arg = g.find(node.args[0])
    for inner in list(g.classes[arg.cls].nodes):
        if inner.op != CONTRACT or len(inner.args) != 2 or len(inner.bound) != 1:
            continue
        if any(size != c.sizes[0] for size in (*c.sizes, *inner.bound)):
            continue
        if any(len(set(a.axes)) != 2 or inner.out not in a.axes for a in inner.args):
            continue
        why = inverse_of_product.reason(cls)
        index = [*arg.axes, 2]
        factors = []
        for a in inner.args:
            axes = tuple(index[i] for i in a.axes)
            made = _inverse(ctx, a.cls, c.dtype, why)
            factors.append(made.over(axes))
        yield g.add(CONTRACT, inner.attr, tuple(factors), c.sizes, inner.bound, c.dtype, why)
