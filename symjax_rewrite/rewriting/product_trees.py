"""Flattened products as trees of binary contractions in the cheapest order.

Contraction order is not saturated: only the tree found by dynamic programming becomes nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from operator import or_
from typing import Any

from symjax_rewrite.cost.term_cost import itemsize
from symjax_rewrite.ir.egraph import Justification
from symjax_rewrite.ir.products import Product, is_half, scaled
from symjax_rewrite.ir.sizes import Dim
from symjax_rewrite.ir.term import CONTRACT, DELTA, MAP, Node, Ref, canonical
from symjax_rewrite.obstacles import Obstacle
from symjax_rewrite.rewriting.contraction_order import (
    CostOf,
    Repeats,
    Tree,
    best_order,
    renumbered,
    rows_of,
)
from symjax_rewrite.rewriting.rule import NotBuiltError, RuleContext, built, too_large
from symjax_rewrite.rewriting.scales import Leaf, apart, leaves_of, place, scaled_factor


def order_product(
    ctx: RuleContext, p: Product, sizes: tuple[Dim, ...], dtype: str, why: Justification
) -> Ref:
    """Return the product over output indices of `sizes`, as nodes that can be emitted.

    Raises:
        NotBuiltError: the budget is exhausted, a count cannot leave the sum, or a product in it may
            overflow.
    """
    key = (p, sizes, dtype)
    if key not in ctx.ordered:
        ctx.ordered[key] = next(built(_order, ctx, p, sizes, dtype, why), None)
    found = ctx.ordered[key]
    if found is None:
        raise NotBuiltError
    return ctx.g.find(found)


def _order(
    ctx: RuleContext, p: Product, sizes: tuple[Dim, ...], dtype: str, why: Justification
) -> Ref | None:
    counted = count_unread(read_deltas(ctx, p), dtype)
    if not counted.factors:
        return None
    outer, counted = apart(counted, counted.coefficient / p.coefficient if p.scales else 1)
    builder = _TreeBuilder(ctx, counted, sizes, dtype, why)
    found = builder.solve()
    if any(ctx.may_overflow(c) for c in builder.inner):
        ctx.refuse(why.rule, too_large(dtype), why.source)
        return None
    return scaled(ctx.g, found, outer, sizes, why)


def read_deltas(ctx: RuleContext, p: Product) -> Product:
    """Return a product without its deltas: Σ_j δ_ij f(j) = f(i), for every bound index j."""
    for k, f in enumerate(p.factors):
        if ctx.g.find(f).cls != f.cls or not ctx.has(f.cls, DELTA):
            continue
        stays, gone = sorted(f.axes)
        if stays != gone and (gone < p.out or len(p.factors) == 1):
            continue
        rest = (*p.factors[:k], *p.factors[k + 1 :])
        p = p._replace(factors=tuple([f.moved(gone, stays) for f in rest]))
        return read_deltas(ctx, p if stays == gone else p.without(gone))
    return p


def count_unread(p: Product, dtype: str) -> Product:
    """Return a product over the indices that are read: Σ_k a = |k|·a if no factor reads k.

    Raises:
        NotBuiltError: the count is not known, is 0, or would be rounded.
    """
    read = {i for f in p.factors for i in f.axes}
    for i in range(p.out + len(p.bound) - 1, p.out - 1, -1):
        if i in read:
            continue
        size = p.bound[i - p.out]
        if not isinstance(size, int) or size == 0 or (is_half(dtype) and size > 1):
            raise NotBuiltError
        p = p._replace(coefficient=p.coefficient * size).without(i)
    return p


class _TreeBuilder:
    """Builds the nodes of one product's cheapest tree; sets of indices and factors are bit sets."""

    def __init__(
        self, ctx: RuleContext, p: Product, sizes: tuple[Dim, ...], dtype: str, why: Justification
    ) -> None:
        self.ctx, self.p, self.dtype, self.why = ctx, p, dtype, why
        self.all_sizes: tuple[Dim, ...] = (*sizes, *p.bound)
        self.numbers = [s if isinstance(s, int) else ctx.model.at(s) for s in self.all_sizes]
        self.out_mask = (1 << p.out) - 1
        self.whole = [_mask([f]) for f in p.factors]
        self.inner: list[int] = []  # classes of the products within the tree
        self._count = _Volumes(self.numbers).__getitem__

    def solve(self) -> Ref:
        factors = [self._sum_private(k) for k in range(len(self.whole))]
        masks = [_mask([f]) for f in factors]
        arrays = [k for k, mask in enumerate(masks) if mask]
        scalars = [k for k, mask in enumerate(masks) if not mask]
        if not arrays or not scalars or is_half(self.dtype):
            return self._build(self._best(range(len(masks)), factors, masks), factors, masks)
        tree = self._best(arrays, factors, masks)
        at = self._smallest(tree, scalars, factors, masks)
        scale = functools.reduce(lambda a, b: (a, b), scalars)
        return self._build(_multiplied(tree, at, scale), factors, masks)

    def _best(self, ids: Sequence[int], factors: list[Ref], masks: list[int]) -> Tree:
        """Return the cheapest tree over some factors."""
        if len(ids) == 1:
            return ids[0]
        ctx, out = self.ctx, self.out_mask
        free = sum(1 << n for n, k in enumerate(ids) if ctx.frozen(factors[k].cls))
        mine, masks = [factors[k] for k in ids], [masks[k] for k in ids]
        number = {cls: n for n, cls in enumerate(dict.fromkeys([f.cls for f in mine]))}
        kinds = [number[f.cls] for f in mine]
        key = (*zip(kinds, [f.axes for f in mine], strict=True), *self.numbers)
        key = (key, out, free, self.dtype)
        tree = ctx.trees.get(key)
        if tree is None:
            form_of = functools.partial(self._form, mine)
            repeats = Repeats(kinds, form_of) if len(number) < len(mine) else None
            least = ctx.model.device.launch_s
            found = best_order(masks, out, self._join_costs(), ctx.pairs, free, repeats, least)
            if found is None:
                reason = Obstacle.BUDGET("the budget of pairs ran out")
                ctx.refuse("contraction_order", reason, self.why.source)
                raise NotBuiltError
            tree = ctx.trees[key] = found[0]
        return renumbered(tree, ids)

    def _smallest(
        self, tree: Tree, scalars: list[int], factors: list[Ref], masks: list[int]
    ) -> Tree:
        """Return the part of a tree that is multiplied with the factors of no index.

        It is the smallest part, but no factor of another dtype: its product would have the dtype of
        the whole, wider than what matrix units multiply. Of equal parts the first is a factor that
        another product multiplies with them too: this is computed once. The next is the whole
        product, whose readers compute the multiplication with their own work.
        """
        g, frozen = self.ctx.g, self.ctx.frozen
        narrow = lambda part: g.classes[factors[part].cls].dtype != self.dtype  # noqa: E731
        users = [n for k in scalars for _, n in g.uses[factors[k].cls]]
        elementwise = [n for n in users if n.op == CONTRACT and not n.bound]
        partners = {g.find(a).cls for n in elementwise for a in n.args}
        is_frozen = all(frozen(factors[k].cls) for k in scalars)

        def order(part: Tree) -> tuple[float, int]:
            if not isinstance(part, int):
                size = self._count(self._kept(masks, leaves_of(part)))
                return size, 1 if part is tree else 2
            f = factors[part]
            size = 0 if is_frozen and frozen(f.cls) else self._count(masks[part])
            return size, 0 if f.cls in partners else 1 if part is tree else 2

        parts = [p for p in _parts(tree) if p is tree or not (isinstance(p, int) and narrow(p))]
        return min(parts, key=order)

    def _kept(self, masks: list[int], inside: int) -> int:
        """Return the indices that a product of some factors is not summed over."""
        read = functools.reduce(or_, [m for k, m in enumerate(masks) if inside >> k & 1])
        return read & self._needed(masks, inside)

    def _needed(self, masks: list[int], inside: int) -> int:
        """Return the indices that are read outside a product of some factors."""
        rest = [m for k, m in enumerate(masks) if not inside >> k & 1]
        return functools.reduce(or_, rest, self.out_mask)

    def _form(self, factors: list[Ref], inside: list[int], kept: int) -> Node:
        """Return the product of some factors over the kept indices, in canonical index names."""
        args = [factors[k] for k in inside]
        mine = sorted({i for f in args for i in f.axes}, key=lambda i: (not kept >> i & 1, i))
        to = {i: n for n, i in enumerate(mine)}
        out = sum(kept >> i & 1 for i in mine)
        over = tuple([f.over(to) for f in args])
        bound = tuple([self.all_sizes[i] for i in mine[out:]])
        return canonical(CONTRACT, self.p.precision, over, out, bound)[0]

    def _in_dtype(self, f: Ref) -> Ref:
        """Return a factor, cast if it is the only one, as the sum over it would be cast."""
        if self.ctx.g.classes[f.cls].dtype == self.dtype:
            return f
        cast = ("convert_element_type", (("new_dtype", self.dtype),))
        return self.ctx.g.apply(MAP, cast, (f,), self.dtype, self.why)

    def _sum_private(self, k: int, scale: Any = 1) -> Ref:
        """Return Σ over the bound indices that only factor k reads, scaled within the sum."""
        others = functools.reduce(or_, self.whole[:k] + self.whole[k + 1 :], self.out_mask)
        return self._node((self._scaled(self.p.factors[k], scale),), others)

    def _node(self, args: tuple[Ref, ...], needed: int) -> Ref:
        """Return the product of args, summed over every index that is not needed outside."""
        mask = _mask(args)
        lost = _bits(mask & ~needed)
        if len(args) == 1 and not lost:
            return args[0]
        given = (self.all_sizes, self.dtype, self.why)
        kept, precision = _bits(mask & needed), self.p.precision
        return self.ctx.g.term(CONTRACT, args, *given, attr=precision, out=kept, summed=lost)

    def _scaled(self, f: Ref, scale: Any) -> Ref:
        return scaled_factor(self.ctx.g, f, scale, self.why)

    def _build(self, tree: Tree, factors: list[Ref], masks: list[int]) -> Ref:
        """Return the product in the order of a tree, with its numbers where they belong."""

        def elements(inside: int) -> float:
            return self._count(self._kept(masks, inside))

        leaves = self._leaves(factors) if self.p.scales else []
        places = place(self.p.scales, tree, leaves, elements, self.dtype)

        def make(t: Tree) -> Ref:
            if isinstance(t, int):
                before = places.before.get(t, 1)
                made = factors[t] if before == 1 else self._sum_private(t, before)
                made = self._in_dtype(made) if t is tree else made
            else:
                needed = self._needed(masks, leaves_of(t))
                made = self._node((make(t[0]), make(t[1])), needed)
                if t is not tree:
                    self.inner.append(made.cls)
            return self._scaled(made, places.after.get(leaves_of(t), 1))

        return self._scaled(make(tree), places.last)

    def _leaves(self, factors: list[Ref]) -> list[Leaf]:
        """Return the factors, summed over their private indices, as places of numbers."""
        frozen, classes = self.ctx.frozen, self.ctx.g.classes
        leaves = []
        for whole, mask, f in zip(self.p.factors, self.whole, factors, strict=True):
            narrow = classes[whole.cls].dtype != self.dtype
            leaves.append(Leaf(whole.cls, self._count(mask), narrow, f != whole, frozen(whole.cls)))
        return leaves

    def _join_costs(self) -> CostOf:
        """Return the function of index sets that gives the seconds of one join."""
        size, count, model = itemsize(self.dtype), self._count, self.ctx.model
        joins, d = model.joins(self.dtype), model.device

        def seconds(left: int, right: int, kept: int) -> float:
            read, made = (count(left) + count(right)) * size, count(kept) * size
            if left & right & ~kept:
                rows = rows_of(left, right, kept, count)
                return joins(2 * count(left | right), read, made, rows)
            return count(left | right) / d.elementwise_per_s + (read + made) / d.bytes_per_s

        return seconds


class _Volumes(dict[int, float]):
    """The number of elements over a set of indices; each is computed once.

    numbers: the size of every index.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.numbers = numbers
        self.half = (1 << len(numbers) // 2) - 1  # few sets of one half occur, in many of the whole

    def __missing__(self, mask: int) -> float:
        one, other = mask & self.half, mask & ~self.half
        if one and other:
            made = self[mask] = self[one] * self[other]
            return made
        made, rest = 1.0, mask
        while rest:
            first = rest & -rest
            made *= self.numbers[first.bit_length() - 1]
            rest ^= first
        self[mask] = made
        return made


def _parts(tree: Tree) -> Iterator[Tree]:
    """Yield a tree and its subtrees."""
    yield tree
    if not isinstance(tree, int):
        for part in tree:
            yield from _parts(part)


def _multiplied(tree: Tree, part: Tree, factor: Tree) -> Tree:
    """Return a tree in which one part is multiplied with one more factor."""
    if tree is part:
        return factor, tree
    if isinstance(tree, int):
        return tree
    return _multiplied(tree[0], part, factor), _multiplied(tree[1], part, factor)


def _mask(refs: Iterable[Ref]) -> int:
    mask = 0
    for ref in refs:
        for i in ref.axes:
            mask |= 1 << i
    return mask


def _bits(mask: int) -> list[int]:
    return [i for i in range(mask.bit_length()) if mask >> i & 1]
