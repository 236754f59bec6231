"""Inverses: the product with an inverse becomes a solve.

`INVERSE` of A over its slots (p, q) is the contragredient C(p, q) = (A⁻¹)(q, p). C is a
homomorphism, C(A·B) = C(A)·C(B). C of a transpose is the transpose of C, which the index notation
expresses without a rule.
"""

from __future__ import annotations

from collections.abc import Iterator

from symjax_rewrite.ir.products import Product, expand_node, flattest
from symjax_rewrite.ir.term import CONTRACT, DELTA, INVERSE, SOLVE, Node, Ref
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import REDUNDANCY, RuleContext, axiom, built


@axiom(
    law("solve(A, b) = A⁻¹·b", kinds="F", regulars="A", A="ii", b="ij"),
    law("solve(A, I(A)) = A⁻¹", kinds="F", regulars="A", A="ii"),
    property=REDUNDANCY,
    on=(SOLVE,),
)
def solve_is_inverse(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a solve as a product with an inverse, so that laws about products apply.

    The rule does not apply if an inverse of the same matrix is computed in any case. A product with
    this inverse would be less accurate than the written solve.
    """
    matrix, right = node.args
    is_delta = ctx.has(right.cls, DELTA)
    if not is_delta and _is_inverted(ctx, matrix.cls):
        return
    r = RightSide.of(ctx, solve_is_inverse, cls, node.bound)
    inverse = _inverse(r, matrix.cls).over(matrix.axes)
    if is_delta:
        i, j = right.axes
        yield inverse.moved(node.out, i if j == node.out else j)
    else:
        yield r.term(CONTRACT, (inverse, right), out=r.out, summed=(node.out,))


def _is_inverted(ctx: RuleContext, matrix: int) -> bool:
    """Return True if the inverse of a matrix class is an operation of the program."""
    users = ctx.g.uses[matrix]
    return any(n.op == SOLVE and ctx.has(ctx.g.find(n.args[1]).cls, DELTA) for _, n in users)


def _inverse(r: RightSide, matrix: int) -> Ref:
    """Return the inverse of a matrix class over the class's slots."""
    at = RightSide.of(r.ctx, r.why, matrix)
    return _simple_inverse(at, matrix) or at.inverse(Ref(matrix, (0, 1)))


def _simple_inverse(r: RightSide, matrix: int) -> Ref | None:
    """Return (A⁻¹)⁻¹ = A, (c·A)⁻¹ = A⁻¹/c or diag(d)⁻¹ = diag(1/d) as contragredients, or None."""
    ctx = r.ctx
    if len(r.out) != 2:
        return None
    if inverses := r.g.nodes(matrix, INVERSE):
        return r.g.find(inverses[0].args[0])
    p = flattest(r.g, matrix)
    main = [f for f in p.factors if ctx.has(f.cls, DELTA)] or [f for f in p.factors if f.axes]
    rest = [f for f in p.factors if f is not main[0]] if main else []
    if p.bound or not main or set(main[0].axes) != {0, 1}:
        return None
    inner, diagonal = main[0], ctx.has(main[0].cls, DELTA)
    if any(len(f.axes) > diagonal for f in rest):
        return None
    if p.coefficient == 1 and not rest and not diagonal:
        return None
    if not diagonal:
        inner = r.inverse(Ref(inner.cls, (0, 1))).over(inner.axes)
    if rest:
        inner = r.term(CONTRACT, (inner, *(r.map("reciprocal", f) for f in rest)))
    return r.scaled(1 / p.coefficient, inner)


@axiom(
    law("A⁻¹·b = solve(A, b)", kinds="F", regulars="A", A="ii", b="ir"),
    property=REDUNDANCY,
    on=(CONTRACT,),
    again=True,
    needs=(INVERSE,),
)
def solve_instead(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a product with an inverse as a solve: a third of the work, and backward stable."""
    if not node.bound:
        return
    p = expand_node(ctx.g, cls, node, lambda d: not ctx.has(d, INVERSE) and ctx.uses(d) <= 1)
    for k, f in enumerate(p.factors):
        f = ctx.g.find(f)
        matrix = _inverse_of(ctx, f)
        summed = [i for i in f.axes if i in p.summed]
        if matrix is None or len(set(f.axes)) != 2 or len(summed) != 1 or len(p.factors) < 2:
            continue
        r = RightSide.of(ctx, solve_instead, cls, p.bound)
        for ref in built(_solved, r, p, k, matrix, summed[0]):
            yield r.scaled(p.coefficient, ref)


def _solved(r: RightSide, p: Product, k: int, matrix: Ref, summed: int) -> Ref | None:
    """Return solve(matrix, product of the other factors), which keeps the summed index."""
    free = next(i for i in matrix.axes if i != summed)
    rest = p.besides(k)
    if free >= p.out or any(free in f.axes for f in rest):
        return None
    if not any(summed in f.axes for f in rest):
        return None
    # The other factors, with the summed index in place of the free index, which has the same size.
    bound = [i for i in p.summed if i != summed]
    moved = [f.moved(summed, free) for f in rest]
    right = r.product(moved, bound, precision=p.precision)
    args = (matrix, right.moved(free, summed))
    return r.term(SOLVE, args, out=r.out, summed=(summed,))


def _inverse_of(ctx: RuleContext, f: Ref) -> Ref | None:
    """Return the matrix A of a factor C, read over the factor's indices, or None."""
    found = (n.args[0].over(f.axes) for n in ctx.g.nodes(f.cls, INVERSE))
    return next((matrix for matrix in found if len(matrix.axes) == 2), None)


@axiom(
    law("(A·B)⁻¹·c = B⁻¹·(A⁻¹·c)", kinds="F", regulars="AB", A="ii", B="ii", c="ir"),
    property=REDUNDANCY,
    on=(INVERSE,),
)
def inverse_of_product(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite the inverse of a product of square matrices as the product of inverses.

    Backward stable solves keep the error within that of computing A·B: both are bounded by
    ε·‖A‖·‖B‖·‖(AB)⁻¹‖.
    """
    sizes = ctx.g.classes[cls].sizes
    if len(sizes) != 2:
        return
    arg = ctx.g.find(node.args[0])
    for inner in ctx.g.nodes(arg.cls, CONTRACT):
        if len(inner.args) != 2 or len(inner.bound) != 1:
            continue
        if any(size != sizes[0] for size in (*sizes, *inner.bound)):
            continue
        if any(len(set(a.axes)) != 2 or inner.out not in a.axes for a in inner.args):
            continue
        r = RightSide.of(ctx, inverse_of_product, cls, inner.bound)
        over = [a.over([*arg.axes, 2]) for a in inner.args]
        factors = [_inverse(r, a.cls).over(a.axes) for a in over]
        yield r.term(CONTRACT, factors, inner.attr, summed=(2,))
