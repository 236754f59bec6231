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

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from symjax_rewrite.ir.egraph import Justification
from symjax_rewrite.ir.products import Product, expand_node, flattest
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import ADD, CONTRACT, DELTA, SOLVE, Node, Ref
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import ASSOCIATIVITY, RuleContext, axiom, built


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


@axiom(
    law("solve(d*I(u) + u·uᵀ, b) = z + u·solve(S, w − uᵀ·z), where d = 1 + Σ(u*u)"
        " and S = d*I(uᵀ) + uᵀ·u and w = solve(S, uᵀ·b) and z = (b − u·w)/d",
        kinds="F", u="ir", b="is"),
    property=ASSOCIATIVITY,
    on=(SOLVE,),
    source="Woodbury 1950; Hager 1989; Higham 2002, chapter 12 (the refinement)",
)  # fmt: skip
def low_rank_solve(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a solve with a diagonal plus a low-rank product as a solve of the size of the rank.

    If the diagonal is a number and U = V, every eigenvalue of the small matrix is an eigenvalue of
    the large matrix. The refinement then converges wherever elimination succeeds. With any other
    diagonal it may not converge (a diagonal with a zero has no inverse), so the level is `cancels`.
    """
    for solve in _solves(ctx, cls, node, low_rank_solve.reason(cls)):
        right = ctx.g.find(node.args[1])
        for ref in built(solve.solved, right):
            ctx.whole.update((cls, ref.cls))
            yield ref


@axiom(
    law("uᵀ·solve(d*I(u) + u·uᵀ, b) = solve(d*I(uᵀ) + uᵀ·u, uᵀ·b), where d = 1 + Σ(u*u)",
        kinds="F", u="ir", b="is"),
    property=ASSOCIATIVITY,
    on=(CONTRACT,),
    again=True,
    needs=(SOLVE,),
    source="push-through identity: Henderson & Searle 1981",
)  # fmt: skip
def low_rank_readout(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Rewrite a solve read through its own low-rank factor as a solve of the size of the rank."""
    seen = set[Product]()
    for may_open in (lambda d: False, lambda d: not ctx.has(d, SOLVE)):
        p = expand_node(ctx.g, cls, node, may_open)
        if not p.bound or p in seen:
            continue
        seen.add(p)
        p = p._replace(factors=tuple(map(ctx.g.find, p.factors)))
        for k, f in enumerate(p.factors):
            for inner in ctx.g.nodes(f.cls, SOLVE):
                yield from _read_out(ctx, cls, p, k, inner)


def _read_out(ctx: RuleContext, cls: int, p: Product, k: int, node: Node) -> Iterator[Ref]:
    """Yield the product with `Σ_q right(q, m)·solve(q, …)` replaced by the small solution at m."""
    f, r = p.factors[k], RightSide.of(ctx, low_rank_readout, cls)
    for solve in _solves(ctx, f.cls, node, r.why):
        q = f.axes[solve.free]
        readers = [j for j, x in enumerate(p.factors) if q in x.axes]
        if q < p.out or f.axes.count(q) != 1 or len(readers) != 2:
            continue
        m = _index_beside(p.factors[sum(readers) - k], solve.form.right, 1, q)
        if m is None:
            continue
        read = dict(enumerate(f.axes)) | {solve.free: m}
        rest = [x for j, x in enumerate(p.factors) if j not in readers]
        for w in built(solve.small_solution, ctx.g.find(node.args[1])):
            made = p._replace(factors=(w.over(read), *rest)).without(q)
            yield from built(r.ordered, made)


def _index_beside(f: Ref, side: Ref, slot: int, index: int) -> int | None:
    """Return the index of a factor that is a low-rank side whose `slot` reads `index`, or None."""
    if f.cls != side.cls or f.axes.count(index) != 1:
        return None
    m = f.axes[side.axes.index(2)]
    return m if f.axes[side.axes.index(slot)] == index else None


def _solves(ctx: RuleContext, cls: int, node: Node, why: Justification) -> Iterator[_Solve]:
    """Yield the solves with a diagonal plus a low-rank product equal to a node, where safe."""
    matrix, r = ctx.g.find(node.args[0]), RightSide.of(ctx, why, cls)
    if len(node.bound) != 1 or len(set(matrix.axes)) != 2 or matrix.axes.count(node.out) != 1:
        return
    for found in low_rank_forms(ctx, matrix.cls):
        if not isinstance(found.rank, int) or not 0 < found.rank < ctx.count(node.bound):
            continue  # a matrix without rows needs no elimination
        form = found if matrix.axes[0] == node.out else found.transposed()
        safe = not any(f.axes for f in form.diagonal) and _is_symmetric(form)
        if safe or ctx.permits("cancels", r.dtype):
            yield _Solve(r, node, form, next(i for i in matrix.axes if i != node.out))
        else:
            reason = Obstacle.CANCELLATION("the difference may cancel")
            ctx.refuse(why.rule, reason, why.source)


def low_rank_forms(ctx: RuleContext, matrix: int) -> Iterator[LowRank]:
    """Yield the forms of a matrix as a diagonal plus one product."""
    for total in ctx.g.nodes(matrix, ADD):
        if len(total.args) != 2:
            continue
        for k in (0, 1):
            diagonal = _diagonal(ctx, total.args[k])
            if diagonal is None:
                continue
            for c, left, right, rank in _products(ctx, total.args[1 - k]):
                scale, factors = diagonal
                c = total.attr[1 - k] * c
                yield LowRank(total.attr[k] * scale, factors, c, left, right, rank)


def _diagonal(ctx: RuleContext, term: Ref) -> tuple[Any, tuple[Ref, ...]] | None:
    p = flattest(ctx.g, term.cls)
    if p.bound or set(term.axes) != {0, 1}:
        return None
    delta = [f for f in p.factors if ctx.has(f.cls, DELTA)]
    rest = tuple(_at(0, [f for f in p.factors if f not in delta]))
    if len(delta) != 1 or any(len(f.axes) > 1 for f in rest):
        return None
    return p.coefficient, rest


def _at(index: int, factors: Iterable[Ref]) -> Iterator[Ref]:
    """Yield factors, all of whose indices are read at one index."""
    return (Ref(f.cls, (index,) * len(f.axes)) for f in factors)


def _products(ctx: RuleContext, term: Ref) -> Iterator[tuple[Any, Ref, Ref, Dim]]:
    """Yield a term as `coefficient·Σ_k left(0, k)·right(1, k)`, once for each such node of it."""
    for node in ctx.g.nodes(term.cls, ADD, CONTRACT):
        if node.op == ADD and len(node.args) == 1:
            inner = ctx.g.find(node.args[0]).over(term.axes)
            for k, left, right, rank in _products(ctx, inner):
                yield node.attr[0] * k, left, right, rank
        if node.op != CONTRACT or len(node.args) != 2 or len(node.bound) != 1:
            continue
        sides = [ctx.g.find(a).over([*term.axes, 2]) for a in node.args]
        sides.sort(key=lambda f: 1 in f.axes)
        if set(sides[0].axes) == {0, 2} and set(sides[1].axes) == {1, 2}:
            yield 1, sides[0], sides[1], node.bound[0]


def _is_symmetric(form: LowRank) -> bool:
    mirrored = tuple({0: 1, 2: 2}[i] for i in form.left.axes)
    return form.left.cls == form.right.cls and mirrored == form.right.axes


class _Solve:
    """Builds one solve; `free` is the output index of the result, `summed` the summed index.

    The small matrix is `small·I + c·Vᵀ·weight·U`. If the diagonal is a number, `small` is this
    number and there are no weights, so a small number causes no overflow. For any other diagonal,
    `small` is 1 and the weight is 1/d. The indices k and l are of the rank, and so is `free` in the
    terms of `thin`.
    """

    def __init__(self, r: RightSide, node: Node, form: LowRank, free: int) -> None:
        self.form, self.free, self.summed = form, free, node.out
        self.k, self.l = node.out + 1, node.out + 2
        sizes = {**r.sizes, self.summed: node.bound[0], self.k: form.rank, self.l: form.rank}
        self.r = replace(r, sizes=sizes)
        self.thin = replace(r, sizes={**sizes, free: form.rank})
        self.inverse = tuple(r.map("reciprocal", f) for f in form.diagonal)
        self.number = not any(f.axes for f in form.diagonal)
        self.weight = () if self.number else self.inverse
        self.scale = 1 if self.number else 1 / form.scale
        self.left = form.left.over({0: free, 2: self.k})
        self.right = form.right.over({1: self.summed, 2: free})

    def solved(self, right: Ref) -> Ref:
        """Return the result over the outputs."""
        return self.through_left(right) or self.refined(right)

    def small_solution(self, right: Ref) -> Ref:
        """Return w = S⁻¹·Vᵀ·weight·b over the outputs, in which `free` indexes the rank."""
        factors = (self.right, *_at(self.summed, self.weight), right)
        return self._solved(self.thin.product(factors, (self.summed,), self.scale))

    def through_left(self, right: Ref) -> Ref | None:
        """Return weight·U·S⁻¹·x, if the right-hand side is the product U·x; else None."""
        inner = flattest(self.r.g, right.cls)
        bound = dict(enumerate(inner.bound, self.l + 1))
        factors = [f.over([*right.axes, *bound]) for f in inner.factors]
        reader, *more = [f for f in factors if self.summed in f.axes]
        m = None if more else _index_beside(reader, self.form.left, 0, self.summed)
        if m is None or m == self.free:
            return None
        thin = replace(self.thin, sizes={**self.thin.sizes, **bound})
        rest = [f.moved(m, self.free) if m in bound else f for f in factors if f is not reader]
        if m not in bound:  # U itself, or U with scaled columns: x is the identity
            rest.append(thin.delta(self.free, m))
        if not rest:
            return None
        t = thin.product(rest, [i for i in bound if i != m], inner.coefficient)
        return self._spread(self._solved(t), self.scale)

    def refined(self, right: Ref) -> Ref:
        """Return the result over the outputs: the difference, and one correction of it."""
        form, free = self.form, self.free
        w = self.small_solution(right)
        taken = self.r.product((self.left, w.moved(free, self.k)), (self.k,))
        there = right.moved(self.summed, free)
        rest = _whole(self.r, (1, there), (-form.coefficient, taken))
        first = self.r.term(CONTRACT, (rest, *_at(free, self.inverse))) if self.inverse else rest
        first = self.r.scaled(1 / form.scale, first)
        read = self.thin.product((self.right, first.moved(free, self.summed)), (self.summed,))
        correction = self._solved(_whole(self.thin, (1, w), (-1, read)))
        last = self._spread(correction, form.coefficient * self.scale)
        return _whole(self.r, (1, first), (1, last))

    def _solved(self, right: Ref) -> Ref:
        """Return S⁻¹·right over the outputs, in which `free` indexes the rank."""
        args = (self._small().moved(self.l, self.free), right.moved(self.free, self.k))
        return self.thin.term(SOLVE, args, out=self.thin.out, summed=(self.k,))

    def _spread(self, t: Ref, k: Any) -> Ref:
        """Return k·weight·U·t over the outputs."""
        factors = (self.left, t.moved(self.free, self.k), *_at(self.free, self.weight))
        return self.r.product(factors, (self.k,), k)

    def _small(self) -> Ref:
        """Return small·I + c·Vᵀ·weight·U over (k, l)."""
        form, r = self.form, self.r
        left = form.left.over({0: self.summed, 2: self.l})
        right = form.right.over({1: self.summed, 2: self.k})
        factors = (right, *_at(self.summed, self.weight), left)
        made = r.product(factors, (self.summed,), out=(self.k, self.l))
        one = r.delta(self.k, self.l)
        if self.number and form.diagonal:
            one = r.term(CONTRACT, (one, *form.diagonal))
        small = form.scale if self.number else 1
        return r.sum((small, one), (form.coefficient * self.scale, made))


def _whole(r: RightSide, *terms: tuple[Any, Ref]) -> Ref:
    """Return a sum whose terms nearly cancel, and record that no rule may open it.

    Opening the sum would lose the digits that the refinement gains.
    """
    made = r.sum(*terms)
    r.ctx.whole.add(made.cls)
    return made
