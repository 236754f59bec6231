"""Inverses of a diagonal plus a low-rank product, by a factorisation of the size of the rank.

With e = 1/d and S = I + c·Vᵀ·e·U, `(diag(d) + c·U·Vᵀ)⁻¹ = e − c·e·U·S⁻¹·Vᵀ·e` (Woodbury). No
difference is needed to read the solution through V or to solve for columns of U: `Vᵀ·(diag(d) +
c·U·Vᵀ)⁻¹ = S⁻¹·Vᵀ·e` and `(diag(d) + c·U·Vᵀ)⁻¹·U = e·U·S⁻¹` (push-through).

The difference alone is not backward stable. Its rounding error is as large in the range of U as
elsewhere, whereas elimination has almost no error there. Vᵀz therefore loses as many digits as the
condition number has. So z is corrected by one step of refinement of the augmented system, `d·z +
c·U·w = b, Vᵀ·z − w = 0`. The residual of this system is the difference between the computed z and
w.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.numpy import linalg

from symjax_rewrite.ir.egraph import Justification
from symjax_rewrite.ir.products import Product, contract, expand_node, flattest, scaled
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONTRACT, DELTA, SOLVE, Node, Ref
from symjax_rewrite.rewriting.product_trees import order_product
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, RuleContext, Sides, axiom
from symjax_rewrite.rules.inverses import reciprocal


class LowRank(NamedTuple):
    """The matrix `diag(scale·Π diagonal) + coefficient·Σ_k left(p, k)·right(q, k)`.

    Slot 0 is p and slot 1 is q. diagonal: factors over index 0, or over no index. left, right: over
    (their slot, 2).
    """

    scale: Any
    diagonal: tuple[Ref, ...]
    coefficient: Any
    left: Ref
    right: Ref
    rank: Dim

    def transposed(self) -> LowRank:
        """Return the same matrix with its slots exchanged."""
        to = {0: 1, 1: 0, 2: 2}
        left, right = (f.over(to) for f in (self.right, self.left))
        return self._replace(left=left, right=right)


def _updated(u: Any, b: Any) -> tuple[Any, Any, Any]:
    """Return d, the solution of (d·I + U·Uᵀ)·z = b, and the small matrix d·I + Uᵀ·U."""
    d = 1 + jnp.sum(u * u)
    large = d * jnp.eye(len(u), dtype=u.dtype) + u @ u.T
    return d, linalg.solve(large, b), d * jnp.eye(u.shape[1], dtype=u.dtype) + u.T @ u


def _refined(u: Any, b: Any) -> tuple[Any, Any]:
    """Return both sides of Woodbury's law, the right one with a step of refinement."""
    d, wanted, small = _updated(u, b)
    w = linalg.solve(small, u.T @ b)
    z = (b - u @ w) / d
    return wanted, z + u @ linalg.solve(small, w - u.T @ z)


def _read_through(u: Any, b: Any) -> tuple[Any, Any]:
    _, z, small = _updated(u, b)
    return u.T @ z, linalg.solve(small, u.T @ b)


@axiom(
    "(d + c·U·Vᵀ)⁻¹·b = (b − c·U·w)/d,  w = (I + c·Vᵀ·U/d)⁻¹·Vᵀ·b/d",
    property=ASSOCIATIVITY,
    on=(SOLVE,),
    source="Woodbury 1950; Hager 1989; Higham 2002, chapter 12 (the refinement)",
    sides=(Sides("ir,is", _refined, "F"),),
)
def low_rank_solve(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a solve with a diagonal plus a low-rank product as a solve of the size of the rank.

    If the diagonal is a number and U = V, every eigenvalue of the small matrix is an eigenvalue of
    the large matrix. The refinement then converges wherever elimination succeeds. With any other
    diagonal it may not converge (a diagonal with a zero has no inverse), so the level is `cancels`.
    """
    why = low_rank_solve.reason(cls)
    for solve in _solves(ctx, cls, node, why):
        right = ctx.g.find(node.args[1])
        ref = solve.through_left(right) or solve.refined(right)
        if ref is not None:
            ctx.whole.update((cls, ref.cls))
            yield ref


@axiom(
    "Vᵀ·(d + c·U·Vᵀ)⁻¹·b = (I + c·Vᵀ·U/d)⁻¹·Vᵀ·b/d",
    property=ASSOCIATIVITY,
    on=(CONTRACT,),
    again=True,
    needs=(SOLVE,),
    source="push-through identity: Henderson & Searle 1981",
    sides=(Sides("ir,is", _read_through, "F"),),
)
def low_rank_readout(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a solve read through its own low-rank factor as a solve of the size of the rank."""
    g, seen = ctx.g, set[Product]()
    for may_open in (lambda d: False, lambda d: not _solve_nodes(ctx, d)):
        p = expand_node(g, cls, node, may_open)
        if not p.bound or p in seen:
            continue
        seen.add(p)
        factors = tuple(g.find(f) for f in p.factors)
        for k, f in enumerate(factors):
            for inner in _solve_nodes(ctx, f.cls):
                yield from _read_out(ctx, cls, p._replace(factors=factors), k, inner)


def _solve_nodes(ctx: RuleContext, cls: int) -> list[Node]:
    return [n for n in ctx.g.classes[cls].nodes if n.op == SOLVE]


def _read_out(ctx: RuleContext, cls: int, p: Product, k: int, node: Node) -> Iterator[Ref]:
    """Yield the product with `Σ_q right(q, m)·solve(q, …)` replaced by the small solution at m."""
    f, why = p.factors[k], low_rank_readout.reason(cls)
    for solve in _solves(ctx, f.cls, node, why):
        q = f.axes[solve.free]
        readers = [j for j, x in enumerate(p.factors) if q in x.axes]
        if q < p.out or f.axes.count(q) != 1 or len(readers) != 2:
            continue
        other = p.factors[sum(readers) - k]
        m = _index_beside(other, solve.form.right, 1, q)
        w = None if m is None else solve.small_solution(ctx.g.find(node.args[1]))
        if m is None or w is None:
            continue
        read = dict(enumerate(f.axes)) | {solve.free: m}
        rest = [x for j, x in enumerate(p.factors) if j not in readers]
        made = p._replace(factors=(w.over(read), *rest)).without(q)
        c = ctx.g.classes[cls]
        ref = order_product(ctx, made, c.sizes, c.dtype, why)
        if ref is not None:
            yield ref


def _index_beside(f: Ref, side: Ref, slot: int, index: int) -> int | None:
    """Return the index of a factor that is a low-rank side whose `slot` reads `index`, or None."""
    if f.cls != side.cls or f.axes.count(index) != 1:
        return None
    m = f.axes[side.axes.index(2)]
    return m if f.axes[side.axes.index(slot)] == index else None


def _solves(ctx: RuleContext, cls: int, node: Node, why: Justification) -> Iterator[_Solve]:
    """Yield the solves with a diagonal plus a low-rank product equal to a node, where safe."""
    matrix, c = ctx.g.find(node.args[0]), ctx.g.classes[cls]
    if len(node.bound) != 1 or len(set(matrix.axes)) != 2 or matrix.axes.count(node.out) != 1:
        return
    for found in low_rank_forms(ctx, matrix.cls):
        if not isinstance(found.rank, int) or not 0 < found.rank < ctx.count(node.bound):
            continue  # a matrix without rows needs no elimination
        form = found if matrix.axes[0] == node.out else found.transposed()
        safe = not any(f.axes for f in form.diagonal) and _is_symmetric(form)
        if not safe and not ctx.permits("cancels", c.dtype):
            ctx.refuse(why.rule, "the difference may cancel", cls)
            continue
        free = next(i for i in matrix.axes if i != node.out)
        yield _Solve(ctx, c.sizes, c.dtype, node, form, free, why)


def low_rank_forms(ctx: RuleContext, matrix: int) -> Iterator[LowRank]:
    """Yield the forms of a matrix as a diagonal plus one product."""
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


def _diagonal(ctx: RuleContext, term: Ref) -> tuple[Any, tuple[Ref, ...]] | None:
    p = flattest(ctx.g, term.cls)
    if p.bound or set(term.axes) != {0, 1}:
        return None
    delta = [f for f in p.factors if any(n.op == DELTA for n in ctx.g.classes[f.cls].nodes)]
    rest = tuple(Ref(f.cls, (0,) * len(f.axes)) for f in p.factors if f not in delta)
    if len(delta) != 1 or any(len(f.axes) > 1 for f in rest):
        return None
    return p.coefficient, rest


def _products(ctx: RuleContext, term: Ref) -> Iterator[tuple[Any, Ref, Ref, Dim]]:
    """Yield a term as `coefficient·Σ_k left(0, k)·right(1, k)`, once for each such node of it."""
    g = ctx.g
    for node in list(g.classes[term.cls].nodes):
        if node.op == ADD and len(node.args) == 1:
            inner = g.find(node.args[0])
            over = inner.over(term.axes)
            for k, left, right, rank in _products(ctx, over):
                yield node.attr[0] * k, left, right, rank
        if node.op != CONTRACT or len(node.args) != 2 or len(node.bound) != 1:
            continue
        to = [*term.axes, 2]
        sides = [a.over(to) for a in map(g.find, node.args)]
        sides.sort(key=lambda f: 1 in f.axes)
        if set(sides[0].axes) == {0, 2} and set(sides[1].axes) == {1, 2}:
            yield 1, sides[0], sides[1], node.bound[0]


def _is_symmetric(form: LowRank) -> bool:
    mirrored = tuple({0: 1, 2: 2}[i] for i in form.left.axes)
    return form.left.cls == form.right.cls and mirrored == form.right.axes


class _Solve:
    """Builds one solve; `free` is the output index of the result, `node.out` the summed index.

    The small matrix is `small·I + c·Vᵀ·weight·U`. If the diagonal is a number, `small` is this
    number and there are no weights, so a small number causes no overflow. For any other diagonal,
    `small` is 1 and the weight is 1/d.
    """

    def __init__(
        self,
        ctx: RuleContext,
        sizes: tuple[Dim, ...],
        dtype: str,
        node: Node,
        form: LowRank,
        free: int,
        why: Justification,
    ) -> None:
        self.ctx, self.sizes, self.dtype, self.why = ctx, sizes, dtype, why
        self.form, self.free, self.summed, self.n = form, free, node.out, node.bound[0]
        self.thin = tuple(form.rank if i == free else s for i, s in enumerate(sizes))
        self.inverse = tuple(reciprocal(ctx, f, dtype, why) for f in form.diagonal)
        self.number = not any(f.axes for f in form.diagonal)
        self.weight = () if self.number else self.inverse
        self.scale = 1 if self.number else 1 / form.scale
        self.left = form.left.over({0: free, 2: self.summed})
        self.right = form.right.over({1: self.summed, 2: free})

    def small_solution(self, right: Ref) -> Ref | None:
        """Return w = S⁻¹·Vᵀ·weight·b over the outputs, in which `free` indexes the rank."""
        factors = (self.right, *self._at(self.weight, self.summed), right)
        return self._solved(self._product(factors, self.thin, (self.n,), self.scale))

    def through_left(self, right: Ref) -> Ref | None:
        """Return weight·U·S⁻¹·x, if the right-hand side is the product U·x; else None."""
        inner = flattest(self.ctx.g, right.cls)
        here = len(self.sizes) + 1
        to = [*right.axes, *range(here, here + len(inner.bound))]
        factors = [f.over(to) for f in inner.factors]
        readers = [f for f in factors if self.summed in f.axes]
        m = _index_beside(readers[0], self.form.left, 0, self.summed) if len(readers) == 1 else None
        if m is None or m == self.free:
            return None
        rest = [f for f in factors if f is not readers[0]]
        if m < self.summed:  # U itself, or U with scaled columns: x is the identity
            square = (self.form.rank, self.form.rank)
            delta = self.ctx.g.add(DELTA, None, (), square, (), self.dtype, self.why)
            rest.append(delta.over((self.free, m)))
        index = {i: i - (i > self.summed) - (i > m > self.summed) for i in range(here + len(to))}
        index[m] = self.free if m > self.summed else m
        over = tuple(f.over(index) for f in rest)
        bound = tuple(s for i, s in enumerate(inner.bound, here) if i != m)
        if not over:
            return None
        t = self._solved(self._product(over, self.thin, bound, inner.coefficient))
        return self._spread(t, self.scale)

    def refined(self, right: Ref) -> Ref | None:
        """Return the result over the outputs: the difference, and one correction of it."""
        g, form = self.ctx.g, self.form
        w = self.small_solution(right)
        there = right.moved(self.summed, self.free)
        taken = (
            self._product((self.left, self._thin(w)), self.sizes, (form.rank,), 1) if w else None
        )
        if w is None or taken is None:
            return None
        rest = self._whole((1, -form.coefficient), (there, taken), self.sizes)
        first = self._product((rest, *self._at(self.inverse, self.free)), self.sizes, (), 1)
        assert first is not None
        first = scaled(g, first, 1 / form.scale, self.sizes, self.why)
        again = (self.right, first.moved(self.free, self.summed))
        read = self._product(again, self.thin, (self.n,), 1)
        if read is None:
            return None
        correction = self._solved(self._whole((1, -1), (w, read), self.thin))
        last = self._spread(correction, form.coefficient * self.scale)
        return None if last is None else self._whole((1, 1), (first, last), self.sizes)

    def _whole(self, attr: tuple[Any, ...], terms: tuple[Ref, ...], sizes: tuple[Dim, ...]) -> Ref:
        """Return a sum whose terms nearly cancel, and record that no rule may open it.

        Opening the sum would lose the digits that the refinement gains.
        """
        made = self.ctx.g.add(ADD, attr, terms, sizes, (), self.dtype, self.why)
        self.ctx.whole.add(made.cls)
        return made

    def _solved(self, right: Ref | None) -> Ref | None:
        """Return S⁻¹·right over the outputs, in which `free` indexes the rank."""
        inner = self._small()
        if inner is None or right is None:
            return None
        small = inner.over((self.summed, self.free))
        args, rank = (small, self._thin(right)), self.form.rank
        return self.ctx.g.add(SOLVE, None, args, self.thin, (rank,), self.dtype, self.why)

    def _spread(self, t: Ref | None, k: Any) -> Ref | None:
        """Return k·weight·U·t over the outputs."""
        if t is None:
            return None
        factors = (self.left, self._thin(t), *self._at(self.weight, self.free))
        return self._product(factors, self.sizes, (self.form.rank,), k)

    def _small(self) -> Ref | None:
        """Return small·I + c·Vᵀ·weight·U over (k, l)."""
        g, form = self.ctx.g, self.form
        square = (form.rank, form.rank)
        left, right = form.left.over({0: 2, 2: 1}), form.right.over({1: 2, 2: 0})
        made = self._product((right, *self._at(self.weight, 2), left), square, (self.n,), 1)
        one = g.add(DELTA, None, (), square, (), self.dtype, self.why)
        if made is None:
            return None
        if self.number and form.diagonal:
            one = contract(
                g, Product(1, (one, *form.diagonal), 2, ()), square, self.dtype, self.why
            )
        k = (form.scale if self.number else 1, form.coefficient * self.scale)
        return g.add(ADD, k, (one, made), square, (), self.dtype, self.why)

    def _thin(self, ref: Ref) -> Ref:
        return ref.moved(self.free, self.summed)

    @staticmethod
    def _at(factors: tuple[Ref, ...], index: int) -> tuple[Ref, ...]:
        return tuple(Ref(f.cls, (index,) * len(f.axes)) for f in factors)

    def _product(
        self, factors: tuple[Ref, ...], sizes: tuple[Dim, ...], bound: tuple[Dim, ...], k: Any
    ) -> Ref | None:
        p = Product(k, factors, len(sizes), bound)
        if not bound:
            return contract(self.ctx.g, p, sizes, self.dtype, self.why)
        return order_product(self.ctx, p, sizes, self.dtype, self.why)
