"""Inverses of a diagonal plus a low-rank product: the matrix to factor has the size of the rank.

With e = 1/d, `(diag(d) + c·U·Vᵀ)⁻¹ = e − c·e·U·(I + c·Vᵀ·e·U)⁻¹·Vᵀ·e`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from symjax_rewrite.ir.egraph import Reason
from symjax_rewrite.ir.products import Product, contract, flattest
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONTRACT, DELTA, SOLVE, Node, Ref
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, Context, axiom
from symjax_rewrite.rules.inverses import reciprocal


class LowRank(NamedTuple):
    """`diag(scale·Π diagonal) + coefficient·Σ_k left(p, k)·right(q, k)` over slots (0: p, 1: q).

    diagonal: factors over index 0, or over none. left, right: over (their slot, 2).
    """

    scale: Any
    diagonal: tuple[Ref, ...]
    coefficient: Any
    left: Ref
    right: Ref
    rank: Dim

    def transposed(self) -> LowRank:
        """The same matrix with its slots exchanged."""
        to = {0: 1, 1: 0, 2: 2}
        left, right = (Ref(f.cls, tuple(to[i] for i in f.axes)) for f in (self.right, self.left))
        return self._replace(left=left, right=right)


@axiom(
    "(d + c·U·Vᵀ)⁻¹·b = (b − c·U·(I + c·Vᵀ·U/d)⁻¹·Vᵀ·b/d)/d",
    property=ASSOCIATIVITY,
    on=(SOLVE,),
    source="Woodbury 1950; Hager 1989",
)
def low_rank_solve(ctx: Context, cls: int, node: Node) -> Iterator[Ref]:
    """A solve with a diagonal plus a low-rank product is one of the size of the rank.

    Where the diagonal is a number and U = V, the small matrix has no eigenvalue that the large one
    has not, and the number is one too: the difference loses no more than elimination would. With
    any other diagonal it can (diag(1e-8, 1) + e₁e₁ᵀ is well conditioned), which is `cancels`.
    """
    matrix, right = (ctx.g.find(a) for a in node.args)
    c = ctx.g.classes[cls]
    if len(node.bound) != 1 or len(set(matrix.axes)) != 2 or matrix.axes.count(node.out) != 1:
        return
    why = low_rank_solve.reason(cls)
    for found in low_rank_forms(ctx, matrix.cls):
        if not isinstance(found.rank, int) or not 0 < found.rank < ctx.count(node.bound):
            continue  # there is nothing to eliminate in a matrix without rows
        form = found if matrix.axes[0] == node.out else found.transposed()
        safe = not any(f.axes for f in form.diagonal) and _is_symmetric(form)
        if not safe and not ctx.permits("cancels", c.dtype):
            ctx.refuse("low_rank_solve", "the difference may cancel", cls)
            continue
        free = next(i for i in matrix.axes if i != node.out)
        ref = _Solve(ctx, c.sizes, c.dtype, node, form, free, why).build(right)
        if ref is not None:
            yield ref


def low_rank_forms(ctx: Context, matrix: int) -> Iterator[LowRank]:
    """The ways a matrix reads as a diagonal plus one product."""
    g = ctx.g
    for total in list(g.classes[matrix].nodes):
        if total.op != ADD or len(total.args) != 2:
            continue
        for k in (0, 1):
            diagonal = _diagonal(ctx, total.args[k])
            if diagonal is None:
                continue
            for coefficient, left, right, rank in _products(ctx, total.args[1 - k]):
                scale, factors = diagonal
                c = total.attr[1 - k] * coefficient
                yield LowRank(total.attr[k] * scale, factors, c, left, right, rank)


def _diagonal(ctx: Context, term: Ref) -> tuple[Any, tuple[Ref, ...]] | None:
    p = flattest(ctx.g, term.cls)
    if p.bound or set(term.axes) != {0, 1}:
        return None
    delta = [f for f in p.factors if any(n.op == DELTA for n in ctx.g.classes[f.cls].nodes)]
    rest = tuple(Ref(f.cls, (0,) * len(f.axes)) for f in p.factors if f not in delta)
    if len(delta) != 1 or any(len(f.axes) > 1 for f in rest):
        return None
    return p.coefficient, rest


def _products(ctx: Context, term: Ref) -> Iterator[tuple[Any, Ref, Ref, Dim]]:
    """A term as `coefficient·Σ_k left(0, k)·right(1, k)`, as some node of it is written."""
    g = ctx.g
    for node in list(g.classes[term.cls].nodes):
        if node.op == ADD and len(node.args) == 1:
            inner = g.find(node.args[0])
            over = Ref(inner.cls, tuple(term.axes[i] for i in inner.axes))
            for k, left, right, rank in _products(ctx, over):
                yield node.attr[0] * k, left, right, rank
        if node.op != CONTRACT or len(node.args) != 2 or len(node.bound) != 1:
            continue
        to = [*term.axes, 2]
        sides = [Ref(a.cls, tuple(to[i] for i in a.axes)) for a in map(g.find, node.args)]
        sides.sort(key=lambda f: 1 in f.axes)
        if set(sides[0].axes) == {0, 2} and set(sides[1].axes) == {1, 2}:
            yield 1, sides[0], sides[1], node.bound[0]


def _is_symmetric(form: LowRank) -> bool:
    mirrored = tuple({0: 1, 2: 2}[i] for i in form.left.axes)
    return form.left.cls == form.right.cls and mirrored == form.right.axes


class _Solve:
    """Builds one solve; `free` is the output index of the result, `node.out` the summed one."""

    def __init__(
        self,
        ctx: Context,
        sizes: tuple[Dim, ...],
        dtype: str,
        node: Node,
        form: LowRank,
        free: int,
        why: Reason,
    ) -> None:
        self.ctx, self.sizes, self.dtype, self.why = ctx, sizes, dtype, why
        self.form, self.free, self.summed, self.n = form, free, node.out, node.bound[0]
        inverse = [reciprocal(ctx, f, dtype, why) for f in form.diagonal]
        self.scale, self.inverse = 1 / form.scale, inverse

    def build(self, right: Ref) -> Ref | None:
        """The result over the outputs."""
        g, form, free, summed = self.ctx.g, self.form, self.free, self.summed
        inner = self._inner()
        thin = tuple(form.rank if i == free else s for i, s in enumerate(self.sizes))
        v = self._at(form.right, {1: summed, 2: free})
        w = self._product((v, *self._inverse_at(summed), right), thin, (self.n,), self.scale)
        if inner is None or w is None:
            return None
        w = Ref(w.cls, tuple(summed if i == free else i for i in w.axes))
        small = Ref(inner.cls, tuple((summed, free)[i] for i in inner.axes))
        y = g.add(SOLVE, None, (small, w), thin, (form.rank,), self.dtype, self.why)
        y = Ref(y.cls, tuple(summed if i == free else i for i in y.axes))
        u = self._at(form.left, {0: free, 2: summed})
        over = self._inverse_at(free)
        there = Ref(right.cls, tuple(free if i == summed else i for i in right.axes))
        first = self._product((there, *over), self.sizes, (), 1)
        second = self._product((u, y, *over), self.sizes, (form.rank,), 1)
        if first is None or second is None:
            return None
        k = (self.scale, -self.scale * form.coefficient)
        return g.add(ADD, k, (first, second), self.sizes, (), self.dtype, self.why)

    def _inner(self) -> Ref | None:
        """I + c·Vᵀ·e·U over (k, l)."""
        g, form = self.ctx.g, self.form
        square = (form.rank, form.rank)
        factors = (self._at(form.right, {1: 2, 2: 0}), *self._inverse_at(2))
        factors = (*factors, self._at(form.left, {0: 2, 2: 1}))
        made = self._product(factors, square, (self.n,), 1)
        one = g.add(DELTA, None, (), square, (), self.dtype, self.why)
        if made is None:
            return None
        k = (1, form.coefficient * self.scale)
        return g.add(ADD, k, (one, made), square, (), self.dtype, self.why)

    def _inverse_at(self, index: int) -> list[Ref]:
        return [Ref(f.cls, (index,) * len(f.axes)) for f in self.inverse]

    @staticmethod
    def _at(f: Ref, to: dict[int, int]) -> Ref:
        return Ref(f.cls, tuple(to[i] for i in f.axes))

    def _product(
        self, factors: tuple[Ref, ...], sizes: tuple[Dim, ...], bound: tuple[Dim, ...], k: Any
    ) -> Ref | None:
        p = Product(k, factors, len(sizes), bound)
        if not bound:
            return contract(self.ctx.g, p, sizes, self.dtype, self.why)
        return order_product(self.ctx, p, sizes, self.dtype, self.why)
