"""Distributivity: `a·(b + c) = a·b + a·c`, both ways, and sums of sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count
from typing import Any, NamedTuple

from symjax_rewrite.ir.primitives import dtype_kind
from symjax_rewrite.ir.products import Product, expand_node, flattest, is_half, is_ring, with_scale
from symjax_rewrite.ir.term import ADD, CONTRACT, INVERSE, MAP, Axes, Node, Ref
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.laws import law
from symjax_rewrite.rewriting.product_trees import count_unread
from symjax_rewrite.rewriting.right_side import RightSide
from symjax_rewrite.rewriting.rule import (
    DISTRIBUTIVITY,
    NotBuiltError,
    RuleContext,
    axiom,
    built,
)
from symjax_rewrite.rewriting.scales import apart, shared_power
from symjax_rewrite.rules.cancellation import (
    cannot_cancel,
    diagonal_of,
    is_computed_for,
    is_rounded,
    is_safe,
    keeps_its_size,
    moves_rows,
    sum_node,
)

MAX_SHARED = 4  # common factors of which every subset is tried
MOST_OPENED = 256  # sums within one term of a sum


@axiom(
    law("x·(W + A·B) = x·W + (x·A)·B", x="sd", W="do", A="dr", B="ro"),
    property=DISTRIBUTIVITY,
    on=(CONTRACT,),
    everywhere=True,
)
def distribute(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Distribute a contraction over a sum, if all terms but one are rounded products.

    The error of the distributed form is then that of the written form. If terms cancel, the
    remainder of the computed terms already has an error of this size. LoRA is such a case. The
    other terms are added first: (x·W + b) − s is x·W + (b − s).
    """
    if not node.bound:
        return
    dtype = ctx.g.classes[cls].dtype
    p = expand_node(ctx.g, cls, node, lambda d: False)
    for k, f in enumerate(p.factors):
        total = sum_node(ctx, f.cls)
        if total is None or ctx.g.classes[f.cls].dtype != dtype:
            continue
        total = _with_exact_together(ctx, f.cls, total)
        if not _is_useful(ctx, cls, p, f, total):
            continue
        exact = not is_half(dtype)  # a mean in bfloat16 loses more than the product
        steady = exact and moves_rows(p, f) and keeps_its_size(ctx, total)
        often = sum(1 for x in p.factors if x.cls == f.cls) > 1 and not is_ring(dtype)
        if often and not steady:
            ctx.refuse("distribute", Obstacle.CANCELLATION("squares of sums cancel"), cls)
        elif not steady and not is_safe(ctx, f.cls, total):
            ctx.refuse("distribute", Obstacle.CANCELLATION("terms of unknown sign may cancel"), cls)
        else:
            yield from built(_distributed, RightSide.of(ctx, distribute, cls), p, k, total)


def _with_exact_together(ctx: RuleContext, cls: int, total: Node) -> Node:
    """Return a sum whose terms that are not rounded are one term, no larger than one of them.

    The sum of these terms alone has an error of its own size, however they cancel.
    """
    terms = [*zip(total.attr, total.args, strict=True)]
    exact = [(k, a) for k, a in terms if not is_rounded(ctx, a.cls)]
    largest = max([{*a.axes} for _, a in exact], key=len, default=set())
    if not 1 < len(exact) < len(terms) or any(not largest.issuperset(a.axes) for _, a in exact):
        return total
    others = [(k, a) for k, a in terms if (k, a) not in exact]
    rest = RightSide.of(ctx, distribute, cls).sum(*exact)
    attr, args = zip((1, rest), *others, strict=True)
    return total._replace(attr=attr, args=args)


def _is_useful(ctx: RuleContext, cls: int, p: Product, f: Ref, total: Node) -> bool:
    """Return True if distributing avoids a term.

    The term is a low-rank product, or any product if the result is smaller, or it is constant along
    a summed index. Diagonals alone are all avoided.
    """
    if p.bound and all(diagonal_of(ctx, a) for a in total.args):
        return True
    dense = ctx.elements(f.cls)
    thin = ctx.elements(cls) < dense
    for arg in total.args:
        read = {f.axes[i] for i in arg.axes}
        if any(i >= p.out and i not in read for i in f.axes):
            return True
        factors = flattest(ctx.g, arg.cls).factors
        if len(factors) > 1 and (thin or dense > sum(ctx.elements(x.cls) for x in factors)):
            return True
    return False


def _distributed(r: RightSide, p: Product, k: int, total: Node) -> Ref:
    terms = []
    for coefficient, arg in zip(total.attr, total.args, strict=True):
        inner = flattest(r.g, arg.cls)
        inner = inner._replace(coefficient=inner.coefficient * coefficient)
        inner = with_scale(inner, coefficient, r.dtype)
        outer, opened = apart(splice(p, k, arg.over(p.factors[k].axes), inner))
        terms.append((outer, r.ordered(opened)))
    return r.sum(*terms)


def splice(p: Product, k: int, at: Ref, inner: Product) -> Product:
    """Return the product with factor k replaced by `inner`, whose outputs read the axes of `at`."""
    to = [*at.axes, *(p.summed.stop + j for j in range(len(inner.bound)))]
    opened = tuple(f.over(to) for f in inner.factors)
    return Product(
        p.coefficient * inner.coefficient,
        p.factors[:k] + opened + p.factors[k + 1 :],
        p.out,
        p.bound + inner.bound,
        p.precision,
        p.scales + inner.scales,
    )


@axiom(
    law("(a*a + 2*(b*b)) + 3*(b*b) = a*a + 5*(b*b)", kinds="F", a="ij", b="ij"),
    law("a + 0 = 1*a", a="ij"),
    property=DISTRIBUTIVITY,
    on=(ADD,),
)
def flatten_sum(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Flatten sums of sums used once, and count like terms of one sign.

    If terms may cancel, exact terms stay in the sum in which they were written. In `(a − b) + x·W`
    a − b is exact for close a and b, and the rounded a + x·W is not. So it is for a rounded b that
    many entries share, as a mean: readers of the sum may undo one error of all. In `s − mean(s)`
    both terms read one rounded s, and s stays closed.
    """
    g, dtype = ctx.g, ctx.g.classes[cls].dtype
    terms, beside = _Terms(), {g.find(a).cls for a in node.args}
    for coefficient, arg in zip(node.attr, node.args, strict=True):
        arg = g.find(arg)
        if ctx.is_zero(arg.cls) and len(node.args) > 1:
            continue
        for k, ref in _all_terms(ctx, arg, dtype, beside):
            if not terms.put(ref, k * coefficient, is_ring(dtype)):
                return
    if not terms or (len(terms) == len(node.args) and set(terms) == set(node.args)):
        return
    if any(v == 0 for v in terms.values()) or (is_half(dtype) and len(terms) < len(node.args)):
        return
    yield RightSide.of(ctx, flatten_sum, cls).sum(*terms.pairs())


class _Terms(dict[Ref, Any]):
    """The terms of a sum with their coefficients; equal terms of one sign are counted."""

    def put(self, ref: Ref, k: Any, ring: bool) -> bool:
        """Add a term; return False if it might cancel an equal term."""
        old = self.get(ref, 0)
        if any(isinstance(x, complex) for x in (old, k)):
            counted = old == k
        else:
            counted = ring or (old > 0) == (k > 0)
        counted = counted or ref not in self
        self[ref] = old + k
        return counted

    def pairs(self) -> Iterator[tuple[Any, Ref]]:
        """Yield the coefficients and the terms."""
        return ((k, ref) for ref, k in self.items())


def _all_terms(
    ctx: RuleContext, arg: Ref, dtype: str, beside: set[int]
) -> Iterator[tuple[Any, Ref]]:
    """Yield the terms that a term of a sum contributes, through nested sums.

    A sum may be equal to a term within it (`a = (a + b) − b`), so no sum is opened inside itself.
    beside: the classes of all terms; those of opened sums are added.
    """
    stack: list[tuple[Any, Ref, frozenset[int]]] = [(1, arg, frozenset())]
    opened = 0
    while stack:
        k, ref, within = stack.pop()
        closed = ref.cls in within or opened == MOST_OPENED
        within |= {ref.cls}
        inner = None if closed else _inner_terms(ctx, ref, dtype, k, beside - within)
        if inner is None:
            yield k, ref
            continue
        opened += 1
        beside.update([ctx.g.find(a).cls for _, a in inner])
        for j, a in reversed(inner):
            stack.append((k * j, a.over(ref.axes), within))


def _inner_terms(
    ctx: RuleContext, arg: Ref, dtype: str, scale: Any, beside: set[int]
) -> list[tuple[Any, Ref]] | None:
    """Return the terms of a nested sum over its slots.

    The result is None if `scale` might make them infinite, or if a term beside the sum reads it.
    """
    closed = ctx.uses(arg.cls) > 1 or ctx.is_whole(arg.cls) or ctx.g.classes[arg.cls].dtype != dtype
    inner = next(iter(ctx.g.nodes(arg.cls, ADD)), None)
    if closed or inner is None:
        return None
    opened = list(zip(inner.attr, inner.args, strict=True))
    steady = not is_half(dtype) and keeps_its_size(ctx, inner)
    if steady or cannot_cancel(ctx, arg.cls, inner):
        return opened
    large = abs(scale) > 1 and dtype_kind(dtype) == "f"
    shared = len(ctx.g.uses[arg.cls]) > 1 and is_computed_for(ctx, {arg.cls}, beside)
    if (large or shared) and len(opened) > 1:
        return None
    size = len(ctx.g.classes[arg.cls].sizes)
    apart = lambda a: is_rounded(ctx, a.cls) and len({*a.axes}) == size  # noqa: E731
    exact = [
        (k, a) for k, a in opened if not (apart(a) or ctx.frozen(a.cls))
    ]  # frozen terms are folded into one constant
    if len(exact) <= 1:
        return opened
    if len(exact) == len(opened):
        return None
    rest = RightSide.of(ctx, flatten_sum, arg.cls).sum(*exact)
    return [(1, rest), *((k, a) for k, a in opened if (k, a) not in exact)]


@axiom(
    law("a·b + a·c = a·(b + c)", a="nd", b="do", c="do"),
    property=DISTRIBUTIVITY,
    on=(ADD,),
    not_after=("distribute", "factor"),
)
def factor(ctx: RuleContext, cls: int, node: Node) -> Iterator[Ref]:
    """Factor a sum of products: shared factors are taken out.

    A low-rank remainder (a product larger than its factors) is materialised only if it depends on
    frozen weights alone, or is no larger than the sum and the device's products do not round it.
    Right-hand sides of a solve are never added first: if they are large where the matrix is,
    A⁻¹·b + A⁻¹·c keeps digits that A⁻¹·(b + c) loses. A sum that has one value twice is left: x − x
    is exactly 0, and would not be if each x were taken apart otherwise.
    """
    if len({*node.args}) < len(node.args):
        return
    r, terms = RightSide.of(ctx, factor, cls), []
    sizes, fresh = dict(r.sizes), count(len(r.out))
    for k, (coefficient, arg) in enumerate(zip(node.attr, node.args, strict=True)):
        inner = flattest(ctx.g, arg.cls)
        if ctx.g.classes[arg.cls].dtype != r.dtype or not inner.bound:
            continue
        solved = any(ctx.has(f.cls, INVERSE) for f in inner.factors)
        if solved and not ctx.permits("cancels", r.dtype):
            ctx.refuse("factor", "a solve magnifies the rounding of a sum before it", cls)
            continue
        bound = {next(fresh): size for size in inner.bound}
        sizes |= bound
        factors = tuple([f.over([*arg.axes, *bound]) for f in inner.factors])
        terms.append(_Term(k, coefficient * inner.coefficient, factors, (*bound,), inner.precision))
    r, seen = replace(r, sizes=sizes), set()
    for group, shared in _shared_factors(terms, len(r.out)):
        key = (tuple(t.number for t in group), tuple(sorted(shared)))
        if key not in seen:
            seen.add(key)
            yield from built(_factored, r, node, group, shared)


class _Term(NamedTuple):
    """One product of a sum: its place, its factors over named indices, its summed indices."""

    number: int
    coefficient: Any
    factors: tuple[Ref, ...]
    bound: tuple[int, ...]
    precision: Any


Match = tuple[tuple[int, ...], ...]  # for every shared factor: its number in each term
Renaming = dict[int, int]  # of the summed indices of one term to those of another


def _shared_factors(terms: list[_Term], out: int) -> Iterator[tuple[list[_Term], Match]]:
    """Yield groups of terms, with the sets of factors that they share."""
    for first in range(len(terms) - 1):
        before = {f.cls for t in terms[:first] for f in t.factors}
        for anchor, f in enumerate(terms[first].factors):
            if f.cls not in before:
                yield from _anchored(terms[first:], anchor, out)


def _anchored(terms: list[_Term], anchor: int, out: int) -> Iterator[tuple[list[_Term], Match]]:
    """Yield the terms that share a factor of the first term, with every set of shared factors."""
    lead, *others = terms
    group, maps = [lead], list[Renaming]()
    shared: list[tuple[int, ...]] = [(anchor,)]
    for t in others:
        found = _find(t, lead.factors[anchor], (), {}, out)
        if found is not None:
            group.append(t)
            maps.append(found[1])
            shared[0] += found[:1]
    if len(group) < 2:
        return
    _, *taken = zip(*shared, strict=True)
    for k, f in enumerate(lead.factors):
        pairs: list[tuple[int, Renaming]] = []
        for t, row, known in zip(group[1:], taken, maps, strict=True):
            found = _find(t, f, row, known, out) if k != anchor else None
            if found is None:
                break
            pairs.append(found)
        else:
            shared.append((k, *(place for place, _ in pairs)))
            _, *taken = zip(*shared, strict=True)
            maps = [names for _, names in pairs]
    if len(shared) > MAX_SHARED:
        yield group, (shared[0],)
        yield group, tuple(shared)
        return
    for size in range(1, len(shared) + 1):
        for subset in combinations(shared, size):
            yield group, subset


def _find(
    t: _Term, f: Ref, taken: Sequence[int], known: Renaming, out: int
) -> tuple[int, Renaming] | None:
    """Return the factor of a term that equals f up to names, and the renaming of f's indices."""
    for k, other in enumerate(t.factors):
        renaming = None
        if other.cls == f.cls and k not in taken:
            renaming = _renaming(f.axes, other.axes, known, out)
        if renaming is not None:
            return k, renaming
    return None


def _renaming(mine: Axes, theirs: Axes, known: Renaming, out: int) -> Renaming | None:
    """Return the renaming of indices `mine` to `theirs`, or None; outputs must be equal."""
    found = dict(known)
    for i, j in zip(mine, theirs, strict=True):
        if (i != j) if i < out or j < out else found.setdefault(i, j) != j:
            return None
    return found if len(set(found.values())) == len(found) else None


def _factored(r: RightSide, node: Node, group: list[_Term], shared: Match) -> Ref:
    """Return Σ shared·(Σ of remainders) + the other terms."""
    lead, out = group[0], len(r.out)
    common = [lead.factors[row[0]] for row in shared]
    bound = tuple(dict.fromkeys([i for f in common for i in f.axes if i >= out]))
    power = shared_power([t.coefficient for t in group], r.dtype)
    rest = _remainder(r, group, shared, common, bound, power)
    mixed = any(len({i < out for i in f.axes}) > 1 for f in common)
    if bound and not mixed and _is_made(r.ctx, rest):
        raise r.refused("fused sums would become a product with a matrix that nothing else needs")
    product = r.product((*common, rest), bound, precision=lead.precision)
    inside = {t.number for t in group}
    others = [k for k in range(len(node.args)) if k not in inside]
    if not others:
        return r.scaled(power, product)
    return r.sum((power, product), *((node.attr[k], node.args[k]) for k in others))


def _is_made(ctx: RuleContext, rest: Ref) -> bool:
    """Return True if a sum has elementwise terms, which no fused loop would write to memory."""
    sums = ctx.g.nodes(rest.cls, ADD)
    firsts = (ctx.g.classes[ctx.g.find(a).cls].first for n in sums for a in n.args)
    return any(n.op in (MAP, ADD, CONTRACT) and not n.bound for n in firsts)


def _remainder(
    r: RightSide, group: list[_Term], shared: Match, common: list[Ref], bound: Axes, power: float
) -> Ref:
    """Return the sum of the terms without the shared factors, divided by `power`.

    The sum is over its outputs and the summed indices `bound` of the shared factors.
    """
    terms, storages = [], set[str]()
    for n, t in enumerate(group):
        taken = [row[n] for row in shared]
        renamed: Renaming = {}
        for k, f in zip(taken, common, strict=True):
            found = _renaming(t.factors[k].axes, f.axes, renamed, len(r.out))
            if found is None:
                raise NotBuiltError
            renamed = found
        own = [b for b in t.bound if b not in renamed]
        names = {i: i for i in (*r.out, *own)} | renamed
        left = [f.over(names) for k, f in enumerate(t.factors) if k not in taken]
        count, made = _left_over(r, left, (*r.out, *bound), own, t.precision)
        storages.update(r.ctx.storage(f.cls) for f in left)
        coefficient = t.coefficient if power == 1 else t.coefficient / power
        terms.append((made, coefficient * count))
    if len(storages) > 1:
        stored = ", ".join(sorted(storages))
        raise r.refused(Obstacle.STORAGE(f"weights stored differently ({stored})"))
    total, ring = _Terms(), is_ring(r.dtype)
    if not all(total.put(ref, k, ring) for ref, k in terms):
        raise NotBuiltError
    return r.sum(*total.pairs())


def _left_over(
    r: RightSide, left: list[Ref], out: Axes, own: list[int], precision: Any
) -> tuple[Any, Ref]:
    """Return a count and a product over `out`, without the factors that are taken out."""
    if not left:
        counted = count_unread(Product(1, (), 0, tuple(r.sizes[b] for b in own)), r.dtype)
        return counted.coefficient, r.const(1 if is_ring(r.dtype) else 1.0)
    if len(left) > 1 and not all(r.ctx.frozen(f.cls) for f in left):
        read = sorted({i for f in left for i in f.axes if i in out})
        most = sum(r.ctx.elements(f.cls) for f in left)
        if not r.ctx.model.device.rounds_operands(r.dtype, precision):
            # Else a small update would be lost in the rounded sum with a weight.
            most = max(most, r.ctx.count(r.sizes[i] for i in r.out))
        if r.ctx.count(r.sizes[i] for i in read) > most:
            raise r.refused(Obstacle.CONFLICT("a low-rank product would become dense"))
    return 1, r.product(left, own, precision=precision, out=out)
